//! After a clock that was a day ahead is set back, penalties, bans, locks and reservations last as long as intended.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::Arc;
use std::time::Duration;

use threshold_core::policy::{Ban, Layer, ListEntry};
use threshold_core::receipt::OnExpire;
use threshold_core::{Digest, Facts, Policy, Span, Timestamp};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{Attempted, Limiter, LoginRequest, ManualClock};

const POLICY: &str = r#"
[login]
locks = { 2 = "1h" }

[ladders.l]
decay = "2h"
rungs = ["ban 1h"]

[[rule]]
name = "posts"
per = ["user"]
limit = "1/min"
ladder = "l"
strike = "request"
"#;
const START: Timestamp = Timestamp::from_secs(1_767_225_600);

type World = (Arc<ManualClock>, Limiter<MemoryStore, Arc<ManualClock>>);

/// Returns a limiter whose clock is a day ahead.
fn ahead() -> World {
    let clock = Arc::new(ManualClock::new(START.plus(Span::DAY)));
    (Arc::clone(&clock), Limiter::builder(Policy::parse(POLICY, &|_| None).unwrap()).clock(clock).build())
}

/// Seen to fail after: not calling `bring_standings` in `Step::check`.
#[test]
fn a_ladders_ban_and_strikes_last_as_long_as_intended() {
    let (clock, limiter) = ahead();
    let eve = Facts { user: Some("eve"), ..Facts::default() };
    let bans = |times: usize| (0..times).fold(false, |_, _| limiter.check(&eve).unwrap().banned());
    assert!(bans(2));
    clock.set(START);
    assert!(bans(1));
    clock.set(START.plus(Span::HOUR).minus(Span::SECOND));
    assert!(bans(1));
    clock.set(START.plus(Span::HOUR));
    assert!(limiter.check(&eve).unwrap().allowed(), "the ban lasts a day longer");
    let standing = |now: Timestamp| {
        let keys = limiter.policy().keys_of(Layer::User, "eve");
        limiter.store().standing(*keys.standings.iter().next().unwrap()).map_or(0, |standing| standing.strikes(now))
    };
    assert_eq!((standing(START.plus(Span::HOUR)), standing(START.plus(Span::from_secs(7_200)))), (1, 0));
}

/// A ban that was not dated ahead keeps its end when the clock is set back a little.
#[test]
fn a_ban_that_was_not_dated_ahead_keeps_its_end() {
    let (clock, limiter) = ahead();
    let eve = Facts { user: Some("eve"), ..Facts::default() };
    clock.set(START);
    for _ in 0..2 {
        let _ = limiter.check(&eve).unwrap();
    }
    clock.set(START.plus(Span::from_secs(1_800)));
    assert!(limiter.check(&eve).unwrap().banned());
    clock.set(START.plus(Span::from_secs(900)));
    assert_eq!(limiter.check(&eve).unwrap().ready_at, Some(START.plus(Span::HOUR)));
}

/// Seen to fail after: not calling `bring_back` in `BanList::sweep`.
#[test]
fn an_operators_ban_lasts_as_long_as_intended() {
    let (clock, limiter) = ahead();
    let set = |user: &str, until: Timestamp| {
        let whom = ListEntry::named(Layer::User, user).unwrap();
        let ban = Ban { whom, reason: "test".into(), by: "ops".into(), from: Timestamp::from(limiter.now()), until };
        limiter.bans().set(Digest::from_u128(u128::from(until.micros())), ban, Timestamp::from(limiter.now())).unwrap();
    };
    set("eve", Timestamp::from(limiter.now()).plus(Span::HOUR));
    set("mallory", Timestamp::MAX);
    clock.set(START);
    limiter.bans().sweep(START);
    let banned_at = |user: &str, now: Timestamp| {
        clock.set(now);
        limiter.peek(&Facts { user: Some(user), ..Facts::default() }).unwrap().banned()
    };
    assert!(banned_at("eve", START.plus(Span::HOUR).minus(Span::SECOND)));
    assert!(!banned_at("eve", START.plus(Span::HOUR)));
    assert!(banned_at("mallory", START.plus(Span::DAY).plus(Span::DAY)));
}

/// Seen to fail after: leaving out `bring_back` in `Track::bring`.
#[test]
fn the_lock_of_a_login_lasts_as_long_as_intended() {
    let (clock, limiter) = ahead();
    let attempt = || limiter.login_attempt(&LoginRequest { account: Some("ada"), ..LoginRequest::default() }).unwrap();
    for _ in 0..2 {
        let Attempted::Allowed(attempt) = attempt() else { break };
        let _ = limiter.login_result(&attempt, false).unwrap();
    }
    clock.set(START);
    assert!(matches!(attempt(), Attempted::Refused(_)));
    clock.set(START.plus(Span::HOUR).plus(Span::SECOND));
    assert!(matches!(attempt(), Attempted::Allowed(_)), "the lock lasts a day longer");
}

/// Seen to fail after: leaving out `bring_back` in `reserve`.
#[test]
fn a_reservation_lasts_as_long_as_intended() {
    let (clock, limiter) = ahead();
    let facts = |user| Facts { user: Some(user), ..Facts::default() };
    let reserve = |user| limiter.reserve(&facts(user), Duration::from_secs(3_600), OnExpire::Charge).unwrap();
    let first = reserve("one").reservation.unwrap();
    clock.set(START);
    let _ = reserve("two");
    clock.set(START.plus(Span::HOUR));
    let _ = limiter.check(&facts("three")).unwrap();
    assert!(limiter.release(first).is_err(), "the reservation lasts a day longer");
}
