//! The errors of a journal.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use threshold_core::secret::SameKeyId;

/// The reasons why a journal cannot be opened, read or copied.
///
/// The message does not repeat the cause: print the chain of [`source`](Error::source)s, as `anyhow` does with `{:#}`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// Another process has the journal open.
    #[error("{} is in use by another process", .0.display())]
    InUse(PathBuf),
    /// The journal was written under another secret, so that no digest in it would match.
    #[error(
        "{} was written under another secret: give THRESHOLD_SECRET, or the secret file, as it was then; to rotate the \
         secret, give that one as THRESHOLD_SECRET_OLD beside the new one; or start with another file",
        .0.display()
    )]
    OtherSecret(PathBuf),
    /// The journal has this later version, which this program does not know.
    #[error("{path} has version {1}, which this program does not know", path = .0.display())]
    Newer(PathBuf, i64),
    /// The journal has this earlier version, whose digests differ.
    #[error(
        "{path} has version {1}, which an earlier build wrote and this program does not read; it was left as it is. Start \
         with another file, or move it away and begin a new one (threshold serve --new-journal)",
        path = .0.display()
    )]
    Older(PathBuf, i64),
    /// An operation on this file failed.
    #[error("cannot use {}", .0.display())]
    Io(PathBuf, #[source] io::Error),
    /// SQLite failed on this file.
    #[error("cannot use {}", .0.display())]
    Sqlite(PathBuf, #[source] Box<dyn Error + Send + Sync>),
    /// The file is another program's. It was neither moved nor changed.
    #[error("{} is not a journal of Threshold, and was left as it is: name another file", .0.display())]
    NotAJournal(PathBuf),
    /// The folder, named first, of this journal does not exist.
    #[error("the folder {} of {} does not exist: create it, or name another file", .0.display(), .1.display())]
    NoFolder(PathBuf, PathBuf),
    /// Somebody has added this, such as a trigger, to the tables of the journal. It may have changed what was written.
    #[error(
        "somebody has added the {1} to {path}, which may make bans vanish: put a copy of the journal in its place (threshold restore \
         COPY --db {path}); or, if you know that it does no harm, drop it (sqlite3 {path})",
        path = .0.display()
    )]
    Added(PathBuf, String),
    /// The file is damaged. The text names the first fault.
    #[error("{path} is damaged: {1}", path = .0.display())]
    Damaged(PathBuf, String),
    /// This file or variable does not hold a secret.
    #[error("{} holds no secret: 64 hexadecimal digits are one", .0.display())]
    BadSecret(PathBuf),
    /// The journal is missing or empty, and the second file shows that there was one.
    #[error(
        "{journal} is missing or empty, but {} shows that there was a journal: its bans, strikes and locks would be gone. \
         Put it back, or a copy of it (threshold restore COPY --db {journal}); or start without them (threshold serve \
         --new-journal)",
        .1.display(), journal = .0.display()
    )]
    Missing(PathBuf, PathBuf),
    /// The journal exists, and its secret, the second file, does not.
    #[error(
        "{} is there, and {} is missing: without the secret that it was written under nothing in it is recognised. Put the \
         secret back, or give it as THRESHOLD_SECRET; or start with another file",
        .0.display(), .1.display()
    )]
    SecretMissing(PathBuf, PathBuf),
    /// The present and the old secret are equal, or have the same key id.
    #[error(transparent)]
    SameSecret(SameKeyId),
    /// There is an old secret, named first, and no present one: the second file is missing.
    #[error(
        "{0} is an old secret, and there is no present one: give THRESHOLD_SECRET, or write a new one to {path} (umask 077; \
         openssl rand -hex 32 > {path})",
        path = .1.display()
    )]
    OldSecretAlone(String, PathBuf),
}

impl JournalError {
    /// Returns a function that adds a path to an I/O error.
    pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> Self {
        move |error| Self::Io(path.into(), error)
    }

    /// Returns a function that adds a path to an error of SQLite.
    pub(super) fn sqlite(path: &Path) -> impl Fn(rusqlite::Error) -> Self {
        move |error| Self::Sqlite(path.into(), error.into())
    }

    /// Formats the error and its causes as one line, for texts that an operator reads.
    pub(super) fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }
}

/// The reasons why a change was not made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// Changes are not on disk yet. They stay in memory, and are written as soon as the disk allows.
    #[error("the changes are not on disk yet")]
    NotOnDisk,
    /// The audit log has no room for another line. The change must not be made.
    #[error("too many audit lines wait for the disk")]
    AuditFull,
}

/// The reasons why a file of counters was not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CountersError {
    /// An operation on this file failed.
    #[error("cannot use {}", .0.display())]
    Io(PathBuf, #[source] io::Error),
    /// The file has another version, or was written under another secret.
    #[error("{} has another version, or was written under another secret", .0.display())]
    Unknown(PathBuf),
}
