//! A file that is found damaged, changed or gone while it is in use: it is put aside, and written anew from memory, which
//! holds all that it held.

use std::fmt;
use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::JournalError;
use super::file::{JournalFile, LOCK, beside, connect, is_damage, let_go, lock, stated};
use super::rows::Row;
use super::salvage::{self, Found};
use super::wal;

/// How often a damaged file is kept at most: a disk that damages everything must not be filled with copies.
const ASIDE_EVERY: Duration = Duration::from_secs(3_600);

/// Why something could not be written.
#[derive(Debug)]
pub(super) enum Fault {
    /// The file is not what was written. Waiting does not help.
    Damaged(String),
    /// It cannot be reached just now.
    Cannot(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged(reason) | Self::Cannot(reason) => f.write_str(reason),
        }
    }
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        if is_damage(&error) { Self::Damaged(error.to_string()) } else { Self::Cannot(error.to_string()) }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Cannot(error.to_string())
    }
}

/// A journal that was damaged while it was in use, and is whole again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repair {
    /// What was wrong.
    pub reason: String,
    /// Rows that were written from memory.
    pub rows: usize,
    /// Lines of the audit that could still be read.
    pub lines: usize,
    /// Where the damaged file is; `None` where there was none any more, and where another was kept within the hour.
    pub aside: Option<PathBuf>,
}

impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reason, rows, lines, aside } = self;
        write!(f, "the journal was damaged ({reason}) and is written anew from memory: {rows} rows, ")?;
        write!(f, "and {lines} lines of the audit that could be read; ")?;
        match aside {
            Some(aside) => write!(f, "the damaged file is {}", aside.display()),
            None => f.write_str("of the damaged file nothing was kept"),
        }
    }
}

/// How a journal's files were left: if they are otherwise, somebody else has been there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Left {
    file: Option<Stamp>,
    log: Option<Stamp>,
}

/// Which file it is, and when it was last changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    identity: (u64, u64),
    changed: (u64, i64, i64),
}

impl Left {
    pub(super) fn now(path: &Path) -> io::Result<Self> {
        let stamp = |path: &Path| match std::fs::metadata(path) {
            Ok(metadata) => Ok(Some(Stamp::of(&metadata))),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
            Err(error) => Err(error),
        };
        Ok(Self { file: stamp(path)?, log: stamp(&beside(path, "-wal"))? })
    }

    /// Whether these are the same files, whatever is in them now.
    fn same_files(&self, other: &Self) -> bool {
        let identity = |stamp: &Option<Stamp>| stamp.map(|stamp| stamp.identity);
        identity(&self.file) == identity(&other.file) && identity(&self.log) == identity(&other.log)
    }
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            identity: (metadata.dev(), metadata.ino()),
            changed: (metadata.len(), metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

impl JournalFile {
    /// Finds out whether somebody else has been at the files since the last write. SQLite would not: it has what it read
    /// before, and goes on writing to a file that was deleted.
    pub(super) fn look_again(&mut self) -> Result<(), Fault> {
        self.lock_again()?;
        let now = Left::now(&self.path)?;
        if now == self.left {
            // It was away, and has come back as it was.
            if self.connection.is_none() {
                self.connection = Some(connect(&self.path)?);
            }
            return Ok(());
        }
        if !now.same_files(&self.left) {
            return Err(Fault::Damaged("it was taken away, or another file was put in its place".to_owned()));
        }
        let fresh = connect(&self.path)?;
        let found = Found::look(&fresh, &self.path);
        let lost = wal::fault(&self.path).or_else(|| found.faults.first().cloned());
        let differs = (found.total != self.total).then(|| "its rows are not what was written".to_owned());
        // What is in the log hides what is in the file, so the file may be worse than it looks. A log that somebody has
        // added to, to shorten the audit say, is looked at as a whole.
        let touched = (now.file != self.left.file).then(|| "somebody else has written to it".to_owned());
        match lost.or(differs).or(touched) {
            Some(fault) => {
                let_go(Some(fresh));
                Err(Fault::Damaged(fault))
            }
            None => {
                self.connection = Some(fresh);
                self.left = now;
                Ok(())
            }
        }
    }

    /// Puts the file aside, and writes another from what memory holds; where nobody can say what that is, from what can
    /// still be read. Until the new one is whole, the damaged one stays where it is.
    pub(super) fn write_anew(&mut self, reason: &str, memory: Option<Vec<Row>>) -> Result<Repair, JournalError> {
        let_go(self.connection.take());
        self.set_aside()?;
        let old = connect(&self.path);
        let rows = memory.unwrap_or_else(|| {
            let found = match &old {
                Ok(old) => Found::look(old, &self.path),
                Err(error) => Found::unopened(&self.path, error.to_string()),
            };
            // Rows may be lost here: as at a start, that is recorded until it was reported.
            self.untold = found.damage(self.aside.as_deref().unwrap_or(&self.path)).or_else(|| self.untold.take());
            found.rows
        });
        let old = old.ok();
        let lines = salvage::put_anew(&self.path, self.key_id, &rows, self.untold.as_ref(), old)?;
        let sqlite = |error| JournalError::Sqlite(self.path.clone(), error);
        let connection = connect(&self.path).map_err(sqlite)?;
        self.total = stated(&connection).map_err(sqlite)?;
        self.connection = Some(connection);
        self.left = Left::now(&self.path).map_err(|error| JournalError::Io(self.path.clone(), error))?;
        let rows = rows.iter().filter(|row| row.value.is_some()).count();
        Ok(Repair { reason: reason.to_owned(), rows, lines, aside: self.aside.take() })
    }

    /// Whoever deletes the lock does not mean to let somebody else in.
    fn lock_again(&mut self) -> Result<(), Fault> {
        let held = Stamp::of(&self.lock.metadata()?).identity;
        let there = std::fs::metadata(beside(&self.path, LOCK)).ok().map(|metadata| Stamp::of(&metadata).identity);
        if there != Some(held) {
            self.lock = lock(&self.path).map_err(|error| Fault::Cannot(error.to_string()))?;
        }
        Ok(())
    }

    /// Once for each time that it is damaged, however often it takes to mend that.
    fn set_aside(&mut self) -> Result<(), JournalError> {
        let is_recent = self.put_aside.is_some_and(|since| since.elapsed() < ASIDE_EVERY);
        let io = |error| JournalError::Io(self.path.clone(), error);
        if self.aside.is_none() && !is_recent && std::fs::exists(&self.path).map_err(io)? {
            self.aside = Some(salvage::put_aside(&self.path, "damaged").map_err(io)?);
            self.put_aside = Some(Instant::now());
        }
        Ok(())
    }
}
