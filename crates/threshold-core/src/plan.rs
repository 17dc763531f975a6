//! The charges of one request: which rules it meets, whose budgets they are, and what they cost.

mod subject_keys;

use std::net::IpAddr;

use arrayvec::ArrayVec;

use crate::address::AddressGroup;
use crate::bill::{self, Bill, Terms};
use crate::caller::{Caller, Keyed, field_of};
use crate::command::Command;
use crate::facts::Facts;
use crate::key::{Digest, KeyBuilder, KeyPrefix, Part, TraceId};
use crate::ladder::Ladder;
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

/// What one request asks of a policy: the rules it meets, and the bill that a store settles.
#[derive(Debug, Clone)]
#[must_use = "a plan decides nothing until it is settled"]
pub struct Plan<'p> {
    pub(crate) policy: &'p Policy,
    pub(crate) listed: Option<Listed>,
    /// A ban that holds if it is not over when this is decided.
    pub(crate) ban: Option<Banned>,
    pub(crate) met: ArrayVec<Met<'p>, MAX_CHARGES>,
    pub(crate) subjects: ArrayVec<Subject<'p>, MAX_SUBJECTS>,
    pub(crate) ip: Option<IpAddr>,
    /// How many requests are planned.
    requests: usize,
    pub(crate) bill: Bill<'p>,
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

/// A rule that the request meets, and what it asks for. Each has its reading in the decision.
#[derive(Debug, Clone, Copy)]
pub struct Met<'p> {
    pub(crate) key: Digest,
    pub(crate) limit: &'p Limit,
    pub(crate) counts: &'p CostOf,
    pub(crate) cost: u64,
    pub(crate) rule: &'p Rule,
    /// The rule's place in the policy.
    pub(crate) index: usize,
    /// The subject in the plan that a violation strikes.
    pub(crate) subject: Option<usize>,
    /// Which of the plan's requests met it.
    pub(crate) request: usize,
    /// The charge on the bill that it is part of. Several requests of one plan may share a charge.
    pub(crate) charge: usize,
}

impl<'p> Met<'p> {
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

    /// How much of the charge is asked for by this rule and request.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Which rule.
    #[must_use]
    pub fn rule(&self) -> &Rule {
        self.rule
    }

    /// Which of the requests that were [added](Plan::add) to the plan met it; the first is 0.
    #[must_use]
    pub fn request(&self) -> usize {
        self.request
    }

    pub(crate) fn enforced(&self) -> bool {
        self.rule.mode == Mode::Enforce
    }

    fn to_charge(self) -> bill::Charge<'p> {
        let Self { key, limit, cost, rule, subject, .. } = self;
        bill::Charge { key, limit, cost, terms: rule.terms(), subject }
    }
}

impl Rule {
    /// What a charge says of this rule.
    fn terms(&self) -> Terms {
        Terms {
            tag: self.tag,
            strike: self.strike,
            block_for: self.block_for,
            enforced: self.mode == Mode::Enforce,
            by_outcome: self.count.is_some(),
        }
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

/// The reasons why a request cannot be planned. A retry does not help with any of them.
///
/// This enum is exhaustive on purpose: each door answers each variant with a status of its own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The cost exceeds the capacity of the limit.
    #[error("a cost of {cost} never fits rule \"{rule}\", which holds {capacity}")]
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
    /// A rule needs an identity, and the request has neither it nor an address.
    #[error("rule \"{rule}\" needs {field}, or an ip to stand in for it")]
    Missing {
        /// The rule.
        rule: Box<str>,
        /// The field that is missing.
        field: String,
    },
    /// The request matches more rules than a plan holds.
    #[error("the request meets more than {MAX_CHARGES} rules")]
    TooManyRules,
    /// The path cannot be matched.
    #[error(transparent)]
    Path(PathError),
}

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
        plan.met.sort_unstable_by_key(|met| (met.request, met.index));
        plan.bill_again();
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
        const NEVER: &Limit = &Limit::never();
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
        let hopeless = cost > 1 && cost > limit.capacity() && !limit.is_never();
        if hopeless && rule.mode == Mode::Enforce && plan.bill.verb != Verb::Record {
            return Err(exceeds(rule, cost, limit, counts));
        }
        let subject = rule.subject.and_then(|subject| positions.get(subject).copied().flatten());
        let (request, charge) = (plan.requests, plan.bill.charges.len());
        let met = Met { key, limit, counts, cost, rule, index, subject, request, charge };
        plan.bill.charges.try_push(met.to_charge()).map_err(|_| PlanError::TooManyRules)?;
        plan.met.try_push(met).map_err(|_| PlanError::TooManyRules)
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

/// When a ban ends; in the past where there is none.
fn banned_until(ban: &Option<Banned>) -> Timestamp {
    ban.map_or(Timestamp::EPOCH, |ban| ban.until)
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
            listed: None,
            ban: None,
            met: ArrayVec::new(),
            subjects: ArrayVec::new(),
            ip: None,
            requests: 0,
            bill: Bill::new(verb),
        }
    }

    /// A plan that charges nothing and asks only how it stands with these subjects.
    pub(crate) fn of_subjects(
        policy: &'p Policy,
        verb: Verb,
        trace: TraceId,
        (listed, ban): (Option<Listed>, Option<Banned>),
        subjects: ArrayVec<Subject<'p>, MAX_SUBJECTS>,
    ) -> Self {
        let mut plan = Self { listed, ban, ..Self::new(policy, verb) };
        plan.bill.trace = trace;
        plan.bill.banned_until = banned_until(&ban);
        for subject in subjects {
            // There is room for as many as there can be.
            let _ = plan.place_subject(subject);
        }
        plan
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
        self.met.clear();
        self.subjects.clear();
        self.bill.charges.clear();
        self.bill.subjects.clear();
        self.requests = 0;
        self.plan_request(facts, &mut expect)
    }

    /// Plans one more request beside those that are planned: all of them are allowed and charged, or none. What they ask of
    /// one budget is added up. A list that denies one denies all; one that a list allows is charged nothing.
    ///
    /// # Errors
    /// As for [`Policy::plan_for`], for what all of them ask together. The plan is then good for nothing.
    pub fn add(&mut self, facts: &Facts<'_>) -> Result<(), PlanError> {
        if self.requests == 0 {
            return self.fill(facts);
        }
        let (listed, ban) = (self.listed, self.ban);
        self.plan_request(facts, |_| ())?;
        self.listed = match (listed, self.listed) {
            (Some(Listed::Deny), _) | (_, Some(Listed::Deny)) => Some(Listed::Deny),
            (Some(Listed::Allow), Some(Listed::Allow)) => Some(Listed::Allow),
            _ => None,
        };
        self.ban = if banned_until(&ban) >= banned_until(&self.ban) { ban } else { self.ban };
        self.bill.banned_until = banned_until(&self.ban);
        self.bill_added_up()
    }

    /// Adds the subjects and the rules of one request to those that are planned.
    #[inline(always)]
    fn plan_request(&mut self, facts: &Facts<'_>, mut expect: impl FnMut(Digest)) -> Result<(), PlanError> {
        let policy = self.policy;
        let mut caller = Caller::named(facts, policy);
        let mut known = Known::nothing();
        known.learn(&caller, policy, &mut expect);
        caller.spell(policy);
        if let Some(error) = caller.path_error() {
            return Err(PlanError::Path(error));
        }
        if self.requests == 0 {
            (self.bill.trace, self.ip) = (facts.trace, facts.ip);
        }
        let verb = self.bill.verb;
        let (listed, ban) = policy.listing(|| Who { ip: caller.ip(), user: caller.user_name(), tenant: caller.tenant });
        // What has happened is recorded, also of a client that is banned: a record never denies.
        self.ban = ban.filter(|_| verb != Verb::Record);
        self.bill.banned_until = banned_until(&self.ban);
        self.listed = listed.filter(|listed| verb != Verb::Record || *listed == Listed::Allow);
        if self.listed.is_none() {
            let mut identities = Identities::new(&mut known, &caller, policy);
            let mut positions = [None; MAX_SUBJECTS];
            for (subject, position) in policy.subjects.iter().zip(&mut positions) {
                if let Some(planned) = policy.subject(subject, &mut identities) {
                    *position = Some(self.place_subject(planned)?);
                }
            }
            self.meet_rules(&positions, &caller, &mut identities, &mut expect)?;
            if caller.has_other_readings() {
                self.meet_rules_of_other_readings(&positions, &mut caller, &mut known, &mut expect)?;
            }
        }
        self.requests = self.requests.saturating_add(1);
        Ok(())
    }

    /// The place of a subject in the plan, which holds each once.
    fn place_subject(&mut self, planned: Subject<'p>) -> Result<usize, PlanError> {
        if self.requests > 0
            && let Some(known) = self.subjects.iter().position(|own| own.key == planned.key)
        {
            return Ok(known);
        }
        let place = self.subjects.len();
        let Subject { key, ladder, .. } = planned;
        self.bill.subjects.try_push(bill::Subject { key, ladder }).map_err(|_| PlanError::TooManyRules)?;
        self.subjects.try_push(planned).map_err(|_| PlanError::TooManyRules)?;
        Ok(place)
    }

    /// Makes the charges of one request in the order in which its rules are.
    fn bill_again(&mut self) {
        self.bill.charges.clear();
        for (place, met) in self.met.iter_mut().enumerate() {
            met.charge = place;
            let _ = self.bill.charges.try_push(met.to_charge());
        }
    }

    /// Makes the charges of several requests: one for each key.
    fn bill_added_up(&mut self) -> Result<(), PlanError> {
        let charges = &mut self.bill.charges;
        charges.clear();
        for met in &mut self.met {
            met.charge = charges.iter().position(|charge| charge.key == met.key).unwrap_or(charges.len());
            let Some(known) = charges.get_mut(met.charge) else {
                charges.push(met.to_charge());
                continue;
            };
            known.cost = known.cost.saturating_add(met.cost);
            // Requests of two tiers may have two limits on one key: the smaller one holds for both.
            if met.limit.capacity() < known.limit.capacity() {
                known.limit = met.limit;
            }
            let fits_never = known.cost > known.limit.capacity() && !known.limit.is_never();
            if fits_never && met.enforced() && self.bill.verb != Verb::Record {
                return Err(exceeds(met.rule, known.cost, known.limit, met.counts));
            }
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
            if let Some(met) = self.met.last()
                && !expected
            {
                expect(met.key);
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
            known.forget_path_dependent(policy);
            let mut other = Plan::new(policy, self.bill.verb);
            other.requests = self.requests;
            let mut identities = Identities::new(known, caller, policy);
            other.meet_rules(positions, caller, &mut identities, &mut expect)?;
            for met in other.met {
                let same = |own: &Met<'_>| (own.request, own.index, own.key) == (met.request, met.index, met.key);
                if !self.met.iter().any(same) {
                    let full = |_| PlanError::Path(PathError::TooManyReadings);
                    self.met.try_push(met).map_err(full)?;
                }
            }
        }
        // Stable: several charges of one rule stay in the order of the readings.
        self.met.sort_by_key(|met| (met.request, met.index));
        self.bill_again();
        Ok(())
    }

    /// Gives the decision an id, if the facts gave it none.
    #[inline]
    pub fn identify(&mut self, draw: impl FnOnce() -> TraceId) {
        if self.bill.trace == TraceId::default() {
            self.bill.trace = draw();
        }
    }

    /// Whose budget the `index`th charge falls to when a store has no room left for keys of its own: everyone of its rule
    /// behind the same /24 or /48, or everyone of its rule where there is no address.
    #[must_use]
    pub fn folded_key(&self, index: usize) -> Option<Digest> {
        let Some(block) = self.ip.map(AddressGroup::block) else { return self.shared_key(index) };
        let mut key = self.stand_in(index)?;
        key.address(Part::Folded, block);
        Some(key.finish().in_partition(self.policy.anchors.address(block)))
    }

    /// The one budget of everyone of the rule of the `index`th charge.
    #[must_use]
    pub fn shared_key(&self, index: usize) -> Option<Digest> {
        let mut key = self.stand_in(index)?;
        key.text(Part::Folded, "");
        Some(key.finish().in_partition(self.rule_of(index)?.partition))
    }

    /// Begins a key that stands in for that of the `index`th charge.
    fn stand_in(&self, index: usize) -> Option<KeyBuilder> {
        let charge = self.bill.charges.get(index)?;
        self.rule_of(index)?.prefix(charge.limit).map(KeyPrefix::go_on)
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

    /// What a store settles.
    #[must_use]
    pub fn bill(&self) -> &Bill<'p> {
        &self.bill
    }

    /// The command that settles this plan in another process.
    #[must_use]
    pub fn to_command(&self) -> Command {
        Command::Settle(Box::new(self.bill.to_owned()))
    }

    /// The charges that a store settles, each key once.
    #[must_use]
    pub fn charges(&self) -> &[bill::Charge<'p>] {
        &self.bill.charges
    }

    /// The rules that were met, in the order of their readings.
    #[must_use]
    pub fn met(&self) -> &[Met<'p>] {
        &self.met
    }

    /// The first rule that asked for the `charge`th charge.
    #[must_use]
    pub fn rule_of(&self, charge: usize) -> Option<&'p Rule> {
        self.met.iter().find(|met| met.charge == charge).map(|met| met.rule)
    }

    /// The subjects whose standing counts.
    #[must_use]
    pub fn subjects(&self) -> &[Subject<'p>] {
        &self.subjects
    }

    /// What is done with this plan.
    #[must_use]
    pub fn verb(&self) -> Verb {
        self.bill.verb
    }

    /// The same plan at a door that sees responses: rules that count by outcome are charged now, and the door gives
    /// back those whose outcome did not come.
    pub fn seeing_outcomes(mut self) -> Self {
        self.bill.outcomes_seen = true;
        self
    }

    /// The same plan for a look at its limits that asks for nothing and finds nobody punished.
    pub fn only_limits(mut self) -> Self {
        self.met.iter_mut().for_each(|met| met.cost = 0);
        self.subjects.clear();
        self.ban = None;
        self.bill.charges.iter_mut().for_each(|charge| charge.cost = 0);
        self.bill.subjects.clear();
        self.bill.banned_until = Timestamp::EPOCH;
        self
    }

    /// The same plan for a request that may go over a limit unpunished: it adds no strike, so no rung lifts its denial
    /// either, and it begins no block. Penalties and blocks in force hold all the same.
    pub fn without_punishment(mut self) -> Self {
        self.bill.punishes = false;
        self
    }

    /// What requests can be in each other's way at: the budgets this one takes from, and the standings it is held to.
    pub fn contested(&self) -> impl Iterator<Item = Digest> {
        let takes = self.bill.charges.iter().filter(|charge| charge.enforced() && charge.cost > 0);
        takes.map(|charge| charge.key).chain(self.subjects.iter().map(|subject| subject.key))
    }

    /// The id of the decision.
    #[must_use]
    pub fn trace(&self) -> TraceId {
        self.bill.trace
    }
}
