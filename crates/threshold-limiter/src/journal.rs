//! What outlives the process: bans, strikes, locks and settings, in one SQLite file beside the store in memory.
//!
//! Memory decides; the journal writes down. A change is noted as the latest bytes under its key, so that a hundred strikes
//! of one subject are one row. One thread takes all that was noted, writes it in one transaction, waits for the disk, and
//! then says so. Whoever owes somebody an answer that must not be forgotten waits for that, and nobody else does.

mod counters;
mod file;
mod pages;
mod queue;
mod rebuild;
mod restore;
mod rows;
mod salvage;
mod secret;
mod untold;
mod wal;
mod writer;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use threshold_core::lockout::Account;
use threshold_core::policy::{Ban, Owner, Setting};
use threshold_core::secret::SameKeyId;
use threshold_core::{Digest, Format, KeyId, Secret, Secrets, Standing};
use tokio::sync::watch;

use crate::store::{ChangeSink, Durability};
pub use counters::{Counters, load_counters, save_counters};
use file::{JournalFile, Missing, resolve};
use queue::Queue;
pub use rebuild::Repair;
pub use restore::{Restored, restore, rows_in_memory};
use rows::OldDigests;
pub use rows::{AuditLine, Kind, Row};
pub use salvage::Damage;
use secret::settle_secret;
pub use secret::{GivenSecrets, installation_secrets, old_secret_path, secret_path};
use writer::Source;

/// How long a request that strikes waits for the disk: long enough for one group of writes on a disk that is well, short
/// enough that nobody notices on one that is not.
pub const STRIKE_WAIT: Duration = Duration::from_millis(10);

/// The format of what is written.
const FORMAT: Format = Format::PRESENT;

/// A journal that is open, and the thread that writes it.
pub struct Journal {
    queue: Arc<Queue>,
    path: PathBuf,
    source: Source,
    writer: Mutex<Option<JoinHandle<()>>>,
    old: Arc<OldDigests>,
}

/// The secrets that a journal may have been written under: it is written under the present one from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyIds {
    /// The key id of the present secret.
    pub present: KeyId,
    /// That of the old one, while the secret is rotated.
    pub old: Option<KeyId>,
}

impl From<KeyId> for KeyIds {
    fn from(present: KeyId) -> Self {
        Self { present, old: None }
    }
}

impl From<&Secrets> for KeyIds {
    fn from(secrets: &Secrets) -> Self {
        Self { present: secrets.present().key_id(), old: secrets.old().map(Secret::key_id) }
    }
}

/// What a journal held when it was opened.
#[derive(Debug, Default)]
pub struct Kept {
    /// Its rows. What one says is for its reader to judge.
    pub rows: Vec<Row>,
    /// What was wrong with the file, if anything was: now, or before and not [reported](Journal::damage_told) yet.
    pub damage: Option<Damage>,
    /// Whether there was no such file before.
    pub is_new: bool,
}

/// Why a journal cannot be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum JournalError {
    /// Another process has it open.
    InUse(PathBuf),
    /// It was written under another secret: nothing in it would be recognised.
    OtherSecret(PathBuf),
    /// It was written by a later version of this program.
    Newer(PathBuf, i64),
    /// It was written by an earlier version of this program, whose digests are others.
    Older(PathBuf, i64),
    /// The file, or one beside it, cannot be used.
    Io(PathBuf, std::io::Error),
    /// SQLite cannot use it.
    Sqlite(PathBuf, rusqlite::Error),
    /// The secret beside it is none.
    BadSecret(PathBuf),
    /// The journal is missing or empty, and the second file shows that there was one.
    Missing(PathBuf, PathBuf),
    /// The journal is there, and its secret, the second file, is not.
    SecretMissing(PathBuf, PathBuf),
    /// The secret can be used by others than its owner; these are its permissions.
    OpenSecret(PathBuf, u32),
    /// The present and the old secret are the same, or have the same key id.
    SameSecret(SameKeyId),
    /// There is an old secret, and none to sign with: the second file is missing.
    OldSecretAlone(String, PathBuf),
}

impl fmt::Display for JournalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse(path) => write!(f, "{} is in use by another process", path.display()),
            Self::OtherSecret(path) => write!(
                f,
                "{} was written under another secret: give THRESHOLD_SECRET, or the secret file, as it was then; to \
                 rotate the secret, give that one as THRESHOLD_SECRET_OLD beside the new one; or start with another file",
                path.display()
            ),
            Self::Newer(path, version) => {
                write!(f, "{} has version {version}, which this program does not know", path.display())
            }
            Self::Older(path, version) => {
                let path = path.display();
                write!(
                    f,
                    "{path} has version {version}, which an earlier build wrote and this program does not read; it was left as \
                     it is. Start with another file, or move it away and begin a new one (threshold serve --new-journal)"
                )
            }
            Self::Io(path, error) => write!(f, "cannot use {}: {error}", path.display()),
            Self::Sqlite(path, error) => write!(f, "cannot use {}: {error}", path.display()),
            Self::Missing(path, trace) => {
                let (path, trace) = (path.display(), trace.display());
                write!(
                    f,
                    "{path} is missing or empty, but {trace} shows that there was a journal: its bans, strikes and locks \
                     would be gone. Put it back, or a copy of it (threshold restore COPY --db {path}); or start without \
                     them (threshold serve --new-journal)"
                )
            }
            Self::SecretMissing(path, secret) => {
                let (path, secret) = (path.display(), secret.display());
                write!(
                    f,
                    "{path} is there, and {secret} is missing: without the secret that it was written under nothing in it \
                     is recognised. Put the secret back, or give it as THRESHOLD_SECRET; or start with another file"
                )
            }
            Self::OpenSecret(path, mode) => {
                let path = path.display();
                write!(
                    f,
                    "{path} has the permissions {mode:03o}, so that others can use the secret: run chmod 600 {path}"
                )
            }
            Self::SameSecret(same) => same.fmt(f),
            Self::OldSecretAlone(old, path) => {
                let path = path.display();
                write!(
                    f,
                    "{old} is an old secret, and there is no present one: give THRESHOLD_SECRET, or write a new one to \
                     {path} (umask 077; openssl rand -hex 32 > {path})"
                )
            }
            Self::BadSecret(path) => write!(f, "{} holds no secret: 64 hexadecimal digits are one", path.display()),
        }
    }
}

impl std::error::Error for JournalError {}

/// What was noted is not on disk yet. It is kept in memory, and written as soon as that can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unsaved;

impl fmt::Display for Unsaved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this is not on disk yet")
    }
}

impl std::error::Error for Unsaved {}

impl Journal {
    /// Opens a journal, or makes one, and reads what it holds. A damaged file is put aside, and what could still be read
    /// of it goes into a new one; [`Kept::damage`] says so, then and at every later open until
    /// [`damage_told`](Self::damage_told) is called.
    ///
    /// # Errors
    /// Where the file cannot be used at all, is in use, belongs to another installation, or is missing or empty beside files
    /// that show that there was one.
    pub fn open(path: &Path, keys: impl Into<KeyIds>) -> Result<(Self, Kept), JournalError> {
        Self::open_as(path, keys.into(), Missing::Refuse)
    }

    /// As [`open`](Self::open), but makes a new journal also where files beside it show that there was one.
    ///
    /// # Errors
    /// As `open`, but for [`JournalError::Missing`].
    pub fn open_new(path: &Path, keys: impl Into<KeyIds>) -> Result<(Self, Kept), JournalError> {
        Self::open_as(path, keys.into(), Missing::StartNew)
    }

    fn open_as(path: &Path, keys: KeyIds, missing: Missing) -> Result<(Self, Kept), JournalError> {
        let path = &*resolve(path);
        let (file, kept) = JournalFile::open(path, keys, missing)?;
        settle_secret(path, keys.present)?;
        let old = Arc::new(OldDigests::of(&kept.rows));
        let (queue, source) = (Arc::new(Queue::default()), Source::default());
        let writer = writer::start(file, Arc::clone(&queue), Arc::clone(&source));
        let writer = Mutex::new(Some(writer.map_err(|error| JournalError::Io(path.into(), error))?));
        Ok((Self { queue, path: path.into(), source, writer, old }, kept))
    }

    /// Reads what a journal holds, and changes nothing: for when no server runs.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn read(path: &Path) -> Result<Kept, JournalError> {
        file::read_only(&resolve(path))
    }

    /// A copy of the journal as it is on disk now, in a file that was not there.
    ///
    /// # Errors
    /// Where there is such a file already, and where one of the two cannot be used.
    pub fn copy(from: &Path, to: &Path) -> Result<(), JournalError> {
        file::copy(&resolve(from), to)
    }

    /// Puts a sound copy in the place of a journal that nobody has open. What was there is put aside, and its path returned.
    ///
    /// # Errors
    /// Where the journal is in use, the copy is damaged, or one of the two cannot be used.
    pub fn replace(from: &Path, journal: &Path) -> Result<Option<PathBuf>, JournalError> {
        let journal = &*resolve(journal);
        let _lock = file::lock(journal)?;
        salvage::replace(from, journal)
    }

    /// Who is asked for everything that the journal should hold, where its file is found damaged and must be written anew:
    /// [`rows_in_memory`], and whatever else was noted. `None` is for when that cannot be said any more. It is asked from the
    /// journal's own thread, and set once.
    pub fn with_rebuild_source(&self, everything: impl Fn() -> Option<Vec<Row>> + Send + Sync + 'static) {
        let old = Arc::clone(&self.old);
        let stored = move || everything().map(|rows| rows.into_iter().map(|row| old.stored(row)).collect());
        let _ = self.source.set(Box::new(stored));
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes the latest value under a key; `None` takes it out.
    pub fn note(&self, kind: Kind, key: &[u8], value: Option<Vec<u8>>) {
        let row = self.old.stored(Row { kind, key: key.to_vec(), value });
        self.queue.note(kind, &row.key, row.value);
    }

    /// Notes who changed what, and why. Where so many wait for a disk that one more would be too many, it is refused: what
    /// cannot be written down must not be done.
    ///
    /// # Errors
    /// In that case.
    pub fn audit(&self, line: AuditLine) -> Result<(), Unsaved> {
        self.queue.audit(line)
    }

    /// Begins a change that the audit names. What is noted from here on is written in one transaction with the line that
    /// [`AuditedChange::confirm`] adds, so that after a crash there are both or neither. Nothing at all is written meanwhile:
    /// do not keep it open longer than the change takes.
    ///
    /// # Errors
    /// Where the audit has no room for another line, as for [`audit`](Self::audit). Nothing must be changed then.
    pub fn begin_change(&self) -> Result<AuditedChange, Unsaved> {
        self.queue.begin_change()?;
        Ok(AuditedChange { queue: Arc::clone(&self.queue), line: None })
    }

    /// Removes the record of the damage from the file: to be called once [`Kept::damage`] was reported where an operator sees
    /// it, and after [`restore`]. It is on disk when [`saved`](Self::saved) returns.
    pub fn damage_told(&self) {
        self.queue.damage_told();
    }

    /// Waits until everything that was noted before is on disk, for so long at most. Where the disk is known to be in
    /// trouble and the wait is a short one, it does not wait at all.
    ///
    /// # Errors
    /// Where it is not on disk by then.
    pub async fn saved(&self, at_most: Duration) -> Result<(), Unsaved> {
        self.queue.saved(at_most).await
    }

    /// As [`saved`](Self::saved), where nobody can await.
    fn wait_until_saved(&self, at_most: Duration) {
        let begun = Instant::now();
        while !self.queue.is_clean() && begun.elapsed() < at_most {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What is wrong with the disk, whenever that changes; `None` while nothing is.
    #[must_use]
    pub fn troubles(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.queue.troubles()
    }

    /// What was found damaged while the journal was in use and is whole again, whenever that happens.
    #[must_use]
    pub fn repairs(&self) -> watch::Receiver<Option<Arc<Repair>>> {
        self.queue.repairs()
    }

    /// For how long the oldest change has waited that is not on disk; `None` while all of them are.
    #[must_use]
    pub fn behind(&self) -> Option<Duration> {
        self.queue.behind()
    }

    /// Writes what is left, and ends. Says whether all of it is on disk.
    pub fn close(&self) -> bool {
        self.queue.stop();
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Whoever asks memory for all of it may be the last to hold it, and so the one who ends the journal.
        if let Some(writer) = writer.filter(|writer| writer.thread().id() != std::thread::current().id()) {
            let _ = writer.join();
        }
        self.queue.is_clean()
    }
}

/// A change that has begun, and whose line of the audit is still to come. Dropped without a line, it was not made.
#[derive(Debug)]
#[must_use = "nothing is written to the journal while a change is open"]
pub struct AuditedChange {
    queue: Arc<Queue>,
    line: Option<AuditLine>,
}

impl AuditedChange {
    /// The change was made: the line is written together with it.
    pub fn confirm(mut self, line: AuditLine) {
        self.line = Some(line);
    }
}

impl Drop for AuditedChange {
    fn drop(&mut self) {
        self.queue.end_change(self.line.take());
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("path", &self.path).finish_non_exhaustive()
    }
}

impl ChangeSink for Journal {
    fn standing(&self, key: Digest, standing: Option<&Standing>) {
        self.note(Kind::Standing, &key.to_u128().to_be_bytes(), standing.map(|standing| standing.to_bytes(FORMAT)));
    }

    fn account(&self, key: Digest, account: Option<&Account>) {
        self.note(Kind::Account, &key.to_u128().to_be_bytes(), account.map(|account| account.to_bytes(FORMAT)));
    }

    fn ban(&self, id: Digest, ban: Option<&Ban>) {
        self.note(Kind::Ban, &id.to_u128().to_be_bytes(), ban.map(|ban| ban.to_bytes(FORMAT)));
    }

    fn setting(&self, owner: Owner, name: &str, setting: Option<&Setting>) {
        let kind = if owner == Owner::User { Kind::User } else { Kind::Tenant };
        self.note(kind, name.as_bytes(), setting.map(|setting| setting.to_bytes(FORMAT)));
    }

    fn durability(&self) -> Durability {
        let queue = Arc::clone(&self.queue);
        Box::pin(async move { queue.saved(STRIKE_WAIT).await.is_ok() })
    }

    fn named(&self, subject: Digest, ban: Option<&Ban>) {
        self.note(Kind::Named, &subject.to_u128().to_be_bytes(), ban.map(|ban| ban.to_bytes(FORMAT)));
    }
}
