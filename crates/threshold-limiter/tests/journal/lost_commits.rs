//! Commits that are missing without a trace in the database: the commit mark in the lock file tells.

use std::path::PathBuf;

use threshold_core::Timestamp;
use threshold_core::policy::Layer;
use threshold_limiter::journal::{Contents, Journal, JournalError};

use super::{SECOND, START, Scratch, saved, secret, world};

fn file(scratch: &Scratch, suffix: &str) -> PathBuf {
    scratch.0.join(format!("threshold.db{suffix}"))
}

/// Copies the files of a journal that is open, as a kill would leave them.
fn killed(scratch: &Scratch, suffixes: &[&str]) -> Scratch {
    let copy = Scratch::new();
    for suffix in suffixes {
        std::fs::copy(file(scratch, suffix), file(&copy, suffix)).unwrap();
    }
    copy
}

fn open(scratch: &Scratch) -> Contents {
    Journal::open(&scratch.db(), secret().key_id()).unwrap().1
}

/// A log that was deleted, and a database from before the last commit, are sound earlier states.
///
/// Fails without `check_commits` in `JournalFile::open`, and without `write_mark` in `JournalFile::write`.
#[test]
fn a_deleted_log_and_an_old_copy_are_reported() {
    let scratch = Scratch::new();
    world(&scratch.db(), START).ban(Layer::User, "mallory", Timestamp::MAX);
    let old = std::fs::read(scratch.db()).unwrap();
    let world = world(&scratch.db(), START);
    world.ban(Layer::User, "eve", Timestamp::MAX);
    assert!(saved(&world.journal, SECOND));
    assert_eq!(open(&killed(&scratch, &["", "-wal", ".lock"])).rows.len(), 2);
    let without_log = killed(&scratch, &["", ".lock"]);
    let old_copy = killed(&scratch, &[".lock"]);
    std::fs::write(old_copy.db(), &old).unwrap();
    for copy in [without_log, old_copy] {
        let contents = open(&copy);
        let damage = contents.damage.unwrap();
        assert!(damage.reason.contains("commits are missing"), "{damage}");
        // How many rows those commits had is unknown.
        assert_eq!((contents.rows.len(), damage.kept, damage.lost), (1, 1, None), "{damage}");
        // The new file goes on from the mark: the next open adds no damage of its own.
        assert_eq!(open(&copy).damage.unwrap(), damage);
    }
}

/// A kill between the commit and the write of the mark leaves a mark that is behind. So does a power loss, after which the
/// mark may also be missing or garbage. None of them is damage.
#[test]
fn a_mark_that_is_behind_or_unreadable_is_no_damage() {
    let scratch = Scratch::new();
    world(&scratch.db(), START).ban(Layer::User, "mallory", Timestamp::MAX);
    let behind = std::fs::read(file(&scratch, ".lock")).unwrap();
    assert_eq!(behind.len(), 16);
    world(&scratch.db(), START).ban(Layer::User, "eve", Timestamp::MAX);
    for mark in [&behind[..], b"", &[0; 16], &[0xff; 16], &behind[..7]] {
        std::fs::write(file(&scratch, ".lock"), mark).unwrap();
        let contents = open(&scratch);
        assert_eq!((contents.rows.len(), contents.damage), (2, None));
    }
}

/// A restored copy is older than the mark on purpose, and so is a new journal.
///
/// Fails without `commit_mark::clear` in `Journal::replace`.
#[test]
fn a_restored_copy_and_a_new_journal_are_no_damage() {
    let scratch = Scratch::new();
    let copy = scratch.0.join("copy.db");
    world(&scratch.db(), START).ban(Layer::User, "mallory", Timestamp::MAX);
    Journal::copy(&scratch.db(), &copy).unwrap();
    world(&scratch.db(), START).ban(Layer::User, "eve", Timestamp::MAX);
    Journal::replace(&copy, &scratch.db()).unwrap();
    let contents = open(&scratch);
    assert_eq!((contents.rows.len(), contents.damage), (1, None));
    std::fs::remove_file(scratch.db()).unwrap();
    let (_, contents) = Journal::open_new(&scratch.db(), secret().key_id()).unwrap();
    assert!(contents.is_new);
    let contents = open(&scratch);
    assert_eq!((contents.rows.len(), contents.damage), (0, None));
}

/// A copy of a damaged file fails with a reason and leaves no file behind.
#[test]
fn a_damaged_copy_is_refused() {
    let scratch = Scratch::new();
    world(&scratch.db(), START).ban(Layer::User, "mallory", Timestamp::MAX);
    let raw = rusqlite::Connection::open(scratch.db()).unwrap();
    raw.execute("DELETE FROM record", []).unwrap();
    drop(raw);
    let copy = scratch.0.join("copy.db");
    let error = Journal::copy(&scratch.db(), &copy).unwrap_err();
    assert!(matches!(&error, JournalError::Damaged(path, _) if *path == copy), "{error}");
    assert!(!copy.exists());
}
