//! Audited changes: the disk has both the change and its audit line, or neither. Subjects that a ladder bans have a name in
//! the journal, also without a server.

use std::sync::Arc;
use std::time::Duration;

use threshold_core::Facts;
use threshold_core::policy::{Layer, ListEntry};
use threshold_limiter::journal::{AuditLine, Journal, Kind, Row};

use super::{SECOND, START, Scratch, key, saved, world};

fn line(about: &str) -> AuditLine {
    let (who, action, why) = ("ops".to_owned(), "ban".to_owned(), "test".to_owned());
    AuditLine { at: START, who, action, about: about.to_owned(), why }
}

/// The audit's `about`, and the names of tenants with a setting, as they are on disk.
fn on_disk(scratch: &Scratch) -> (Vec<String>, Vec<Vec<u8>>) {
    let file = rusqlite::Connection::open(scratch.db()).unwrap();
    let mut select = file.prepare("SELECT about FROM audit ORDER BY id").unwrap();
    let lines = select.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    (lines, Journal::read(&scratch.db()).unwrap().rows.into_iter().map(|row| row.key).collect())
}

/// The audit once said that somebody was banned who was not: the server was killed after the line was written, and before
/// the ban.
///
/// Fails without the wait for open changes in `Queue::take`.
#[test]
fn a_change_and_its_line_are_written_together_or_not_at_all() {
    let scratch = Scratch::new();
    let (journal, _) = Journal::open(&scratch.db(), key(1)).unwrap();
    let change = journal.begin_change().unwrap();
    journal.put(Kind::Tenant, b"acme", Some(vec![1]));
    // Nothing reaches the disk while the change is open, however long anybody waits.
    assert!(!saved(&journal, Duration::from_millis(300)));
    assert_eq!(on_disk(&scratch), (vec![], vec![]));
    change.confirm(line("tenant acme"));
    assert!(saved(&journal, SECOND));
    assert_eq!(on_disk(&scratch), (vec!["tenant acme".to_owned()], vec![b"acme".to_vec()]));
    // A change that was given up leaves no line, and holds up nobody any longer.
    let other = journal.begin_change().unwrap();
    drop(journal.begin_change().unwrap());
    journal.put(Kind::Tenant, b"other", Some(vec![1]));
    drop(other);
    assert!(saved(&journal, SECOND));
    assert_eq!(on_disk(&scratch).0.len(), 1);
    // The end of the journal waits for one that is open.
    let last = journal.begin_change().unwrap();
    let journal = Arc::new(journal);
    let closing = std::thread::spawn({
        let journal = Arc::clone(&journal);
        move || journal.close()
    });
    journal.put(Kind::Tenant, b"last", Some(vec![1]));
    last.confirm(line("tenant last"));
    assert!(closing.join().unwrap());
    assert_eq!((on_disk(&scratch).0.len(), on_disk(&scratch).1.len()), (2, 3));
}

/// Only the server once named whom a ladder had banned: a library's own journal had a digest and nothing else.
///
/// Fails without `name_banned` in `settle_planned`, and in `check_many`.
#[test]
fn whom_a_ladder_bans_is_listed_by_name_after_a_restart() {
    let scratch = Scratch::new();
    {
        let world = world(&scratch.db(), START);
        assert!(world.strike("eve", 6));
        let bob = Facts { user: Some("bob"), ..Facts::default() };
        assert!(world.limiter.check_many(&[bob; 6]).pop().unwrap().unwrap().banned());
        assert!(world.strike("forgiven", 6));
        world.limiter.forgive(Layer::User, "forgiven").unwrap();
        assert!(world.journal.close());
    }
    let world = world(&scratch.db(), START);
    let mut named = Vec::new();
    world.limiter.bans().each_named(|subject, ban| named.push((subject, ban.clone())));
    let mut users: Vec<_> = named.iter().map(|(_, ban)| ban.whom.clone()).collect();
    users.sort_by_key(ListEntry::key);
    assert_eq!(users, [ListEntry::User("bob".into()), ListEntry::User("eve".into())]);
    for (subject, ban) in &named {
        assert_eq!((&*ban.reason, &*ban.by), ("strike 5 under the rule posts", "ladder"));
        assert!(world.limiter.policy().keys_of(Layer::User, &ban.whom.key()).standings.contains(subject));
    }
}

/// While a disk fails, memory for what was removed has a bound. Beyond it the file is rebuilt from memory when the disk is
/// back, so that nothing that was lifted meanwhile comes back at the next start.
///
/// Fails without the rebuild in `writer::write`.
#[test]
fn a_file_that_missed_too_many_removals_is_rebuilt_from_memory() {
    let scratch = Scratch::new();
    let (journal, _) = Journal::open(&scratch.db(), key(1)).unwrap();
    let kept = Row { kind: Kind::Tenant, key: b"kept".to_vec(), value: Some(vec![1]) };
    let memory = kept.clone();
    journal.with_rebuild_source(move || Some(vec![memory.clone()]));
    for name in [&b"kept"[..], b"lifted"] {
        journal.put(Kind::Tenant, name, Some(vec![1]));
    }
    assert!(saved(&journal, SECOND));
    let other = rusqlite::Connection::open(scratch.db()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    journal.begin_change().unwrap().confirm(line("tenant lifted"));
    journal.put(Kind::Tenant, b"lifted", None);
    for number in 0..600_000u32 {
        journal.put(Kind::Standing, &u128::from(number).to_be_bytes(), None);
    }
    drop(other);
    assert!(journal.close());
    assert_eq!(Journal::read(&scratch.db()).unwrap().rows, [kept]);
    assert_eq!(on_disk(&scratch).0, ["tenant lifted"]);
    assert!(journal.last_repair().is_some_and(|repair| repair.reason.contains("missed more changes")));
}
