//! Rotation of the secret: records that are stored under digests of the old secret move to digests of the present one when a
//! request needs them.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError};

use arc_swap::ArcSwap;
use threshold_core::command::{Command, KeyMoves};
use threshold_core::key::TextKeys;
use threshold_core::lockout::{Attempt, LoginRequest};
use threshold_core::plan::SubjectKeys;
use threshold_core::policy::Layer;
use threshold_core::{Decision, Digest, DigestKey, Facts, Limit, Outcome, Plan, Policy, Receipt, TraceId};

use super::Limiter;
use super::under::Settled;
use crate::clock::Clock;
use crate::store::{Store, StoreError};
use crate::sync::{Mutex, MutexGuard};

/// How many moved digests are remembered: receipts and login attempts from before the rotation refer to old digests. They take
/// some megabytes, only during a rotation.
const MAX_MOVED: usize = 1 << 16;

/// The policy in force under the key of the old secret.
pub(super) struct Previous {
    key: DigestKey,
    policy: ArcSwap<Policy>,
    moved: Mutex<Moved>,
}

/// The digests that have moved most recently, and their new digests.
#[derive(Default)]
struct Moved {
    to: HashMap<Digest, Digest>,
    in_order: VecDeque<Digest>,
}

impl Moved {
    fn add(&mut self, old: Digest, new: Digest) {
        // In the order once, however often it moves.
        if self.to.insert(old, new).is_none() {
            self.in_order.push_back(old);
        }
        if self.in_order.len() > MAX_MOVED
            && let Some(first) = self.in_order.pop_front()
        {
            self.to.remove(&first);
        }
    }
}

impl Previous {
    pub(super) fn new(key: DigestKey, policy: &Policy) -> Self {
        let policy = ArcSwap::from_pointee(policy.clone().with_key(key));
        Self { key, policy, moved: Mutex::default() }
    }

    /// Returns the digest that a record is stored under now.
    fn present(&self, digest: Digest) -> Digest {
        // Any other digest is a present one, or its record has not moved yet.
        self.moved().to.get(&digest).copied().unwrap_or(digest)
    }

    fn moved(&self) -> MutexGuard<'_, Moved> {
        // A poisoned lock is safe to use: an entry is never half inserted.
        self.moved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn swap(&self, policy: &Policy) {
        self.policy.store(Arc::new(policy.clone().with_key(self.key)));
    }

    /// Calls `show` with `policy` under the old key. That of the policy in force is at hand; any other is derived.
    fn under<T>(&self, policy: &Policy, show: impl FnOnce(&Policy) -> T) -> T {
        let held = self.policy.load();
        let own = if held.generation() == policy.generation() {
            Cow::Borrowed(&**held)
        } else {
            Cow::Owned(policy.clone().with_key(self.key))
        };
        show(&own)
    }
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Settles a plan of these facts. During a rotation, moves the records that the plan needs first.
    #[inline]
    pub(super) async fn settle_of(
        &self,
        facts: &Facts<'_>,
        plan: &Plan<'_>,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> Settled {
        self.settle_moving(self.moves_of(facts, plan), plan, outcome, decision).await
    }

    /// Returns the records that must move before a plan of these facts is settled; `None` unless the secret is rotated.
    #[inline]
    pub(crate) fn moves_of(&self, facts: &Facts<'_>, plan: &Plan<'_>) -> Option<Box<KeyMoves>> {
        self.moves_from(plan, |old| {
            // With the same id, by which shards are chosen. A plan that is tried again has another one by now.
            let trace = if facts.trace == TraceId::default() { plan.trace() } else { facts.trace };
            old.fill(&Facts { trace, ..*facts }).ok()?;
            self.store.learn_places(&mut || old.places(facts));
            Some(())
        })
    }

    /// Returns the records that must move from the keys of a plan under the old secret, which `fill` makes; `None` unless the secret
    /// is rotated.
    #[inline]
    pub(super) fn moves_from(
        &self,
        plan: &Plan<'_>,
        fill: impl FnOnce(&mut Plan<'_>) -> Option<()>,
    ) -> Option<Box<KeyMoves>> {
        let previous = self.previous.as_ref()?;
        previous.under(plan.policy(), |policy| {
            let mut old = Plan::new(policy, plan.verb());
            fill(&mut old)?;
            let mut rekeyed = Box::<KeyMoves>::default();
            plan.add_moves_from(&old, &mut rekeyed);
            Some(rekeyed)
        })
    }

    /// Settles a plan after [the records that it needs](Self::moves_of) have moved.
    #[inline]
    pub(crate) async fn settle_moving(
        &self,
        moves: Option<Box<KeyMoves>>,
        plan: &Plan<'_>,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> Settled {
        if !self.move_records(moves, plan, decision).await {
            return Settled::default();
        }
        self.settle(plan, outcome, decision).await
    }

    /// Moves records before a plan is settled. If that fails, decides without the store and returns false.
    #[inline]
    pub(super) async fn move_records(
        &self,
        moves: Option<Box<KeyMoves>>,
        plan: &Plan<'_>,
        decision: &mut Decision,
    ) -> bool {
        let Some(moves) = moves else { return true };
        // Boxed: it is needed during a rotation only, and would enlarge the future of every decision.
        let Err(error) = Box::pin(self.rekey(*moves)).await else { return true };
        // Settled without them, the request would find unused limits and no penalty.
        *decision = self.decide_unsent(plan, error, self.time());
        false
    }

    /// Moves the records of a login attempt: the account, the budget of the address, and the caller's penalties.
    pub(super) async fn rekey_login(
        &self,
        policy: &Policy,
        request: &LoginRequest<'_>,
        checks: &[Plan<'_>],
    ) -> Result<(), StoreError> {
        let (Some(previous), Some(login)) = (&self.previous, policy.login()) else { return Ok(()) };
        // Only digests are compared, and they do not depend on the id.
        let id = Default::default();
        let new = request.attempt_keys(policy, &self.secrets, id);
        let rekeyed = previous.under(policy, |policy| {
            let old = request.attempt_keys(policy, &self.secrets, id);
            self.store.learn_places(&mut || request.places(policy, &old));
            let mut rekeyed = KeyMoves::default();
            rekeyed.accounts.extend(old.account.zip(new.account));
            let limit = Limit::from(login.ip);
            rekeyed.balances.extend(old.address.zip(new.address).map(|(old, new)| (old, new, limit)));
            for (old, new) in request.penalty_checks(policy, id).iter().zip(checks) {
                new.add_moves_from(old, &mut rekeyed);
            }
            rekeyed
        });
        self.rekey(rekeyed).await
    }

    /// Moves the record of an account that is read or changed by its name.
    pub(super) async fn rekey_account(&self, name: &str, new: Digest) -> Result<(), StoreError> {
        let digest = |previous: &Previous| previous.policy.load().account_digest(name).ok().flatten();
        let old = self.previous.as_ref().and_then(digest);
        let accounts = old.map(|old| (old, new)).into_iter().collect();
        self.rekey(KeyMoves { accounts, ..KeyMoves::default() }).await
    }

    /// Moves the balance of a key that is checked without a policy.
    pub(super) async fn rekey_text(&self, text: &str, new: Digest, limit: &Limit) -> Result<(), StoreError> {
        let old = self.previous.as_ref().map(|previous| TextKeys::new(previous.key, limit).digest(text));
        let balances = old.map(|old| (old, new, *limit)).into_iter().collect();
        self.rekey(KeyMoves { balances, ..KeyMoves::default() }).await
    }

    /// Returns what `show` finds in a policy under the key of the old secret: the keys of records that have not moved yet. `None` unless
    /// the secret is rotated.
    pub fn under_old_secret<T>(&self, policy: &Policy, show: impl FnOnce(&Policy) -> T) -> Option<T> {
        Some(self.previous.as_ref()?.under(policy, show))
    }

    /// Moves the standings of a subject, so that they can be read by their present digests. Does nothing unless the secret is
    /// rotated.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn rekey_subject(&self, layer: Layer, key: &str) -> Result<(), StoreError> {
        let Some(previous) = &self.previous else { return Ok(()) };
        let policy = self.policy();
        let standings = previous.under(&policy, |old| policy.rekeyed_standings(old, layer, key));
        self.rekey(KeyMoves { standings, ..KeyMoves::default() }).await
    }

    /// Removes what is still stored of a subject under digests of the old secret.
    pub(super) async fn forgive_previous(&self, keys: impl FnOnce(&Policy) -> SubjectKeys) -> Result<(), StoreError> {
        let Some(previous) = &self.previous else { return Ok(()) };
        let keys = keys(&previous.policy.load());
        self.execute(Command::Forgive { keys }).await.map(drop)
    }

    async fn rekey(&self, rekeyed: KeyMoves) -> Result<(), StoreError> {
        if rekeyed.is_empty() {
            return Ok(());
        }
        let now = self.time();
        for (old, new) in &rekeyed.standings {
            // The name of a ban is stored under the digest too, and must move with it.
            if let Some(ban) = self.bans.named(*old) {
                self.bans.forget_name(*old);
                self.bans.name(*new, ban, now);
            }
        }
        let balances = rekeyed.balances.iter().map(|(old, new, _)| (*old, *new));
        let moved: Vec<_> = balances.chain(rekeyed.accounts.iter().copied()).collect();
        self.store.execute(Command::Rekey(rekeyed), now).await?;
        // Only now: as long as the store has not moved a record, receipts must refer to it by its old digest.
        if let Some(previous) = &self.previous {
            let mut known = previous.moved();
            moved.into_iter().for_each(|(old, new)| known.add(old, new));
        }
        Ok(())
    }

    /// Returns a receipt with the digests that its balances are stored under now.
    pub(super) fn present_receipt<'r>(&self, receipt: &'r Receipt) -> Cow<'r, Receipt> {
        match &self.previous {
            Some(previous) => Cow::Owned(receipt.rekeyed(|key| previous.present(key))),
            None => Cow::Borrowed(receipt),
        }
    }

    /// Returns a login attempt with the digests that its records are stored under now.
    pub(super) fn present_attempt(&self, mut attempt: Attempt) -> Attempt {
        let Some(previous) = &self.previous else { return attempt };
        let present = |digest: Option<Digest>| digest.map(|digest| previous.present(digest));
        (attempt.account, attempt.address) = (present(attempt.account), present(attempt.address));
        attempt
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by: no removal of the first in `add`.
    #[test]
    fn of_too_many_moved_digests_the_oldest_is_forgotten() {
        let digest = |number: usize| Digest::from_u128(number as u128);
        let mut moved = Moved::default();
        for number in 0..=MAX_MOVED {
            moved.add(digest(number), digest(MAX_MOVED + number));
            moved.add(digest(number), digest(MAX_MOVED + number));
        }
        assert_eq!((moved.to.len(), moved.in_order.len()), (MAX_MOVED, MAX_MOVED));
        assert_eq!(moved.to.get(&digest(0)), None);
        assert_eq!(moved.to.get(&digest(1)), Some(&digest(MAX_MOVED + 1)));
    }
}
