//! Decides recorded requests under one policy, on a store of its own and at the times of the log.

use threshold_core::decision::{Degraded, Reading};
use threshold_core::limit::Limit;
use threshold_core::plan::Verb;
use threshold_core::policy::{IdentitySource, Layer, Per, Policy, Seen};
use threshold_core::{Decision, Digest, Facts, Outcome, Plan, PlanError, Timestamp, TraceId, Verdict};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{Command, Store as _, at_once};

use super::tally::{Settled, Tally};
use super::top_subjects::Kind;
use super::zone::Zone;
use crate::traffic::Request;

/// A policy with a store, to which recorded requests are played.
pub(super) struct Rehearsal<'p> {
    policy: &'p Policy,
    store: MemoryStore,
    /// The plans of the present and of the next request: while the first is settled, the store's memory for the second is
    /// prefetched.
    plan: Box<Plan<'p>>,
    coming: Box<Plan<'p>>,
    /// The result of planning the next request, if it is planned.
    planned: Option<Result<(), PlanError>>,
    outcome: Outcome,
    decision: Decision,
    number: u128,
    /// Whether some rule counts by outcome or is a concurrency limit, so that charges may have to be given back.
    gives_back: bool,
    /// The keys of the present request whose charges were given back.
    returned: Vec<Digest>,
    names: Names<'p>,
    pub(super) tally: Tally,
}

/// The decision on one request, as it is counted.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReplayedDecision {
    pub(super) verdict: Verdict,
    /// The index of the rule that bound; the number of rules for a penalty or a list.
    pub(super) reason: usize,
    /// The kind of the affected subject.
    pub(super) kind: Kind,
}

impl<'p> Rehearsal<'p> {
    pub(super) fn new(policy: &'p Policy, top: usize, zone: Zone) -> Self {
        let open = |rule: &threshold_core::policy::Rule| {
            // A limit by tier is known only for a request, and may be a concurrency limit for some of them.
            rule.count.is_some() || rule.is_by_tier() || rule.fixed_limit().is_some_and(Limit::is_concurrency)
        };
        Self {
            policy,
            store: MemoryStore::new(policy.memory()),
            plan: Box::new(Plan::new(policy, Verb::Check).seeing_outcomes()),
            coming: Box::new(Plan::new(policy, Verb::Check).seeing_outcomes()),
            planned: None,
            outcome: Outcome::default(),
            decision: Decision::default(),
            number: 0,
            gives_back: policy.rules().iter().any(open),
            returned: Vec::new(),
            names: Names::new(policy),
            tally: Tally::new(policy, top, zone),
        }
    }

    /// Decides one request at its time, and counts the decision. `coming` is the next one, if it is known.
    pub(super) fn decide(&mut self, request: &Request<'_>, coming: Option<&Request<'_>>) -> ReplayedDecision {
        self.number = self.number.saturating_add(1);
        let found = self.names.find(request);
        let facts = facts(request, &found, self.number);
        let fits = match self.planned.take() {
            Some(fits) => {
                // The plan that was filled ahead becomes the present one, and its memory serves the request after the
                // next.
                std::mem::swap(&mut self.plan, &mut self.coming);
                fits
            }
            None => self.plan.fill(&facts),
        };
        // Before the present request is settled, so that the processor fetches the next one's memory meanwhile.
        if let Some(coming) = coming {
            self.plan_ahead(coming);
        }
        let now = Timestamp::from_micros(request.at.micros);
        self.returned.clear();
        if let Err(error) = fits {
            let decided = self.refused(&error);
            self.tally.add(&self.plan, None, decided, &facts, request.at);
            return decided;
        }
        match at_once(self.store.settle(&self.plan, now, &mut self.outcome)) {
            Ok(()) => {
                self.decision = self.plan.decide(&self.outcome);
                if self.gives_back && self.decision.allowed() {
                    self.give_back(request.status, now);
                }
            }
            // As a server with this policy decides when its memory is full.
            Err(_) => self.decision = self.plan.decide_blind(false, Degraded::StoreFull, now),
        }
        let decided = self.outcome_of(&facts);
        let settled = Settled { decision: &self.decision, returned: &self.returned };
        self.tally.add(&self.plan, Some(settled), decided, &facts, request.at);
        decided
    }

    fn plan_ahead(&mut self, coming: &Request<'_>) {
        let found = self.names.find(coming);
        let fits = self.coming.fill(&facts(coming, &found, self.number.saturating_add(1)));
        for charge in self.coming.charges() {
            self.store.prefetch(charge.key());
        }
        self.planned = Some(fits);
    }

    /// Gives back charges that are not counted for this status, and all concurrency: the log has the status of the answer, but
    /// not how long the request lasted.
    fn give_back(&mut self, status: Option<u16>, now: Timestamp) {
        let mut pending = self.plan.pending(&self.outcome);
        // Without a status in the log, every charge stays: the replay then shows the strictest outcome.
        let uncounted = status.and_then(|status| pending.take_uncounted(Some(status)));
        for taken in [uncounted, pending.take_holds()].into_iter().flatten() {
            self.returned.extend(taken.keys());
            // The store in memory cannot fail here.
            let _ = at_once(self.store.execute(Command::GiveBack { receipt: Box::new(taken), credit: None }, now));
        }
    }

    /// A request that cannot be planned counts as denied: client doors refuse it.
    fn refused(&self, error: &PlanError) -> ReplayedDecision {
        let rules = self.policy.rules();
        let reason = match error {
            PlanError::CostExceedsLimit { rule, .. } | PlanError::Missing { rule, .. } => {
                rules.iter().position(|own| own.name == *rule)
            }
            PlanError::TooManyRules | PlanError::Path(_) => None,
        };
        ReplayedDecision { verdict: Verdict::Deny, reason: reason.unwrap_or(rules.len()), kind: Kind::Ip }
    }

    fn outcome_of(&self, facts: &Facts<'_>) -> ReplayedDecision {
        let decision = &self.decision;
        let verdict = decision.verdict;
        let no_rule = self.policy.rules().len();
        if verdict == Verdict::Allow {
            return ReplayedDecision { verdict, reason: no_rule, kind: Kind::Ip };
        }
        let struck = decision.escalations.first().and_then(|strike| decision.readings.get(strike.charge));
        let reading = match verdict {
            // A warning comes from the strike on a ladder, and no limit has denied the request.
            Verdict::Warn => struck,
            Verdict::Slow => None,
            _ => decision.bound_by(),
        };
        let rule = reading.map(Reading::rule);
        let by_user = facts.user.is_some();
        let per = rule.and_then(|rule| self.policy.rules().get(rule)).map(|rule| rule.per.as_slice());
        let counts_by = |wanted: &Per| per.is_some_and(|per| per.contains(wanted));
        let layer = if rule.is_none() { decision.penalty_layer() } else { None };
        let kind = if by_user && (counts_by(&Per::User) || layer == Some(Layer::User) || verdict == Verdict::Slow) {
            Kind::User
        } else if facts.tenant.is_some() && (counts_by(&Per::Tenant) || layer == Some(Layer::Tenant)) {
            Kind::Tenant
        } else {
            Kind::Ip
        };
        ReplayedDecision { verdict, reason: rule.unwrap_or(no_rule), kind }
    }
}

fn facts<'a>(request: &Request<'a>, found: &'a Found, number: u128) -> Facts<'a> {
    Facts {
        ip: request.ip,
        host: request.host,
        method: request.method,
        path: request.path,
        route: None,
        from_client: false,
        tenant: request.tenant.or(found.tenant.as_deref()),
        user: request.user.or(found.user.as_deref()),
        tier: request.tier.or(found.tier.as_deref()),
        bytes: request.bytes,
        trace: TraceId::from_u128(number),
        ..Facts::default()
    }
}

/// The names that the policy takes from the host or the path. A log has no headers, so other names must be fields of it.
struct Names<'p> {
    tenant: Option<&'p IdentitySource>,
    user: Option<&'p IdentitySource>,
    tier: Option<&'p IdentitySource>,
}

#[derive(Default)]
struct Found {
    tenant: Option<String>,
    user: Option<String>,
    tier: Option<String>,
}

impl<'p> Names<'p> {
    fn new(policy: &'p Policy) -> Self {
        let readable = |source: &&IdentitySource| matches!(source, IdentitySource::Host(_) | IdentitySource::Path(_));
        let identity = policy.identity();
        Self {
            tenant: identity.tenant.as_ref().filter(readable),
            user: identity.user.as_ref().filter(readable),
            tier: identity.tier.as_ref().filter(readable),
        }
    }

    fn find(&self, request: &Request<'_>) -> Found {
        if self.tenant.is_none() && self.user.is_none() && self.tier.is_none() {
            return Found::default();
        }
        let seen: Seen<'_, [(&str, &str)]> =
            Seen { trusted: false, headers: None, host: request.host, path: request.path, claims: None };
        let find = |source: Option<&IdentitySource>| source.and_then(|source| source.find(&seen));
        Found { tenant: find(self.tenant), user: find(self.user), tier: find(self.tier) }
    }
}
