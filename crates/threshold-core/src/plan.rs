//! The charges of one request: which rules it meets, whose budgets they are, and what they cost.

mod subject_keys;

use std::fmt;
use std::net::IpAddr;

use arrayvec::ArrayVec;

use crate::address::AddressGroup;
use crate::caller::{Caller, Keyed, field_of};
use crate::facts::Facts;
use crate::key::{Digest, KeyPrefix, Part, TraceId};
use crate::ladder::{Ladder, Violation};
use crate::limit::Limit;
use crate::path::PathError;
use crate::policy::{
    Banned, CostOf, Disclosure, Identities, Known, Layer, Listed, Measure, Measured, Mode, OnMissing, Policy, Rule,
    SubjectRule, TierSource, Who,
};
use crate::time::Timestamp;

pub use subject_keys::SubjectKeys;

/// The most charges of one plan.
pub const MAX_CHARGES: usize = 16;
/// The most subjects of one plan.
pub const MAX_SUBJECTS: usize = 4;

/// What is to be settled for one request: distinct keys, inline, nothing on the heap.
#[derive(Debug, Clone)]
#[must_use = "a plan decides nothing until it is settled"]
pub struct Plan<'p> {
    pub(crate) policy: &'p Policy,
    pub(crate) verb: Verb,
    pub(crate) listed: Option<Listed>,
    /// A ban that holds if it is not over when this is decided.
    pub(crate) ban: Option<Banned>,
    pub(crate) charges: ArrayVec<Charge<'p>, MAX_CHARGES>,
    pub(crate) subjects: ArrayVec<Subject<'p>, MAX_SUBJECTS>,
    pub(crate) trace: TraceId,
    pub(crate) ip: Option<IpAddr>,
    /// Whether the door sees responses: rules that count by outcome are then charged now and given back if the
    /// outcome is not theirs.
    pub(crate) outcomes_seen: bool,
    /// Whether going over a limit strikes, and blocks where the rule says so.
    pub(crate) punishes: bool,
}

/// What is done with a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Decide and charge.
    Check,
    /// Say what `Check` would answer; change nothing.
    Peek,
    /// Charge after the fact; never denies.
    Record,
}

/// One cost on one key under one limit.
#[derive(Debug, Clone, Copy)]
pub struct Charge<'p> {
    pub(crate) key: Digest,
    pub(crate) limit: &'p Limit,
    pub(crate) counts: &'p CostOf,
    pub(crate) cost: u64,
    pub(crate) rule: &'p Rule,
    /// The rule's place in the policy.
    pub(crate) index: usize,
    /// The subject in the plan that a violation strikes.
    pub(crate) subject: Option<usize>,
}

impl Charge<'_> {
    /// Whose budget.
    #[must_use]
    pub fn key(&self) -> Digest {
        self.key
    }

    /// Under which limit.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        self.limit
    }

    /// How much.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Of which rule.
    #[must_use]
    pub fn rule(&self) -> &Rule {
        self.rule
    }

    pub(crate) fn enforced(&self) -> bool {
        self.rule.mode == Mode::Enforce
    }

    /// Going over this limit.
    pub(crate) fn violation(&self) -> Violation {
        Violation::new(self.rule, self.key, self.limit)
    }
}

/// Who is punished for going over.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'p> {
    pub(crate) key: Digest,
    pub(crate) ladder: &'p Ladder,
    /// The ladder's place in the policy.
    pub(crate) ladder_index: usize,
    pub(crate) layer: Layer,
    pub(crate) disclosure: Disclosure,
}

impl Subject<'_> {
    /// Whose standing.
    #[must_use]
    pub fn key(&self) -> Digest {
        self.key
    }

    /// What kind of subject it is.
    #[must_use]
    pub fn layer(&self) -> Layer {
        self.layer
    }
}

/// Why a request cannot be planned: the caller's mistake, never a reason to try again later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanError {
    /// The cost is more than the limit holds at all.
    CostExceedsLimit {
        /// The rule.
        rule: Box<str>,
        /// The cost that was asked.
        cost: u64,
        /// The most that can fit.
        capacity: u64,
        /// What is counted.
        cost_of: CostOf,
    },
    /// A rule needs an identity, and not even an address is there.
    Missing {
        /// The rule.
        rule: Box<str>,
        /// The field that would do.
        field: String,
    },
    /// More rules are met than a plan holds.
    TooManyRules,
    /// The path is not matched.
    Path(PathError),
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CostExceedsLimit { rule, cost, capacity, .. } => {
                write!(f, "a cost of {cost} never fits rule \"{rule}\", which holds {capacity}")
            }
            Self::Missing { rule, field } => {
                write!(f, "rule \"{rule}\" needs {field}, or an ip to stand in for it")
            }
            Self::TooManyRules => write!(f, "the request meets more than {MAX_CHARGES} rules"),
            Self::Path(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for PlanError {}

impl Policy {
    /// The plan of a `check`.
    ///
    /// # Errors
    /// Where the request cannot be decided as asked; see [`PlanError`].
    pub fn plan(&self, facts: &Facts<'_>) -> Result<Plan<'_>, PlanError> {
        self.plan_for(Verb::Check, facts)
    }

    /// The plan of any verb.
    ///
    /// # Errors
    /// As for [`plan`](Self::plan). A `record` takes any cost: what does not fit saturates.
    pub fn plan_for(&self, verb: Verb, facts: &Facts<'_>) -> Result<Plan<'_>, PlanError> {
        let mut plan = Plan::new(self, verb);
        plan.fill(facts)?;
        Ok(plan)
    }

    /// Adds the fallbacks of layers in which nothing else was met, and puts all charges back in order.
    #[inline(never)]
    fn add_fallbacks<'p>(
        &'p self,
        plan: &mut Plan<'p>,
        positions: &[Option<usize>; MAX_SUBJECTS],
        met: [bool; Layer::COUNT],
        caller: &Caller<'_>,
        identities: &mut Identities<'_>,
    ) -> Result<(), PlanError> {
        for (index, rule) in self.rules.iter().enumerate().filter(|(_, rule)| rule.fallback) {
            let alone = met.get(rule.layer as usize) == Some(&false);
            if alone && rule.matches.holds(caller) {
                self.add_charge(plan, positions, (index, rule), caller, identities)?;
            }
        }
        plan.charges.sort_unstable_by_key(|charge| charge.index);
        Ok(())
    }

    pub(crate) fn layer_is_met(&self, layer: Layer, caller: &Caller<'_>) -> bool {
        self.rules.iter().any(|rule| rule.layer == layer && !rule.fallback && rule.matches.holds(caller))
    }

    /// The limit of a rule for this caller; `None` is unlimited.
    #[inline]
    fn measured<'p>(&'p self, rule: &'p Rule, caller: &Caller<'_>) -> Option<&'p Measured> {
        match &rule.measure {
            Measure::Fixed(measured) if !self.tiers.any_scaled => Some(measured),
            _ => self.limit_of(rule, caller).map(|(measured, _)| measured),
        }
    }

    /// The limit of a rule for this caller, and where one by tier was found; `None` is unlimited.
    #[inline(never)]
    pub(crate) fn limit_of<'p>(
        &'p self,
        rule: &'p Rule,
        caller: &Caller<'_>,
    ) -> Option<(&'p Measured, Option<TierSource<'p>>)> {
        match &rule.measure {
            Measure::Fixed(measured) => {
                let scaled = self.tiers.scaled(&rule.per, caller).and_then(|scaled| scaled.rules.get(&rule.name));
                Some((scaled.unwrap_or(measured), None))
            }
            Measure::Unlimited => None,
            Measure::Tier(shape) => {
                let (measured, source) = self.tiers.limit(*shape, &rule.per, caller)?;
                Some((measured, Some(source)))
            }
        }
    }

    #[inline(always)]
    fn add_charge<'p>(
        &'p self,
        plan: &mut Plan<'p>,
        positions: &[Option<usize>; MAX_SUBJECTS],
        (index, rule): (usize, &'p Rule),
        caller: &Caller<'_>,
        identities: &mut Identities<'_>,
    ) -> Result<(), PlanError> {
        const NEVER: &Limit = &Limit::Never;
        let Some(Measured { limit, cost: counts }) = self.measured(rule, caller) else { return Ok(()) };
        let mut limit = limit;
        let Some((key, keyed)) = key_of(rule, limit, identities) else { return Ok(()) };
        if keyed == Keyed::Missing {
            match rule.on_missing {
                OnMissing::Skip => return Ok(()),
                OnMissing::Deny => limit = NEVER,
                // What is only watched must not make a request impossible.
                OnMissing::Floor if rule.mode == Mode::Observe => return Ok(()),
                OnMissing::Floor => return Err(self.missing(rule, caller)),
            }
        }
        let cost = counts.of(caller.facts);
        // Whatever fits anything fits one, and nearly all cost no more.
        let hopeless = cost > 1 && cost > limit.capacity() && !matches!(limit, Limit::Never);
        if hopeless && rule.mode == Mode::Enforce && plan.verb != Verb::Record {
            return Err(exceeds(rule, cost, limit, counts));
        }
        let subject = rule.subject.and_then(|subject| positions.get(subject).copied().flatten());
        let charge = Charge { key, limit, counts, cost, rule, index, subject };
        plan.charges.try_push(charge).map_err(|_| PlanError::TooManyRules)
    }

    #[cold]
    fn missing(&self, rule: &Rule, caller: &Caller<'_>) -> PlanError {
        let absent = rule.per.iter().find(|per| caller.part_text(per, rule, self).is_none());
        PlanError::Missing { rule: rule.name.clone(), field: absent.map_or_else(|| "ip".to_owned(), field_of) }
    }

    fn subject<'p>(&'p self, subject: &'p SubjectRule, identities: &mut Identities<'_>) -> Option<Subject<'p>> {
        let ladder = self.ladders.get(subject.ladder)?;
        // A subject has no endpoint, so any rule will do.
        let (identity, keyed) = identities.of(subject.counted, self.rules.first()?)?;
        let key = subject.prefix.over(identity);
        let SubjectRule { layer, disclosure, ladder: ladder_index, .. } = *subject;
        let subject = Subject { key, ladder, ladder_index, layer, disclosure };
        (keyed != Keyed::Missing).then_some(subject)
    }

    /// Everyone whom this caller is punished as.
    pub(crate) fn subjects_of(&self, caller: &Caller<'_>) -> ArrayVec<Subject<'_>, MAX_SUBJECTS> {
        let mut known = Known::nothing();
        let mut identities = Identities::new(&mut known, caller, self);
        let subjects = self.subjects.iter().take(MAX_SUBJECTS);
        subjects.filter_map(|subject| self.subject(subject, &mut identities)).collect()
    }
}

#[cold]
fn exceeds(rule: &Rule, cost: u64, limit: &Limit, counts: &CostOf) -> PlanError {
    let capacity = limit.capacity();
    PlanError::CostExceedsLimit { rule: rule.name.clone(), cost, capacity, cost_of: counts.clone() }
}

/// The key of a rule's budget for a caller, and how much of it the request has.
#[inline]
fn key_of(rule: &Rule, limit: &Limit, identities: &mut Identities<'_>) -> Option<(Digest, Keyed)> {
    let (identity, keyed) = identities.of(rule.counted, rule)?;
    Some((rule.prefix(limit)?.over(identity), keyed))
}

impl<'p> Plan<'p> {
    /// A plan with nothing in it yet.
    pub fn new(policy: &'p Policy, verb: Verb) -> Self {
        Self {
            policy,
            verb,
            listed: None,
            ban: None,
            charges: ArrayVec::new(),
            subjects: ArrayVec::new(),
            trace: TraceId::default(),
            ip: None,
            outcomes_seen: false,
            punishes: true,
        }
    }

    /// Plans a request, in place of whatever was planned here before: a plan is more than a kilobyte, and moving it costs
    /// as much as making it.
    ///
    /// # Errors
    /// As for [`Policy::plan_for`].
    pub fn fill(&mut self, facts: &Facts<'_>) -> Result<(), PlanError> {
        self.fill_expecting(facts, |_| ())
    }

    /// As [`fill`](Self::fill). Before most of the work is done, `expect` hears whose budgets will be needed: of digests
    /// that begin as their keys do (see [`Digest::halves`]).
    ///
    /// # Errors
    /// As for [`Policy::plan_for`].
    pub fn fill_expecting(&mut self, facts: &Facts<'_>, mut expect: impl FnMut(Digest)) -> Result<(), PlanError> {
        let policy = self.policy;
        let mut caller = Caller::named(facts, policy);
        let mut known = Known::nothing();
        known.learn(&caller, policy, &mut expect);
        caller.spell(policy);
        if let Some(error) = caller.path_error() {
            return Err(PlanError::Path(error));
        }
        self.charges.clear();
        self.subjects.clear();
        (self.trace, self.ip) = (facts.trace, facts.ip);
        let (listed, ban) = policy.listing(|| Who { ip: caller.ip(), user: caller.user, tenant: caller.tenant });
        // What has happened is recorded, whoever did it: a record never denies.
        self.ban = ban.filter(|_| self.verb != Verb::Record);
        self.listed = listed.filter(|listed| self.verb != Verb::Record || *listed == Listed::Allow);
        if self.listed.is_some() {
            return Ok(());
        }
        let mut identities = Identities::new(&mut known, &caller, policy);
        let mut positions = [None; MAX_SUBJECTS];
        for (subject, position) in policy.subjects.iter().zip(&mut positions) {
            if let Some(planned) = policy.subject(subject, &mut identities) {
                *position = Some(self.subjects.len());
                let _ = self.subjects.try_push(planned);
            }
        }
        self.meet_rules(&positions, &caller, &mut identities, &mut expect)?;
        if caller.has_other_readings() {
            self.meet_rules_of_other_readings(&positions, &mut caller, &mut known, &mut expect)?;
        }
        Ok(())
    }

    /// Adds the charges of all rules that the present reading of the path meets.
    #[inline(always)]
    fn meet_rules(
        &mut self,
        positions: &[Option<usize>; MAX_SUBJECTS],
        caller: &Caller<'_>,
        identities: &mut Identities<'_>,
        mut expect: impl FnMut(Digest),
    ) -> Result<(), PlanError> {
        let policy = self.policy;
        let mut met: [bool; Layer::COUNT] = [false; Layer::COUNT];
        let mut fallbacks = false;
        for (index, rule) in policy.rules.iter().enumerate() {
            if !rule.common && !rule.matches.holds(caller) {
                continue;
            }
            if rule.fallback {
                fallbacks = true;
                continue;
            }
            if let Some(met) = met.get_mut(rule.layer as usize) {
                *met = true;
            }
            let expected = identities.knows(rule.counted);
            policy.add_charge(self, positions, (index, rule), caller, identities)?;
            if let Some(charge) = self.charges.last()
                && !expected
            {
                expect(charge.key);
            }
        }
        if fallbacks {
            policy.add_fallbacks(self, positions, met, caller, identities)?;
        }
        Ok(())
    }

    /// Adds the charges of all rules that other readings of the path meet, each budget once.
    #[cold]
    fn meet_rules_of_other_readings<'a>(
        &mut self,
        positions: &[Option<usize>; MAX_SUBJECTS],
        caller: &mut Caller<'a>,
        known: &mut Known,
        mut expect: impl FnMut(Digest),
    ) -> Result<(), PlanError>
    where
        'p: 'a,
    {
        let policy = self.policy;
        while caller.read_next(policy) {
            known.forget_what_was_asked(policy);
            let mut other = Plan::new(policy, self.verb);
            let mut identities = Identities::new(known, caller, policy);
            other.meet_rules(positions, caller, &mut identities, &mut expect)?;
            for charge in other.charges {
                if !self.charges.iter().any(|own| (own.index, own.key) == (charge.index, charge.key)) {
                    let full = |_| PlanError::Path(PathError::TooManyReadings);
                    self.charges.try_push(charge).map_err(full)?;
                }
            }
        }
        // Stable: several charges of one rule stay in the order of the readings.
        self.charges.sort_by_key(|charge| charge.index);
        Ok(())
    }

    /// Gives the decision an id, if the facts gave it none.
    #[inline]
    pub fn identify(&mut self, draw: impl FnOnce() -> TraceId) {
        if self.trace == TraceId::default() {
            self.trace = draw();
        }
    }

    /// Whose budget a charge falls to when a store has no room left for keys of its own: everyone of its rule behind the
    /// same /24 or /48, or everyone of its rule where there is no address.
    #[must_use]
    pub fn folded_key(&self, charge: &Charge<'_>) -> Digest {
        let Some(mut key) = charge.rule.prefix(charge.limit).map(KeyPrefix::go_on) else { return charge.key };
        let Some(block) = self.ip.map(AddressGroup::block) else { return self.shared_key(charge) };
        key.address(Part::Folded, block);
        key.finish().in_partition(self.policy.anchors.address(block))
    }

    /// The one budget of everyone of a rule.
    #[must_use]
    pub fn shared_key(&self, charge: &Charge<'_>) -> Digest {
        let Some(mut key) = charge.rule.prefix(charge.limit).map(KeyPrefix::go_on) else { return charge.key };
        key.text(Part::Folded, "");
        key.finish().in_partition(charge.rule.partition)
    }

    /// The ban that holds at `now`, if one does.
    pub(crate) fn banned(&self, now: Timestamp) -> Option<Banned> {
        self.ban.filter(|ban| ban.until > now)
    }

    /// The policy this was planned under.
    #[must_use]
    pub fn policy(&self) -> &'p Policy {
        self.policy
    }

    /// The charges, in the order in which they are met.
    #[must_use]
    pub fn charges(&self) -> &[Charge<'p>] {
        &self.charges
    }

    /// The subjects whose standing counts.
    #[must_use]
    pub fn subjects(&self) -> &[Subject<'p>] {
        &self.subjects
    }

    /// What is done with this plan.
    #[must_use]
    pub fn verb(&self) -> Verb {
        self.verb
    }

    /// The same plan at a door that sees responses: rules that count by outcome are charged now, and the door gives
    /// back those whose outcome did not come.
    pub fn seeing_outcomes(mut self) -> Self {
        self.outcomes_seen = true;
        self
    }

    /// The same plan for a look at its limits that asks for nothing and finds nobody punished.
    pub fn only_limits(mut self) -> Self {
        self.charges.iter_mut().for_each(|charge| charge.cost = 0);
        self.subjects.clear();
        self.ban = None;
        self
    }

    /// The same plan for a request that may go over a limit unpunished: it adds no strike, so no rung lifts its denial
    /// either, and it begins no block. Penalties and blocks in force hold all the same.
    pub fn without_punishment(mut self) -> Self {
        self.punishes = false;
        self
    }

    /// What requests can be in each other's way at: the budgets this one takes from, and the standings it is held to.
    pub fn contested(&self) -> impl Iterator<Item = Digest> {
        let takes = self.charges.iter().filter(|charge| charge.enforced() && charge.cost > 0);
        takes.map(|charge| charge.key).chain(self.subjects.iter().map(|subject| subject.key))
    }

    /// The id of the decision.
    #[must_use]
    pub fn trace(&self) -> TraceId {
        self.trace
    }
}
