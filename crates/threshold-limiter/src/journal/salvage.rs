//! A file that may be damaged: everything is looked at, what can still be read is kept, and nothing is lost in silence.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, Transaction, params};

use super::file::{VERSION, about_sum, beside, connect, let_go, make, meta, settle_in, stated};
use super::rows::{Kind, Row, Total, row_sum};
use super::{JournalError, Kept};

/// What a file is called, beside the one whose place it is about to take.
const NEXT: &str = ".next";

/// What was wrong with a file, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// What was found first.
    pub reason: String,
    /// Rows that were read as they were written.
    pub kept: usize,
    /// Rows that were not, as far as that is known.
    pub lost: Option<u64>,
    /// Where the file is now.
    pub aside: PathBuf,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the journal was damaged ({}): {} of its rows could be kept, ", self.reason, self.kept)?;
        match self.lost {
            Some(lost) => write!(f, "{lost} could not; ")?,
            None => f.write_str("nobody knows how many could not; ")?,
        }
        write!(f, "the damaged file is {}", self.aside.display())
    }
}

/// Everything that a file says, and everything that is wrong with it.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) rows: Vec<Row>,
    pub(super) faults: Vec<String>,
    /// The sum of the rows that were read.
    pub(super) total: Total,
    pub(super) secret: Option<i64>,
    /// How many rows there were when it was last written.
    stated_rows: Option<i64>,
    version: Option<i64>,
    versions_agree: bool,
}

impl Found {
    /// Looks at all there is. It costs as much as reading the file twice, once at each start.
    pub(super) fn look(connection: &Connection) -> Self {
        let mut found = Self::default();
        found.look_at_itself(connection);
        found.look_at_pages(connection);
        found.look_at_rows(connection);
        if found.faults.is_empty() && stated(connection).ok() != Some(found.total) {
            found.faults.push("rows are missing, or were changed".to_owned());
        }
        found
    }

    /// A file that cannot even be opened.
    pub(super) fn nothing(error: &rusqlite::Error) -> Self {
        Self { faults: vec![error.to_string()], ..Self::default() }
    }

    /// The version, if it is one that a later program has written.
    pub(super) fn is_newer(&self) -> Option<i64> {
        self.version.filter(|version| self.versions_agree && *version > VERSION)
    }

    /// What was found, in a file that stays as it is.
    pub(super) fn untouched(self, path: &Path) -> Kept {
        let damage = self.damage(path);
        Kept { rows: self.rows, damage, is_new: false }
    }

    fn look_at_itself(&mut self, connection: &Connection) {
        let own = connection.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0));
        self.version = meta(connection, "version").ok();
        self.secret = meta(connection, "secret").ok();
        self.stated_rows = meta(connection, "rows").ok();
        self.versions_agree = self.version.is_some() && own.ok() == self.version;
        if !self.versions_agree {
            self.faults.push("its version is not what was written".to_owned());
        }
        self.total.add(about_sum(self.version.unwrap_or(0), self.secret.unwrap_or(0)));
    }

    fn look_at_pages(&mut self, connection: &Connection) {
        let checked = connection.prepare("PRAGMA integrity_check(1)").and_then(|mut check| {
            let lines = check.query_map([], |row| row.get::<_, String>(0))?;
            lines.collect::<Result<Vec<_>, _>>()
        });
        match checked {
            Ok(lines) if lines == ["ok"] => {}
            Ok(lines) => self.faults.push(lines.join("; ").replace('\n', " ")),
            Err(error) => self.faults.push(error.to_string()),
        }
    }

    /// Reads from the front, and where that ends early from the back: a damaged page in the middle hides no more than
    /// itself.
    fn look_at_rows(&mut self, connection: &Connection) {
        let mut seen = BTreeSet::new();
        if self.read(connection, "ASC", &mut seen).is_err() {
            let _ = self.read(connection, "DESC", &mut seen);
        }
    }

    fn read(
        &mut self,
        connection: &Connection,
        order: &str,
        seen: &mut BTreeSet<(i64, Vec<u8>)>,
    ) -> Result<(), rusqlite::Error> {
        let text = format!("SELECT kind, key, value, sum FROM record ORDER BY kind {order}, key {order}");
        let read = (|| {
            let mut select = connection.prepare(&text)?;
            let mut rows = select.query([])?;
            while let Some(row) = rows.next()? {
                let (kind, key): (i64, Vec<u8>) = (row.get(0)?, row.get(1)?);
                if seen.insert((kind, key.clone())) {
                    self.take(kind, key, row.get(2).ok(), row.get(3).ok());
                }
            }
            Ok(())
        })();
        read.inspect_err(|error: &rusqlite::Error| self.faults.push(error.to_string()))
    }

    fn take(&mut self, number: i64, key: Vec<u8>, value: Option<Vec<u8>>, sum: Option<i64>) {
        let value = value.filter(|value| Some(row_sum(number, &key, value)) == sum);
        let kind = Kind::from_number(number);
        match (&value, kind, sum) {
            (Some(_), Some(_), Some(sum)) => self.total.add(sum),
            _ => self.faults.push("a row is not what was written".to_owned()),
        }
        if let Some(kind) = kind {
            self.rows.push(Row { kind, key, value });
        }
    }

    /// The rows that are as they were written.
    pub(super) fn whole(&self) -> Vec<Row> {
        self.rows.iter().filter(|row| row.value.is_some()).cloned().collect()
    }

    fn damage(&self, aside: &Path) -> Option<Damage> {
        let kept = self.rows.iter().filter(|row| row.value.is_some()).count();
        // The file's word about itself is one of the rows that it counts.
        let stated = self.stated_rows.and_then(|rows| u64::try_from(rows).ok()).and_then(|rows| rows.checked_sub(1));
        Some(Damage {
            reason: self.faults.first()?.clone(),
            kept,
            lost: stated.and_then(|rows| rows.checked_sub(u64::try_from(kept).ok()?)),
            aside: aside.into(),
        })
    }
}

/// Whether a file is as it was written.
pub(super) fn sound(path: &Path) -> Result<(), JournalError> {
    let failed = |error| JournalError::Sqlite(path.into(), error);
    let found = Found::look(&connect(path).map_err(failed)?);
    match found.faults.first() {
        None => Ok(()),
        Some(fault) => Err(JournalError::Io(path.into(), std::io::Error::other(fault.clone()))),
    }
}

/// Puts a new file with all that could be read in the place of a damaged one, of which `aside` is a copy.
pub(super) fn rebuild(
    path: &Path,
    fingerprint: u32,
    found: Found,
    damaged: Option<Connection>,
    aside: &Path,
) -> Result<Kept, JournalError> {
    put_anew(path, fingerprint, &found.whole(), damaged)?;
    let damage = found.damage(aside);
    Ok(Kept { rows: found.rows, damage, is_new: false })
}

/// Puts a new file with these rows in the place of a damaged one, and with every line of its audit that can be read; returns
/// how many those are. Until the new one is whole, the damaged one stays where it is: whenever this is interrupted, one of
/// them is found again.
pub(super) fn put_anew(
    path: &Path,
    fingerprint: u32,
    rows: &[Row],
    damaged: Option<Connection>,
) -> Result<usize, JournalError> {
    let io = |error| JournalError::Io(path.into(), error);
    let next = beside(path, NEXT);
    remove(&next).map_err(io)?;
    let built = build(&next, fingerprint, rows, damaged.as_ref());
    // Before the new one has its name: whoever closes a file removes the log that goes by it.
    let_go(damaged);
    let lines = built.map_err(|error| JournalError::Sqlite(next.clone(), error))?;
    put_in_place(&next, path).map_err(io)?;
    Ok(lines)
}

/// Goes on where [`put_in_place`] was interrupted: a file that is whole was about to take the place of another.
pub(super) fn finish(path: &Path) -> Result<(), JournalError> {
    let io = |error| JournalError::Io(path.into(), error);
    let next = beside(path, NEXT);
    if !std::fs::exists(&next).map_err(io)? {
        return Ok(());
    }
    let changed = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    // One that was left here before the journal was last written says less than the journal does.
    if sound(&next).is_ok() && changed(&next) >= changed(path) {
        return put_in_place(&next, path).map_err(io);
    }
    for more in ["", "-wal", "-shm", "-journal"] {
        remove(&beside(&next, more)).map_err(io)?;
    }
    Ok(())
}

/// Puts a sound copy in the place of a journal.
pub(super) fn replace(from: &Path, path: &Path) -> Result<Option<PathBuf>, JournalError> {
    let io = |error| JournalError::Io(path.into(), error);
    let next = beside(path, NEXT);
    remove(&next).map_err(io)?;
    super::file::copy(from, &next)?;
    for more in ["-wal", "-shm"] {
        remove(&beside(&next, more)).map_err(io)?;
    }
    let before = if std::fs::exists(path).map_err(io)? { Some(put_aside(path, "before").map_err(io)?) } else { None };
    put_in_place(&next, path).map_err(io)?;
    Ok(before)
}

/// Copies a file, and what belongs to it, under a name of its own.
pub(super) fn put_aside(path: &Path, why: &str) -> std::io::Result<PathBuf> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let aside = beside(path, &format!(".{why}-{}", since.as_micros()));
    for more in ["", "-wal"] {
        let from = beside(path, more);
        if std::fs::exists(&from)? {
            let to = beside(&aside, more);
            std::fs::copy(&from, &to)?;
            std::fs::File::open(&to)?.sync_all()?;
        }
    }
    Ok(aside)
}

/// One file takes the place of another in one step. What belonged to the other must not be taken for its own.
fn put_in_place(next: &Path, path: &Path) -> std::io::Result<()> {
    std::fs::File::open(next)?.sync_all()?;
    for more in ["-wal", "-shm"] {
        remove(&beside(path, more))?;
    }
    std::fs::rename(next, path)?;
    settle_in(path)
}

fn build(path: &Path, fingerprint: u32, rows: &[Row], damaged: Option<&Connection>) -> rusqlite::Result<usize> {
    let mut connection = Connection::open(path)?;
    connection.pragma_update(None, "synchronous", "full")?;
    let (_, lines) = make(&mut connection, fingerprint, rows, damaged)?;
    connection.close().map_err(|(_, error)| error)?;
    Ok(lines)
}

/// Copies every line of an audit that can be read; returns how many. From the front, and where that ends early from the back.
pub(super) fn copy_audit(from: &Connection, to: &Transaction<'_>) -> rusqlite::Result<usize> {
    let mut insert =
        to.prepare("INSERT OR IGNORE INTO audit (id, at, who, action, about, why) VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?;
    let mut lines = 0usize;
    for order in ["ASC", "DESC"] {
        let text = format!("SELECT id, at, who, action, about, why FROM audit ORDER BY id {order}");
        let Ok(mut select) = from.prepare(&text) else { break };
        let Ok(mut rows) = select.query([]) else { break };
        loop {
            let row = match rows.next() {
                Ok(Some(row)) => row,
                Ok(None) => return Ok(lines),
                Err(_) => break,
            };
            let read = |row: &rusqlite::Row<'_>| -> rusqlite::Result<(i64, i64, [String; 4])> {
                Ok((row.get(0)?, row.get(1)?, [row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?]))
            };
            let Ok((id, at, [who, action, about, why])) = read(row) else { continue };
            lines = lines.saturating_add(insert.execute(params![id, at, who, action, about, why])?);
        }
    }
    Ok(lines)
}

fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
