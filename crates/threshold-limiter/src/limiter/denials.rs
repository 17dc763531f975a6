//! Denials of a store across a network, repeated for a moment: a caller over its limit costs one round trip a second and not one
//! for each request.
//!
//! Core decides what may be repeated ([`Plan::repeatable`]). This table bounds how long and how much of it is kept, and drops it
//! when there may be room earlier.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use arrayvec::ArrayVec;
use threshold_core::limit::Look;
use threshold_core::plan::{Known, MAX_CHARGES, MAX_SUBJECTS, Repeated};
use threshold_core::{Decision, Digest, Limit, Outcome, Plan, Span, Timestamp};

use crate::sync::{Mutex, MutexGuard};

/// How long a denial is repeated without asking the store again, and so the longest time for which a refund, a pardon or a raised
/// limit on another node is not noticed here.
const LIFE: Span = Span::SECOND;
/// From this age on one request asks the store again, while the others are still answered: otherwise all requests of a flood would
/// ask in the moment in which the answer expires.
const RECHECK: Span = Span::from_millis(950);
/// A denial ends this much earlier than computed: its end is by the store's clock, which this node knows only to a fraction of a
/// millisecond.
const MARGIN: Span = Span::from_millis(1);
/// By how much the store's clock may have moved otherwise than this node's since an entry was heard. Beyond that the store's clock was
/// set, or another server has taken over, and the entry says nothing about the present.
const MAX_DRIFT: Span = Span::from_millis(500);
/// The number of independently locked parts.
const SHARDS: usize = 64;
/// The largest number of keys in each part. An entry for one cost takes less than 300 bytes.
const MAX_IN_SHARD: usize = 256;
/// The largest number of costs that are remembered for one key.
const MAX_COSTS: usize = 4;
/// How often in a second a denied key asks the store for figures that are not known, such as those of a limit that the requests
/// before did not meet. Beyond that the answers lack them: a flood with another cost or name in each request must not reach the
/// store.
const MAX_ASKS: u32 = 16;

/// What the store has found under the keys of requests that it denied less than a second ago.
#[derive(Debug)]
pub(super) struct Denials {
    shards: Box<[Mutex<Shard>]>,
    /// Whether anything was ever denied, so that no lock is taken where nothing was.
    is_used: AtomicBool,
}

#[derive(Debug, Default)]
struct Shard {
    keys: HashMap<Digest, OneKey>,
    /// Counts how often keys of this part were forgotten. An answer that was asked for before that is not kept: it may be older
    /// than the refund or pardon.
    forgotten: u64,
}

#[derive(Debug)]
struct OneKey {
    /// One entry for each cost that was asked about.
    entries: Vec<Entry>,
    /// How often the store was asked for what is not known since then.
    asks: u32,
    asks_since: Timestamp,
}

/// A moment by two clocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    /// By this node's own.
    pub(super) own: Timestamp,
    /// By the store's, as far as its answers have shown it; `None` for a store without a clock.
    pub(super) store: Option<Timestamp>,
}

#[derive(Debug)]
struct Entry {
    known: Known,
    /// The moments between which the store has answered.
    asked: Timestamp,
    heard: Moment,
    /// Whether a request is asking the store again.
    is_rechecked: bool,
}

/// How often the parts that hold the keys of a plan had been forgotten, in the order of the keys.
pub(super) type Versions = ArrayVec<u64, { MAX_CHARGES + MAX_SUBJECTS + 1 }>;

impl Default for Denials {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), is_used: AtomicBool::new(false) }
    }
}

impl Denials {
    /// Denies a request by what is known, if that is enough.
    pub(super) fn repeat(&self, plan: &Plan<'_>, now: Moment, outcome: &mut Outcome, decision: &mut Decision) -> bool {
        if !self.is_used.load(Ordering::Relaxed) {
            return false;
        }
        let is_repeated = match plan.repeat(|key, cost| self.known(key, cost, now), outcome, decision) {
            Repeated::No => return false,
            Repeated::Fully => true,
            Repeated::Partly => !plan.repeatable_keys().any(|key| self.may_ask(key, now)),
        };
        if !is_repeated {
            // It was filled in by what is known, and the store decides after all.
            plan.prepare(decision);
        }
        is_repeated
    }

    /// Returns what is known of a key for this cost, or else for a smaller one, and the store's time by now.
    fn known(&self, key: Digest, cost: u64, now: Moment) -> Option<(Known, Timestamp)> {
        let mut shard = self.shard(key)?;
        let entries = &mut shard.keys.get_mut(&key)?.entries;
        let place = entries.iter().position(|entry| entry.known.cost() == cost).or_else(|| {
            let costs = entries.iter().enumerate().map(|(place, entry)| (entry.known.cost(), place));
            costs.filter(|(own, _)| *own < cost).max().map(|(_, place)| place)
        });
        let entry = entries.get_mut(place?).filter(|entry| entry.lives(now))?;
        // Counted on from the later time: by the earlier one a client would be asked to come back too early.
        let store_now = entry.known.at().plus(now.own.since(entry.heard.own));
        // By the earlier time, and so never past the end.
        let latest = entry.known.at().plus(now.own.since(entry.asked)).plus(MARGIN);
        let denies = entry.known.denies(store_now);
        let is_ending = denies && !entry.known.denies(latest);
        let is_old = denies && now.own.since(entry.asked) >= RECHECK;
        if is_ending || (is_old && !std::mem::replace(&mut entry.is_rechecked, true)) {
            return None;
        }
        Some((entry.known, store_now))
    }

    /// Returns whether a denied key may ask the store for more figures, and counts it.
    fn may_ask(&self, key: Digest, now: Moment) -> bool {
        let Some(mut shard) = self.shard(key) else { return false };
        let Some(known) = shard.keys.get_mut(&key) else { return false };
        // Only a key that denies bounds the number: others may be new with every request.
        let denies = |entry: &Entry| entry.lives(now) && entry.known.denies(entry.known.at());
        if !known.entries.iter().any(denies) {
            return false;
        }
        if now.own.since(known.asks_since) >= Span::SECOND {
            (known.asks, known.asks_since) = (0, now.own);
        }
        known.asks = known.asks.saturating_add(1);
        known.asks <= MAX_ASKS
    }

    /// Denies a cost under one limit by what is known, if that is enough. Returns what the limit answered, and the store's time by
    /// now.
    pub(super) fn repeat_limit(&self, key: Digest, limit: &Limit, cost: u64, now: Moment) -> Option<(Look, Timestamp)> {
        if !self.is_used.load(Ordering::Relaxed) {
            return None;
        }
        let (known, store_now) = self.known(key, cost, now)?;
        let look = known.denial_of(limit, cost, store_now)?;
        // What is known has the times of a smaller cost.
        if known.cost() != cost && self.may_ask(key, now) {
            return None;
        }
        Some((look, store_now))
    }

    /// Returns the version of the part that holds a key, before the store is asked.
    pub(super) fn version(&self, key: Digest) -> u64 {
        self.shard(key).map_or(0, |shard| shard.forgotten)
    }

    /// Keeps the answer to one limit: a denial, unless the key was forgotten in the meantime. A charge ends the denials before it,
    /// because their times are too early after it.
    pub(super) fn keep_limit(
        &self,
        key: Digest,
        known: Option<Known>,
        (before, asked, heard): (u64, Timestamp, Moment),
    ) {
        if known.is_none() && !self.is_used.load(Ordering::Relaxed) {
            return;
        }
        self.is_used.store(true, Ordering::Relaxed);
        let Some(mut shard) = self.shard(key) else { return };
        match known {
            Some(known) if shard.forgotten == before => {
                shard.insert(key, Entry { known, asked, heard, is_rechecked: false });
            }
            Some(_) => {}
            None => {
                if let Some(kept) = shard.keys.get_mut(&key) {
                    kept.entries.clear();
                }
            }
        }
    }

    /// Returns the versions of the parts that hold the keys of a plan, before the store is asked.
    pub(super) fn versions(&self, plan: &Plan<'_>) -> Versions {
        let versions = plan.repeatable_keys().map(|key| self.shard(key).map_or(0, |shard| shard.forgotten));
        versions.take(Versions::new().capacity()).collect()
    }

    /// Keeps what the store has found, unless one of the keys was forgotten in the meantime.
    pub(super) fn keep(
        &self,
        plan: &Plan<'_>,
        outcome: &Outcome,
        (before, asked, heard): (&Versions, Timestamp, Moment),
        in_one_step: bool,
    ) {
        self.is_used.store(true, Ordering::Relaxed);
        let versions: HashMap<Digest, u64> = plan.repeatable_keys().zip(before.iter().copied()).collect();
        for (key, known) in plan.repeatable(outcome, in_one_step) {
            let Some(mut shard) = self.shard(key) else { continue };
            if versions.get(&key) == Some(&shard.forgotten) {
                shard.insert(key, Entry { known, asked, heard, is_rechecked: false });
            }
        }
    }

    /// Brings the figures of keys up to date that a request was charged to, so that denials show what is left after it.
    pub(super) fn charged(&self, plan: &Plan<'_>, outcome: &Outcome, (asked, heard): (Timestamp, Moment)) {
        if !self.is_used.load(Ordering::Relaxed) {
            return;
        }
        for (key, known) in plan.charged_keys(outcome) {
            let Some(mut shard) = self.shard(key) else { continue };
            // Only keys of requests that were denied are kept, and each keeps its count of questions.
            let Some(kept) = shard.keys.get_mut(&key) else { continue };
            kept.entries.clear();
            kept.entries.extend(known.map(|known| Entry { known, asked, heard, is_rechecked: false }));
        }
    }

    /// Drops what is known of these keys: there may be room under them, or less than before.
    pub(super) fn forget(&self, keys: impl IntoIterator<Item = Digest>) {
        for key in keys {
            let Some(mut shard) = self.shard(key) else { continue };
            shard.keys.remove(&key);
            shard.forgotten = shard.forgotten.wrapping_add(1);
        }
    }

    fn shard(&self, key: Digest) -> Option<MutexGuard<'_, Shard>> {
        // 63 is one less than `SHARDS`. The lowest bits differ between the keys of one caller.
        let index = usize::try_from(key.to_u128() & 63).unwrap_or(0);
        // A poisoned lock is safe to use: an entry is inserted in one step.
        self.shards.get(index).map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Shard {
    /// Inserts an entry, unless the part is full of keys that still live: then the next request asks the store again.
    fn insert(&mut self, key: Digest, entry: Entry) {
        let now = entry.heard;
        let is_full = |keys: &HashMap<_, _>| keys.len() >= MAX_IN_SHARD && !keys.contains_key(&key);
        if is_full(&self.keys) {
            self.keys.retain(|_, known| known.entries.iter().any(|entry| entry.lives(now)));
        }
        if is_full(&self.keys) {
            return;
        }
        let new = || OneKey { entries: Vec::new(), asks: 0, asks_since: now.own };
        let entries = &mut self.keys.entry(key).or_insert_with(new).entries;
        entries.retain(|known| known.lives(now) && known.known.cost() != entry.known.cost());
        // The first costs stay. Others have the answers of the next smaller one.
        if entries.len() < MAX_COSTS {
            entries.push(entry);
        }
    }
}

impl Entry {
    fn lives(&self, now: Moment) -> bool {
        // If this node's clock was set back, nothing shows how old the entry is.
        let is_young = now.own >= self.heard.own && now.own < self.asked.plus(LIFE);
        let own = now.own.since(self.heard.own);
        let drift = self.heard.store.zip(now.store).map_or(Span::ZERO, |(then, now)| {
            let (expected, found) = (then.plus(own), now);
            expected.since(found).max(found.since(expected))
        });
        is_young && drift <= MAX_DRIFT
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use threshold_core::limit::LimitOptions;
    use threshold_core::{Balance, Facts, Policy, TraceId, settle};

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_630);

    fn policy() -> Policy {
        Policy::parse("[[rule]]\nname = 'user'\nper = ['user']\nlimit = '1/h'", &|_| None).unwrap()
    }

    /// Returns a moment after the beginning, at a store whose clock is an hour ahead.
    fn after(millis: u64) -> Moment {
        let own = NOW.plus(Span::from_millis(millis));
        Moment { own, store: Some(own.plus(Span::HOUR)) }
    }

    /// Settles two requests of a user at a store whose clock is an hour ahead, and returns the denial of the second.
    fn denial(plan: &Plan<'_>) -> Outcome {
        let (mut balances, ahead) = ([Balance::default()], NOW.plus(Span::HOUR));
        let _ = settle(plan.bill(), &mut balances, &mut [], ahead);
        settle(plan.bill(), &mut balances, &mut [], ahead)
    }

    fn keep(denials: &Denials, plan: &Plan<'_>, asked: Moment) {
        denials.keep(plan, &denial(plan), (&denials.versions(plan), asked.own, asked), true);
    }

    fn is_repeated(denials: &Denials, plan: &Plan<'_>, now: Moment) -> bool {
        let (mut outcome, mut decision) = (Outcome::default(), Decision::default());
        plan.prepare(&mut decision);
        denials.repeat(plan, now, &mut outcome, &mut decision)
    }

    #[test]
    fn an_entry_lives_for_a_second_and_one_request_asks_again_before_its_end() {
        let (policy, denials) = (policy(), Denials::default());
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        keep(&denials, &plan, after(0));
        assert!(is_repeated(&denials, &plan, after(949)));
        assert!(!is_repeated(&denials, &plan, after(950)), "this request asks again");
        assert!(is_repeated(&denials, &plan, after(999)), "the others do not");
        assert!(!is_repeated(&denials, &plan, after(1_000)));
        let back = Moment { own: NOW.minus(Span::SECOND), store: None };
        assert!(!is_repeated(&denials, &plan, back), "the node's clock was set back");
    }

    /// Another server took over, whose clock is ahead or behind. What the old one had said held for the rest of the second.
    #[test]
    fn an_entry_ends_when_the_clock_of_the_store_is_set() {
        let (policy, denials) = (policy(), Denials::default());
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        keep(&denials, &plan, after(0));
        let now = after(100);
        let other = |span: Span| {
            [
                Moment { store: now.store.map(|time| time.plus(span)), ..now },
                Moment { store: now.store.map(|time| time.minus(span)), ..now },
            ]
        };
        assert!(other(MAX_DRIFT).iter().all(|now| is_repeated(&denials, &plan, *now)));
        let more = Span::from_millis(501);
        assert!(!other(more).iter().any(|now| is_repeated(&denials, &plan, *now)));
    }

    /// A refund was made while a request was on its way to the store, and the denial that came back after it was kept.
    #[test]
    fn a_refund_ends_a_denial_also_one_that_is_on_its_way() {
        let (policy, denials) = (policy(), Denials::default());
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        let keys = || plan.charges().iter().map(threshold_core::bill::Charge::key);
        keep(&denials, &plan, after(0));
        denials.forget(keys());
        assert!(!is_repeated(&denials, &plan, after(1)));
        let asked = denials.versions(&plan);
        denials.forget(keys());
        denials.keep(&plan, &denial(&plan), (&asked, NOW, after(0)), true);
        assert!(!is_repeated(&denials, &plan, after(1)));
    }

    #[test]
    fn a_full_table_keeps_what_it_has_and_drops_it_when_it_is_over() {
        let (policy, denials) = (policy(), Denials::default());
        let users: Vec<String> = (0..2 * SHARDS * MAX_IN_SHARD).map(|user| user.to_string()).collect();
        let plan = |user: &'static str| policy.plan(&Facts { user: Some(user), ..Facts::default() }).unwrap();
        let of = |user: &String| policy.plan(&Facts { user: Some(user), ..Facts::default() }).unwrap();
        let first = plan("first");
        keep(&denials, &first, after(0));
        let outcome = denial(&first);
        let (_, known) = first.repeatable(&outcome, true).next().unwrap();
        for user in &users {
            let key = of(user).charges()[0].key();
            let entry = Entry { known, asked: NOW, heard: after(0), is_rechecked: false };
            denials.shard(key).unwrap().insert(key, entry);
        }
        let length = || denials.shards.iter().map(|shard| shard.lock().unwrap().keys.len()).sum::<usize>();
        assert_eq!(length(), SHARDS * MAX_IN_SHARD);
        assert!(is_repeated(&denials, &first, after(1)), "it is not evicted");
        let late = plan("late");
        keep(&denials, &late, after(0));
        assert!(!is_repeated(&denials, &late, after(1)), "no room: the store is asked");
        keep(&denials, &late, after(1_000));
        assert!(is_repeated(&denials, &late, after(1_001)), "the others are over");
    }

    /// A program that counted by `/v1/limit` asked the store for each of a thousand denials.
    #[test]
    fn the_denial_of_one_limit_is_repeated_for_its_cost_and_larger_ones() {
        let (denials, key) = (Denials::default(), Digest::from_u128(7));
        let limit = LimitOptions::new().limit(10, Duration::from_secs(3600)).unwrap();
        let mut balance = Balance::default();
        let ahead = NOW.plus(Span::HOUR);
        let mut check = |cost| balance.check(&limit, cost, ahead, TraceId::default());
        assert!(check(6).look.allowed);
        let denied = check(5);
        let known = |limit: &Limit| Known::of_denied_limit(limit, 5, &denied.look, ahead);
        let repeats = |limit: &Limit, cost, millis| denials.repeat_limit(key, limit, cost, after(millis)).is_some();
        assert!(!repeats(&limit, 5, 1));
        denials.keep_limit(key, known(&limit), (denials.version(key), NOW, after(0)));
        assert!(repeats(&limit, 5, 1) && !repeats(&limit, 4, 1), "a smaller cost may fit");
        // A larger one asks for its own time, a bounded number of times.
        assert_eq!((0..100).filter(|_| !repeats(&limit, 6, 1)).count(), MAX_ASKS as usize);
        let other = LimitOptions::new().limit(11, Duration::from_secs(3600)).unwrap();
        assert!(!repeats(&other, 5, 1), "a changed limit");
        assert!(!repeats(&limit, 5, 950) && repeats(&limit, 5, 999) && !repeats(&limit, 5, 1_000));
        let keep = |before| denials.keep_limit(key, known(&limit), (before, NOW, after(0)));
        keep(denials.version(key));
        denials.forget([key]);
        assert!(!repeats(&limit, 5, 1));
        let before = denials.version(key);
        denials.forget([key]);
        keep(before);
        assert!(!repeats(&limit, 5, 1), "it was given back while the store was asked");
        keep(denials.version(key));
        denials.keep_limit(key, None, (denials.version(key), NOW, after(0)));
        assert!(!repeats(&limit, 5, 1), "a smaller cost was charged");
        let held = Limit::concurrent(1, Duration::from_secs(60)).unwrap();
        let (mut balance, id) = (Balance::default(), TraceId::from_u128);
        assert!(balance.check(&held, 1, ahead, id(1)).look.allowed);
        let denied = balance.check(&held, 1, ahead, id(2)).look;
        assert!(!denied.allowed && Known::of_denied_limit(&held, 1, &denied, ahead).is_none());
    }

    /// A flood with another cost in each request asked the store each time.
    #[test]
    fn a_flood_of_different_costs_asks_a_bounded_number_of_times() {
        let policy = Policy::parse("[[rule]]\nname = 'user'\nper = ['user']\nlimit = '900/h'", &|_| None).unwrap();
        let denials = Denials::default();
        let plan = |cost| policy.plan(&Facts { user: Some("ada"), cost: Some(cost), ..Facts::default() }).unwrap();
        let denied = |cost| {
            let mut balances = [Balance::default()];
            let _ = settle(plan(900).bill(), &mut balances, &mut [], NOW);
            settle(plan(cost).bill(), &mut balances, &mut [], NOW)
        };
        let mut asked = 0;
        for cost in 1..=800 {
            let plan = plan(cost);
            if !is_repeated(&denials, &plan, after(500)) {
                asked += 1;
                denials.keep(&plan, &denied(cost), (&denials.versions(&plan), after(500).own, after(500)), true);
            }
        }
        assert_eq!(asked, 1 + MAX_ASKS);
        assert!(is_repeated(&denials, &plan(2), after(501)), "one of the first costs");
    }
}
