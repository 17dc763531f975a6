//! The kinds of errors that calls of a store end with, and how often each did.

use std::time::Duration;

/// Defines the kinds with their names, in the order in which they are written.
macro_rules! kinds {
    ($($(#[$doc:meta])+ $kind:ident = $name:literal,)+) => {
        /// Why a call of a store failed. There are only these, so that each can be a series of a metric.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum StoreErrorKind {
            $($(#[$doc])+ $kind,)+
        }

        impl StoreErrorKind {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$kind,)+];

            /// Returns the name, as in metrics.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                }
            }
        }
    };
}

kinds! {
    /// There is no connection, or it broke.
    Connection = "connection",
    /// There was no answer within the deadline.
    Timeout = "timeout",
    /// The call was not sent: the server has failed several times in a row, and is left alone for a moment.
    BreakerOpen = "breaker_open",
    /// The answer is not one to what was sent.
    Protocol = "protocol",
    /// The key of a record holds a value of another type, which another program wrote.
    WrongType = "wrong_type",
    /// A script failed.
    Script = "script",
    /// A record cannot be read: another program or a newer release wrote it.
    UnreadableRecord = "unreadable_record",
    /// The memory of the server is full.
    OutOfMemory = "out_of_memory",
    /// The server is a replica.
    ReadOnly = "read_only",
    /// The user has no permission, or the login failed.
    NoPermission = "no_permission",
    /// Too few replicas follow the primary.
    NotEnoughReplicas = "not_enough_replicas",
    /// The server cannot save its data, and refuses writes.
    CannotSave = "cannot_save",
    /// The server is loading its data.
    Loading = "loading",
    /// The Cluster, or the part of it that has the key, is down.
    ClusterDown = "cluster_down",
    /// The key is being moved to another server, and the call could not be carried out in the meantime.
    Moving = "moving",
    /// The server is busy with a script.
    Busy = "busy",
    /// The store was written with another secret.
    OtherSecret = "other_secret",
    /// Other nodes changed the same records again and again.
    Conflict = "conflict",
    /// Too many commands wait for the store.
    Overloaded = "overloaded",
    /// The store has no room for another record of this kind.
    Full = "full",
    /// Anything else.
    Other = "other",
}

impl StoreErrorKind {
    /// Returns whether single errors of this kind belong to a busy network or server. One of another kind comes back with every call
    /// until something is changed.
    #[must_use]
    pub const fn is_passing(self) -> bool {
        matches!(
            self,
            Self::Connection | Self::Timeout | Self::BreakerOpen | Self::Moving | Self::Conflict | Self::Overloaded
        )
    }
}

/// How often calls of a store failed with one kind of error.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreErrorCount {
    /// The kind.
    pub kind: StoreErrorKind,
    /// How many calls failed with it since the store was opened.
    pub count: u64,
    /// What the last one said, in words for operators. It has no secrets, but may name a server and a key.
    pub last: String,
    /// How long ago the last one was.
    pub age: Duration,
}

impl StoreErrorCount {
    /// How long an error is shown as present: longer than the interval of usual health checks.
    const RECENT: Duration = Duration::from_secs(10);

    /// Counts the errors of one kind, for a store.
    #[must_use]
    pub const fn new(kind: StoreErrorKind, count: u64, last: String, age: Duration) -> Self {
        Self { kind, count, last, age }
    }

    /// Returns whether the last error was a moment ago, so that the next call may fail with it as well.
    #[must_use]
    pub fn is_recent(&self) -> bool {
        self.age < Self::RECENT
    }
}
