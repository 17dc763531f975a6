//! Many threads race for one budget, and exactly the limit is admitted.

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

/// Runs `each` on all threads at once, `times` times on each, and returns how often it returned `true`.
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
fn one_limit_admits_exactly_its_quota() {
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

/// Each of eight users is admitted exactly 60 times, and every broader limit is charged 480: a denial charged nothing, and no
/// charge was lost.
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
        // Global, edge, tenant and user, each less the peek's own request.
        assert_eq!(remaining, [10_000 - 481, 1_000 - 481, 500 - 481, 59]);
    }
}

/// Of the requests that exceed a limit at the same time, one is the first strike and is warned. The others are denied.
#[test]
fn only_one_of_many_concurrent_violations_is_warned() {
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

/// The policy is replaced under load. Every decision is made under one generation, and usage is kept.
#[test]
fn replacing_the_policy_loses_no_usage() {
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

/// After several concurrent swaps, the policy with the last generation is in force, and every generation was used once. The policy
/// is large, so that preparing it takes a while, and no other swap may come between that and its generation.
///
/// Seen to fail after: an atomic `generation` in `Limiter::swap`, drawn before `with_key`.
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

/// Refunds race with each other. Each receipt is refunded once.
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

/// Returns a token bucket by key, and its clock.
fn key_limiter(limit: &str, keys: u64) -> (KeyLimiter<Arc<ManualClock>>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
    let limit = LimitOptions::new().algorithm(Algorithm::TokenBucket).parse(limit).unwrap();
    (KeyLimiter::builder(limit).max_keys(keys).clock(Arc::clone(&clock)).build(), clock)
}

/// Each round has a new key, which all threads check at once.
///
/// Seen to fail after: a store for the `compare_exchange` in `Table::decide`.
#[test]
fn a_key_admits_exactly_its_limit() {
    let (limiter, _) = key_limiter("100/day", 2_000);
    for round in 0..2_000 {
        let key = format!("key {round}");
        assert_eq!(count(7, |_| limiter.check(&key).allowed), 100);
    }
}

/// All threads check the same new keys at once, in a table of the smallest size that holds them. None is added twice.
///
/// Seen to fail after: leaving out `find` in `Table::check_new`.
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

/// All threads check two keys that are more than half used, and crowd their eight slots with other keys, of which one is evicted
/// for each new one. The two keys are counted exactly.
///
/// Seen to fail after: the most used for the least used in `Table::room`, with `is_protected` left out.
#[test]
fn evictions_do_not_change_the_count_of_other_keys() {
    for round in 0..100 {
        let (limiter, _) = key_limiter("20/day", 1);
        for _ in 0..11 {
            assert!(limiter.check("one").allowed && limiter.check("two").allowed);
        }
        let step = AtomicU64::new(0);
        let admitted = count(20, |thread| {
            let other = format!("other {}", step.fetch_add(1, Ordering::Relaxed) % 40);
            let _ = limiter.check(&other);
            limiter.check(if thread % 2 == 0 { "one" } else { "two" }).allowed
        });
        assert_eq!(admitted, 2 * 9, "round {round}");
        assert!(limiter.usage().counts.evicted > 0);
    }
}

/// Every second all eight slots are free again, and three times as many keys race for them. Eight keys get one slot each, and
/// none is counted twice.
///
/// Seen to fail after: `true` in place of the result of the first `compare_exchange` in `Table::take`.
#[test]
fn a_free_slot_is_taken_by_one_key() {
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
