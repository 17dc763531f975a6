//! Many requests at once: some are planned ahead, and the memory of all of them is asked for before any is waited for.

use std::sync::Arc;

use arc_swap::Guard;
use arrayvec::ArrayVec;
use threshold_core::plan::Verb;
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Policy};

use super::{Limiter, random_id};
use crate::clock::Clock;
use crate::store::LocalStore;

/// How many are planned ahead. A processor waits for some ten lines of memory at once, and each request needs a few; so
/// many plans still fit into its nearest cache.
const AHEAD: usize = 16;

/// A request that was planned, and what became of that.
struct Planned<'p> {
    plan: Plan<'p>,
    fits: Result<(), PlanError>,
}

impl<S: LocalStore, C: Clock> Limiter<S, C> {
    /// Decides several requests, one after the other, under one policy. With many keys this is faster than
    /// [`check`](Self::check) for each: the table's memory is asked for sixteen requests at a time.
    pub fn check_many(&self, requests: &[Facts<'_>]) -> Vec<Result<Decision, PlanError>> {
        let mut decisions = Vec::new();
        self.check_many_into(requests, &mut decisions);
        decisions
    }

    /// As [`check_many`](Self::check_many), in place of whatever is in `decisions`, whose memory is used again.
    pub fn check_many_into(&self, requests: &[Facts<'_>], decisions: &mut Vec<Result<Decision, PlanError>>) {
        let policy: Guard<Arc<Policy>> = self.policy.load();
        let mut ahead: ArrayVec<Planned<'_>, AHEAD> = ArrayVec::new();
        let mut outcome = Outcome::default();
        decisions.clear();
        decisions.reserve(requests.len());
        for batch in requests.chunks(AHEAD) {
            while ahead.len() < batch.len() {
                ahead.push(Planned { plan: Plan::new(&policy, Verb::Check), fits: Ok(()) });
            }
            ahead.truncate(batch.len());
            for (planned, facts) in ahead.iter_mut().zip(batch) {
                planned.fits = planned.plan.fill(facts);
                planned.plan.identify(random_id);
            }
            // All at once, and not one by one while they are planned: a processor finds the pages of several in the time
            // that it takes for one.
            for charge in ahead.iter().flat_map(|planned| planned.plan.charges()) {
                self.store.expect(charge.key());
            }
            for (planned, facts) in ahead.iter_mut().zip(batch) {
                decisions.push(std::mem::replace(&mut planned.fits, Ok(())).map(|()| Decision::default()));
                if let Some(Ok(decision)) = decisions.last_mut() {
                    self.settle(&planned.plan, &mut outcome, decision);
                    self.tell(facts, decision, &policy);
                }
            }
        }
    }
}
