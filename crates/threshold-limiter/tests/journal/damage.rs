//! Damage that a start finds: no row is lost without a report.

use std::path::Path;

use threshold_core::Timestamp;
use threshold_core::policy::Layer;
use threshold_limiter::journal::{Journal, Kind, Row};

use super::{SECOND, START, Scratch, saved, secret, world};

/// Returns the distance between changed bytes. `./test long` changes far more of them.
fn step(usual: usize) -> usize {
    let factor: usize = std::env::var("THRESHOLD_LAW_FACTOR").map_or(1, |factor| factor.parse().unwrap());
    usual.checked_div(factor).unwrap_or(usual).max(1)
}

/// Changes bytes all over the database in turn. It opens without a panic, and reports damage if a ban is gone.
#[test]
fn no_changed_byte_clears_a_ban_in_silence() {
    let scratch = Scratch::new();
    {
        let world = world(&scratch.db(), START);
        for number in 0..20 {
            assert!(world.strike(&format!("eve{number}"), 6));
            world.lock(&format!("victim{number}"));
            world.ban(Layer::User, &format!("mallory{number}"), Timestamp::MAX);
        }
        assert!(world.journal.close());
    }
    let whole = std::fs::read(scratch.db()).unwrap();
    let original = Journal::read(&scratch.db()).unwrap().rows;
    assert!(original.len() >= 60);
    let step = step(193);
    let (mut noticed, mut salvaged) = (0, 0);
    for at in (0..whole.len()).step_by(step) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        let copy = Scratch::new();
        std::fs::write(copy.db(), &bytes).unwrap();
        match Journal::open(&copy.db(), secret().key_id()) {
            Ok((journal, contents)) => {
                let sound = contents.rows == original;
                assert!(sound || contents.damage.is_some(), "byte {at}: rows are gone without a report");
                if let Some(damage) = &contents.damage {
                    noticed += 1;
                    assert_eq!(std::fs::read(&damage.quarantine).unwrap().len(), whole.len(), "byte {at}");
                    salvaged += usize::from(damage.kept + 1 >= original.len());
                    // The new file is sound, holds the readable rows, and records the damage until it is acknowledged.
                    let again = Journal::read(&copy.db()).unwrap();
                    assert_eq!(again.damage.as_ref(), Some(damage), "byte {at}");
                    assert_eq!(again.rows.len(), contents.rows.len(), "byte {at}");
                    journal.acknowledge_damage();
                    assert!(journal.close());
                    let again = Journal::read(&copy.db()).unwrap();
                    assert!(again.damage.is_none(), "byte {at}: {:?}", again.damage);
                    assert_eq!(again.rows.len(), damage.kept);
                }
            }
            Err(error) => panic!("byte {at}: {error}"),
        }
    }
    assert!(noticed > 10 && salvaged > 5, "{noticed} noticed, {salvaged} salvaged");
}

/// The same for the write-ahead log that a kill leaves behind. SQLite ends the recovery of a log at the first damaged frame
/// without an error, so that only the commit mark tells that later commits are missing.
///
/// Fails without `check_commits` in `JournalFile::open`, and without `write_mark` in `JournalFile::write`.
#[test]
fn no_changed_byte_of_the_log_clears_a_ban_in_silence() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    for number in 0..6 {
        world.ban(Layer::User, &format!("mallory{number}"), Timestamp::MAX);
        assert!(saved(&world.journal, SECOND));
    }
    let log_of = |path: &Path| path.with_extension("db-wal");
    let lock_of = |path: &Path| path.with_extension("db.lock");
    // The files of a killed process.
    let (file, log) = (std::fs::read(scratch.db()).unwrap(), std::fs::read(log_of(&scratch.db())).unwrap());
    let mark = std::fs::read(lock_of(&scratch.db())).unwrap();
    assert!(log.len() > 6 * 4_096);
    let mut noticed = 0;
    for at in (0..log.len()).step_by(step(397)) {
        let mut bytes = log.clone();
        bytes[at] ^= 1 << (at % 8);
        let copy = Scratch::new();
        std::fs::write(copy.db(), &file).unwrap();
        std::fs::write(log_of(&copy.db()), &bytes).unwrap();
        std::fs::write(lock_of(&copy.db()), &mark).unwrap();
        let (_, contents) = Journal::open(&copy.db(), secret().key_id()).unwrap();
        assert!(contents.rows.len() == 6 || contents.damage.is_some(), "byte {at}: {} rows", contents.rows.len());
        if let Some(damage) = contents.damage {
            noticed += 1;
            assert_eq!(
                std::fs::read(
                    damage
                        .quarantine
                        .with_file_name(format!("{}-wal", damage.quarantine.file_name().unwrap().to_str().unwrap()))
                )
                .unwrap(),
                bytes
            );
        }
    }
    assert!(noticed > 10, "{noticed}");
    // Unchanged, it is sound.
    let copy = Scratch::new();
    std::fs::write(copy.db(), &file).unwrap();
    std::fs::write(log_of(&copy.db()), &log).unwrap();
    std::fs::write(lock_of(&copy.db()), &mark).unwrap();
    let (_, contents) = Journal::open(&copy.db(), secret().key_id()).unwrap();
    assert!(contents.damage.is_none() && contents.rows.len() == 6);
}

/// An unreadable row blocks its subject or account: it may have been a ban or a lock.
#[test]
fn the_subject_of_an_unreadable_row_is_blocked() {
    let scratch = Scratch::new();
    {
        let world = world(&scratch.db(), START);
        assert!(!world.strike("bob", 3));
        world.lock("victim");
        assert!(world.journal.close());
    }
    let raw = rusqlite::Connection::open(scratch.db()).unwrap();
    raw.execute("UPDATE record SET value = zeroblob(4)", []).unwrap();
    drop(raw);
    let world = world(&scratch.db(), START);
    assert_eq!(world.restored.unreadable, 2);
    assert!(world.contents.damage.is_some());
    assert!(world.is_banned("bob"));
    assert!(world.is_locked("victim"));
    world.journal.acknowledge_damage();
    assert!(saved(&world.journal, SECOND));
    drop(world);
    let world = self::world(&scratch.db(), START);
    assert!(world.contents.damage.is_none());
    assert!(world.is_banned("bob") && world.is_locked("victim"));
}

/// Writes a journal with twenty bans, of which it has lost one, and with a strike and a lock whose values are lost.
fn damaged(scratch: &Scratch) {
    {
        let world = world(&scratch.db(), START);
        assert!(!world.strike("bob", 3));
        world.lock("victim");
        for number in 0..20 {
            world.ban(Layer::User, &format!("mallory{number}"), Timestamp::MAX);
        }
        assert!(world.journal.close());
    }
    let raw = rusqlite::Connection::open(scratch.db()).unwrap();
    raw.execute("UPDATE record SET value = zeroblob(4) WHERE kind < 3", []).unwrap();
    raw.execute("DELETE FROM record WHERE kind = 3 AND key = (SELECT min(key) FROM record WHERE kind = 3)", [])
        .unwrap();
}

/// A process that is killed after the salvage and before it has logged anything: each open reports the same damage and the
/// same rows until the damage is acknowledged.
///
/// Woken by: no `damage_record::write` in `initialize`; no `damage: inspection.unreported` in `JournalFile::open`; no
/// `damage_record::clear` in `commit`.
#[test]
fn damage_is_reported_at_each_open_until_it_is_acknowledged() {
    let scratch = Scratch::new();
    damaged(&scratch);
    let open = || Journal::open(&scratch.db(), secret().key_id()).unwrap();
    let (journal, first) = open();
    // Nothing was changed or acknowledged, as after a kill.
    drop(journal);
    let damage = first.damage.unwrap();
    assert_eq!((damage.kept, damage.lost), (19, Some(3)), "{damage}");
    for _ in 0..2 {
        let (_, contents) = open();
        assert_eq!(contents.damage.as_ref(), Some(&damage));
        assert_eq!(sorted(&contents.rows), sorted(&first.rows));
    }
    // The subjects of unreadable rows are blocked all the same.
    let world = world(&scratch.db(), START);
    assert_eq!((world.restored.unreadable, world.restored.bans), (2, 19));
    assert!(world.is_banned("bob") && world.is_locked("victim"));
    world.journal.acknowledge_damage();
    assert!(saved(&world.journal, SECOND));
    drop(world);
    let world = self::world(&scratch.db(), START);
    assert!(world.contents.damage.is_none(), "{:?}", world.contents.damage);
    assert_eq!((world.restored.unreadable, world.restored.bans), (0, 19));
    assert!(world.is_banned("bob") && world.is_locked("victim"));
}

/// Unacknowledged damage stays recorded in a copy of the salvaged file, after more damage, and after a rebuild while it is in
/// use.
///
/// Woken by: `None` in place of `self.unreported` in `rebuild`; no earlier reason in `Inspection::damage`.
#[test]
fn unacknowledged_damage_outlives_copies_and_further_damage() {
    let scratch = Scratch::new();
    damaged(&scratch);
    let (journal, contents) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    let first = contents.damage.unwrap();
    let copy = scratch.0.join("copy.db");
    Journal::copy(&scratch.db(), &copy).unwrap();
    assert_eq!(Journal::read(&copy).unwrap().damage.as_ref(), Some(&first));
    // Memory holds all that is left.
    let rows: Vec<Row> = contents.rows.iter().filter(|row| row.value.is_some()).cloned().collect();
    journal.with_rebuild_source(move || Some(rows.clone()));
    std::fs::remove_file(scratch.db()).unwrap();
    journal.put(Kind::Tenant, b"acme", None);
    assert!(saved(&journal, SECOND));
    assert_eq!(journal.last_repair().unwrap().rows, 19);
    drop(journal);
    assert_eq!(Journal::read(&scratch.db()).unwrap().damage.as_ref(), Some(&first));
    let raw = rusqlite::Connection::open(scratch.db()).unwrap();
    raw.execute("DELETE FROM record WHERE kind = 3 AND key = (SELECT max(key) FROM record WHERE kind = 3)", [])
        .unwrap();
    drop(raw);
    let (_, contents) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    let second = contents.damage.unwrap();
    assert_eq!((second.kept, second.lost), (18, Some(1)), "{second}");
    assert!(second.to_string().contains(&first.to_string()), "{second}");
}

/// Without a rebuild source, rows may be lost as at a start, and the new file records that.
///
/// Woken by: not setting `unreported` in `rebuild`.
#[test]
fn a_file_that_is_salvaged_while_in_use_records_the_damage() {
    let scratch = Scratch::new();
    let (journal, _) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    journal.put(Kind::Tenant, b"acme", Some(vec![1]));
    assert!(saved(&journal, SECOND));
    std::fs::remove_file(scratch.db()).unwrap();
    journal.put(Kind::Tenant, b"other", Some(vec![1]));
    assert!(saved(&journal, SECOND));
    drop(journal);
    let (_, contents) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    // The row from before is still in the write-ahead log, which SQLite applies to an empty copy.
    assert_eq!(contents.rows.len(), 2);
    assert!(contents.damage.is_some_and(|damage| damage.kept == 1 && damage.lost == Some(0)));
}

fn sorted(rows: &[Row]) -> Vec<&Row> {
    let mut rows: Vec<&Row> = rows.iter().collect();
    rows.sort_by_key(|row| (row.kind, &row.key));
    rows
}

/// A row that is gone from a sound page, as after a lost write of that page: only the sum over all rows tells.
///
/// Woken by: no comparison with `stored_summary` in `Inspection::run`.
#[test]
fn a_row_that_is_gone_without_a_trace_is_reported() {
    let scratch = Scratch::new();
    {
        let world = world(&scratch.db(), START);
        for number in 0..5 {
            world.ban(Layer::User, &format!("mallory{number}"), Timestamp::MAX);
        }
        assert!(world.journal.close());
    }
    let other = rusqlite::Connection::open(scratch.db()).unwrap();
    assert_eq!(other.execute("DELETE FROM record WHERE key = (SELECT min(key) FROM record)", []).unwrap(), 1);
    drop(other);
    let (_, contents) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    let damage = contents.damage.unwrap();
    assert_eq!((contents.rows.len(), damage.kept, damage.lost), (4, 4, Some(1)), "{damage}");
}

/// A damaged page hides its own rows only.
#[test]
fn a_page_that_is_gone_hides_no_more_than_itself() {
    const ROWS: usize = 1_000;
    const PAGE: usize = 4_096;
    let scratch = Scratch::new();
    {
        let world = world(&scratch.db(), START);
        for number in 0..ROWS {
            world.ban(Layer::User, &format!("mallory{number}"), Timestamp::MAX);
        }
        assert!(world.journal.close());
    }
    let whole = std::fs::read(scratch.db()).unwrap();
    let pages = whole.len() / PAGE;
    let hides_much = |page: &usize| {
        let mut bytes = whole.clone();
        bytes[page * PAGE..(page + 1) * PAGE].fill(0xff);
        let copy = Scratch::new();
        std::fs::write(copy.db(), &bytes).unwrap();
        let (_, contents) = Journal::open(&copy.db(), secret().key_id()).unwrap();
        contents.rows.len() + 2 * PAGE / 60 < ROWS
    };
    let much = (0..pages).filter(hides_much).count();
    assert!(pages > 20 && much == 0, "{much} of {pages} pages hide much");
}
