//! Decisions under a policy that the caller holds. The caller can then look up the rules that decided, and decide a list of
//! requests under one policy, even if another policy comes into force meanwhile.

use std::time::Duration;

use threshold_core::explain::Explained;
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::{HoldTerms, OnExpire};
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Receipt, Timestamp, settle};

use super::denials::Moment;
use super::{Limiter, Reserved, traced};
use crate::clock::Clock;
use crate::observer::Operation;
use crate::random_id;
use crate::store::Store;

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
        self.plan(&mut plan, facts)?;
        let terms = plan.hold_terms(ttl.into(), on_expire);
        let settled = self.hold(facts, &plan, &terms, &mut outcome, &mut reserved.decision).await;
        self.name_banned(&plan, facts, &reserved.decision);
        if settled.answered && reserved.decision.allowed() {
            reserved.reservation = Some(plan.trace());
        }
        let in_store = settled.in_store;
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
            return Box::pin(self.settle_remotely(plan, None, now, outcome, decision)).await;
        }
        let answer = self.store.settle(plan, now, outcome).await;
        let in_store = self.since(asked);
        match answer {
            Ok(()) => plan.conclude(outcome, decision),
            Err(error) => *decision = self.decide_without_store(plan, error, now),
        }
        Settled { answered: answer.is_ok(), in_store }
    }

    /// Settles a plan of these facts, and holds what it charges. Decides like [`settle`](Self::settle).
    async fn hold(
        &self,
        facts: &Facts<'_>,
        plan: &Plan<'_>,
        terms: &HoldTerms,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> Settled {
        if !self.move_records(self.moves_of(facts, plan), plan, decision).await {
            return Settled::default();
        }
        plan.prepare(decision);
        let (now, asked) = self.time_and_start();
        if !self.store.answers_at_once() {
            return Box::pin(self.settle_remotely(plan, Some(terms), now, outcome, decision)).await;
        }
        let answer = self.store.reserve(plan, terms, now, outcome).await;
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

    /// Settles a plan on a store that is asked over a network, unless the answer is known without it, and holds what it charges.
    async fn settle_remotely(
        &self,
        plan: &Plan<'_>,
        hold: Option<&HoldTerms>,
        now: Timestamp,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> Settled {
        let known = Settled { answered: true, in_store: Duration::ZERO };
        // Nothing is stored of a request without limits and subjects, such as one of an allow-listed caller.
        if plan.charges().is_empty() && plan.subjects().is_empty() && hold.is_none() {
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
        let answer = match hold {
            Some(terms) => self.store.reserve(plan, terms, now, outcome).await,
            None => self.store.settle(plan, now, outcome).await,
        };
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
                // What was known of a subject ends with its strike: the next denial carries the warning, or is a penalty.
                let struck = outcome.escalations().iter().filter_map(|strike| plan.subjects().get(strike.subject));
                self.denials.forget(struck.map(threshold_core::plan::Subject::key));
            }
            Err(error) => *decision = self.decide_without_store(plan, error, now),
        }
        Settled { answered: answer.is_ok(), in_store }
    }
}
