//! Tests the counts of penalties in force: after strikes, ends, operators' changes and a restart.

use std::sync::Arc;

use threshold_core::policy::{Layer, Policy};
use threshold_core::{Facts, Span, TraceId};
use threshold_limiter::store::at_once;
use threshold_limiter::{LoginRequest, ManualClock};

use super::tests::{Folder, START};
use super::{Desk, NewBan, OpenDesk, Target};

const POLICY: &str = "
    [login]
    locks = { 1 = '1min' }
    [ladders.l]
    decay = '2h'
    rungs = ['shadow + deny', 'ban 1h']
    [[rule]]
    name = 'r'
    per = ['user']
    limit = '1/h'
    ladder = 'l'
    strike = 'request'
";

fn counts(desk: &Desk) -> [u64; 3] {
    let counts = desk.active_penalties();
    [counts.bans, counts.shadow_bans, counts.locks]
}

fn check(desk: &Desk, user: &str, times: usize) {
    for _ in 0..times {
        let _ = at_once(desk.limiter.check_async(&Facts { user: Some(user), ..Facts::default() })).unwrap();
    }
}

async fn fail_login(desk: &Desk, account: &str) {
    let ip = Some("203.0.113.7".parse().unwrap());
    let request = LoginRequest { account: Some(account), ip, ..LoginRequest::default() };
    let attempted = desk.login_attempt(&request, TraceId::default()).await.unwrap();
    desk.login_result(attempted.token().unwrap(), false).await.unwrap();
}

/// Woken by leaving out `forgive` in `lift` or in `forgive`, or the observer.
#[tokio::test]
async fn penalties_are_counted_until_they_end_or_an_operator_ends_them() {
    let clock = Arc::new(ManualClock::new(START));
    let desk = Desk::new(Policy::parse(POLICY, &|_| None).unwrap(), Arc::<ManualClock>::clone(&clock));
    check(&desk, "u1", 2);
    assert_eq!(counts(&desk), [0, 1, 0]);
    check(&desk, "u1", 5);
    check(&desk, "u2", 7);
    check(&desk, "u3", 7);
    assert_eq!(counts(&desk), [3, 3, 0]);
    let id = desk.bans(None, 1).await.unwrap()[0].id;
    desk.lift("ops", id, None).await.unwrap();
    assert_eq!(counts(&desk), [2, 2, 0]);
    for user in ["u1", "u2", "u3"] {
        desk.forgive("ops", Target::Subject(Layer::User, user), None).await.unwrap();
    }
    assert_eq!(counts(&desk), [0, 0, 0]);
    let mallory = NewBan { layer: Layer::User, key: "mallory", reason: "fraud", seconds: Some(60) };
    let (id, _) = desk.ban("ops", mallory).await.unwrap();
    check(&desk, "u4", 3);
    assert_eq!(counts(&desk), [2, 1, 0]);
    desk.lift("ops", id, None).await.unwrap();
    assert_eq!(counts(&desk), [1, 1, 0]);
    clock.advance(Span::from_secs(3_600));
    assert_eq!(counts(&desk), [0, 1, 0]);
    clock.advance(Span::from_secs(3_600));
    assert_eq!(counts(&desk), [0, 0, 0]);
}

/// Woken by leaving out `lock` in `login_result`, or `performed` of `ActivePenalties`.
#[tokio::test]
async fn locked_accounts_are_counted_until_they_are_unlocked() {
    let clock = Arc::new(ManualClock::new(START));
    let desk = Desk::new(Policy::parse(POLICY, &|_| None).unwrap(), Arc::<ManualClock>::clone(&clock));
    for account in ["ada", "bob", "eve"] {
        fail_login(&desk, account).await;
    }
    assert_eq!(counts(&desk), [0, 0, 3]);
    desk.forgive("ops", Target::Account("ADA"), None).await.unwrap();
    assert_eq!(counts(&desk), [0, 0, 2]);
    clock.advance(Span::from_secs(60));
    assert_eq!(counts(&desk), [0, 0, 0]);
    fail_login(&desk, "bob").await;
    assert_eq!(counts(&desk), [0, 0, 1]);
}

/// Woken by leaving out `count_restored_penalties`.
#[tokio::test]
async fn penalties_are_counted_again_after_a_restart() {
    let folder = Folder::new();
    let before = {
        let OpenDesk { desk, journal, .. } = folder.open(POLICY);
        check(&desk, "u1", 2);
        check(&desk, "u2", 3);
        let forever = NewBan { layer: Layer::User, key: "mallory", reason: "fraud", seconds: None };
        desk.ban("ops", forever).await.unwrap();
        fail_login(&desk, "ada").await;
        assert!(journal.unwrap().close());
        counts(&desk)
    };
    assert_eq!(before, [2, 2, 1]);
    let OpenDesk { desk, .. } = folder.open(POLICY);
    assert_eq!(counts(&desk), before);
}
