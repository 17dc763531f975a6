//! Many requests at once: each is planned, and its memory asked for, before the one ahead of it is settled.

use std::sync::Arc;

use arc_swap::Guard;
use arrayvec::ArrayVec;
use threshold_core::plan::Verb;
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Policy};

use super::Limiter;
use crate::clock::Clock;
use crate::store::{ImmediateStore, at_once};

/// How many are planned ahead: memory that was asked for when one of them was planned is there when it is settled. More would
/// only take room in the processor's nearest cache.
const AHEAD: usize = 2;

/// A request that was planned, and what became of that.
struct Planned<'p> {
    plan: Plan<'p>,
    fits: Result<(), PlanError>,
}

impl<S: ImmediateStore, C: Clock> Limiter<S, C> {
    /// Decides several requests, one after the other, under one policy. With many keys this is faster than
    /// [`check`](Self::check) for each: each is planned, and its memory asked for, while the one before is decided.
    pub fn check_many(&self, requests: &[Facts<'_>]) -> Vec<Result<Decision, PlanError>> {
        let mut decisions = Vec::new();
        self.check_many_into(requests, &mut decisions);
        decisions
    }

    /// As [`check_many`](Self::check_many), in place of whatever is in `decisions`, whose memory is used again.
    pub fn check_many_into(&self, requests: &[Facts<'_>], decisions: &mut Vec<Result<Decision, PlanError>>) {
        let policy: Guard<Arc<Policy>> = self.policy.load();
        let mut outcome = Outcome::default();
        decisions.clear();
        decisions.reserve(requests.len());
        let mut planned: ArrayVec<Planned<'_>, AHEAD> = ArrayVec::new();
        let mut coming = requests.iter();
        for facts in coming.by_ref().take(AHEAD) {
            let mut plan = Plan::new(&policy, Verb::Check);
            let fits = self.plan(&mut plan, facts);
            planned.push(Planned { plan, fits });
        }
        // Each place in turn: what was planned there is settled, and the next is planned in its stead.
        let mut turn: usize = 0;
        for facts in requests {
            let Some(Planned { plan, fits }) = planned.get_mut(turn) else { break };
            turn = turn.wrapping_add(1) % AHEAD;
            decisions.push(std::mem::replace(fits, Ok(())).map(|()| Decision::default()));
            if let Some(Ok(decision)) = decisions.last_mut() {
                at_once(self.settle_of(facts, plan, &mut outcome, decision));
                self.name_banned(plan, facts, decision);
                self.tell(facts, decision, &policy);
            }
            if let Some(facts) = coming.next() {
                *fits = self.plan(plan, facts);
            }
        }
    }
}
