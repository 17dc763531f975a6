//! How many subjects are banned or shadow banned, and how many accounts are locked, as counts that are kept.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use threshold_core::event::EventId;
use threshold_core::plan::Verb;
use threshold_core::{Digest, Event, Standing, Timestamp};

use crate::observer::{ObservedDecision, ObservedOperation, Observer, Operation, OperationResult};

/// The most bans, shadow bans and locks that are counted, each. An entry takes about 100 bytes.
pub const MAX_COUNTED: usize = 100_000;

/// Counts the penalties in force that this limiter's decisions have brought.
///
/// It learns of penalties in four ways:
///
/// - It is an [`Observer`] of the limiter, and so sees every strike, and every account that is unlocked. A strike is found under the
///   key of its subject, as the store keeps it, and not by its name: names may be hidden, cut or lost on the way.
/// - The host reports what operators [forgive](Self::forgive): an observer is not told every key that a call concerns.
/// - The host reports the [lock](Self::lock) that the result of a login brings, and the success that ends it.
/// - After a start, the host [restores](Self::restore) what the journal has kept.
///
/// Bans that operators set are not among them: [`BanList::count`](crate::BanList::count) is their number. On a store that several nodes
/// share, each node counts what its own decisions have brought, so that the sum over all nodes is the number of penalties.
///
/// Counting costs the logarithm of the number of penalties, and no table is searched. Beyond [`MAX_COUNTED`], the penalty that ends
/// first is no longer counted.
///
/// ```
/// use std::sync::Arc;
/// use threshold_limiter::{ActivePenalties, Facts, Limiter, Policy};
///
/// let policy = Policy::parse(
///     "
///     [ladders.harsh]
///     rungs = ['ban 1h']
///     [[rule]]
///     name = 'posts'
///     per = ['user']
///     limit = '1/h'
///     ladder = 'harsh'
///     ",
///     &|_| None,
/// )?;
/// let penalties = Arc::new(ActivePenalties::default());
/// let observer = Arc::<ActivePenalties>::clone(&penalties);
/// let limiter = Limiter::builder(policy).observer(observer).build();
/// let user = Facts { user: Some("u1"), ..Facts::default() };
/// limiter.check(&user)?;
/// limiter.check(&user)?;
/// assert_eq!(penalties.count(limiter.now().into()).bans, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct ActivePenalties(Mutex<Penalties>);

/// How many penalties are in force.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PenaltyCounts {
    /// Subjects that a ladder has banned.
    pub bans: u64,
    /// Subjects that a ladder has shadow banned.
    pub shadow_bans: u64,
    /// Accounts that failed logins have locked for unknown devices.
    pub locks: u64,
}

/// A shadow ban in force.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ActiveShadowBan {
    /// The key of its standing, as the store keeps it.
    pub key: Digest,
    /// The subject as [events](crate::events) name it, `user=u1`; `None` if it was restored.
    pub subject: Option<Box<str>>,
    /// When it ends, unless further strikes follow.
    pub until: Timestamp,
}

#[derive(Debug, Default)]
struct Penalties {
    bans: Expiring,
    shadow_bans: Expiring,
    locks: Expiring,
}

impl ActivePenalties {
    /// Returns how many penalties are in force.
    #[must_use]
    pub fn count(&self, now: Timestamp) -> PenaltyCounts {
        let mut penalties = self.penalties();
        PenaltyCounts {
            bans: penalties.bans.count(now),
            shadow_bans: penalties.shadow_bans.count(now),
            locks: penalties.locks.count(now),
        }
    }

    /// Returns the shadow bans that end last, at most so many.
    #[must_use]
    pub fn shadow_bans(&self, now: Timestamp, most: usize) -> Vec<ActiveShadowBan> {
        let mut penalties = self.penalties();
        penalties.shadow_bans.count(now);
        let Expiring { ends, ordered } = &penalties.shadow_bans;
        let listed = ordered.iter().rev().take(most).map(|(until, key)| {
            let subject = ends.get(key).and_then(|(_, subject)| subject.clone());
            ActiveShadowBan { key: *key, subject, until: *until }
        });
        listed.collect()
    }

    /// Counts the penalties of a standing that was restored.
    pub fn restore(&self, key: Digest, standing: &Standing, now: Timestamp) {
        let mut penalties = self.penalties();
        if let Some(until) = standing.banned_until().filter(|until| *until > now) {
            penalties.bans.set(key, until, None);
        }
        if standing.is_shadowed(now) {
            penalties.shadow_bans.set(key, standing.decays_at(), None);
        }
    }

    /// No longer counts the penalties of these standings, because they were forgiven.
    pub fn forgive(&self, standings: impl IntoIterator<Item = Digest>) {
        let mut penalties = self.penalties();
        for key in standings {
            penalties.bans.remove(key);
            penalties.shadow_bans.remove(key);
        }
    }

    /// Counts an account as locked until then; with `None`, it is unlocked.
    pub fn lock(&self, account: Digest, until: Option<Timestamp>) {
        let mut penalties = self.penalties();
        match until {
            Some(until) => penalties.locks.set(account, until, None),
            None => penalties.locks.remove(account),
        }
    }

    #[cold]
    fn strike(&self, &ObservedDecision { operation, facts, decision, policy, .. }: &ObservedDecision<'_>) {
        // A record takes costs for which a check has no plan.
        let verb = if operation == Operation::Record { Verb::Record } else { Verb::Check };
        // The same facts under the same policy have the same subjects, in the same order.
        let Ok(plan) = policy.plan_for(verb, facts) else { return };
        let named = || {
            let event = Event::from_any_decision(decision, facts, policy, EventId::new([0; 16]));
            event.strike.map(|strike| strike.subject)
        };
        let mut penalties = self.penalties();
        for strike in &*decision.escalations {
            let Some(subject) = plan.subjects().get(strike.subject) else { continue };
            if let Some(until) = strike.banned_until {
                penalties.bans.set(subject.key(), until, None);
            }
            if strike.shadowed {
                // An event names one subject. Of two that one request shadow bans, both are listed under it.
                penalties.shadow_bans.set(subject.key(), decision.at.plus(subject.decay()), named());
            }
        }
    }

    fn penalties(&self) -> MutexGuard<'_, Penalties> {
        // A poisoned lock is safe to use: at worst a penalty is missing from the count.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for ActivePenalties {
    #[inline]
    fn decided(&self, decided: &ObservedDecision<'_>) {
        if !decided.decision.escalations.is_empty() {
            self.strike(decided);
        }
    }

    fn performed(&self, performed: &ObservedOperation) {
        if (performed.operation, performed.result) == (Operation::ChangeAccount, OperationResult::Done)
            && let Some(account) = performed.subject
        {
            self.lock(account, None);
        }
    }
}

/// Keys, each with the time at which it ends.
#[derive(Debug, Default)]
struct Expiring {
    ends: HashMap<Digest, (Timestamp, Option<Box<str>>)>,
    /// The same in the order of their ends.
    ordered: BTreeSet<(Timestamp, Digest)>,
}

impl Expiring {
    fn set(&mut self, key: Digest, until: Timestamp, subject: Option<Box<str>>) {
        self.remove(key);
        self.ends.insert(key, (until, subject));
        self.ordered.insert((until, key));
        if self.ends.len() > MAX_COUNTED {
            self.drop_first();
        }
    }

    fn remove(&mut self, key: Digest) {
        if let Some((until, _)) = self.ends.remove(&key) {
            self.ordered.remove(&(until, key));
        }
    }

    fn count(&mut self, now: Timestamp) -> u64 {
        while self.ordered.first().is_some_and(|(until, _)| *until <= now) {
            self.drop_first();
        }
        self.ends.len() as u64
    }

    fn drop_first(&mut self) {
        if let Some((_, key)) = self.ordered.pop_first() {
            self.ends.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn key(number: u32) -> Digest {
        Digest::from_u128(number.into())
    }

    fn at(second: u64) -> Timestamp {
        NOW.plus(threshold_core::Span::from_secs(second))
    }

    /// Woken by leaving out `drop_first` in `set`, or the removal from `ordered`.
    #[test]
    fn a_full_count_leaves_out_what_ends_first() {
        let penalties = ActivePenalties::default();
        let most = u32::try_from(MAX_COUNTED).unwrap();
        for number in 0..most + 5 {
            penalties.lock(key(number), Some(at(1_000 + u64::from(number))));
        }
        assert_eq!(penalties.count(NOW).locks, u64::from(most));
        assert_eq!(penalties.count(at(1_000 + 4)).locks, u64::from(most), "these are no longer counted");
        assert_eq!(penalties.count(at(1_000 + 5)).locks, u64::from(most - 1));
        // One that is set again takes no second place.
        penalties.lock(key(most), Some(at(9_000_000)));
        assert_eq!(penalties.count(at(8_000_000)).locks, 1);
        let held = penalties.penalties();
        assert_eq!((held.locks.ends.len(), held.locks.ordered.len()), (1, 1));
    }

    proptest! {
        /// Woken by `<` in place of `<=` in `count`.
        #[test]
        fn the_count_is_the_number_of_keys_that_have_not_ended(
            steps in proptest::collection::vec((0..8_u32, proptest::option::of(0..40_u64)), 0..60),
        ) {
            let penalties = ActivePenalties::default();
            let mut model = BTreeMap::new();
            for (second, (number, end)) in (0..).zip(steps) {
                match end {
                    Some(end) => model.insert(number, end),
                    None => model.remove(&number),
                };
                penalties.lock(key(number), end.map(at));
                model.retain(|_, end| *end > second);
                prop_assert_eq!(penalties.count(at(second)).locks, model.len() as u64);
            }
        }
    }
}
