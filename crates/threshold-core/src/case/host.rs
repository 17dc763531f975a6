//! What a case needs of a store: settle, and the verbs that come after.

use crate::key::{Digest, DigestKey, TraceId};
use crate::ledger::Ledger;
use crate::lockout::{Account, Attempt, AttemptOutcome, Login, ResultOutcome, Try, UnknownAttempt};
use crate::plan::{Plan, SubjectKeys};
use crate::receipt::{ActualCost, OnExpire, Receipt, UnknownReservation};
use crate::settle::Outcome;
use crate::time::{Span, Timestamp};

/// A store, as far as cases go.
pub trait Host {
    /// Settles a plan in one step.
    fn settle(&mut self, plan: &Plan<'_>, now: Timestamp) -> Outcome;

    /// Gives a charge back, once. Says whether this was the first time.
    fn refund(&mut self, receipt: &Receipt, now: Timestamp) -> bool;

    /// Holds what a receipt says was charged.
    fn reserve(&mut self, receipt: Receipt, ttl: Span, on_expire: OnExpire, now: Timestamp) -> TraceId;

    /// Ends a reservation with what it really cost.
    ///
    /// # Errors
    /// Where there is no such reservation, or no longer.
    fn commit(
        &mut self,
        id: TraceId,
        actual: &ActualCost<'_>,
        key: DigestKey,
        now: Timestamp,
    ) -> Result<(), UnknownReservation>;

    /// Ends a reservation without any cost.
    ///
    /// # Errors
    /// Where there is no such reservation, or no longer.
    fn release(&mut self, id: TraceId, now: Timestamp) -> Result<(), UnknownReservation>;

    /// Denies a subject until then.
    fn pause(&mut self, keys: &SubjectKeys, until: Timestamp, now: Timestamp);

    /// Forgets what is known of a subject.
    fn forgive(&mut self, keys: &SubjectKeys);

    /// Before a secret is checked.
    fn login_attempt(&mut self, login: &Login, tried: &Try, now: Timestamp) -> AttemptOutcome;

    /// After a secret was checked.
    ///
    /// # Errors
    /// Where the attempt is not under way (any more).
    fn login_result(
        &mut self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        nonce: TraceId,
        now: Timestamp,
    ) -> Result<ResultOutcome, UnknownAttempt>;

    /// Changes what is known of an account.
    fn change_account(&mut self, key: Digest, change: fn(&mut Account));
}

impl Host for Ledger {
    fn settle(&mut self, plan: &Plan<'_>, now: Timestamp) -> Outcome {
        self.settle(plan, now)
    }

    fn refund(&mut self, receipt: &Receipt, now: Timestamp) -> bool {
        self.refund(receipt, now)
    }

    fn reserve(&mut self, receipt: Receipt, ttl: Span, on_expire: OnExpire, _now: Timestamp) -> TraceId {
        self.reserve(receipt, ttl, on_expire)
    }

    fn commit(
        &mut self,
        id: TraceId,
        actual: &ActualCost<'_>,
        key: DigestKey,
        now: Timestamp,
    ) -> Result<(), UnknownReservation> {
        self.commit(id, actual, key, now)
    }

    fn release(&mut self, id: TraceId, now: Timestamp) -> Result<(), UnknownReservation> {
        self.release(id, now)
    }

    fn pause(&mut self, keys: &SubjectKeys, until: Timestamp, _now: Timestamp) {
        self.pause(keys, until);
    }

    fn forgive(&mut self, keys: &SubjectKeys) {
        self.forgive(keys);
    }

    fn login_attempt(&mut self, login: &Login, tried: &Try, now: Timestamp) -> AttemptOutcome {
        self.login_attempt(login, tried, now)
    }

    fn login_result(
        &mut self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        nonce: TraceId,
        now: Timestamp,
    ) -> Result<ResultOutcome, UnknownAttempt> {
        self.login_result(login, attempt, success, nonce, now)
    }

    fn change_account(&mut self, key: Digest, change: fn(&mut Account)) {
        change(self.account(key));
    }
}
