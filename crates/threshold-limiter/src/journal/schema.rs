//! The tables of a journal, and the statements that keep their checksums right.

use std::collections::BTreeSet;

use rusqlite::{Connection, OptionalExtension as _, Transaction, TransactionBehavior, params};
use threshold_core::KeyId;
use threshold_core::text::printable;

use super::damage_record;
use super::rows::{AuditLine, Row, Summary, checksum};
use super::salvage::{Damage, DamagedFile};

/// The version of the tables below and of the digests in them. Digests of version 1 had no partition.
pub(super) const VERSION: i64 = 2;

/// The definition of the table that every version has. SQLite stores it as it is written here, so a file that contains it is a
/// journal.
pub(super) const META_TABLE: &str =
    "CREATE TABLE meta (name TEXT PRIMARY KEY NOT NULL, value INTEGER NOT NULL) STRICT, WITHOUT ROWID";

const OTHER_TABLES: &str = "
    CREATE TABLE record (
        kind INTEGER NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL, sum INTEGER NOT NULL,
        PRIMARY KEY (kind, key)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE audit (
        id INTEGER PRIMARY KEY, at INTEGER NOT NULL, who TEXT NOT NULL, action TEXT NOT NULL, about TEXT NOT NULL,
        why TEXT NOT NULL
    ) STRICT;
";

/// What a database consists of, compared with the tables that this program creates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Schema {
    Own,
    /// A table is missing or has another definition.
    Altered,
    /// Beside the tables there is something else, such as a trigger, which may change what is written or read.
    Added(String),
}

impl Schema {
    pub(super) fn of(connection: &Connection) -> rusqlite::Result<Self> {
        let own = Connection::open_in_memory()?;
        own.execute_batch(META_TABLE)?;
        own.execute_batch(OTHER_TABLES)?;
        let (own, found) = (definitions(&own)?, definitions(connection)?);
        if !own.is_subset(&found) {
            return Ok(Self::Altered);
        }
        // What `ANALYZE` writes changes how rows are searched for, and nothing else.
        let is_harmless = |kind: &str, name: &str| kind == "table" && name.starts_with("sqlite_stat");
        let added = found.difference(&own).find(|(kind, name, ..)| !is_harmless(kind, name));
        Ok(added.map_or(Self::Own, |(kind, name, table, _)| {
            let (kind, name, table) = (printable(kind), printable(name), printable(table));
            Self::Added(format!("{kind} {name} on {table}"))
        }))
    }
}

/// Kind, name, table and SQL of something in a database.
type Definition = (String, String, String, Option<String>);

fn definitions(connection: &Connection) -> rusqlite::Result<BTreeSet<Definition>> {
    let mut select = connection.prepare("SELECT type, name, tbl_name, sql FROM sqlite_schema")?;
    let found = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?;
    found.collect()
}

/// The content of a new database.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewFile<'a> {
    /// The key id of the present secret.
    pub(super) key_id: KeyId,
    /// The number of transactions so far, which a replacement goes on from.
    pub(super) commits: i64,
    pub(super) rows: &'a [Row],
    /// Damage that was not reported yet. The file records it, and each row without a value, until it is.
    pub(super) damage: Option<&'a Damage>,
}

/// Creates and fills the tables in one transaction. Returns the summary, and how many audit lines of `damaged` were copied.
pub(super) fn initialize(
    connection: &mut Connection,
    new: &NewFile<'_>,
    damaged: Option<&DamagedFile<'_>>,
) -> rusqlite::Result<(Summary, usize)> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute_batch(META_TABLE)?;
    transaction.execute_batch(OTHER_TABLES)?;
    // Stated here and in `meta`: if the two differ, the file is damaged.
    transaction.pragma_update(None, "user_version", VERSION)?;
    let secret = i64::from(new.key_id.to_u32());
    for (name, value) in [("version", VERSION), ("secret", secret)] {
        transaction.execute("INSERT INTO meta (name, value) VALUES (?1, ?2)", params![name, value])?;
    }
    let mut summary = Summary { commits: new.commits, ..Summary::default() };
    summary.add(identity_checksum(VERSION, secret));
    for row in new.rows.iter().filter(|row| row.value.is_some()) {
        put_row(&transaction, &mut summary, row.kind.number(), &row.key, row.value.as_deref())?;
    }
    if let Some(damage) = new.damage {
        damage_record::write(&transaction, &mut summary, damage, new.rows)?;
    }
    store_summary(&transaction, summary)?;
    // In the same transaction, so that no crash leaves a file with its rows and without its audit log.
    let lines = damaged.map_or(Ok(0), |damaged| damaged.copy_audit(&transaction))?;
    transaction.commit()?;
    Ok((summary, lines))
}

/// Computes the checksum of version and secret, which count as one more row of the summary.
pub(super) fn identity_checksum(version: i64, secret: i64) -> i64 {
    checksum(0, &version.to_be_bytes(), &secret.to_be_bytes())
}

/// Writes one row, or deletes it if there is no value, and updates the summary.
pub(super) fn put_row(
    transaction: &Transaction<'_>,
    summary: &mut Summary,
    kind: i64,
    key: &[u8],
    value: Option<&[u8]>,
) -> rusqlite::Result<()> {
    let old: Option<i64> = transaction
        .prepare_cached("SELECT sum FROM record WHERE kind = ?1 AND key = ?2")?
        .query_row(params![kind, key], |row| row.get(0))
        .optional()?;
    if let Some(old) = old {
        summary.remove(old);
    }
    let Some(value) = value else {
        transaction.prepare_cached("DELETE FROM record WHERE kind = ?1 AND key = ?2")?.execute(params![kind, key])?;
        return Ok(());
    };
    let sum = checksum(kind, key, value);
    transaction
        .prepare_cached("INSERT OR REPLACE INTO record (kind, key, value, sum) VALUES (?1, ?2, ?3, ?4)")?
        .execute(params![kind, key, value, sum])?;
    summary.add(sum);
    Ok(())
}

/// Appends a line to the audit log.
pub(super) fn append_audit(transaction: &Transaction<'_>, line: &AuditLine) -> rusqlite::Result<()> {
    let at = i64::try_from(line.at.micros()).unwrap_or(i64::MAX);
    transaction
        .prepare_cached("INSERT INTO audit (at, who, action, about, why) VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute(params![at, line.who, line.action, line.about, line.why])?;
    Ok(())
}

/// Stores the summary.
pub(super) fn store_summary(transaction: &Transaction<'_>, summary: Summary) -> rusqlite::Result<()> {
    let Summary { rows, sum, commits } = summary;
    for (name, value) in [("rows", rows), ("sum", sum), ("commits", commits)] {
        // Replaces: files of earlier builds have no `commits`.
        transaction
            .prepare_cached("INSERT OR REPLACE INTO meta (name, value) VALUES (?1, ?2)")?
            .execute(params![name, value])?;
    }
    Ok(())
}

/// Reads the stored summary.
pub(super) fn stored_summary(connection: &Connection) -> rusqlite::Result<Summary> {
    let commits = meta(connection, "commits").optional()?.unwrap_or(0);
    Ok(Summary { rows: meta(connection, "rows")?, sum: meta(connection, "sum")?, commits })
}

/// Reads one value of the table `meta`.
pub(super) fn meta(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    connection.query_row("SELECT value FROM meta WHERE name = ?1", [name], |row| row.get(0))
}
