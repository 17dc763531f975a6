//! Databases that are damaged, deleted or replaced while the journal is in use.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use threshold_core::policy::{Ban, Layer, ListEntry};
use threshold_core::{Policy, Timestamp};
use threshold_limiter::bans::BanList;
use threshold_limiter::journal::{AuditLine, Journal, JournalError, JournalEvent, Repair, rows_in_memory};
use threshold_limiter::store::memory::MemoryStore;

use super::{POLICY, SECOND, START, Scratch, saved, secret, world};

/// Waits until the journal has found damage and repaired it.
pub(super) fn repaired(journal: &Journal) -> Arc<Repair> {
    let mut events = journal.events();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let repair = async {
        loop {
            if let JournalEvent::Repaired(repair) = events.next().await.unwrap() {
                return repair;
            }
        }
    };
    runtime.block_on(async { tokio::time::timeout(SECOND, repair).await }).unwrap()
}

type Harm = fn(&Path);

/// Returns ways to damage a database while it is in use.
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

/// Damage is detected without a write, reported, quarantined, and repaired from memory. No acknowledged change is lost.
///
/// Woken by: no `verify_unchanged` in `write`; no rows of memory in `rebuild`; no copy in `quarantine`.
#[test]
fn a_file_that_is_damaged_while_in_use_is_rebuilt_from_memory() {
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
        // Detected although nothing is written.
        let repair = repaired(&journal);
        assert_eq!(repair.rows, 100, "{what}: {repair}");
        assert_eq!(repair.quarantine.is_none(), what == "deleted", "{what}: {repair}");
        assert!(repair.quarantine.as_ref().is_none_or(|aside| aside.exists()), "{what}: {repair}");
        assert!(matches!(Journal::open(&scratch.db(), secret().key_id()), Err(JournalError::InUse(_))), "{what}");
        ban("later");
        journal.audit(line("after")).unwrap();
        assert!(saved(&journal, SECOND), "{what}");
        assert!(journal.failure().is_none(), "{what}");
        let copy = scratch.0.join("copy.db");
        Journal::copy(&scratch.db(), &copy).unwrap();
        let contents = Journal::read(&copy).unwrap();
        assert_eq!((contents.rows.len(), contents.damage), (101, None), "{what}");
        let lines = rusqlite::Connection::open(&copy).unwrap();
        let lines: i64 = lines.query_row("SELECT count(*) FROM audit", [], |row| row.get(0)).unwrap();
        assert_eq!(usize::try_from(lines).unwrap(), repair.lines + 1, "{what}: {repair}");
    }
}

/// Without a rebuild source, the readable rows are kept. An audit line that an operator adds by hand is no damage; a changed
/// row is.
#[test]
fn without_a_rebuild_source_readable_rows_are_kept() {
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
    assert!(world.journal.last_repair().is_none());
    other.execute("UPDATE record SET sum = sum + 1 WHERE key = (SELECT min(key) FROM record)", []).unwrap();
    drop(other);
    let repair = repaired(&world.journal);
    assert_eq!((repair.rows, repair.lines), (40, 1), "{repair}");
}

/// A crash in the middle of a replacement: the log of the old database is gone already, and the rest of it looks sound. The
/// next start completes the replacement.
///
/// Woken by: no `finish_replacement` in `open`.
#[test]
fn an_interrupted_replacement_is_completed() {
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
    // An incomplete replacement, or one that is older than the journal, is discarded.
    for left in [&b"half a file"[..], &earlier] {
        std::fs::write(&next, left).unwrap();
        std::fs::OpenOptions::new().write(true).open(&next).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(rows(&scratch.db()), 2);
        assert!(!next.exists());
    }
}
