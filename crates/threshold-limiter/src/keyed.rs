//! One limit by keys of your own, without a policy.

use threshold_core::key::TextKeys;
use threshold_core::limit::Look;
use threshold_core::policy::{Memory, WhenFull};
use threshold_core::{DigestKey, Limit, TraceId};

use crate::clock::{Clock, SystemClock};
use crate::store::memory::MemoryStore;

/// One limit, counted by any text: a user, an address, a job.
///
/// ```
/// use threshold_limiter::{KeyLimiter, Limit};
///
/// let limiter = KeyLimiter::new(Limit::parse("2/min", None)?, 100_000);
/// assert!(limiter.check("u1", 1).fits);
/// assert!(limiter.check("u1", 1).fits);
/// assert!(!limiter.check("u1", 1).fits);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct KeyLimiter<C = SystemClock> {
    limit: Limit,
    keys: TextKeys,
    store: MemoryStore,
    clock: C,
}

impl KeyLimiter {
    /// A limit for at most `max_keys` keys at once, on the system's clock.
    #[must_use]
    pub fn new(limit: Limit, max_keys: u64) -> Self {
        Self::with_clock(limit, max_keys, SystemClock::new())
    }
}

impl<C: Clock> KeyLimiter<C> {
    /// A limit on a clock of your own.
    #[must_use]
    pub fn with_clock(limit: Limit, max_keys: u64, clock: C) -> Self {
        let keys = TextKeys::new(DigestKey::new(crate::random()), &limit);
        let store = MemoryStore::new(Memory { max_keys, when_full: WhenFull::Deny });
        Self { limit, keys, store, clock }
    }

    /// Whether `cost` fits under this key now; if it does, it is charged.
    #[inline]
    pub fn check(&self, key: &str, cost: u64) -> Look {
        let id = match self.limit {
            Limit::Concurrency(_) => TraceId::from_u128(u128::from_ne_bytes(crate::random())),
            _ => TraceId::default(),
        };
        self.store.check_one(self.keys.digest(key), &self.limit, cost, self.clock.now(), id).look
    }

    /// The store.
    pub fn store(&self) -> &MemoryStore {
        &self.store
    }
}
