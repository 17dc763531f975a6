//! Tells a journal from any other file, without writing to either.
//!
//! A damaged journal is copied aside and replaced. Done to a file of another program, that would destroy its data, so a file
//! must show that it is a journal first. The file is read as bytes: SQLite changes a database that it opens, if only to roll
//! back the transaction of a program that crashed.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::JournalError;
use super::counters::counters_path;
use super::fs::{LOCK, SHM, WAL, is_empty, parent, with_suffix};
use super::pages::{Cell, Pages, Value};
use super::rows::checksum;
use super::schema::META_TABLE;
use super::{commit_mark, secret};
use crate::files::{self, Trust};

/// How much of a file is searched: the largest page of SQLite, because the first page holds the definitions of the tables. In
/// the log of a new journal, they are in one of the first frames.
const SEARCHED: usize = 64 << 10;

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

/// Fails if another user can have planted, or can change, one of the files of a journal.
pub(super) fn check_planted(path: &Path) -> Result<(), JournalError> {
    for file in [with_suffix(path, LOCK), counters_path(path)].into_iter().chain(database_files(path)) {
        files::check(&file, Trust::Own).map_err(JournalError::io(&file))?;
    }
    Ok(())
}

/// Returns the files of a database. SQLite applies a rollback journal that is beside it, as it does the log.
pub(super) fn database_files(path: &Path) -> [PathBuf; 4] {
    ["", WAL, SHM, "-journal"].map(|suffix| with_suffix(path, suffix))
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
    match files::read(path, Trust::Any, SEARCHED) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        read => read,
    }
}

fn is_beside_journal_files(path: &Path) -> bool {
    let lock = files::open(&with_suffix(path, LOCK), Trust::Any).ok();
    let mark = lock.and_then(|lock| commit_mark::read(&lock));
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
