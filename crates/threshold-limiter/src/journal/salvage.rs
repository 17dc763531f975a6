//! A file that may be damaged: everything is looked at, what can still be read is kept, and nothing is lost in silence.

use std::collections::BTreeSet;
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OpenFlags, Transaction, params};
use threshold_core::KeyId;

use super::file::{
    VERSION, about_sum, beside, connect, create_exclusively, create_new, let_go, make, meta, remove, settle_in, stated,
};
use super::pages::{Cell, Pages, Value};
use super::rows::{Kind, Row, Total, row_sum};
use super::untold::{Note, UNREAD};
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
    /// A damage from before, which was salvaged and not reported yet.
    pub(super) untold: Option<Damage>,
    /// The rows that could not be read then.
    unread: Vec<Row>,
    /// How many rows are about that damage.
    notes: u64,
    /// How many rows there were when it was last written.
    stated_rows: Option<i64>,
    version: Option<i64>,
    versions_agree: bool,
}

impl Found {
    /// Looks at all there is. It costs as much as reading the file twice, once at each start.
    pub(super) fn look(connection: &Connection, path: &Path) -> Self {
        let mut found = Self::default();
        found.look_at_itself(connection);
        let sound_pages = found.look_at_pages(connection);
        if found.read(connection).is_err() || !sound_pages {
            found.read_pages(path);
        }
        if found.faults.is_empty() && stated(connection).ok() != Some(found.total) {
            found.faults.push("rows are missing, or were changed".to_owned());
        }
        found.add_unread();
        found
    }

    /// A file that SQLite cannot open, as one that was cut: what is whole on its pages is read all the same.
    pub(super) fn unopened(path: &Path, reason: String) -> Self {
        let mut found = Self { faults: vec![reason], ..Self::default() };
        found.read_pages(path);
        found.add_unread();
        found
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

    /// Says whether every page is where it belongs.
    fn look_at_pages(&mut self, connection: &Connection) -> bool {
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

    fn read(&mut self, connection: &Connection) -> Result<(), rusqlite::Error> {
        let read = (|| {
            let mut select = connection.prepare("SELECT kind, key, value, sum FROM record ORDER BY kind, key")?;
            let mut rows = select.query([])?;
            while let Some(row) = rows.next()? {
                self.take(row.get(0)?, row.get(1)?, row.get(2).ok(), row.get(3).ok());
            }
            Ok(())
        })();
        read.inspect_err(|error: &rusqlite::Error| self.faults.push(error.to_string()))
    }

    /// Reads every row that is whole on a page, wherever SQLite stopped. A row of which only the key is there is known by
    /// that.
    fn read_pages(&mut self, path: &Path) {
        let Ok(pages) = Pages::open(path) else { return };
        let own = pages.user_version();
        let mut seen: BTreeSet<(i64, Vec<u8>)> =
            self.rows.iter().map(|row| (row.kind.number(), row.key.clone())).collect();
        let mut partial = Vec::new();
        pages.each(|Cell { rowid, values }| match (rowid, values.as_slice()) {
            (None, [Value::Integer(kind), Value::Blob(key), value, sum]) => {
                let whole = match (value, sum) {
                    (Value::Blob(value), Value::Integer(sum)) => row_sum(*kind, key, value) == *sum,
                    _ => false,
                };
                if !whole {
                    partial.push((*kind, key.clone()));
                } else if seen.insert((*kind, key.clone()))
                    && let (Value::Blob(value), Value::Integer(sum)) = (value, sum)
                {
                    self.take(*kind, key.clone(), Some(value.clone()), Some(*sum));
                }
            }
            (None, [Value::Text(name), Value::Integer(value)]) => self.note_meta(name, *value),
            _ => {}
        });
        for (kind, key) in partial {
            if (kind == UNREAD || Kind::from_number(kind).is_some()) && seen.insert((kind, key.clone())) {
                self.take(kind, key, None, None);
            }
        }
        self.versions_agree = self.version.is_some() && own == self.version;
    }

    fn note_meta(&mut self, name: &str, value: i64) {
        let known = match name {
            "version" => &mut self.version,
            "secret" => &mut self.secret,
            "rows" => &mut self.stated_rows,
            _ => return,
        };
        known.get_or_insert(value);
    }

    fn take(&mut self, number: i64, key: Vec<u8>, value: Option<Vec<u8>>, sum: Option<i64>) {
        let value = value.filter(|value| Some(row_sum(number, &key, value)) == sum);
        let (kind, note) = (Kind::from_number(number), Note::read(number, &key, value.as_deref()));
        match (&value, sum) {
            (Some(_), Some(sum)) if kind.is_some() || note.is_some() => self.total.add(sum),
            _ => self.faults.push("a row is not what was written".to_owned()),
        }
        self.notes = self.notes.saturating_add(u64::from(note.is_some()));
        match (kind, note) {
            (Some(kind), _) => self.rows.push(Row { kind, key, value }),
            (None, Some(Note::Damage(damage))) => self.untold = Some(damage),
            (None, Some(Note::Unread(row))) => self.unread.push(row),
            (None, None) => {}
        }
    }

    /// Adds the rows that could not be read before, unless they have been written again since.
    fn add_unread(&mut self) {
        let mut unread = std::mem::take(&mut self.unread);
        let written: BTreeSet<(Kind, &[u8])> = self.rows.iter().map(|row| (row.kind, row.key.as_slice())).collect();
        unread.retain(|row| !written.contains(&(row.kind, row.key.as_slice())));
        self.rows.append(&mut unread);
    }

    /// What has to be reported: what is wrong with this file, and what was wrong before and was not reported yet.
    pub(super) fn damage(&self, aside: &Path) -> Option<Damage> {
        match (self.new_damage(aside), &self.untold) {
            (Some(new), Some(before)) => {
                let reason = format!("{}; and before that, {before}", new.reason);
                Some(Damage { reason, ..new })
            }
            (new, before) => new.or_else(|| before.clone()),
        }
    }

    fn new_damage(&self, aside: &Path) -> Option<Damage> {
        let kept = self.rows.iter().filter(|row| row.value.is_some()).count();
        // What the file says about itself is one of the rows that it counts, and so is each note about an earlier damage.
        let others = self.notes.saturating_add(1);
        let stated = self.stated_rows.and_then(|rows| u64::try_from(rows).ok()?.checked_sub(others));
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
    let found = Found::look(&connect(path).map_err(failed)?, path);
    match found.faults.first() {
        None => Ok(()),
        Some(fault) => Err(JournalError::Io(path.into(), std::io::Error::other(fault.clone()))),
    }
}

/// The version of a file, if it is another than this program's and the file says so twice: one that does not agree with
/// itself is damaged.
pub(super) fn other_version(path: &Path) -> Option<i64> {
    let pages = Pages::open(path).ok()?;
    let own = pages.user_version().filter(|own| *own != VERSION)?;
    let mut stated = None;
    pages.each(|Cell { rowid, values }| {
        if let (None, [Value::Text(name), Value::Integer(value)]) = (rowid, values.as_slice())
            && name == "version"
        {
            stated.get_or_insert(*value);
        }
    });
    stated.filter(|stated| *stated == own)
}

/// Puts a new file with all that could be read in the place of a damaged one, of which `aside` is a copy.
pub(super) fn rebuild(
    path: &Path,
    key_id: KeyId,
    found: Found,
    damaged: Option<Connection>,
    aside: &Path,
) -> Result<Kept, JournalError> {
    let damage = found.damage(aside);
    put_anew(path, key_id, &found.rows, damage.as_ref(), damaged)?;
    Ok(Kept { rows: found.rows, damage, is_new: false })
}

/// Puts a new file with these rows in the place of a damaged one, and with every line of its audit that can be read; returns
/// how many those are. Until the new one is whole, the damaged one stays where it is: whenever this is interrupted, one of
/// them is found again. The new one records the damage, if any is given, so that it is reported even then.
pub(super) fn put_anew(
    path: &Path,
    key_id: KeyId,
    rows: &[Row],
    damage: Option<&Damage>,
    damaged: Option<Connection>,
) -> Result<usize, JournalError> {
    let io = |error| JournalError::Io(path.into(), error);
    let next = beside(path, NEXT);
    create_exclusively(&next).map_err(io)?;
    let old = Old { connection: damaged.as_ref(), pages: Pages::open(path).ok() };
    let built = build(&next, key_id, rows, damage, &old);
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

/// Copies a file, and what belongs to it, under a name of its own. Nothing that is there is written over, and no link is
/// followed.
pub(super) fn put_aside(path: &Path, why: &str) -> std::io::Result<PathBuf> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let aside = beside(path, &format!(".{why}-{}", since.as_micros()));
    for more in ["", "-wal"] {
        let mut from = match std::fs::File::open(beside(path, more)) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            opened => opened?,
        };
        let mut to = create_new(&beside(&aside, more))?;
        std::io::copy(&mut from, &mut to)?;
        to.sync_all()?;
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

/// Builds a journal in a file that was just made, and is empty.
fn build(path: &Path, key_id: KeyId, rows: &[Row], damage: Option<&Damage>, old: &Old<'_>) -> rusqlite::Result<usize> {
    let own = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let mut connection = Connection::open_with_flags(path, own)?;
    connection.pragma_update(None, "synchronous", "full")?;
    let (_, lines) = make(&mut connection, key_id, rows, damage, Some(old))?;
    connection.close().map_err(|(_, error)| error)?;
    Ok(lines)
}

/// A damaged file, as far as it can be opened, for the lines of its audit.
pub(super) struct Old<'c> {
    connection: Option<&'c Connection>,
    pages: Option<Pages>,
}

impl Old<'_> {
    /// Copies every line of the audit that can be read; returns how many.
    pub(super) fn copy_audit(&self, to: &Transaction<'_>) -> rusqlite::Result<usize> {
        let mut insert = to
            .prepare("INSERT OR IGNORE INTO audit (id, at, who, action, about, why) VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?;
        let (mut lines, mut failed) = (0usize, None);
        let mut add = |id: i64, at: i64, [who, action, about, why]: [String; 4]| match insert
            .execute(params![id, at, who, action, about, why])
        {
            Ok(added) => lines = lines.saturating_add(added),
            Err(error) => failed = Some(error),
        };
        if self.connection.is_none_or(|connection| read_audit(connection, &mut add).is_err())
            && let Some(pages) = &self.pages
        {
            pages.each(|Cell { rowid, values }| {
                if let (Some(id), Ok([Value::Null, Value::Integer(at), texts @ ..])) =
                    (rowid, <[Value; 6]>::try_from(values))
                    && let [Value::Text(who), Value::Text(action), Value::Text(about), Value::Text(why)] = texts
                {
                    add(id, at, [who, action, about, why]);
                }
            });
        }
        failed.map_or(Ok(lines), Err)
    }
}

fn read_audit(from: &Connection, add: &mut impl FnMut(i64, i64, [String; 4])) -> rusqlite::Result<()> {
    let mut select = from.prepare("SELECT id, at, who, action, about, why FROM audit ORDER BY id")?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        let read = |row: &rusqlite::Row<'_>| -> rusqlite::Result<(i64, i64, [String; 4])> {
            Ok((row.get(0)?, row.get(1)?, [row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?]))
        };
        if let Ok((id, at, texts)) = read(row) {
            add(id, at, texts);
        }
    }
    Ok(())
}
