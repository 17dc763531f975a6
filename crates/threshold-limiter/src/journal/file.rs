//! The SQLite database of a journal: opening, committing and copying it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};
use threshold_core::KeyId;

use super::fs::{LOCK, WAL, create_new, is_empty, length, lock, open_or_create, remove, sync_parent, with_suffix};
use super::inspect::Inspection;
use super::queue::Batch;
use super::rebuild::{FileStamps, WriteFault};
use super::rows::Summary;
use super::salvage::{self, Damage};
use super::schema::{NewFile, VERSION, append_audit, initialize, meta, put_row, store_summary, stored_summary};
use super::{Contents, JournalError, KeyIds, commit_mark, damage_record, identify};

/// How long SQLite waits for another process. Nobody but a copy should have the file open, and that takes a moment.
const BUSY_TIMEOUT: Duration = Duration::from_millis(100);
/// The smallest page of SQLite. SQLite takes a file of one byte for an empty database, and deletes its log.
const MIN_PAGE: u64 = 512;

/// An open database, and the state in which this process left it.
#[derive(Debug)]
pub(super) struct JournalFile {
    pub(super) path: PathBuf,
    /// The key id of the present secret.
    pub(super) key_id: KeyId,
    /// `None` from the detection of damage until the database is rebuilt.
    pub(super) connection: Option<Connection>,
    pub(super) summary: Summary,
    pub(super) stamps: FileStamps,
    /// Held for as long as the journal is open: two processes would overwrite each other's rows. Its content is the commit
    /// mark.
    pub(super) lock: File,
    /// The quarantined copy of a damaged database that is not rebuilt yet.
    pub(super) quarantined: Option<PathBuf>,
    /// The time of the last quarantine.
    pub(super) last_quarantine: Option<Instant>,
    /// The damage that the database records until it is reported.
    pub(super) unreported: Option<Damage>,
}

impl JournalFile {
    pub(super) fn open(path: &Path, keys: KeyIds, missing: Missing) -> Result<(Self, Contents), JournalError> {
        // Before the lock, which is a file of its own: nothing is created beside another program's file.
        identify::check_planted(path)?;
        identify::check(path)?;
        let is_first = !std::fs::exists(with_suffix(path, LOCK)).map_err(JournalError::io(path))?;
        let lock = lock(path)?;
        // The same lock: it is held until its file is removed.
        let held = lock.try_clone().map_err(JournalError::io(path))?;
        let opened = Self::open_locked(path, keys, missing, lock);
        if opened.is_err() && is_first {
            // Beside a file that cannot be used it would be the only trace of a journal.
            let _ = remove(&with_suffix(path, LOCK));
        }
        drop(held);
        opened
    }

    fn open_locked(path: &Path, keys: KeyIds, missing: Missing, lock: File) -> Result<(Self, Contents), JournalError> {
        let key_id = keys.present;
        // Before anything is replaced or repaired: the file of another version stays as it is.
        check_version(path)?;
        salvage::finish_replacement(path)?;
        if is_empty(path) {
            return Self::create(path, key_id, lock, missing);
        }
        // Fails early on a file that cannot be written.
        open_or_create(path).map_err(JournalError::io(path))?;
        let mark = commit_mark::read(&lock);
        let (connection, mut inspection) = inspect(path)?;
        // It may have changed what was written. Which rows are right, no checksum says: who could add it could write one too.
        if let Some(added) = inspection.added {
            return Err(JournalError::Added(path.into(), added));
        }
        inspection.check_commits(mark);
        let was_written_under = |id: KeyId| inspection.secret == Some(i64::from(id.to_u32()));
        let rotated = keys.old.filter(|old| was_written_under(*old));
        let is_sound = connection.is_some() && inspection.faults.is_empty();
        let is_foreign = !was_written_under(key_id) && rotated.is_none();
        if is_foreign && (is_sound || connection.is_none() && inspection.secret.is_some()) {
            return Err(JournalError::OtherSecret(path.into()));
        }
        if let Some(old) = rotated {
            inspection.rows = inspection.rows.into_iter().map(|row| row.under_old(old).under_present(key_id)).collect();
        }
        // Never behind the mark, or the new file would be taken for one that has lost commits.
        let new = NewFile { key_id, commits: inspection.commits_with(mark), rows: &[], damage: None };
        match connection {
            Some(connection) if is_sound && rotated.is_some() => {
                let new = NewFile { rows: &inspection.rows, damage: inspection.unreported.as_ref(), ..new };
                // All rows and the key id change together, so that a crash leaves a file that is wholly under one
                // secret.
                salvage::rewrite(path, &new, Some(connection))?;
                let contents = Contents { rows: inspection.rows, damage: inspection.unreported, is_new: false };
                Ok((Self::reopen(path, key_id, lock, &contents)?, contents))
            }
            Some(connection) if is_sound => {
                let contents = Contents { rows: inspection.rows, damage: inspection.unreported, is_new: false };
                Ok((Self::new(path, key_id, lock, (connection, inspection.summary), &contents)?, contents))
            }
            damaged => {
                // The connection is still open: closing it would apply the log, which belongs into the quarantine.
                let quarantine = salvage::quarantine(path, "damaged").map_err(JournalError::io(path))?;
                let contents = salvage::salvage(path, inspection, (new, damaged), &quarantine)?;
                Ok((Self::reopen(path, key_id, lock, &contents)?, contents))
            }
        }
    }

    /// Creates a journal where there is none.
    fn create(path: &Path, key_id: KeyId, lock: File, missing: Missing) -> Result<(Self, Contents), JournalError> {
        check_may_create(path, missing)?;
        // The mark of the previous journal. After a crash before `write_mark` it would accuse the new one of lost commits.
        commit_mark::clear(&lock).map_err(JournalError::io(path))?;
        // Created here, because SQLite would leave it to the umask who may read the file.
        open_or_create(path).map_err(JournalError::io(path))?;
        let mut connection = connect(path).map_err(JournalError::sqlite(path))?;
        let new = NewFile { key_id, commits: 0, rows: &[], damage: None };
        let (summary, _) = initialize(&mut connection, &new, None).map_err(JournalError::sqlite(path))?;
        sync_parent(path).map_err(JournalError::io(path))?;
        let contents = Contents { is_new: true, ..Contents::default() };
        Ok((Self::new(path, key_id, lock, (connection, summary), &contents)?, contents))
    }

    /// Opens a database that was just written.
    fn reopen(path: &Path, key_id: KeyId, lock: File, contents: &Contents) -> Result<Self, JournalError> {
        let connection = connect(path).map_err(JournalError::sqlite(path))?;
        let summary = stored_summary(&connection).map_err(JournalError::sqlite(path))?;
        Self::new(path, key_id, lock, (connection, summary), contents)
    }

    fn new(
        path: &Path,
        key_id: KeyId,
        lock: File,
        (connection, summary): (Connection, Summary),
        contents: &Contents,
    ) -> Result<Self, JournalError> {
        let stamps = FileStamps::read(path).map_err(JournalError::io(path))?;
        let (path, connection, unreported) = (path.into(), Some(connection), contents.damage.clone());
        let (quarantined, last_quarantine) = (None, None);
        let file = Self { path, key_id, connection, summary, stamps, lock, quarantined, last_quarantine, unreported };
        file.write_mark();
        Ok(file)
    }

    /// Commits a batch and returns when it is on disk. An empty batch only verifies that nobody else has changed the files.
    pub(super) fn write(&mut self, batch: &Batch) -> Result<(), WriteFault> {
        self.verify_unchanged()?;
        if !batch.is_empty() {
            self.commit(batch)?;
            self.write_mark();
            // These changes are this process's own, and must not be taken for another's.
            self.stamps = FileStamps::read(&self.path)?;
        }
        Ok(())
    }

    fn commit(&mut self, batch: &Batch) -> rusqlite::Result<()> {
        // A copy, which counts only if the transaction is committed.
        let mut summary = self.summary;
        let connection = self.connection.as_mut().expect("verify_unchanged has opened it, or returned an error");
        // Takes the write lock at once. A deferred transaction could fail half way, when another process has it by
        // then.
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for ((kind, key), value) in &batch.changes {
            put_row(&transaction, &mut summary, kind.number(), key, value.as_deref())?;
        }
        if batch.acknowledges_damage {
            damage_record::clear(&transaction, &mut summary)?;
        }
        summary.commits = summary.commits.saturating_add(1);
        store_summary(&transaction, summary)?;
        for line in &batch.lines {
            append_audit(&transaction, line)?;
        }
        transaction.commit()?;
        self.summary = summary;
        if batch.acknowledges_damage {
            self.unreported = None;
        }
        Ok(())
    }

    /// Writes the commit mark. A mark that cannot be written stays behind the database, where it is still true.
    pub(super) fn write_mark(&self) {
        let _ = commit_mark::write(&self.lock, self.summary.commits);
    }
}

/// Opens and inspects an existing database. There is no connection if SQLite cannot open it.
fn inspect(path: &Path) -> Result<(Option<Connection>, Inspection), JournalError> {
    if length(path) < MIN_PAGE {
        return Ok((None, Inspection::without_sqlite(path, "it is shorter than a page".to_owned())));
    }
    match connect(path) {
        Ok(connection) => {
            let inspection = Inspection::run(&connection, path);
            Ok((Some(connection), inspection))
        }
        Err(error) if is_damage(&error) => Ok((None, Inspection::without_sqlite(path, error.to_string()))),
        Err(error) => Err(JournalError::sqlite(path)(error)),
    }
}

/// Opens a database in WAL mode, with a sync of each commit.
pub(super) fn connect(path: &Path) -> rusqlite::Result<Connection> {
    // If one of these fails, the database and its log go into quarantine as they are.
    let connection = connect_unchanged(path)?;
    // Readers, as a backup is one, do not block the writer in WAL mode.
    connection.pragma_update_and_check(None, "journal_mode", "wal", |row| row.get::<_, String>(0))?;
    // In WAL mode only `full` syncs each commit; `normal` syncs checkpoints alone.
    connection.pragma_update(None, "synchronous", "full")?;
    set_checkpoint_on_close(&connection, true);
    Ok(connection)
}

/// Opens a database to read it, also while a server writes to it. Its bytes and those of its log stay as they are.
pub(super) fn connect_to_read(path: &Path) -> rusqlite::Result<Connection> {
    // Without a log SQLite creates an empty one, and removes it by the checkpoint.
    let has_log = !is_empty(&with_suffix(path, WAL));
    let connection = connect_unchanged(path)?;
    set_checkpoint_on_close(&connection, !has_log);
    Ok(connection)
}

/// Opens a database as it is, and leaves its log when it is closed.
fn connect_unchanged(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = open(path, flags)?;
    set_checkpoint_on_close(&connection, false);
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "cell_size_check", true)?;
    // Overwrites deleted rows with zeros, so that a page scan of a damaged file does not bring them back. A copy has it from its source.
    connection.pragma_update_and_check(None, "secure_delete", true, |row| row.get::<_, i64>(0))?;
    Ok(connection)
}

/// Opens a file that anybody may have changed: it runs neither triggers nor views, and trusts no function in its schema.
pub(super) fn open(path: &Path, flags: OpenFlags) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(path, flags)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false)?;
    Ok(connection)
}

/// Closes a database and leaves it and its log as they are.
pub(super) fn close_without_checkpoint(connection: Option<Connection>) {
    if let Some(connection) = connection {
        set_checkpoint_on_close(&connection, false);
    }
}

fn set_checkpoint_on_close(connection: &Connection, checkpoint: bool) {
    // Fails on an unknown option only, and SQLite is bundled.
    let _ = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, !checkpoint);
}

/// Returns whether an error means that the database is damaged, and not that it is out of reach for now.
pub(super) fn is_damage(error: &rusqlite::Error) -> bool {
    // Only faults of the surroundings are listed, which may pass. After any other error a retry would fail again, and
    // the file is rebuilt.
    !matches!(
        error.sqlite_error_code(),
        Some(
            ErrorCode::DatabaseBusy
                | ErrorCode::DatabaseLocked
                | ErrorCode::DiskFull
                | ErrorCode::OutOfMemory
                | ErrorCode::PermissionDenied
                | ErrorCode::ReadOnly
                | ErrorCode::CannotOpen
                | ErrorCode::FileLockingProtocolFailed
                | ErrorCode::SystemIoFailure
        )
    )
}

/// The behaviour where a journal is missing, or empty, beside files that show that there was one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    Refuse,
    StartNew,
}

/// Fails where a new journal would hide the loss of one.
pub(super) fn check_may_create(path: &Path, missing: Missing) -> Result<(), JournalError> {
    let has_content = |path: &PathBuf| !is_empty(path);
    let log = with_suffix(path, WAL);
    let traces = [super::secret_path(path), log.clone(), super::counters::counters_path(path)];
    match (traces.into_iter().find(has_content), missing) {
        (Some(trace), Missing::Refuse) => Err(JournalError::Missing(path.into(), trace)),
        // SQLite deletes a log without its database.
        (_, Missing::StartNew) if has_content(&log) => {
            salvage::quarantine(path, "damaged").map(drop).map_err(JournalError::io(path))
        }
        _ => Ok(()),
    }
}

/// Refuses a database of another version, and changes no byte of it.
fn check_version(path: &Path) -> Result<(), JournalError> {
    match other_version(path) {
        None => Ok(()),
        Some(version) if version > VERSION => Err(JournalError::Newer(path.into(), version)),
        Some(version) => Err(JournalError::Older(path.into(), version)),
    }
}

/// Returns the version of a database if it is not this program's, and the database states it twice. One that contradicts
/// itself is damaged.
fn other_version(path: &Path) -> Option<i64> {
    if length(path) < MIN_PAGE {
        return None;
    }
    // In exclusive mode SQLite keeps its index of the log in memory, and touches no file. It fails while another process has
    // the database open. Then the index exists, and closing changes nothing because the other process stays.
    let read = |mode: &str| -> rusqlite::Result<Option<i64>> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = open(path, flags)?;
        // Without a log SQLite creates an empty one, and removes it by the checkpoint.
        set_checkpoint_on_close(&connection, is_empty(&with_suffix(path, WAL)));
        connection.busy_timeout(Duration::ZERO)?;
        connection.pragma_update_and_check(None, "locking_mode", mode, |_| Ok(()))?;
        connection.pragma_update(None, "query_only", true)?;
        let own: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
        if own == VERSION {
            return Ok(None);
        }
        Ok(Some(own).filter(|own| meta(&connection, "version").is_ok_and(|stored| stored == *own)))
    };
    read("exclusive").or_else(|_| read("normal")).unwrap_or(None)
}

/// Reads a database that a server may have open, and changes nothing in it.
pub(super) fn read_only(path: &Path) -> Result<Contents, JournalError> {
    std::fs::metadata(path).map_err(JournalError::io(path))?;
    identify::check(path)?;
    check_version(path)?;
    // SQLite finds no tables in a file without content. It is a new journal, or the rest of one that was lost.
    if is_empty(path) {
        return check_may_create(path, Missing::Refuse).map(|()| Contents::default());
    }
    let connection = connect_to_read(path).map_err(JournalError::sqlite(path))?;
    connection.pragma_update(None, "query_only", true).map_err(JournalError::sqlite(path))?;
    Ok(Inspection::run(&connection, path).into_contents(path))
}

/// Copies a sound database, also while a server writes to it.
pub(super) fn copy(from: &Path, to: &Path) -> Result<(), JournalError> {
    std::fs::metadata(from).map_err(JournalError::io(from))?;
    identify::check(from)?;
    check_version(from)?;
    // `VACUUM INTO` accepts an empty file, so the copy keeps the mode 0600.
    let created = create_new(to).map_err(JournalError::io(to))?;
    let copied = connect_to_read(from).and_then(|connection| {
        let name = to.to_str().ok_or_else(|| rusqlite::Error::InvalidPath(to.into()))?;
        connection.execute("VACUUM INTO ?1", [name]).map(drop)
    });
    let copied = copied.map_err(JournalError::sqlite(from)).and_then(|()| salvage::check_sound(to));
    let synced = || created.sync_all().and_then(|()| sync_parent(to)).map_err(JournalError::io(to));
    if let Err(error) = copied.and_then(|()| synced()) {
        let _ = std::fs::remove_file(to);
        return Err(error);
    }
    Ok(())
}
