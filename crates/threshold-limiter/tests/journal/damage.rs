//! A file that is found damaged at a start: nothing in it is lost in silence.

use std::path::Path;

use threshold_core::Timestamp;
use threshold_core::policy::Layer;
use threshold_limiter::journal::{Journal, Kind, Row};

use super::{SECOND, START, Scratch, saved, secret, world};

/// Every how many bytes one is changed; `./test long` changes far more.
fn step(usual: usize) -> usize {
    let factor: usize = std::env::var("THRESHOLD_LAW_FACTOR").map_or(1, |factor| factor.parse().unwrap());
    usual.checked_div(factor).unwrap_or(usual).max(1)
}

/// Bytes all over the file are changed in turn. It opens without a panic; and where a ban is not there any more, damage is
/// said.
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
            Ok((journal, kept)) => {
                let sound = kept.rows == original;
                assert!(sound || kept.damage.is_some(), "byte {at}: rows are gone and nobody said so");
                if let Some(damage) = &kept.damage {
                    noticed += 1;
                    assert_eq!(std::fs::read(&damage.aside).unwrap().len(), whole.len(), "byte {at}");
                    salvaged += usize::from(damage.kept + 1 >= original.len());
                    // What could be read is in the new file, which is whole, and records the damage until it is reported.
                    let again = Journal::read(&copy.db()).unwrap();
                    assert_eq!(again.damage.as_ref(), Some(damage), "byte {at}");
                    assert_eq!(again.rows.len(), kept.rows.len(), "byte {at}");
                    journal.damage_told();
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

/// The same for the write-ahead log that a kill leaves behind: whatever was committed before the last write is there, or
/// damage is said.
#[test]
fn no_changed_byte_of_the_log_clears_a_ban_in_silence() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    for number in 0..6 {
        world.ban(Layer::User, &format!("mallory{number}"), Timestamp::MAX);
        assert!(saved(&world.journal, SECOND));
    }
    let log_of = |path: &Path| path.with_extension("db-wal");
    // As another process would find them, had this one been killed.
    let (file, log) = (std::fs::read(scratch.db()).unwrap(), std::fs::read(log_of(&scratch.db())).unwrap());
    assert!(log.len() > 6 * 4_096);
    let mut noticed = 0;
    for at in (0..log.len()).step_by(step(397)) {
        let mut bytes = log.clone();
        bytes[at] ^= 1 << (at % 8);
        let copy = Scratch::new();
        std::fs::write(copy.db(), &file).unwrap();
        std::fs::write(log_of(&copy.db()), &bytes).unwrap();
        let (_, kept) = Journal::open(&copy.db(), secret().key_id()).unwrap();
        // The last of them may have been under way.
        assert!(kept.rows.len() >= 5 || kept.damage.is_some(), "byte {at}: {} rows", kept.rows.len());
        if let Some(damage) = kept.damage {
            noticed += 1;
            assert_eq!(
                std::fs::read(
                    damage.aside.with_file_name(format!("{}-wal", damage.aside.file_name().unwrap().to_str().unwrap()))
                )
                .unwrap(),
                bytes
            );
        }
    }
    assert!(noticed > 10, "{noticed}");
    // Untouched, nothing is wrong with it.
    let copy = Scratch::new();
    std::fs::write(copy.db(), &file).unwrap();
    std::fs::write(log_of(&copy.db()), &log).unwrap();
    let (_, kept) = Journal::open(&copy.db(), secret().key_id()).unwrap();
    assert!(kept.damage.is_none() && kept.rows.len() == 6);
}

/// A row whose value cannot be read keeps its subject out; one whose key is known fails closed.
#[test]
fn whoever_a_row_is_about_that_cannot_be_read_is_kept_out() {
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
    assert!(world.kept.damage.is_some());
    assert!(world.is_banned("bob"));
    assert!(world.is_locked("victim"));
    world.journal.damage_told();
    assert!(saved(&world.journal, SECOND));
    drop(world);
    let world = self::world(&scratch.db(), START);
    assert!(world.kept.damage.is_none());
    assert!(world.is_banned("bob") && world.is_locked("victim"));
}

/// Twenty bans, of which the file has lost one, and a strike and a lock whose values it has lost.
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

/// The process is killed right after the salvaged file has taken the journal's place, before anything was logged: each open
/// finds the same damage and the same rows, until it is told that somebody knows.
///
/// Woken by: no `untold::record` in `make`; no `damage: found.untold` in `JournalFile::open`; no `untold::clear` in `commit`.
#[test]
fn a_damage_is_found_at_each_open_until_it_was_told() {
    let scratch = Scratch::new();
    damaged(&scratch);
    let open = || Journal::open(&scratch.db(), secret().key_id()).unwrap();
    let (journal, first) = open();
    // Nothing is noted and nothing is told: what a kill would leave.
    drop(journal);
    let damage = first.damage.unwrap();
    assert_eq!((damage.kept, damage.lost), (19, Some(3)), "{damage}");
    for _ in 0..2 {
        let (_, kept) = open();
        assert_eq!(kept.damage.as_ref(), Some(&damage));
        assert_eq!(sorted(&kept.rows), sorted(&first.rows));
    }
    // Those whose rows could not be read are kept out all the same.
    let world = world(&scratch.db(), START);
    assert_eq!((world.restored.unreadable, world.restored.bans), (2, 19));
    assert!(world.is_banned("bob") && world.is_locked("victim"));
    world.journal.damage_told();
    assert!(saved(&world.journal, SECOND));
    drop(world);
    let world = self::world(&scratch.db(), START);
    assert!(world.kept.damage.is_none(), "{:?}", world.kept.damage);
    assert_eq!((world.restored.unreadable, world.restored.bans), (0, 19));
    assert!(world.is_banned("bob") && world.is_locked("victim"));
}

/// A copy of a salvaged file, one that is damaged again, and one that is written anew while it is in use have not been told
/// either.
///
/// Woken by: `None` in place of `self.untold` in `write_anew`; no reason from before in `Found::damage`.
#[test]
fn a_damage_that_was_not_told_outlives_copies_and_further_damage() {
    let scratch = Scratch::new();
    damaged(&scratch);
    let (journal, kept) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    let first = kept.damage.unwrap();
    let copy = scratch.0.join("copy.db");
    Journal::copy(&scratch.db(), &copy).unwrap();
    assert_eq!(Journal::read(&copy).unwrap().damage.as_ref(), Some(&first));
    // Memory holds all that is left.
    let rows: Vec<Row> = kept.rows.iter().filter(|row| row.value.is_some()).cloned().collect();
    journal.with_rebuild_source(move || Some(rows.clone()));
    let mut repairs = journal.repairs();
    std::fs::remove_file(scratch.db()).unwrap();
    journal.note(Kind::Tenant, b"acme", None);
    assert!(saved(&journal, SECOND));
    assert_eq!(repairs.borrow_and_update().as_ref().unwrap().rows, 19);
    drop(journal);
    assert_eq!(Journal::read(&scratch.db()).unwrap().damage.as_ref(), Some(&first));
    let raw = rusqlite::Connection::open(scratch.db()).unwrap();
    raw.execute("DELETE FROM record WHERE kind = 3 AND key = (SELECT max(key) FROM record WHERE kind = 3)", [])
        .unwrap();
    drop(raw);
    let (_, kept) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    let second = kept.damage.unwrap();
    assert_eq!((second.kept, second.lost), (18, Some(1)), "{second}");
    assert!(second.to_string().contains(&first.to_string()), "{second}");
}

/// Where nobody can say what a file held that is damaged while it is in use, rows may be lost as at a start.
///
/// Woken by: not setting `untold` in `write_anew`.
#[test]
fn a_file_that_is_salvaged_while_in_use_records_the_damage() {
    let scratch = Scratch::new();
    let (journal, _) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    journal.note(Kind::Tenant, b"acme", Some(vec![1]));
    assert!(saved(&journal, SECOND));
    std::fs::remove_file(scratch.db()).unwrap();
    journal.note(Kind::Tenant, b"other", Some(vec![1]));
    assert!(saved(&journal, SECOND));
    drop(journal);
    let (_, kept) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    assert_eq!(kept.rows.len(), 1);
    assert!(kept.damage.is_some_and(|damage| damage.kept == 0 && damage.lost.is_none()));
}

fn sorted(rows: &[Row]) -> Vec<&Row> {
    let mut rows: Vec<&Row> = rows.iter().collect();
    rows.sort_by_key(|row| (row.kind, &row.key));
    rows
}

/// A row that is gone from a page which is sound, as after an old page was put back: only the sum over all rows knows.
///
/// Woken by: no comparison with what is stated in `look`.
#[test]
fn a_row_that_is_gone_without_a_trace_is_missed() {
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
    let (_, kept) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    let damage = kept.damage.unwrap();
    assert_eq!((kept.rows.len(), damage.kept, damage.lost), (4, 4, Some(1)), "{damage}");
}

/// A page that is gone hides its own rows, and not those behind it.
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
        let (_, kept) = Journal::open(&copy.db(), secret().key_id()).unwrap();
        kept.rows.len() + 2 * PAGE / 60 < ROWS
    };
    let much = (0..pages).filter(hides_much).count();
    assert!(pages > 20 && much == 0, "{much} of {pages} pages hide much");
}
