//! The repair of damaged databases: quarantine, salvage of what can be read, and atomic replacement.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OpenFlags, Transaction, params};

use super::file::{close_without_checkpoint, connect};
use super::fs::{SHM, WAL, copy_synced, create_replacing, is_empty, open_or_create, remove, sync_parent, with_suffix};
use super::identify::database_files;
use super::inspect::Inspection;
use super::pages::{Cell, PAGE_SIZE, Pages, Value};
use super::schema::{NewFile, initialize};
use super::{Contents, JournalError};
use crate::files::{self, Trust};

/// The suffix of a database that is about to replace the journal.
const NEXT: &str = ".next";
/// The suffix of the copy that SQLite applies the write-ahead log to, to scan its pages.
const SCAN: &str = ".scan";

/// Damage that was found in a journal, and what was salvaged of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damage {
    /// The first fault that was found.
    pub reason: String,
    /// The number of rows that were salvaged.
    pub kept: usize,
    /// The number of rows that were lost, if that is known.
    pub lost: Option<u64>,
    /// The path of the quarantined copy of the damaged file.
    pub quarantine: PathBuf,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the journal was damaged ({}): {} of its rows could be kept, ", self.reason, self.kept)?;
        match self.lost {
            Some(lost) => write!(f, "{lost} could not; ")?,
            None => f.write_str("an unknown number could not; ")?,
        }
        write!(f, "the damaged file is {}", self.quarantine.display())
    }
}

/// Fails if a database is damaged.
pub(super) fn check_sound(path: &Path) -> Result<(), JournalError> {
    let connection = connect(path).map_err(JournalError::sqlite(path))?;
    match Inspection::run(&connection, path).faults.into_iter().next() {
        None => Ok(()),
        Some(fault) => Err(JournalError::Damaged(path.into(), fault)),
    }
}

/// Replaces a damaged journal by a new one with every row that could be read.
pub(super) fn salvage(
    path: &Path,
    inspection: Inspection,
    (new, damaged): (NewFile<'_>, Option<Connection>),
    quarantine: &Path,
) -> Result<Contents, JournalError> {
    let damage = inspection.damage(quarantine);
    rewrite(path, &NewFile { rows: &inspection.rows, damage: damage.as_ref(), ..new }, damaged)?;
    Ok(Contents { rows: inspection.rows, damage, is_new: false })
}

/// Replaces a journal by a new one with these rows and every audit line that can be read. Returns the number of those lines.
///
/// The old file stays in place until the new one is complete and on disk, so that after a crash one of them is found. The new
/// file records damage that was not reported yet.
pub(super) fn rewrite(path: &Path, new: &NewFile<'_>, damaged: Option<Connection>) -> Result<usize, JournalError> {
    let next = with_suffix(path, NEXT);
    create_replacing(&next).map_err(JournalError::io(path))?;
    let built = build(&next, new, &DamagedFile { connection: damaged.as_ref(), path });
    // Before the rename: SQLite deletes the log of the name that it closes, which is that of the new file by then.
    close_without_checkpoint(damaged);
    let lines = built.map_err(JournalError::sqlite(&next))?;
    put_in_place(&next, path).map_err(JournalError::io(path))?;
    Ok(lines)
}

/// Completes or discards a replacement that a crash has interrupted.
pub(super) fn finish_replacement(path: &Path) -> Result<(), JournalError> {
    remove_database(&with_suffix(path, SCAN)).map_err(JournalError::io(path))?;
    let next = with_suffix(path, NEXT);
    if !std::fs::exists(&next).map_err(JournalError::io(path))? {
        return Ok(());
    }
    let modified = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let is_planted = database_files(&next).iter().any(|file| files::check(file, Trust::Own).is_err());
    // A complete file that is older than the journal is a leftover: the journal was written since.
    if !is_planted && check_sound(&next).is_ok() && modified(&next) >= modified(path) {
        return put_in_place(&next, path).map_err(JournalError::io(path));
    }
    remove_database(&next).map_err(JournalError::io(path))
}

/// Replaces a journal by a sound copy. Returns the path of the quarantined old journal.
pub(super) fn replace(from: &Path, path: &Path) -> Result<Option<PathBuf>, JournalError> {
    let next = with_suffix(path, NEXT);
    remove(&next).map_err(JournalError::io(path))?;
    super::file::copy(from, &next)?;
    // A rename moves the database alone. The copy is complete without its log.
    for suffix in [WAL, SHM] {
        remove(&with_suffix(&next, suffix)).map_err(JournalError::io(path))?;
    }
    let exists = std::fs::exists(path).map_err(JournalError::io(path))?;
    // Kept, because an operator may have chosen the wrong copy.
    let before = exists.then(|| quarantine(path, "before")).transpose().map_err(JournalError::io(path))?;
    put_in_place(&next, path).map_err(JournalError::io(path))?;
    Ok(before)
}

/// Copies a database and its write-ahead log to a name of their own. Existing files are never overwritten.
pub(super) fn quarantine(path: &Path, label: &str) -> std::io::Result<PathBuf> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let copy = with_suffix(path, &format!(".{label}-{}", since.as_micros()));
    // With the log, because the newest commits may be there only.
    for suffix in ["", WAL] {
        copy_synced(&with_suffix(path, suffix), &with_suffix(&copy, suffix))?;
    }
    Ok(copy)
}

/// Opens the pages of a damaged database, with its write-ahead log applied.
///
/// SQLite applies the log to a copy: it does so when it closes a database, also one whose pages it cannot read. The copy is
/// unlinked before this returns.
pub(super) fn replayed_pages(path: &Path) -> std::io::Result<Pages> {
    if is_empty(&with_suffix(path, WAL)) {
        return Pages::open(path);
    }
    let copy = with_suffix(path, SCAN);
    let pages = replay(path, &copy).and_then(|()| Pages::open(&copy));
    let removed = remove_database(&copy);
    // Where there is no room for a copy, the pages of the database itself are better than none.
    pages.and_then(|pages| removed.map(|()| pages)).or_else(|_| Pages::open(path))
}

fn replay(path: &Path, copy: &Path) -> std::io::Result<()> {
    remove_database(copy)?;
    for suffix in ["", WAL] {
        copy_synced(&with_suffix(path, suffix), &with_suffix(copy, suffix))?;
    }
    // SQLite takes a database of one byte for an empty one, and deletes its log.
    let file = open_or_create(copy)?;
    if file.metadata()?.len() < PAGE_SIZE {
        file.set_len(PAGE_SIZE)?;
    }
    let own = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let connection = Connection::open_with_flags(copy, own).map_err(std::io::Error::other)?;
    // Opens the log, whether or not the schema can be read; closing then applies it.
    let _ = connection.query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(()));
    connection.close().map_err(|(_, error)| std::io::Error::other(error))
}

fn remove_database(path: &Path) -> std::io::Result<()> {
    database_files(path).iter().try_for_each(|file| remove(file))
}

/// Renames a complete database over another one, durably.
fn put_in_place(next: &Path, path: &Path) -> std::io::Result<()> {
    // The content must be on disk before the name is: else a power loss leaves the name with a file of zeros.
    std::fs::File::open(next)?.sync_all()?;
    // Before the rename: SQLite would apply the log of the old database to the new one.
    for suffix in [WAL, SHM] {
        remove(&with_suffix(path, suffix))?;
    }
    std::fs::rename(next, path)?;
    sync_parent(path)
}

/// Creates a journal in an empty file.
fn build(path: &Path, new: &NewFile<'_>, damaged: &DamagedFile<'_>) -> rusqlite::Result<usize> {
    let own = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let mut connection = Connection::open_with_flags(path, own)?;
    connection.pragma_update(None, "synchronous", "full")?;
    let (_, lines) = initialize(&mut connection, new, Some(damaged))?;
    connection.close().map_err(|(_, error)| error)?;
    Ok(lines)
}

/// A damaged database whose audit log is salvaged.
#[derive(Debug)]
pub(super) struct DamagedFile<'a> {
    /// `None` if SQLite cannot open it.
    connection: Option<&'a Connection>,
    path: &'a Path,
}

impl DamagedFile<'_> {
    /// Copies every audit line that can be read. Returns the number of those lines.
    pub(super) fn copy_audit(&self, to: &Transaction<'_>) -> rusqlite::Result<usize> {
        // `OR IGNORE`, because the page scan repeats the lines that SQLite has read before it failed.
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
            && let Ok(pages) = replayed_pages(self.path)
        {
            pages.each(|Cell { rowid, values }| {
                // SQLite stores NULL for a column that is the row id.
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
        // A line that cannot be read does not end the loop: the lines after it may be sound.
        if let Ok((id, at, texts)) = read(row) {
            add(id, at, texts);
        }
    }
    Ok(())
}
