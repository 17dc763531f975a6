//! Every verb on any store, near or far. On a store in this process each is ready at the first poll.

use std::sync::Arc;

use threshold_core::plan::Verb;
use threshold_core::policy::Layer;
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Policy, Receipt, Span, Timestamp, TraceId};

use super::{Limiter, Reserved, traced};
use crate::clock::Clock;
use crate::store::{EndError, Store, StoreError};

/// A plan that was settled, or could not be.
pub(super) struct Answered {
    pub(super) decision: Decision,
    /// What settling did; nothing where the store could not answer.
    pub(super) outcome: Option<Outcome>,
    pub(super) now: Timestamp,
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// As [`check`](Self::check), on any store.
    ///
    /// # Errors
    /// As for `check`.
    pub async fn check_async(&self, facts: &Facts<'_>) -> Result<Decision, PlanError> {
        self.decide_async(Verb::Check, facts, |_, answered| answered.decision).await
    }

    /// As [`check_with_receipt`](Self::check_with_receipt), on any store.
    ///
    /// # Errors
    /// As for `check`.
    pub async fn check_with_receipt_async(&self, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        self.decide_async(Verb::Check, facts, Answered::with_receipt).await
    }

    /// As [`check_many`](Self::check_many), on any store.
    pub async fn check_many_async(&self, requests: &[Facts<'_>]) -> Vec<Result<Decision, PlanError>> {
        let mut decisions = Vec::with_capacity(requests.len());
        for facts in requests {
            decisions.push(self.check_async(facts).await);
        }
        decisions
    }

    /// As [`peek`](Self::peek), on any store.
    ///
    /// # Errors
    /// As for `check`.
    pub async fn peek_async(&self, facts: &Facts<'_>) -> Result<Decision, PlanError> {
        self.decide_async(Verb::Peek, facts, |_, answered| answered.decision).await
    }

    /// As [`record`](Self::record), on any store.
    ///
    /// # Errors
    /// As for `check`, but any cost will do.
    pub async fn record_async(&self, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        self.decide_async(Verb::Record, facts, Answered::with_receipt).await
    }

    /// As [`refund`](Self::refund), on any store.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn refund_async(&self, receipt: &Receipt) -> Result<bool, StoreError> {
        let first = self.store.refund(receipt, self.clock.now()).await?;
        self.made_room(receipt.keys());
        Ok(first)
    }

    /// As [`reserve`](Self::reserve), on any store.
    ///
    /// # Errors
    /// As for `check`.
    pub async fn reserve_async(
        &self,
        facts: &Facts<'_>,
        ttl: Span,
        on_expire: OnExpire,
    ) -> Result<Reserved, PlanError> {
        let policy: Arc<Policy> = self.policy();
        let facts = traced(facts);
        let plan = policy.plan(&facts)?;
        let Answered { mut decision, outcome, now } = self.settle_async(&plan).await;
        let mut reservation = None;
        if let Some(outcome) = outcome.filter(|_| decision.allowed()) {
            match self.store.reserve(plan.holding(&outcome, now), ttl, on_expire, now).await {
                Ok(id) => reservation = Some(id),
                Err(error) => {
                    self.withdraw_async(&plan.holding(&outcome, now), error, now).await;
                    decision = self.decide_without_store(&plan, error, now);
                }
            }
        }
        self.tell(&facts, &decision, &policy);
        Ok(Reserved { decision, reservation })
    }

    /// As [`commit`](Self::commit), on any store.
    ///
    /// # Errors
    /// Where there is no such reservation, or no longer, where it was committed with another cost, or where the store cannot
    /// answer.
    pub async fn commit_async(&self, reservation: TraceId, actual: &ActualCost<'_>) -> Result<(), EndError> {
        let keys = self.store.commit(reservation, actual, self.key, self.clock.now()).await?;
        self.made_room(keys);
        Ok(())
    }

    /// As [`release`](Self::release), on any store.
    ///
    /// # Errors
    /// As for `commit_async`.
    pub async fn release_async(&self, reservation: TraceId) -> Result<(), EndError> {
        let keys = self.store.release(reservation, self.clock.now()).await?;
        self.made_room(keys);
        Ok(())
    }

    /// As [`pause`](Self::pause), on any store.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn pause_async(&self, layer: Layer, key: &str, length: Span) -> Result<bool, StoreError> {
        let now = self.clock.now();
        let keys = self.policy().keys_of(layer, key);
        self.store.pause(&keys, now.plus(length), now).await?;
        Ok(!keys.balances.is_empty())
    }

    /// As [`forgive`](Self::forgive), on any store.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn forgive_async(&self, layer: Layer, key: &str) -> Result<(), StoreError> {
        let keys = self.policy().keys_of(layer, key);
        self.store.forgive(&keys).await?;
        self.made_room(keys.all());
        Ok(())
    }

    /// Plans, settles and decides; `finish` takes what it needs before the plan goes.
    async fn decide_async<T>(
        &self,
        verb: Verb,
        facts: &Facts<'_>,
        finish: impl FnOnce(&Plan<'_>, Answered) -> T + Send,
    ) -> Result<T, PlanError> {
        // Whole, not guarded: a guard is a slot of its thread, which an await may leave.
        let policy: Arc<Policy> = self.policy();
        let facts = traced(facts);
        let plan = policy.plan_for(verb, &facts)?;
        let answered = self.settle_async(&plan).await;
        self.tell(&facts, &answered.decision, &policy);
        Ok(finish(&plan, answered))
    }

    /// Gives back what was charged for a reservation that was not kept, if the store hears of it. Where that is not known,
    /// it may have been kept all the same: a refund is remembered, and refused where there is a reservation.
    async fn withdraw_async(&self, holding: &Receipt, error: StoreError, now: Timestamp) {
        let _ = match error {
            StoreError::Full => self.store.give_back(holding, now).await,
            StoreError::Timeout | StoreError::Unavailable => self.store.refund(holding, now).await.map(drop),
        };
        self.made_room(holding.keys());
    }

    pub(super) async fn settle_async(&self, plan: &Plan<'_>) -> Answered {
        let now = self.clock.now();
        let mut outcome = Outcome::default();
        match self.store.settle(plan, now, &mut outcome).await {
            Ok(()) => Answered { decision: plan.decide(&outcome, now), outcome: Some(outcome), now },
            Err(error) => Answered { decision: self.decide_without_store(plan, error, now), outcome: None, now },
        }
    }
}

impl Answered {
    pub(super) fn with_receipt(plan: &Plan<'_>, Self { decision, outcome, now }: Self) -> (Decision, Option<Receipt>) {
        let receipt = outcome.and_then(|outcome| plan.receipt(&outcome, now));
        (decision, receipt)
    }
}
