//! The file of events: opening it, its size, and setting a damaged one aside.

use std::fs::OpenOptions;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};
use threshold_core::event::sql;
use threshold_limiter::files::{self, Trust};

use super::integer;
use super::query::newest;

/// How long SQLite waits for another process. Nobody but an operator's tools should have the file open.
const BUSY_TIMEOUT: Duration = Duration::from_millis(250);
/// The size of a page, which is SQLite's default.
const PAGE: u64 = 4_096;
/// The most of the size that the log takes.
const MAX_LOG: u64 = 8 << 20;
/// The number above which a file is taken for a damaged one: readers in JavaScript know no larger ones.
const MAX_NUMBER: u64 = 1 << 53;
/// The most bytes of a database in memory.
pub(super) const MAX_MEMORY: u64 = 32 << 20;

/// For `threshold why`, and so not in the database of a Worker, which answers no such question.
const TRACE_INDEX: &str =
    "CREATE INDEX IF NOT EXISTS rate_limit_events_trace ON rate_limit_events (event ->> 'traceId')";

/// The bounds of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// The most pages of the database.
    pub(super) pages: u64,
    /// The bytes that the log is cut to.
    log: u64,
}

impl Bounds {
    /// The bounds of a file that has at most this many bytes with its log.
    pub(super) fn of(bytes: u64) -> Self {
        let log = (bytes / 4).min(MAX_LOG);
        // An empty database has about 15 pages.
        Self { pages: (bytes.saturating_sub(log) / PAGE).max(64), log }
    }
}

/// Which file is at a path, and when it was last written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileState {
    device: u64,
    number: u64,
    size: u64,
    written: (i64, i64),
}

impl FileState {
    /// Returns the state of the file at a path; `None` if there is none.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let found = std::fs::metadata(path).ok()?;
        let (device, number, size) = (found.dev(), found.ino(), found.size());
        Some(Self { device, number, size, written: (found.mtime(), found.mtime_nsec()) })
    }

    pub(super) fn is_same_file(self, other: Self) -> bool {
        (self.device, self.number) == (other.device, other.number)
    }
}

/// Returns whether a file that somebody else has written to is still a sound database; `None` if that cannot be said now. Unless
/// `verifies` is set, only its size is looked at.
pub(super) fn is_whole(path: &Path, state: FileState, verifies: bool) -> Option<bool> {
    // SQLite would take it for a new database.
    if state.size == 0 {
        return Some(false);
    }
    if !verifies {
        return None;
    }
    // By a connection of its own: others have pages in memory. Nor is the file opened here, because closing it would end the locks of
    // SQLite's own connections.
    let check =
        |connection: Connection| connection.query_row("PRAGMA quick_check(1)", [], |row| row.get::<_, String>(0));
    match open_for_reading(path).and_then(check) {
        Ok(result) => Some(result == "ok"),
        Err(error) if is_damage(&error) => Some(false),
        Err(_) => None,
    }
}

/// Fails if another user can have planted, or can change, the file or what SQLite applies to it.
pub(super) fn check(path: &Path) -> anyhow::Result<()> {
    for suffix in ["", "-wal", "-shm", "-journal"] {
        let file = with_suffix(path, suffix);
        files::check(&file, Trust::Own).with_context(|| format!("cannot use {}", file.display()))?;
    }
    Ok(())
}

/// Opens or creates the database. A damaged one, or one to which somebody has added something such as a trigger, is set aside first.
pub(super) fn open(path: &Path, bounds: Bounds) -> Result<Connection, anyhow::Error> {
    check(path)?;
    // Created here, because SQLite would leave it to the umask who may read the file.
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connect = || {
        let connection = prepared(guarded(path, flags)?, bounds)?;
        let is_own = has_own_schema(&connection, bounds)?;
        rusqlite::Result::Ok((connection, is_own))
    };
    match connect() {
        Ok((connection, true)) if !is_out_of_numbers(&connection) => return Ok(connection),
        Err(error) if !is_damage(&error) => return Err(error.into()),
        // The connection is closed before its file is renamed.
        Ok(_) | Err(_) => {}
    }
    set_aside(path);
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    Ok(connect()?.0)
}

/// Returns whether there is no number for a further event. Somebody must have written such a number into the file.
pub(super) fn is_out_of_numbers(connection: &Connection) -> bool {
    newest(connection).is_ok_and(|newest| newest >= MAX_NUMBER)
}

/// Opens a database in memory.
pub(super) fn in_memory(bounds: Bounds) -> Result<Connection, anyhow::Error> {
    Ok(prepared(Connection::open_in_memory()?, bounds)?)
}

/// Opens the database once more, for reading.
pub(super) fn open_for_reading(path: &Path) -> rusqlite::Result<Connection> {
    // Not read-only: a reader takes part in the log's shared memory.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = guarded(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "query_only", true)?;
    Ok(connection)
}

/// Opens a file that anybody may have changed: it runs neither triggers nor views, and trusts no function in its schema.
fn guarded(path: &Path, flags: OpenFlags) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(path, flags)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false)?;
    Ok(connection)
}

/// Returns whether a database consists of what this program creates, and of nothing else.
fn has_own_schema(connection: &Connection, bounds: Bounds) -> rusqlite::Result<bool> {
    let definitions = |connection: &Connection| {
        // What `ANALYZE` writes changes how rows are searched for, and nothing else.
        let all = "SELECT type, name, tbl_name, sql FROM sqlite_schema
            WHERE NOT (type = 'table' AND name GLOB 'sqlite_stat*') ORDER BY type, name";
        let mut select = connection.prepare(all)?;
        let found = select.query_map([], |row| {
            Ok::<(String, String, String, Option<String>), _>((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
        })?;
        found.collect::<rusqlite::Result<Vec<_>>>()
    };
    let own = prepared(Connection::open_in_memory()?, bounds)?;
    Ok(definitions(connection)? == definitions(&own)?)
}

fn prepared(connection: Connection, bounds: Bounds) -> rusqlite::Result<Connection> {
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "cell_size_check", true)?;
    connection.pragma_update(None, "page_size", integer(PAGE))?;
    // Before the first table: the file can be made smaller without a second copy of it.
    connection.pragma_update(None, "auto_vacuum", "incremental")?;
    connection.pragma_update_and_check(None, "secure_delete", true, |row| row.get::<_, i64>(0))?;
    connection.pragma_update_and_check(None, "journal_mode", "wal", |row| row.get::<_, String>(0))?;
    // A crash of the process loses nothing; a power loss may lose the last seconds, which is little for an event.
    connection.pragma_update(None, "synchronous", "normal")?;
    let log_pages = (bounds.log / PAGE / 4).max(16);
    connection.pragma_update_and_check(None, "wal_autocheckpoint", integer(log_pages), |row| row.get::<_, i64>(0))?;
    connection.pragma_update_and_check(None, "journal_size_limit", integer(bounds.log), |row| row.get::<_, i64>(0))?;
    connection.pragma_update_and_check(None, "max_page_count", integer(bounds.pages), |row| row.get::<_, i64>(0))?;
    for statement in sql::TABLES {
        connection.execute_batch(statement)?;
    }
    connection.execute_batch(TRACE_INDEX)?;
    Ok(connection)
}

/// Reads a number that SQLite knows of the database.
pub(super) fn number(connection: &Connection, pragma: &str) -> rusqlite::Result<u64> {
    let number: i64 = connection.pragma_query_value(None, pragma, |row| row.get(0))?;
    Ok(u64::try_from(number).unwrap_or(0))
}

/// Makes the database smaller by some pages that are not used.
pub(super) fn release_free_pages(connection: &Connection) -> rusqlite::Result<()> {
    // Each row is one step of it.
    let mut steps = connection.prepare_cached("PRAGMA incremental_vacuum(50)")?;
    let mut steps = steps.query([])?;
    while steps.next()?.is_some() {}
    Ok(())
}

/// Writes the log into the database, and empties it.
pub(super) fn empty_log(connection: &Connection) -> rusqlite::Result<()> {
    let is_busy: i64 = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0))?;
    if is_busy == 0 {
        return Ok(());
    }
    let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY);
    Err(rusqlite::Error::SqliteFailure(code, Some("the log is in use, try again".to_owned())))
}

/// Renames a damaged file, in place of one that was set aside before.
pub(super) fn set_aside(path: &Path) {
    let to = with_suffix(path, ".damaged");
    remove_set_aside(path);
    match std::fs::rename(path, &to) {
        Ok(()) => tracing::error!(file = %to.display(), "damaged file of events set aside, and a new one begun"),
        Err(error) => tracing::error!(reason = %error, "damaged file of events not set aside"),
    }
    // The log belongs to the file, and would be applied to the new one.
    let _ = std::fs::rename(with_suffix(path, "-wal"), with_suffix(&to, "-wal"));
    let _ = std::fs::remove_file(with_suffix(path, "-shm"));
}

/// Removes the log of a file that is gone: it would be applied to the new one.
pub(super) fn remove_log(path: &Path) {
    for suffix in ["-wal", "-shm"] {
        let _ = std::fs::remove_file(with_suffix(path, suffix));
    }
}

/// Removes the file that was set aside.
pub(super) fn remove_set_aside(path: &Path) {
    let aside = with_suffix(path, ".damaged");
    let _ = std::fs::remove_file(with_suffix(&aside, "-wal"));
    let _ = std::fs::remove_file(aside);
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Returns whether there is no room for more, in the file or on the disk.
pub(super) fn is_full(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::DiskFull)
}

/// Returns whether an error means that the file is damaged, and not that it is out of reach for now.
pub(super) fn is_damage(error: &rusqlite::Error) -> bool {
    // Faults of the surroundings may pass. After any other error of SQLite, the file would never work again.
    let Some(code) = error.sqlite_error_code() else { return false };
    !matches!(
        code,
        ErrorCode::DatabaseBusy
            | ErrorCode::DatabaseLocked
            | ErrorCode::DiskFull
            | ErrorCode::OutOfMemory
            | ErrorCode::PermissionDenied
            | ErrorCode::ReadOnly
            | ErrorCode::CannotOpen
            | ErrorCode::FileLockingProtocolFailed
            | ErrorCode::SystemIoFailure
            | ErrorCode::OperationInterrupted
    )
}
