//! A policy, a store and a clock: everything a decision needs, in your process.

mod asynchronous;
mod control;
mod failure;
mod login;
mod many;
mod names;
mod requests;
mod rotation;
#[cfg(feature = "tower")]
mod tokens;
mod under;
#[cfg(feature = "wait")]
mod wait;

use std::sync::{Arc, OnceLock, PoisonError};

use arc_swap::{ArcSwap, Guard};
use threshold_core::explain::Explained;
use threshold_core::plan::Verb;
use threshold_core::policy::{Layer, Policy};
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{
    BytesError, Decision, Digest, DigestKey, Facts, Format, KeyId, Outcome, Plan, PlanError, Receipt, Secret, Secrets,
    Span, Timestamp, TraceId,
};

use crate::bans::BanList;
use crate::clock::{Clock, SystemClock};
use crate::observer::Observer;
#[cfg(feature = "tower")]
use crate::observer::Refused;
use crate::random_id;
use crate::store::memory::MemoryStore;
use crate::store::{EndError, ImmediateStore, Store, StoreError, at_once};
use crate::sync::Mutex;

pub use control::UnfitSetting;
pub use login::LoginError;
#[cfg(feature = "wait")]
pub use wait::{MAX_WAITERS, Waited};

/// Decides for every request whether it may cross.
pub struct Limiter<S = MemoryStore, C = SystemClock> {
    policy: ArcSwap<Policy>,
    /// That of the policy in force. Whoever holds it puts the next one in force.
    generation: Mutex<u64>,
    key: DigestKey,
    secrets: Secrets,
    /// While the secret is rotated.
    previous: Option<rotation::Previous>,
    store: S,
    clock: C,
    observers: Vec<Arc<dyn Observer>>,
    bans: Arc<BanList>,
    /// Held by whoever applies changes of bans and settings, or puts a policy in force that must have all settings.
    followed: Mutex<control::Followed>,
    /// What answers while the store cannot, for rules that are `local` then.
    stand_in: OnceLock<MemoryStore>,
    #[cfg(feature = "wait")]
    waiters: wait::Waiters,
}

/// A request's reservation, and what it was told.
#[derive(Debug)]
pub struct Reserved {
    /// What the request is told.
    pub decision: Decision,
    /// What to end the reservation by, if the request may cross.
    pub reservation: Option<TraceId>,
}

impl Limiter {
    /// A limiter in memory, sized by the policy's `[memory]`, on the system's clock.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self::with_clock(policy, SystemClock::new())
    }
}

impl<C: Clock> Limiter<MemoryStore, C> {
    /// A limiter in memory on a clock of your own.
    #[must_use]
    pub fn with_clock(policy: Policy, clock: C) -> Self {
        let store = MemoryStore::new(policy.memory());
        Self::with_store(policy, store, clock)
    }
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// A limiter on a store whose records need not outlive the process: its secrets do not.
    #[must_use]
    pub fn with_store(policy: Policy, store: S, clock: C) -> Self {
        let secret = Secret::new(&crate::random::<32>()).expect("32 bytes are enough");
        Self::with_parts(policy, store, clock, DigestKey::new(crate::random()), secret)
    }

    /// A limiter of your own parts. `key` digests what is stored; `secrets` is what signs what is handed out: one
    /// [`Secret`], or [`Secrets`] with an old one. What the old one signed is accepted, and what is stored under its
    /// [`digest_key`](Secret::digest_key) is found, and moves to `key` as it is used.
    #[must_use]
    pub fn with_parts(policy: Policy, store: S, clock: C, key: DigestKey, secrets: impl Into<Secrets>) -> Self {
        Self::with_bans(policy, store, clock, (key, secrets), Arc::default())
    }

    /// As [`with_parts`](Self::with_parts), with bans that were set before.
    #[must_use]
    pub fn with_bans(
        policy: Policy,
        store: S,
        clock: C,
        (key, secrets): (DigestKey, impl Into<Secrets>),
        bans: Arc<BanList>,
    ) -> Self {
        let secrets = secrets.into();
        let policy = policy.with_key(key).with_bans(Arc::<BanList>::clone(&bans)).with_generation(1);
        let previous = secrets.old().map(|old| rotation::Previous::new(old.digest_key(), &policy));
        Self {
            bans,
            policy: ArcSwap::from_pointee(policy),
            previous,
            generation: Mutex::new(1),
            key,
            secrets,
            store,
            clock,
            observers: Vec::new(),
            followed: Mutex::default(),
            stand_in: OnceLock::new(),
            #[cfg(feature = "wait")]
            waiters: wait::Waiters::default(),
        }
    }

    /// Tells this observer too.
    #[must_use]
    pub fn observed_by(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.push(observer);
        self
    }

    /// The policy in force.
    pub fn policy(&self) -> Arc<Policy> {
        self.policy.load_full()
    }

    /// Puts another policy in force, for every decision that begins from now on. What was used stays used. Returns its
    /// generation; of several swaps at once, the one with the highest is in force afterwards.
    ///
    /// Settings are part of a policy: those of the policy before are gone unless this one has them. [`reload`](Self::reload)
    /// takes them over.
    pub fn swap(&self, policy: Policy) -> u64 {
        let policy = policy.with_key(self.key).with_bans(Arc::<BanList>::clone(&self.bans));
        // A poisoned lock is taken all the same: a number is never half changed.
        let mut generation = self.generation.lock().unwrap_or_else(PoisonError::into_inner);
        *generation = generation.saturating_add(1);
        let drawn = *generation;
        let policy = policy.with_generation(drawn);
        if let Some(previous) = &self.previous {
            previous.swap(&policy);
        }
        self.policy.store(Arc::new(policy));
        drop(generation);
        #[cfg(feature = "wait")]
        self.waiters.ring_all();
        drawn
    }

    /// Who is banned, beside whom the policy's lists deny and whom its ladders have banned.
    pub fn bans(&self) -> Arc<BanList> {
        Arc::clone(&self.bans)
    }

    /// The store.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// What the limiter's clock says.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The key id of the secret that signs. It tells installations apart, and nothing else of the secret.
    pub fn key_id(&self) -> KeyId {
        self.secrets.present().key_id()
    }

    /// The key that digests are made with.
    pub fn key(&self) -> DigestKey {
        self.key
    }

    /// A receipt as signed text that can travel.
    #[must_use]
    pub fn sign(&self, receipt: &Receipt) -> String {
        receipt.to_token(self.secrets.present(), Format::PRESENT)
    }

    /// Reads a receipt that this limiter signed.
    ///
    /// # Errors
    /// Where it did not.
    pub fn read_receipt(&self, token: &str) -> Result<Receipt, BytesError> {
        Receipt::from_token(token, &self.secrets)
    }

    /// Which rules a request meets, by which keys, and why not the others.
    pub fn explain<T>(&self, facts: &Facts<'_>, read: impl FnOnce(&[Explained<'_>]) -> T) -> T {
        read(&self.policy.load().explain(facts))
    }

    pub(crate) fn tell(&self, facts: &Facts<'_>, decision: &Decision, policy: &Policy) {
        if self.observers.is_empty() {
            return;
        }
        let facts = Facts { trace: decision.trace, ..*facts };
        for observer in &self.observers {
            observer.decided(&facts, decision, policy);
        }
    }

    /// Tells observers that what a request should have given back was lost.
    #[cfg(feature = "tower")]
    pub(crate) fn tell_lost_return(&self) {
        self.observers.iter().for_each(|observer| observer.return_lost());
    }

    /// Tells observers of a request that was refused undecided.
    #[cfg(feature = "tower")]
    pub(crate) fn tell_refusal(&self, refused: Refused<'_>, policy: &Policy) {
        for observer in &self.observers {
            observer.refused(refused, policy);
        }
    }

    /// There may be room under these keys before its time: whoever waits for it looks again.
    pub(crate) fn made_room(&self, keys: impl IntoIterator<Item = Digest>) {
        #[cfg(feature = "wait")]
        self.waiters.ring_first(keys);
        #[cfg(not(feature = "wait"))]
        drop(keys);
    }
}

impl<S: ImmediateStore, C: Clock> Limiter<S, C> {
    /// Decides one request and charges it.
    ///
    /// # Errors
    /// Where the request cannot be decided as asked: the caller's mistake, never a reason to try again later.
    pub fn check(&self, facts: &Facts<'_>) -> Result<Decision, PlanError> {
        let mut decision = Decision::default();
        self.check_into(facts, &mut decision)?;
        Ok(decision)
    }

    /// As [`check`](Self::check), in place of whatever is in `decision`: one is more than a kilobyte, and whoever decides
    /// much need not have it copied each time. After an error it is what it was before, and answers nothing.
    ///
    /// ```
    /// # use threshold_limiter::{Decision, Facts, Limiter, Policy};
    /// let policy = Policy::parse("[[rule]]\nname = 'user'\nper = ['user']\nlimit = '2/min'", &|_| None)?;
    /// let limiter = Limiter::new(policy);
    /// let mut decision = Decision::default();
    /// let mut allowed = Vec::new();
    /// for user in ["u1", "u1", "u1", "u2"] {
    ///     limiter.check_into(&Facts { user: Some(user), ..Facts::default() }, &mut decision)?;
    ///     allowed.push(decision.allowed());
    /// }
    /// assert_eq!(allowed, [true, true, false, true]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for `check`.
    pub fn check_into(&self, facts: &Facts<'_>, decision: &mut Decision) -> Result<(), PlanError> {
        let policy: Guard<Arc<Policy>> = self.policy.load();
        let (mut plan, mut outcome) = (Plan::new(&policy, Verb::Check), Outcome::default());
        at_once(self.decide(&mut plan, facts, &mut outcome, decision)).map(drop)
    }

    /// As [`check`](Self::check), with a receipt of what was charged.
    ///
    /// # Errors
    /// As for `check`.
    pub fn check_with_receipt(&self, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        at_once(self.check_with_receipt_async(facts))
    }

    /// What [`check`](Self::check) would answer; nothing is charged and nobody is struck.
    ///
    /// # Errors
    /// As for `check`.
    pub fn peek(&self, facts: &Facts<'_>) -> Result<Decision, PlanError> {
        at_once(self.peek_async(facts))
    }

    /// Charges after the fact. Never denies; what does not fit becomes debt.
    ///
    /// # Errors
    /// As for `check`, but any cost will do.
    pub fn record(&self, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        at_once(self.record_async(facts))
    }

    /// Gives back what a receipt says was charged, once. Says whether this was the first time.
    ///
    /// # Errors
    /// Where the store has no room to remember it: then nothing is given back, and it can be tried again later.
    pub fn refund(&self, receipt: &Receipt) -> Result<bool, StoreError> {
        at_once(self.refund_async(receipt))
    }

    /// Decides and charges a request whose true cost is not known yet. Where there is no room to keep the reservation, the
    /// request is denied and charged nothing.
    ///
    /// # Errors
    /// As for `check`.
    pub fn reserve(&self, facts: &Facts<'_>, ttl: Span, on_expire: OnExpire) -> Result<Reserved, PlanError> {
        at_once(self.reserve_async(facts, ttl, on_expire))
    }

    /// Ends a reservation with what it really cost: less is given back, more is recorded.
    ///
    /// # Errors
    /// Where the reservation is unknown or has ended, or was committed with another cost.
    pub fn commit(&self, reservation: TraceId, actual: &ActualCost<'_>) -> Result<(), EndError> {
        at_once(self.commit_async(reservation, actual))
    }

    /// Ends a reservation without any cost.
    ///
    /// # Errors
    /// Where the reservation is unknown or has ended.
    pub fn release(&self, reservation: TraceId) -> Result<(), EndError> {
        at_once(self.release_async(reservation))
    }

    /// Denies a subject for a while, as its provider's own Retry-After asks. Says whether any rule counts by it alone.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub fn pause(&self, layer: Layer, key: &str, length: Span) -> Result<bool, StoreError> {
        at_once(self.pause_async(layer, key, length))
    }

    /// Forgets what a subject has used, and its strikes.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub fn forgive(&self, layer: Layer, key: &str) -> Result<(), StoreError> {
        at_once(self.forgive_async(layer, key))
    }
}

/// The same facts, with an id nobody can guess if they had none.
pub(crate) fn traced<'f>(facts: &Facts<'f>) -> Facts<'f> {
    let trace = if facts.trace == TraceId::default() { random_id() } else { facts.trace };
    Facts { trace, ..*facts }
}

impl<S: std::fmt::Debug, C: std::fmt::Debug> std::fmt::Debug for Limiter<S, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Limiter")
            .field("generation", &self.policy.load().generation())
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}
