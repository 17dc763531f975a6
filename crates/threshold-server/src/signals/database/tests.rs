//! Tests the file of events: what is recorded, found, erased, lost, and how large it becomes.

use std::path::PathBuf;

use threshold_core::alert::{AlertChange, AlertLevel};
use threshold_core::decision::Cause;
use threshold_core::policy::AlertOn;

use super::*;
use crate::desk::tests::{Folder as TestFolder, START};
use crate::signals::alerts::{Group, Notice, Why, host_name};
use crate::signals::sinks::{Told, ToldTo};

const RETENTION: Retention = Retention { age: Span::from_secs(86_400), bytes: 64 << 20 };

fn event(number: usize, more: &str) -> Event {
    let at = START.micros() / 1_000;
    let json = format!(
        r#"{{"id":"00000000-0000-4000-8000-{number:012x}","at":{at},"blocked":true,"layer":"user","traceId":"{number:032x}"{more}}}"#
    );
    Event::from_json(&json).unwrap()
}

fn of_user(number: usize, user: &str) -> Event {
    event(number, &format!(r#","userId":"{user}""#))
}

fn path(folder: &TestFolder) -> PathBuf {
    folder.journal().with_file_name("threshold.events")
}

fn all(database: &EventDatabase) -> Vec<Event> {
    let (mut all, mut after) = (Vec::new(), 0);
    loop {
        let query = EventQuery { after: Some(after), limit: 100_000, ..EventQuery::default() };
        let page = database.page(&query).unwrap();
        if page.events.is_empty() {
            return all;
        }
        all.extend(page.events.iter().map(|(_, json)| Event::from_json(json).unwrap()));
        after = page.next;
    }
}

fn sum(events: &[Event]) -> u64 {
    events.iter().map(|event| event.count).sum()
}

fn later(seconds: u64) -> Timestamp {
    START.plus(Span::from_secs(seconds))
}

#[test]
fn events_are_kept_once_in_order_and_outlive_the_process() {
    let folder = TestFolder::new();
    let path = path(&folder);
    let events: Vec<Event> = (0..900).map(|number| of_user(number, "u1")).collect();
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    let newest = database.newest();
    database.insert(&events, START);
    assert_eq!(*newest.borrow(), 900);
    // As after an answer that was not heard: some of them again.
    database.insert(events.get(100..200).unwrap(), later(1));
    assert_eq!(all(&database), events);
    drop(database);
    use std::os::unix::fs::PermissionsExt as _;
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    assert_eq!(all(&database), events);
    assert!(*database.newest().borrow() >= 900);
    let memory = EventDatabase::open(None, RETENTION, START);
    memory.insert(&events, START);
    assert_eq!(all(&memory), events);
    assert_eq!((memory.lost(), memory.unnamed()), (0, 0));
}

/// A trigger, which somebody has added, kept events out of the file.
///
/// Woken by leaving out `has_own_schema`, and, in a file that is open, `SQLITE_DBCONFIG_ENABLE_TRIGGER`.
#[test]
fn a_trigger_keeps_no_event_out_of_the_file() {
    let folder = TestFolder::new();
    let path = path(&folder);
    let trigger = "CREATE TRIGGER keep BEFORE INSERT ON rate_limit_events BEGIN SELECT RAISE(IGNORE); END";
    let add = |sql: &str| Connection::open(&path).unwrap().execute_batch(sql).unwrap();
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    database.insert(&[event(1, "")], START);
    add(trigger);
    database.insert(&[event(2, "")], later(1));
    assert_eq!(all(&database).len(), 2);
    drop(database);
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    assert!(PathBuf::from(format!("{}.damaged", path.display())).exists());
    database.insert(&[event(3, "")], later(2));
    assert_eq!(all(&database), [event(3, "")]);
    drop(database);
    // What a tool has analysed is kept.
    add("ANALYZE");
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    assert_eq!(all(&database), [event(3, "")]);
}

#[test]
fn pages_follow_each_other_and_filters_choose() {
    let database = EventDatabase::open(None, RETENTION, START);
    let user = |number: usize| if number.is_multiple_of(3) { "u0" } else { "u1" };
    let events: Vec<Event> = (1..=900).map(|number| of_user(number, user(number))).collect();
    database.insert(&events, START);
    let filters = vec![Filter::new(Field::UserId, vec!["u0".to_owned(), "#0".to_owned()])];
    let mut query = EventQuery { after: Some(0), limit: 70, filters, ..EventQuery::default() };
    let mut seen = Vec::new();
    loop {
        let page = database.page(&query).unwrap();
        seen.extend(page.events.iter().map(|(number, _)| *number));
        query.after = Some(page.next);
        if page.events.len() < 70 {
            break;
        }
    }
    assert_eq!(seen, (1..=300).map(|number| number * 3).collect::<Vec<u64>>());
    assert_eq!(query.after, Some(900), "the next page does not look at the rest again");
    assert_eq!(database.page(&query).unwrap(), Page { events: Vec::new(), next: 900, previous: None });
    let newest = database.page(&EventQuery { after: None, limit: 2, ..query.clone() }).unwrap();
    assert_eq!(newest.events.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [897, 900]);
    // The numbers of another file.
    let again = database.page(&EventQuery { after: Some(10_000), ..query.clone() }).unwrap();
    assert_eq!(again.events.first().map(|(number, _)| *number), Some(3));
    let one = |field, value: &str| {
        let filters = vec![Filter::new(field, vec![value.to_owned()])];
        database.page(&EventQuery { filters, limit: 1_000, ..EventQuery::default() }).unwrap().events.len()
    };
    assert_eq!(one(Field::TraceId, &format!("{:032x}", 17)), 1);
    assert_eq!((one(Field::Blocked, "true"), one(Field::Blocked, "false")), (900, 0));
    assert_eq!((one(Field::Layer, "user"), one(Field::Layer, "edge"), one(Field::Rule, "' OR 1")), (900, 0, 0));
    let since = |since| database.page(&EventQuery { since: Some(since), limit: 1_000, ..EventQuery::default() });
    assert_eq!((since(START).unwrap().events.len(), since(later(1)).unwrap().events.len()), (900, 0));
}

/// Woken by leaving out `merge`, `without_names`, or the new second.
#[test]
fn a_flood_is_bounded_and_its_sum_exact() {
    let database = EventDatabase::open(None, RETENTION, START);
    let same: Vec<Event> = (0..3_000).map(|number| of_user(number, "u1")).collect();
    database.insert(same.get(..1_500).unwrap(), START);
    database.insert(same.get(1_500..).unwrap(), START);
    let rows = all(&database);
    assert_eq!(rows.iter().map(|event| event.count).filter(|count| *count == 1).count(), 1_000);
    assert_eq!((rows.len(), sum(&rows), database.unnamed()), (1_002, 3_000, 0));
    let flood: Vec<Event> = (3_000..13_000).map(|number| of_user(number, &format!("u{number}"))).collect();
    let struck = |number| event(number, &format!(r#","subject":"user=u{number}","strikes":5"#));
    let struck: Vec<Event> = (13_000..13_100).map(struck).collect();
    database.insert(&flood, later(1));
    database.insert(&struck, later(1));
    let rows = all(&database);
    assert_eq!(rows.iter().filter(|event| event.strike.is_some()).count(), 100);
    assert_eq!((rows.len(), sum(&rows), database.unnamed()), (1_002 + 2_000 + 1 + 100, 13_100, 8_000));
    // Without names from the start: the queue has counted it.
    database.insert(&[of_user(19_000, "u1").without_names()], later(1));
    assert_eq!((sum(&all(&database)), database.unnamed()), (13_101, 8_000));
    // At another time, and so by itself.
    let mut old = of_user(19_001, "u9");
    old.at = Timestamp::from_secs(1_000);
    database.insert(&[old, of_user(19_002, "u9")], later(1));
    let times = all(&database).iter().rev().take(2).map(|event| event.at).collect::<std::collections::BTreeSet<_>>();
    assert_eq!((times.len(), database.unnamed()), (2, 8_002));
    database.insert(&[of_user(20_000, "u1")], later(2));
    assert_eq!(all(&database).last().unwrap().user_id.as_deref(), Some("u1"));
}

fn bytes_on_disk(path: &Path) -> u64 {
    let length = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    length(path).saturating_add(length(&PathBuf::from(format!("{}-wal", path.display()))))
}

#[test]
fn old_events_are_deleted_and_a_file_stays_in_its_size() {
    let folder = TestFolder::new();
    let path = path(&folder);
    let retention = Retention { bytes: 2 << 20, ..RETENTION };
    let database = EventDatabase::open(Some(&path), retention, START);
    let (mut most, long) = (0, "x".repeat(200));
    for second in 0..10_u64 {
        let first = usize::try_from(second).unwrap() * 1_000;
        let events: Vec<Event> = (first..first + 1_000).map(|number| of_user(number, &long)).collect();
        database.insert(&events, later(second));
        most = most.max(bytes_on_disk(&path));
    }
    assert!(most <= retention.bytes, "{most}");
    assert!(most > retention.bytes / 2, "{most}");
    let rows = all(&database);
    assert_eq!((database.lost(), rows.last().unwrap().id), (0, of_user(9_999, &long).id));
    assert!(rows.len() > 1_000 && rows.len() < 9_000, "{}", rows.len());
    drop(database);
    // A smaller bound.
    let retention = Retention { bytes: 1 << 20, ..retention };
    let database = EventDatabase::open(Some(&path), retention, START);
    database.sweep(later(10));
    assert!(bytes_on_disk(&path) <= retention.bytes, "{}", bytes_on_disk(&path));
    assert_eq!(all(&database).last().unwrap().id, of_user(9_999, &long).id);
    database.sweep(later(86_400));
    assert!(!all(&database).is_empty());
    database.sweep(later(86_401));
    assert_eq!(all(&database), []);
    database.insert(&[of_user(1, "u1")], later(86_401));
    assert_eq!(*database.newest().borrow(), 10_001, "no number comes twice");
}

/// SQLite has no number after the largest one, and answers as if the disk was full.
///
/// Woken by leaving out `is_out_of_numbers` in `insert_into`, or in `open`.
#[test]
fn a_file_without_a_further_number_is_set_aside() {
    let folder = TestFolder::new();
    let path = path(&folder);
    let exhaust = || {
        let other = Connection::open(&path).unwrap();
        other
            .execute(
                "UPDATE rate_limit_events SET number = ?1 WHERE id = (SELECT max(id) FROM rate_limit_events)",
                [i64::MAX],
            )
            .unwrap();
        other.execute("UPDATE sqlite_sequence SET seq = ?1", [i64::MAX]).unwrap();
    };
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    database.insert(&[of_user(1, "u1"), of_user(2, "u2")], START);
    exhaust();
    database.insert(&[of_user(3, "u3")], later(1));
    assert_eq!(all(&database), [of_user(3, "u3")]);
    assert!(database.lost() <= RETENTION.bytes / MIN_EVENT_BYTES, "{}", database.lost());
    drop(database);
    exhaust();
    let database = EventDatabase::open(Some(&path), RETENTION, later(2));
    database.insert(&[of_user(4, "u4")], later(2));
    assert_eq!(all(&database), [of_user(4, "u4")]);
}

/// Woken by leaving out VACUUM and `empty_log`.
#[test]
fn an_erased_subject_is_nowhere_in_the_file() {
    let folder = TestFolder::new();
    let path = path(&folder);
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    for second in 0..8_u64 {
        let first = usize::try_from(second).unwrap() * 500;
        let user = |number: usize| if number.is_multiple_of(7) { "canary-name" } else { "other-name" };
        let events: Vec<Event> = (first..first + 500).map(|number| of_user(number, user(number))).collect();
        database.insert(&events, later(second));
    }
    std::fs::write(format!("{}.damaged", path.display()), "canary-name").unwrap();
    let contains = |name: &str| {
        let files = std::fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
        files
            .map(|file| std::fs::read(file).unwrap())
            .any(|bytes| memchr::memmem::find(&bytes, name.as_bytes()).is_some())
    };
    assert!(contains("canary-name") && contains("other-name"));
    let filter = |value: &str| [Filter::new(Field::UserId, vec![value.to_owned()])];
    assert_eq!(database.erase(&filter("canary-name"), later(9)).unwrap(), 572);
    assert!(!contains("canary-name") && contains("other-name"));
    assert_eq!(all(&database).len(), 4_000 - 572);
    assert_eq!(database.erase(&filter("canary-name"), later(9)).unwrap(), 0);
}

#[test]
fn a_damaged_file_is_set_aside() {
    let folder = TestFolder::new();
    let path = path(&folder);
    std::fs::write(&path, "this is no database, but something else of some length".repeat(100)).unwrap();
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    let events: Vec<Event> = (0..900).map(|number| of_user(number, "u1")).collect();
    database.insert(&events, START);
    assert_eq!((all(&database).len(), database.lost()), (900, 0));
    let aside = PathBuf::from(format!("{}.damaged", path.display()));
    assert!(std::fs::read(&aside).unwrap().starts_with(b"this is no database"));
    drop(database);
    // A page in the middle, which is found only when it is read.
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes.get_mut(4_096..middle).unwrap().fill(0x5a);
    std::fs::write(&path, bytes).unwrap();
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    let more: Vec<Event> = (1_000..1_900).map(|number| of_user(number, "u2")).collect();
    database.insert(&more, later(1));
    let _ = database.page(&EventQuery { after: Some(0), limit: 10_000, ..EventQuery::default() });
    database.insert(&more, later(2));
    assert_eq!(all(&database), more);
    assert!(!std::fs::read(&aside).unwrap().starts_with(b"this is no database"));
}

/// Fails if the server goes on writing into a file that no longer has a name.
#[test]
fn a_file_that_is_removed_or_replaced_gives_way_to_a_new_one() {
    let folder = TestFolder::new();
    let path = path(&folder);
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    database.insert(&[of_user(1, "u1")], START);
    std::fs::remove_file(&path).unwrap();
    database.insert(&[of_user(2, "u2")], later(1));
    assert_eq!((all(&database), database.lost()), (vec![of_user(2, "u2")], 1));
    std::fs::rename(&path, path.with_extension("away")).unwrap();
    drop(EventDatabase::open(Some(&path), RETENTION, later(1)));
    database.insert(&[of_user(3, "u3")], later(2));
    assert_eq!((all(&database), database.lost()), (vec![of_user(3, "u3")], 2));
    // A reader notices it as well.
    std::fs::remove_file(&path).unwrap();
    assert_eq!((all(&database), database.lost()), (vec![], 3));
}

/// A file whose content somebody else has changed, with the server's pages of it still in memory: it answered from these, or with
/// what was left.
///
/// Fails if the size, or the time of the last change, is not compared, or if the file is not verified by another connection.
#[test]
fn a_file_that_is_truncated_or_overwritten_gives_way_to_a_new_one() {
    use std::os::unix::fs::FileExt as _;
    type Harm = fn(&std::fs::File);
    let harms: [(&str, Harm); 4] = [
        ("truncated to nothing", |file| file.set_len(0).unwrap()),
        ("truncated to two pages", |file| file.set_len(8_192).unwrap()),
        ("overwritten at its beginning", |file| file.write_all_at(&[0x5a; 8_192], 0).unwrap()),
        ("overwritten in the middle", |file| file.write_all_at(&[0; 40_960], 20_480).unwrap()),
    ];
    for (name, harm) in harms {
        let folder = TestFolder::new();
        let path = path(&folder);
        let database = EventDatabase::open(Some(&path), RETENTION, START);
        let events: Vec<Event> = (0..900).map(|number| of_user(number, "u1")).collect();
        database.insert(&events, START);
        // The log is written into the file, as it is from time to time.
        let emptied = database.with_writer(START, |writer| file::empty_log(writer.connection.as_ref().unwrap()));
        emptied.unwrap();
        assert_eq!(all(&database).len(), 900, "{name}");
        harm(&std::fs::OpenOptions::new().write(true).open(&path).unwrap());
        assert_eq!((all(&database), database.lost()), (vec![], 900), "{name}");
        database.insert(&[of_user(1_000, "u2")], later(1));
        assert_eq!((all(&database), database.lost()), (vec![of_user(1_000, "u2")], 900), "{name}");
        assert!(PathBuf::from(format!("{}.damaged", path.display())).exists(), "{name}");
    }
}

/// An operator's tool may write to the file.
#[test]
fn a_file_that_another_program_has_changed_is_kept_if_it_is_sound() {
    let folder = TestFolder::new();
    let path = path(&folder);
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    database.insert(&[of_user(1, "u1"), of_user(2, "u2")], START);
    let other = Connection::open(&path).unwrap();
    other.execute_batch("DELETE FROM rate_limit_events WHERE user_id = 'u1'; PRAGMA wal_checkpoint").unwrap();
    assert_eq!((all(&database), database.lost()), (vec![of_user(2, "u2")], 0));
    database.insert(&[of_user(3, "u3")], later(1));
    assert_eq!((all(&database).len(), database.lost()), (2, 0));
}

/// An alert that one receiver has heard of at a lower level.
fn saved(on: AlertOn, key: Option<&str>) -> SavedAlert {
    let change = AlertChange::Raised(AlertLevel::Critical);
    let (alert, node) = (on.usual(), "node-1".into());
    let why = Why { cause: Some(Cause::Login), rule: Some("logins".into()) };
    let group = Some(Group { addresses: 7, largest: Some("203.0.113.9".into()) });
    let group = group.filter(|_| on == AlertOn::IpBlocks && key.is_none());
    let key = key.map(Into::into);
    let notice = Notice { on, alert, key, change, count: 30, peak: 40, since: START, at: later(1), node, why, group };
    SavedAlert {
        notice,
        told: Some(ToldTo::from([("slack-1 https://a.example".into(), Told::Raised(AlertLevel::Warning))])),
    }
}

#[test]
fn raised_alerts_outlive_the_process() {
    let folder = TestFolder::new();
    let path = path(&folder);
    let alerts = [saved(AlertOn::EdgeBlocks, None), saved(AlertOn::IpBlocks, Some("203.0.113.7"))];
    let together = saved(AlertOn::IpBlocks, None);
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    assert_eq!(database.saved_alerts(START), []);
    database.save_alerts(&alerts, START);
    database.insert(&[event(1, r#","ip":"203.0.113.7","count":30"#), event(2, r#","ip":"203.0.113.8""#)], START);
    drop(database);
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    assert_eq!(database.saved_alerts(START), alerts);
    let counts = database.alert_counts((AlertOn::IpBlocks, AlertOn::IpBlocks.usual()), START);
    assert_eq!(counts.unwrap(), [("203.0.113.7".to_owned(), START, 30)]);
    assert!(database.save_alerts(&alerts[..1], START));
    assert_eq!(database.saved_alerts(START), alerts[..1]);
    // Two that are over while a receiver has yet to hear of it, and the next episode of one.
    let over = |mut saved: SavedAlert| {
        saved.notice.change = AlertChange::Resolved(AlertLevel::Critical);
        saved
    };
    let all = [&alerts[..], &alerts.clone().map(over), &[over(together)]].concat();
    assert!(database.save_alerts(&all, START));
    assert_eq!(database.saved_alerts(START), all);
    // An earlier version has the columns only, and the name of the machine.
    let connection = Connection::open(&path).unwrap();
    connection
        .execute_batch("DELETE FROM rate_limit_alerts WHERE level IS NULL; UPDATE rate_limit_alerts SET notice = NULL")
        .unwrap();
    let earlier = database.saved_alerts(START);
    assert_eq!(
        earlier.iter().map(|saved| saved.notice.id()).collect::<Vec<_>>(),
        alerts.clone().map(|saved| saved.notice.id())
    );
    assert!(earlier.iter().all(|saved| saved.told.is_none() && saved.notice.node == host_name()));
    // Without a file they end with the process.
    let memory = EventDatabase::open(None, RETENTION, START);
    assert!(!memory.save_alerts(&alerts, START));
    assert_eq!(EventDatabase::open(None, RETENTION, START).saved_alerts(START), []);
}

#[test]
fn a_damaged_table_of_alerts_is_ignored_and_begun_again() {
    let alerts = [saved(AlertOn::EdgeBlocks, None)];
    for harm in [
        "INSERT INTO rate_limit_alerts VALUES ('other', '', 'warning', 0, NULL), ('user_bans', '', 'loud', 0, NULL), \
         ('tenant_blocks', '', 'warning', 'then', NULL), ('ip_blocks', '', 'warning', 0, NULL), ('user_bans', 'x', 'warning', 0, NULL)",
        "DROP TABLE rate_limit_alerts; CREATE TABLE rate_limit_alerts (other)",
        "DROP TABLE rate_limit_alerts",
    ] {
        let folder = TestFolder::new();
        let path = path(&folder);
        drop(EventDatabase::open(Some(&path), RETENTION, START));
        Connection::open(&path).unwrap().execute_batch(harm).unwrap();
        let database = EventDatabase::open(Some(&path), RETENTION, START);
        assert_eq!(database.saved_alerts(START), [], "{harm}");
        database.insert(&[of_user(1, "u1")], START);
        database.save_alerts(&alerts, START);
        assert_eq!((database.saved_alerts(START), all(&database).len()), (alerts.to_vec(), 1), "{harm}");
        // Also while the server runs.
        Connection::open(&path).unwrap().execute_batch(harm).unwrap();
        database.save_alerts(&alerts, START);
        assert_eq!(database.saved_alerts(START), alerts, "{harm}");
    }
}

#[test]
fn a_locked_or_missing_file_loses_events_and_counts_them() {
    let folder = TestFolder::new();
    let path = path(&folder);
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let events: Vec<Event> = (0..900).map(|number| of_user(number, "u1")).collect();
    database.insert(&events, START);
    assert_eq!(database.lost(), 900);
    other.execute_batch("COMMIT").unwrap();
    database.insert(&[of_user(3, "u1")], later(1));
    assert_eq!((all(&database), database.lost()), (vec![of_user(3, "u1")], 900));
    // A folder that does not exist yet.
    let path = path.with_file_name("later").join("threshold.events");
    let database = EventDatabase::open(Some(&path), RETENTION, START);
    database.insert(&[of_user(1, "u1")], START);
    assert_eq!(database.lost(), 1);
    assert!(database.page(&EventQuery { limit: 1, ..EventQuery::default() }).is_err());
    std::fs::create_dir(path.parent().unwrap()).unwrap();
    database.insert(&[of_user(2, "u1")], later(2));
    assert_eq!((all(&database), database.lost()), (vec![of_user(2, "u1")], 1));
}

/// The bound in memory was lower than the one at which the oldest events are deleted: nothing was recorded any more after some minutes of a
/// flood. Woken by the bound of a file for events in memory.
#[test]
fn in_memory_the_oldest_events_make_room_too() {
    let database = EventDatabase::open(None, Retention::default(), START);
    let long = "x".repeat(250);
    for second in 0..40 {
        let events = (0..1_000).map(|number| {
            let more = format!(r#","tenant":"{number}{long}","endpoint":"{long}","rule":"{long}""#);
            event(second * 1_000 + number, &more)
        });
        let at = START.plus(Span::from_secs(second.try_into().unwrap()));
        database.insert(&events.collect::<Vec<_>>(), at);
    }
    assert_eq!(database.lost(), 0);
    let newest = database.page(&EventQuery { limit: 1, ..EventQuery::default() }).unwrap();
    assert_eq!(newest.events.first().map(|(number, _)| *number), Some(40_000));
}
