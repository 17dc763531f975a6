//! `KeyLimiter`: each key is counted exactly, many at once as each alone, within the room that it was made with.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use threshold_limiter::threshold_core::Balance;
use threshold_limiter::{Algorithm, KeyDecision, KeyLimiter, LimitOptions, ManualClock, Span, Timestamp, TraceId};

const START: Timestamp = Timestamp::from_secs(1_767_225_600);

/// Rates of one word, whole and with a fraction; one with too large a denominator for that; and other algorithms.
const LIMITS: [(&str, Algorithm); 6] = [
    ("3/min", Algorithm::TokenBucket),
    ("7/min burst 2", Algorithm::TokenBucket),
    ("2053/s burst 4", Algorithm::TokenBucket),
    ("3/min", Algorithm::FixedWindow),
    ("3/min", Algorithm::SlidingEstimate),
    ("3/min", Algorithm::SlidingLog),
];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    /// Whatever keys come together, and however often each: the answers are those of one check after the other, in the same
    /// order.
    ///
    /// Woken by: `chunks_exact` for `chunks`; and a batch decided from its end.
    #[test]
    fn many_keys_are_decided_as_each_alone_would_be(
        algorithm in prop::sample::select(&Algorithm::ALL[..]),
        batches in vec((vec(0..12u8, 0..70), 0..3u64, 0..40u64), 1..5),
    ) {
        let clock = Arc::new(ManualClock::new(START));
        let text = if algorithm.is_concurrency() { "3" } else { "3/min" };
        let limit = LimitOptions::new().algorithm(algorithm).parse(text).unwrap();
        let limiter = || KeyLimiter::builder(limit).max_keys(1_000).clock(Arc::clone(&clock)).build();
        let (alone, together) = (limiter(), limiter());
        for (keys, cost, seconds) in batches {
            let names: Vec<String> = keys.iter().map(|key| format!("k{key}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let expect: Vec<KeyDecision> = names.iter().map(|name| alone.check_cost(*name, cost)).collect();
            prop_assert_eq!(together.check_many_cost(&names, cost), expect);
            clock.advance(Span::from_secs(seconds));
        }
        prop_assert_eq!(together.usage().keys, alone.usage().keys);
    }

    /// Whatever is asked for, under whichever key, and however the clock moves: each key is answered as a balance of its own.
    /// There are as many keys as a line has slots, so that none need go wherever they meet.
    ///
    /// Woken by: one tag for all keys in `KeyHash::hash`; `next` for `state` in `Table::decide`; another first state in
    /// `Table::check_new`; and taking what says nothing before what is unused, in `Table::room`: a clock that steps back
    /// then finds it forgotten.
    #[test]
    fn each_key_is_a_balance_of_its_own(
        limit in prop::sample::select(&LIMITS[..]),
        steps in vec((0..4usize, 0..5u64, any::<bool>(), 0..90u64), 1..60),
    ) {
        let clock = Arc::new(ManualClock::new(START));
        let limit = LimitOptions::new().algorithm(limit.1).parse(limit.0).unwrap();
        let limiter = KeyLimiter::builder(limit).max_keys(1).clock(Arc::clone(&clock)).build();
        let mut balances = vec![Balance::default(); 4];
        let mut now = START;
        for (key, cost, back, seconds) in steps {
            let span = Span::from_secs(seconds);
            now = if back { now.minus(span) } else { now.plus(span) };
            clock.set(now);
            // All of its keys have one limit, so what lies in the future is never that of another limit, and is brought back at once.
            balances[key].bring(&limit, now);
            let expect = balances[key].check(&limit, cost, now, TraceId::default()).look;
            let told = limiter.check_cost(&format!("k{key}"), cost);
            let remaining = if expect.allowed { expect.available.saturating_sub(cost) } else { expect.available };
            prop_assert_eq!((told.allowed, told.remaining), (expect.allowed, remaining));
            let ready = expect.ready_at.unless_never().filter(|_| !expect.allowed);
            prop_assert_eq!(told.retry_after(), ready.map(|ready| ready.since(now).into()));
        }
    }
}

fn limiter(limit: &str, keys: u64) -> (KeyLimiter<Arc<ManualClock>>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(START));
    let limit = LimitOptions::new().algorithm(Algorithm::TokenBucket).parse(limit).unwrap();
    (KeyLimiter::builder(limit).max_keys(keys).clock(Arc::clone(&clock)).build(), clock)
}

fn admitted(limiter: &KeyLimiter<Arc<ManualClock>>, keys: impl Iterator<Item = u64>) -> usize {
    keys.filter(|key| limiter.check(&format!("key {key}")).allowed).count()
}

/// As many keys as it was made for are all counted, and none of them makes another go.
///
/// Woken by: a `PROBE` of 2.
#[test]
fn there_is_room_for_all_keys_it_was_made_for() {
    for keys in [1, 10, 1_000, 20_000] {
        let (limiter, _) = limiter("2/day", keys);
        let count = usize::try_from(keys).unwrap();
        let rounds = [0; 4].map(|_| admitted(&limiter, 0..keys));
        assert_eq!(rounds, [count, count, 0, 0]);
        let usage = limiter.usage();
        assert_eq!((usage.keys, usage.counts.evicted, usage.counts.dropped), (count, 0, 0));
        assert!(usage.bytes <= 64 * count.max(4), "{} bytes for {count}", usage.bytes);
    }
}

/// The attack on a login limiter that forgot at random (CVE-2024-21662): ten times as many keys as there is room for, while
/// a thousand are over their limit. All of them still are afterwards, and no memory was added.
///
/// Woken by: the most used for the least used in `Table::room`, with `is_protected` left out.
#[test]
fn a_flood_forgets_nobody_who_is_over_the_limit() {
    const KEYS: u64 = 10_000;
    let (limiter, _) = limiter("5/h", KEYS);
    assert_eq!((0..6).map(|_| admitted(&limiter, 0..1_000)).sum::<usize>(), 5_000);
    let before = limiter.usage().bytes;
    assert_eq!(admitted(&limiter, KEYS..11 * KEYS), 100_000);
    assert_eq!(admitted(&limiter, 0..1_000), 0);
    let usage = limiter.usage();
    assert_eq!(usage.bytes, before);
    assert!(usage.counts.evicted > 50_000, "{usage:?}");
}

/// Where nobody may go, who is new is denied, and let in once others have nothing to say any more.
///
/// Woken by: `full: false` in `Table::check_new`; and leaving out `is_protected` in `Table::room`.
#[test]
fn full_of_keys_over_their_limit_it_denies_who_is_new() {
    let (limiter, clock) = limiter("1/min", 1);
    assert_eq!(admitted(&limiter, 0..8), 8);
    assert_eq!(admitted(&limiter, 0..20), 0);
    let denied = limiter.check("key 8");
    assert_eq!((denied.allowed, denied.remaining), (false, 1));
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(1)));
    clock.advance(Span::MINUTE);
    assert_eq!(admitted(&limiter, 8..16), 8);
    assert_eq!(limiter.usage().counts.dropped, 8);
    assert_eq!(limiter.usage().counts.evicted, 0);
}

/// A key that was only checked with cost 0, or denied at once, takes no slot.
#[test]
fn what_changes_nothing_keeps_nothing() {
    let (limiter, _) = limiter("2/min", 100);
    assert!(limiter.check_cost("a", 0).allowed);
    assert!(!limiter.check_cost("b", 3).allowed);
    assert!(!limiter.check_cost("c", u64::MAX).allowed);
    assert_eq!(limiter.usage().keys, 0);
}

/// Under token buckets and under limits that are kept in a store.
#[test]
fn every_kind_of_key_has_a_budget_of_its_own() {
    for algorithm in [Algorithm::TokenBucket, Algorithm::SlidingLog] {
        let limiter = KeyLimiter::builder(LimitOptions::new().algorithm(algorithm).parse("1/day").unwrap())
            .max_keys(1_000)
            .build();
        let addresses: Vec<IpAddr> =
            ["203.0.113.7", "203.0.113.8", "2001:db8::1"].map(|text| text.parse().unwrap()).into();
        for expected in [true, false] {
            let mut allowed = Vec::new();
            allowed.extend(["u1", "u2"].map(|name| limiter.check(name).allowed));
            allowed.extend(addresses.iter().map(|address| limiter.check(address).allowed));
            allowed.extend([7_u64, 8].map(|number| limiter.check(&number).allowed));
            allowed.extend([("t1", 7_u64), ("t1", 8), ("t2", 7)].map(|pair| limiter.check(&pair).allowed));
            assert!(allowed.iter().all(|allowed| *allowed == expected), "{algorithm:?}: {allowed:?}");
        }
        assert!(!limiter.check(&String::from("u1")).allowed, "an owned key is the same key");
    }
}

#[test]
fn a_cost_that_never_fits_has_no_time_to_retry() {
    let (limiter, _) = limiter("2/min", 100);
    assert_eq!(limiter.check_cost("a", 2).retry_after(), None);
    assert_eq!(limiter.check_cost("a", 1).retry_after(), Some(Duration::from_secs(30)));
    assert_eq!(limiter.check_cost("a", 3).retry_after(), None);
}
