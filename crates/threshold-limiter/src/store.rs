//! What a store is: it loads, calls core's `settle`, and saves. It does not know what a rule is.

pub mod memory;

use std::fmt;

use threshold_core::lockout::{Account, Attempt, AttemptOutcome, Login, ResultOutcome, Try, UnknownAttempt};
use threshold_core::plan::SubjectKeys;
use threshold_core::receipt::{ActualCost, OnExpire, UnknownReservation};
use threshold_core::{Digest, DigestKey, Outcome, Plan, Receipt, Span, Timestamp, TraceId};

/// Why a store could not answer. What becomes of the request then is the policy's to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreError {
    /// Everything it holds is protected, and the policy says to deny what is new.
    Full,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the store is full of protected keys"),
        }
    }
}

impl std::error::Error for StoreError {}

/// A store in this process: it answers at once.
pub trait LocalStore: Send + Sync {
    /// Settles a plan in one step, into an outcome that is already there.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError>;

    /// Gives a charge back, once. Says whether this was the first time.
    fn refund(&self, receipt: &Receipt, now: Timestamp) -> bool;

    /// Gives back what was taken out of a [`Pending`](threshold_core::receipt::Pending), which its owner does once:
    /// there is nothing to remember, and so nothing that could be full.
    fn give_back(&self, taken: &Receipt, now: Timestamp);

    /// Holds what a receipt says was charged.
    ///
    /// # Errors
    /// Where there is room for no more reservations.
    fn reserve(&self, receipt: Receipt, ttl: Span, on_expire: OnExpire, now: Timestamp) -> Result<TraceId, StoreError>;

    /// Ends a reservation with what it really cost.
    ///
    /// # Errors
    /// Where there is no such reservation, or no longer.
    fn commit(
        &self,
        id: TraceId,
        actual: &ActualCost<'_>,
        key: DigestKey,
        now: Timestamp,
    ) -> Result<(), UnknownReservation>;

    /// Ends a reservation without any cost.
    ///
    /// # Errors
    /// Where there is no such reservation, or no longer.
    fn release(&self, id: TraceId, now: Timestamp) -> Result<(), UnknownReservation>;

    /// Denies these keys until then.
    fn pause(&self, keys: &SubjectKeys, until: Timestamp, now: Timestamp);

    /// Forgets what is known of these keys.
    fn forgive(&self, keys: &SubjectKeys);

    /// Before a secret is checked.
    ///
    /// # Errors
    /// Where there is room for no more accounts.
    fn login_attempt(&self, login: &Login, tried: &Try, now: Timestamp) -> Result<AttemptOutcome, StoreError>;

    /// After a secret was checked.
    ///
    /// # Errors
    /// Where the attempt is not under way (any more).
    fn login_result(
        &self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        nonce: TraceId,
        now: Timestamp,
    ) -> Result<ResultOutcome, UnknownAttempt>;

    /// Changes what is known of an account: a reset, or an operator's pardon.
    fn change_account(&self, key: Digest, change: fn(&mut Account));
}
