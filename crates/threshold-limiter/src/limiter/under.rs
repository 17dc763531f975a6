//! Decisions under a policy that the caller holds: the caller can then look up the rules that decided, and decide a list of
//! requests under one policy, even if another policy comes into force meanwhile.

use std::time::Duration;

use threshold_core::command::{Answer, Command};
use threshold_core::explain::Explained;
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::OnExpire;
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Receipt, Timestamp, settle};

use super::denials::Moment;
use super::{Limiter, Reserved, traced};
use crate::clock::Clock;
use crate::observer::Operation;
use crate::random_id;
use crate::store::{Store, StoreError};

/// Whether the store answered, and how long that took. Without an answer the outcome is not filled in.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Settled {
    pub(crate) answered: bool,
    pub(crate) in_store: Duration,
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Checks, peeks or records under a policy that [`policy`](Self::policy) has returned, whether or not it is still in
    /// force. Returns a receipt if anything was charged.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub async fn decide_under(
        &self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
    ) -> Result<(Decision, Option<Receipt>), PlanError> {
        let (mut plan, mut outcome, mut decision) = (Plan::new(policy, verb), Outcome::default(), Decision::default());
        let settled = self.decide(&mut plan, facts, &mut outcome, &mut decision).await?;
        let charged = settled.answered && decision.allowed() && verb != Verb::Peek;
        let receipt = if charged { plan.receipt(&outcome) } else { None };
        Ok((decision, receipt))
    }

    /// Reserves under a policy that the caller holds; see [`reserve`](Self::reserve) and
    /// [`decide_under`](Self::decide_under).
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub async fn reserve_under(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        ttl: Duration,
        on_expire: OnExpire,
    ) -> Result<Reserved, PlanError> {
        let start = self.start();
        let (mut plan, mut outcome) = (Plan::new(policy, Verb::Check), Outcome::default());
        let mut reserved = Reserved { decision: Decision::default(), reservation: None };
        // Observers are notified below, of the decision that counts in the end.
        let Settled { answered, mut in_store } =
            self.settle_planned(&mut plan, facts, &mut outcome, &mut reserved.decision).await?;
        if answered && reserved.decision.allowed() {
            // The time of the store, which may differ from this clock's.
            let now = outcome.at();
            let receipt = Box::new(plan.holding(&outcome));
            let id = receipt.id();
            let command = Command::Reserve { receipt: receipt.clone(), ttl: ttl.into(), on_expire };
            let asked = self.start();
            let kept = self.store.execute(command, now).await;
            in_store = in_store.saturating_add(self.since(asked));
            match kept {
                Ok(_) => reserved.reservation = Some(id),
                Err(error) => reserved.decision = self.decide_unreserved(&plan, receipt, error, now).await,
            }
        }
        self.tell(Operation::Reserve, facts, &reserved.decision, policy, (start, in_store));
        Ok(reserved)
    }

    /// Returns which rules a request matches, by which keys, why the others do not match, and what [`peek`](Self::peek)
    /// would answer. Observers do not see this decision: it explains one and admits nothing.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub async fn explain_under<'p>(
        &self,
        policy: &'p Policy,
        facts: &Facts<'_>,
    ) -> Result<(Vec<Explained<'p>>, Decision), PlanError> {
        let facts = traced(facts);
        let (mut outcome, mut decision) = (Outcome::default(), Decision::default());
        let plan = policy.plan_for(Verb::Peek, &facts)?;
        self.store.learn_places(&mut || plan.places(&facts));
        self.settle_of(&facts, &plan, &mut outcome, &mut decision).await;
        Ok((policy.explain(&facts), decision))
    }

    /// Fills the plan, settles it, decides, and notifies observers. Returns whether the store answered; if not, `outcome` is
    /// not filled in.
    ///
    /// The caller provides the plan, the outcome and the decision: together they are some kilobytes, and an async fn would
    /// copy them on every await if it returned them.
    #[inline]
    pub(crate) async fn decide(
        &self,
        plan: &mut Plan<'_>,
        facts: &Facts<'_>,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> Result<Settled, PlanError> {
        let start = self.start();
        let settled = self.settle_planned(plan, facts, outcome, decision).await?;
        self.tell(plan.verb().into(), facts, decision, plan.policy(), (start, settled.in_store));
        Ok(settled)
    }

    #[inline]
    async fn settle_planned(
        &self,
        plan: &mut Plan<'_>,
        facts: &Facts<'_>,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> Result<Settled, PlanError> {
        self.plan(plan, facts)?;
        let settled = self.settle_of(facts, plan, outcome, decision).await;
        self.name_banned(plan, facts, decision);
        Ok(settled)
    }

    /// Plans a request. Each key is prefetched as soon as it is known, so that memory latency overlaps with the planning.
    #[inline]
    pub(crate) fn plan(&self, plan: &mut Plan<'_>, facts: &Facts<'_>) -> Result<(), PlanError> {
        plan.fill_with_prefetch(facts, |key| self.store.prefetch(key))?;
        plan.identify(random_id);
        self.store.learn_places(&mut || plan.places(facts));
        Ok(())
    }

    /// Settles a plan and decides. Returns whether the store answered; if not, `outcome` is not filled in.
    #[inline]
    pub(crate) async fn settle(&self, plan: &Plan<'_>, outcome: &mut Outcome, decision: &mut Decision) -> Settled {
        // What does not depend on the store is filled in while the prefetched memory arrives.
        plan.prepare(decision);
        let (now, asked) = self.time_and_start();
        if !self.store.answers_at_once() {
            // Boxed: a round trip costs more than an allocation, and the future of a store in memory stays small.
            return Box::pin(self.settle_remotely(plan, now, outcome, decision)).await;
        }
        let answer = self.store.settle(plan, now, outcome).await;
        let in_store = self.since(asked);
        match answer {
            Ok(()) => plan.conclude(outcome, decision),
            Err(error) => *decision = self.decide_without_store(plan, error, now),
        }
        Settled { answered: answer.is_ok(), in_store }
    }

    /// Returns the present moment by this node's clock and by the store's.
    pub(super) fn moment(&self) -> Moment {
        Moment { own: self.clock.now(), store: self.store.now() }
    }

    /// Settles a plan on a store that is asked over a network, unless the answer is known without it.
    async fn settle_remotely(
        &self,
        plan: &Plan<'_>,
        now: Timestamp,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> Settled {
        let known = Settled { answered: true, in_store: Duration::ZERO };
        // Nothing is stored of a request without limits and subjects, such as one of an allow-listed caller.
        if plan.charges().is_empty() && plan.subjects().is_empty() {
            *outcome = settle(plan.bill(), &mut [], &mut [], now);
            plan.conclude(outcome, decision);
            return known;
        }
        let begun = self.moment();
        if self.denials.repeat(plan, begun, outcome, decision) {
            return known;
        }
        let asked = self.denials.versions(plan);
        let start = self.start();
        let answer = self.store.settle(plan, now, outcome).await;
        let in_store = self.since(start);
        match answer {
            Ok(()) => {
                plan.conclude(outcome, decision);
                let heard = self.moment();
                self.penalties.see(plan, outcome, decision, heard.own);
                if decision.allowed() {
                    self.denials.charged(plan, outcome, (begun.own, heard));
                } else {
                    let in_one_step = self.store.settles_partitions_together();
                    self.denials.keep(plan, outcome, (&asked, begun.own, heard), in_one_step);
                }
            }
            Err(error) => *decision = self.decide_without_store(plan, error, now),
        }
        Settled { answered: answer.is_ok(), in_store }
    }

    /// Decides a request that was charged, and whose reservation the store did not confirm.
    async fn decide_unreserved(
        &self,
        plan: &Plan<'_>,
        holding: Box<Receipt>,
        error: StoreError,
        now: Timestamp,
    ) -> Decision {
        let decision = self.decide_by_mode(plan, error, now);
        let is_admitted = decision.allowed();
        // Noted before the next call: the reservation may be confirmed late while that is under way.
        if error == StoreError::Timeout {
            self.blind.awaits(plan.trace(), is_admitted, now);
        }
        // Without a stored reservation nothing would give back the charges when its time is over.
        let is_withdrawn = self.withdraw(holding, error, now).await;
        // The store no longer counts a request that was admitted.
        if is_withdrawn && is_admitted {
            self.blind.add(plan.bill(), now);
        }
        decision
    }

    /// Gives back the charges of a reservation that the store did not confirm. Returns whether they were given back.
    async fn withdraw(&self, holding: Box<Receipt>, error: StoreError, now: Timestamp) -> bool {
        let keys: Vec<_> = holding.keys().collect();
        let command = match error {
            // The store has answered that it kept nothing.
            StoreError::Full => Command::GiveBack(holding),
            // The store may have kept the reservation all the same. A refund is remembered by id, and refused where there
            // is a reservation, so it cannot give back twice.
            StoreError::Timeout | StoreError::Unavailable => Command::Refund(holding),
        };
        // If this fails too, the charges stay until they expire. That denies too much, never too little.
        let answered = self.store.execute(command, now).await;
        self.made_room(keys);
        matches!(answered, Ok(Answer::Done | Answer::Refunded { first: true }))
    }
}
