//! A file that is damaged, deleted or replaced while the journal is in use.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use threshold_core::policy::{Ban, Layer, ListEntry};
use threshold_core::{Policy, Timestamp};
use threshold_limiter::bans::BanList;
use threshold_limiter::journal::{AuditLine, Journal, JournalError, Repair, rows_in_memory};
use threshold_limiter::store::memory::MemoryStore;

use super::{POLICY, SECOND, START, Scratch, saved, secret, world};

/// Waits until the journal has found damage and mended it.
fn repaired(journal: &Journal) -> Arc<Repair> {
    let mut repairs = journal.repairs();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let repaired = runtime.block_on(async { tokio::time::timeout(SECOND, repairs.wait_for(Option::is_some)).await });
    repaired.unwrap().unwrap().clone().unwrap()
}

type Harm = fn(&Path);

/// What somebody can do to a file while it is in use.
fn harms() -> [(&'static str, Harm); 6] {
    fn log(path: &Path) -> PathBuf {
        path.with_extension("db-wal")
    }
    fn scribble(path: &Path) {
        let mut bytes = std::fs::read(path).unwrap();
        bytes.iter_mut().skip(3_000).for_each(|byte| *byte ^= 0x55);
        // In place: the file stays the same one.
        std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all(&bytes).unwrap();
    }
    [
        ("changed", scribble),
        ("cut short", |path| std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(3_000).unwrap()),
        ("emptied", |path| std::fs::write(path, "").unwrap()),
        ("deleted", |path| {
            for more in ["db", "db-wal", "db-shm", "db.lock"] {
                std::fs::remove_file(path.with_extension(more)).unwrap();
            }
        }),
        ("with another log", |path| scribble(&log(path))),
        ("replaced", |path| {
            std::fs::write(path.with_extension("other"), "somebody's notes").unwrap();
            std::fs::rename(path.with_extension("other"), path).unwrap();
        }),
    ]
}

/// Whatever is done to the file while it is in use: it is noticed by itself, told, kept, and written anew from memory; what
/// was acknowledged before and what comes after is all there.
///
/// Woken by: no `look_again` in `write`; not asking memory in `write_anew`; not putting aside in `set_aside`.
#[test]
fn a_file_that_is_damaged_while_in_use_is_written_anew_from_memory() {
    for (what, harm) in harms() {
        let scratch = Scratch::new();
        let (journal, _) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
        let journal = Arc::new(journal);
        let memory = Arc::new(BanList::default().with_change_sink(Arc::<Journal>::clone(&journal)));
        let store = Arc::new(MemoryStore::new(Policy::parse(POLICY, &|_| None).unwrap().memory()));
        let source = (Arc::downgrade(&store), Arc::downgrade(&memory));
        journal.with_rebuild_source(move || Some(rows_in_memory(&*source.0.upgrade()?, &*source.1.upgrade()?)));
        let ban = |name: &str| {
            let whom = ListEntry::named(Layer::User, name).unwrap();
            let ban = Ban { whom, reason: "r".into(), by: "b".into(), from: START, until: Timestamp::MAX };
            memory.set(ban.whom.ban_id(secret().digest_key()), ban, START).unwrap();
        };
        (0..100).for_each(|number| ban(&format!("mallory{number}")));
        let line = |about: &str| AuditLine {
            at: START,
            who: "ops".into(),
            action: "ban".into(),
            about: about.into(),
            why: "test".into(),
        };
        journal.audit(line("before")).unwrap();
        assert!(saved(&journal, SECOND));
        harm(&scratch.db());
        // Nothing is written, and it is found all the same.
        let repair = repaired(&journal);
        assert_eq!(repair.rows, 100, "{what}: {repair}");
        assert_eq!(repair.aside.is_none(), what == "deleted", "{what}: {repair}");
        assert!(repair.aside.as_ref().is_none_or(|aside| aside.exists()), "{what}: {repair}");
        assert!(matches!(Journal::open(&scratch.db(), secret().key_id()), Err(JournalError::InUse(_))), "{what}");
        ban("later");
        journal.audit(line("after")).unwrap();
        assert!(saved(&journal, SECOND), "{what}");
        assert!(journal.troubles().borrow().is_none(), "{what}");
        let copy = scratch.0.join("copy.db");
        Journal::copy(&scratch.db(), &copy).unwrap();
        let kept = Journal::read(&copy).unwrap();
        assert_eq!((kept.rows.len(), kept.damage), (101, None), "{what}");
        let lines = rusqlite::Connection::open(&copy).unwrap();
        let lines: i64 = lines.query_row("SELECT count(*) FROM audit", [], |row| row.get(0)).unwrap();
        assert_eq!(usize::try_from(lines).unwrap(), repair.lines + 1, "{what}: {repair}");
    }
}

/// Where nobody can be asked what memory holds, what can be read is kept. A line of the audit that somebody has written by
/// hand is no damage; a row is.
#[test]
fn without_memory_to_ask_what_can_be_read_is_kept() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    for number in 0..40 {
        world.ban(Layer::User, &format!("mallory{number}"), Timestamp::MAX);
    }
    assert!(saved(&world.journal, SECOND));
    let other = rusqlite::Connection::open(scratch.db()).unwrap();
    other.execute("INSERT INTO audit (at, who, action, about, why) VALUES (1, 'by hand', '', '', '')", []).unwrap();
    world.ban(Layer::User, "after somebody else's line", Timestamp::MAX);
    assert!(saved(&world.journal, SECOND));
    assert!(world.journal.repairs().borrow().is_none());
    other.execute("UPDATE record SET sum = sum + 1 WHERE key = (SELECT min(key) FROM record)", []).unwrap();
    drop(other);
    let repair = repaired(&world.journal);
    assert_eq!((repair.rows, repair.lines), (40, 1), "{repair}");
}

/// A start that was interrupted while it put a whole file in the place of a damaged one: the log of the damaged one is gone,
/// and what is left of it looks sound. The whole one is what counts.
///
/// Woken by: no `finish` in `open`.
#[test]
fn a_file_that_was_about_to_take_the_journals_place_takes_it() {
    let scratch = Scratch::new();
    let next = scratch.0.join("threshold.db.next");
    let rows = |path: &Path| Journal::open(path, secret().key_id()).unwrap().1.rows.len();
    world(&scratch.db(), START).ban(Layer::User, "mallory", Timestamp::MAX);
    let earlier = std::fs::read(scratch.db()).unwrap();
    world(&scratch.db(), START).ban(Layer::User, "eve", Timestamp::MAX);
    std::fs::rename(scratch.db(), &next).unwrap();
    std::fs::write(scratch.db(), &earlier).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(scratch.db()).unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(rows(&scratch.db()), 2);
    assert!(!next.exists());
    // One that is not whole, or is older than the journal, is nobody's successor.
    for left in [&b"half a file"[..], &earlier] {
        std::fs::write(&next, left).unwrap();
        std::fs::OpenOptions::new().write(true).open(&next).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(rows(&scratch.db()), 2);
        assert!(!next.exists());
    }
}
