//! One limit by keys of your own, without a policy.

use arrayvec::ArrayVec;
use threshold_core::key::TextKeys;
use threshold_core::limit::Look;
use threshold_core::policy::{Memory, WhenFull};
use threshold_core::{Digest, DigestKey, Limit, TraceId};

use crate::clock::{Clock, SystemClock};
use crate::store::memory::MemoryStore;

/// How many keys are asked for before the first is decided: as many misses as a core of today keeps under way.
const BATCH: usize = 16;

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
        self.store.check_one(self.keys.digest(key), &self.limit, cost, self.clock.now(), self.id()).look
    }

    /// Decides the same cost under several keys, one after the other. With many keys this is faster than
    /// [`check`](Self::check) for each: the memory of sixteen is asked for at once.
    ///
    /// ```
    /// # use threshold_limiter::{KeyLimiter, Limit};
    /// let limiter = KeyLimiter::new(Limit::parse("1/min", None)?, 100_000);
    /// let looks = limiter.check_many(&["u1", "u2", "u1"], 1);
    /// assert_eq!(looks.iter().map(|look| look.fits).collect::<Vec<_>>(), [true, true, false]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check_many(&self, keys: &[&str], cost: u64) -> Vec<Look> {
        let mut looks = Vec::new();
        self.check_many_into(keys, cost, &mut looks);
        looks
    }

    /// As [`check_many`](Self::check_many), in place of whatever is in `looks`, whose memory is used again.
    pub fn check_many_into(&self, keys: &[&str], cost: u64, looks: &mut Vec<Look>) {
        looks.clear();
        looks.reserve(keys.len());
        for batch in keys.chunks(BATCH) {
            let digests: ArrayVec<Digest, BATCH> = batch.iter().map(|key| self.keys.digest(key)).collect();
            self.store.expect_keys(digests.iter().copied());
            let now = self.clock.now();
            let look = |digest| self.store.check_one(digest, &self.limit, cost, now, self.id()).look;
            looks.extend(digests.into_iter().map(look));
        }
    }

    /// What a charge is known by where it is kept one by one.
    #[inline]
    fn id(&self) -> TraceId {
        match self.limit {
            Limit::Concurrency(_) => TraceId::from_u128(u128::from_ne_bytes(crate::random())),
            _ => TraceId::default(),
        }
    }

    /// The store.
    pub fn store(&self) -> &MemoryStore {
        &self.store
    }
}
