//! The journal on a real file: changes survive a restart, and damage is always reported.

#![cfg(feature = "sqlite")]
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]

mod audited;
mod builder;
mod control;
mod counters;
mod cut;
mod damage;
mod errors;
mod lost_commits;
#[cfg(feature = "metrics")]
mod metrics;
mod names;
mod planted;
mod rebuild;
mod rotation;

use std::future::Future as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use threshold_core::lockout::Account;
use threshold_core::policy::{Ban, Layer, ListEntry, Owner, Setting};
use threshold_core::{Digest, KeyId, Policy, Secret, Secrets, Span, Standing, Timestamp};
use threshold_limiter::bans::BanList;
use threshold_limiter::journal::{
    Contents, Counters, Journal, JournalError, JournalEvent, Kind, Restored, load_counters, restore, save_counters,
};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{ChangeSink, Durability};
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
    contents: Contents,
}

fn key(number: u32) -> KeyId {
    KeyId::from_u32(number)
}

fn secret() -> Secret {
    Secret::new(&[7; 32]).unwrap()
}

fn world(path: &Path, now: Timestamp) -> World {
    world_under(POLICY, path, &secret().into(), now)
}

fn world_under(policy: &str, path: &Path, secrets: &Secrets, now: Timestamp) -> World {
    let key = secrets.present().digest_key();
    let policy = Policy::parse(policy, &|_| None).unwrap().with_key(key);
    let (journal, contents) = Journal::open(path, secrets).unwrap();
    let journal = Arc::new(journal);
    let (store, bans) = (MemoryStore::new(policy.memory()), BanList::default());
    let restored = restore(&journal, &contents, (&store, &bans), (&policy, secrets), now);
    let store = store.with_change_sink(Arc::<Journal>::clone(&journal));
    let bans = Arc::new(bans.with_change_sink(Arc::<Journal>::clone(&journal)));
    let limiter = Limiter::builder(policy)
        .store(store)
        .clock(ManualClock::new(now))
        .digest_key(key)
        .secrets(secrets.clone())
        .bans(bans)
        .build()
        .unwrap();
    World { limiter, journal, restored, contents }
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
        let id = whom.ban_id(self.limiter.key());
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
        assert!(world.contents.is_new);
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
        world.limiter.forgive(Layer::User, "pardoned").unwrap();
        assert!(saved(&world.journal, SECOND));
        // Nothing is done at the end: what was saved is all there is.
        std::mem::forget(world.journal.clone());
    }
    // The lock of the journal is still held by what was forgotten: the file is read as another process would.
    let contents = Journal::read(&scratch.db()).unwrap();
    assert!(contents.damage.is_none());
    let copy = scratch.0.join("copy.db");
    Journal::copy(&scratch.db(), &copy).unwrap();
    let world = world(&copy, START);
    assert!(world.contents.damage.is_none());
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

/// Nobody has to sweep it away first.
///
/// Woken by: not asking when in `Plan::banned`.
#[test]
fn a_ban_ends_to_the_microsecond() {
    let scratch = Scratch::new();
    let until = START.plus(Span::HOUR);
    let banned_at = |now| {
        let world = world(&scratch.db(), now);
        world.ban(Layer::User, "mallory", until);
        (world.is_banned("mallory"), world.is_locked("mallory"))
    };
    assert_eq!(banned_at(until.minus(Span::from_micros(1))), (true, true));
    assert_eq!(banned_at(until), (false, false));
}

#[test]
fn one_process_at_a_time_and_one_secret() {
    let scratch = Scratch::new();
    let (journal, _) = Journal::open(&scratch.db(), key(1)).unwrap();
    assert!(matches!(Journal::open(&scratch.db(), key(1)), Err(JournalError::InUse(_))));
    drop(journal);
    assert!(matches!(Journal::open(&scratch.db(), key(2)), Err(JournalError::OtherSecret(_))));
    Journal::open(&scratch.db(), key(1)).unwrap();
}

/// A journal of an earlier or later version is refused by name, and no byte of it changes: also when it is read or copied, and
/// when the version is in the write-ahead log alone.
///
/// Fails without `locking_mode` in `other_version`, which else creates an index of the log.
#[test]
fn a_journal_of_another_version_is_refused_and_left_as_it_is() {
    for (version, checkpoint) in [(1, true), (1, false), (3, true), (3, false)] {
        let scratch = Scratch::new();
        let world = world(&scratch.db(), START);
        world.ban(Layer::User, "eve", Timestamp::MAX);
        assert!(saved(&world.journal, Duration::from_secs(10)));
        drop(world);
        let other = rusqlite::Connection::open(scratch.db()).unwrap();
        other.set_db_config(rusqlite::config::DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, !checkpoint).unwrap();
        other.execute("UPDATE meta SET value = ?1 WHERE name = 'version'", [version]).unwrap();
        other.pragma_update(None, "user_version", version).unwrap();
        drop(other);
        let files = || {
            let read = |more: &str| std::fs::read(scratch.0.join(format!("threshold.db{more}"))).ok();
            ["", "-wal", "-shm"].map(read)
        };
        let before = files();
        assert_eq!(before[1].as_ref().is_some_and(|log| !log.is_empty()), !checkpoint);
        let copy = scratch.0.join("copy.db");
        let errors = [
            Journal::open(&scratch.db(), secret().key_id()).map(drop).unwrap_err(),
            Journal::read(&scratch.db()).map(drop).unwrap_err(),
            Journal::copy(&scratch.db(), &copy).map(drop).unwrap_err(),
        ];
        for error in errors {
            let named = match &error {
                JournalError::Older(path, found) | JournalError::Newer(path, found) => (path.clone(), *found),
                other => panic!("{other}"),
            };
            assert_eq!(named, (scratch.db(), version));
            assert_eq!(matches!(error, JournalError::Older(..)), version == 1);
            assert!(error.to_string().contains(&format!("has version {version}")), "{error}");
        }
        assert!(files() == before && !copy.exists(), "version {version}, checkpoint {checkpoint}");
    }
}

/// Another process holds the write lock: the failure is reported, nothing is lost, and the journal recovers by itself.
#[test]
fn a_journal_that_cannot_be_written_recovers_without_a_restart() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    let mut events = world.journal.events();
    let other = rusqlite::Connection::open(scratch.db()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert!(world.strike("eve", 6));
    // The strike is not on disk; decisions go on.
    assert!(!saved(&world.journal, Duration::from_millis(10)));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert!(matches!(runtime.block_on(events.next()), Some(JournalEvent::Degraded(_))));
    assert!(!saved(&world.journal, Duration::from_millis(10)));
    assert!(world.is_banned("eve"));
    assert!(world.strike("bob", 6));
    other.execute_batch("COMMIT").unwrap();
    assert!(saved(&world.journal, SECOND));
    assert_eq!((world.journal.failure(), runtime.block_on(events.next())), (None, Some(JournalEvent::Recovered)));
    drop((world, other));
    let world = self::world(&scratch.db(), START);
    assert!(world.is_banned("eve") && world.is_banned("bob"));
}

#[test]
fn counters_come_back_once() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    assert!(!world.strike("ada", 1));
    let store = world.limiter.store();
    assert_eq!(save_counters(store, &scratch.db(), key(9), START).unwrap(), 1);
    let other = MemoryStore::new(world.limiter.policy().memory());
    assert_eq!(load_counters(&other, &scratch.db(), key(9), START).unwrap().read, 1);
    assert_eq!(load_counters(&other, &scratch.db(), key(9), START).unwrap(), Counters::default());
    let (mut before, mut after) = (Vec::new(), Vec::new());
    store.each_balance(START, |key, limit, balance| before.push((key, *limit, balance.clone())));
    other.each_balance(START, |key, limit, balance| after.push((key, *limit, balance.clone())));
    assert_eq!(before, after);
    // Counters of another secret are about nobody.
    save_counters(store, &scratch.db(), key(9), START).unwrap();
    let other = MemoryStore::new(world.limiter.policy().memory());
    assert!(load_counters(&other, &scratch.db(), key(8), START).is_err());
}

#[test]
fn rows_of_one_key_are_the_last_that_was_noted() {
    let scratch = Scratch::new();
    let (journal, _) = Journal::open(&scratch.db(), key(1)).unwrap();
    for number in 0..=255u8 {
        journal.put(Kind::Tenant, b"acme", Some(vec![number]));
        journal.put(Kind::User, &[number], if number % 2 == 0 { None } else { Some(vec![1]) });
    }
    assert!(saved(&journal, SECOND));
    drop(journal);
    let rows = Journal::read(&scratch.db()).unwrap().rows;
    assert_eq!(rows.len(), 129);
    let acme = rows.iter().find(|row| row.key == b"acme").unwrap();
    assert_eq!(acme.value.as_deref(), Some(&[255][..]));
}

/// A sink that says when a strike is written down.
#[derive(Debug, Default)]
struct Slow(std::sync::Mutex<Option<tokio::sync::oneshot::Sender<bool>>>);

impl ChangeSink for Slow {
    fn standing(&self, _: Digest, _: Option<&Standing>) {}

    fn account(&self, _: Digest, _: Option<&Account>) {}

    fn ban(&self, _: Digest, _: Option<&Ban>) {}

    fn named(&self, _: Digest, _: Option<&Ban>) {}

    fn setting(&self, _: Owner, _: &str, _: Option<&Setting>) {}

    fn durability(&self) -> Durability {
        let (done, saved) = tokio::sync::oneshot::channel();
        *self.0.lock().unwrap() = Some(done);
        Box::pin(async move { saved.await.unwrap_or(false) })
    }
}

/// Behind the layer, a request that strikes is answered when the strike is written down, and any other at once.
#[test]
fn a_layers_answer_waits_for_its_strike() {
    let policy = Policy::parse(POLICY, &|_| None).unwrap();
    let sink = Arc::new(Slow::default());
    let store = MemoryStore::new(policy.memory()).with_change_sink(Arc::<Slow>::clone(&sink));
    let key = secret().digest_key();
    let limiter = Limiter::builder(policy)
        .store(store)
        .clock(ManualClock::new(START))
        .digest_key(key)
        .secrets(secret())
        .build()
        .unwrap();
    let layer = ThresholdLayer::new(Arc::new(limiter))
        .unwrap()
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
    sink.0.lock().unwrap().take().unwrap().send(true).unwrap();
    assert_eq!(poll(&mut striking), Some(429));
}
