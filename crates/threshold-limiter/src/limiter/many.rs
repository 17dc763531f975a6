//! Many requests at once: while one is decided, the memory of the next is already on its way.

use std::sync::Arc;

use arc_swap::Guard;
use threshold_core::plan::Verb;
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Policy};

use super::{Limiter, traced};
use crate::clock::Clock;
use crate::store::LocalStore;

/// A request that was planned, and what became of that.
struct Planned<'f, 'p> {
    facts: Facts<'f>,
    plan: Plan<'p>,
    fits: Result<(), PlanError>,
}

impl<'f, 'p> Planned<'f, 'p> {
    fn new(policy: &'p Policy) -> Self {
        Self { facts: Facts::default(), plan: Plan::new(policy, Verb::Check), fits: Ok(()) }
    }

    /// Plans the next request, if there is one, and tells the store.
    fn fill(&mut self, facts: Option<&Facts<'f>>, store: &impl LocalStore) {
        let Some(facts) = facts else { return };
        self.facts = traced(facts);
        self.fits = self.plan.fill(&self.facts);
        if self.fits.is_ok() {
            store.expect(&self.plan);
        }
    }
}

impl<S: LocalStore, C: Clock> Limiter<S, C> {
    /// Decides several requests, one after the other, under one policy. With many keys this is faster than
    /// [`check`](Self::check) for each: the table's memory is asked for one request ahead.
    pub fn check_many(&self, requests: &[Facts<'_>]) -> Vec<Result<Decision, PlanError>> {
        let mut decisions = Vec::new();
        self.check_many_into(requests, &mut decisions);
        decisions
    }

    /// As [`check_many`](Self::check_many), in place of whatever is in `decisions`, whose memory is used again.
    pub fn check_many_into(&self, requests: &[Facts<'_>], decisions: &mut Vec<Result<Decision, PlanError>>) {
        let policy: Guard<Arc<Policy>> = self.policy.load();
        let (mut this, mut next) = (&mut Planned::new(&policy), &mut Planned::new(&policy));
        let mut outcome = Outcome::default();
        decisions.clear();
        decisions.reserve(requests.len());
        let mut coming = requests.iter();
        this.fill(coming.next(), &self.store);
        for _ in requests {
            next.fill(coming.next(), &self.store);
            decisions.push(Ok(Decision::default()));
            if let Err(error) = std::mem::replace(&mut this.fits, Ok(())) {
                if let Some(last) = decisions.last_mut() {
                    *last = Err(error);
                }
            } else if let Some(Ok(decision)) = decisions.last_mut() {
                self.settle(&this.plan, &mut outcome, decision);
                self.tell(&this.facts, decision, &policy);
            }
            std::mem::swap(&mut this, &mut next);
        }
    }
}
