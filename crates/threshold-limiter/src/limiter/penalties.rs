//! Penalties that this node has seen. They hold while the store is away, whatever `on_store_error` says.

use std::collections::{BTreeSet, HashMap};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use arrayvec::ArrayVec;
use threshold_core::plan::{Known, MAX_SUBJECTS, Subject};
use threshold_core::{Decision, Digest, Outcome, Plan, Span, Timestamp};

use crate::sync::{Mutex, MutexGuard};

/// The largest number of subjects. An entry takes less than 300 bytes.
const MAX_SEEN: usize = 1 << 16;

/// The subjects whose last decision by the store was made under a penalty, or brought one.
#[derive(Debug, Default)]
pub(super) struct SeenPenalties {
    seen: Mutex<Tables>,
    /// Whether there ever was one, so that no lock is taken where no ladder has punished.
    is_used: AtomicBool,
}

/// Each has at most [`MAX_SEEN`] entries. A subject can be in both: a cool-down often comes with a shadow ban that outlasts it.
#[derive(Debug, Default)]
struct Tables {
    penalties: HashMap<Digest, Seen>,
    shadow_bans: HashMap<Digest, SeenShadow>,
}

/// A shadow ban.
#[derive(Debug, Clone)]
struct SeenShadow {
    /// The subjects of its request, one of which is banned.
    subjects: ArrayVec<Digest, MAX_SUBJECTS>,
    /// How long it lasts, from the moment at which this node heard of it.
    lasts: Span,
    heard: Timestamp,
}

impl SeenShadow {
    fn holds(&self, now: Timestamp) -> bool {
        now.since(self.heard) < self.lasts
    }
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
    pub(super) fn see(&self, plan: &Plan<'_>, outcome: &Outcome, decision: &Decision, heard: Timestamp) {
        let mut new = plan.penalties(outcome).peekable();
        let shadow_bans = plan.shadow_bans(outcome);
        let is_new = new.peek().is_some() || !shadow_bans.is_empty();
        if plan.subjects().is_empty() || !(is_new || self.is_used.load(Ordering::Relaxed)) {
            return;
        }
        self.is_used.store(true, Ordering::Relaxed);
        let mut seen = self.seen();
        let Tables { penalties, shadow_bans: shadowed } = &mut *seen;
        // A penalty that an operator has lifted on another node must not come back here. The answer shows only the harshest one, so
        // it says nothing about the other subjects of a request that is under a penalty.
        if !outcome.is_penalised() {
            for subject in plan.subjects() {
                penalties.remove(&subject.key());
            }
        }
        if plan.shows_no_shadow_ban(outcome, decision) {
            for key in plan.shadow_keys() {
                shadowed.remove(&key);
            }
        }
        for (key, known) in new {
            insert_bounded(penalties, key, Seen { known, heard }, |seen| seen.holds(heard));
        }
        for (key, until) in shadow_bans {
            let subjects = plan.subjects().iter().map(Subject::key).collect();
            let ban = SeenShadow { subjects, lasts: until.since(outcome.at()), heard };
            insert_bounded(shadowed, key, ban, |seen| seen.holds(heard));
        }
    }

    /// Denies a request by the penalties that were seen; `None` if none is in force.
    pub(super) fn decide(&self, plan: &Plan<'_>, now: Timestamp) -> Option<Decision> {
        if !self.is_used.load(Ordering::Relaxed) {
            return None;
        }
        let seen = self.seen();
        plan.decide_penalised(|key| seen.penalties.get(&key).map(|seen| (seen.known, seen.store_now(now))))
    }

    /// Returns whether a shadow ban that was seen delays a request.
    pub(super) fn is_shadowed(&self, plan: &Plan<'_>, now: Timestamp) -> bool {
        if !self.is_used.load(Ordering::Relaxed) {
            return false;
        }
        let seen = self.seen();
        plan.shadow_keys().any(|key| seen.shadow_bans.get(&key).is_some_and(|seen| seen.holds(now)))
    }

    /// Drops the penalties of subjects that were forgiven.
    pub(super) fn forgive(&self, standings: &BTreeSet<Digest>) {
        if !standings.is_empty() && self.is_used.load(Ordering::Relaxed) {
            let mut seen = self.seen();
            for key in standings {
                seen.penalties.remove(key);
            }
            let is_forgiven = |ban: &SeenShadow| ban.subjects.iter().any(|subject| standings.contains(subject));
            seen.shadow_bans.retain(|_, ban| !is_forgiven(ban));
        }
    }

    fn seen(&self) -> MutexGuard<'_, Tables> {
        // A poisoned lock is safe to use: an entry is inserted in one step.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Inserts an entry. A full table drops those that are over. If it is still full, the entry is not kept, and its subject is decided
/// by `on_store_error` like any other.
fn insert_bounded<T>(table: &mut HashMap<Digest, T>, key: Digest, entry: T, holds: impl Fn(&T) -> bool) {
    if table.len() >= MAX_SEEN && !table.contains_key(&key) {
        table.retain(|_, entry| holds(entry));
    }
    if table.len() < MAX_SEEN || table.contains_key(&key) {
        table.insert(key, entry);
    }
}

#[cfg(test)]
mod tests {
    use threshold_core::{Balance, Facts, Ledger, Policy, Standing, settle};

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_630);

    fn policy() -> Policy {
        let text = "[ladders.own]\nrungs = ['cooldown 1min']\n[[rule]]\nname = 'user'\nper = ['user']\nlimit = '1/h'\nladder = 'own'";
        Policy::parse(text, &|_| None).unwrap()
    }

    fn see(seen: &SeenPenalties, plan: &Plan<'_>, outcome: &Outcome, heard: Timestamp) {
        seen.see(plan, outcome, &plan.decide(outcome), heard);
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
        see(&seen, &plan, &struck(&plan), NOW);
        let denied = seen.decide(&plan, NOW.plus(Span::from_secs(59))).unwrap();
        assert!(!denied.allowed());
        assert_eq!(denied.retry_after_secs(), Some(1));
        assert!(seen.decide(&plan, NOW.plus(Span::MINUTE)).is_none());
        let pardoned = settle(plan.bill(), &mut [Balance::default()], &mut [Standing::default()], NOW);
        see(&seen, &plan, &pardoned, NOW);
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
            see(&seen, &plan, &store.settle(&plan, NOW), NOW);
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
        see(&seen, &first, &outcome, NOW);
        let known = first.penalties(&outcome).next().unwrap().1;
        for number in 0..2 * MAX_SEEN {
            let key = Digest::from_u128(number as u128);
            let mut table = seen.seen();
            if table.penalties.len() < MAX_SEEN {
                table.penalties.insert(key, Seen { known, heard: NOW });
            }
        }
        let late = plan("late");
        see(&seen, &late, &struck(&late), NOW);
        assert_eq!(seen.seen().penalties.len(), MAX_SEEN);
        assert!(seen.decide(&late, NOW).is_none());
        assert!(seen.decide(&first, NOW).is_some());
        see(&seen, &late, &struck(&late), NOW.plus(Span::MINUTE));
        assert!(seen.decide(&late, NOW.plus(Span::MINUTE)).is_some(), "the others are over");
    }

    /// A shadow-banned user noticed an outage: the answers came at once.
    #[test]
    fn a_shadow_ban_holds_until_its_end_or_until_the_store_no_longer_has_it() {
        let text = "[ladders.own]\ndecay = '1h'\nrungs = ['shadow']\n\
            [[rule]]\nname = 'user'\nper = ['user']\nlimit = '1/h'\nladder = 'own'";
        let (policy, seen) = (Policy::parse(text, &|_| None).unwrap(), SeenPenalties::default());
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        assert!(!seen.is_shadowed(&plan, NOW));
        see(&seen, &plan, &struck(&plan), NOW);
        assert!(seen.decide(&plan, NOW).is_none(), "it denies nothing");
        assert!(seen.is_shadowed(&plan, NOW.plus(Span::from_secs(3599))));
        assert!(!seen.is_shadowed(&plan, NOW.plus(Span::HOUR)));
        let other = policy.plan(&Facts { user: Some("bob"), ..Facts::default() }).unwrap();
        assert!(!seen.is_shadowed(&other, NOW));
        let pardoned = settle(plan.bill(), &mut [Balance::default()], &mut [Standing::default()], NOW);
        see(&seen, &plan, &pardoned, NOW);
        assert!(!seen.is_shadowed(&plan, NOW));
        see(&seen, &plan, &struck(&plan), NOW);
        seen.forgive(&plan.subjects().iter().map(Subject::key).collect());
        assert!(!seen.is_shadowed(&plan, NOW));
    }

    #[test]
    fn a_full_table_of_shadow_bans_keeps_what_it_has_until_it_is_over() {
        let mut table = HashMap::new();
        let ban = |heard| SeenShadow { subjects: ArrayVec::new(), lasts: Span::MINUTE, heard };
        let key = |number: usize| Digest::from_u128(number as u128);
        let mut insert = |number, now| insert_bounded(&mut table, key(number), ban(now), |seen| seen.holds(now));
        (0..=MAX_SEEN).for_each(|number| insert(number, NOW));
        insert(0, NOW.plus(Span::SECOND));
        insert(MAX_SEEN + 1, NOW.plus(Span::SECOND));
        assert_eq!(table.len(), MAX_SEEN);
        assert!(!table.contains_key(&key(MAX_SEEN)) && !table.contains_key(&key(MAX_SEEN + 1)));
        let later = NOW.plus(Span::MINUTE);
        insert_bounded(&mut table, key(MAX_SEEN), ban(later), |seen| seen.holds(later));
        assert_eq!(table.len(), 2, "the others are over");
    }
}
