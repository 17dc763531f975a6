//! Many threads, one budget: what is admitted is exactly the limit, however they race.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use threshold_core::Timestamp;
use threshold_limiter::{
    Algorithm, Decision, Facts, KeyLimiter, LimitOptions, Limiter, ManualClock, Policy, Span, Verdict,
};

const THREADS: u64 = 16;

fn limiter(policy: &str) -> Limiter<threshold_limiter::store::memory::MemoryStore, ManualClock> {
    let policy = Policy::parse(policy, &|_| None).unwrap();
    Limiter::builder(policy).clock(ManualClock::new(Timestamp::from_secs(1_767_225_600))).build()
}

/// Runs `each` on every thread at once, `times` times, and counts what it says yes to.
fn count(times: u64, each: impl Fn(u64) -> bool + Sync) -> u64 {
    let (yes, start) = (AtomicU64::new(0), std::sync::Barrier::new(usize::try_from(THREADS).unwrap()));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (yes, start, each) = (&yes, &start, &each);
            scope.spawn(move || {
                start.wait();
                for _ in 0..times {
                    yes.fetch_add(u64::from(each(thread)), Ordering::Relaxed);
                }
            });
        }
    });
    yes.into_inner()
}

#[test]
fn one_limit_admits_exactly_itself() {
    let algorithms =
        ["token-bucket", "fixed-window", "sliding-window", "sliding-estimate", "sliding-log", "concurrency"];
    for algorithm in algorithms {
        let limit = if algorithm == "concurrency" { "100" } else { "100/h" };
        for round in 0..40 {
            let policy =
                format!("[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"{limit}\"\nalgorithm = \"{algorithm}\"\n");
            let limiter = limiter(&policy);
            let user = format!("u{round}");
            let facts = Facts { user: Some(&user), ..Facts::default() };
            let admitted = count(20, |_| limiter.check(&facts).unwrap().allowed());
            assert_eq!(admitted, 100, "{algorithm}");
        }
    }
}

const FOUR: &str = r#"
[[rule]]
name = "edge"
per = ["ip"]
limit = "1000/h"
[[rule]]
name = "tenant"
per = ["tenant"]
limit = "500/h"
algorithm = "fixed-window"
[[rule]]
name = "user"
per = ["user"]
limit = "60/h"
algorithm = "sliding-log"
[[rule]]
name = "all"
per = []
limit = "10000/h"
algorithm = "sliding-estimate"
"#;

/// Each user of eight is admitted exactly 60 times, and 480 is what every broader limit was charged: a denial drained
/// nothing, and no charge was lost.
#[test]
fn four_limits_are_charged_together_or_not_at_all() {
    for _ in 0..60 {
        let limiter = limiter(FOUR);
        let users: Vec<String> = (0..8).map(|user| format!("u{user}")).collect();
        let facts = |thread: u64| Facts {
            ip: Some("203.0.113.7".parse().unwrap()),
            tenant: Some("t1"),
            user: Some(&users[usize::try_from(thread % 8).unwrap()]),
            ..Facts::default()
        };
        let admitted = count(60, |thread| limiter.check(&facts(thread)).unwrap().allowed());
        assert_eq!(admitted, 8 * 60);
        let fresh = Facts { user: Some("nobody yet"), ..facts(0) };
        let decision = limiter.peek(&fresh).unwrap();
        let remaining: Vec<u64> = decision.readings.iter().map(|reading| reading.remaining).collect();
        // Global, edge, tenant, user: each after the peek's own request.
        assert_eq!(remaining, [10_000 - 481, 1_000 - 481, 500 - 481, 59]);
    }
}

/// Whoever goes over first is warned once; nobody else of the same moment is.
#[test]
fn one_strike_is_one_request() {
    for _ in 0..200 {
        let limiter = limiter("[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"5/h\"\nladder = \"graduated\"\n");
        let facts = Facts { user: Some("u1"), ..Facts::default() };
        let warned = AtomicU64::new(0);
        let admitted = count(3, |_| {
            let decision: Decision = limiter.check(&facts).unwrap();
            warned.fetch_add(u64::from(decision.verdict == Verdict::Warn), Ordering::Relaxed);
            decision.allowed()
        });
        assert_eq!((admitted, warned.into_inner()), (6, 1));
    }
}

/// A policy swapped under load: every decision is made under one generation, and what was used stays used.
#[test]
fn a_swap_loses_nothing() {
    let policy = |limit: u64| format!("[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"{limit}/h\"\n");
    let limiter = limiter(&policy(1_000));
    let facts = Facts { user: Some("u1"), ..Facts::default() };
    let swapped = Arc::new(AtomicU64::new(1));
    let admitted = count(200, |thread| {
        if thread == 0 {
            let generation = limiter.swap(Policy::parse(&policy(1_000), &|_| None).unwrap());
            swapped.fetch_max(generation, Ordering::Relaxed);
        }
        let decision = limiter.check(&facts).unwrap();
        assert!(decision.generation >= 1);
        decision.allowed()
    });
    assert_eq!(admitted, 1_000);
    assert_eq!(swapped.load(Ordering::Relaxed), 201);
}

/// Of several swaps at once, the policy with the last generation is in force afterwards, and every generation is drawn
/// once. The policy is a large one: making it ready takes a while, and nobody may come between that and its generation.
///
/// Woken by: an atomic `generation` in `Limiter::swap`, drawn before `with_key`.
#[test]
fn the_last_of_several_swaps_is_in_force() {
    let rule = |number| {
        let path = format!("match = {{ path = \"/{number}\" }}");
        format!("[[rule]]\nname = \"r{number}\"\nper = [\"user\"]\nlimit = \"5/h\"\n{path}\n")
    };
    let policy = Policy::parse(&(0..200).map(rule).collect::<String>(), &|_| None).unwrap();
    let limiter = Limiter::builder(policy.clone()).clock(ManualClock::new(Timestamp::from_secs(1_767_225_600))).build();
    for round in 1..40 {
        let last = AtomicU64::new(0);
        count(1, |_| last.fetch_max(limiter.swap(policy.clone()), Ordering::Relaxed) == 0);
        let last = last.into_inner();
        assert_eq!((last, limiter.policy().generation()), (round * THREADS + 1, last));
    }
}

/// Refunds race with each other and with charges: each acts once, and what is left is what was not given back.
#[test]
fn a_receipt_is_refunded_once() {
    for _ in 0..50 {
        let limiter =
            limiter("[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"100/h\"\nalgorithm = \"sliding-log\"\n");
        let facts = Facts { user: Some("u1"), ..Facts::default() };
        let receipts: Vec<_> = (0..20).map(|_| limiter.check_with_receipt(&facts).unwrap().1.unwrap()).collect();
        let first = count(1, |_| receipts.iter().filter(|receipt| limiter.refund(receipt).unwrap()).count() > 0);
        assert!(first >= 1);
        assert_eq!(limiter.peek(&facts).unwrap().readings[0].remaining, 99);
    }
}

/// A token bucket by key, and its clock.
fn key_limiter(limit: &str, keys: u64) -> (KeyLimiter<Arc<ManualClock>>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
    let limit = LimitOptions::new().algorithm(Algorithm::TokenBucket).parse(limit).unwrap();
    (KeyLimiter::new(limit).max_keys(keys).clock(Arc::clone(&clock)), clock)
}

/// Each round is a new key, which all threads bring at once.
///
/// Woken by: a store for the `compare_exchange` in `Table::decide`.
#[test]
fn a_key_admits_exactly_its_limit() {
    let (limiter, _) = key_limiter("100/day", 2_000);
    for round in 0..2_000 {
        let key = format!("key {round}");
        assert_eq!(count(7, |_| limiter.check(&key).allowed), 100);
    }
}

/// All threads bring the same new keys at once, into a table that is no larger than it must be: none is there twice.
///
/// Woken by: leaving out `find` in `Table::check_new`.
#[test]
fn a_new_key_is_added_once() {
    for _ in 0..40 {
        let (limiter, _) = key_limiter("3/day", 200);
        let keys: Vec<String> = (0..200).map(|key| format!("key {key}")).collect();
        let admitted = AtomicU64::new(0);
        count(1, |_| {
            let fits = keys.iter().filter(|key| limiter.check(key).allowed).count();
            admitted.fetch_add(fits as u64, Ordering::Relaxed) == 0
        });
        assert_eq!((admitted.into_inner(), limiter.usage().keys), (600, 200));
    }
}

/// Two keys that are more than half used are asked for by all threads while these crowd eight slots with others, of which
/// one must go for each that comes: the two are counted exactly.
///
/// Woken by: the most used for the least used in `Table::room`, with `is_protected` left out.
#[test]
fn slots_that_change_hands_cost_nobody_else_anything() {
    for round in 0..100 {
        let (limiter, _) = key_limiter("20/day", 1);
        for _ in 0..11 {
            assert!(limiter.check("one").allowed && limiter.check("two").allowed);
        }
        let step = AtomicU64::new(0);
        let admitted = count(20, |thread| {
            let stranger = format!("stranger {}", step.fetch_add(1, Ordering::Relaxed) % 40);
            let _ = limiter.check(&stranger);
            limiter.check(if thread % 2 == 0 { "one" } else { "two" }).allowed
        });
        assert_eq!(admitted, 2 * 9, "round {round}");
        assert!(limiter.usage().counts.evicted > 0);
    }
}

/// Every second all eight slots are free again, and three times as many keys as there are slots race for them: eight get
/// one each, once, and nobody is counted twice.
///
/// Woken by: `true` for whatever the first `compare_exchange` in `Table::take` says.
#[test]
fn a_slot_that_says_nothing_is_handed_on_once() {
    let (limiter, clock) = key_limiter("1/s burst 1", 1);
    let keys: Vec<String> = (0..24).map(|key| format!("key {key}")).collect();
    for second in 0..500 {
        let admitted = AtomicU64::new(0);
        count(1, |thread| {
            let (before, after) = keys.split_at(usize::try_from(thread).unwrap());
            let fits = after.iter().chain(before).filter(|key| limiter.check(key).allowed).count();
            admitted.fetch_add(fits as u64, Ordering::Relaxed) == 0
        });
        assert_eq!(admitted.into_inner(), 8, "second {second}");
        clock.advance(Span::SECOND);
    }
}
