//! What becomes of a request when the store cannot answer: the one place where `on_store_error` is obeyed.
//!
//! A store that is full has answered, and what it says is a denial in every mode: it holds nothing but what must not be
//! forgotten, and its policy says not to share.

use threshold_core::command::{Answer, Command};
use threshold_core::lockout::{Attempt, AttemptOutcome, Login, ResultOutcome, Try};
use threshold_core::plan::Verb;
use threshold_core::policy::{OnStoreError, Policy};
use threshold_core::{Balance, Decision, Outcome, Plan, Timestamp, TraceId};

use super::Limiter;
use crate::store::memory::MemoryStore;
use crate::store::{Store as _, StoreError, at_once};

impl<S, C> Limiter<S, C> {
    /// The decision without the store. It strikes nobody, and there is no receipt for it: what a stand-in charged, the
    /// store never heard of.
    #[cold]
    pub(super) fn decide_without_store(&self, plan: &Plan<'_>, error: StoreError, now: Timestamp) -> Decision {
        let reason = error.into();
        // What has happened is not denied.
        let otherwise = || plan.decide_blind(plan.verb() == Verb::Record, reason, now);
        match (error, plan.on_store_error()) {
            (StoreError::Full, _) | (_, OnStoreError::Closed) => otherwise(),
            (_, OnStoreError::Open) => plan.decide_blind(true, reason, now),
            (_, OnStoreError::Local) => {
                let plan = plan.clone().without_punishment();
                let mut outcome = Outcome::default();
                match at_once(self.stand_in(plan.policy()).settle(&plan, now, &mut outcome)) {
                    Ok(()) => Decision { degraded: Some(reason), ..plan.decide(&outcome) },
                    Err(_) => otherwise(),
                }
            }
        }
    }

    /// What a login is told without the store.
    #[cold]
    pub(super) fn attempt_without_store(
        &self,
        policy: &Policy,
        login: &Login,
        tried: &Try,
        error: StoreError,
        now: Timestamp,
    ) -> Result<AttemptOutcome, StoreError> {
        match (error, login.on_store_error) {
            (StoreError::Full, _) | (_, OnStoreError::Closed) => Err(error),
            (_, OnStoreError::Open) => {
                // An attempt on nobody, from nowhere: its result is taken and changes nothing.
                let nobody = Try { account: None, address: None, device: None, ..*tried };
                Ok(login.attempt(&nobody, None, &mut Balance::default(), now))
            }
            (_, OnStoreError::Local) => {
                let command = Command::BeginLogin { login: login.clone(), tried: *tried };
                match at_once(self.stand_in(policy).execute(command, now))? {
                    Answer::Attempted(outcome) => Ok(outcome),
                    other => Err(StoreError::unexpected(other)),
                }
            }
        }
    }

    /// What a login is told after an attempt that the stand-in has decided; `None` for every other attempt.
    pub(super) fn result_without_store(
        &self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        nonce: TraceId,
        now: Timestamp,
    ) -> Option<ResultOutcome> {
        // Without an account nothing tells whose an attempt is. The store takes it: it gives back no charge but one it
        // made at that very microsecond.
        let stand_in = self.stand_in.get().filter(|_| attempt.account.is_some())?;
        let command = Command::EndLogin { login: login.clone(), attempt: *attempt, success, nonce };
        match at_once(stand_in.execute(command, now)) {
            Ok(Answer::LoginEnded(ended)) => ended.ok(),
            _ => None,
        }
    }

    /// A store of this process alone, from the first failure on. Its table is as large as the policy's, and what it does
    /// not touch costs nothing.
    fn stand_in(&self, policy: &Policy) -> &MemoryStore {
        self.stand_in.get_or_init(|| MemoryStore::new(policy.memory()))
    }
}
