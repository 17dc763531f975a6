//! One policy on its own store, told the log's time: the same plan, settle and decide as everywhere else.

use threshold_core::decision::{Degraded, Reading};
use threshold_core::limit::Limit;
use threshold_core::plan::Verb;
use threshold_core::policy::{IdentitySource, Layer, Per, Policy, Seen};
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Timestamp, TraceId, Verdict};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{Command, Store as _, at_once};

use super::tally::Tally;
use super::worst::Kind;
use crate::traffic::Request;

/// A policy at work on recorded traffic.
pub(super) struct Rehearsal<'p> {
    policy: &'p Policy,
    store: MemoryStore,
    /// The plan of the request that is decided, and that of the one after it: while the first is settled, the store's
    /// memory for the second is on its way.
    plan: Box<Plan<'p>>,
    coming: Box<Plan<'p>>,
    /// What planning the one after came to, if it is planned.
    planned: Option<Result<(), PlanError>>,
    outcome: Outcome,
    decision: Decision,
    number: u128,
    /// Whether some charge depends on the answer, or lasts only as long as the request.
    gives_back: bool,
    names: Names<'p>,
    pub(super) tally: Tally,
}

/// What became of one request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Judged {
    pub(super) verdict: Verdict,
    /// The rule it was touched by, by its place; the number of rules where a penalty or a list did it.
    pub(super) reason: usize,
    /// What kind of subject that concerns.
    pub(super) kind: Kind,
}

impl<'p> Rehearsal<'p> {
    pub(super) fn new(policy: &'p Policy, top: usize) -> Self {
        let open = |rule: &threshold_core::policy::Rule| {
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
            names: Names::new(policy),
            tally: Tally::new(policy, top),
        }
    }

    /// Decides one request at its own time, and counts what became of it. `coming` is the one after it, if it is known.
    pub(super) fn decide(&mut self, request: &Request<'_>, coming: Option<&Request<'_>>) -> Judged {
        self.number = self.number.saturating_add(1);
        let found = self.names.find(request);
        let facts = facts(request, &found, self.number);
        let fits = match self.planned.take() {
            Some(fits) => {
                std::mem::swap(&mut self.plan, &mut self.coming);
                fits
            }
            None => self.plan.fill(&facts),
        };
        if let Some(coming) = coming {
            self.plan_ahead(coming);
        }
        let now = Timestamp::from_micros(request.at.micros);
        if let Err(error) = fits {
            let judged = self.refused(&error);
            self.tally.add(&self.plan, None, judged, &facts, request.at);
            return judged;
        }
        match at_once(self.store.settle(&self.plan, now, &mut self.outcome)) {
            Ok(()) => {
                self.decision = self.plan.decide(&self.outcome);
                if self.gives_back && self.decision.allowed() {
                    self.give_back(request.status, now);
                }
            }
            Err(_) => self.decision = self.plan.decide_blind(false, Degraded::StoreFull, now),
        }
        let judged = self.judge(&facts);
        self.tally.add(&self.plan, Some(&self.decision), judged, &facts, request.at);
        judged
    }

    fn plan_ahead(&mut self, coming: &Request<'_>) {
        let found = self.names.find(coming);
        let fits = self.coming.fill(&facts(coming, &found, self.number.saturating_add(1)));
        for charge in self.coming.charges() {
            self.store.prefetch(charge.key());
        }
        self.planned = Some(fits);
    }

    /// What depends on the answer is known at once, since the log has it. How long a request lasted it does not have, so
    /// nothing is held.
    fn give_back(&self, status: Option<u16>, now: Timestamp) {
        let mut pending = self.plan.pending(&self.outcome);
        let uncounted = status.and_then(|status| pending.take_uncounted(Some(status)));
        for taken in [uncounted, pending.take_holds()].into_iter().flatten() {
            // Memory gives back whatever it has charged.
            let _ = at_once(self.store.execute(Command::GiveBack(Box::new(taken)), now));
        }
    }

    /// A request that cannot be decided is one that clients' doors refuse.
    fn refused(&self, error: &PlanError) -> Judged {
        let rules = self.policy.rules();
        let reason = match error {
            PlanError::CostExceedsLimit { rule, .. } | PlanError::Missing { rule, .. } => {
                rules.iter().position(|own| own.name == *rule)
            }
            PlanError::TooManyRules | PlanError::Path(_) => None,
        };
        Judged { verdict: Verdict::Deny, reason: reason.unwrap_or(rules.len()), kind: Kind::Ip }
    }

    fn judge(&self, facts: &Facts<'_>) -> Judged {
        let decision = &self.decision;
        let verdict = decision.verdict;
        let nobody = self.policy.rules().len();
        if verdict == Verdict::Allow {
            return Judged { verdict, reason: nobody, kind: Kind::Ip };
        }
        let struck = decision.escalations.first().and_then(|strike| decision.readings.get(strike.charge));
        let reading = match verdict {
            Verdict::Warn => struck,
            Verdict::Slow => None,
            _ => decision.bound_by(),
        };
        let rule = reading.map(Reading::rule);
        let by_user = facts.user.is_some();
        let per = rule.and_then(|rule| self.policy.rules().get(rule)).map(|rule| rule.per.as_slice());
        let counts_by = |wanted: &Per| per.is_some_and(|per| per.contains(wanted));
        let layer = if rule.is_none() { decision.penalty } else { None };
        let kind = if by_user && (counts_by(&Per::User) || layer == Some(Layer::User) || verdict == Verdict::Slow) {
            Kind::User
        } else if facts.tenant.is_some() && (counts_by(&Per::Tenant) || layer == Some(Layer::Tenant)) {
            Kind::Tenant
        } else {
            Kind::Ip
        };
        Judged { verdict, reason: rule.unwrap_or(nobody), kind }
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

/// Names that the policy finds in the host or the path; a log has no headers, so the rest must be fields of its own.
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
