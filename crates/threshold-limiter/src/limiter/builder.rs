//! Builds a limiter from a policy, a store, a clock, secrets and observers.

use std::fmt;
use std::sync::Arc;
#[cfg(feature = "memory")]
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use arc_swap::ArcSwap;
use threshold_core::{DigestKey, KeyId, Policy, Secret, Secrets};

use super::{Limiter, rotation};
use crate::bans::BanList;
use crate::clock::Clock;
#[cfg(feature = "memory")]
use crate::clock::SystemClock;
use crate::observer::Observer;
use crate::store::Store;
#[cfg(feature = "memory")]
use crate::store::memory::MemoryStore;
use crate::sync::Mutex;

/// The parts of a [`Limiter`]; made by `Limiter::builder` with the feature `memory`, and by [`new`](Self::new).
///
/// ```
/// use std::sync::Arc;
/// use threshold_limiter::{Limiter, ManualClock, Policy, Secret, Timestamp};
///
/// let policy = Policy::parse("[[rule]]\nname = 'user'\nper = ['user']\nlimit = '2/min'", &|_| None)?;
/// let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
/// let secret = Secret::new(b"at least 32 bytes that nobody can guess").expect("it is long enough");
/// let limiter = Limiter::builder(policy).clock(clock).secrets(secret).build();
/// # let _ = limiter;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "call `build` to get a limiter"]
pub struct LimiterBuilder<
    #[cfg(feature = "memory")] S = InMemory,
    #[cfg(not(feature = "memory"))] S,
    #[cfg(feature = "memory")] C = SystemClock,
    #[cfg(not(feature = "memory"))] C,
> {
    pub(super) policy: Policy,
    store: S,
    pub(super) clock: C,
    pub(super) secrets: Option<Secrets>,
    pub(super) digest_key: Option<DigestKey>,
    pub(super) bans: Arc<BanList>,
    observers: Vec<Arc<dyn Observer>>,
    #[cfg(feature = "wait")]
    waiters: super::wait::Waiters,
}

/// A limiter was given other secrets than its store was opened with.
///
/// `Debug` writes what `Display` does, because that is what `main` prints of an error that it returns.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the limiter was given {}, and its store was opened with {}: give the secrets to the store alone",
    words(self.own),
    words(self.stored)
)]
pub struct OtherSecrets {
    own: Ids,
    stored: Ids,
}

impl fmt::Debug for OtherSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The key ids of the present secret, and of the old one if there is one.
type Ids = (KeyId, Option<KeyId>);

fn ids(secrets: &Secrets) -> Ids {
    (secrets.present().key_id(), secrets.old().map(Secret::key_id))
}

fn words((present, old): Ids) -> String {
    let old = old.map_or_else(String::new, |old| format!(" and the old secret {old}"));
    format!("the secret {present}{old}")
}

/// Stands for a [`MemoryStore`] that is sized by the policy's `[memory]`, until the limiter is built.
#[cfg(feature = "memory")]
#[derive(Debug, Clone, Copy)]
pub struct InMemory;

#[cfg(feature = "memory")]
impl Limiter {
    /// Begins a limiter with this policy. Unless told otherwise it is in memory and on the system's clock, and its secrets
    /// are random and last as long as the limiter.
    pub fn builder(policy: Policy) -> LimiterBuilder {
        LimiterBuilder::begin(policy, InMemory, SystemClock::new())
    }
}

impl<S: Store, C: Clock> LimiterBuilder<S, C> {
    /// Begins a limiter on a store and a clock of the host. Unless told otherwise, its secrets are random and last as long as
    /// the limiter.
    pub fn new(policy: Policy, store: S, clock: C) -> Self {
        Self::begin(policy, store, clock)
    }
}

impl<S, C> LimiterBuilder<S, C> {
    fn begin(policy: Policy, store: S, clock: C) -> Self {
        Self {
            policy,
            store,
            clock,
            secrets: None,
            digest_key: None,
            bans: Arc::default(),
            observers: Vec::new(),
            #[cfg(feature = "wait")]
            waiters: super::wait::Waiters::default(),
        }
    }

    /// Keeps balances in this store.
    ///
    /// A limiter on a store that nodes share, such as one in Redis, takes its secrets from the store. Records in another store that
    /// outlives the process are found again only with the same [`secrets`](Self::secrets).
    pub fn store<T: Store>(self, store: T) -> LimiterBuilder<T, C> {
        self.with(|_, clock| (store, clock))
    }

    /// Reads the time from this clock.
    pub fn clock<D: Clock>(self, clock: D) -> LimiterBuilder<S, D> {
        self.with(|store, _| (store, clock))
    }

    /// Signs receipts and login tokens with this secret, and derives from it the key that stored keys are digested with:
    /// one [`Secret`], or [`Secrets`] with an old one. What the old one signed is accepted; what is stored under its
    /// [`digest_key`](Secret::digest_key) is found, and moves to the present key as it is used.
    pub fn secrets(mut self, secrets: impl Into<Secrets>) -> Self {
        self.secrets = Some(secrets.into());
        self
    }

    /// Digests stored keys with this key instead of the one that is derived from the secret. Limiters on one store count together
    /// only if they have the same.
    pub fn digest_key(mut self, key: DigestKey) -> Self {
        self.digest_key = Some(key);
        self
    }

    /// Uses this list of bans, which several limiters may share.
    pub fn bans(mut self, bans: Arc<BanList>) -> Self {
        self.bans = bans;
        self
    }

    /// Notifies this observer of every decision. Call it once for each observer.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.push(observer);
        self
    }

    /// Lets at most this many requests [`wait`](Limiter::wait) at once; by default
    /// [`MAX_WAITERS`](super::MAX_WAITERS). Further ones are denied at once.
    #[cfg(feature = "wait")]
    pub fn max_waiters(mut self, max: usize) -> Self {
        self.waiters.max = max;
        self
    }

    /// Lets at most this many requests wait for one key; by default a quarter of [`max_waiters`](Self::max_waiters), so
    /// that one caller's queue leaves room for the others. Further ones are denied at once.
    #[cfg(feature = "wait")]
    pub fn max_waiters_per_key(mut self, max: usize) -> Self {
        self.waiters.max_per_key = Some(max);
        self
    }

    fn with<T, D>(self, replace: impl FnOnce(S, C) -> (T, D)) -> LimiterBuilder<T, D> {
        let (store, clock) = replace(self.store, self.clock);
        LimiterBuilder {
            policy: self.policy,
            store,
            clock,
            secrets: self.secrets,
            digest_key: self.digest_key,
            bans: self.bans,
            observers: self.observers,
            #[cfg(feature = "wait")]
            waiters: self.waiters,
        }
    }
}

#[cfg(feature = "memory")]
impl<C: Clock> LimiterBuilder<InMemory, C> {
    /// Builds the limiter in memory, sized by the policy's `[memory]`.
    #[must_use]
    pub fn build(self) -> Limiter<MemoryStore, C> {
        let store = MemoryStore::new(self.policy.memory());
        let secrets = self.secrets.clone();
        self.store(store).assemble(secrets)
    }
}

impl<S: Store, C: Clock> LimiterBuilder<S, C> {
    /// Builds the limiter, with the secrets of the store if it has some.
    ///
    /// # Errors
    /// Returns an error if the store was opened with other secrets than [`secrets`](Self::secrets): nodes would share no limit.
    pub fn build(mut self) -> Result<Limiter<S, C>, OtherSecrets> {
        let (own, stored) = (self.secrets.take(), self.store.secrets());
        if let (Some(own), Some(stored)) = (&own, stored)
            && ids(own) != ids(stored)
        {
            return Err(OtherSecrets { own: ids(own), stored: ids(stored) });
        }
        let secrets = own.or_else(|| stored.cloned());
        Ok(self.assemble(secrets))
    }

    /// Builds the limiter with these secrets, or with random ones.
    pub(super) fn assemble(self, secrets: Option<Secrets>) -> Limiter<S, C> {
        let Self { policy, store, clock, digest_key, bans, observers, .. } = self;
        let secrets = secrets
            .unwrap_or_else(|| Secret::new(&crate::random::<32>()).expect("32 bytes are enough for a secret").into());
        let key = digest_key.unwrap_or_else(|| secrets.present().digest_key());
        let policy = policy.with_key(key).with_bans(Arc::<BanList>::clone(&bans)).with_generation(1);
        let previous = secrets.old().map(|old| rotation::Previous::new(old.digest_key(), &policy));
        Limiter {
            bans,
            policy: ArcSwap::from_pointee(policy),
            previous,
            generation: Mutex::new(1),
            key,
            secrets,
            store,
            clock,
            observers,
            followed: Mutex::default(),
            ended_settings: AtomicU64::new(0),
            #[cfg(feature = "memory")]
            stand_in: OnceLock::new(),
            denials: Default::default(),
            penalties: Default::default(),
            locks: Default::default(),
            blind: Default::default(),
            #[cfg(feature = "wait")]
            waiters: self.waiters,
        }
    }
}

impl<S: fmt::Debug, C: fmt::Debug> fmt::Debug for LimiterBuilder<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimiterBuilder").field("store", &self.store).field("clock", &self.clock).finish_non_exhaustive()
    }
}
