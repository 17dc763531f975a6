//! The operations on any store, as async functions. On an `ImmediateStore` each is ready at the first poll.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use threshold_core::balance::Checked;
use threshold_core::command::{Answer, Command};
use threshold_core::key::TextKeys;
use threshold_core::lockout::Account;
use threshold_core::plan::{Known, SubjectKeys, Verb};
use threshold_core::policy::Layer;
use threshold_core::receipt::{ActualCost, History, OnExpire};
use threshold_core::{
    Decision, Digest, Facts, Limit, Outcome, Plan, PlanError, Policy, Receipt, Standing, Timestamp, TraceId,
};

use super::{LimitDecision, Limiter, Reserved};
use crate::clock::Clock;
use crate::observer::Operation;
use crate::random_id;
use crate::store::{EndError, Kind, Listed, Store, StoreError};

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Does what [`check`](Self::check) does, on any store.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub async fn check_async(&self, facts: &Facts<'_>) -> Result<Decision, PlanError> {
        self.decide_only(Verb::Check, facts).await
    }

    /// Does what [`check_with_receipt`](Self::check_with_receipt) does, on any store.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub async fn check_with_receipt_async(&self, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        self.decide_with_receipt(Verb::Check, facts).await
    }

    /// Does what [`check_many`](Self::check_many) does, on any store.
    pub async fn check_many_async(&self, requests: &[Facts<'_>]) -> Vec<Result<Decision, PlanError>> {
        let mut decisions = Vec::with_capacity(requests.len());
        // One after the other: a request must see what the ones before it have charged.
        for facts in requests {
            decisions.push(self.check_async(facts).await);
        }
        decisions
    }

    /// Does what [`peek`](Self::peek) does, on any store.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub async fn peek_async(&self, facts: &Facts<'_>) -> Result<Decision, PlanError> {
        self.decide_only(Verb::Peek, facts).await
    }

    /// Does what [`record`](Self::record) does, on any store.
    ///
    /// # Errors
    /// As for [`record`](Self::record).
    pub async fn record_async(&self, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        self.decide_with_receipt(Verb::Record, facts).await
    }

    /// Does what [`refund`](Self::refund) does, on any store.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn refund_async(&self, receipt: &Receipt) -> Result<bool, StoreError> {
        let receipt = self.present_receipt(receipt);
        self.perform(Operation::Refund, receipt.keys().next(), async {
            match self.execute(Command::Refund(Box::new(receipt.clone().into_owned()))).await? {
                Answer::Refunded { first } => {
                    self.made_room(receipt.keys());
                    Ok(first)
                }
                other => Err(StoreError::unexpected(other)),
            }
        })
        .await
    }

    /// Does what [`reserve`](Self::reserve) does, on any store.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub async fn reserve_async(
        &self,
        facts: &Facts<'_>,
        ttl: Duration,
        on_expire: OnExpire,
    ) -> Result<Reserved, PlanError> {
        self.reserve_under(&self.policy(), facts, ttl, on_expire).await
    }

    /// Does what [`commit`](Self::commit) does, on any store.
    ///
    /// # Errors
    /// Returns an error if the reservation is unknown, has ended or was committed with another cost, or if the store cannot
    /// answer.
    pub async fn commit_async(&self, reservation: TraceId, actual: &ActualCost<'_>) -> Result<(), EndError> {
        self.end(Operation::Commit, Command::Commit { id: reservation, cost: actual.owned() }).await
    }

    /// Does what [`release`](Self::release) does, on any store.
    ///
    /// # Errors
    /// As for [`commit_async`](Self::commit_async).
    pub async fn release_async(&self, reservation: TraceId) -> Result<(), EndError> {
        self.end(Operation::Release, Command::Release { id: reservation }).await
    }

    /// Does what [`forgive`](Self::forgive) does, on any store.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn forgive_async(&self, layer: Layer, key: &str) -> Result<(), StoreError> {
        let keys = self.policy().forgiven_keys(layer, key);
        let (room, standings): (Vec<_>, _) = (keys.all().collect(), keys.standings.clone());
        self.perform(Operation::Forgive, room.first().copied(), async {
            self.execute(Command::Forgive { keys }).await?;
            // Only after the store has forgiven: until then the ban is in force, and operators need its name.
            for standing in standings {
                self.bans.forget_name(standing);
            }
            // Its records may not have moved to the present secret yet.
            self.forgive_previous(|previous| previous.forgiven_keys(layer, key)).await?;
            self.made_room(room);
            Ok(())
        })
        .await
    }

    /// Decides one cost on one key under one limit, without a policy. Such keys never collide with those of rules.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn check_limit(&self, key: &str, limit: &Limit, cost: u64) -> Result<LimitDecision, StoreError> {
        let text = key;
        let key = TextKeys::new(self.policy().key(), limit).digest(text);
        self.perform(Operation::Limit, Some(key), self.decide_limit(text, key, limit, cost)).await
    }

    async fn decide_limit(
        &self,
        text: &str,
        key: Digest,
        limit: &Limit,
        cost: u64,
    ) -> Result<LimitDecision, StoreError> {
        if self.store.answers_at_once() {
            return self
                .ask_limit(text, key, limit, cost)
                .await
                .map(|(checked, at)| LimitDecision::new(limit, &checked, at));
        }
        let begun = self.moment();
        if let Some((look, now)) = self.denials.repeat_limit(key, limit, cost, begun) {
            return Ok(LimitDecision::new(
                limit,
                &Checked { look, mark: None, changed: false, history: History::default() },
                now,
            ));
        }
        let before = self.denials.version(key);
        let (checked, at) = self.ask_limit(text, key, limit, cost).await?;
        let denied = Known::of_denied_limit(limit, cost, &checked.look, at);
        // A look that charges nothing leaves the denials as they are.
        if denied.is_some() || checked.mark.is_some() {
            self.denials.keep_limit(key, denied, (before, begun.own, self.moment()));
        }
        Ok(LimitDecision::new(limit, &checked, at))
    }

    async fn ask_limit(
        &self,
        text: &str,
        key: Digest,
        limit: &Limit,
        cost: u64,
    ) -> Result<(Checked, Timestamp), StoreError> {
        self.rekey_text(text, key, limit).await?;
        let command = Command::Limit { key, limit: *limit, cost, id: random_id() };
        match self.execute(command).await? {
            Answer::Limited { checked, at } => Ok((checked, at)),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// Returns the standing of the subject with this key.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn standing(&self, key: Digest) -> Result<Option<Standing>, StoreError> {
        match self.execute(Command::ReadStanding { key }).await? {
            Answer::Standing(standing) => Ok(standing.map(|standing| *standing)),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// Returns until when a pause or a rule's `block_for` denies a subject under at least one of its limits; `None` if nothing
    /// does.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn blocked_until(&self, keys: SubjectKeys) -> Result<Option<SystemTime>, StoreError> {
        match self.execute(Command::ReadBlock { keys }).await? {
            Answer::Blocked(until) => Ok(until.map(SystemTime::from)),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// Returns the login account with this key.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn account(&self, account: Digest) -> Result<Option<Account>, StoreError> {
        match self.execute(Command::ReadAccount { account }).await? {
            Answer::Account(account) => Ok(account.map(|account| *account)),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// Lists the stored records of one kind; see [`Store::list`].
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn list(&self, kind: Kind, after: Option<Digest>, limit: usize) -> Result<Vec<Listed>, StoreError> {
        self.store.list(kind, after, limit, self.time()).await
    }

    /// Executes a command on the store.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn execute(&self, command: Command) -> Result<Answer, StoreError> {
        if self.store.answers_at_once() {
            return self.store.execute(command, self.time()).await;
        }
        let changed = changed_keys(&command);
        let (account, standings) = match &command {
            Command::ChangeAccount { account, .. } => (Some(*account), BTreeSet::new()),
            Command::Forgive { keys } => (None, keys.standings.clone()),
            _ => (None, BTreeSet::new()),
        };
        let answered = self.store.execute(command, self.time()).await;
        // Also after a failure: the store may have carried it out all the same.
        self.denials.forget(changed);
        // What it certainly has not carried out must not open a penalty or a lock that is known here.
        if answered != Err(StoreError::Unavailable) {
            self.penalties.forgive(&standings);
            if let Some(account) = account {
                self.locks.forget(account);
            }
        }
        answered
    }

    async fn end(&self, operation: Operation, command: Command) -> Result<(), EndError> {
        self.perform(operation, None, async {
            match self.execute(command).await? {
                Answer::Ended(ended) => {
                    self.made_room(ended?);
                    Ok(())
                }
                other => Err(StoreError::unexpected(other).into()),
            }
        })
        .await
    }

    /// Decides without making a receipt.
    async fn decide_only(&self, verb: Verb, facts: &Facts<'_>) -> Result<Decision, PlanError> {
        let policy: Arc<Policy> = self.policy();
        let (mut plan, mut outcome, mut decision) = (Plan::new(&policy, verb), Outcome::default(), Decision::default());
        self.decide(&mut plan, facts, &mut outcome, &mut decision).await?;
        Ok(decision)
    }

    async fn decide_with_receipt(
        &self,
        verb: Verb,
        facts: &Facts<'_>,
    ) -> Result<(Decision, Option<Receipt>), PlanError> {
        // An `Arc`, not a guard: a guard of `arc-swap` belongs to its thread, and this may resume on another.
        let policy: Arc<Policy> = self.policy();
        let (mut plan, mut outcome, mut decision) = (Plan::new(&policy, verb), Outcome::default(), Decision::default());
        let settled = self.decide(&mut plan, facts, &mut outcome, &mut decision).await?;
        let receipt = if settled.answered && verb != Verb::Peek { plan.receipt(&outcome) } else { None };
        Ok((decision, receipt))
    }
}

/// Returns the keys under which a request may be decided otherwise after this command than before it.
fn changed_keys(command: &Command) -> Vec<Digest> {
    match command {
        Command::Refund(receipt) | Command::GiveBack { receipt, .. } | Command::Renew(receipt) => {
            receipt.keys().collect()
        }
        Command::Pause { keys, .. } | Command::Forgive { keys } => keys.all().collect(),
        Command::Credit { key, .. } => vec![*key],
        // The keys of a reservation come with the answer. Other commands change nothing that a denial depends on.
        _ => Vec::new(),
    }
}
