//! The script and core compute the same: every answer of a limiter on Redis is that of a limiter in memory.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use threshold_core::case::decision_json;
use threshold_core::{Command, DigestKey, Receipt, Span, Timestamp, TraceId};
use threshold_limiter::store::Store as _;
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{Facts, Limiter, ManualClock, Policy};
use tokio::runtime::Builder;

use crate::process::RedisServer;

const ALGORITHMS: [&str; 5] = ["token-bucket", "fixed-window", "sliding-window", "sliding-estimate", "sliding-log"];

#[derive(Debug, Clone)]
struct Rule {
    algorithm: usize,
    quota: u64,
    seconds: u64,
    from_first: bool,
    observed: bool,
    by_tenant: bool,
    ladder: bool,
}

#[derive(Debug, Clone)]
struct Step {
    /// Microseconds since the step before.
    wait: u64,
    user: u8,
    cost: u64,
    /// Puts the second policy in force, whose limits have other figures.
    swap: bool,
    /// Gives back the charges of an earlier step, so many before this one.
    back: Option<usize>,
}

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), prop::bool::weighted(0.2));
    let rule = (0..ALGORITHMS.len(), 1..40u64, 1..30u64, flags).prop_map(|(algorithm, quota, seconds, flags)| {
        let (from_first, observed, by_tenant, ladder) = flags;
        Rule { algorithm, quota, seconds, from_first, observed, by_tenant, ladder }
    });
    proptest::collection::vec(rule, 1..5)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // A denial is repeated for a second without the store, with the figures of its moment. So no wait is shorter, unless it is none.
    let wait = prop_oneof![Just(0), 1_000_000..3_000_000u64, 1_000_000..40_000_000u64];
    let back = prop::option::weighted(0.3, prop_oneof![Just(0usize), 0..20usize]);
    let step = (wait, 0..3u8, prop_oneof![Just(1u64), 0..6u64], prop::bool::weighted(0.03), back);
    let step = step.prop_map(|(wait, user, cost, swap, back)| Step { wait, user, cost, swap, back });
    proptest::collection::vec(step, 1..60)
}

/// Writes the rules, with `more` added to their quotas.
fn policy(rules: &[Rule], more: u64) -> Policy {
    let mut text = String::new();
    for (index, rule) in rules.iter().enumerate() {
        let algorithm = ALGORITHMS[rule.algorithm];
        let (per, mode) =
            (if rule.by_tenant { "tenant" } else { "user" }, if rule.observed { "observe" } else { "enforce" });
        let (quota, seconds) = (rule.quota + more + 6, rule.seconds);
        text += &format!("[[rule]]\nname = 'r{index}'\nper = ['{per}']\nalgorithm = '{algorithm}'\nmode = '{mode}'\n");
        text += &format!("limit = '{quota}/{seconds}s'\n");
        if algorithm == "fixed-window" && rule.from_first {
            text += "anchor = 'first'\n";
        }
        if rule.ladder && !rule.by_tenant && !rule.observed {
            text += "ladder = 'graduated'\n";
        }
    }
    Policy::parse(&text, &|_| None).unwrap()
}

/// Woken by: a bucket that does not carry its fraction, a window of the clock that begins at its first request, an estimate that
/// rounds its weight down, a log that keeps the cost of entries which have left, and a bucket that ignores changed figures. Where
/// charges are given back: a bucket that does not carry its fraction, a window that is not that of the charge, a log that keeps its old
/// sum, and an estimate whose count of the current window is dropped a period early.
#[test]
fn every_answer_on_redis_is_the_answer_in_memory() {
    let server = RedisServer::start_with_clock();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let mut runner = TestRunner::new(Config { cases: 60, failure_persistence: None, ..Config::default() });
    let law = |(rules, steps): (Vec<Rule>, Vec<Step>)| {
        server.cli(&["FLUSHALL"]);
        let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
        let key = DigestKey::new([7; 16]);
        let first = policy(&rules, 0);
        let store = MemoryStore::new(first.memory());
        let memory =
            Limiter::builder(first.clone()).store(store).clock(Arc::clone(&clock)).digest_key(key).build().unwrap();
        let store = runtime.block_on(server.open());
        let redis = Limiter::builder(first).store(store).clock(Arc::clone(&clock)).digest_key(key).build().unwrap();
        let mut now = Timestamp::from_secs(1_767_225_600);
        let mut receipts = Vec::new();
        for (number, Step { wait, user, cost, swap, back }) in steps.into_iter().enumerate() {
            now = now.plus(Span::from_micros(wait));
            clock.set(now);
            server.set_time(now);
            if swap {
                memory.swap(policy(&rules, 9));
                redis.swap(policy(&rules, 9));
            }
            let user = format!("user {user}");
            let trace = TraceId::from_u128(number as u128 + 1);
            let facts = Facts { user: Some(&user), tenant: Some("acme"), cost: Some(cost), trace, ..Facts::default() };
            let (here, receipt) = memory.check_with_receipt(&facts).unwrap();
            let (there, same) = runtime.block_on(redis.check_with_receipt_async(&facts)).unwrap();
            // Each store gives back its own.
            prop_assert_eq!(receipt.is_some(), same.is_some());
            receipts.extend(receipt.zip(same));
            let policy = memory.policy();
            prop_assert_eq!(decision_json(&there, &policy, None), decision_json(&here, &policy, None));
            prop_assert_eq!(redis.store().differences(), 0, "{:?}", redis.store().last_error());
            let given = back.and_then(|back| receipts.len().checked_sub(back + 1)).map(|at| receipts.remove(at));
            if let Some((here, there)) = given {
                let back = |receipt: Receipt| {
                    let credit = Some(receipt.id());
                    Command::GiveBack { receipt: Box::new(receipt), credit }
                };
                // By the limiters, which forget the denials that this makes room for.
                let done = runtime.block_on(memory.execute(back(here)));
                prop_assert_eq!(done, runtime.block_on(redis.execute(back(there))));
            }
        }
        Ok(())
    };
    runner.run(&(rules(), steps()), law).unwrap();
}
