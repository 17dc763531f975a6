//! Why a limit cannot be made.

use super::{Algorithm, MAX_BUCKETS, MAX_CONCURRENCY, MAX_LOG, MAX_QUOTA, NotationError};
use crate::time::Span;

/// Why a limit cannot be made of some figures or of a text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// The text is not in the notation of limits. The source says where and what to write.
    #[error("the limit cannot be read")]
    Notation(#[from] NotationError),
    /// The quota is 0 or too large.
    #[error("a limit is between 1 and {MAX_QUOTA}, not {quota}")]
    Quota {
        /// The quota that was asked for.
        quota: u64,
    },
    /// The period is zero or too long.
    #[error("a period is between 1 µs and 100 years")]
    Period,
    /// The burst is 0 or too large.
    #[error("a burst is between 1 and {MAX_QUOTA}, not {burst}")]
    Burst {
        /// The burst that was asked for.
        burst: u64,
    },
    /// The burst is too large for the rate at which it refills.
    #[error("this burst would take more than 1,000 years to refill")]
    SlowRefill {
        /// The burst that was asked for.
        burst: u64,
    },
    /// A sliding log of this quota would keep too many times.
    #[error(
        "a sliding-log keeps at most {MAX_LOG} times a key, and this limit is {quota}; \
         write algorithm = \"sliding-window\""
    )]
    LongLog {
        /// The quota that was asked for.
        quota: u64,
    },
    /// A sliding window has no or too many sub-windows.
    #[error("buckets is between 1 and {MAX_BUCKETS}, not {buckets}")]
    Buckets {
        /// The sub-windows that were asked for.
        buckets: u32,
    },
    /// A sub-window would be shorter than a microsecond.
    #[error("{period} cannot be cut into {buckets} buckets")]
    ShortBuckets {
        /// The period.
        period: Span,
        /// The sub-windows that were asked for.
        buckets: u32,
    },
    /// The number of requests in flight is 0 or too large.
    #[error("a concurrency limit is between 1 and {MAX_CONCURRENCY}, not {quota}")]
    Concurrency {
        /// The number that was asked for.
        quota: u64,
    },
    /// The time to live of a hold is zero or too long.
    #[error("a ttl is between 1 µs and 100 years")]
    Ttl,
    /// The text has no period, and the algorithm needs one.
    #[error("a limit needs a period: write \"{quota}/min\", or algorithm = \"concurrency\" for so many at once")]
    NoPeriod {
        /// The number that stands alone.
        quota: u64,
    },
    /// The text has a period, and a concurrency limit has none.
    #[error("a concurrency limit has no period: write limit = \"10\" and a ttl")]
    ConcurrencyPeriod,
    /// A burst for an algorithm that has none.
    #[error("a burst belongs to a token-bucket, and this limit is a {algorithm}; write algorithm = \"token-bucket\"")]
    BurstOf {
        /// The algorithm of the limit.
        algorithm: Algorithm,
    },
    /// The text says that there is no limit.
    #[error("unlimited is no limit")]
    Unlimited,
}
