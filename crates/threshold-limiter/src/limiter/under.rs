//! Decisions under a policy that their caller holds: an answer then names the rules it was decided by, and the answers of a
//! list are all decided by the same ones, whatever is put in force meanwhile.

use threshold_core::explain::Explained;
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::OnExpire;
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Receipt, Span, Timestamp, TraceId};

use super::{Limiter, traced};
use crate::clock::Clock;
use crate::random_id;
use crate::store::LocalStore;

impl<S: LocalStore, C: Clock> Limiter<S, C> {
    /// Checks, peeks or records under a policy that [`policy`](Self::policy) gave, in force or not any more. Returns what
    /// `keep` makes of the receipt, if anything was charged.
    ///
    /// The decision is written in place of whatever is in `decision`, and the receipt is lent: both are some kilobytes, and
    /// moving them takes as long as making them.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub fn decide_under<T>(
        &self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
        decision: &mut Decision,
        keep: impl FnOnce(&Receipt) -> T,
    ) -> Result<Option<T>, PlanError> {
        self.decide(&mut Plan::new(policy, verb), facts, decision, |plan, outcome, decision, now| {
            let charged = verb != Verb::Peek && decision.allowed();
            let receipt = outcome.filter(|_| charged).and_then(|outcome| plan.receipt(outcome, now));
            receipt.as_ref().map(keep)
        })
    }

    /// As [`reserve`](Self::reserve), and as [`decide_under`](Self::decide_under). Returns what to end the reservation by.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub fn reserve_under(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        (ttl, on_expire): (Span, OnExpire),
        decision: &mut Decision,
    ) -> Result<Option<TraceId>, PlanError> {
        self.decide(&mut Plan::new(policy, Verb::Check), facts, decision, |plan, outcome, decision, now| {
            let outcome = outcome.filter(|_| decision.allowed())?;
            match self.store.reserve(plan.holding(outcome, now), ttl, on_expire, now) {
                Ok(reservation) => Some(reservation),
                Err(error) => {
                    let holding = plan.holding(outcome, now);
                    self.store.give_back(&holding, now);
                    self.made_room(holding.keys());
                    *decision = self.decide_without_store(plan, error, now);
                    None
                }
            }
        })
    }

    /// As [`explain`](Self::explain), with what [`peek`](Self::peek) would answer. No observer hears of it: who asks about
    /// a decision does not ask to cross.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub fn explain_under<T>(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        read: impl FnOnce(&[Explained<'_>], &Decision) -> T,
    ) -> Result<T, PlanError> {
        let facts = traced(facts);
        let mut decision = Decision::default();
        self.settle(&policy.plan_for(Verb::Peek, &facts)?, &mut Outcome::default(), &mut decision);
        Ok(read(&policy.explain(&facts), &decision))
    }

    /// Fills the plan, settles it and decides; `finish` takes what it needs before the plan goes, and has the last word.
    /// Then observers are told.
    pub(crate) fn decide<T>(
        &self,
        plan: &mut Plan<'_>,
        facts: &Facts<'_>,
        decision: &mut Decision,
        finish: impl FnOnce(&Plan<'_>, Option<&Outcome>, &mut Decision, Timestamp) -> T,
    ) -> Result<T, PlanError> {
        self.plan(plan, facts)?;
        let mut outcome = Outcome::default();
        let (settled, now) = self.settle(plan, &mut outcome, decision);
        let finished = finish(plan, settled.then_some(&outcome), decision, now);
        self.tell(facts, decision, plan.policy());
        Ok(finished)
    }

    /// Plans a request, and has the store fetch what it will need while there is still something else to do.
    #[inline]
    pub(crate) fn plan(&self, plan: &mut Plan<'_>, facts: &Facts<'_>) -> Result<(), PlanError> {
        plan.fill_expecting(facts, |key| self.store.expect(key))?;
        plan.identify(random_id);
        Ok(())
    }

    /// Settles a plan, and says what that comes to. Where the store failed, the outcome says nothing: that comes first.
    pub(crate) fn settle(&self, plan: &Plan<'_>, outcome: &mut Outcome, decision: &mut Decision) -> (bool, Timestamp) {
        plan.prepare(decision);
        let now = self.clock.now();
        match self.store.settle(plan, now, outcome) {
            Ok(()) => plan.conclude(outcome, now, decision),
            Err(error) => {
                *decision = self.decide_without_store(plan, error, now);
                return (false, now);
            }
        }
        (true, now)
    }
}
