//! What a store is: it loads, calls core's `settle`, and saves. It does not know what a rule is.

mod keep;
pub mod memory;

use std::fmt;
use std::future::Future;

use threshold_core::decision::Degraded;

// Whoever writes a store needs the words that its signatures are made of.
pub use threshold_core::lockout::{Account, Attempt, AttemptOutcome, Login, ResultOutcome, Try, UnknownAttempt, Wider};
pub use threshold_core::plan::SubjectKeys;
pub use threshold_core::receipt::{ActualCost, CommitError, OnExpire, UnknownReservation};
pub use threshold_core::{Digest, DigestKey, Outcome, Plan, Receipt, Span, Timestamp, TraceId};

pub use keep::{Keep, Saving};

/// Why a store could not answer. What becomes of the request then is the policy's to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// Everything it holds is protected, and the policy says to deny what is new.
    Full,
    /// It did not answer in time. What was asked may have happened all the same.
    Timeout,
    /// It cannot be reached, or answered something else than was asked.
    Unavailable,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the store is full of protected keys",
            Self::Timeout => "the store did not answer in time",
            Self::Unavailable => "the store cannot be reached",
        })
    }
}

impl std::error::Error for StoreError {}

impl From<StoreError> for Degraded {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Full => Self::StoreFull,
            StoreError::Timeout => Self::Timeout,
            StoreError::Unavailable => Self::StoreError,
        }
    }
}

/// Why something under way, a reservation or a login attempt, was not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndError {
    /// There is none such, or no longer.
    Unknown,
    /// A reservation that was committed before, with another cost, which stays.
    OtherCost,
    /// The store could not answer.
    Store(StoreError),
}

impl fmt::Display for EndError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("there is none such, or no longer"),
            Self::OtherCost => CommitError::OtherCost.fmt(f),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for EndError {}

impl From<StoreError> for EndError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<UnknownReservation> for EndError {
    fn from(_: UnknownReservation) -> Self {
        Self::Unknown
    }
}

impl From<CommitError> for EndError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::OtherCost => Self::OtherCost,
            _ => Self::Unknown,
        }
    }
}

impl From<UnknownAttempt> for EndError {
    fn from(_: UnknownAttempt) -> Self {
        Self::Unknown
    }
}

/// A store in this process: it answers at once, and fails at nothing but for want of room.
pub trait LocalStore: Send + Sync {
    /// Says that a plan with this key is about to be settled. A store may fetch what it will need; nothing else may come
    /// of it.
    fn expect(&self, key: Digest) {
        let _ = key;
    }

    /// Settles a plan in one step, into an outcome that is already there.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError>;

    /// Gives a charge back, once. Says whether this was the first time.
    ///
    /// # Errors
    /// Where there is no room to remember it: then nothing is given back, and it can be tried again later.
    fn refund(&self, receipt: &Receipt, now: Timestamp) -> Result<bool, StoreError>;

    /// Gives back what was taken out of a [`Pending`](threshold_core::receipt::Pending), which its owner does once:
    /// there is nothing to remember, and so nothing that could be full.
    fn give_back(&self, taken: &Receipt, now: Timestamp);

    /// Charges anew what a request was charged when it came, as [`Receipt::renew`] does, in one step.
    fn renew(&self, charged: &mut Receipt, now: Timestamp);

    /// Holds what a receipt says was charged.
    ///
    /// # Errors
    /// Where there is room for no more reservations.
    fn reserve(&self, receipt: Receipt, ttl: Span, on_expire: OnExpire, now: Timestamp) -> Result<TraceId, StoreError>;

    /// Ends a reservation with what it really cost. Returns the keys it was charged to: there may be room under them now.
    ///
    /// # Errors
    /// Where there is no such reservation, or no longer, or where it was committed with another cost.
    fn commit(
        &self,
        id: TraceId,
        actual: &ActualCost<'_>,
        key: DigestKey,
        now: Timestamp,
    ) -> Result<Vec<Digest>, CommitError>;

    /// Ends a reservation without any cost. Returns the keys it was charged to, as [`commit`](Self::commit) does.
    ///
    /// # Errors
    /// Where there is no such reservation, or no longer.
    fn release(&self, id: TraceId, now: Timestamp) -> Result<Vec<Digest>, UnknownReservation>;

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

    /// Whether what was changed is safe from the end of the process; `None` where nothing ever is.
    fn saving(&self) -> Option<Saving> {
        None
    }
}

/// A store anywhere: the operations of a [`LocalStore`], each of which may take a while and may fail. Every local store is
/// one, and answers at the first poll.
///
/// A store across a network keeps the deadline of a decision itself: only it can tell a request that was never sent from
/// one whose answer is lost. It answers [`StoreError::Timeout`] when its deadline has passed. A future that is dropped
/// before it is ready may have done what it was asked or not, as after a timeout.
pub trait Store: Send + Sync {
    /// As [`LocalStore::settle`].
    fn settle(
        &self,
        plan: &Plan<'_>,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// As [`LocalStore::refund`].
    fn refund(&self, receipt: &Receipt, now: Timestamp) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// As [`LocalStore::give_back`].
    fn give_back(&self, taken: &Receipt, now: Timestamp) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// As [`LocalStore::reserve`].
    fn reserve(
        &self,
        receipt: Receipt,
        ttl: Span,
        on_expire: OnExpire,
        now: Timestamp,
    ) -> impl Future<Output = Result<TraceId, StoreError>> + Send;

    /// As [`LocalStore::commit`].
    fn commit(
        &self,
        id: TraceId,
        actual: &ActualCost<'_>,
        key: DigestKey,
        now: Timestamp,
    ) -> impl Future<Output = Result<Vec<Digest>, EndError>> + Send;

    /// As [`LocalStore::release`].
    fn release(&self, id: TraceId, now: Timestamp) -> impl Future<Output = Result<Vec<Digest>, EndError>> + Send;

    /// As [`LocalStore::pause`].
    fn pause(
        &self,
        keys: &SubjectKeys,
        until: Timestamp,
        now: Timestamp,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// As [`LocalStore::forgive`].
    fn forgive(&self, keys: &SubjectKeys) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// As [`LocalStore::login_attempt`].
    fn login_attempt(
        &self,
        login: &Login,
        tried: &Try,
        now: Timestamp,
    ) -> impl Future<Output = Result<AttemptOutcome, StoreError>> + Send;

    /// As [`LocalStore::login_result`].
    fn login_result(
        &self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        nonce: TraceId,
        now: Timestamp,
    ) -> impl Future<Output = Result<ResultOutcome, EndError>> + Send;

    /// As [`LocalStore::change_account`].
    fn change_account(
        &self,
        key: Digest,
        change: fn(&mut Account),
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}

impl<S: LocalStore> Store for S {
    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        LocalStore::settle(self, plan, now, outcome)
    }

    async fn refund(&self, receipt: &Receipt, now: Timestamp) -> Result<bool, StoreError> {
        LocalStore::refund(self, receipt, now)
    }

    async fn give_back(&self, taken: &Receipt, now: Timestamp) -> Result<(), StoreError> {
        LocalStore::give_back(self, taken, now);
        Ok(())
    }

    async fn reserve(
        &self,
        receipt: Receipt,
        ttl: Span,
        on_expire: OnExpire,
        now: Timestamp,
    ) -> Result<TraceId, StoreError> {
        LocalStore::reserve(self, receipt, ttl, on_expire, now)
    }

    async fn commit(
        &self,
        id: TraceId,
        actual: &ActualCost<'_>,
        key: DigestKey,
        now: Timestamp,
    ) -> Result<Vec<Digest>, EndError> {
        Ok(LocalStore::commit(self, id, actual, key, now)?)
    }

    async fn release(&self, id: TraceId, now: Timestamp) -> Result<Vec<Digest>, EndError> {
        Ok(LocalStore::release(self, id, now)?)
    }

    async fn pause(&self, keys: &SubjectKeys, until: Timestamp, now: Timestamp) -> Result<(), StoreError> {
        LocalStore::pause(self, keys, until, now);
        Ok(())
    }

    async fn forgive(&self, keys: &SubjectKeys) -> Result<(), StoreError> {
        LocalStore::forgive(self, keys);
        Ok(())
    }

    async fn login_attempt(&self, login: &Login, tried: &Try, now: Timestamp) -> Result<AttemptOutcome, StoreError> {
        LocalStore::login_attempt(self, login, tried, now)
    }

    async fn login_result(
        &self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        nonce: TraceId,
        now: Timestamp,
    ) -> Result<ResultOutcome, EndError> {
        Ok(LocalStore::login_result(self, login, attempt, success, nonce, now)?)
    }

    async fn change_account(&self, key: Digest, change: fn(&mut Account)) -> Result<(), StoreError> {
        LocalStore::change_account(self, key, change);
        Ok(())
    }
}
