//! One limit counted by keys of your own, without a policy.

mod hash;
mod lines;
mod pauses;
mod table;
#[cfg(feature = "wait")]
mod until_ready;

use std::hash::Hash;
use std::time::Duration;

use arrayvec::ArrayVec;
use siphasher::sip128::{Hasher128 as _, SipHasher13};
use threshold_core::limit::Look;
use threshold_core::policy::{Memory, WhenFull};
use threshold_core::{Digest, Limit, Span, Timestamp, TraceId};

use crate::clock::{Clock, SystemClock};
#[cfg(feature = "wait")]
use crate::limiter::wait::Waiters;
use crate::store::memory::{MemoryStore, Usage};
use crate::store::{Store as _, StoreError};
use hash::{Hashed, KeyHash};
use pauses::Pauses;
use table::PackedTable;

/// The number of keys that a limiter has room for by default; the same as a policy's.
const MAX_KEYS: u64 = 1_000_000;
/// How many keys are prefetched before the first is decided: as many cache misses as a core of today has in flight.
const BATCH: usize = 16;

/// One limit, counted by any key that can be hashed: a user's name, an address, a number, a tuple.
///
/// ```
/// use std::net::IpAddr;
/// use threshold_limiter::{KeyLimiter, Limit};
///
/// let limiter = KeyLimiter::new(Limit::per_minute(2));
/// assert!(limiter.check("u1").allowed);
/// assert_eq!(limiter.check("u1").remaining, 0);
/// let denied = limiter.check("u1");
/// println!("denied, retry in {:?}", denied.retry_after());
/// # assert!(!denied.allowed && denied.retry_after().is_some());
///
/// assert!(limiter.check(&IpAddr::from([203, 0, 113, 7])).allowed);
/// assert!(limiter.check(&1_234_567_u64).allowed);
/// assert!(limiter.check(&("tenant", 7_u64)).allowed);
/// ```
///
/// Keys are equal if they write the same into their hasher: `"u1"` and `String::from("u1")` are one key, and so are `1_u32`
/// and `1_u64`. Use one type of key for each limiter. Keys are hashed under a secret, so nobody can choose keys that collide.
///
/// A limiter is shared between threads as it is, and takes no lock for a key that it already has. It has room for
/// 1,000,000 keys unless its [builder](Self::builder) says otherwise, and never grows. When it is full, keys that are back at
/// their full limit are evicted first, then the least used. Keys that have used more than half are never evicted: new keys
/// are denied instead.
#[derive(Debug)]
pub struct KeyLimiter<C = SystemClock> {
    limit: Limit,
    balances: Storage,
    pauses: Pauses,
    clock: C,
    #[cfg(feature = "wait")]
    waiters: Waiters,
}

/// The answer of a [`KeyLimiter`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a decision that nobody reads protects nothing"]
pub struct KeyDecision {
    /// Whether the cost fitted, and was charged.
    pub allowed: bool,
    /// The cost that still fits, after this charge.
    pub remaining: u64,
    at: Timestamp,
    ready: Timestamp,
}

impl KeyDecision {
    #[inline(always)]
    fn new(look: Look, cost: u64, at: Timestamp) -> Self {
        let charged = if look.allowed { cost } else { 0 };
        let remaining = look.available.saturating_sub(charged);
        Self { allowed: look.allowed, remaining, at, ready: look.ready_at }
    }

    fn paused(now: Timestamp, until: Timestamp) -> Self {
        Self { allowed: false, remaining: 0, at: now, ready: until }
    }

    /// Returns, for a denial, how long to wait before this cost fits; `None` if it was allowed or never will be.
    ///
    /// Where a new key is denied because the limiter is full, this is one second.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        if self.allowed {
            return None;
        }
        let wait = self.ready.unless_never()?.since(self.at);
        // The limit has room and the table has none: there is no time to compute.
        Some(if wait.is_zero() { Span::SECOND } else { wait }.into())
    }
}

/// The table of balances.
#[derive(Debug)]
enum Storage {
    /// Token buckets, nearly all of them.
    Packed { hash: KeyHash, table: PackedTable },
    /// All limits whose state does not fit into a slot of 16 bytes.
    Any { secret: [u8; 16], store: MemoryStore },
}

/// The parts of a [`KeyLimiter`]; made by [`KeyLimiter::builder`].
#[derive(Debug, Clone, Copy)]
#[must_use = "call `build` to get a limiter"]
pub struct KeyLimiterBuilder<C = SystemClock> {
    limit: Limit,
    max_keys: u64,
    clock: C,
    #[cfg(feature = "wait")]
    max_waiters: (usize, Option<usize>),
}

impl KeyLimiter {
    /// Creates a limiter with room for 1,000,000 keys on the system's clock.
    ///
    /// A token bucket takes 32 bytes for each key, other limits take 57 and more. Memory that no key has used is not taken
    /// from the system.
    #[must_use]
    pub fn new(limit: Limit) -> Self {
        Self::builder(limit).build()
    }

    /// Begins a limiter with another number of keys, or on another clock.
    ///
    /// ```
    /// # use threshold_limiter::{KeyLimiter, Limit};
    /// let limiter = KeyLimiter::builder(Limit::per_minute(2)).max_keys(10_000).build();
    /// assert!(limiter.check("u1").allowed);
    /// ```
    pub fn builder(limit: Limit) -> KeyLimiterBuilder {
        KeyLimiterBuilder {
            limit,
            max_keys: MAX_KEYS,
            clock: SystemClock::new(),
            #[cfg(feature = "wait")]
            max_waiters: (crate::limiter::MAX_WAITERS, None),
        }
    }
}

impl<C: Clock> KeyLimiterBuilder<C> {
    /// Makes room for this many keys; by default 1,000,000.
    pub fn max_keys(self, max_keys: u64) -> Self {
        Self { max_keys, ..self }
    }

    /// Reads the time from this clock.
    pub fn clock<D: Clock>(self, clock: D) -> KeyLimiterBuilder<D> {
        KeyLimiterBuilder {
            limit: self.limit,
            max_keys: self.max_keys,
            clock,
            #[cfg(feature = "wait")]
            max_waiters: self.max_waiters,
        }
    }

    /// Lets at most this many callers wait in [`until_ready`](KeyLimiter::until_ready) at once; by default 10,000, and a
    /// quarter of them for one key. Further ones are denied at once.
    #[cfg(feature = "wait")]
    pub fn max_waiters(self, max: usize) -> Self {
        Self { max_waiters: (max, self.max_waiters.1), ..self }
    }

    /// Lets at most this many callers wait for one key; by default a quarter of [`max_waiters`](Self::max_waiters).
    #[cfg(feature = "wait")]
    pub fn max_waiters_per_key(self, max: usize) -> Self {
        Self { max_waiters: (self.max_waiters.0, Some(max)), ..self }
    }

    /// Allocates the table, and returns the limiter.
    #[must_use]
    pub fn build(self) -> KeyLimiter<C> {
        let Self { limit, max_keys, clock, .. } = self;
        KeyLimiter {
            limit,
            balances: Storage::new(limit, max_keys, clock.now()),
            pauses: Pauses::default(),
            clock,
            #[cfg(feature = "wait")]
            waiters: Waiters::new(self.max_waiters.0, self.max_waiters.1),
        }
    }
}

impl<C: Clock> KeyLimiter<C> {
    /// Decides whether a cost of 1 fits under this key now, and charges it if so.
    #[inline(always)]
    pub fn check<K: Hash + ?Sized>(&self, key: &K) -> KeyDecision {
        self.check_cost(key, 1)
    }

    /// Decides whether `cost` fits under this key now, and charges it if so. A cost of 0 charges nothing.
    // In line, so that a caller who reads `allowed` alone does not pay for the other figures.
    #[inline(always)]
    pub fn check_cost<K: Hash + ?Sized>(&self, key: &K, cost: u64) -> KeyDecision {
        match &self.balances {
            Storage::Packed { hash, table } => {
                let key = hash.hash(key);
                // The clock is read while the slot is on its way from memory.
                table.prefetch(key);
                let now = self.clock.now();
                self.check_packed(table, key, cost, now)
            }
            Storage::Any { secret, store } => self.check_any(store, digest(secret, key), cost, self.clock.now()),
        }
    }

    /// Denies every cost under this key for `length`, as a provider's own `Retry-After` asks for. A longer pause of the key
    /// stays as it is. What the key has used is not changed.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use threshold_limiter::{KeyLimiter, Limit};
    /// let providers = KeyLimiter::new(Limit::per_second(100));
    /// // It answered 429 with `Retry-After: 30`.
    /// providers.pause("api.example.com", Duration::from_secs(30))?;
    /// assert!(providers.check("api.example.com").retry_after() > Some(Duration::from_secs(29)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`StoreError::Full`] if 10,000 other keys are paused.
    pub fn pause<K: Hash + ?Sized>(&self, key: &K, length: Duration) -> Result<(), StoreError> {
        let now = self.clock.now();
        self.pauses.add(self.identity(key), now.plus(length.into()), now)
    }

    /// Decides a cost of 1 under each of several keys, one after the other. The answers are those of one
    /// [`check`](Self::check) for each. With more keys than the processor's cache holds this is faster, because the memory
    /// of sixteen keys is prefetched at once.
    ///
    /// ```
    /// # use threshold_limiter::{KeyLimiter, Limit};
    /// let limiter = KeyLimiter::new(Limit::per_minute(1));
    /// let decisions = limiter.check_many(&["u1", "u2", "u1"]);
    /// assert_eq!(decisions.iter().map(|decision| decision.allowed).collect::<Vec<_>>(), [true, true, false]);
    /// ```
    pub fn check_many<K: Hash>(&self, keys: &[K]) -> Vec<KeyDecision> {
        self.check_many_cost(keys, 1)
    }

    /// Decides the same cost under each of several keys; see [`check_many`](Self::check_many).
    pub fn check_many_cost<K: Hash>(&self, keys: &[K], cost: u64) -> Vec<KeyDecision> {
        let mut decisions = Vec::with_capacity(keys.len());
        for batch in keys.chunks(BATCH) {
            match &self.balances {
                Storage::Packed { hash, table } => {
                    let hashed: ArrayVec<Hashed, BATCH> = batch.iter().map(|key| hash.hash(key)).collect();
                    hashed.iter().for_each(|key| table.prefetch(*key));
                    let now = self.clock.now();
                    let decide = |key| self.check_packed(table, key, cost, now);
                    decisions.extend(hashed.into_iter().map(decide));
                }
                Storage::Any { secret, store } => {
                    let digests: ArrayVec<Digest, BATCH> = batch.iter().map(|key| digest(secret, key)).collect();
                    digests.iter().for_each(|key| store.prefetch(*key));
                    let now = self.clock.now();
                    decisions.extend(digests.into_iter().map(|key| self.check_any(store, key, cost, now)));
                }
            }
        }
        decisions
    }

    /// Returns how many keys and bytes are in use, and how many keys were evicted. Scans the whole table.
    pub fn usage(&self) -> Usage {
        match &self.balances {
            Storage::Packed { table, .. } => table.usage(),
            Storage::Any { store, .. } => store.usage(),
        }
    }

    #[inline(always)]
    fn check_packed(&self, table: &PackedTable, key: Hashed, cost: u64, now: Timestamp) -> KeyDecision {
        if self.pauses.may_hold(now)
            && let Some(until) = self.pauses.until(key.identity(), now)
        {
            return KeyDecision::paused(now, until);
        }
        KeyDecision::new(table.check(key, cost, now), cost, now)
    }

    // Never in line: in `check_cost` it would push the token bucket's path out of the instruction cache.
    #[inline(never)]
    fn check_any(&self, store: &MemoryStore, key: Digest, cost: u64, now: Timestamp) -> KeyDecision {
        if self.pauses.may_hold(now)
            && let Some(until) = self.pauses.until(key, now)
        {
            return KeyDecision::paused(now, until);
        }
        // Concurrency limits identify each hold by an id; other limits need none.
        let id = if self.limit.is_concurrency() { crate::random_id() } else { TraceId::default() };
        KeyDecision::new(store.check_one(key, &self.limit, cost, now, id).look, cost, now)
    }

    /// Returns the digest that stands for a key.
    fn identity<K: Hash + ?Sized>(&self, key: &K) -> Digest {
        match &self.balances {
            Storage::Packed { hash, .. } => hash.hash(key).identity(),
            Storage::Any { secret, .. } => digest(secret, key),
        }
    }
}

impl Storage {
    fn new(limit: Limit, max_keys: u64, now: Timestamp) -> Self {
        match limit.packed_rate(now).and_then(|rate| PackedTable::new(rate, max_keys)) {
            Some(table) => Self::Packed { hash: KeyHash::new(), table },
            None => {
                // These keys have no address prefix that new ones could be counted by.
                let store = MemoryStore::new(Memory { max_keys, when_full: WhenFull::Deny });
                Self::Any { secret: crate::random(), store }
            }
        }
    }
}

/// Returns the digest of a key under a secret: SipHash-1-3 with 128 bits, as for the keys of a policy.
fn digest<K: Hash + ?Sized>(secret: &[u8; 16], key: &K) -> Digest {
    let mut hasher = SipHasher13::new_with_key(secret);
    key.hash(&mut hasher);
    Digest::from_u128(hasher.finish128().as_u128())
}
