//! Who waits for what, in the order in which they came.
//!
//! A ticket is drawn on arrival. Whoever must wait stands in the queue of what has denied it, and of what others ahead of
//! it stand for; a try is allowed to those with nobody ahead on anything they contest. The lowest ticket is behind nobody,
//! so somebody can always go on, and whoever leaves a queue rings for the next: there is no circle, and no wake-up to
//! lose. A budget that has never denied somebody is not queued for, so that whoever waits for one does not hold up those
//! who want another.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threshold_core::Digest;
use tokio::sync::Notify;

/// The order of arrival.
type Ticket = u64;

/// Everyone who waits in one limiter.
pub(crate) struct Waiters {
    pub(super) most: usize,
    /// The most who begin to wait for one key; a quarter of `most` unless said.
    pub(super) most_per_key: Option<usize>,
    tickets: AtomicU64,
    /// As many as there are bells, for those who only ask whether anybody waits.
    waiting: AtomicUsize,
    queues: Mutex<Queues>,
}

#[derive(Debug, Default)]
struct Queues {
    /// What wakes each of those who wait.
    bells: BTreeMap<Ticket, Arc<Notify>>,
    /// Who stands for which key; a queue in which nobody stands is not kept.
    standing: HashMap<Digest, BTreeSet<Ticket>>,
}

/// Somebody who has come. They count as waiting from when they must; dropping this is leaving, for whatever reason.
pub(super) struct Place<'w> {
    waiters: &'w Waiters,
    ticket: Ticket,
    bell: Arc<Notify>,
    waits: bool,
    stands_for: Vec<Digest>,
    denied_by: Vec<Digest>,
}

/// Whether somebody may try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nobody is ahead.
    Own,
    /// Somebody is, and will ring on leaving.
    Behind,
    /// Somebody is, and no more may wait.
    NoRoom,
}

impl Default for Waiters {
    fn default() -> Self {
        Self {
            most: super::MAX_WAITERS,
            most_per_key: None,
            tickets: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            queues: Mutex::default(),
        }
    }
}

impl fmt::Debug for Waiters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiters").field("most", &self.most).field("waiting", &self.waiting).finish_non_exhaustive()
    }
}

impl Waiters {
    pub(super) fn arrive(&self) -> Place<'_> {
        Place {
            waiters: self,
            ticket: self.tickets.fetch_add(1, Ordering::Relaxed),
            bell: Arc::default(),
            waits: false,
            stands_for: Vec::new(),
            denied_by: Vec::new(),
        }
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    /// How many may begin to wait for one key.
    fn per_key(&self) -> usize {
        self.most_per_key.unwrap_or_else(|| self.most.div_ceil(4))
    }

    /// Lets whoever is first for one of these keys look again.
    pub(in crate::limiter) fn ring_first(&self, keys: impl IntoIterator<Item = Digest>) {
        if self.waiting() == 0 {
            return;
        }
        let queues = self.lock();
        for key in keys {
            queues.ring(key);
        }
    }

    /// Lets everyone look again.
    pub(in crate::limiter) fn ring_all(&self) {
        if self.waiting() > 0 {
            self.lock().bells.values().for_each(|bell| bell.notify_one());
        }
    }

    /// A poisoned lock is taken all the same: nothing that it guards can panic half way.
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queues {
    /// Rings for whoever is first. A bell that nobody listens to yet is heard when they do.
    fn ring(&self, key: Digest) {
        let first = self.standing.get(&key).and_then(BTreeSet::first);
        if let Some(bell) = first.and_then(|ticket| self.bells.get(ticket)) {
            bell.notify_one();
        }
    }

    fn leave(&mut self, key: Digest, ticket: Ticket) {
        let Some(queue) = self.standing.get_mut(&key) else { return };
        let was_first = queue.first() == Some(&ticket);
        queue.remove(&ticket);
        if queue.is_empty() {
            self.standing.remove(&key);
        } else if was_first {
            self.ring(key);
        }
    }
}

impl Place<'_> {
    /// Whether it may try for these keys. If somebody is ahead, it stands behind them and nowhere else.
    pub(super) fn turn(&mut self, contested: impl Iterator<Item = Digest>) -> Turn {
        let mut queues = self.waiters.lock();
        let ahead = |key: &Digest| {
            let first = queues.standing.get(key).and_then(BTreeSet::first);
            first.is_some_and(|first| *first < self.ticket)
        };
        let ahead: Vec<Digest> = contested.filter(ahead).collect();
        if ahead.is_empty() {
            return Turn::Own;
        }
        if !self.begin_to_wait(&mut queues, &ahead) {
            return Turn::NoRoom;
        }
        // Nobody knows how long those ahead will take, so nothing else is kept meanwhile.
        self.denied_by.clear();
        self.stand_for(&mut queues, ahead);
        Turn::Behind
    }

    /// Stands for what has denied it, just now or before if it is to be kept, and for nothing else. Says whether there
    /// is room to wait.
    pub(super) fn stand(&mut self, keep: impl Fn(Digest) -> bool, denied_by: impl Iterator<Item = Digest>) -> bool {
        let mut keys: Vec<Digest> = self.denied_by.iter().copied().filter(|key| keep(*key)).collect();
        for key in denied_by {
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        let mut queues = self.waiters.lock();
        if !self.begin_to_wait(&mut queues, &keys) {
            return false;
        }
        self.denied_by.clone_from(&keys);
        self.stand_for(&mut queues, keys);
        true
    }

    /// Until somebody rings.
    pub(super) async fn rung(&self) {
        self.bell.notified().await;
    }

    /// Takes a place among those who wait, where there is one in all and in the queue of each of these keys. Whoever waits
    /// already has one, and may change queues.
    fn begin_to_wait(&mut self, queues: &mut Queues, keys: &[Digest]) -> bool {
        let per_key = self.waiters.per_key();
        let has_room = |key| queues.standing.get(key).map_or(0, BTreeSet::len) < per_key;
        if !self.waits && queues.bells.len() < self.waiters.most && keys.iter().all(has_room) {
            queues.bells.insert(self.ticket, Arc::clone(&self.bell));
            self.waiters.waiting.store(queues.bells.len(), Ordering::Release);
            self.waits = true;
        }
        self.waits
    }

    /// Stands for these keys and no others.
    fn stand_for(&mut self, queues: &mut Queues, keys: Vec<Digest>) {
        for key in &keys {
            queues.standing.entry(*key).or_default().insert(self.ticket);
        }
        for key in self.stands_for.iter().filter(|key| !keys.contains(key)) {
            queues.leave(*key, self.ticket);
        }
        self.stands_for = keys;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.waits {
            return;
        }
        let mut queues = self.waiters.lock();
        queues.bells.remove(&self.ticket);
        self.waiters.waiting.store(queues.bells.len(), Ordering::Release);
        for key in &self.stands_for {
            queues.leave(*key, self.ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const KEYS: u8 = 4;

    /// The keys of a mask.
    fn keys(mask: u8) -> impl Iterator<Item = Digest> {
        (0..KEYS).filter(move |key| mask >> key & 1 == 1).map(|key| Digest::from_u128(u128::from(key)))
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// No more wait than may, nobody begins to wait in a queue that is full, nobody stands who does not wait, no queue
        /// is empty, the first of all who wait is behind nobody; and when all have left, nothing remains.
        ///
        /// Woken by: leaving out `self.standing.remove(&key)` in `Queues::leave`; and `<=` for either `<` in
        /// `begin_to_wait`.
        #[test]
        fn nothing_remains_of_those_who_left(steps in vec((0..6usize, 0..3u8, 0..1u8 << KEYS), 0..60)) {
            let waiters = Waiters { most: 4, most_per_key: Some(2), ..Waiters::default() };
            let mut places: Vec<Place<'_>> = (0..6).map(|_| waiters.arrive()).collect();
            for (who, act, mask) in steps {
                let place = &mut places[who];
                let waited = place.waits && act > 0;
                match act {
                    0 => drop(std::mem::replace(place, waiters.arrive())),
                    1 => drop(place.turn(keys(mask))),
                    _ => drop(place.stand(|key| key.to_u128() > 0, keys(mask))),
                }
                let queues = waiters.lock();
                prop_assert_eq!(queues.bells.len(), waiters.waiting());
                prop_assert!(queues.bells.len() <= waiters.most);
                let standing = queues.standing.values();
                prop_assert!(standing.clone().all(|queue| !queue.is_empty()));
                prop_assert!(standing.flatten().all(|ticket| queues.bells.contains_key(ticket)));
                let begun = places[who].stands_for.iter().filter(|_| !waited);
                prop_assert!(begun.into_iter().all(|key| queues.standing[key].len() <= 2));
                let first = queues.bells.keys().next().copied();
                drop(queues);
                let first = places.iter_mut().find(|place| place.waits && Some(place.ticket) == first);
                prop_assert!(first.is_none_or(|place| place.turn(keys(u8::MAX)) == Turn::Own));
            }
            drop(places);
            let queues = waiters.lock();
            prop_assert!(queues.standing.is_empty() && queues.bells.is_empty());
        }
    }
}
