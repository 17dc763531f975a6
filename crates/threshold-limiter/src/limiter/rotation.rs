//! While the secret is rotated: what is stored under digests of the old secret is found, and moves to those of the present
//! one when whomever it is about comes back.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError};

use arc_swap::ArcSwap;
use threshold_core::command::{Command, Rekeyed};
use threshold_core::key::TextKeys;
use threshold_core::lockout::{Attempt, LoginRequest};
use threshold_core::policy::Layer;
use threshold_core::{Decision, Digest, DigestKey, Facts, Limit, Outcome, Plan, Policy, Receipt};

use super::Limiter;
use crate::clock::Clock;
use crate::store::{Store, StoreError};
use crate::sync::{Mutex, MutexGuard};

/// How many digests are remembered that have moved: receipts and attempts from before the rotation name old ones. It takes
/// some megabytes, and only while the secret is rotated.
const MAX_MOVED: usize = 1 << 16;

/// The policy in force, digested with the key of the old secret.
pub(super) struct Previous {
    key: DigestKey,
    policy: ArcSwap<Policy>,
    moved: Mutex<Moved>,
}

/// The latest digests that have moved, and where to.
#[derive(Default)]
struct Moved {
    to: HashMap<Digest, Digest>,
    in_order: VecDeque<Digest>,
}

impl Moved {
    fn add(&mut self, old: Digest, new: Digest) {
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

    /// Where what was stored under a digest is now; the same where it has not moved.
    fn present(&self, digest: Digest) -> Digest {
        self.moved().to.get(&digest).copied().unwrap_or(digest)
    }

    fn moved(&self) -> MutexGuard<'_, Moved> {
        // A poisoned lock is taken all the same: an entry is never half there.
        self.moved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn swap(&self, policy: &Policy) {
        self.policy.store(Arc::new(policy.clone().with_key(self.key)));
    }

    /// Shows `policy` under the old key: that is at hand unless it is not in force any more, or not yet.
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
    /// As [`settle`](Self::settle), of a plan of these facts. While the secret is rotated, everything that the plan needs is
    /// moved first.
    #[inline]
    pub(super) async fn settle_of(
        &self,
        facts: &Facts<'_>,
        plan: &Plan<'_>,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> bool {
        self.settle_moving(self.moves_of(facts, plan), plan, outcome, decision).await
    }

    /// What a plan of these facts needs and has to be moved first; nothing, unless the secret is rotated.
    #[inline]
    pub(crate) fn moves_of(&self, facts: &Facts<'_>, plan: &Plan<'_>) -> Option<Box<Rekeyed>> {
        let previous = self.previous.as_ref()?;
        previous.under(plan.policy(), |policy| {
            let old = policy.plan_for(plan.verb(), facts).ok()?;
            let mut rekeyed = Box::<Rekeyed>::default();
            rekeyed.add(&old, plan);
            Some(rekeyed)
        })
    }

    /// As [`settle`](Self::settle), after [what has to be moved](Self::moves_of).
    #[inline]
    pub(crate) async fn settle_moving(
        &self,
        moves: Option<Box<Rekeyed>>,
        plan: &Plan<'_>,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> bool {
        if let Some(moves) = moves {
            // In a box: it is seldom there, and would take room in every decision.
            if let Err(error) = Box::pin(self.rekey(*moves)).await {
                *decision = self.decide_without_store(plan, error, self.clock.now());
                return false;
            }
        }
        self.settle(plan, outcome, decision).await
    }

    /// Before a login: the account, its address's budget, and the penalties of whoever tries.
    pub(super) async fn rekey_login(
        &self,
        policy: &Policy,
        request: &LoginRequest<'_>,
        bars: &[Plan<'_>],
    ) -> Result<(), StoreError> {
        let (Some(previous), Some(login)) = (&self.previous, policy.login()) else { return Ok(()) };
        let id = Default::default();
        let new = request.tried(policy, &self.secrets, id);
        let rekeyed = previous.under(policy, |policy| {
            let old = request.tried(policy, &self.secrets, id);
            let mut rekeyed = Rekeyed::default();
            rekeyed.accounts.extend(old.account.zip(new.account));
            let limit = Limit::from(login.ip);
            rekeyed.balances.extend(old.address.zip(new.address).map(|(old, new)| (old, new, limit)));
            for (old, new) in request.bars(policy, id).iter().zip(bars) {
                rekeyed.add(old, new);
            }
            rekeyed
        });
        self.rekey(rekeyed).await
    }

    /// Before somebody looks at an account, or changes it, by its name.
    pub(super) async fn rekey_account(&self, name: &str, new: Digest) -> Result<(), StoreError> {
        let digest = |previous: &Previous| previous.policy.load().account_digest(name).ok().flatten();
        let old = self.previous.as_ref().and_then(digest);
        let accounts = old.map(|old| (old, new)).into_iter().collect();
        self.rekey(Rekeyed { accounts, ..Rekeyed::default() }).await
    }

    /// Before one limit that stands alone is asked.
    pub(super) async fn rekey_text(&self, text: &str, new: Digest, limit: &Limit) -> Result<(), StoreError> {
        let old = self.previous.as_ref().map(|previous| TextKeys::new(previous.key, limit).digest(text));
        let balances = old.map(|old| (old, new, *limit)).into_iter().collect();
        self.rekey(Rekeyed { balances, ..Rekeyed::default() }).await
    }

    /// Before somebody looks at how it stands with a subject. Without a rotation under way there is nothing to do.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn rekey_subject(&self, layer: Layer, key: &str) -> Result<(), StoreError> {
        let Some(previous) = &self.previous else { return Ok(()) };
        let policy = self.policy();
        let standings = previous.under(&policy, |old| policy.rekeyed_standings(old, layer, key));
        self.rekey(Rekeyed { standings, ..Rekeyed::default() }).await
    }

    /// Forgets what is still stored of a subject under digests of the old secret.
    pub(super) async fn forgive_previous(&self, layer: Layer, key: &str) -> Result<(), StoreError> {
        let Some(previous) = &self.previous else { return Ok(()) };
        let keys = previous.policy.load().keys_of(layer, key);
        self.execute(Command::Forgive { keys }).await.map(drop)
    }

    async fn rekey(&self, rekeyed: Rekeyed) -> Result<(), StoreError> {
        if rekeyed.is_empty() {
            return Ok(());
        }
        let now = self.clock.now();
        for (old, new) in &rekeyed.standings {
            // One whose name is hidden is found by its digest alone.
            if let Some(ban) = self.bans.named(*old) {
                self.bans.forget_name(*old);
                self.bans.name(*new, ban, now);
            }
        }
        let balances = rekeyed.balances.iter().map(|(old, new, _)| (*old, *new));
        let moved: Vec<_> = balances.chain(rekeyed.accounts.iter().copied()).collect();
        self.store.execute(Command::Rekey(rekeyed), now).await?;
        if let Some(previous) = &self.previous {
            let mut known = previous.moved();
            moved.into_iter().for_each(|(old, new)| known.add(old, new));
        }
        Ok(())
    }

    /// A receipt in the terms of what is stored now.
    pub(super) fn present_receipt<'r>(&self, receipt: &'r Receipt) -> Cow<'r, Receipt> {
        match &self.previous {
            Some(previous) => Cow::Owned(receipt.rekeyed(|key| previous.present(key))),
            None => Cow::Borrowed(receipt),
        }
    }

    /// An attempt in the terms of what is stored now.
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
