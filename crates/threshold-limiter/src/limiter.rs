//! The limiter: a policy, a store and a clock, in your process.

mod asynchronous;
mod blind;
mod builder;
mod control;
mod denials;
mod failure;
mod jointly;
#[cfg(feature = "sqlite")]
mod journaled;
mod limit_decision;
mod locks;
mod login;
mod many;
mod names;
mod pause;
mod penalties;
mod requests;
mod rotation;
#[cfg(feature = "tower")]
mod tokens;
mod under;
#[cfg(feature = "wait")]
pub(crate) mod wait;

#[cfg(feature = "memory")]
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::{ArcSwap, Guard};
use threshold_core::plan::Verb;
use threshold_core::policy::{Layer, Policy};
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{
    BytesError, Decision, Digest, DigestKey, Facts, Format, KeyId, Outcome, Plan, PlanError, Receipt, Secrets,
    Timestamp, TraceId,
};

use crate::bans::BanList;
use crate::clock::Clock;
#[cfg(feature = "memory")]
use crate::clock::SystemClock;
use crate::observer::Observer;
use crate::observer::Refused;
use crate::random_id;
#[cfg(feature = "memory")]
use crate::store::memory::MemoryStore;
use crate::store::{EndError, ImmediateStore, Store, StoreError, at_once};
use crate::sync::Mutex;

#[cfg(feature = "memory")]
pub use builder::InMemory;
pub use builder::{LimiterBuilder, OtherSecrets};
pub use control::UnfitSetting;
pub use jointly::{CreditError, JointDecision, JointError, JointRequest};
#[cfg(feature = "sqlite")]
pub use journaled::Journaled;
pub use limit_decision::LimitDecision;
pub use login::LoginError;
pub use pause::PauseError;
#[cfg(feature = "wait")]
pub use wait::{MAX_WAITERS, Waited};

/// Decides for every request whether it is allowed.
pub struct Limiter<
    #[cfg(feature = "memory")] S = MemoryStore,
    #[cfg(not(feature = "memory"))] S,
    #[cfg(feature = "memory")] C = SystemClock,
    #[cfg(not(feature = "memory"))] C,
> {
    policy: ArcSwap<Policy>,
    /// The generation of the policy in force. The lock orders swaps: it is held from drawing a number until that policy is
    /// stored.
    generation: Mutex<u64>,
    key: DigestKey,
    secrets: Secrets,
    /// The policy under the old secret, while the secret is rotated.
    previous: Option<rotation::Previous>,
    store: S,
    pub(crate) clock: C,
    pub(crate) observers: Vec<Arc<dyn Observer>>,
    bans: Arc<BanList>,
    /// Held while changes of bans and settings are applied, and while a policy comes into force that must have all settings.
    /// It is taken before `generation`, never after.
    followed: Mutex<control::Followed>,
    /// The store that decides while `store` fails, for rules with `on_store_error = "local"`.
    #[cfg(feature = "memory")]
    stand_in: OnceLock<MemoryStore>,
    /// For stores that do not answer at once: denials that are repeated, penalties and locks that were seen, and what the store
    /// does not know of this node.
    denials: denials::Denials,
    penalties: penalties::SeenPenalties,
    locks: locks::SeenLocks,
    blind: blind::BlindCharges,
    #[cfg(feature = "wait")]
    waiters: wait::Waiters,
    /// How many settings have ended by time.
    ended_settings: AtomicU64,
}

/// A decision, and the reservation that it made.
#[derive(Debug)]
pub struct Reserved {
    /// The decision.
    pub decision: Decision,
    /// The id that ends the reservation, if the request is allowed.
    pub reservation: Option<TraceId>,
}

#[cfg(feature = "memory")]
impl Limiter {
    /// Creates a limiter in memory, sized by the policy's `[memory]`, on the system's clock. [`builder`](Self::builder) sets
    /// everything else.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self::builder(policy).build()
    }
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Returns the policy in force.
    pub fn policy(&self) -> Arc<Policy> {
        self.policy.load_full()
    }

    /// Puts another policy in force, for every decision that begins from now on. Balances are kept. Returns the policy's
    /// generation; of several concurrent swaps, the policy with the highest generation is in force afterwards.
    ///
    /// Settings are part of a policy: those of the policy before are dropped unless this one has them.
    /// [`reload`](Self::reload) takes them over.
    pub fn swap(&self, policy: Policy) -> u64 {
        let policy = policy.with_key(self.key).with_bans(Arc::<BanList>::clone(&self.bans));
        // A poisoned lock is safe to use: a number is never half changed.
        let mut generation = self.generation.lock().unwrap_or_else(PoisonError::into_inner);
        // Held until the policy is stored: of two swaps, the one with the later generation must be in force in the end.
        *generation = generation.saturating_add(1);
        let drawn = *generation;
        let policy = policy.with_generation(drawn);
        if let Some(previous) = &self.previous {
            previous.swap(&policy);
        }
        self.policy.store(Arc::new(policy));
        drop(generation);
        // Under the new policy they may have room at once.
        #[cfg(feature = "wait")]
        self.waiters.wake_all();
        drawn
    }

    /// Returns the bans that operators have set. The policy's lists and the bans of ladders are not part of it.
    pub fn bans(&self) -> Arc<BanList> {
        Arc::clone(&self.bans)
    }

    /// Returns the store.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Returns the present time: that of the store, if it has a clock of its own, else that of the limiter's clock.
    pub fn now(&self) -> SystemTime {
        self.time().into()
    }

    /// Returns the present time. Nodes that share a store must agree on it, however wrong the clock of one of them is.
    #[inline]
    pub(crate) fn time(&self) -> Timestamp {
        self.store.now().unwrap_or_else(|| self.clock.now())
    }

    /// Returns the key id of the secret that signs. It identifies the secret and reveals nothing of it.
    pub fn key_id(&self) -> KeyId {
        self.secrets.present().key_id()
    }

    /// Returns the key that digests are made with.
    pub fn key(&self) -> DigestKey {
        self.key
    }

    /// Returns a receipt as a signed token.
    #[must_use]
    pub fn sign(&self, receipt: &Receipt) -> String {
        receipt.to_token(self.secrets.present(), Format::PRESENT)
    }

    /// Verifies and decodes a receipt that this limiter has signed.
    ///
    /// # Errors
    /// Returns an error if the token was not signed by this limiter's secrets.
    pub fn read_receipt(&self, token: &str) -> Result<Receipt, BytesError> {
        Receipt::from_token(token, &self.secrets)
    }

    /// Notifies observers that a request could not give back its charges.
    #[cfg(feature = "tower")]
    pub(crate) fn tell_lost_return(&self) {
        self.observers.iter().for_each(|observer| observer.return_lost());
    }

    /// Notifies observers of a request that a host denies without a decision, because no plan can hold it.
    pub fn refuse(&self, policy: &Policy, reason: &str, trace: TraceId) {
        self.tell_refusal(Refused { at: self.time(), ip: None, status: 429, reason, trace }, policy);
    }

    /// Notifies observers of a request that was refused without a decision.
    pub(crate) fn tell_refusal(&self, refused: Refused<'_>, policy: &Policy) {
        for observer in &self.observers {
            observer.refused(refused, policy);
        }
    }

    /// Wakes those who wait for these keys: there may be room earlier than computed.
    pub(crate) fn made_room(&self, keys: impl IntoIterator<Item = Digest>) {
        // A store that answers at once is asked every time, so there is nothing to forget.
        if self.store.answers_at_once() {
            return self.wake_waiting(keys);
        }
        let keys: Vec<Digest> = keys.into_iter().collect();
        self.denials.forget(keys.iter().copied());
        self.wake_waiting(keys);
    }

    fn wake_waiting(&self, keys: impl IntoIterator<Item = Digest>) {
        #[cfg(feature = "wait")]
        self.waiters.wake_first(keys);
        #[cfg(not(feature = "wait"))]
        drop(keys);
    }
}

impl<S: ImmediateStore, C: Clock> Limiter<S, C> {
    /// Decides one request and charges it.
    ///
    /// ```
    /// # use threshold_limiter::{Facts, Limiter, Policy};
    /// let policy = Policy::parse("[[rule]]\nname = 'user'\nper = ['user']\nlimit = '1/min'", &|_| None)?;
    /// let limiter = Limiter::new(policy);
    /// let facts = Facts { user: Some("u1"), ..Facts::default() };
    /// assert!(limiter.check(&facts)?.allowed());
    /// let denied = limiter.check(&facts)?;
    /// println!("Retry-After: {}", denied.retry_after_secs().unwrap_or(1));
    /// # assert!(!denied.allowed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the request cannot be decided, such as for a cost that never fits. It is the caller's mistake,
    /// and a retry does not help. A denial is a decision, not an error.
    pub fn check(&self, facts: &Facts<'_>) -> Result<Decision, PlanError> {
        // A guard is cheaper than an `Arc`, and nothing is awaited while it is held.
        let policy: Guard<Arc<Policy>> = self.policy.load();
        let (mut plan, mut outcome) = (Plan::new(&policy, Verb::Check), Outcome::default());
        let mut decision = Decision::default();
        at_once(self.decide(&mut plan, facts, &mut outcome, &mut decision))?;
        Ok(decision)
    }

    /// Decides one request, charges it, and returns a receipt of what was charged.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub fn check_with_receipt(&self, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        at_once(self.check_with_receipt_async(facts))
    }

    /// Returns what [`check`](Self::check) would answer, without charging or striking.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub fn peek(&self, facts: &Facts<'_>) -> Result<Decision, PlanError> {
        at_once(self.peek_async(facts))
    }

    /// Charges a request that has already happened. Never denies; a cost that does not fit becomes debt. A place in a concurrency
    /// limit is held for the limit's `ttl`, unless the receipt is refunded.
    ///
    /// # Errors
    /// As for [`check`](Self::check), but a cost that never fits is charged too.
    pub fn record(&self, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        at_once(self.record_async(facts))
    }

    /// Gives back what a receipt says was charged, once. Returns whether this was the first time.
    ///
    /// # Errors
    /// Returns an error if the store has no room to remember the refund. Then nothing is given back, and a later retry may
    /// succeed.
    pub fn refund(&self, receipt: &Receipt) -> Result<bool, StoreError> {
        at_once(self.refund_async(receipt))
    }

    /// Decides and charges a request whose actual cost is not known yet. The reservation lasts `ttl`, at most an hour. If the
    /// store has no room for the reservation, the request is denied and not charged.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub fn reserve(&self, facts: &Facts<'_>, ttl: Duration, on_expire: OnExpire) -> Result<Reserved, PlanError> {
        at_once(self.reserve_async(facts, ttl, on_expire))
    }

    /// Ends a reservation with the actual cost: refunds what it did not use, and records what it used beyond.
    ///
    /// # Errors
    /// Returns an error if the reservation is unknown, has ended, or was committed with another cost.
    pub fn commit(&self, reservation: TraceId, actual: &ActualCost<'_>) -> Result<(), EndError> {
        at_once(self.commit_async(reservation, actual))
    }

    /// Ends a reservation and refunds all of it.
    ///
    /// # Errors
    /// Returns an error if the reservation is unknown or has ended.
    pub fn release(&self, reservation: TraceId) -> Result<(), EndError> {
        at_once(self.release_async(reservation))
    }

    /// Resets what a subject has used, and its strikes.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub fn forgive(&self, layer: Layer, key: &str) -> Result<(), StoreError> {
        at_once(self.forgive_async(layer, key))
    }
}

/// Returns the facts with a random trace id if they have none.
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
