//! What a store is: it loads, has core settle a plan or execute a command, and saves. It does not know what a rule is.

mod any;
mod change_sink;
pub mod memory;
mod shared;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use threshold_core::decision::Degraded;

// What the signatures of a store are made of.
pub use threshold_core::command::{
    AccountChange, AccountKey, Answer, Command, Records, RequestKey, RequestRecord, RequestState, SaveReason, execute,
    expire,
};
use threshold_core::lockout::UnknownAttempt;
use threshold_core::receipt::CommitError;
pub use threshold_core::{Digest, Outcome, Plan, Timestamp};

pub use any::AnyStore;
pub use change_sink::{ChangeSink, Durability};

/// Why a store could not answer. What becomes of the request then is the policy's to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store is full of keys that must not be evicted, and the policy denies new keys.
    #[error("the store is full of protected keys")]
    Full,
    /// The store did not answer in time. The operation may have happened all the same.
    #[error("the store did not answer in time")]
    Timeout,
    /// The store cannot be reached, or answered another command than was sent.
    #[error("the store cannot be reached")]
    Unavailable,
}

impl StoreError {
    /// For an answer to another command than was sent.
    pub(crate) fn unexpected(_: Answer) -> Self {
        Self::Unavailable
    }
}

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndError {
    /// The reservation or attempt is unknown or already ended.
    #[error("unknown or already ended")]
    Unknown,
    /// The reservation was already committed with another cost, which stays.
    #[error("{}", CommitError::OtherCost)]
    OtherCost,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
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

/// Where what was used is kept: in this process, or across a network.
///
/// A store across a network keeps the deadline of a decision itself: only it can tell a request that was never sent from
/// one whose answer is lost. It answers [`StoreError::Timeout`] when its deadline has passed. A future that is dropped
/// before it is ready may have done what it was asked or not, as after a timeout.
pub trait Store: Send + Sync {
    /// Says that a plan with this key is about to be settled. A store may fetch what it will need, and do nothing else.
    fn prefetch(&self, key: Digest) {
        let _ = key;
    }

    /// Settles a plan in one step, into an outcome that is already there. `now` is what the limiter's clock says; a store
    /// with a clock of its own settles by that one.
    fn settle(
        &self,
        plan: &Plan<'_>,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Executes a command in one step: every other operation on what is stored.
    fn execute(&self, command: Command, now: Timestamp) -> impl Future<Output = Result<Answer, StoreError>> + Send;

    /// What is stored of one kind, in the order of its keys, from the first after `after`: at most `limit` records.
    fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> impl Future<Output = Result<Vec<Listed>, StoreError>> + Send;

    /// Whether every future of this store is ready at the first poll. It must always say the same.
    fn answers_at_once(&self) -> bool {
        false
    }

    /// Whether what was changed is safe from the end of the process; `None` where nothing ever is.
    fn durability(&self) -> Option<Durability> {
        None
    }
}

/// A store whose futures are all ready at the first poll, so that a limiter on it can be asked without awaiting:
/// [`Limiter::check`](crate::Limiter::check) and its like. [`Store::answers_at_once`] must say so.
pub trait ImmediateStore: Store {}

/// What operators list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Subjects that a ladder has banned.
    Banned,
}

/// One record of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Listed {
    /// A subject that a ladder has banned.
    Banned {
        /// Its standing's key.
        key: Digest,
        /// When the ban ends.
        until: Timestamp,
    },
}

/// What a future of an immediate store is ready with, for hosts that do not await.
///
/// # Panics
/// Where the store is not immediate.
#[inline]
pub fn at_once<T>(future: impl Future<Output = T>) -> T {
    let output = match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    };
    output.expect("an ImmediateStore answers at the first poll")
}
