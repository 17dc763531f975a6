//! The SQLite file: how it is opened, looked through, and written.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension as _, Transaction, TransactionBehavior, params};

use threshold_core::KeyId;

use super::queue::Batch;
use super::rebuild::{Fault, Left};
use super::rows::{Row, Total, row_sum};
use super::salvage::{self, Damage, Found, Old};
use super::{JournalError, Kept, KeyIds};
use super::{untold, wal};

/// The version of the tables below and of the digests in them. 1 was before a digest had a partition.
pub(super) const VERSION: i64 = 2;
/// Who else may have the file open is somebody who copies it, and that takes a moment.
const BUSY: Duration = Duration::from_millis(100);

/// What the lock of a journal is called, beside it.
pub(super) const LOCK: &str = ".lock";

/// No SQLite file is smaller: that is the smallest page.
const SMALLEST: u64 = 512;
/// As many symbolic links in a row as Linux follows.
const MAX_LINKS: usize = 40;
const NO_FOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();

const TABLES: &str = "
    CREATE TABLE meta (name TEXT PRIMARY KEY NOT NULL, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE record (
        kind INTEGER NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL, sum INTEGER NOT NULL,
        PRIMARY KEY (kind, key)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE audit (
        id INTEGER PRIMARY KEY, at INTEGER NOT NULL, who TEXT NOT NULL, action TEXT NOT NULL, about TEXT NOT NULL,
        why TEXT NOT NULL
    ) STRICT;
";

/// An open file, and the sum of what is in it.
#[derive(Debug)]
pub(super) struct JournalFile {
    pub(super) path: PathBuf,
    /// That of the present secret.
    pub(super) key_id: KeyId,
    /// `None` from when it is found damaged until it is whole again.
    pub(super) connection: Option<Connection>,
    pub(super) total: Total,
    pub(super) left: Left,
    /// Held for as long as the file is open: two processes that both decide from memory would overwrite each other.
    pub(super) lock: File,
    /// What was put aside of a file that is not whole again yet.
    pub(super) aside: Option<PathBuf>,
    /// When something was put aside last.
    pub(super) put_aside: Option<Instant>,
    /// The damage that the file records, until it was reported.
    pub(super) untold: Option<Damage>,
}

impl JournalFile {
    pub(super) fn open(path: &Path, keys: KeyIds, missing: Missing) -> Result<(Self, Kept), JournalError> {
        let key_id = keys.present;
        let sqlite = |error| JournalError::Sqlite(path.into(), error);
        let lock = lock(path)?;
        check_version(path)?;
        salvage::finish(path)?;
        let is_new = is_empty(path);
        if is_new {
            make_way(path, missing)?;
        }
        create(path).map_err(|error| JournalError::Io(path.into(), error))?;
        if is_new {
            let mut connection = connect(path).map_err(sqlite)?;
            let (total, _) = make(&mut connection, key_id, &[], None, None).map_err(sqlite)?;
            settle_in(path).map_err(|error| JournalError::Io(path.into(), error))?;
            let kept = Kept { is_new, ..Kept::default() };
            return Ok((Self::new(path, key_id, lock, (connection, total), &kept)?, kept));
        }
        // Whoever opens a log and closes it again has put it away.
        let log_fault = wal::fault(path);
        let aside = log_fault.is_some().then(|| salvage::put_aside(path, "damaged")).transpose();
        let aside = aside.map_err(|error| JournalError::Io(path.into(), error))?;
        let (connection, mut found) = if length(path) < SMALLEST {
            // SQLite would take it for empty, and delete the log.
            (None, Found::unopened(path, "it is shorter than a page".to_owned()))
        } else {
            match connect(path) {
                Ok(connection) => {
                    let mut found = Found::look(&connection, path);
                    found.faults.extend(log_fault);
                    (Some(connection), found)
                }
                Err(error) if is_damage(&error) => (None, Found::unopened(path, error.to_string())),
                Err(error) => return Err(sqlite(error)),
            }
        };
        let is_of = |id: KeyId| found.secret == Some(i64::from(id.to_u32()));
        let rotated = keys.old.filter(|old| is_of(*old));
        let is_sound = connection.is_some() && found.faults.is_empty();
        let is_other = !is_of(key_id) && rotated.is_none();
        if is_other && (is_sound || connection.is_none() && found.secret.is_some()) {
            return Err(JournalError::OtherSecret(path.into()));
        }
        if let Some(old) = rotated {
            found.rows = found.rows.into_iter().map(|row| row.under_old(old).under_present(key_id)).collect();
        }
        match connection {
            Some(connection) if is_sound && rotated.is_some() => {
                salvage::put_anew(path, key_id, &found.rows, found.untold.as_ref(), Some(connection))?;
                let kept = Kept { rows: found.rows, damage: found.untold, is_new };
                Ok((Self::reopened(path, key_id, lock, &kept)?, kept))
            }
            Some(connection) if is_sound => {
                let kept = Kept { rows: found.rows, damage: found.untold, is_new };
                Ok((Self::new(path, key_id, lock, (connection, found.total), &kept)?, kept))
            }
            other => {
                let aside = aside.map_or_else(|| salvage::put_aside(path, "damaged"), Ok);
                let aside = aside.map_err(|error| JournalError::Io(path.into(), error))?;
                let kept = salvage::rebuild(path, key_id, found, other, &aside)?;
                Ok((Self::reopened(path, key_id, lock, &kept)?, kept))
            }
        }
    }

    /// A file that was just written.
    fn reopened(path: &Path, key_id: KeyId, lock: File, kept: &Kept) -> Result<Self, JournalError> {
        let sqlite = |error| JournalError::Sqlite(path.into(), error);
        let connection = connect(path).map_err(sqlite)?;
        let total = stated(&connection).map_err(sqlite)?;
        Self::new(path, key_id, lock, (connection, total), kept)
    }

    fn new(
        path: &Path,
        key_id: KeyId,
        lock: File,
        (connection, total): (Connection, Total),
        kept: &Kept,
    ) -> Result<Self, JournalError> {
        let left = Left::now(path).map_err(|error| JournalError::Io(path.into(), error))?;
        let (path, connection, untold) = (path.into(), Some(connection), kept.damage.clone());
        Ok(Self { path, key_id, connection, total, left, lock, aside: None, put_aside: None, untold })
    }

    /// Writes a batch, and returns when it is on disk; an empty one only looks whether the file is still as it was left.
    pub(super) fn write(&mut self, batch: &Batch) -> Result<(), Fault> {
        self.look_again()?;
        if !batch.is_empty() {
            self.commit(batch)?;
            self.left = Left::now(&self.path)?;
        }
        Ok(())
    }

    fn commit(&mut self, batch: &Batch) -> rusqlite::Result<()> {
        let mut total = self.total;
        let connection = self.connection.as_mut().expect("look_again has opened it, or said why not");
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for ((kind, key), value) in &batch.changes {
            put_row(&transaction, &mut total, kind.number(), key, value.as_deref())?;
        }
        if batch.damage_told {
            untold::clear(&transaction, &mut total)?;
        }
        state(&transaction, total)?;
        {
            let mut insert = transaction
                .prepare_cached("INSERT INTO audit (at, who, action, about, why) VALUES (?1, ?2, ?3, ?4, ?5)")?;
            for line in &batch.lines {
                let at = i64::try_from(line.at.micros()).unwrap_or(i64::MAX);
                insert.execute(params![at, line.who, line.action, line.about, line.why])?;
            }
        }
        transaction.commit()?;
        self.total = total;
        if batch.damage_told {
            self.untold = None;
        }
        Ok(())
    }
}

/// Makes the tables and fills in what there is already, and what can be read of a damaged file's audit: how many lines those
/// are is returned too. With a damage, the file records it until it was reported, and each row that has no value.
pub(super) fn make(
    connection: &mut Connection,
    key_id: KeyId,
    rows: &[Row],
    damage: Option<&Damage>,
    old: Option<&Old<'_>>,
) -> rusqlite::Result<(Total, usize)> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute_batch(TABLES)?;
    transaction.pragma_update(None, "user_version", VERSION)?;
    let mut total = Total::default();
    total.add(about_sum(VERSION, i64::from(key_id.to_u32())));
    for (name, value) in [("version", VERSION), ("secret", i64::from(key_id.to_u32())), ("rows", 0), ("sum", 0)] {
        transaction.execute("INSERT INTO meta (name, value) VALUES (?1, ?2)", params![name, value])?;
    }
    for row in rows.iter().filter(|row| row.value.is_some()) {
        put_row(&transaction, &mut total, row.kind.number(), &row.key, row.value.as_deref())?;
    }
    if let Some(damage) = damage {
        untold::record(&transaction, &mut total, damage, rows)?;
    }
    state(&transaction, total)?;
    let lines = old.map_or(Ok(0), |old| old.copy_audit(&transaction))?;
    transaction.commit()?;
    Ok((total, lines))
}

/// What the file says of itself is a row of its own in the sum of all.
pub(super) fn about_sum(version: i64, secret: i64) -> i64 {
    row_sum(0, &version.to_be_bytes(), &secret.to_be_bytes())
}

/// Writes one row and keeps the total right; without a value, removes it.
pub(super) fn put_row(
    transaction: &Transaction<'_>,
    total: &mut Total,
    kind: i64,
    key: &[u8],
    value: Option<&[u8]>,
) -> rusqlite::Result<()> {
    let old: Option<i64> = transaction
        .prepare_cached("SELECT sum FROM record WHERE kind = ?1 AND key = ?2")?
        .query_row(params![kind, key], |row| row.get(0))
        .optional()?;
    if let Some(old) = old {
        total.take(old);
    }
    let Some(value) = value else {
        transaction.prepare_cached("DELETE FROM record WHERE kind = ?1 AND key = ?2")?.execute(params![kind, key])?;
        return Ok(());
    };
    let sum = row_sum(kind, key, value);
    transaction
        .prepare_cached("INSERT OR REPLACE INTO record (kind, key, value, sum) VALUES (?1, ?2, ?3, ?4)")?
        .execute(params![kind, key, value, sum])?;
    total.add(sum);
    Ok(())
}

fn state(transaction: &Transaction<'_>, total: Total) -> rusqlite::Result<()> {
    for (name, value) in [("rows", total.rows), ("sum", total.sum)] {
        transaction.prepare_cached("UPDATE meta SET value = ?2 WHERE name = ?1")?.execute(params![name, value])?;
    }
    Ok(())
}

pub(super) fn stated(connection: &Connection) -> rusqlite::Result<Total> {
    Ok(Total { rows: meta(connection, "rows")?, sum: meta(connection, "sum")? })
}

pub(super) fn meta(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    connection.query_row("SELECT value FROM meta WHERE name = ?1", [name], |row| row.get(0))
}

/// Every commit is on disk before it returns, and readers never stop the writer.
pub(super) fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY)?;
    // Nothing in the file is taken on trust: it may have been changed by anything.
    connection.pragma_update(None, "trusted_schema", false)?;
    connection.pragma_update(None, "cell_size_check", true)?;
    // A page that is no longer in use is emptied: what was deleted must not come back where a damaged file is read by pages.
    connection.pragma_update_and_check(None, "secure_delete", true, |row| row.get::<_, i64>(0))?;
    connection.pragma_update_and_check(None, "journal_mode", "wal", |row| row.get::<_, String>(0))?;
    connection.pragma_update(None, "synchronous", "full")?;
    Ok(connection)
}

/// Closes a file, and leaves it and its log as they are.
pub(super) fn let_go(connection: Option<Connection>) {
    if let Some(connection) = connection {
        let _ = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
    }
}

/// Whether an error says that the file is not what was written, and not that it cannot be reached just now.
pub(super) fn is_damage(error: &rusqlite::Error) -> bool {
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

/// What to do where a journal is missing, or empty, beside files that show that there was one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    Refuse,
    StartNew,
}

/// Makes sure that a new journal is what is wanted in the place of one that is missing or empty.
fn make_way(path: &Path, missing: Missing) -> Result<(), JournalError> {
    let has_content = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|metadata| metadata.len() > 0);
    let log = beside(path, "-wal");
    let traces = [super::secret_path(path), log.clone(), super::counters::counters_path(path)];
    match (traces.into_iter().find(has_content), missing) {
        (Some(trace), Missing::Refuse) => Err(JournalError::Missing(path.into(), trace)),
        // SQLite would delete a log without its file.
        (_, Missing::StartNew) if has_content(&log) => {
            salvage::put_aside(path, "damaged").map(drop).map_err(|error| JournalError::Io(path.into(), error))
        }
        _ => Ok(()),
    }
}

pub(super) fn is_empty(path: &Path) -> bool {
    length(path) == 0
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// The file that a path leads to through symbolic links, whether or not it is there. Every name of a journal leads to the
/// same lock, log and secret, which are beside that file.
pub(super) fn resolve(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(target) = std::fs::read_link(&path) else { break };
        path = folder(&path).join(target);
    }
    match (std::fs::canonicalize(folder(&path)), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path,
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes the file, for its owner alone, if it is not there; fails where it cannot be written.
fn create(path: &Path) -> io::Result<()> {
    open_or_create(path).map(drop)
}

fn open_or_create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(NO_FOLLOW).open(path)
}

/// Makes a file that must not be there, for its owner alone. A link is not followed.
pub(super) fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// As [`create_new`], in the place of one that was left behind by a process that was killed.
pub(super) fn create_exclusively(path: &Path) -> io::Result<File> {
    remove(path)?;
    create_new(path)
}

pub(super) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The name of a file that was just made is on disk too.
pub(super) fn settle_in(path: &Path) -> io::Result<()> {
    File::open(folder(path))?.sync_all()
}

/// Refuses a file that another version of this program has written. It is read without SQLite, which would change it.
pub(super) fn check_version(path: &Path) -> Result<(), JournalError> {
    match salvage::other_version(path) {
        None => Ok(()),
        Some(version) if version > VERSION => Err(JournalError::Newer(path.into(), version)),
        Some(version) => Err(JournalError::Older(path.into(), version)),
    }
}

/// Takes the lock of a journal. It is a file of its own: SQLite's own locks would be let go with it.
pub(super) fn lock(path: &Path) -> Result<File, JournalError> {
    let lock = beside(path, LOCK);
    let io = |error| JournalError::Io(lock.clone(), error);
    let file = open_or_create(&lock).map_err(io)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(JournalError::InUse(path.into())),
        Err(TryLockError::Error(error)) => Err(io(error)),
    }
}

/// A file with the same name and more.
pub(super) fn beside(path: &Path, more: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(more);
    name.into()
}

/// Reads a file that a server may have open, and changes nothing in it.
pub(super) fn read_only(path: &Path) -> Result<Kept, JournalError> {
    let sqlite = |error| JournalError::Sqlite(path.into(), error);
    std::fs::metadata(path).map_err(|error| JournalError::Io(path.into(), error))?;
    check_version(path)?;
    let connection = connect(path).map_err(sqlite)?;
    connection.pragma_update(None, "query_only", true).map_err(sqlite)?;
    Ok(Found::look(&connection, path).untouched(path))
}

/// Copies a sound file, also while it is written to.
pub(super) fn copy(from: &Path, to: &Path) -> Result<(), JournalError> {
    let failed = |error| JournalError::Sqlite(from.into(), error);
    let io = |error| JournalError::Io(to.into(), error);
    std::fs::metadata(from).map_err(|error| JournalError::Io(from.into(), error))?;
    check_version(from)?;
    let made = create_new(to).map_err(io)?;
    let copied = connect(from).and_then(|connection| {
        let name = to.to_str().ok_or_else(|| rusqlite::Error::InvalidPath(to.into()))?;
        connection.execute("VACUUM INTO ?1", [name]).map(drop)
    });
    let copied = copied.map_err(failed).and_then(|()| salvage::sound(to));
    if let Err(error) = copied.and_then(|()| made.sync_all().and_then(|()| settle_in(to)).map_err(io)) {
        let _ = std::fs::remove_file(to);
        return Err(error);
    }
    Ok(())
}
