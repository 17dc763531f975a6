//! Salvage of truncated databases, and of databases with damaged pages: every row that is whole is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use threshold_core::Timestamp;
use threshold_core::policy::{Layer, ListEntry};
use threshold_limiter::journal::{AuditLine, Contents, Journal, JournalError, Kind};

use super::{SECOND, START, Scratch, saved, secret, world};

const ROWS: usize = 2_000;
const LINES: usize = 400;
const PAGE: usize = 4_096;

type Rows = BTreeMap<(Kind, Vec<u8>), Vec<u8>>;

/// Returns the bytes of a journal with many small rows, some that overflow their page, and an audit log. It is vacuumed, so
/// that no row is on two pages.
fn journal() -> Vec<u8> {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    for number in 0..ROWS {
        world.ban(Layer::User, &format!("mallory{number}"), Timestamp::MAX);
    }
    for number in 0..20u8 {
        world.journal.put(Kind::Tenant, format!("tenant{number}").as_bytes(), Some(vec![number; 3_000]));
    }
    for number in 0..LINES {
        let (about, who) = (format!("about-{number:05}"), "ops".to_owned());
        world
            .journal
            .audit(AuditLine { at: START, who, action: "ban".to_owned(), about, why: "test".to_owned() })
            .unwrap();
    }
    assert!(saved(&world.journal, SECOND));
    let copy = scratch.0.join("copy.db");
    Journal::copy(&scratch.db(), &copy).unwrap();
    std::fs::read(copy).unwrap()
}

fn rows_of(contents: &Contents) -> Rows {
    let whole = contents.rows.iter().filter_map(|row| Some(((row.kind, row.key.clone()), row.value.clone()?)));
    whole.collect()
}

fn abouts(path: &Path) -> BTreeSet<String> {
    let raw = rusqlite::Connection::open(path).unwrap();
    let mut select = raw.prepare("SELECT about FROM audit WHERE who = 'ops' AND why = 'test'").unwrap();
    select.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
}

/// Returns the offset at which each text of `length` bytes ends in the file.
fn ends<T: Ord>(bytes: &[u8], length: usize, name: impl Fn(&[u8]) -> Option<T>) -> BTreeMap<T, usize> {
    let places = bytes.windows(length).enumerate();
    places.filter_map(|(at, window)| Some((name(window)?, at + length))).collect()
}

/// Opens these bytes as a journal. Returns its contents and its audit lines.
fn opened(bytes: &[u8]) -> (Contents, BTreeSet<String>) {
    let scratch = Scratch::new();
    std::fs::write(scratch.db(), bytes).unwrap();
    // Of a file that is cut to less than a page, nothing else shows that it is a journal.
    std::fs::write(scratch.db().with_extension("secret"), "5".repeat(64)).unwrap();
    let (journal, contents) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    drop(journal);
    // The new file is sound, holds the same rows, and records the damage.
    let again = Journal::read(&scratch.db()).unwrap();
    assert_eq!(again.damage, contents.damage);
    assert_eq!(rows_of(&again), rows_of(&contents));
    (contents, abouts(&scratch.db()))
}

/// A database cut in half lost every row, because SQLite does not open it.
///
/// Fails without `scan_pages` in `Inspection::without_sqlite`.
#[test]
fn a_file_that_was_cut_keeps_every_row_that_is_whole() {
    let whole = journal();
    let original = opened(&whole);
    assert!(original.0.damage.is_none());
    let (rows, lines) = (rows_of(&original.0), original.1);
    assert_eq!((rows.len(), lines.len()), (ROWS + 20, LINES));
    let known: BTreeMap<Vec<u8>, usize> = rows
        .iter()
        .filter(|((kind, _), _)| *kind == Kind::Ban)
        .map(|((_, key), value)| (key.clone(), value.len()))
        .collect();
    // Behind the key there are the value and a sum of 8 bytes.
    let row_ends = ends(&whole, 16, |window| known.contains_key(window).then(|| window.to_vec()));
    let line_ends = ends(&whole, 11, |window| lines.get(std::str::from_utf8(window).ok()?).cloned());
    assert_eq!((row_ends.len(), line_ends.len()), (ROWS, LINES));
    let share = |percent: usize| whole.len() * percent / 100 / PAGE * PAGE;
    let cuts =
        [share(90), share(75), share(50), share(50) + 1_000, share(25) + 3_000, share(10), 3 * PAGE, PAGE + 1, 600];
    for cut in cuts {
        let (contents, audit) = opened(&whole[..cut]);
        let damage = contents.damage.as_ref().expect("a cut is damage");
        let found = rows_of(&contents);
        assert_eq!(damage.kept, found.len());
        assert!(found.iter().all(|(key, value)| rows.get(key) == Some(value)));
        for (key, end) in &row_ends {
            let is_whole = end + known[key] + 8 <= cut;
            assert_eq!(
                found.contains_key(&(Kind::Ban, key.clone())),
                is_whole,
                "cut at {cut}, a row that ends at {end}"
            );
        }
        assert!(audit.is_subset(&lines));
        for (line, end) in &line_ends {
            assert_eq!(audit.contains(line), end + "test".len() <= cut, "{line}, cut at {cut}");
        }
    }
    // A half is a half: a good part of the rows, and not all of them.
    let (contents, _) = opened(&whole[..share(50)]);
    assert!(contents.rows.len() > ROWS / 4 && contents.rows.len() < ROWS * 9 / 10, "{}", contents.rows.len());
}

/// A damaged schema page or inner page hides no other page: also rows that overflow their page are found.
///
/// Fails without `scan_pages` in `Inspection::run` and `Inspection::without_sqlite`.
#[test]
fn no_page_leads_to_the_loss_of_others() {
    let whole = journal();
    let (contents, lines) = opened(&whole);
    let rows = rows_of(&contents);
    for page in 0..4 {
        let mut bytes = whole.clone();
        bytes[page * PAGE..(page + 1) * PAGE].fill(0xff);
        let (contents, audit) = opened(&bytes);
        assert!(contents.damage.is_some());
        let lost = rows.len() - rows_of(&contents).len();
        assert!(lost <= 100 && lines.len() - audit.len() <= 100, "page {page}: {lost} rows are gone");
        let large = rows_of(&contents).keys().filter(|(kind, _)| *kind == Kind::Tenant).count();
        assert!(page > 0 || (lost, large, &audit) == (0, 20, &lines), "page {page}: {lost}, {large}");
    }
}

/// A row whose overflow page is cut off is known by its key.
#[test]
fn a_row_whose_end_is_missing_is_known_by_its_key() {
    let scratch = Scratch::new();
    let (journal, _) = Journal::open(&scratch.db(), secret().key_id()).unwrap();
    journal.put(Kind::Account, &[7; 16], Some(vec![1; 9_000]));
    journal.put(Kind::Ban, &[8; 16], Some(vec![2; 50]));
    assert!(journal.close());
    drop(journal);
    let whole = std::fs::read(scratch.db()).unwrap();
    let (contents, _) = opened(&whole[..whole.len() - PAGE]);
    assert_eq!(contents.damage.unwrap().kept, 1);
    let account = contents.rows.iter().find(|row| row.kind == Kind::Account).unwrap();
    assert_eq!((account.key.as_slice(), &account.value), (&[7; 16][..], &None));
}

/// A page scan does not find lifted bans on free pages.
///
/// Woken by: leaving out `secure_delete` in `connect`, with `free` empty.
#[test]
fn what_was_deleted_does_not_come_back() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    for number in 0..ROWS {
        world.ban(Layer::User, &format!("mallory{number}"), Timestamp::MAX);
    }
    assert!(saved(&world.journal, SECOND));
    let id = |number: usize| {
        ListEntry::named(Layer::User, &format!("mallory{number}")).unwrap().ban_id(secret().digest_key())
    };
    for number in 10..ROWS {
        world.limiter.bans().lift(id(number)).unwrap();
    }
    assert!(world.journal.close());
    drop(world);
    let whole = std::fs::read(scratch.db()).unwrap();
    assert!(whole.len() > 20 * PAGE);
    for cut in [whole.len() - PAGE, whole.len() / 2] {
        let (contents, _) = opened(&whole[..cut]);
        let few: BTreeSet<Vec<u8>> = (0..10).map(|number| id(number).to_u128().to_be_bytes().to_vec()).collect();
        assert!(contents.rows.iter().all(|row| few.contains(&row.key)), "{} rows", contents.rows.len());
    }
}

/// After a kill the write-ahead log holds pages that the database does not have yet. SQLite applies them to a copy that is
/// long enough to be opened.
///
/// Fails without `set_len` in `replay`.
#[test]
fn a_file_that_was_cut_beside_its_log() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    for number in 0..200 {
        world.ban(Layer::User, &format!("mallory{number}"), Timestamp::MAX);
    }
    assert!(saved(&world.journal, SECOND));
    // The files of a killed process. No checkpoint has run yet.
    let log = |path: &Path| path.with_extension("db-wal");
    let (file, pages) = (std::fs::read(scratch.db()).unwrap(), std::fs::read(log(&scratch.db())).unwrap());
    for cut in [file.len(), file.len() / 2, 1] {
        let copy = Scratch::new();
        std::fs::write(copy.db(), &file[..cut]).unwrap();
        std::fs::write(log(&copy.db()), &pages).unwrap();
        let (_, contents) = Journal::open(&copy.db(), secret().key_id()).unwrap();
        assert_eq!(rows_of(&contents).len(), 200, "cut at {cut}: {:?}", contents.damage);
    }
    // SQLite deletes a log without its database.
    let copy = Scratch::new();
    std::fs::write(log(&copy.db()), &pages).unwrap();
    let refused = Journal::open(&copy.db(), secret().key_id());
    assert!(matches!(refused, Err(JournalError::Missing(_, trace)) if trace == log(&copy.db())));
    assert_eq!(std::fs::read(log(&copy.db())).unwrap(), pages);
}
