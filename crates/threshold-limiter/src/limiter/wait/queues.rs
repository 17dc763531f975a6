//! The queues of waiting requests, one for each key, in the order of arrival.
//!
//! A request draws a ticket when it arrives. If it must wait, it joins the queues of the keys that have denied it and of
//! those where a request ahead of it waits. It may try when nobody is ahead of it in the queue of any key that it contests.
//! The request with the lowest ticket is behind nobody, so there is always one that may try, and a request that leaves a
//! queue notifies the next: there is no deadlock, and no lost wake-up. A key that has never denied a request is not queued
//! for, so that requests that wait for one key do not hold up those for another.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threshold_core::Digest;
use tokio::sync::Notify;

/// The position in the order of arrival.
type Ticket = u64;

/// All waiting requests of one limiter.
pub(crate) struct Waiters {
    /// How many may wait in all.
    pub(crate) max: usize,
    /// How many may begin to wait for one key; a quarter of `max` by default.
    pub(crate) max_per_key: Option<usize>,
    tickets: AtomicU64,
    /// The number of `wakers`, readable without the lock: a limiter that gives back capacity asks every time whether any
    /// request waits.
    waiting: AtomicUsize,
    queues: Mutex<Queues>,
}

#[derive(Debug, Default)]
struct Queues {
    /// The notification of each waiting request.
    wakers: BTreeMap<Ticket, Arc<Notify>>,
    /// The queue of each key. Empty queues are removed, so that the map is bounded by the waiting requests.
    by_key: HashMap<Digest, BTreeSet<Ticket>>,
}

/// The place of one request in the queues. Dropping it leaves them, whatever the reason: that makes `wait` safe to cancel.
pub(crate) struct Place<'w> {
    waiters: &'w Waiters,
    ticket: Ticket,
    waker: Arc<Notify>,
    /// Whether it counts as waiting: from the first time that it could not go on.
    waits: bool,
    /// The keys in whose queues it is.
    queued_for: Vec<Digest>,
    /// Those of them that have denied it.
    denied_by: Vec<Digest>,
}

/// Whether a request may try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// No request is ahead.
    Own,
    /// A request is ahead, and will notify the next when it leaves.
    Behind,
    /// A request is ahead, and the queues are full.
    NoRoom,
}

impl Default for Waiters {
    fn default() -> Self {
        Self {
            max: super::MAX_WAITERS,
            max_per_key: None,
            tickets: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            queues: Mutex::default(),
        }
    }
}

impl fmt::Debug for Waiters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiters").field("max", &self.max).field("waiting", &self.waiting).finish_non_exhaustive()
    }
}

impl Waiters {
    /// Makes room for `max` waiting requests, and for `max_per_key` of them in one queue; a quarter of `max` by default.
    pub(crate) fn new(max: usize, max_per_key: Option<usize>) -> Self {
        Self { max, max_per_key, ..Self::default() }
    }

    pub(crate) fn arrive(&self) -> Place<'_> {
        Place {
            waiters: self,
            // Tickets only have to be unique and increasing. The lock on the queues orders everything else.
            ticket: self.tickets.fetch_add(1, Ordering::Relaxed),
            waker: Arc::default(),
            waits: false,
            queued_for: Vec::new(),
            denied_by: Vec::new(),
        }
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    /// Returns how many may begin to wait for one key.
    fn per_key(&self) -> usize {
        self.max_per_key.unwrap_or_else(|| self.max.div_ceil(4))
    }

    /// Wakes the first in the queue of each of these keys.
    pub(crate) fn wake_first(&self, keys: impl IntoIterator<Item = Digest>) {
        // A request that begins to wait right after this load misses the notification. It tries again by itself within
        // a second.
        if self.waiting() == 0 {
            return;
        }
        let queues = self.lock();
        for key in keys {
            queues.wake_first(key);
        }
    }

    /// Wakes all waiting requests.
    pub(crate) fn wake_all(&self) {
        if self.waiting() > 0 {
            self.lock().wakers.values().for_each(|waker| waker.notify_one());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        // A poisoned lock is safe to use: no change to the queues panics half way.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queues {
    /// Wakes the first in a queue. `Notify` stores a notification that comes before the request awaits it.
    fn wake_first(&self, key: Digest) {
        let first = self.by_key.get(&key).and_then(BTreeSet::first);
        if let Some(waker) = first.and_then(|ticket| self.wakers.get(ticket)) {
            waker.notify_one();
        }
    }

    fn leave(&mut self, key: Digest, ticket: Ticket) {
        let Some(queue) = self.by_key.get_mut(&key) else { return };
        let was_first = queue.first() == Some(&ticket);
        queue.remove(&ticket);
        if queue.is_empty() {
            self.by_key.remove(&key);
        } else if was_first {
            self.wake_first(key);
        }
    }
}

impl Place<'_> {
    /// Returns whether the request may try for these keys. If a request is ahead of it, it queues behind that one, and in no
    /// other queue.
    pub(crate) fn turn(&mut self, contested: impl Iterator<Item = Digest>) -> Turn {
        // Held until the request is in the queue. If the one ahead left in between, its notification would be lost.
        let mut queues = self.waiters.lock();
        let ahead = |key: &Digest| {
            let first = queues.by_key.get(key).and_then(BTreeSet::first);
            first.is_some_and(|first| *first < self.ticket)
        };
        let ahead: Vec<Digest> = contested.filter(ahead).collect();
        if ahead.is_empty() {
            return Turn::Own;
        }
        if !self.begin_to_wait(&mut queues, &ahead) {
            return Turn::NoRoom;
        }
        // There is no telling how long those ahead will take, so it holds no other key meanwhile.
        self.denied_by.clear();
        self.queue_for(&mut queues, ahead);
        Turn::Behind
    }

    /// Queues the request for the keys that have denied it now, and for those of earlier attempts that `keep` holds; leaves
    /// all others. Returns whether there is room to wait.
    pub(crate) fn enqueue(&mut self, keep: impl Fn(Digest) -> bool, denied_by: impl Iterator<Item = Digest>) -> bool {
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
        self.queue_for(&mut queues, keys);
        true
    }

    /// Waits for a notification.
    pub(crate) async fn notified(&self) {
        self.waker.notified().await;
    }

    /// Counts the request as waiting if there is room, in all and in the queue of each of these keys. A request that already
    /// waits may change queues. Returns whether it waits.
    fn begin_to_wait(&mut self, queues: &mut Queues, keys: &[Digest]) -> bool {
        let per_key = self.waiters.per_key();
        let has_room = |key| queues.by_key.get(key).map_or(0, BTreeSet::len) < per_key;
        if !self.waits && queues.wakers.len() < self.waiters.max && keys.iter().all(has_room) {
            queues.wakers.insert(self.ticket, Arc::clone(&self.waker));
            self.waiters.waiting.store(queues.wakers.len(), Ordering::Release);
            self.waits = true;
        }
        self.waits
    }

    /// Moves the request to the queues of these keys.
    fn queue_for(&mut self, queues: &mut Queues, keys: Vec<Digest>) {
        for key in &keys {
            queues.by_key.entry(*key).or_default().insert(self.ticket);
        }
        for key in self.queued_for.iter().filter(|key| !keys.contains(key)) {
            queues.leave(*key, self.ticket);
        }
        self.queued_for = keys;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.waits {
            return;
        }
        let mut queues = self.waiters.lock();
        queues.wakers.remove(&self.ticket);
        self.waiters.waiting.store(queues.wakers.len(), Ordering::Release);
        for key in &self.queued_for {
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

    /// Returns the keys of a bit mask.
    fn keys(mask: u8) -> impl Iterator<Item = Digest> {
        (0..KEYS).filter(move |key| mask >> key & 1 == 1).map(|key| Digest::from_u128(u128::from(key)))
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// No more requests wait than may, none begins to wait in a full queue, only waiting requests are in queues, no queue
        /// is empty, and the first of all waiting requests may try. When all have left, nothing remains.
        ///
        /// Woken by: leaving out `self.by_key.remove(&key)` in `Queues::leave`; and `<=` for either `<` in
        /// `begin_to_wait`.
        #[test]
        fn the_queues_hold_waiting_requests_only(steps in vec((0..6usize, 0..3u8, 0..1u8 << KEYS), 0..60)) {
            let waiters = Waiters { max: 4, max_per_key: Some(2), ..Waiters::default() };
            let mut places: Vec<Place<'_>> = (0..6).map(|_| waiters.arrive()).collect();
            for (who, act, mask) in steps {
                let place = &mut places[who];
                let waited = place.waits && act > 0;
                match act {
                    0 => drop(std::mem::replace(place, waiters.arrive())),
                    1 => drop(place.turn(keys(mask))),
                    _ => drop(place.enqueue(|key| key.to_u128() > 0, keys(mask))),
                }
                let queues = waiters.lock();
                prop_assert_eq!(queues.wakers.len(), waiters.waiting());
                prop_assert!(queues.wakers.len() <= waiters.max);
                let by_key = queues.by_key.values();
                prop_assert!(by_key.clone().all(|queue| !queue.is_empty()));
                prop_assert!(by_key.flatten().all(|ticket| queues.wakers.contains_key(ticket)));
                let begun = places[who].queued_for.iter().filter(|_| !waited);
                prop_assert!(begun.into_iter().all(|key| queues.by_key[key].len() <= 2));
                let first = queues.wakers.keys().next().copied();
                drop(queues);
                let first = places.iter_mut().find(|place| place.waits && Some(place.ticket) == first);
                prop_assert!(first.is_none_or(|place| place.turn(keys(u8::MAX)) == Turn::Own));
            }
            drop(places);
            let queues = waiters.lock();
            prop_assert!(queues.by_key.is_empty() && queues.wakers.is_empty());
        }
    }
}
