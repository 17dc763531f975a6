//! The places for connections to a listener: those of clients that have shown no right are few, and are the first to go.
//!
//! A client has shown a right by its first request with a right token, or by its first whole request where none is needed, or by being a
//! trusted proxy. Until then nobody knows what it is, and a flood of such connections must keep nobody else out.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::peers::group;
use crate::log::LogSampler;

/// The fewest places for clients that have shown no right, on a listener with few places, and the most on one with many. Otherwise they
/// are a quarter.
const UNPROVEN: RangeInclusive<usize> = 16..=2_048;

/// The places of a listener.
#[derive(Debug)]
pub(super) struct Places {
    max: usize,
    max_unproven: usize,
    open: Mutex<Open>,
    freed: Notify,
    /// Samples the connections that were closed for others.
    pub(super) closed: LogSampler,
}

#[derive(Debug, Default)]
struct Open {
    count: usize,
    /// How many of them have shown no right.
    unproven: usize,
    /// How many have shown a right that may not take all places.
    lesser: usize,
    next: u64,
    /// Those of each peer, the oldest first, with their tasks: `None` for a moment, until it is spawned.
    by_peer: HashMap<IpAddr, BTreeMap<u64, Option<AbortHandle>>>,
}

/// The place of one connection. Dropping it releases the place.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    peer: IpAddr,
    number: u64,
    is_proven: AtomicBool,
    is_lesser: AtomicBool,
}

/// What a connection has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proof {
    Full,
    /// A read-only token on the listener for operators: half of the places are for those who may act.
    Lesser,
}

/// Whether a connection has shown a right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Right {
    /// It needs none: that of a trusted proxy, or on a socket whose file mode says who may connect.
    Given,
    NotYet,
}

impl Places {
    pub(super) fn new(max: usize) -> Arc<Self> {
        let max_unproven = max.div_ceil(4).clamp(*UNPROVEN.start(), *UNPROVEN.end());
        Arc::new(Self {
            max,
            max_unproven,
            open: Mutex::default(),
            freed: Notify::new(),
            closed: LogSampler::default(),
        })
    }

    /// Waits until a connection can have a place: a free one, or that of one that has shown no right.
    pub(super) async fn available(&self) {
        // One task waits, and a notification is kept for it.
        while !self.lock().has_place(self.max) {
            self.freed.notified().await;
        }
    }

    /// Takes a place for a connection, or waits for one: since it was [`available`](Self::available), another connection may have shown
    /// its right, and is closed for none any more.
    pub(super) async fn take(self: &Arc<Self>, ip: IpAddr, right: Right) -> (Place, Option<IpAddr>) {
        loop {
            if let Some(taken) = self.try_take(ip, right) {
                return taken;
            }
            self.available().await;
        }
    }

    /// Takes a place for a connection, unless all have shown a right.
    ///
    /// If there is none, or none for one that has shown no right, one of these is closed: of the peers, the one with the most loses its
    /// oldest. Its peer is returned.
    fn try_take(self: &Arc<Self>, ip: IpAddr, right: Right) -> Option<(Place, Option<IpAddr>)> {
        let (peer, is_proven) = (group(ip), right == Right::Given);
        let mut open = self.lock();
        if !open.has_place(self.max) {
            return None;
        }
        let is_full = open.count >= self.max || !is_proven && open.unproven >= self.max_unproven;
        let closed = if is_full { open.close_one() } else { None };
        open.count = open.count.saturating_add(1);
        open.next = open.next.wrapping_add(1);
        let number = open.next;
        if !is_proven {
            open.unproven = open.unproven.saturating_add(1);
            open.by_peer.entry(peer).or_default().insert(number, None);
        }
        drop(open);
        Some((
            Place {
                places: Arc::clone(self),
                peer,
                number,
                is_proven: AtomicBool::new(is_proven),
                is_lesser: AtomicBool::new(false),
            },
            closed,
        ))
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    fn has_place(&self, max: usize) -> bool {
        self.count < max || self.unproven > 0
    }

    /// Removes a connection from those that have shown no right. Returns its task; `None` if it is not among them.
    fn remove(&mut self, peer: IpAddr, number: u64) -> Option<Option<AbortHandle>> {
        let own = self.by_peer.get_mut(&peer)?;
        let task = own.remove(&number)?;
        if own.is_empty() {
            self.by_peer.remove(&peer);
        }
        self.unproven = self.unproven.saturating_sub(1);
        Some(task)
    }

    /// Closes the oldest connection of the peer that has the most of those that have shown no right; of equal ones, the oldest of all.
    fn close_one(&mut self) -> Option<IpAddr> {
        let oldest = |own: &BTreeMap<u64, _>| own.keys().next().copied();
        let (peer, own) = self.by_peer.iter().max_by_key(|(_, own)| (own.len(), Reverse(oldest(own))))?;
        let (peer, number) = (*peer, oldest(own)?);
        let task = self.remove(peer, number)?;
        // The place counts as free now: its socket is closed as soon as the runtime gets to its task.
        self.count = self.count.saturating_sub(1);
        if let Some(task) = task {
            task.abort();
        }
        Some(peer)
    }
}

impl Place {
    /// Sets the task of the connection, by which it is closed for others.
    pub(super) fn set_task(&self, task: AbortHandle) {
        let mut open = self.places.lock();
        // Without an entry it has ended already, or has shown a right.
        if let Some(own) = open.by_peer.get_mut(&self.peer).and_then(|own| own.get_mut(&self.number)) {
            *own = Some(task);
        }
    }

    pub(super) fn is_proven(&self) -> bool {
        // `Relaxed` is enough: the lock in `prove` orders everything that follows from it.
        self.is_proven.load(Ordering::Relaxed)
    }

    /// Notes that the client has shown a right: the connection is closed for no other from now on, unless half of the places are taken by
    /// such connections with a lesser right.
    pub(super) fn prove(&self, proof: Proof) {
        if self.is_proven() {
            return;
        }
        let is_lesser = proof == Proof::Lesser;
        // Under the lock, or it could be closed and counted as proven.
        let mut open = self.places.lock();
        if is_lesser && open.lesser >= self.places.max.div_ceil(2) {
            return;
        }
        if open.remove(self.peer, self.number).is_some() {
            open.lesser = open.lesser.saturating_add(is_lesser.into());
            self.is_lesser.store(is_lesser, Ordering::Relaxed);
            self.is_proven.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.places.lock();
        // One that was closed for another has no place any more.
        if open.remove(self.peer, self.number).is_some() || self.is_proven() {
            open.count = open.count.saturating_sub(1);
            open.lesser = open.lesser.saturating_sub(self.is_lesser.load(Ordering::Relaxed).into());
            drop(open);
            self.places.freed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    /// Woken by leaving out `close_one` or either bound in `take`, by closing one that is proven, and by leaving out `Drop`.
    #[tokio::test]
    async fn connections_that_have_shown_no_right_are_few_and_the_first_to_go() {
        let places = Places::new(64);
        let (operator, _) = places.try_take(ip(1), Right::NotYet).unwrap();
        operator.prove(Proof::Full);
        let other = places.try_take(ip(2), Right::NotYet).unwrap().0;
        let mut silent: Vec<Place> = Vec::new();
        for number in 0..80 {
            let (place, closed) = places.try_take(ip(3), Right::NotYet).unwrap();
            // Of the peer with the most, although another one is older.
            assert_eq!(closed, (number >= 15).then(|| ip(3)), "{number}");
            silent.push(place);
        }
        assert_eq!(places.lock().count, 1 + UNPROVEN.start());
        // What is closed shows nothing, and frees nothing twice.
        silent[0].prove(Proof::Full);
        assert!(!silent[0].is_proven() && operator.is_proven());
        drop(silent);
        assert_eq!(places.lock().count, 2);
        assert_eq!(places.lock().unproven, 1);
        let proven: Vec<Place> = (0..62).map(|_| places.try_take(ip(4), Right::Given).unwrap().0).collect();
        assert_eq!(places.lock().count, 64);
        let (last, closed) = places.try_take(ip(4), Right::Given).unwrap();
        assert_eq!(closed, Some(ip(2)), "the last that has shown nothing");
        // It was available when the next one was accepted, and has shown its right since.
        assert!(!places.lock().has_place(64), "all others wait in the system's queue");
        assert!(places.try_take(ip(5), Right::NotYet).is_none());
        drop((other, last));
        places.available().await;
        drop((proven, operator));
        assert_eq!(places.lock().count, 0);
    }

    /// Woken by leaving out `abort`.
    #[tokio::test]
    async fn a_connection_that_is_closed_for_another_ends() {
        let places = Places::new(1);
        let mut held = Vec::new();
        let task = tokio::spawn(std::future::pending::<()>());
        let (place, _) = places.try_take(ip(1), Right::NotYet).unwrap();
        place.set_task(task.abort_handle());
        held.push(place);
        let (next, closed) = places.try_take(ip(2), Right::NotYet).unwrap();
        assert_eq!(closed, Some(ip(1)));
        assert!(task.await.unwrap_err().is_cancelled());
        drop(next);
    }
}
