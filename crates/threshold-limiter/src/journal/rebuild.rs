//! The rebuild of a journal that is found damaged, changed or missing while it is in use: memory holds every row of it.

use std::fmt;
use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::JournalError;
use super::file::{JournalFile, close_without_checkpoint, connect, is_damage};
use super::fs::{LOCK, WAL, lock, with_suffix};
use super::inspect::Inspection;
use super::rows::Row;
use super::salvage::{quarantine, rewrite};
use super::schema::{NewFile, stored_summary};

/// The shortest time between two quarantined copies: a disk that damages everything must not be filled with them.
const QUARANTINE_INTERVAL: Duration = Duration::from_secs(3_600);

/// The reasons why a batch was not written.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteFault {
    /// The database is not as this process left it. A retry does not help.
    #[error("{0}")]
    Damaged(String),
    /// The database cannot be written for now.
    #[error("{0}")]
    Unavailable(String),
}

impl From<rusqlite::Error> for WriteFault {
    fn from(error: rusqlite::Error) -> Self {
        if is_damage(&error) { Self::Damaged(error.to_string()) } else { Self::Unavailable(error.to_string()) }
    }
}

impl From<io::Error> for WriteFault {
    fn from(error: io::Error) -> Self {
        Self::Unavailable(error.to_string())
    }
}

/// A journal that was damaged while it was in use, and has been rebuilt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Repair {
    /// The fault that was found.
    pub reason: String,
    /// The number of rows that were written from memory.
    pub rows: usize,
    /// The number of audit lines that could be read.
    pub lines: usize,
    /// The path of the quarantined copy of the damaged file; `None` if there was no file any more, or if another copy was
    /// made within the hour.
    pub quarantine: Option<PathBuf>,
}

impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reason, rows, lines, quarantine } = self;
        write!(f, "the journal was damaged ({reason}) and has been rebuilt from memory: {rows} rows, ")?;
        write!(f, "and {lines} lines of the audit that could be read; ")?;
        match quarantine {
            Some(path) => write!(f, "the damaged file is {}", path.display()),
            None => f.write_str("no copy of the damaged file was kept"),
        }
    }
}

/// The identity and the modification times of the database and its log, as this process left them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileStamps {
    database: Option<FileStamp>,
    log: Option<FileStamp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    /// Device and inode.
    identity: (u64, u64),
    /// Length and modification time.
    modified: (u64, i64, i64),
}

impl FileStamps {
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let stamp = |path: &Path| match std::fs::metadata(path) {
            Ok(metadata) => Ok(Some(FileStamp::of(&metadata))),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
            Err(error) => Err(error),
        };
        Ok(Self { database: stamp(path)?, log: stamp(&with_suffix(path, WAL))? })
    }

    /// Returns whether these are the same files, whatever their content.
    fn are_same_files(&self, other: &Self) -> bool {
        let identity = |stamp: &Option<FileStamp>| stamp.map(|stamp| stamp.identity);
        identity(&self.database) == identity(&other.database) && identity(&self.log) == identity(&other.log)
    }
}

impl FileStamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            identity: (metadata.dev(), metadata.ino()),
            modified: (metadata.len(), metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

impl JournalFile {
    /// Verifies that nobody else has changed the files since the last write.
    ///
    /// SQLite does not notice: it answers from its cache, and goes on writing to a file that was deleted.
    pub(super) fn verify_unchanged(&mut self) -> Result<(), WriteFault> {
        // First the lock: without it another process could write while this one compares.
        self.reacquire_lock()?;
        let now = FileStamps::read(&self.path)?;
        if now == self.stamps {
            // The files were out of reach, and are back as they were.
            if self.connection.is_none() {
                self.connection = Some(connect(&self.path)?);
            }
            return Ok(());
        }
        if !now.are_same_files(&self.stamps) {
            return Err(WriteFault::Damaged("it was taken away, or another file was put in its place".to_owned()));
        }
        // A new connection: the old one would answer from its cache.
        let fresh = connect(&self.path)?;
        let inspection = Inspection::run(&fresh, &self.path);
        let differs = (inspection.summary != self.summary).then(|| "its rows are not what was written".to_owned());
        // Pages in the log hide pages of the database, so the database may be worse than it looks. A log that grew while
        // every row stayed the same is that of an operator who shortens the audit.
        let is_touched = now.database != self.stamps.database;
        let touched = is_touched.then(|| "somebody else has written to it".to_owned());
        match inspection.faults.into_iter().next().or(differs).or(touched) {
            Some(fault) => {
                // A checkpoint would write pages of a damaged log into the database.
                close_without_checkpoint(Some(fresh));
                Err(WriteFault::Damaged(fault))
            }
            None => {
                self.connection = Some(fresh);
                self.stamps = now;
                Ok(())
            }
        }
    }

    /// Quarantines the database and writes a new one from memory, or, if memory cannot be read, from what can be salvaged.
    /// The damaged database stays in place until the new one is complete.
    pub(super) fn rebuild(&mut self, reason: &str, memory: Option<Vec<Row>>) -> Result<Repair, JournalError> {
        // A checkpoint would change the file, which is quarantined as it was found.
        close_without_checkpoint(self.connection.take());
        self.quarantine()?;
        let damaged = connect(&self.path);
        let rows = memory.unwrap_or_else(|| {
            let inspection = match &damaged {
                Ok(damaged) => Inspection::run(damaged, &self.path),
                Err(error) => Inspection::without_sqlite(&self.path, error.to_string()),
            };
            // Rows may be lost here. As at a start, the new file records that until it is reported.
            let quarantine = self.quarantined.as_deref().unwrap_or(&self.path);
            self.unreported = inspection.damage(quarantine).or_else(|| self.unreported.take());
            inspection.rows
        });
        let (commits, damage) = (self.summary.commits, self.unreported.as_ref());
        let new = NewFile { key_id: self.key_id, commits, rows: &rows, damage };
        let lines = rewrite(&self.path, &new, damaged.ok())?;
        let connection = connect(&self.path).map_err(JournalError::sqlite(&self.path))?;
        self.summary = stored_summary(&connection).map_err(JournalError::sqlite(&self.path))?;
        self.connection = Some(connection);
        self.stamps = FileStamps::read(&self.path).map_err(JournalError::io(&self.path))?;
        // A row without a value only names what is unreadable.
        let rows = rows.iter().filter(|row| row.value.is_some()).count();
        Ok(Repair { reason: reason.to_owned(), rows, lines, quarantine: self.quarantined.take() })
    }

    /// Takes the lock again if its file was deleted: else a second process could open the journal.
    fn reacquire_lock(&mut self) -> Result<(), WriteFault> {
        let held = FileStamp::of(&self.lock.metadata()?).identity;
        let present = std::fs::metadata(with_suffix(&self.path, LOCK)).ok();
        // By its identity: a new file with the same name is another lock.
        if present.map(|metadata| FileStamp::of(&metadata).identity) != Some(held) {
            self.lock = lock(&self.path).map_err(|error| WriteFault::Unavailable(error.with_causes()))?;
            // The new lock file has no mark yet.
            self.write_mark();
        }
        Ok(())
    }

    /// Copies a damaged database aside, once however often its rebuild is tried.
    fn quarantine(&mut self) -> Result<(), JournalError> {
        let is_recent = self.last_quarantine.is_some_and(|last| last.elapsed() < QUARANTINE_INTERVAL);
        let exists = std::fs::exists(&self.path).map_err(JournalError::io(&self.path))?;
        if self.quarantined.is_none() && !is_recent && exists {
            self.quarantined = Some(quarantine(&self.path, "damaged").map_err(JournalError::io(&self.path))?);
            self.last_quarantine = Some(Instant::now());
        }
        Ok(())
    }
}
