//! Shards: a limit that is split over several budgets is never passed, and everything that belongs to it is found again.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::sample::select;
use threshold_core::bill::Charge;
use threshold_core::plan::Verb;
use threshold_core::policy::Layer;
use threshold_core::{Facts, Ledger, Policy, Span, Timestamp, TraceId};

use crate::cases;
use crate::world::{parsed, start};

const ALGORITHMS: [&str; 5] = ["token-bucket", "fixed-window", "sliding-window", "sliding-estimate", "sliding-log"];

fn policy(limit: u64, algorithm: &str, shards: u32) -> Policy {
    parsed(&format!(
        "[[rule]]\nname = 'hot'\nper = ['user']\nlimit = '{limit}/s'\nalgorithm = '{algorithm}'\nshards = {shards}\n\
         place = 'OBJECTS/user:{{user}}'\n"
    ))
}

fn facts(trace: u128) -> Facts<'static> {
    Facts { user: Some("u1"), path: Some("/"), trace: TraceId::from_u128(trace), ..Facts::default() }
}

/// Returns how many of so many requests are admitted at one moment.
fn admitted(policy: &Policy, requests: u64, now: Timestamp, shard_of: impl Fn(u64) -> u128) -> u64 {
    let mut ledger = Ledger::default();
    let allowed = (0..requests).filter(|request| {
        let checked = ledger.decide(policy, Verb::Check, &facts(shard_of(*request)), now).unwrap();
        let reading = checked.decision.readings[0];
        assert!(reading.remaining <= reading.limit);
        checked.decision.allowed()
    });
    allowed.count() as u64
}

proptest! {
    #![proptest_config(cases(64))]

    /// All shards together admit the limit divided by their number, rounded down, each: never more than the limit, and less
    /// by fewer than the number of shards if requests fall on all of them. Ids that all fall on one shard get its share.
    ///
    /// Seen to fail after: `limit.share(0, …)` in `Measured::new`; `in_shard(0)` in `Met::choose_shard`.
    #[test]
    fn shards_together_stay_within_the_limit(
        limit in 501..900u64,
        algorithm in select(&ALGORITHMS[..]),
        shards in 2..=64u32,
        now in start(),
    ) {
        let policy = policy(limit, algorithm, shards);
        let n = u64::from(shards);
        let all = admitted(&policy, limit * 2 + n * 2, now, |request| u128::from(request) + 1);
        prop_assert_eq!(all, limit / n * n);
        let one = admitted(&policy, limit, now, |request| u128::from((request + 1) * n));
        prop_assert_eq!(one, limit / n);
    }

    /// Each shard has a key, a partition and a place of its own, and an operator's command for the user reaches all of them.
    ///
    /// Seen to fail after: `0..1` in `Policy::add_budgets_of`; leaving the shard out of the name in `Plan::places`.
    #[test]
    fn every_shard_is_found(algorithm in select(&ALGORITHMS[..]), shards in 2..=64u32) {
        let policy = policy(600, algorithm, shards);
        let mut places = BTreeMap::new();
        for trace in 1..=u128::from(shards) * 2 {
            let facts = facts(trace);
            let plan = policy.plan(&facts).unwrap();
            let key = plan.charges()[0].key();
            let name = plan.places(&facts).into_iter().map(|placed| placed.name).collect::<Vec<_>>();
            prop_assert_eq!(name.len(), 1);
            let known = places.insert(key, name.clone());
            prop_assert!(known.is_none_or(|known| known == name));
        }
        let count = shards as usize;
        prop_assert_eq!(places.len(), count);
        prop_assert_eq!(places.values().collect::<BTreeSet<_>>().len(), count);
        prop_assert_eq!(places.keys().map(|key| key.partition()).collect::<BTreeSet<_>>().len(), count);
        let found: BTreeSet<_> = policy.keys_of(Layer::User, "u1").balances.into_keys().collect();
        prop_assert_eq!(found, places.into_keys().collect::<BTreeSet<_>>());
    }
}

/// A plan without an id chooses its shard when it gets one, as if it had come with it.
///
/// Seen to fail after: leaving `choose_shards` out of `Plan::identify`.
#[test]
fn a_drawn_id_chooses_the_same_shard() {
    let policy = policy(600, "token-bucket", 4);
    for trace in 1..9 {
        let with = facts(trace);
        let without = Facts { trace: TraceId::default(), ..with };
        let mut drawn = policy.plan(&without).unwrap();
        drawn.identify(|| TraceId::from_u128(trace));
        let given = policy.plan(&with).unwrap();
        let key = |charges: &[Charge<'_>]| charges[0].key();
        assert_eq!(key(drawn.charges()), key(given.charges()));
        assert_eq!(drawn.met()[0].key(), given.met()[0].key());
    }
}

/// A request that is tried again has its shard and another id: another shard would have another queue, and under the same id a
/// store would not give back the second charge.
///
/// Seen to fail after: calling `choose_shards` in `Plan::retry_as`.
#[test]
fn a_request_that_is_tried_again_keeps_its_shard() {
    let policy = policy(600, "token-bucket", 4);
    let first = policy.plan(&facts(1)).unwrap();
    for id in 2..9 {
        let mut plan = first.clone();
        plan.retry_as(TraceId::from_u128(id));
        assert_eq!(plan.trace(), TraceId::from_u128(id));
        assert_eq!(plan.charges()[0].key(), first.charges()[0].key());
    }
}

/// A limit of 500 a second or less is not split, whatever the rule says, so a small tier keeps its whole limit in one place.
#[test]
fn a_small_limit_is_not_split() {
    let text = "
        [identity]
        default_tier = 'small'
        [[rule]]
        name = 'hot'
        per = ['user']
        limit = 'tier:calls'
        shards = 4
        [tiers.small]
        calls = '500/s'
        [tiers.large]
        calls = '60000/min'
    ";
    let policy = parsed(text);
    let keys = |tier| -> BTreeSet<_> {
        let keys =
            (1..20).map(|trace| policy.plan(&Facts { tier: Some(tier), ..facts(trace) }).unwrap().charges()[0].key());
        keys.collect()
    };
    assert_eq!(keys("small").len(), 1);
    assert_eq!(keys("large").len(), 4);
    let now = Timestamp::EPOCH.plus(Span::DAY);
    let mut ledger = Ledger::default();
    let decision =
        ledger.decide(&policy, Verb::Check, &Facts { tier: Some("large"), ..facts(1) }, now).unwrap().decision;
    // The limit as written, and what is left of this shard.
    assert_eq!((decision.readings[0].limit, decision.readings[0].remaining), (60_000, 14_999));
}
