//! Many requests in one call, with memory prefetched across requests.

use std::sync::Arc;

use arc_swap::Guard;
use arrayvec::ArrayVec;
use threshold_core::plan::Verb;
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Policy};

use super::Limiter;
use crate::clock::Clock;
use crate::observer::Operation;
use crate::store::{ImmediateStore, at_once};

/// How many requests are planned ahead. While one is settled, the memory of the next is on its way; a third plan would only
/// take room in the first-level cache.
const AHEAD: usize = 2;

/// A planned request, or the reason why it could not be planned.
struct Planned<'p> {
    plan: Plan<'p>,
    planned: Result<(), PlanError>,
}

impl<S: ImmediateStore, C: Clock> Limiter<S, C> {
    /// Decides several requests, one after the other, under one policy. The answers are those of one
    /// [`check`](Self::check) for each. With more keys than the processor's cache holds this is faster, because the memory
    /// of each request is prefetched while the one before it is decided.
    pub fn check_many(&self, requests: &[Facts<'_>]) -> Vec<Result<Decision, PlanError>> {
        let policy: Guard<Arc<Policy>> = self.policy.load();
        let mut outcome = Outcome::default();
        let mut decisions = Vec::with_capacity(requests.len());
        let mut ahead: ArrayVec<Planned<'_>, AHEAD> = ArrayVec::new();
        let mut coming = requests.iter();
        for facts in coming.by_ref().take(AHEAD) {
            let mut plan = Plan::new(&policy, Verb::Check);
            let planned = self.plan(&mut plan, facts);
            ahead.push(Planned { plan, planned });
        }
        // A ring: the plan at `turn` is settled, then its place is used for the next request to plan.
        let mut turn: usize = 0;
        for facts in requests {
            let Some(Planned { plan, planned }) = ahead.get_mut(turn) else { break };
            turn = turn.wrapping_add(1) % AHEAD;
            decisions.push(std::mem::replace(planned, Ok(())).map(|()| Decision::default()));
            // Decided in place: a decision that is made elsewhere and then pushed is copied.
            if let Some(Ok(decision)) = decisions.last_mut() {
                // Without its planning, which overlaps with the request before it.
                let start = self.start();
                let settled = at_once(self.settle_of(facts, plan, &mut outcome, decision));
                self.name_banned(plan, facts, decision);
                self.tell(Operation::Check, facts, decision, &policy, (start, settled.in_store));
            }
            if let Some(facts) = coming.next() {
                *planned = self.plan(plan, facts);
            }
        }
        decisions
    }
}
