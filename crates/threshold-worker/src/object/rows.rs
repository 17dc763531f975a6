//! Rows in the SQLite database of an object.
//!
//! All are in one table, `threshold_records`: a class that extends Threshold's has tables of its own beside it.

use std::fmt;

use threshold_core::Timestamp;
use worker::js_sys::Date;
use worker::wasm_bindgen::JsValue;
use worker::{SqlStorage, SqlStorageValue};

use super::records::{Change, Kind, RowError, RowKey, Rows};

/// The largest integer that JavaScript holds exactly; see [`millis`].
const LAST: u64 = 9_007_199_254_740_991;

/// The row of the replaced alarm.
const ALARM: RowKey = RowKey { kind: Kind::Alarm, id: 0 };

/// The alarm of another author, and the one of Threshold that is in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Replaced {
    pub(super) ours: Timestamp,
    pub(super) theirs: Timestamp,
}

/// The database of an object.
pub(super) struct Database {
    sql: SqlStorage,
}

impl Database {
    pub(super) fn new(sql: SqlStorage) -> Self {
        Self { sql }
    }

    /// Creates the table, unless it exists. Another author may have deleted it since the last command.
    pub(super) fn open(&self) -> Result<(), RowError> {
        // No index on `until`: each entry of an index is billed like a row, and objects are small.
        self.run(
            "CREATE TABLE IF NOT EXISTS threshold_records (kind INTEGER NOT NULL, id BLOB NOT NULL, value BLOB NOT NULL, \
             until INTEGER NOT NULL, PRIMARY KEY (kind, id)) WITHOUT ROWID",
            vec![],
        )
    }

    /// Returns whether the table exists.
    pub(super) fn exists(&self) -> Result<bool, RowError> {
        let query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'threshold_records'";
        let cursor = self.sql.exec(query, None).map_err(failed)?;
        Ok(cursor.raw().next().transpose().map_err(failed)?.is_some())
    }

    /// Deletes the table, and nothing else: the rest of the database may belong to another author.
    pub(super) fn remove(&self) -> Result<(), RowError> {
        self.run("DROP TABLE threshold_records", vec![])
    }

    /// Returns the alarm that one of Threshold has replaced.
    pub(super) fn replaced(&self) -> Result<Option<Replaced>, RowError> {
        let Some((ours, theirs)) = self.until(ALARM)?.zip(self.read(ALARM)?) else { return Ok(None) };
        let theirs = <[u8; 8]>::try_from(theirs.as_slice()).map(u64::from_be_bytes);
        let theirs = theirs.map_err(|_| RowError::Database("a time has not 8 bytes".to_owned()))?;
        Ok(Some(Replaced { ours, theirs: Timestamp::from_micros(theirs) }))
    }

    /// Notes the alarm that one of Threshold replaces, or that there is none.
    pub(super) fn replace(&self, replaced: Option<Replaced>) -> Result<(), RowError> {
        let change = replaced.map_or(Change::Delete, |Replaced { ours, theirs }| Change::Write {
            bytes: theirs.micros().to_be_bytes().to_vec(),
            until: ours,
        });
        self.write(vec![(ALARM, change)])
    }

    /// Writes changes. Cloudflare makes all writes of one event durable together.
    pub(super) fn write(&self, changes: Vec<(RowKey, Change)>) -> Result<(), RowError> {
        for (key, change) in changes {
            match change {
                Change::Write { bytes, until } => self.run(
                    "INSERT INTO threshold_records (kind, id, value, until) VALUES (?, ?, ?, ?) \
                     ON CONFLICT (kind, id) DO UPDATE SET value = excluded.value, until = excluded.until",
                    vec![kind_of(key), id_of(key), bytes.into(), millis(until)],
                )?,
                Change::Delete => {
                    self.run(
                        "DELETE FROM threshold_records WHERE kind = ? AND id = ?",
                        vec![kind_of(key), id_of(key)],
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Deletes the rows whose time is over. Returns the latest end of the others; `None` if none is left.
    pub(super) fn delete_silent(&self, now: Timestamp) -> Result<Option<Timestamp>, RowError> {
        let kind = |kind: Kind| SqlStorageValue::from(i64::from(kind as u8));
        // A reservation is ended before it is deleted, so only those that could not be read are left here.
        self.run(
            "DELETE FROM threshold_records WHERE until <= ? AND kind NOT IN (?, ?)",
            vec![passed(now), kind(Kind::Reservation), kind(Kind::Alarm)],
        )?;
        let query = "SELECT MAX(until) FROM threshold_records WHERE kind <> ?";
        let cursor = self.sql.exec(query, vec![kind(Kind::Alarm)]).map_err(failed)?;
        let latest = cursor.raw().next().transpose().map_err(failed)?;
        Ok(latest.and_then(|row| time(row.first())))
    }

    fn run(&self, statement: &str, values: Vec<SqlStorageValue>) -> Result<(), RowError> {
        self.sql.exec(statement, values).map(drop).map_err(failed)
    }
}

impl Rows for Database {
    fn read(&self, key: RowKey) -> Result<Option<Vec<u8>>, RowError> {
        let query = "SELECT value FROM threshold_records WHERE kind = ? AND id = ?";
        let cursor = self.sql.exec(query, vec![kind_of(key), id_of(key)]).map_err(failed)?;
        let row = cursor.raw().next().transpose().map_err(failed)?;
        row.map(|row| blob(row.into_iter().next())).transpose()
    }

    fn until(&self, key: RowKey) -> Result<Option<Timestamp>, RowError> {
        let query = "SELECT until FROM threshold_records WHERE kind = ? AND id = ?";
        let cursor = self.sql.exec(query, vec![kind_of(key), id_of(key)]).map_err(failed)?;
        let row = cursor.raw().next().transpose().map_err(failed)?;
        Ok(row.and_then(|row| time(row.first())))
    }

    fn first_expired(&self, now: Timestamp, except: &[u128]) -> Result<Option<(u128, Vec<u8>)>, RowError> {
        let query = "SELECT id, value FROM threshold_records WHERE kind = ? AND until <= ? ORDER BY until, id";
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

/// Returns a time as alarms have it, in whole milliseconds, rounded up.
pub(super) fn in_millis(at: Timestamp) -> Timestamp {
    Timestamp::from_micros(at.micros().div_ceil(1_000).saturating_mul(1_000))
}

/// Returns a time of an alarm as a date of JavaScript.
pub(super) fn to_date(at: Timestamp) -> Date {
    Date::new(&JsValue::from_f64((at.micros() / 1_000) as f64))
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
