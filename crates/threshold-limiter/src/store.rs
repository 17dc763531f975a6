//! The store trait. A store loads records, lets core settle a plan or execute a command, and saves them. It knows no rules.

#[cfg(feature = "memory")]
mod any;
mod change_sink;
mod errors;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(feature = "partitions")]
pub mod partitioned;
mod shared;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use threshold_core::decision::Degraded;

// The types of a store's signatures.
pub use threshold_core::command::{
    AccountChange, AccountKey, Answer, Command, Records, RequestKey, RequestRecord, RequestState, SaveReason, execute,
    expire,
};
use threshold_core::lockout::{Account, UnknownAttempt};
pub use threshold_core::policy::Placed;
use threshold_core::receipt::CommitError;
pub use threshold_core::receipt::HoldTerms;
pub use threshold_core::{Digest, Outcome, OwnedBill, Plan, Secrets, Timestamp};

#[cfg(feature = "memory")]
pub use any::AnyStore;
pub use change_sink::{ChangeSink, Durability};
pub use errors::{StoreErrorCount, StoreErrorKind};

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
    /// Returns the error for an answer that does not belong to the command that was sent.
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

/// Storage for balances and other records: in this process, or across a network.
///
/// A store across a network enforces its own deadline: only it can tell a request that was never sent from one whose answer was
/// lost. It returns [`StoreError::Timeout`] when the deadline has passed. A future that is dropped before it is ready may have
/// done its work or not, as after a timeout.
pub trait Store: Send + Sync {
    /// Hints that a plan with this key is about to be settled. A store may fetch what it will need, and must change nothing.
    fn prefetch(&self, key: Digest) {
        let _ = key;
    }

    /// Learns where the records of a request are, before it is asked for them. A store that places records by their keys needs no
    /// names, and does not call `places`.
    fn learn_places<'p>(&self, places: &mut dyn FnMut() -> Vec<Placed<'p>>) {
        let _ = places;
    }

    /// Returns the present time of the store's own clock; `None` if the store uses the times that it is given. A store across a
    /// network estimates it from its last answer, without asking again.
    fn now(&self) -> Option<Timestamp> {
        None
    }

    /// Returns the secrets that the store was opened with, under which the records that several nodes share are kept. A limiter on
    /// the store has the same; [`LimiterBuilder::build`](crate::LimiterBuilder::build) fails if it was given others.
    fn secrets(&self) -> Option<&Secrets> {
        None
    }

    /// Settles a plan in one atomic step, and writes the result to `outcome`. `now` is the time of the limiter's clock; a store
    /// with a clock of its own uses that.
    fn settle(
        &self,
        plan: &Plan<'_>,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Settles a plan and, if it is allowed, holds its charges as a reservation with the plan's id.
    fn reserve(
        &self,
        plan: &Plan<'_>,
        terms: &HoldTerms,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        let (bill, terms) = (Box::new(plan.bill().to_owned()), Box::new(terms.clone()));
        async move {
            match self.execute(Command::Reserve { bill, terms }, now).await? {
                Answer::Settled(settled) => *outcome = *settled,
                other => return Err(StoreError::unexpected(other)),
            }
            Ok(())
        }
    }

    /// Executes a command in one atomic step: every other operation on stored records.
    fn execute(&self, command: Command, now: Timestamp) -> impl Future<Output = Result<Answer, StoreError>> + Send;

    /// Lists at most `limit` records of one kind, in the order of their keys, from the first after `after`.
    fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> impl Future<Output = Result<Vec<Listed>, StoreError>> + Send;

    /// Returns whether every future of this store is ready at the first poll. It must always return the same.
    fn answers_at_once(&self) -> bool {
        false
    }

    /// Returns the part of every limit that this node has while the store is away, for rules with `on_store_error = "local"`;
    /// `None` if it has none, as a node that has not reached the store since it started. It must not change while the store is
    /// away. A store that no other node uses returns [`Share::ALL`].
    fn share(&self) -> Option<Share> {
        Some(Share::ALL)
    }

    /// Takes the answers that came after their deadline: all of [`settle`](Self::settle), and those of commands that have charged
    /// or counted something. The limiter asks for them each time that it [follows](crate::Limiter::follow_control) the store's log.
    fn take_late(&self) -> Vec<LateAnswer> {
        Vec::new()
    }

    /// Returns whether a bill whose keys lie in several partitions is settled in one atomic step.
    fn settles_partitions_together(&self) -> bool {
        false
    }

    /// Returns the reason of the last failure in words for operators; `None` if there was none.
    fn last_error(&self) -> Option<String> {
        None
    }

    /// Returns what is wrong with the store at this moment, in words for operators: a part of it cannot be reached, or calls have
    /// failed a moment ago.
    fn present_problem(&self) -> Option<String> {
        None
    }

    /// Returns whether every part of the store can be reached at this moment, as far as it knows without asking.
    fn is_reachable(&self) -> bool {
        true
    }

    /// Returns the kinds of errors that its calls have ended with, each with its count. What a store handles by itself is no error,
    /// such as a call that it repeats with success.
    fn errors(&self) -> Vec<StoreErrorCount> {
        Vec::new()
    }

    /// Returns how many writes of a store that computes by itself differed from what core would have written, of those that were
    /// compared. Limits cannot be trusted after the first one.
    fn differences(&self) -> u64 {
        0
    }

    /// Returns a future that resolves when all changes are on disk; `None` if changes are not written to disk.
    fn durability(&self) -> Option<Durability> {
        None
    }

    /// Returns what the store counts about itself, for metrics. It must not walk over a table.
    fn numbers(&self) -> StoreNumbers {
        StoreNumbers::default()
    }
}

/// What a store counts about itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreNumbers {
    /// The keys that it holds; `None` if it does not know, as where other nodes hold them too.
    pub keys: Option<KeyUsage>,
    /// How many open reservations it has ended because they expired.
    pub expired_reservations: u64,
}

/// How full a bounded store is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeyUsage {
    /// The number of keys with a balance.
    pub used: usize,
    /// The number of keys beyond which others are evicted.
    pub max: usize,
    /// How many live balances were evicted.
    pub evicted: u64,
    /// How many keys were counted by a key that stands in, because nothing could be evicted.
    pub folded: u64,
}

/// An answer that came after its deadline, when its request had been decided without it.
#[derive(Debug)]
#[non_exhaustive]
pub enum LateAnswer {
    /// The answer to a bill.
    Settled {
        /// The bill that was sent.
        bill: Box<OwnedBill>,
        /// The outcome; [`StoreError::Unavailable`] if it is certain that nothing was executed.
        answer: Result<Box<Outcome>, StoreError>,
    },
    /// The answer to a command, whose caller waited until the deadline.
    Executed {
        /// The command that was sent.
        command: Box<Command>,
        /// The answer.
        answer: Box<Answer>,
    },
}

/// One node's part of every limit while the store of all nodes is away: L divided by their number, and one unit more for each of
/// the first L mod n nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The number of nodes.
    pub nodes: u64,
    /// The place of this node among them, from 0.
    pub place: u64,
}

impl Share {
    /// The whole limit, of the only node.
    pub const ALL: Self = Self { nodes: 1, place: 0 };
}

/// A store whose futures are all ready at the first poll, so that a limiter on it can be called without awaiting, as in
/// [`Limiter::check`](crate::Limiter::check). Its [`Store::answers_at_once`] must return true.
pub trait ImmediateStore: Store {}

/// The kinds of records that operators can list. A store lists all of them, so a new one is a change for every store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Subjects that a ladder has banned.
    Banned,
    /// Login accounts with stored state.
    Accounts,
}

/// A record in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Listed {
    /// A subject that a ladder has banned.
    Banned {
        /// The key of its standing.
        key: Digest,
        /// When the ban ends.
        until: Timestamp,
    },
    /// A login account.
    Account {
        /// The key of the account.
        key: Digest,
        /// Its state.
        account: Box<Account>,
    },
}

/// Returns the output of a future that is ready at the first poll, such as one of an [`ImmediateStore`].
///
/// # Panics
/// Panics if the future is not ready.
#[inline]
pub fn at_once<T>(future: impl Future<Output = T>) -> T {
    // The future is never polled again, so nothing has to be woken.
    let output = match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    };
    output.expect("an ImmediateStore answers at the first poll")
}
