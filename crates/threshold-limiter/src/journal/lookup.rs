//! Reads single parts of a journal's file and changes nothing: the audit log, and the key id of the secret.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, params};
use threshold_core::{KeyId, Timestamp};

use super::file;
use super::fs::{self, resolve};
use super::identify;
use super::rows::AuditLine;
use super::schema::meta;
use super::{Journal, JournalError};

/// How long to wait for the writer: it holds the file for no longer than a commit takes.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);

impl Journal {
    /// Reads at most `limit` lines of the audit log with numbers below `before`, the newest first, also while a server writes to
    /// the file. Each has its number, which never changes.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub fn read_audit(path: &Path, before: Option<u64>, limit: usize) -> Result<Vec<(u64, AuditLine)>, JournalError> {
        let path = &*resolve(path);
        if fs::is_empty(path) && path.exists() {
            return file::read_only(path).map(|_| Vec::new());
        }
        let lines = connect(path)?;
        let before = before.and_then(|before| i64::try_from(before).ok()).unwrap_or(i64::MAX);
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let read = || {
            let query = "SELECT id, at, who, action, about, why FROM audit WHERE id < ?1 ORDER BY id DESC LIMIT ?2";
            let mut query = lines.prepare(query)?;
            let found = query.query_map(params![before, limit], |row| {
                let (id, at): (i64, i64) = (row.get(0)?, row.get(1)?);
                let at = Timestamp::from_micros(u64::try_from(at).unwrap_or(0));
                let (who, action, about, why) = (row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?);
                Ok((u64::try_from(id).unwrap_or(0), AuditLine { at, who, action, about, why }))
            })?;
            found.collect::<rusqlite::Result<Vec<_>>>()
        };
        read().map_err(JournalError::sqlite(path))
    }

    /// Reads the key id of the secret that a journal was last written under.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or is not a journal.
    pub fn read_key_id(path: &Path) -> Result<KeyId, JournalError> {
        let path = &*resolve(path);
        // Read-only, unlike a journal in use: a copy of which this is asked must stay as it is.
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        std::fs::metadata(path).map_err(JournalError::io(path))?;
        let connection = file::open(path, flags).map_err(JournalError::sqlite(path))?;
        let secret = meta(&connection, "secret").map_err(JournalError::sqlite(path))?;
        let id = u32::try_from(secret).map_err(|error| {
            JournalError::sqlite(path)(rusqlite::Error::FromSqlConversionFailure(
                0,
                rusqlite::types::Type::Integer,
                error.into(),
            ))
        })?;
        Ok(KeyId::from_u32(id))
    }
}

fn connect(path: &Path) -> Result<Connection, JournalError> {
    // Without this, the error for a missing file does not say that it is missing.
    std::fs::metadata(path).map_err(JournalError::io(path))?;
    // Before SQLite opens the file: that alone changes the file of another program.
    identify::check(path)?;
    let open = || {
        let connection = file::connect_to_read(path)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.pragma_update(None, "query_only", true)?;
        rusqlite::Result::Ok(connection)
    };
    open().map_err(JournalError::sqlite(path))
}
