//! Pauses: a key is denied for a while, as a provider's own `Retry-After` asks for, and what ends them.

use std::time::Duration;

use threshold_core::Facts;
use threshold_core::command::Command;
use threshold_core::plan::SubjectKeys;
use threshold_core::policy::{Layer, Policy};

use super::Limiter;
use crate::clock::Clock;
use crate::observer::Operation;
use crate::store::{ImmediateStore, Store, StoreError, at_once};

/// Why nothing was paused or forgiven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PauseError {
    /// No rule counts by this subject alone.
    #[error("no rule counts by this subject alone: pause_rule pauses what a rule counts by, such as a host")]
    NoSubject,
    /// No rule has this name.
    #[error("no rule has this name")]
    NoRule,
    /// The facts lack what the rule counts by, or it has no limit for them.
    #[error("the request lacks what the rule counts by, or the rule has no limit for it")]
    NoKey,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl<S: ImmediateStore, C: Clock> Limiter<S, C> {
    /// Denies a subject for `length`, under every rule that counts by it alone.
    ///
    /// # Errors
    /// Returns an error if no rule counts by this subject alone, or if the store cannot answer.
    pub fn pause(&self, layer: Layer, key: &str, length: Duration) -> Result<(), PauseError> {
        at_once(self.pause_async(layer, key, length))
    }

    /// Denies for `length` whatever a rule counts under the same key as a request with these facts, as a provider's own
    /// `Retry-After` asks for. Only what the rule counts by has to be in them; its `match` does not matter.
    ///
    /// ```
    /// use std::time::Duration;
    /// use threshold_limiter::threshold_core::policy::{Per, Rule};
    /// use threshold_limiter::{Facts, Limit, Limiter, Policy};
    ///
    /// let rule = Rule::builder("provider").per([Per::Host]).limit(Limit::per_second(10));
    /// let limiter = Limiter::new(Policy::builder().rule(rule).build()?);
    /// let call = Facts { host: Some("api.example.com"), ..Facts::default() };
    /// assert!(limiter.check(&call)?.allowed());
    /// // It answered 429 with `Retry-After: 30`.
    /// limiter.pause_rule("provider", &call, Duration::from_secs(30))?;
    /// assert_eq!(limiter.check(&call)?.retry_after_secs(), Some(30));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if no rule has this name, if the facts lack what it counts by, or if the store cannot answer.
    pub fn pause_rule(&self, rule: &str, facts: &Facts<'_>, length: Duration) -> Result<(), PauseError> {
        at_once(self.pause_rule_async(rule, facts, length))
    }

    /// Clears what a rule has counted under the same key as a request with these facts, with its pause.
    ///
    /// # Errors
    /// As for [`pause_rule`](Self::pause_rule).
    pub fn forgive_rule(&self, rule: &str, facts: &Facts<'_>) -> Result<(), PauseError> {
        at_once(self.forgive_rule_async(rule, facts))
    }
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Does what [`pause`](Self::pause) does, on any store.
    ///
    /// # Errors
    /// As for [`pause`](Self::pause).
    pub async fn pause_async(&self, layer: Layer, key: &str, length: Duration) -> Result<(), PauseError> {
        let keys = self.policy().keys_of(layer, key);
        self.pause_keys(keys, length, PauseError::NoSubject).await
    }

    /// Does what [`pause_rule`](Self::pause_rule) does, on any store.
    ///
    /// # Errors
    /// As for [`pause_rule`](Self::pause_rule).
    pub async fn pause_rule_async(&self, rule: &str, facts: &Facts<'_>, length: Duration) -> Result<(), PauseError> {
        let policy = self.policy();
        let keys = policy.keys_of_rule(rule, facts);
        self.pause_keys(keys, length, no_key(&policy, rule)).await
    }

    /// Does what [`forgive_rule`](Self::forgive_rule) does, on any store.
    ///
    /// # Errors
    /// As for [`pause_rule`](Self::pause_rule).
    pub async fn forgive_rule_async(&self, rule: &str, facts: &Facts<'_>) -> Result<(), PauseError> {
        let policy = self.policy();
        let keys = policy.keys_of_rule(rule, facts);
        let room: Vec<_> = keys.balances.keys().copied().collect();
        let Some(first) = room.first().copied() else { return Err(no_key(&policy, rule)) };
        self.perform(Operation::Forgive, Some(first), async {
            self.execute(Command::Forgive { keys }).await?;
            // Its records may not have moved to the present secret yet.
            self.forgive_previous(|previous| previous.keys_of_rule(rule, facts)).await
        })
        .await?;
        self.made_room(room);
        Ok(())
    }

    async fn pause_keys(&self, keys: SubjectKeys, length: Duration, none: PauseError) -> Result<(), PauseError> {
        let Some(first) = keys.balances.keys().next().copied() else { return Err(none) };
        let pause = Command::Pause { keys, length: length.into() };
        self.perform(Operation::Pause, Some(first), async { self.execute(pause).await.map(drop) }).await?;
        Ok(())
    }
}

/// Returns why a rule has no key.
fn no_key(policy: &Policy, rule: &str) -> PauseError {
    let is_known = policy.rules().iter().any(|known| *known.name == *rule);
    if is_known { PauseError::NoKey } else { PauseError::NoRule }
}
