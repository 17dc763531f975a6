//! Observers hear of every operation, how it ended and how long it took.

#![cfg(all(feature = "memory", feature = "toml", feature = "login", feature = "wait"))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, Layer};
use threshold_core::receipt::ActualCost;
use threshold_core::{Digest, Outcome, Plan};
use threshold_limiter::limiter::LimiterBuilder;
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{Answer, Command, Kind, Listed, Store, StoreError};
use threshold_limiter::{
    Clock, Degraded, Facts, Limit, Limiter, LoginRequest, ObservedDecision, ObservedOperation, Observer, OnExpire,
    Operation, OperationResult, Policy, Timestamp, TraceId,
};

const POLICY: &str = r#"
    [login]
    [[rule]]
    name = "posts"
    per = ["user"]
    limit = "3/h"
    algorithm = "fixed-window"
    on_store_error = "closed"
"#;

/// A clock on which every reading takes a microsecond, so that what is measured is the number of readings in between.
#[derive(Debug, Default)]
struct CountingClock(AtomicU64);

impl Clock for CountingClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_secs(1_767_225_600)
    }

    fn ticks(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

type Heard = (Operation, &'static str, Option<Digest>);

/// Collects what an observer is told.
#[derive(Default)]
struct Ear {
    heard: Mutex<Vec<Heard>>,
    times: Mutex<Vec<(Duration, Duration)>>,
    degraded: Mutex<Vec<Option<Degraded>>>,
}

impl Observer for Ear {
    fn decided(&self, observed: &ObservedDecision<'_>) {
        assert_ne!(observed.decision.trace, TraceId::default());
        self.heard.lock().unwrap().push((observed.operation, observed.decision.verdict.name(), None));
        self.times.lock().unwrap().push((observed.elapsed, observed.in_store));
    }

    fn performed(&self, observed: &ObservedOperation) {
        assert_eq!(observed.at, Timestamp::from_secs(1_767_225_600));
        assert!(observed.elapsed > Duration::ZERO);
        self.heard.lock().unwrap().push((observed.operation, observed.result.name(), observed.subject));
        self.degraded.lock().unwrap().push(observed.degraded);
        if let OperationResult::Failed(error) = observed.result {
            assert_eq!(error, StoreError::Unavailable);
        }
    }
}

impl Ear {
    fn heard(&self) -> Vec<(Operation, &'static str)> {
        let heard = std::mem::take(&mut *self.heard.lock().unwrap());
        heard.into_iter().map(|(operation, ended, _)| (operation, ended)).collect()
    }
}

fn user(name: &str) -> Facts<'_> {
    Facts { user: Some(name), ..Facts::default() }
}

fn listening() -> (Limiter<MemoryStore, CountingClock>, Arc<Ear>) {
    let ear = Arc::new(Ear::default());
    let builder = Limiter::builder(Policy::parse(POLICY, &|_| None).unwrap()).clock(CountingClock::default());
    (builder.observer(Arc::clone(&ear) as _).build(), ear)
}

/// Woken by leaving out any one `perform`.
#[tokio::test]
async fn every_operation_is_heard_with_its_result() {
    use Operation::{
        ChangeAccount, Check, Commit, Control, Forgive, LoginAttempt, LoginResult, Pause, Peek, Record, Refund,
        Release, Reserve, Wait,
    };
    let (limiter, ear) = listening();
    let _ = limiter.check(&user("a")).unwrap();
    limiter.check_many(&[user("a"), user("a"), user("a")]);
    let _ = limiter.peek(&user("a")).unwrap();
    let (_, receipt) = limiter.record(&user("a")).unwrap();
    let _ = limiter.wait(&user("a"), Duration::ZERO).await.unwrap();
    let decided = [(Check, "allow"), (Check, "allow"), (Check, "allow"), (Check, "deny"), (Peek, "deny")];
    assert_eq!(ear.heard(), [&decided[..], &[(Record, "allow"), (Wait, "deny")]].concat());
    limiter.refund(&receipt.unwrap()).unwrap();
    let reserve = || limiter.reserve(&user("b"), Duration::from_secs(60), OnExpire::Release).unwrap().reservation;
    limiter.commit(reserve().unwrap(), &ActualCost::default()).unwrap();
    limiter.release(reserve().unwrap()).unwrap();
    limiter.release(TraceId::from_u128(7)).unwrap_err();
    let ended = [(Refund, "done"), (Reserve, "allow"), (Commit, "done"), (Reserve, "allow"), (Release, "done")];
    assert_eq!(ear.heard(), [&ended[..], &[(Release, "rejected")]].concat());
    limiter.pause(Layer::User, "c", Duration::from_secs(1)).unwrap();
    limiter.forgive(Layer::User, "c").unwrap();
    limiter.forgive_standing(Digest::from_u128(7)).await.unwrap();
    limiter.pardon_account("ada").unwrap();
    let whom = limiter.policy().ban_target(Layer::User, "c").unwrap();
    let (id, from) = (whom.ban_id(limiter.key()), Timestamp::from_secs(1_767_225_600));
    let ban = Ban { whom, reason: "r".into(), by: "ops".into(), from, until: Timestamp::MAX };
    limiter.change_control(ControlChange::Ban { id, ban: Some(Arc::new(ban)) }).await.unwrap();
    limiter.change_control_all(|| Box::new([ControlChange::Ban { id, ban: None }])).await.unwrap();
    let operated = [Pause, Forgive, Forgive, ChangeAccount, Control, Control].map(|operation| (operation, "done"));
    assert_eq!(ear.heard(), operated);
    let request = LoginRequest { account: Some("ada"), ip: "203.0.113.7".parse().ok(), ..LoginRequest::default() };
    for _ in 0..3 {
        let threshold_limiter::Attempted::Allowed(attempt) = limiter.login_attempt(&request).unwrap() else { panic!() };
        let _ = limiter.login_result(&attempt, false).unwrap();
        limiter.login_result(&attempt, false).unwrap_err();
    }
    let _ = limiter.login_attempt(&request).unwrap();
    let login = [(LoginAttempt, "done"), (LoginResult, "done"), (LoginResult, "rejected")];
    assert_eq!(ear.heard(), [&login[..], &login, &login, &[(LoginAttempt, "denied")]].concat());
}

#[tokio::test]
async fn a_limit_without_a_policy_is_heard_with_its_key() {
    let (limiter, ear) = listening();
    let limit: Limit = "1/h".parse().unwrap();
    for _ in 0..2 {
        let _ = limiter.check_limit("a", &limit, 1).await.unwrap();
    }
    let _ = limiter.check_limit("b", &limit, 1).await.unwrap();
    let heard = std::mem::take(&mut *ear.heard.lock().unwrap());
    let [(_, first, a), (_, second, again), (Operation::Limit, third, b)] = heard[..] else { panic!("{heard:?}") };
    assert_eq!([first, second, third], ["done", "denied", "done"]);
    assert!(a.is_some() && a == again && a != b);
}

/// The store's share is between two readings of the clock, and the whole between two others.
#[test]
fn the_share_of_the_store_is_a_part_of_the_whole() {
    let (limiter, ear) = listening();
    let _ = limiter.check(&user("a")).unwrap();
    limiter.reserve(&user("a"), Duration::from_secs(60), OnExpire::Release).unwrap();
    let times = std::mem::take(&mut *ear.times.lock().unwrap());
    let micros = |micros| Duration::from_micros(micros);
    assert_eq!(times, [(micros(3), micros(1)), (micros(3), micros(1))]);
}

/// A store that fails.
struct Dead;

impl Store for Dead {
    async fn settle(&self, _: &Plan<'_>, _: Timestamp, _: &mut Outcome) -> Result<(), StoreError> {
        Err(StoreError::Unavailable)
    }

    async fn execute(&self, _: Command, _: Timestamp) -> Result<Answer, StoreError> {
        Err(StoreError::Unavailable)
    }

    async fn list(&self, _: Kind, _: Option<Digest>, _: usize, _: Timestamp) -> Result<Vec<Listed>, StoreError> {
        Err(StoreError::Unavailable)
    }
}

#[tokio::test]
async fn a_store_that_fails_is_heard() {
    let ear = Arc::new(Ear::default());
    let policy = Policy::parse(POLICY, &|_| None).unwrap();
    let builder = LimiterBuilder::new(policy, Dead, CountingClock::default());
    let limiter = builder.observer(Arc::clone(&ear) as _).build().unwrap();
    let _ = limiter.check_async(&user("a")).await.unwrap();
    limiter.check_limit("a", &"1/h".parse().unwrap(), 1).await.unwrap_err();
    limiter.release_async(TraceId::from_u128(7)).await.unwrap_err();
    let request = LoginRequest { account: Some("ada"), ..LoginRequest::default() };
    limiter.login_attempt_async(&request).await.unwrap_err();
    let expect = [(Operation::Limit, "failed"), (Operation::Release, "failed"), (Operation::LoginAttempt, "failed")];
    assert_eq!(ear.heard(), [&[(Operation::Check, "deny")], &expect[..]].concat());
}

/// A login that fails open was heard as one that the store had decided.
#[tokio::test]
async fn a_login_that_is_decided_without_the_store_is_heard_as_degraded() {
    let ear = Arc::new(Ear::default());
    let policy = Policy::parse("[login]\non_store_error = 'open'", &|_| None).unwrap();
    let builder = LimiterBuilder::new(policy, Dead, CountingClock::default());
    let limiter = builder.observer(Arc::clone(&ear) as _).build().unwrap();
    let request = LoginRequest { account: Some("ada"), ..LoginRequest::default() };
    let _ = limiter.login_attempt_async(&request).await.unwrap();
    assert_eq!(ear.heard(), [(Operation::LoginAttempt, "done")]);
    assert_eq!(*ear.degraded.lock().unwrap(), [Some(Degraded::StoreError)]);
}
