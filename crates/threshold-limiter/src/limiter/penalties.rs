//! Penalties that this node has seen. They hold while the store is away, whatever `on_store_error` says.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use threshold_core::plan::Known;
use threshold_core::{Decision, Digest, Outcome, Plan, Timestamp};

use crate::sync::{Mutex, MutexGuard};

/// The largest number of subjects. An entry takes less than 300 bytes.
const MAX_SEEN: usize = 1 << 16;

/// The subjects whose last decision by the store was made under a penalty, or brought one.
#[derive(Debug, Default)]
pub(super) struct SeenPenalties {
    seen: Mutex<HashMap<Digest, Seen>>,
    /// Whether there ever was one, so that no lock is taken where no ladder has punished.
    is_used: AtomicBool,
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    known: Known,
    /// When this node heard of it, by its own clock.
    heard: Timestamp,
}

impl Seen {
    /// Returns the store's time by now. A node whose clock was set back counts from the last time that it knows.
    fn store_now(&self, now: Timestamp) -> Timestamp {
        self.known.at().plus(now.since(self.heard))
    }

    fn holds(&self, now: Timestamp) -> bool {
        self.known.denies(self.store_now(now))
    }
}

impl SeenPenalties {
    /// Takes over what the store has answered about the subjects of a request.
    pub(super) fn see(&self, plan: &Plan<'_>, outcome: &Outcome, heard: Timestamp) {
        let mut new = plan.penalties(outcome).peekable();
        if plan.subjects().is_empty() || (new.peek().is_none() && !self.is_used.load(Ordering::Relaxed)) {
            return;
        }
        self.is_used.store(true, Ordering::Relaxed);
        let mut seen = self.seen();
        // A penalty that an operator has lifted on another node must not come back here. The answer shows only the harshest one, so
        // it says nothing about the other subjects of a request that is under a penalty.
        if !outcome.is_penalised() {
            for subject in plan.subjects() {
                seen.remove(&subject.key());
            }
        }
        for (key, known) in new {
            if seen.len() >= MAX_SEEN {
                seen.retain(|_, seen| seen.holds(heard));
            }
            // Without room the subject is decided by `on_store_error` like any other.
            if seen.len() < MAX_SEEN {
                seen.insert(key, Seen { known, heard });
            }
        }
    }

    /// Denies a request by the penalties that were seen; `None` if none is in force.
    pub(super) fn decide(&self, plan: &Plan<'_>, now: Timestamp) -> Option<Decision> {
        if !self.is_used.load(Ordering::Relaxed) {
            return None;
        }
        let seen = self.seen();
        plan.decide_penalised(|key| seen.get(&key).map(|seen| (seen.known, seen.store_now(now))))
    }

    /// Drops the penalties of subjects that were forgiven.
    pub(super) fn forget(&self, keys: impl IntoIterator<Item = Digest>) {
        if self.is_used.load(Ordering::Relaxed) {
            let mut seen = self.seen();
            for key in keys {
                seen.remove(&key);
            }
        }
    }

    fn seen(&self) -> MutexGuard<'_, HashMap<Digest, Seen>> {
        // A poisoned lock is safe to use: an entry is inserted in one step.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use threshold_core::{Balance, Facts, Ledger, Policy, Span, Standing, settle};

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_630);

    fn policy() -> Policy {
        let text = "[ladders.own]\nrungs = ['cooldown 1min']\n[[rule]]\nname = 'user'\nper = ['user']\nlimit = '1/h'\nladder = 'own'";
        Policy::parse(text, &|_| None).unwrap()
    }

    /// Returns the outcome of the request that brings a cool-down.
    fn struck(plan: &Plan<'_>) -> Outcome {
        let (mut balances, mut standings) = ([Balance::default()], [Standing::default()]);
        let _ = settle(plan.bill(), &mut balances, &mut standings, NOW);
        settle(plan.bill(), &mut balances, &mut standings, NOW)
    }

    #[test]
    fn a_penalty_holds_until_its_end_or_until_the_store_no_longer_has_it() {
        let (policy, seen) = (policy(), SeenPenalties::default());
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        assert!(seen.decide(&plan, NOW).is_none());
        seen.see(&plan, &struck(&plan), NOW);
        let denied = seen.decide(&plan, NOW.plus(Span::from_secs(59))).unwrap();
        assert!(!denied.allowed());
        assert_eq!(denied.retry_after_secs(), Some(1));
        assert!(seen.decide(&plan, NOW.plus(Span::MINUTE)).is_none());
        let pardoned = settle(plan.bill(), &mut [Balance::default()], &mut [Standing::default()], NOW);
        seen.see(&plan, &pardoned, NOW);
        assert!(seen.decide(&plan, NOW).is_none());
    }

    /// A user in a cool-down sent one request from an address in a longer one. The answer named that one only, and the node forgot
    /// the user's.
    #[test]
    fn a_harsher_penalty_of_another_subject_ends_none() {
        let text = "[ladders.own]\nrungs = ['cooldown 1min']\n[ladders.all]\nrungs = ['cooldown 1h']\n\
            [[rule]]\nname = 'ip'\nper = ['ip']\nlimit = '1/h'\nladder = 'all'\n\
            [[rule]]\nname = 'user'\nper = ['user']\nlimit = '1/h'\nladder = 'own'";
        let (policy, seen, mut store) =
            (Policy::parse(text, &|_| None).unwrap(), SeenPenalties::default(), Ledger::default());
        let mut ask = |user: &str, ip: [u8; 4]| {
            let plan = policy.plan(&Facts { user: Some(user), ip: Some(ip.into()), ..Facts::default() }).unwrap();
            seen.see(&plan, &store.settle(&plan, NOW), NOW);
        };
        // The user comes from two addresses, and two users from a third one.
        ask("ada", [192, 0, 2, 1]);
        ask("ada", [192, 0, 2, 2]);
        ask("bob", [192, 0, 2, 3]);
        ask("eve", [192, 0, 2, 3]);
        ask("ada", [192, 0, 2, 3]);
        let other =
            policy.plan(&Facts { user: Some("ada"), ip: Some([192, 0, 2, 4].into()), ..Facts::default() }).unwrap();
        assert!(seen.decide(&other, NOW).is_some());
    }

    #[test]
    fn a_full_table_keeps_what_it_has_until_it_is_over() {
        let (policy, seen) = (policy(), SeenPenalties::default());
        let plan = |user: &str| policy.plan(&Facts { user: Some(user), ..Facts::default() }).unwrap();
        let first = plan("first");
        let outcome = struck(&first);
        seen.see(&first, &outcome, NOW);
        let known = first.penalties(&outcome).next().unwrap().1;
        for number in 0..2 * MAX_SEEN {
            let key = Digest::from_u128(number as u128);
            let mut table = seen.seen();
            if table.len() < MAX_SEEN {
                table.insert(key, Seen { known, heard: NOW });
            }
        }
        let late = plan("late");
        seen.see(&late, &struck(&late), NOW);
        assert_eq!(seen.seen().len(), MAX_SEEN);
        assert!(seen.decide(&late, NOW).is_none());
        assert!(seen.decide(&first, NOW).is_some());
        seen.see(&late, &struck(&late), NOW.plus(Span::MINUTE));
        assert!(seen.decide(&late, NOW.plus(Span::MINUTE)).is_some(), "the others are over");
    }
}
