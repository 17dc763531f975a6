//! Tells a journal from any other file, without writing to either.
//!
//! A damaged journal is copied aside and replaced. Done to a file of another program, that would destroy its data, so a file
//! must show that it is a journal first. The file is read as bytes: SQLite changes a database that it opens, if only to roll
//! back the transaction of a program that crashed.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::Path;

use super::JournalError;
use super::fs::{LOCK, WAL, is_empty, parent, with_suffix};
use super::pages::{Cell, Pages, Value};
use super::rows::checksum;
use super::schema::META_TABLE;
use super::{commit_mark, secret};

/// How much of a file is searched: the largest page of SQLite, because the first page holds the definitions of the tables. In
/// the log of a new journal, they are in one of the first frames.
const SEARCHED: u64 = 64 << 10;

/// Fails if a journal cannot be at this path: its folder is missing, or another program's file is there.
///
/// A file is a journal if it has the table `meta`, a secret or a commit mark beside it, or a row whose checksum is right: the
/// others remain when the first page of the file is damaged. A missing or empty file may become one.
pub(super) fn check(path: &Path) -> Result<(), JournalError> {
    let folder = parent(path);
    if !std::fs::exists(folder).map_err(JournalError::io(folder))? {
        return Err(JournalError::NoFolder(folder.into(), path.into()));
    }
    // What is not a file, such as a folder, is left to SQLite's error.
    // `has_row` comes last, because it reads the whole file.
    if is_empty(path) || !path.is_file() || has_meta_table(path)? || is_beside_journal_files(path) || has_row(path) {
        return Ok(());
    }
    Err(JournalError::NotAJournal(path.into()))
}

fn has_meta_table(path: &Path) -> Result<bool, JournalError> {
    for file in [path.to_owned(), with_suffix(path, WAL)] {
        let start = start_of(&file).map_err(JournalError::io(&file))?;
        if start.windows(META_TABLE.len()).any(|part| part == META_TABLE.as_bytes()) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn start_of(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut start = Vec::new();
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        file => drop(file?.take(SEARCHED).read_to_end(&mut start)?),
    }
    Ok(start)
}

fn is_beside_journal_files(path: &Path) -> bool {
    let mark = File::open(with_suffix(path, LOCK)).ok().and_then(|lock| commit_mark::read(&lock));
    mark.is_some() || secret::is_beside(path)
}

fn has_row(path: &Path) -> bool {
    let mut found = false;
    if let Ok(pages) = Pages::open(path) {
        pages.each(|Cell { values, .. }| {
            if let [Value::Integer(kind), Value::Blob(key), Value::Blob(value), Value::Integer(sum)] = values.as_slice()
            {
                found |= checksum(*kind, key, value) == *sum;
            }
        });
    }
    found
}
