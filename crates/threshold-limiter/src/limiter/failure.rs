//! Decisions while the store fails: the one place that applies `on_store_error`.
//!
//! `StoreError::Full` is an answer, and a denial in every mode: the store holds only what it must not evict, and the policy
//! forbids shared budgets.
//!
//! Without the feature `memory` there is no stand-in for the store, so `on_store_error = "local"` decides as on a node without a
//! share: it denies.

#[cfg(feature = "memory")]
use threshold_core::command::{Answer, Command};
#[cfg(feature = "memory")]
use threshold_core::limit::SlidingLog;
use threshold_core::lockout::{Attempt, AttemptKeys, AttemptOutcome, Login, ResultOutcome};
use threshold_core::plan::Verb;
use threshold_core::policy::{OnStoreError, Policy};
use threshold_core::{Balance, Decision, Plan, Timestamp, TraceId};
#[cfg(feature = "memory")]
use threshold_core::{Limit, Outcome};

use super::Limiter;
use crate::clock::Clock;
#[cfg(feature = "memory")]
use crate::store::memory::MemoryStore;
#[cfg(feature = "memory")]
use crate::store::{Share, at_once};
use crate::store::{Store, StoreError};

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Decides without the store. The decision has no strikes and no receipt: the store does not know what the stand-in has
    /// charged.
    #[cold]
    pub(super) fn decide_without_store(&self, plan: &Plan<'_>, error: StoreError, now: Timestamp) -> Decision {
        if error != StoreError::Timeout {
            return self.decide_unsent(plan, error, now);
        }
        let decision = self.decide_by_mode(plan, error, now);
        // It may be executed yet. The late answer shows whether something is to be recorded or given back.
        if plan.verb() != Verb::Peek {
            self.blind.awaits(plan.bill(), decision.allowed(), now);
        }
        decision
    }

    /// Decides without the store what it has certainly not executed. It hears of that later, but not after a timeout: what did not come
    /// in time was the move of older records (a rotation), and a charge before it would begin new ones in their place.
    #[cold]
    pub(super) fn decide_unsent(&self, plan: &Plan<'_>, error: StoreError, now: Timestamp) -> Decision {
        let decision = self.decide_by_mode(plan, error, now);
        if plan.verb() != Verb::Peek && decision.allowed() {
            match error {
                StoreError::Unavailable => self.blind.add(plan.bill(), now),
                StoreError::Timeout => self.blind.lose(plan.bill()),
                StoreError::Full => {}
            }
        }
        decision
    }

    pub(super) fn decide_by_mode(&self, plan: &Plan<'_>, error: StoreError, now: Timestamp) -> Decision {
        let reason = error.into();
        // A penalty in force denies in every mode, and so no mode lets a caller off who is known to be banned.
        if let Some(mut decision) = self.penalties.decide(plan, self.clock.now()) {
            decision.degraded = Some(reason);
            return decision;
        }
        let mut decision = self.decide_unpunished(plan, error, now);
        // A shadow ban must not be noticed by its end during an outage.
        if plan.verb() != Verb::Record && self.penalties.is_shadowed(plan, self.clock.now()) {
            plan.slow_down(&mut decision);
        }
        decision
    }

    fn decide_unpunished(&self, plan: &Plan<'_>, error: StoreError, now: Timestamp) -> Decision {
        let reason = error.into();
        // A record is of something that has happened, and is never denied.
        let otherwise = || plan.decide_blind(plan.verb() == Verb::Record, reason, now);
        match (error, plan.on_store_error()) {
            (StoreError::Full, _) | (_, OnStoreError::Closed) => otherwise(),
            (_, OnStoreError::Open) => plan.decide_blind(true, reason, now),
            #[cfg(not(feature = "memory"))]
            (_, OnStoreError::Local) => otherwise(),
            #[cfg(feature = "memory")]
            (_, OnStoreError::Local) => {
                // A node that the others have not counted has no share: theirs may already add up to the limit.
                let Some(Share { nodes, place }) = self.store.share() else { return otherwise() };
                let bill = plan.local_bill(place, nodes);
                let mut outcome = Outcome::default();
                // The stand-in is kept when the store returns, so that a store which comes and goes does not give each node a
                // fresh share every time.
                match self.stand_in(plan.policy()).settle_now(&bill.as_bill(), Some(plan), now, &mut outcome) {
                    Ok(()) => {
                        let mut decision = plan.decide(&outcome);
                        decision.degraded = Some(reason);
                        decision
                    }
                    // The stand-in is full as well.
                    Err(_) => otherwise(),
                }
            }
        }
    }

    /// Decides a login attempt without the store.
    #[cold]
    pub(super) fn attempt_without_store(
        &self,
        #[cfg_attr(not(feature = "memory"), expect(unused_variables, reason = "it sizes the stand-in"))]
        policy: &Policy,
        login: &Login,
        tried: &AttemptKeys,
        error: StoreError,
        now: Timestamp,
    ) -> Result<AttemptOutcome, StoreError> {
        // In every mode, as with penalties: a lock that is known must not be opened.
        if let Some(locked) = self.locks.refuse(tried, now) {
            return Ok(locked);
        }
        match (error, login.on_store_error) {
            (StoreError::Full, _) | (_, OnStoreError::Closed) => Err(error),
            (_, OnStoreError::Open) => {
                // Without an account and an address the attempt is not counted, and its result changes nothing.
                let uncounted = AttemptKeys { account: None, address: None, device: None, ..*tried };
                Ok(login.attempt(&uncounted, None, &mut Balance::default(), now))
            }
            #[cfg(not(feature = "memory"))]
            (_, OnStoreError::Local) => Err(error),
            #[cfg(feature = "memory")]
            (_, OnStoreError::Local) => {
                let login = self.store.share().and_then(|share| login_share(login, share)).ok_or(error)?;
                let command = Command::BeginLogin { login, keys: *tried };
                match at_once(self.stand_in(policy).execute(command, now))? {
                    Answer::Attempted { outcome, .. } => Ok(outcome),
                    other => Err(StoreError::unexpected(other)),
                }
            }
        }
    }

    /// Ends an attempt that the stand-in has decided; returns `None` for every other attempt.
    #[cfg(feature = "memory")]
    pub(super) fn result_without_store(
        &self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        nonce: TraceId,
        now: Timestamp,
    ) -> Option<ResultOutcome> {
        // Without an account nothing shows which store decided the attempt. The store may have it: it refunds only a
        // charge that it made itself at that microsecond.
        let stand_in = self.stand_in.get().filter(|_| attempt.account.is_some())?;
        let command = Command::EndLogin { login: login.clone(), attempt: *attempt, success, nonce };
        match at_once(stand_in.execute(command, now)) {
            Ok(Answer::LoginEnded { ended, .. }) => ended.ok(),
            _ => None,
        }
    }

    /// Returns `None`: without a stand-in no attempt was decided by one.
    #[cfg(not(feature = "memory"))]
    #[expect(clippy::unused_self, reason = "the signature is that of a limiter with a stand-in")]
    pub(super) fn result_without_store(
        &self,
        _: &Login,
        _: &Attempt,
        _: bool,
        _: TraceId,
        _: Timestamp,
    ) -> Option<ResultOutcome> {
        None
    }

    /// Returns the stand-in for the store, created at the first failure. Its table is sized by the policy's `[memory]`;
    /// memory that no key has used is not taken from the system.
    #[cfg(feature = "memory")]
    fn stand_in(&self, policy: &Policy) -> &MemoryStore {
        self.stand_in.get_or_init(|| MemoryStore::new(policy.memory()))
    }
}

/// Returns the login with this node's share of its budgets; `None` if nothing is left of one.
#[cfg(feature = "memory")]
fn login_share(login: &Login, Share { nodes, place }: Share) -> Option<Login> {
    let share = |budget: SlidingLog| Limit::from(budget).share(place, nodes).as_sliding_log();
    Some(Login { account: share(login.account)?, ip: share(login.ip)?, ..login.clone() })
}
