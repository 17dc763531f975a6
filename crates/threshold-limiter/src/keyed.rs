//! One limit by keys of your own, without a policy.

mod hash;
mod lines;
mod table;

use arrayvec::ArrayVec;
use threshold_core::key::TextKeys;
use threshold_core::limit::Look;
use threshold_core::policy::{Memory, WhenFull};
use threshold_core::{Digest, DigestKey, Limit, Timestamp, TraceId};

use crate::clock::{Clock, SystemClock};
use crate::store::Store as _;
use crate::store::memory::{Checked, MemoryStore, Usage};
use hash::{Hashed, KeyHash};
use table::PackedTable;

/// How many keys are asked for before the first is decided: as many misses as a core of today keeps under way.
const BATCH: usize = 16;

/// One limit, counted by any text: a user, an address, a job.
///
/// ```
/// use threshold_limiter::{KeyLimiter, Limit};
///
/// let limiter = KeyLimiter::new(Limit::per_minute(2), 100_000);
/// assert!(limiter.check("u1", 1).allowed);
/// assert!(limiter.check("u1", 1).allowed);
/// assert!(!limiter.check("u1", 1).allowed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct KeyLimiter<C = SystemClock> {
    balances: Storage,
    clock: C,
}

/// Where balances are kept.
#[derive(Debug)]
enum Storage {
    /// Token buckets, nearly all of them.
    Packed { hash: KeyHash, table: PackedTable },
    /// Whatever does not fit a slot of 16 bytes.
    Any { limit: Limit, keys: TextKeys, store: MemoryStore },
}

impl KeyLimiter {
    /// A limit with room for `max_keys` keys at once, on the system's clock.
    #[must_use]
    pub fn new(limit: Limit, max_keys: u64) -> Self {
        Self::with_clock(limit, max_keys, SystemClock::new())
    }
}

impl<C: Clock> KeyLimiter<C> {
    /// A limit on a clock of your own.
    #[must_use]
    pub fn with_clock(limit: Limit, max_keys: u64, clock: C) -> Self {
        let balances = Storage::new(limit, max_keys, clock.now());
        Self { balances, clock }
    }

    /// Whether `cost` fits under this key now; if it does, it is charged.
    // In line, so that a caller who asks for `fits` alone does not pay for the figures beside it.
    #[inline(always)]
    pub fn check(&self, key: &str, cost: u64) -> Look {
        match &self.balances {
            Storage::Packed { hash, table } => {
                let key = hash.hash(key);
                // The clock is read while the slot is on its way from memory.
                table.prefetch(key);
                table.check(key, cost, self.clock.now())
            }
            Storage::Any { limit, keys, store } => {
                check_any(limit, store, keys.digest(key), cost, self.clock.now()).look
            }
        }
    }

    /// Decides the same cost under several keys, one after the other. With many keys this is faster than
    /// [`check`](Self::check) for each: the memory of sixteen is asked for at once.
    ///
    /// ```
    /// # use threshold_limiter::{KeyLimiter, Limit};
    /// let limiter = KeyLimiter::new(Limit::per_minute(1), 100_000);
    /// let looks = limiter.check_many(&["u1", "u2", "u1"], 1);
    /// assert_eq!(looks.iter().map(|look| look.allowed).collect::<Vec<_>>(), [true, true, false]);
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
            match &self.balances {
                Storage::Packed { hash, table } => {
                    let hashed: ArrayVec<Hashed, BATCH> = batch.iter().map(|key| hash.hash(key)).collect();
                    hashed.iter().for_each(|key| table.prefetch(*key));
                    let now = self.clock.now();
                    looks.extend(hashed.into_iter().map(|key| table.check(key, cost, now)));
                }
                Storage::Any { limit, keys, store } => {
                    let digests: ArrayVec<Digest, BATCH> = batch.iter().map(|key| keys.digest(key)).collect();
                    digests.iter().for_each(|key| store.prefetch(*key));
                    let now = self.clock.now();
                    looks.extend(digests.into_iter().map(|key| check_any(limit, store, key, cost, now).look));
                }
            }
        }
    }

    /// What is held, and what was done to stay within bounds. Goes through the whole table.
    pub fn usage(&self) -> Usage {
        match &self.balances {
            Storage::Packed { table, .. } => table.usage(),
            Storage::Any { store, .. } => store.usage(),
        }
    }
}

impl Storage {
    fn new(limit: Limit, max_keys: u64, now: Timestamp) -> Self {
        let table = limit.packed_rate(now).and_then(|rate| PackedTable::new(rate, max_keys));
        if let Some(table) = table {
            return Self::Packed { hash: KeyHash::new(&limit), table };
        }
        let keys = TextKeys::new(DigestKey::new(crate::random()), &limit);
        Self::Any { limit, keys, store: MemoryStore::new(Memory { max_keys, when_full: WhenFull::Deny }) }
    }
}

/// Not part of those who call it: for the others it would be in the way.
#[inline(never)]
fn check_any(limit: &Limit, store: &MemoryStore, key: Digest, cost: u64, now: Timestamp) -> Checked {
    // What a charge is known by where it is kept one by one.
    let id = if limit.is_concurrency() { crate::random_id() } else { TraceId::default() };
    store.check_one(key, limit, cost, now, id)
}
