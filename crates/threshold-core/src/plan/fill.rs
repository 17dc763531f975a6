//! Filling a plan: which rules a request meets, whose budgets they charge, and how much.

use arrayvec::ArrayVec;

use super::error::exceeds;
use super::{MAX_SUBJECTS, Met, Plan, PlanError, Subject, Verb, banned_until};
use crate::bill;
use crate::caller::{Caller, Keyed, field_of};
use crate::facts::Facts;
use crate::key::{Digest, TraceId};
use crate::limit::Limit;
use crate::path::PathError;
use crate::policy::{
    Identities, Known, Layer, Listed, Measure, Measured, Mode, NoLimit, OnMissing, Per, Policy, Rule, SubjectRule,
    TierSource, Who,
};

impl Policy {
    /// Plans a `check`.
    ///
    /// # Errors
    /// Fails where the request cannot be decided as it stands; see [`PlanError`].
    pub fn plan(&self, facts: &Facts<'_>) -> Result<Plan<'_>, PlanError> {
        self.plan_for(Verb::Check, facts)
    }

    /// Plans any verb.
    ///
    /// # Errors
    /// Fails as [`plan`](Self::plan) does. A `record` takes any cost: what does not fit saturates.
    pub fn plan_for(&self, verb: Verb, facts: &Facts<'_>) -> Result<Plan<'_>, PlanError> {
        let mut plan = Plan::new(self, verb);
        plan.fill(facts)?;
        Ok(plan)
    }

    /// Adds the fallback rules of layers in which no other rule was met, and restores the order of all charges.
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
            // `met` is not updated in this loop: two fallbacks of one layer both apply.
            let alone = met.get(rule.layer as usize) == Some(&false);
            if alone && rule.matches.holds(caller) {
                self.add_charge(plan, positions, (index, rule), caller, identities)?;
            }
        }
        // The order of readings is the order of rules, and ties between equally tight limits go to the first. A
        // fallback that was added last must not change either.
        plan.met.sort_unstable_by_key(|met| (met.request, met.index));
        plan.rebuild_charges();
        Ok(())
    }

    pub(crate) fn layer_is_met(&self, layer: Layer, caller: &Caller<'_>) -> bool {
        self.rules.iter().any(|rule| rule.layer == layer && !rule.fallback && rule.matches.holds(caller))
    }

    /// Returns the limit of a rule for this caller.
    #[inline]
    fn measured<'p>(&'p self, rule: &'p Rule, caller: &Caller<'_>) -> Result<&'p Measured, NoLimit> {
        match &rule.measure {
            // The usual case without a call: nobody's limits are multiplied, so a fixed limit is the same for everyone.
            Measure::Fixed(measured) if !self.tiers.any_scaled => Ok(measured),
            _ => self.limit_of(rule, caller).map(|(measured, _)| measured),
        }
    }

    /// Returns the limit of a rule for this caller, and where a limit by tier was found.
    #[inline(never)]
    pub(crate) fn limit_of<'p>(
        &'p self,
        rule: &'p Rule,
        caller: &Caller<'_>,
    ) -> Result<(&'p Measured, Option<TierSource<'p>>), NoLimit> {
        match &rule.measure {
            Measure::Fixed(measured) => {
                let scaled = self.tiers.scaled(&rule.per, caller).and_then(|scaled| scaled.rules.get(&rule.name));
                Ok((scaled.unwrap_or(measured), None))
            }
            Measure::Unlimited => Err(NoLimit::Unlimited),
            Measure::Tier(shape) | Measure::NamedByTier(shape) => {
                let (measured, source) = self.tiers.limit(*shape, &rule.per, caller)?;
                Ok((measured, Some(source)))
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
        let (measured, no_tier) = match self.measured(rule, caller) {
            Ok(measured) => (measured, false),
            Err(NoLimit::NoTier) if rule.on_missing != OnMissing::Skip => (Measured::NEVER, true),
            Err(NoLimit::Unlimited | NoLimit::NoTier) => return Ok(()),
        };
        let Measured { limit: whole, cost: counts, shards } = measured;
        let mut limit = measured.charged();
        // The key of the rule's own limit, also where `NEVER` replaces it below: `NEVER` admits nothing, so nothing is
        // counted under that key.
        let Some((key, keyed)) = key_of(rule, limit, identities) else { return Ok(()) };
        if keyed == Keyed::Missing {
            match rule.on_missing {
                OnMissing::Deny => limit = &Measured::NEVER.limit,
                // An observed rule must never fail a request.
                _ if rule.mode == Mode::Observe => return Ok(()),
                _ if plan.skips_missing && names_empty(rule, caller.facts) => return Err(self.missing(rule, caller)),
                // Checked before the cost, so that a rule that does not apply cannot refuse a request for its size.
                OnMissing::Skip => return Ok(()),
                OnMissing::Floor if plan.skips_missing => return Ok(()),
                OnMissing::Floor => return Err(self.missing(rule, caller)),
            }
        }
        let cost = counts.of(caller.facts);
        // Nearly every cost is 1, and every limit but `Never` can hold that: most requests skip the comparison.
        let hopeless = cost > 1 && cost > limit.capacity() && !limit.is_never();
        // An error and not a denial: a client that is denied would retry for ever. A limit of 0 denies on purpose, so
        // it stays a denial.
        if hopeless && rule.mode == Mode::Enforce && plan.bill.verb != Verb::Record {
            return Err(exceeds(rule, cost, limit, counts));
        }
        let lacks = no_tier || keyed == Keyed::Missing;
        // Without an identity there is no one to strike, and without a tier no limit that was exceeded.
        let subject = rule.subject.filter(|_| !lacks).and_then(|subject| positions.get(subject).copied().flatten());
        let (request, charge) = (plan.requests, plan.bill.charges.len());
        let (shards, shard) = (shards.as_ref().map_or(1, |shards| shards.number), 0);
        let mut met =
            Met { key, limit, whole, counts, cost, rule, index, subject, request, charge, shards, shard, lacks };
        // Without an id yet: `identify` draws one, and then the shard is chosen.
        if shards > 1 && plan.bill.trace != TraceId::default() {
            met.choose_shard(plan.bill.trace);
        }
        // A rule that finds no place must fail the request. If it were left out, a caller could avoid a limit by
        // meeting many others.
        plan.bill.charges.try_push(met.to_charge()).map_err(|_| PlanError::TooManyRules)?;
        plan.met.try_push(met).map_err(|_| PlanError::TooManyRules)
    }

    #[cold]
    fn missing(&self, rule: &Rule, caller: &Caller<'_>) -> PlanError {
        let absent = rule.per.iter().find(|per| caller.part_text(per, rule, self).is_none());
        PlanError::Missing { rule: rule.name.clone(), field: absent.map_or_else(|| "ip".to_owned(), field_of) }
    }

    /// Returns the subject of this caller under a rule's ladder; `None` where the caller lacks the identity.
    pub(crate) fn subject<'p>(
        &'p self,
        subject: &'p SubjectRule,
        identities: &mut Identities<'_>,
    ) -> Option<Subject<'p>> {
        let ladder = self.ladders.get(subject.ladder)?;
        // The rule matters only for an endpoint, and no subject is counted by endpoint.
        let (identity, keyed) = identities.of(subject.counted, self.rules.first()?)?;
        let key = subject.prefix.over(identity);
        let SubjectRule { layer, disclosure, ladder: ladder_index, .. } = *subject;
        let subject = Subject { key, ladder, ladder_index, layer, disclosure };
        (keyed != Keyed::Missing).then_some(subject)
    }

    /// Returns every subject that this caller is punished as.
    pub(crate) fn subjects_of(&self, caller: &Caller<'_>) -> ArrayVec<Subject<'_>, MAX_SUBJECTS> {
        let mut known = Known::nothing();
        let mut identities = Identities::new(&mut known, caller, self);
        // A policy is checked to have no more, but collecting into a full array would panic.
        let subjects = self.subjects.iter().take(MAX_SUBJECTS);
        subjects.filter_map(|subject| self.subject(subject, &mut identities)).collect()
    }
}

/// Whether a request names a part of a rule's identity and leaves it empty, as a client can do to avoid the rule.
#[cold]
fn names_empty(rule: &Rule, facts: &Facts<'_>) -> bool {
    let is_empty = |value: Option<&str>| value.is_some_and(str::is_empty);
    rule.per.iter().any(|per| match per {
        Per::Tenant => is_empty(facts.tenant),
        Per::User => is_empty(facts.user),
        Per::Tier => is_empty(facts.tier),
        Per::Category => is_empty(facts.category),
        Per::Endpoint => is_empty(facts.endpoint),
        Per::Method => is_empty(facts.method),
        Per::Host => is_empty(facts.host),
        Per::Fact(name) => facts.facts.iter().any(|(own, value)| **name == **own && value.is_empty()),
        Per::Ip | Per::IpPrefix(_) | Per::Header(_) => false,
    })
}

/// Returns the key of a rule's budget for a caller, and how much of the rule's identity the request has.
#[inline]
fn key_of(rule: &Rule, limit: &Limit, identities: &mut Identities<'_>) -> Option<(Digest, Keyed)> {
    let (identity, keyed) = identities.of(rule.counted, rule)?;
    Some((rule.prefix(limit)?.over(identity), keyed))
}

impl<'p> Plan<'p> {
    /// Plans a request in place of the one planned before. A plan is more than a kilobyte, and moving it costs as much as
    /// making it.
    ///
    /// # Errors
    /// Fails as [`Policy::plan_for`] does.
    pub fn fill(&mut self, facts: &Facts<'_>) -> Result<(), PlanError> {
        self.fill_with_prefetch(facts, |_| ())
    }

    /// Plans a request as [`fill`](Self::fill) does, and calls `prefetch` early, while most of the work is still to be done,
    /// with a digest for each identity. It begins as the keys of that identity do (see [`Digest::halves`]), which is enough
    /// to find their place in memory.
    ///
    /// # Errors
    /// Fails as [`Policy::plan_for`] does.
    pub fn fill_with_prefetch(&mut self, facts: &Facts<'_>, mut prefetch: impl FnMut(Digest)) -> Result<(), PlanError> {
        // `listed`, `ban`, `ip` and the trace are not cleared, because planning the first request sets each of them.
        self.met.clear();
        self.subjects.clear();
        self.bill.charges.clear();
        self.bill.subjects.clear();
        self.requests = 0;
        self.plan_request(facts, &mut prefetch)
    }

    /// Adds a request to the plan. All requests of a plan are allowed and charged together, or none is. Their costs on one
    /// budget are added up. A deny list entry for one denies all; an allow-listed request is charged nothing.
    ///
    /// # Errors
    /// Fails as [`Policy::plan_for`] does, for the costs of all requests together. The plan must not be used after that.
    pub fn add(&mut self, facts: &Facts<'_>) -> Result<(), PlanError> {
        // The plan of several requests is made in two steps: each request as if it were alone, then one charge for each
        // key.
        if self.requests == 0 {
            return self.fill(facts);
        }
        let (listed, ban) = (self.listed, self.ban);
        self.plan_request(facts, |_| ())?;
        self.listed = match (listed, self.listed) {
            // One allow-listed request does not exempt the others. Their limits apply unless all of them are listed.
            (Some(Listed::Deny), _) | (_, Some(Listed::Deny)) => Some(Listed::Deny),
            (Some(Listed::Allow), Some(Listed::Allow)) => Some(Listed::Allow),
            _ => None,
        };
        if self.listed == Some(Listed::Deny) {
            // As for one request: what a list denies is not charged, and neither are the requests beside it.
            self.met.clear();
            self.subjects.clear();
            self.bill.subjects.clear();
        }
        // All requests wait for the ban that ends last.
        self.ban = if banned_until(&ban) >= banned_until(&self.ban) { ban } else { self.ban };
        self.bill.banned_until = banned_until(&self.ban);
        self.merge_charges()
    }

    /// Adds the subjects and the rules of one request.
    #[inline(always)]
    fn plan_request(&mut self, facts: &Facts<'_>, mut prefetch: impl FnMut(Digest)) -> Result<(), PlanError> {
        let policy = self.policy;
        let mut caller = Caller::named(facts, policy);
        let mut known = Known::nothing();
        // Identities are digested first, so that their memory arrives while the path is normalized and rules are matched.
        known.learn(&caller, policy, &mut prefetch);
        caller.spell(policy);
        // Before the lists, so that such a path is refused for every caller alike.
        if let Some(error) = caller.path_error() {
            return Err(PlanError::Path(error));
        }
        if self.requests == 0 {
            // One decision has one id, and stand-in keys are derived from one address: those of the first request.
            (self.bill.trace, self.ip) = (facts.trace, facts.ip);
        }
        let verb = self.bill.verb;
        let (listed, ban) = policy.listing(|| Who { ip: caller.ip(), user: caller.user_name(), tenant: caller.tenant });
        // A record charges what has already happened, so it never denies: bans and deny lists do not apply.
        self.ban = ban.filter(|_| verb != Verb::Record);
        self.bill.banned_until = banned_until(&self.ban);
        // An allow list still holds for a record: its callers are never charged.
        self.listed = listed.filter(|listed| verb != Verb::Record || *listed == Listed::Allow);
        if self.listed.is_none() {
            let mut identities = Identities::new(&mut known, &caller, policy);
            let mut positions = [None; MAX_SUBJECTS];
            // Every subject of the policy, also those whose rules are not met: a penalty holds for all requests of its
            // subject.
            for (subject, position) in policy.subjects.iter().zip(&mut positions) {
                if let Some(planned) = policy.subject(subject, &mut identities) {
                    *position = Some(self.place_subject(planned)?);
                }
            }
            // Subjects come first, because a charge refers to its subject by the position in this plan.
            self.meet_rules(&positions, &caller, &mut identities, &mut prefetch)?;
            if caller.has_other_readings() {
                self.meet_rules_of_other_readings(&positions, &mut caller, &mut known, &mut prefetch)?;
            }
        }
        self.requests = self.requests.saturating_add(1);
        Ok(())
    }

    /// Returns the index of a subject in the plan, which holds each once, and adds it where it is new.
    pub(super) fn place_subject(&mut self, planned: Subject<'p>) -> Result<usize, PlanError> {
        // Within one request a policy's subjects are distinct. Only a further request can repeat one.
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

    /// Makes the charges of one request again, in the order of its rules.
    fn rebuild_charges(&mut self) {
        self.bill.charges.clear();
        for (place, met) in self.met.iter_mut().enumerate() {
            // Within one request each rule and budget is met once, so a charge has the index of its rule.
            met.charge = place;
            let _ = self.bill.charges.try_push(met.to_charge());
        }
    }

    /// Makes the charges of several requests again, one for each key: settling needs distinct keys, since two charges on one
    /// balance would both be looked at before either is made.
    pub(super) fn merge_charges(&mut self) -> Result<(), PlanError> {
        let charges = &mut self.bill.charges;
        // Merged from the rules met and not from the charges before: those have costs that are added up already.
        charges.clear();
        for met in &mut self.met {
            met.charge = charges.iter().position(|charge| charge.key == met.key).unwrap_or(charges.len());
            let Some(known) = charges.get_mut(met.charge) else {
                charges.push(met.to_charge());
                continue;
            };
            known.cost = known.cost.saturating_add(met.cost);
            // Requests of two tiers can meet one key under two limits. The smaller one holds for both, so that neither
            // request can borrow the other's tier.
            if met.limit.capacity() < known.limit.capacity() {
                known.limit = met.limit;
            }
            // Each request was checked alone. Only the sum can show that they never fit together.
            let fits_never = known.cost > known.limit.capacity() && !known.limit.is_never();
            if fits_never && met.enforced() && self.bill.verb != Verb::Record {
                return Err(exceeds(met.rule, known.cost, known.limit, met.counts));
            }
        }
        Ok(())
    }

    /// Adds the charges of all rules that the current reading of the path meets.
    #[inline(always)]
    fn meet_rules(
        &mut self,
        positions: &[Option<usize>; MAX_SUBJECTS],
        caller: &Caller<'_>,
        identities: &mut Identities<'_>,
        mut prefetch: impl FnMut(Digest),
    ) -> Result<(), PlanError> {
        let policy = self.policy;
        let mut met: [bool; Layer::COUNT] = [false; Layer::COUNT];
        let mut fallbacks = false;
        for (index, rule) in policy.rules.iter().enumerate() {
            // `common` is computed once for each policy, so that rules that match every request cost no call here.
            if !rule.common && !rule.matches.holds(caller) {
                continue;
            }
            // Whether a fallback applies is known only after every other rule was tried.
            if rule.fallback {
                fallbacks = true;
                continue;
            }
            // Set before the charge is made. A rule that is unlimited for this caller, or skips it, still keeps the
            // fallbacks of its layer away.
            if let Some(met) = met.get_mut(rule.layer as usize) {
                *met = true;
            }
            // Asked before the charge is added, which digests the identity and makes it known.
            let prefetched = identities.knows(rule.counted);
            policy.add_charge(self, positions, (index, rule), caller, identities)?;
            if let Some(met) = self.met.last()
                && !prefetched
            {
                prefetch(met.key);
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
        mut prefetch: impl FnMut(Digest),
    ) -> Result<(), PlanError>
    where
        'p: 'a,
    {
        let policy = self.policy;
        // A server behind this one may read the path in any of these ways. Charging only the normalized path would let
        // a client choose a spelling that its limits do not see.
        while caller.read_next(policy) {
            // The digests of an endpoint and a category belong to the reading before.
            known.forget_path_dependent(policy);
            // A plan of its own, because which fallbacks apply is decided for each reading by itself.
            let mut other = Plan::new(policy, self.bill.verb);
            other.skips_missing = self.skips_missing;
            // The rules met must carry the index of this request, or they would be compared with those of another one.
            other.requests = self.requests;
            let mut identities = Identities::new(known, caller, policy);
            other.meet_rules(positions, caller, &mut identities, &mut prefetch)?;
            for met in other.met {
                // Two readings can meet one rule on two budgets, where it counts by something in the path. A budget that both
                // meet is charged once: it is still one request.
                let same = |own: &Met<'_>| (own.request, own.index, own.key) == (met.request, met.index, met.key);
                if !self.met.iter().any(same) {
                    let full = |_| PlanError::Path(PathError::TooManyReadings);
                    self.met.try_push(met).map_err(full)?;
                }
            }
        }
        // A stable sort: several charges of one rule stay in the order of the readings.
        self.met.sort_by_key(|met| (met.request, met.index));
        self.rebuild_charges();
        Ok(())
    }
}
