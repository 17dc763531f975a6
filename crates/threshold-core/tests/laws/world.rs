//! Random policies, random sequences of requests, and the world in which they are played.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use threshold_core::bill::Charge;
use threshold_core::command::Records as _;
use threshold_core::ledger::Checked;
use threshold_core::limit::Algorithm;
use threshold_core::plan::{Subject, Verb};
use threshold_core::policy::{Disclosure, Layer};
use threshold_core::{
    Balance, Decision, Digest, Facts, Ledger, Outcome, Plan, PlanError, Policy, Reading, Span, Standing, Timestamp,
    TraceId, settle,
};

/// One rule of a random policy.
#[derive(Debug, Clone)]
pub(crate) struct RuleShape {
    pub(crate) algorithm: Algorithm,
    pub(crate) from_first: bool,
    pub(crate) layer: Layer,
    pub(crate) observed: bool,
    pub(crate) quota: u64,
    /// In milliseconds.
    pub(crate) period: u64,
    pub(crate) burst: Option<u64>,
    /// In seconds.
    pub(crate) block_for: Option<u64>,
    pub(crate) disclosure: Disclosure,
    /// Further lines of the rule.
    pub(crate) more: String,
}

impl RuleShape {
    /// Returns the rule as TOML.
    pub(crate) fn text(&self, name: &str) -> String {
        let per = match self.layer {
            Layer::Global => "",
            Layer::Edge => "\"ip\"",
            Layer::Tenant => "\"tenant\"",
            Layer::User => "\"user\"",
            Layer::Endpoint => "\"user\", \"endpoint\"",
        };
        let (layer, algorithm) = (self.layer, self.algorithm);
        let mut text = format!("\n[[rule]]\nname = \"{name}\"\nlayer = \"{layer}\"\nper = [{per}]\n");
        let _ = writeln!(text, "algorithm = \"{algorithm}\"");
        let _ = if algorithm.is_concurrency() {
            writeln!(text, "limit = \"{}\"\nttl = \"{}ms\"", self.quota, self.period)
        } else {
            writeln!(text, "limit = \"{}/{}ms\"", self.quota, self.period)
        };
        if let Some(burst) = self.burst.filter(|_| algorithm == Algorithm::TokenBucket) {
            let _ = writeln!(text, "burst = {burst}");
        }
        if self.from_first && algorithm == Algorithm::FixedWindow {
            text.push_str("anchor = \"first\"\n");
        }
        if let Some(seconds) = self.block_for {
            let _ = writeln!(text, "block_for = \"{seconds}s\"");
        }
        if self.observed {
            text.push_str("mode = \"observe\"\n");
        }
        let disclosure = match self.disclosure {
            Disclosure::Full => "full",
            Disclosure::Minimal => "minimal",
            Disclosure::None => "none",
        };
        let _ = writeln!(text, "disclosure = \"{disclosure}\"");
        text + &self.more
    }

    pub(crate) fn capacity(&self) -> u64 {
        let burst = self.burst.filter(|_| self.algorithm == Algorithm::TokenBucket);
        burst.unwrap_or(self.quota)
    }

    /// Returns whether the first charge opens a window, which stays open after the charge is given back.
    pub(crate) fn opens_its_own_windows(&self) -> bool {
        self.algorithm == Algorithm::FixedWindow && self.from_first
    }
}

/// Returns the name of the `index`th rule of a random policy.
fn name(index: usize) -> String {
    format!("r{index}")
}

/// Returns the index of the rule with this name.
pub(crate) fn place(name: &str) -> usize {
    name.trim_start_matches('r').parse().unwrap()
}

/// Returns the policy with these rules as TOML.
pub(crate) fn text_of(rules: &[RuleShape]) -> String {
    rules.iter().enumerate().map(|(index, rule)| rule.text(&name(index))).collect()
}

/// Returns the same policy with a ladder on the limits of users, which warns, delays, denies and bans.
pub(crate) fn with_a_ladder(mut rules: Vec<RuleShape>, strike: &str) -> String {
    let fits = |rule: &&mut RuleShape| rule.layer == Layer::User && !rule.algorithm.is_concurrency();
    for rule in rules.iter_mut().filter(fits) {
        rule.more = format!("ladder = \"steps\"\nstrike = \"{strike}\"\n");
    }
    let rungs = "rungs = [\"warn\", \"shadow\", \"deny\", \"cooldown 2s\", \"ban 3s\"]";
    format!("[ladders.steps]\ndecay = \"30s\"\nwarning_cookie = \"warned\"\n{rungs}\n{}", text_of(&rules))
}

pub(crate) fn parsed(text: &str) -> Policy {
    Policy::parse(text, &|_| None).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

pub(crate) const LAYERS: [Layer; 5] = [Layer::Global, Layer::Edge, Layer::Tenant, Layer::User, Layer::Endpoint];
const DISCLOSURES: [Disclosure; 4] = [Disclosure::Full, Disclosure::Full, Disclosure::Minimal, Disclosure::None];

/// A rule with a small limit over a second or a minute, which requests exceed often.
pub(crate) fn rule() -> impl Strategy<Value = RuleShape> {
    let figures = (1..7u64, select(&[250, 1_000, 7_000, 60_000][..]), prop::option::of(1..9u64));
    let answers = (prop::option::weighted(0.2, 1..20u64), select(&DISCLOSURES[..]), prop::bool::weighted(0.25));
    let kind = (select(&Algorithm::ALL[..]), any::<bool>(), select(&LAYERS[..]));
    (kind, figures, answers).prop_map(|((algorithm, from_first, layer), (quota, period, burst), answers)| {
        let (block_for, disclosure, observed) = answers;
        let more = String::new();
        RuleShape { algorithm, from_first, layer, observed, quota, period, burst, block_for, disclosure, more }
    })
}

/// One to five rules of any algorithm, mode and layer.
pub(crate) fn rules() -> impl Strategy<Value = Vec<RuleShape>> {
    vec(rule(), 1..6)
}

/// The time until the next request: very short, around the end of a period, or long enough that earlier requests no longer
/// count.
pub(crate) fn gap() -> impl Strategy<Value = Span> {
    let edges = select(&[250_000, 1_000_000, 7_000_000, 60_000_000][..]);
    let micros = prop_oneof![
        4 => 0..3u64,
        4 => 0..1_500_000u64,
        3 => (edges, 0..3u64).prop_map(|(edge, off)| edge + off - 1),
        2 => 0..20_000_000u64,
        1 => 0..130_000_000u64,
    ];
    micros.prop_map(Span::from_micros)
}

/// A caller: everything that the rules of a random policy count by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Who {
    pub(crate) host: u8,
    pub(crate) tenant: Option<&'static str>,
    pub(crate) user: Option<&'static str>,
    pub(crate) path: &'static str,
}

/// The only caller in tests that need one.
pub(crate) const ALICE: Who = Who { host: 1, tenant: Some("t1"), user: Some("alice"), path: "/a" };

/// All callers. No two share every budget, and each shares some with another.
pub(crate) const EVERYONE: [Who; 5] = [
    ALICE,
    Who { path: "/b", ..ALICE },
    Who { user: Some("bob"), ..ALICE },
    Who { host: 2, tenant: Some("t2"), user: None, path: "/a" },
    Who { host: 1, tenant: None, user: Some("bob"), path: "/a" },
];

pub(crate) fn who() -> impl Strategy<Value = Who> {
    select(&EVERYONE[..])
}

impl Who {
    pub(crate) fn ip(self) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(203, 0, 113, self.host))
    }

    pub(crate) fn facts(self) -> Facts<'static> {
        let (ip, path) = (Some(self.ip()), Some(self.path));
        Facts { ip, tenant: self.tenant, user: self.user, method: Some("POST"), path, ..Facts::default() }
    }
}

/// One request of a sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask {
    pub(crate) gap: Span,
    pub(crate) who: Who,
    pub(crate) cost: u64,
}

pub(crate) fn ask() -> impl Strategy<Value = Ask> {
    let cost = prop_oneof![1 => Just(0u64), 8 => Just(1u64), 2 => 2..5u64];
    (gap(), who(), cost).prop_map(|(gap, who, cost)| Ask { gap, who, cost })
}

pub(crate) fn trace() -> impl Strategy<Value = Vec<Ask>> {
    vec(ask(), 1..40)
}

/// The time at which a sequence begins: long after the epoch, and anywhere within a minute.
pub(crate) fn start() -> impl Strategy<Value = Timestamp> {
    (0..60_000_000u64).prop_map(|micros| Timestamp::from_micros(1_750_000_000_000_000 + micros))
}

/// A policy with a ledger and a clock.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) policy: Policy,
    pub(crate) ledger: Ledger,
    pub(crate) now: Timestamp,
    ids: u128,
}

impl World {
    pub(crate) fn new(text: &str, now: Timestamp) -> Self {
        Self { policy: parsed(text), ledger: Ledger::default(), now, ids: 0 }
    }

    pub(crate) fn wait(&mut self, gap: Span) {
        self.now = self.now.plus(gap);
    }

    /// Returns an id that was not used before.
    pub(crate) fn id(&mut self) -> TraceId {
        self.ids += 1;
        TraceId::from_u128(self.ids << 64 | self.ids)
    }

    pub(crate) fn facts(&mut self, who: Who, cost: u64) -> Facts<'static> {
        Facts { cost: Some(cost), trace: self.id(), ..who.facts() }
    }

    pub(crate) fn check(&mut self, who: Who, cost: u64) -> Result<Checked, PlanError> {
        let facts = self.facts(who, cost);
        self.ledger.decide(&self.policy, Verb::Check, &facts, self.now)
    }

    /// Converts the balances of this caller to the limits that it meets now, as a charge does.
    pub(crate) fn convert(&mut self, who: Who) {
        let facts = who.facts();
        let plan = self.policy.plan(&facts).unwrap();
        let met: Vec<_> = plan.charges().iter().map(|charge| (charge.key(), *charge.limit())).collect();
        drop(plan);
        let now = self.now;
        let Ok(()) = self.ledger.balances(&met, now, |balances| {
            for (balance, (_, limit)) in balances.iter_mut().zip(&met) {
                balance.bring(limit, now);
            }
        });
    }

    /// Settles a check and returns its outcome and decision.
    pub(crate) fn settle(&mut self, facts: &Facts<'_>) -> Result<(Outcome, Decision), PlanError> {
        let plan = self.policy.plan(facts)?;
        let outcome = self.ledger.settle(&plan, self.now);
        let decision = plan.decide(&outcome);
        Ok((outcome, decision))
    }

    pub(crate) fn peek_at(&mut self, facts: &Facts<'_>, now: Timestamp) -> Decision {
        self.ledger.decide(&self.policy, Verb::Peek, facts, now).unwrap().decision
    }

    /// Returns what remains of each limit that this caller meets, by key.
    pub(crate) fn room(&mut self, who: Who) -> BTreeMap<Digest, u64> {
        let facts = Facts { cost: Some(0), ..who.facts() };
        let plan = self.policy.plan_for(Verb::Peek, &facts).unwrap();
        let keys: Vec<Digest> = plan.charges().iter().map(Charge::key).collect();
        drop(plan);
        let readings = self.peek_at(&facts, self.now).readings;
        keys.into_iter().zip(readings.iter().map(|reading| reading.remaining)).collect()
    }

    /// Returns what remains of every limit for all callers.
    pub(crate) fn all_room(&mut self) -> BTreeMap<Digest, u64> {
        EVERYONE.into_iter().flat_map(|who| self.room(who)).collect()
    }
}

/// Returns the parts of a decision that a caller notices, without the readings of rules that do not bind.
pub(crate) fn noticed(decision: &Decision, policy: &Policy) -> String {
    let figures = |reading: &Reading| {
        (reading.allowed, reading.limit, reading.remaining, reading.resets(), reading.ready_at(), reading.charged)
    };
    let bound = decision.bound_by().map(figures);
    let name = decision.rule(policy).map(|rule| rule.name.clone());
    let strikes: Vec<_> = decision.escalations.iter().map(|strike| (strike.strikes, strike.rung)).collect();
    format!(
        "{:?} {:?} {:?} {:?} {name:?} {bound:?} {strikes:?}",
        decision.verdict,
        decision.ready_at,
        decision.delay(),
        decision.warning
    )
}

/// A store whose state can be inspected and copied.
#[derive(Debug, Clone, Default)]
pub(crate) struct PlainStore {
    pub(crate) balances: BTreeMap<Digest, Balance>,
    pub(crate) standings: BTreeMap<Digest, Standing>,
}

impl PlainStore {
    pub(crate) fn settle(&mut self, plan: &Plan<'_>, now: Timestamp) -> Outcome {
        let keys = || plan.charges().iter().map(Charge::key);
        let subjects = || plan.subjects().iter().map(Subject::key);
        let mut balances: Vec<Balance> =
            keys().map(|key| self.balances.get(&key).cloned().unwrap_or_default()).collect();
        let mut standings: Vec<Standing> = subjects().map(|key| self.standing(key)).collect();
        let outcome = settle(plan.bill(), &mut balances, &mut standings, now);
        self.balances.extend(keys().zip(balances));
        self.standings.extend(subjects().zip(standings));
        outcome
    }

    pub(crate) fn standing(&self, key: Digest) -> Standing {
        self.standings.get(&key).cloned().unwrap_or_default()
    }
}
