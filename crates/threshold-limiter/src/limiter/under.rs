//! Decisions under a policy that their caller holds: an answer then names the rules it was decided by, and the answers of a
//! list are all decided by the same ones, whatever policy is put in force meanwhile.

use threshold_core::command::Command;
use threshold_core::explain::Explained;
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::OnExpire;
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Receipt, Span, Timestamp, TraceId};

use super::{Limiter, traced};
use crate::clock::Clock;
use crate::random_id;
use crate::store::{Store, StoreError};

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Checks, peeks or records under a policy that [`policy`](Self::policy) gave, in force or not any more. Returns what
    /// `keep` makes of the receipt, if anything was charged.
    ///
    /// The decision is written in place of whatever is in `decision`, and the receipt is lent: both are some kilobytes, and
    /// moving them takes as long as making them.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub async fn decide_under<T>(
        &self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
        decision: &mut Decision,
        keep: impl FnOnce(&Receipt) -> T,
    ) -> Result<Option<T>, PlanError> {
        let (mut plan, mut outcome) = (Plan::new(policy, verb), Outcome::default());
        let settled = self.decide(&mut plan, facts, &mut outcome, decision).await?;
        let receipt = if settled && decision.allowed() { plan.receipt(&outcome) } else { None };
        Ok(receipt.as_ref().filter(|_| verb != Verb::Peek).map(keep))
    }

    /// As [`reserve`](Self::reserve), and as [`decide_under`](Self::decide_under). Returns what to end the reservation by.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub async fn reserve_under(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        (ttl, on_expire): (Span, OnExpire),
        decision: &mut Decision,
    ) -> Result<Option<TraceId>, PlanError> {
        let (mut plan, mut outcome) = (Plan::new(policy, Verb::Check), Outcome::default());
        let settled = self.settle_planned(&mut plan, facts, &mut outcome, decision).await?;
        let mut reservation = None;
        if settled && decision.allowed() {
            let now = outcome.at();
            let receipt = Box::new(plan.holding(&outcome));
            let id = receipt.id();
            match self.store.execute(Command::Reserve { receipt: receipt.clone(), ttl, on_expire }, now).await {
                Ok(_) => reservation = Some(id),
                Err(error) => {
                    self.withdraw(receipt, error, now).await;
                    *decision = self.decide_without_store(&plan, error, now);
                }
            }
        }
        self.tell(facts, decision, policy);
        Ok(reservation)
    }

    /// As [`explain`](Self::explain), with what [`peek`](Self::peek) would answer. No observer hears of it: who asks about
    /// a decision does not ask to cross.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub async fn explain_under<T>(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        read: impl FnOnce(&[Explained<'_>], &Decision) -> T,
    ) -> Result<T, PlanError> {
        let facts = traced(facts);
        let (mut outcome, mut decision) = (Outcome::default(), Decision::default());
        self.settle_of(&facts, &policy.plan_for(Verb::Peek, &facts)?, &mut outcome, &mut decision).await;
        Ok(read(&policy.explain(&facts), &decision))
    }

    /// Fills the plan, settles it, decides, and tells observers. Says whether the store answered; where not, the outcome
    /// says nothing.
    ///
    /// What is large is the caller's, so that nothing of it is moved.
    #[inline]
    pub(crate) async fn decide(
        &self,
        plan: &mut Plan<'_>,
        facts: &Facts<'_>,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> Result<bool, PlanError> {
        let settled = self.settle_planned(plan, facts, outcome, decision).await?;
        self.tell(facts, decision, plan.policy());
        Ok(settled)
    }

    #[inline]
    async fn settle_planned(
        &self,
        plan: &mut Plan<'_>,
        facts: &Facts<'_>,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> Result<bool, PlanError> {
        self.plan(plan, facts)?;
        let settled = self.settle_of(facts, plan, outcome, decision).await;
        self.name_banned(plan, facts, decision);
        Ok(settled)
    }

    /// Plans a request, and has the store fetch what it will need while there is still something else to do.
    #[inline]
    pub(crate) fn plan(&self, plan: &mut Plan<'_>, facts: &Facts<'_>) -> Result<(), PlanError> {
        plan.fill_expecting(facts, |key| self.store.prefetch(key))?;
        plan.identify(random_id);
        Ok(())
    }

    /// Settles a plan and decides. Says whether the store answered; where not, the outcome says nothing.
    #[inline]
    pub(crate) async fn settle(&self, plan: &Plan<'_>, outcome: &mut Outcome, decision: &mut Decision) -> bool {
        plan.prepare(decision);
        let now = self.clock.now();
        match self.store.settle(plan, now, outcome).await {
            Ok(()) => {
                plan.conclude(outcome, decision);
                true
            }
            Err(error) => {
                *decision = self.decide_without_store(plan, error, now);
                false
            }
        }
    }

    /// Gives back what was charged for a reservation that was not kept, if the store hears of it. Where that is not known,
    /// it may have been kept all the same: a refund is remembered, and refused where there is a reservation.
    async fn withdraw(&self, holding: Box<Receipt>, error: StoreError, now: Timestamp) {
        let keys: Vec<_> = holding.keys().collect();
        let command = match error {
            StoreError::Full => Command::GiveBack(holding),
            StoreError::Timeout | StoreError::Unavailable => Command::Refund(holding),
        };
        let _ = self.store.execute(command, now).await;
        self.made_room(keys);
    }
}
