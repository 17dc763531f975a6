//! The journal on a real file: what was saved is there again, and what is damaged is never lost in silence.

#![cfg(feature = "sqlite")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::future::Future as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use threshold_core::lockout::Account;
use threshold_core::policy::{Ban, Layer, ListEntry};
use threshold_core::{Digest, Policy, Secret, Standing, Timestamp};
use threshold_limiter::bans::BanBook;
use threshold_limiter::journal::{
    AuditLine, Journal, JournalError, Kept, Kind, Repair, Restored, installation_secret, load_counters, restore,
    rows_in_memory, save_counters, secret_path,
};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{Keep, Saving};
use threshold_limiter::tower::{Identified, ResponseFuture, ThresholdLayer};
use threshold_limiter::{Attempted, Facts, Limiter, LoginRequest, ManualClock};
use tower::{Layer as _, Service as _};

const POLICY: &str = r#"
[login]

[[rule]]
name = "posts"
per = ["user"]
limit = "1/day"
ladder = "strict"
strike = "request"
"#;
const SECOND: Duration = Duration::from_secs(10);
const START: Timestamp = Timestamp::from_secs(1_767_225_600);

/// A folder that vanishes with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("threshold-journal-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn db(&self) -> PathBuf {
        self.0.join("threshold.db")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A limiter with its journal, as a server has it.
struct World {
    limiter: Limiter<MemoryStore, ManualClock>,
    journal: Arc<Journal>,
    restored: Restored,
    kept: Kept,
}

fn secret() -> Secret {
    Secret::new(&[7; 32]).unwrap()
}

fn world(path: &Path, now: Timestamp) -> World {
    let key = secret().digest_key();
    let policy = Policy::parse(POLICY, &|_| None).unwrap().with_key(key);
    let (journal, kept) = Journal::open(path, secret().fingerprint()).unwrap();
    let journal = Arc::new(journal);
    let (store, bans) = (MemoryStore::new(policy.memory()), BanBook::default());
    let restored = restore(&journal, &kept, (&store, &bans), &policy, now);
    let store = store.kept_by(Arc::<Journal>::clone(&journal));
    let bans = Arc::new(bans.kept_by(Arc::<Journal>::clone(&journal)));
    let limiter = Limiter::with_bans(policy, store, ManualClock::new(now), (key, secret()), bans);
    World { limiter, journal, restored, kept }
}

impl World {
    fn strike(&self, user: &str, times: usize) -> bool {
        let facts = Facts { user: Some(user), ..Facts::default() };
        (0..times).fold(false, |_, _| self.limiter.check(&facts).unwrap().banned())
    }

    fn is_banned(&self, user: &str) -> bool {
        self.limiter.peek(&Facts { user: Some(user), ..Facts::default() }).unwrap().banned()
    }

    fn ban(&self, layer: Layer, key: &str, until: Timestamp) {
        let whom = ListEntry::named(layer, key).unwrap();
        let id = whom.ban_id(secret().digest_key());
        let ban = Ban { whom, reason: "test".into(), by: "ops".into(), from: START, until };
        self.limiter.bans().set(id, ban, START).unwrap();
    }

    /// Guesses until the account is locked.
    fn lock(&self, account: &str) {
        for _ in 0..3 {
            let Attempted::Allowed(attempt) = self.attempt(account) else { return };
            let _ = self.limiter.login_result(&attempt, false).unwrap();
        }
    }

    fn attempt(&self, account: &str) -> Attempted {
        self.limiter.login_attempt(&LoginRequest { account: Some(account), ..LoginRequest::default() }).unwrap()
    }

    fn is_locked(&self, account: &str) -> bool {
        matches!(self.attempt(account), Attempted::Refused(_))
    }
}

fn saved(journal: &Journal, at_most: Duration) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(journal.saved(at_most)).is_ok()
}

#[test]
fn bans_strikes_and_locks_are_there_again_and_what_was_lifted_is_not() {
    let scratch = Scratch::new();
    let until = Timestamp::from_secs(START.secs_ceil() + 3_600);
    {
        let world = world(&scratch.db(), START);
        assert!(world.kept.is_new);
        // One request fits, five more are five strikes: under "strict" the fifth is a ban.
        assert!(world.strike("eve", 6));
        assert!(!world.strike("bob", 4));
        world.lock("victim");
        world.ban(Layer::Edge, "203.0.113.0/24", until);
        world.ban(Layer::User, "mallory", Timestamp::MAX);
        world.ban(Layer::Tenant, "gone", until);
        let gone = ListEntry::named(Layer::Tenant, "gone").unwrap().ban_id(secret().digest_key());
        world.limiter.bans().lift(gone).unwrap();
        assert!(world.strike("pardoned", 6));
        world.limiter.forgive(Layer::User, "pardoned");
        assert!(saved(&world.journal, SECOND));
        // Nothing is done at the end: what was saved is all there is.
        std::mem::forget(world.journal.clone());
    }
    // The lock of the journal is still held by what was forgotten: the file is read as another process would.
    let kept = Journal::read(&scratch.db()).unwrap();
    assert!(kept.damage.is_none());
    let copy = scratch.0.join("copy.db");
    Journal::copy(&scratch.db(), &copy).unwrap();
    let world = world(&copy, START);
    assert!(world.kept.damage.is_none());
    assert_eq!((world.restored.bans, world.restored.accounts, world.restored.unreadable), (2, 1, 0));
    assert!(world.is_banned("eve") && world.is_banned("mallory"));
    assert!(!world.is_banned("bob") && !world.is_banned("pardoned"));
    // Three strikes are on record, and what was used is not: one request fits, and two more strikes make five.
    assert!(world.strike("bob", 3));
    assert!(world.is_locked("victim") && !world.is_locked("somebody"));
    let from_there = Facts { ip: "203.0.113.9".parse().ok(), user: Some("clean"), ..Facts::default() };
    let decision = world.limiter.peek(&from_there).unwrap();
    assert!(decision.banned());
    assert_eq!(decision.ready_at, Some(until));
    let tenant = Facts { tenant: Some("gone"), user: Some("clean"), ..Facts::default() };
    assert!(world.limiter.peek(&tenant).unwrap().allowed());
}

#[test]
fn what_is_over_is_not_put_back_and_leaves_the_file() {
    let scratch = Scratch::new();
    {
        let world = world(&scratch.db(), START);
        assert!(world.strike("eve", 6));
        world.ban(Layer::User, "mallory", Timestamp::from_secs(START.secs_ceil() + 10));
        assert!(world.journal.close());
    }
    let later = Timestamp::from_secs(START.secs_ceil() + 2 * 86_400);
    {
        let world = world(&scratch.db(), later);
        assert_eq!(world.restored, Restored::default());
        assert!(!world.is_banned("eve") && !world.is_banned("mallory"));
        assert!(world.journal.close());
    }
    assert!(Journal::read(&scratch.db()).unwrap().rows.is_empty());
}

#[test]
fn one_process_at_a_time_and_one_secret() {
    let scratch = Scratch::new();
    let (journal, _) = Journal::open(&scratch.db(), 1).unwrap();
    assert!(matches!(Journal::open(&scratch.db(), 1), Err(JournalError::InUse(_))));
    drop(journal);
    assert!(matches!(Journal::open(&scratch.db(), 2), Err(JournalError::OtherSecret(_))));
    Journal::open(&scratch.db(), 1).unwrap();
    let made = installation_secret(&scratch.db(), None).unwrap();
    assert_eq!(made.fingerprint(), installation_secret(&scratch.db(), None).unwrap().fingerprint());
    let mode = |path: &Path| std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(path).unwrap().permissions());
    for path in [scratch.db(), secret_path(&scratch.db())] {
        assert_eq!(mode(&path) & 0o777, 0o600, "{}", path.display());
    }
    std::fs::write(secret_path(&scratch.db()), "hunter2").unwrap();
    assert!(matches!(installation_secret(&scratch.db(), None), Err(JournalError::BadSecret(_))));
    assert!(installation_secret(&scratch.db(), Some("a secret of our own")).is_ok());
}

/// Somebody holds the file so that nothing can be written: it is said once, nothing is lost, and it recovers by itself.
#[test]
fn a_disk_that_cannot_be_written_to_is_said_and_recovers_without_a_restart() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    let troubles = world.journal.troubles();
    let other = rusqlite::Connection::open(scratch.db()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert!(world.strike("eve", 6));
    // The strike is not on disk; decisions go on.
    assert!(!saved(&world.journal, Duration::from_millis(10)));
    while troubles.borrow().is_none() {
        std::thread::yield_now();
    }
    assert!(!saved(&world.journal, Duration::from_millis(10)));
    assert!(world.is_banned("eve"));
    assert!(world.strike("bob", 6));
    other.execute_batch("COMMIT").unwrap();
    assert!(saved(&world.journal, SECOND));
    assert!(troubles.borrow().is_none());
    drop((world, other));
    let world = self::world(&scratch.db(), START);
    assert!(world.is_banned("eve") && world.is_banned("bob"));
}

/// Waits until the journal has found damage and mended it.
fn repaired(journal: &Journal) -> Arc<Repair> {
    let mut repairs = journal.repairs();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let repaired = runtime.block_on(async { tokio::time::timeout(SECOND, repairs.wait_for(Option::is_some)).await });
    repaired.unwrap().unwrap().clone().unwrap()
}

/// What somebody can do to a file while it is in use.
fn harms() -> [(&'static str, fn(&Path)); 6] {
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
        ("deleted", |path| std::fs::remove_file(path).unwrap()),
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
        let (journal, _) = Journal::open(&scratch.db(), secret().fingerprint()).unwrap();
        let journal = Arc::new(journal);
        let memory = Arc::new(BanBook::default().kept_by(Arc::<Journal>::clone(&journal)));
        let store = Arc::new(MemoryStore::new(Policy::parse(POLICY, &|_| None).unwrap().memory()));
        let source = (Arc::downgrade(&store), Arc::downgrade(&memory));
        journal.written_anew_from(move || Some(rows_in_memory(&*source.0.upgrade()?, &*source.1.upgrade()?)));
        let ban = |name: &str| {
            let whom = ListEntry::named(Layer::User, name).unwrap();
            let ban = Ban { whom, reason: "r".into(), by: "b".into(), from: START, until: Timestamp::MAX };
            memory.set(ban.whom.ban_id(secret().digest_key()), ban, START).unwrap();
        };
        (0..100).for_each(|number| ban(&format!("mallory{number}")));
        let line = |about: &str| AuditLine {
            at: START,
            who: "ops".into(),
            action: "ban",
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
    let rows = |path: &Path| Journal::open(path, secret().fingerprint()).unwrap().1.rows.len();
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

#[test]
fn counters_come_back_once() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    assert!(!world.strike("ada", 1));
    let store = world.limiter.store();
    assert_eq!(save_counters(store, &scratch.db(), 9, START).unwrap(), 1);
    let other = MemoryStore::new(world.limiter.policy().memory());
    assert_eq!(load_counters(&other, &scratch.db(), 9, START).unwrap(), 1);
    assert_eq!(load_counters(&other, &scratch.db(), 9, START).unwrap(), 0);
    let (mut before, mut after) = (Vec::new(), Vec::new());
    store.each_balance(START, |key, limit, balance| before.push((key, *limit, balance.clone())));
    other.each_balance(START, |key, limit, balance| after.push((key, *limit, balance.clone())));
    assert_eq!(before, after);
    // Counters of another secret are about nobody.
    save_counters(store, &scratch.db(), 9, START).unwrap();
    assert_eq!(load_counters(&MemoryStore::new(world.limiter.policy().memory()), &scratch.db(), 8, START).unwrap(), 0);
}

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
        match Journal::open(&copy.db(), secret().fingerprint()) {
            Ok((journal, kept)) => {
                let sound = kept.rows == original;
                assert!(sound || kept.damage.is_some(), "byte {at}: rows are gone and nobody said so");
                if let Some(damage) = &kept.damage {
                    noticed += 1;
                    assert_eq!(std::fs::read(&damage.aside).unwrap().len(), whole.len(), "byte {at}");
                    salvaged += usize::from(damage.kept + 1 >= original.len());
                    // What could be read is in the new file, which is whole.
                    drop(journal);
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
        let (_, kept) = Journal::open(&copy.db(), secret().fingerprint()).unwrap();
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
    let (_, kept) = Journal::open(&copy.db(), secret().fingerprint()).unwrap();
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
    assert!(saved(&world.journal, SECOND));
    drop(world);
    let world = self::world(&scratch.db(), START);
    assert!(world.kept.damage.is_none());
    assert!(world.is_banned("bob") && world.is_locked("victim"));
}

#[test]
fn rows_of_one_key_are_the_last_that_was_noted() {
    let scratch = Scratch::new();
    let (journal, _) = Journal::open(&scratch.db(), 1).unwrap();
    for number in 0..=255u8 {
        journal.note(Kind::Tenant, b"acme", Some(vec![number]));
        journal.note(Kind::User, &[number], if number % 2 == 0 { None } else { Some(vec![1]) });
    }
    assert!(saved(&journal, SECOND));
    drop(journal);
    let rows = Journal::read(&scratch.db()).unwrap().rows;
    assert_eq!(rows.len(), 129);
    let acme = rows.iter().find(|row| row.key == b"acme").unwrap();
    assert_eq!(acme.value.as_deref(), Some(&[255][..]));
}

/// A keeper that says when a strike is written down.
#[derive(Debug, Default)]
struct Slow(std::sync::Mutex<Option<tokio::sync::oneshot::Sender<bool>>>);

impl Keep for Slow {
    fn standing(&self, _: Digest, _: Option<&Standing>) {}

    fn account(&self, _: Digest, _: Option<&Account>) {}

    fn ban(&self, _: Digest, _: Option<&Ban>) {}

    fn named(&self, _: Digest, _: Option<&Ban>) {}

    fn saving(&self) -> Saving {
        let (done, saved) = tokio::sync::oneshot::channel();
        *self.0.lock().unwrap() = Some(done);
        Box::pin(async move { saved.await.unwrap_or(false) })
    }
}

/// Behind the layer, a request that strikes is answered when the strike is written down, and any other at once.
#[test]
fn a_layers_answer_waits_for_its_strike() {
    let policy = Policy::parse(POLICY, &|_| None).unwrap();
    let keeper = Arc::new(Slow::default());
    let store = MemoryStore::new(policy.memory()).kept_by(Arc::<Slow>::clone(&keeper));
    let key = secret().digest_key();
    let limiter = Limiter::with_parts(policy, store, ManualClock::new(START), key, secret());
    let layer = ThresholdLayer::new(Arc::new(limiter))
        .identify(|_| Identified { user: Some("eve".to_owned()), ..Identified::default() });
    let mut service = layer.layer(tower::service_fn(|_| async {
        Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
    }));
    let mut ask = || Box::pin(service.call(http::Request::new(http_body_util::Empty::<bytes::Bytes>::new())));
    let poll = |future: &mut std::pin::Pin<Box<_>>| {
        let future: &mut std::pin::Pin<Box<ResponseFuture<_, _>>> = future;
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => Some(answer.unwrap().status().as_u16()),
            Poll::Pending => None,
        }
    };
    assert_eq!(poll(&mut ask()), Some(200));
    let mut striking = ask();
    assert_eq!(poll(&mut striking), None);
    assert_eq!(poll(&mut striking), None);
    keeper.0.lock().unwrap().take().unwrap().send(true).unwrap();
    assert_eq!(poll(&mut striking), Some(429));
}
