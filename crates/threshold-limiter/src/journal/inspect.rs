//! The inspection of a database: reads every row, verifies every checksum, and collects what is wrong.

use std::collections::BTreeSet;
use std::path::Path;

use rusqlite::Connection;

use super::Contents;
use super::damage_record::{DamageRow, UNREADABLE};
use super::pages::{Cell, Value};
use super::rows::{Kind, Row, Summary, checksum};
use super::salvage::{Damage, replayed_pages};
use super::schema::{Schema, identity_checksum, meta, stored_summary};

/// The rows of a database, and its faults.
#[derive(Debug, Default)]
pub(super) struct Inspection {
    pub(super) rows: Vec<Row>,
    pub(super) faults: Vec<String>,
    /// The summary of the rows that were read.
    pub(super) summary: Summary,
    /// The key id of the secret that the database was written under.
    pub(super) secret: Option<i64>,
    /// Earlier damage that was salvaged and not reported yet.
    pub(super) unreported: Option<Damage>,
    /// Rows that were unreadable when that damage was salvaged.
    unreadable: Vec<Row>,
    /// How many rows describe that damage.
    damage_rows: u64,
    /// The number of rows that the database claims to hold.
    stored_rows: Option<i64>,
    /// The number of transactions that the database claims to hold.
    stored_commits: Option<i64>,
    version: Option<i64>,
    has_lost_commits: bool,
    /// What somebody else has added to the tables.
    pub(super) added: Option<String>,
}

impl Inspection {
    /// Reads and verifies a database that SQLite can open. This reads the file twice, so it runs at a start and after
    /// somebody else has written to it.
    pub(super) fn run(connection: &Connection, path: &Path) -> Self {
        let mut inspection = Self::default();
        inspection.check_schema(connection);
        inspection.read_meta(connection);
        let has_sound_pages = inspection.check_pages(connection);
        // If SQLite's check fails, rows that it does not reach may still be whole on some page.
        if inspection.read_rows(connection).is_err() || !has_sound_pages {
            inspection.scan_pages(path);
        }
        // A page that is an old version of itself passes every other check: only the summary differs.
        if inspection.faults.is_empty() && stored_summary(connection).ok() != Some(inspection.summary) {
            inspection.faults.push("rows are missing, or were changed".to_owned());
        }
        inspection.add_unreadable();
        inspection
    }

    /// Reads what is left of a database that SQLite cannot open, as one that was truncated.
    pub(super) fn without_sqlite(path: &Path, reason: String) -> Self {
        let mut inspection = Self { faults: vec![reason], ..Self::default() };
        inspection.scan_pages(path);
        inspection.add_unreadable();
        inspection
    }

    /// Compares the database with the commit mark: it must hold every transaction that was acknowledged.
    pub(super) fn check_commits(&mut self, mark: Option<i64>) {
        let missing = mark.zip(self.stored_commits).and_then(|(mark, stored)| mark.checked_sub(stored));
        if let Some(missing) = missing.filter(|missing| *missing > 0) {
            self.faults.push(format!("its last {missing} commits are missing"));
            self.has_lost_commits = true;
        }
    }

    /// Returns the number of transactions that a replacement of this database goes on from.
    pub(super) fn commits_with(&self, mark: Option<i64>) -> i64 {
        self.summary.commits.max(mark.unwrap_or(0))
    }

    /// Converts the result for a database that stays as it is.
    pub(super) fn into_contents(self, path: &Path) -> Contents {
        let damage = self.damage(path);
        Contents { rows: self.rows, damage, is_new: false }
    }

    fn check_schema(&mut self, connection: &Connection) {
        match Schema::of(connection) {
            Ok(Schema::Own) => {}
            Ok(Schema::Altered) => self.faults.push("its tables are not as they were created".to_owned()),
            Ok(Schema::Added(what)) => {
                self.faults.push(format!("somebody else has added the {what}"));
                self.added = Some(what);
            }
            Err(error) => self.faults.push(error.to_string()),
        }
    }

    fn read_meta(&mut self, connection: &Connection) {
        let own = connection.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0));
        self.version = meta(connection, "version").ok();
        self.secret = meta(connection, "secret").ok();
        self.stored_rows = meta(connection, "rows").ok();
        // Files of earlier builds have no `commits`.
        self.stored_commits = meta(connection, "commits").ok();
        if self.version.is_none() || own.ok() != self.version {
            self.faults.push("its version is not what was written".to_owned());
        }
        self.summary.commits = self.stored_commits.unwrap_or(0);
        self.summary.add(identity_checksum(self.version.unwrap_or(0), self.secret.unwrap_or(0)));
    }

    /// Runs SQLite's own check of the pages. Returns whether they are sound.
    fn check_pages(&mut self, connection: &Connection) -> bool {
        // One fault is enough to know.
        let checked = connection.prepare("PRAGMA integrity_check(1)").and_then(|mut check| {
            let lines = check.query_map([], |row| row.get::<_, String>(0))?;
            lines.collect::<Result<Vec<_>, _>>()
        });
        match checked {
            Ok(lines) if lines == ["ok"] => return true,
            Ok(lines) => self.faults.push(lines.join("; ").replace('\n', " ")),
            Err(error) => self.faults.push(error.to_string()),
        }
        false
    }

    fn read_rows(&mut self, connection: &Connection) -> Result<(), rusqlite::Error> {
        let read = (|| {
            let mut select = connection.prepare("SELECT kind, key, value, sum FROM record ORDER BY kind, key")?;
            let mut rows = select.query([])?;
            while let Some(row) = rows.next()? {
                // Without its kind and key a row is lost. Without a sound value it still names the subject that has to
                // be blocked.
                self.take(row.get(0)?, row.get(1)?, row.get(2).ok(), row.get(3).ok());
            }
            Ok(())
        })();
        read.inspect_err(|error: &rusqlite::Error| self.faults.push(error.to_string()))
    }

    /// Adds every row that is whole on some page and that SQLite did not reach. Of a row whose value is cut off, the key is
    /// kept.
    fn scan_pages(&mut self, path: &Path) {
        let Ok(pages) = replayed_pages(path) else { return };
        let mut seen: BTreeSet<(i64, Vec<u8>)> =
            self.rows.iter().map(|row| (row.kind.number(), row.key.clone())).collect();
        let mut partial = Vec::new();
        pages.each(|Cell { rowid, values }| match (rowid, values.as_slice()) {
            // The columns of `record`, a table without row ids.
            (None, [Value::Integer(kind), Value::Blob(key), value, sum]) => {
                let whole = match (value, sum) {
                    (Value::Blob(value), Value::Integer(sum)) => checksum(*kind, key, value) == *sum,
                    _ => false,
                };
                if !whole {
                    partial.push((*kind, key.clone()));
                // Of two whole versions of a row, the first one is the current one; see `Pages::each`.
                } else if seen.insert((*kind, key.clone()))
                    && let (Value::Blob(value), Value::Integer(sum)) = (value, sum)
                {
                    self.take(*kind, key.clone(), Some(value.clone()), Some(*sum));
                }
            }
            (None, [Value::Text(name), Value::Integer(value)]) => self.take_meta(name, *value),
            _ => {}
        });
        // After all whole rows: a page that is no longer in use may hold part of a row that is whole elsewhere.
        for (kind, key) in partial {
            // Bytes of another table may look like part of a row, but hardly with a kind that exists.
            if (kind == UNREADABLE || Kind::from_number(kind).is_some()) && seen.insert((kind, key.clone())) {
                self.take(kind, key, None, None);
            }
        }
        self.summary.commits = self.summary.commits.max(self.stored_commits.unwrap_or(0));
    }

    fn take_meta(&mut self, name: &str, value: i64) {
        let known = match name {
            "version" => &mut self.version,
            "secret" => &mut self.secret,
            "rows" => &mut self.stored_rows,
            "commits" => &mut self.stored_commits,
            _ => return,
        };
        // The first one counts: SQLite's own answer, or the page that the tables lead to.
        known.get_or_insert(value);
    }

    fn take(&mut self, number: i64, key: Vec<u8>, value: Option<Vec<u8>>, sum: Option<i64>) {
        let value = value.filter(|value| Some(checksum(number, &key, value)) == sum);
        let (kind, about_damage) = (Kind::from_number(number), DamageRow::decode(number, &key, value.as_deref()));
        match (&value, sum) {
            (Some(_), Some(sum)) if kind.is_some() || about_damage.is_some() => self.summary.add(sum),
            _ => self.faults.push("a row is not what was written".to_owned()),
        }
        self.damage_rows = self.damage_rows.saturating_add(u64::from(about_damage.is_some()));
        match (kind, about_damage) {
            (Some(kind), _) => self.rows.push(Row { kind, key, value }),
            (None, Some(DamageRow::Damage(damage))) => self.unreported = Some(damage),
            (None, Some(DamageRow::Unreadable(row))) => self.unreadable.push(row),
            (None, None) => {}
        }
    }

    /// Adds the rows that were unreadable before, unless they were written again since.
    fn add_unreadable(&mut self) {
        let mut unreadable = std::mem::take(&mut self.unreadable);
        let written: BTreeSet<(Kind, &[u8])> = self.rows.iter().map(|row| (row.kind, row.key.as_slice())).collect();
        unreadable.retain(|row| !written.contains(&(row.kind, row.key.as_slice())));
        self.rows.append(&mut unreadable);
    }

    /// Returns the damage to report: the faults of this database, and earlier damage that was not reported yet.
    pub(super) fn damage(&self, quarantine: &Path) -> Option<Damage> {
        match (self.new_damage(quarantine), &self.unreported) {
            (Some(new), Some(before)) => {
                let reason = format!("{}; and before that, {before}", new.reason);
                Some(Damage { reason, ..new })
            }
            (new, before) => new.or_else(|| before.clone()),
        }
    }

    fn new_damage(&self, quarantine: &Path) -> Option<Damage> {
        let kept = self.rows.iter().filter(|row| row.value.is_some()).count();
        // `rows` in `meta` also counts version and secret as one row, and each row about earlier damage.
        let others = self.damage_rows.saturating_add(1);
        let stored = self.stored_rows.and_then(|rows| u64::try_from(rows).ok()?.checked_sub(others));
        // A database that has lost commits counts the rows of an earlier state: how many there were since is unknown.
        let lost = stored.filter(|_| !self.has_lost_commits);
        Some(Damage {
            reason: self.faults.first()?.clone(),
            kept,
            lost: lost.and_then(|rows| rows.checked_sub(u64::try_from(kept).ok()?)),
            quarantine: quarantine.into(),
        })
    }
}
