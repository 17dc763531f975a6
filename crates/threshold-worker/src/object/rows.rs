//! Rows in the SQLite database of an object.

use std::cell::Cell;
use std::fmt;

use threshold_core::Timestamp;
use worker::{SqlStorage, SqlStorageValue};

use super::records::{Change, Kind, RowError, RowKey, Rows};

/// The largest integer that JavaScript holds exactly; see [`millis`].
const LAST: u64 = 9_007_199_254_740_991;

/// The database of an object.
pub(super) struct Database {
    sql: SqlStorage,
    /// Whether the table exists.
    is_open: Cell<bool>,
}

impl Database {
    pub(super) fn new(sql: SqlStorage) -> Self {
        Self { sql, is_open: Cell::new(false) }
    }

    /// Creates the table, unless it exists.
    pub(super) fn open(&self) -> Result<(), RowError> {
        if !self.is_open.get() {
            // No index on `until`: each entry of an index is billed like a row, and objects are small.
            self.run(
                "CREATE TABLE IF NOT EXISTS records (kind INTEGER NOT NULL, id BLOB NOT NULL, value BLOB NOT NULL, \
                 until INTEGER NOT NULL, PRIMARY KEY (kind, id)) WITHOUT ROWID",
                vec![],
            )?;
            self.is_open.set(true);
        }
        Ok(())
    }

    /// Notes that the table was deleted.
    pub(super) fn closed(&self) {
        self.is_open.set(false);
    }

    /// Writes changes. Cloudflare makes all writes of one event durable together.
    pub(super) fn write(&self, changes: Vec<(RowKey, Change)>) -> Result<(), RowError> {
        for (key, change) in changes {
            match change {
                Change::Write { bytes, until } => self.run(
                    "INSERT INTO records (kind, id, value, until) VALUES (?, ?, ?, ?) \
                     ON CONFLICT (kind, id) DO UPDATE SET value = excluded.value, until = excluded.until",
                    vec![kind_of(key), id_of(key), bytes.into(), millis(until)],
                )?,
                Change::Delete => {
                    self.run("DELETE FROM records WHERE kind = ? AND id = ?", vec![kind_of(key), id_of(key)])?;
                }
            }
        }
        Ok(())
    }

    /// Deletes the rows whose time is over. Returns the latest end of the others; `None` if none is left.
    pub(super) fn delete_silent(&self, now: Timestamp) -> Result<Option<Timestamp>, RowError> {
        // A reservation is ended before it is deleted, so only those that could not be read are left here.
        let reservations = i64::from(Kind::Reservation as u8);
        self.run("DELETE FROM records WHERE until <= ? AND kind <> ?", vec![passed(now), reservations.into()])?;
        let cursor = self.sql.exec("SELECT MAX(until) FROM records", None).map_err(failed)?;
        let latest = cursor.raw().next().transpose().map_err(failed)?;
        Ok(latest.and_then(|row| time(row.first())))
    }

    fn run(&self, statement: &str, values: Vec<SqlStorageValue>) -> Result<(), RowError> {
        self.sql.exec(statement, values).map(drop).map_err(failed)
    }
}

impl Rows for Database {
    fn read(&self, key: RowKey) -> Result<Option<Vec<u8>>, RowError> {
        let query = "SELECT value FROM records WHERE kind = ? AND id = ?";
        let cursor = self.sql.exec(query, vec![kind_of(key), id_of(key)]).map_err(failed)?;
        let row = cursor.raw().next().transpose().map_err(failed)?;
        row.map(|row| blob(row.into_iter().next())).transpose()
    }

    fn until(&self, key: RowKey) -> Result<Option<Timestamp>, RowError> {
        let query = "SELECT until FROM records WHERE kind = ? AND id = ?";
        let cursor = self.sql.exec(query, vec![kind_of(key), id_of(key)]).map_err(failed)?;
        let row = cursor.raw().next().transpose().map_err(failed)?;
        Ok(row.and_then(|row| time(row.first())))
    }

    fn first_expired(&self, now: Timestamp, except: &[u128]) -> Result<Option<(u128, Vec<u8>)>, RowError> {
        let query = "SELECT id, value FROM records WHERE kind = ? AND until <= ? ORDER BY until, id";
        let values = vec![i64::from(Kind::Reservation as u8).into(), passed(now)];
        let cursor = self.sql.exec(query, values).map_err(failed)?;
        for row in cursor.raw() {
            let mut columns = row.map_err(failed)?.into_iter();
            let id = blob(columns.next())?;
            let id = <[u8; 16]>::try_from(id.as_slice()).map(u128::from_be_bytes);
            let id = id.map_err(|_| RowError::Database("an id has not 16 bytes".to_owned()))?;
            if !except.contains(&id) {
                return Ok(Some((id, blob(columns.next())?)));
            }
        }
        Ok(None)
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").finish_non_exhaustive()
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is given to `map_err`")]
fn failed(error: worker::Error) -> RowError {
    RowError::Database(error.to_string())
}

fn time(value: Option<&SqlStorageValue>) -> Option<Timestamp> {
    match value {
        Some(SqlStorageValue::Integer(millis)) => Some(from_millis(*millis)),
        Some(SqlStorageValue::Float(millis)) => Some(from_millis(whole(*millis))),
        _ => None,
    }
}

fn blob(value: Option<SqlStorageValue>) -> Result<Vec<u8>, RowError> {
    match value {
        Some(SqlStorageValue::Blob(bytes)) => Ok(bytes),
        _ => Err(RowError::Database("a column is not a blob".to_owned())),
    }
}

fn kind_of(key: RowKey) -> SqlStorageValue {
    i64::from(key.kind as u8).into()
}

fn id_of(key: RowKey) -> SqlStorageValue {
    key.id.to_be_bytes().to_vec().into()
}

/// Returns a time in milliseconds, rounded up. Numbers cross into SQL as doubles, which hold 53 bits.
fn millis(at: Timestamp) -> SqlStorageValue {
    let millis = at.micros().div_ceil(1_000).min(LAST);
    i64::try_from(millis).unwrap_or(i64::MAX).into()
}

/// Returns the present time in milliseconds, rounded down: nothing is over before its time.
fn passed(now: Timestamp) -> SqlStorageValue {
    let millis = (now.micros() / 1_000).min(LAST);
    i64::try_from(millis).unwrap_or(i64::MAX).into()
}

pub(super) fn from_millis(millis: i64) -> Timestamp {
    Timestamp::from_micros(u64::try_from(millis).unwrap_or(0).saturating_mul(1_000))
}

#[expect(clippy::cast_possible_truncation, reason = "it was written as an integer below 2^53")]
fn whole(millis: f64) -> i64 {
    millis as i64
}
