//! One bill over several partitions is charged everywhere or nowhere, without a step that spans two of them.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use threshold_core::key::Partition;
use threshold_core::plan::Verb;
use threshold_core::split::Step;
use threshold_core::{
    Answer, Command, Decision, Digest, Facts, Ledger, Outcome, Plan, Policy, Receipt, Span, Split, Timestamp, TraceId,
};

use crate::world::start;

/// A store of independent partitions, each with a clock of its own.
#[derive(Debug, Default)]
struct Partitioned {
    ledgers: BTreeMap<Partition, Ledger>,
    /// How far the clocks of partitions with odd numbers are behind.
    behind: Span,
    /// The number of commands in each round of the last bill.
    rounds: Vec<usize>,
    /// Whether the partitions move to other servers and refuse commands with several keys.
    moving: bool,
}

impl Partitioned {
    fn clock(&self, partition: Partition, now: Timestamp) -> Timestamp {
        if partition.to_u16() % 2 == 1 { now.minus(self.behind) } else { now }
    }

    fn execute(&mut self, partition: Partition, command: &Command, now: Timestamp) -> Answer {
        let now = self.clock(partition, now);
        self.ledgers.entry(partition).or_default().execute(command, now)
    }

    fn settle(&mut self, plan: &Plan<'_>, now: Timestamp) -> Outcome {
        let mut split = Split::new(plan.bill().to_owned(), Digest::partition);
        self.rounds.clear();
        loop {
            let round = split.round();
            if round.is_empty() {
                break;
            }
            self.rounds.push(round.len());
            for Step { part, partition, command } in round {
                if self.moving && split.divide(part) {
                    continue;
                }
                split.answered(part, self.execute(partition, &command, now).settled().unwrap());
            }
        }
        let (outcome, returns) = split.join();
        for (partition, command) in returns {
            self.execute(partition, &command, now);
        }
        *outcome
    }

    fn refund(&mut self, receipt: &Receipt, now: Timestamp) -> Vec<bool> {
        let parts = receipt.split(Digest::partition);
        let refunds = parts.into_iter().map(|(partition, part)| {
            let answer = self.execute(partition, &Command::Refund(Box::new(part)), now);
            matches!(answer, Answer::Refunded { first: true })
        });
        refunds.collect()
    }
}

const ALGORITHMS: [&str; 5] = ["token-bucket", "fixed-window", "sliding-window", "sliding-log", "sliding-estimate"];

/// Returns a policy with one limit in each of the partitions of an address, a tenant and a user.
fn policy(limits: &[(u64, usize)], more: &str) -> Policy {
    let pers = ["ip", "tenant", "user"];
    let rules = limits.iter().zip(pers).map(|((limit, algorithm), per)| {
        let algorithm = ALGORITHMS[*algorithm];
        let more = if per == "user" { more } else { "" };
        format!("[[rule]]\nname = '{per}'\nper = ['{per}']\nlimit = '{limit}/min'\nalgorithm = '{algorithm}'\n{more}\n")
    });
    let text = format!("[ladders.l]\nrungs = ['warn', 'deny', 'cooldown 1min']\n{}", rules.collect::<String>());
    Policy::parse(&text, &|_| None).unwrap()
}

/// Returns the rules of a policy whose keys are all in the partition of the tenant.
fn scoped(limits: &[(u64, usize)]) -> String {
    let pers = ["['tenant']", "['user']", "['user', 'endpoint']"];
    let rules = limits.iter().zip(pers).enumerate().map(|(number, ((limit, algorithm), per))| {
        let algorithm = ALGORITHMS[*algorithm];
        format!("[[rule]]\nname = 'r{number}'\nper = {per}\nlimit = '{limit}/min'\nalgorithm = '{algorithm}'\n")
    });
    rules.collect()
}

fn facts<'a>(who: (u8, &'a str, &'a str), cost: u64, id: u128) -> Facts<'a> {
    let ip = Some([198, 51, who.0, 1].into());
    let trace = TraceId::from_u128(id << 64 | id);
    Facts { ip, tenant: Some(who.1), user: Some(who.2), cost: Some(cost), trace, ..Facts::default() }
}

type Who = (u8, &'static str, &'static str);

fn whos() -> impl Strategy<Value = Who> {
    (select(&[1u8, 2][..]), select(&["t1", "t2"][..]), select(&["u1", "u2"][..]))
}

fn limits() -> impl Strategy<Value = Vec<(u64, usize)>> {
    vec((select(&[3u64, 5, 20][..]), 0..ALGORITHMS.len()), 3)
}

fn remaining(decision: &Decision) -> Vec<u64> {
    decision.readings.iter().map(|reading| reading.remaining).collect()
}

proptest! {
    #![proptest_config(crate::cases(128))]

    /// Without ladders, a store of partitions decides every request as a store does that settles everything in one step.
    ///
    /// Seen to fail after: giving nothing back in `Split::join`.
    #[test]
    fn partitions_decide_like_one_store(
        limits in limits(),
        start in start(),
        trace in vec((whos(), 0..4u64, 0..40u64, select(&[Verb::Check, Verb::Check, Verb::Peek, Verb::Record][..])), 1..60),
    ) {
        let policy = policy(&limits, "");
        let (mut whole, mut parts) = (Ledger::default(), Partitioned::default());
        let mut now = start;
        for (id, (who, cost, gap, verb)) in trace.into_iter().enumerate() {
            now = now.plus(Span::from_secs(gap));
            let facts = facts(who, cost, id as u128 + 1);
            let Ok(plan) = policy.plan_for(verb, &facts) else { continue };
            let expected = plan.decide(&whole.settle(&plan, now));
            let decision = plan.decide(&parts.settle(&plan, now));
            prop_assert_eq!(format!("{decision:?}"), format!("{expected:?}"));
            prop_assert_eq!(&parts.rounds, &[3]);
        }
    }

    /// While partitions move, a bill is settled key by key, with the same decision.
    ///
    /// Seen to fail after: numbering the new parts from 0 in `Split::divide`.
    #[test]
    fn moving_partitions_decide_like_one_store(
        limits in limits(),
        start in start(),
        trace in vec((whos(), 0..4u64, 0..40u64, select(&[Verb::Check, Verb::Check, Verb::Peek, Verb::Record][..])), 1..60),
    ) {
        // All keys of a request are in one partition, that of its tenant.
        let policy = policy(&limits, "");
        let text = format!("[identity]\nuser_scope = 'tenant'\n{}", scoped(&limits));
        let scoped = Policy::parse(&text, &|_| None).unwrap();
        let mut now = start;
        for policy in [policy, scoped] {
            let (mut whole, mut parts) = (Ledger::default(), Partitioned { moving: true, ..Partitioned::default() });
            for (id, (who, cost, gap, verb)) in trace.iter().enumerate() {
                now = now.plus(Span::from_secs(*gap));
                let facts = facts(*who, *cost, id as u128 + 1);
                let Ok(plan) = policy.plan_for(*verb, &facts) else { continue };
                let expected = plan.decide(&whole.settle(&plan, now));
                let decision = plan.decide(&parts.settle(&plan, now));
                prop_assert_eq!(format!("{decision:?}"), format!("{expected:?}"));
            }
        }
    }

    /// With a ladder in one partition, a denied request is charged nowhere, an allowed one everywhere, and a request is a strike
    /// only if no other partition denies it.
    ///
    /// Seen to fail after: leaving out `outcome.penalty.is_some()` in `Split::denied`.
    #[test]
    fn only_the_last_partition_strikes(
        limits in limits(),
        start in start(),
        trace in vec((whos(), 1..4u64, 0..40u64), 1..60),
    ) {
        let policy = policy(&limits, "ladder = 'l'\nstrike = 'request'");
        let mut parts = Partitioned::default();
        let mut now = start;
        for (id, (who, cost, gap)) in trace.into_iter().enumerate() {
            now = now.plus(Span::from_secs(gap));
            let facts = facts(who, cost, id as u128 + 1);
            let Ok(plan) = policy.plan(&facts) else { continue };
            let look = |parts: &mut Partitioned| {
                let plan = policy.plan_for(Verb::Peek, &Facts { cost: Some(0), ..facts }).unwrap();
                remaining(&plan.decide(&parts.settle(&plan, now)))
            };
            let before = look(&mut parts);
            let outcome = parts.settle(&plan, now);
            let rounds = parts.rounds.clone();
            let decision = plan.decide(&outcome);
            let after = look(&mut parts);
            let denied_elsewhere = decision.readings[..2].iter().any(|reading| !reading.allowed);
            if decision.allowed() {
                prop_assert_eq!(&rounds, &[3, 1]);
                for (reading, (before, after)) in decision.readings.iter().zip(before.iter().zip(&after)) {
                    let charged = if reading.charged { cost } else { 0 };
                    prop_assert_eq!(before - after, charged);
                }
                prop_assert!(decision.readings[..2].iter().all(|reading| reading.charged));
            } else {
                prop_assert_eq!(&before, &after);
                prop_assert!(decision.readings.iter().all(|reading| !reading.charged));
            }
            if denied_elsewhere {
                prop_assert!(decision.escalations.is_empty());
                prop_assert_eq!(rounds.len(), 1);
            } else if decision.penalty.is_none() && !decision.readings[2].allowed {
                prop_assert_eq!(decision.escalations.len(), 1, "only the last limit is exceeded");
            }
        }
    }

    /// Every partition refunds its part of a receipt by its own clock, and once, however far apart the clocks are.
    ///
    /// Seen to fail after: `charged.at = self.at` for every charge when a receipt is made.
    #[test]
    fn partitions_refund_by_their_own_clocks(
        limits in limits(), start in start(), who in whos(), cost in 1..4u64, behind in 0..30u64, gap in 0..3u64,
    ) {
        let policy = policy(&limits, "");
        let mut parts = Partitioned { behind: Span::from_secs(behind), ..Partitioned::default() };
        let facts = facts(who, cost, 7);
        let Ok(plan) = policy.plan(&facts) else { return Ok(()) };
        let outcome = parts.settle(&plan, start);
        if !plan.decide(&outcome).allowed() {
            return Ok(());
        }
        prop_assert_eq!(outcome.at(), start.max(plan.bill().partitions().iter().map(|own| parts.clock(*own, start)).max().unwrap()));
        let receipt = plan.receipt(&outcome).unwrap();
        let now = start.plus(Span::from_secs(gap));
        prop_assert!(parts.refund(&receipt, now).iter().all(|first| *first));
        prop_assert!(parts.refund(&receipt, now).iter().all(|first| !first));
        let look = policy.plan_for(Verb::Peek, &Facts { cost: Some(0), ..facts }).unwrap();
        let left = remaining(&look.decide(&parts.settle(&look, now)));
        prop_assert_eq!(left, limits.iter().map(|(limit, _)| *limit).collect::<Vec<_>>());
    }
}

#[test]
fn a_bill_of_one_partition_takes_one_command() {
    let policy = Policy::parse(
        "[ladders.l]\nrungs = ['deny']\n[[rule]]\nname = 'a'\nper = ['user']\nlimit = '1/min'\nladder = 'l'\n",
        &|_| None,
    );
    let policy = policy.unwrap();
    let mut parts = Partitioned::default();
    let now = Timestamp::from_secs(1_767_225_600);
    for (id, allowed) in [(1, true), (2, false)] {
        let facts = facts((1, "t1", "u1"), 1, id);
        let plan = policy.plan(&facts).unwrap();
        let decision = plan.decide(&parts.settle(&plan, now));
        assert_eq!((decision.allowed(), parts.rounds.as_slice()), (allowed, &[1][..]));
        assert_eq!(decision.escalations.len(), usize::from(!allowed));
    }
}

/// Seen to fail after: `punishes: whole.punishes` in `part_of`.
#[test]
fn of_two_partitions_with_ladders_only_the_last_strikes() {
    let ladder = |per: &str| {
        format!("[[rule]]\nname = '{per}'\nper = ['{per}']\nlimit = '1/min'\nladder = 'l'\nstrike = 'request'\n")
    };
    let text = format!("[ladders.l]\nrungs = ['deny']\n{}{}", ladder("tenant"), ladder("user"));
    let policy = Policy::parse(&text, &|_| None).unwrap();
    let (mut parts, now) = (Partitioned::default(), Timestamp::from_secs(1_767_225_600));
    let mut ask = |tenant, user, id| {
        let facts = facts((1, tenant, user), 1, id);
        let plan = policy.plan(&facts).unwrap();
        let decision = plan.decide(&parts.settle(&plan, now));
        (decision.allowed(), decision.escalations.len(), parts.rounds.clone())
    };
    assert_eq!(ask("t1", "u1", 1), (true, 0, vec![2, 1, 1]));
    assert_eq!(
        ask("t1", "u1", 2),
        (false, 0, vec![2, 1]),
        "the tenant exceeds its limit, but its partition is not the last"
    );
    assert_eq!(ask("t2", "u1", 3), (false, 1, vec![2, 1, 1]), "only the user exceeds its limit");
    assert_eq!(ask("t2", "u2", 4), (true, 0, vec![2, 1, 1]), "the tenant's charge was given back");
}

#[test]
fn charges_are_given_back_when_a_partition_fails() {
    let policy = policy(&[(3, 0), (3, 0), (3, 0)], "");
    let facts = facts((1, "t1", "u1"), 2, 7);
    let plan = policy.plan(&facts).unwrap();
    let (mut parts, now) = (Partitioned::default(), Timestamp::from_secs(1_767_225_600));
    let mut split = Split::new(plan.bill().to_owned(), Digest::partition);
    for Step { part, partition, command } in split.round().into_iter().skip(1) {
        split.answered(part, parts.execute(partition, &command, now).settled().unwrap());
    }
    let returns = split.abandon();
    assert_eq!(returns.len(), 2);
    for (partition, command) in returns {
        parts.execute(partition, &command, now);
    }
    let look = policy.plan_for(Verb::Peek, &Facts { cost: Some(0), ..facts }).unwrap();
    assert_eq!(remaining(&look.decide(&parts.settle(&look, now))), [3, 3, 3]);
}
