//! Every verb, on any store. On a store in this process each is ready at the first poll.

use std::sync::Arc;

use threshold_core::balance::Checked;
use threshold_core::command::{Answer, Command};
use threshold_core::key::TextKeys;
use threshold_core::lockout::Account;
use threshold_core::plan::{SubjectKeys, Verb};
use threshold_core::policy::Layer;
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{
    Decision, Digest, Facts, Limit, Outcome, Plan, PlanError, Policy, Receipt, Span, Standing, Timestamp, TraceId,
};

use super::{Limiter, Reserved};
use crate::clock::Clock;
use crate::random_id;
use crate::store::{EndError, Kind, Listed, Store, StoreError};

impl<S: Store, C: Clock> Limiter<S, C> {
    /// As [`check`](Self::check), on any store.
    ///
    /// # Errors
    /// As for `check`.
    pub async fn check_async(&self, facts: &Facts<'_>) -> Result<Decision, PlanError> {
        Ok(self.decide_with_receipt(Verb::Check, facts).await?.0)
    }

    /// As [`check_with_receipt`](Self::check_with_receipt), on any store.
    ///
    /// # Errors
    /// As for `check`.
    pub async fn check_with_receipt_async(&self, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        self.decide_with_receipt(Verb::Check, facts).await
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
        Ok(self.decide_with_receipt(Verb::Peek, facts).await?.0)
    }

    /// As [`record`](Self::record), on any store.
    ///
    /// # Errors
    /// As for `check`, but any cost will do.
    pub async fn record_async(&self, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        self.decide_with_receipt(Verb::Record, facts).await
    }

    /// As [`refund`](Self::refund), on any store.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn refund_async(&self, receipt: &Receipt) -> Result<bool, StoreError> {
        let receipt = self.present_receipt(receipt);
        match self.execute(Command::Refund(Box::new(receipt.clone().into_owned()))).await? {
            Answer::Refunded { first } => {
                self.made_room(receipt.keys());
                Ok(first)
            }
            other => Err(StoreError::unexpected(other)),
        }
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
        let (policy, mut decision) = (self.policy(), Decision::default());
        let reservation = self.reserve_under(&policy, facts, (ttl, on_expire), &mut decision).await?;
        Ok(Reserved { decision, reservation })
    }

    /// As [`commit`](Self::commit), on any store.
    ///
    /// # Errors
    /// Where the reservation is unknown or has ended, where it was committed with another cost, or where the store cannot
    /// answer.
    pub async fn commit_async(&self, reservation: TraceId, actual: &ActualCost<'_>) -> Result<(), EndError> {
        self.end(Command::Commit { id: reservation, cost: actual.owned() }).await
    }

    /// As [`release`](Self::release), on any store.
    ///
    /// # Errors
    /// As for `commit_async`.
    pub async fn release_async(&self, reservation: TraceId) -> Result<(), EndError> {
        self.end(Command::Release { id: reservation }).await
    }

    /// As [`pause`](Self::pause), on any store.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn pause_async(&self, layer: Layer, key: &str, length: Span) -> Result<bool, StoreError> {
        let keys = self.policy().keys_of(layer, key);
        let known = !keys.balances.is_empty();
        self.execute(Command::Pause { keys, until: self.clock.now().plus(length) }).await?;
        Ok(known)
    }

    /// As [`forgive`](Self::forgive), on any store.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn forgive_async(&self, layer: Layer, key: &str) -> Result<(), StoreError> {
        let keys = self.policy().keys_of(layer, key);
        let (room, standings): (Vec<_>, _) = (keys.all().collect(), keys.standings.clone());
        self.execute(Command::Forgive { keys }).await?;
        for standing in standings {
            self.bans.forget_name(standing);
        }
        self.forgive_previous(layer, key).await?;
        self.made_room(room);
        Ok(())
    }

    /// Decides one cost on one key under one limit, without a policy. Keys are digested apart from those of rules.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn check_limit(&self, key: &str, limit: &Limit, cost: u64) -> Result<(Checked, Timestamp), StoreError> {
        let text = key;
        let key = TextKeys::new(self.policy().key(), limit).digest(text);
        self.rekey_text(text, key, limit).await?;
        let now = self.clock.now();
        let command = Command::Limit { key, limit: *limit, cost, id: random_id() };
        match self.store.execute(command, now).await? {
            Answer::Limited(checked) => Ok((checked, now)),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// How it stands with the subject under a key.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn standing(&self, key: Digest) -> Result<Option<Standing>, StoreError> {
        match self.execute(Command::ReadStanding { key }).await? {
            Answer::Standing(standing) => Ok(standing.map(|standing| *standing)),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// Until when a pause, or a rule's `block_for`, denies a subject under one of its limits at least; in the past where
    /// nothing does.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn blocked_until(&self, keys: SubjectKeys) -> Result<Timestamp, StoreError> {
        match self.execute(Command::ReadBlock { keys }).await? {
            Answer::Blocked(until) => Ok(until),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// What is known of the account under a key.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn account(&self, account: Digest) -> Result<Option<Account>, StoreError> {
        match self.execute(Command::ReadAccount { account }).await? {
            Answer::Account(account) => Ok(account.map(|account| *account)),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// What is stored of one kind, as [`Store::list`] has it.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn list(&self, kind: Kind, after: Option<Digest>, limit: usize) -> Result<Vec<Listed>, StoreError> {
        self.store.list(kind, after, limit, self.clock.now()).await
    }

    /// Executes a command on the store.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn execute(&self, command: Command) -> Result<Answer, StoreError> {
        self.store.execute(command, self.clock.now()).await
    }

    async fn end(&self, command: Command) -> Result<(), EndError> {
        match self.execute(command).await? {
            Answer::Ended(ended) => {
                self.made_room(ended?);
                Ok(())
            }
            other => Err(StoreError::unexpected(other).into()),
        }
    }

    async fn decide_with_receipt(
        &self,
        verb: Verb,
        facts: &Facts<'_>,
    ) -> Result<(Decision, Option<Receipt>), PlanError> {
        // Whole, not guarded: a guard is a slot of its thread, which an await may leave.
        let policy: Arc<Policy> = self.policy();
        let (mut plan, mut outcome, mut decision) = (Plan::new(&policy, verb), Outcome::default(), Decision::default());
        let settled = self.decide(&mut plan, facts, &mut outcome, &mut decision).await?;
        let receipt = if settled && verb != Verb::Peek { plan.receipt(&outcome) } else { None };
        Ok((decision, receipt))
    }
}
