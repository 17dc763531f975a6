//! Reservations that wait for their end, the next to expire first.

use std::collections::{BTreeMap, BTreeSet};

use threshold_core::{Reservation, Timestamp, TraceId};

/// Reservations by id and by expiry, bounded.
#[derive(Debug)]
pub(super) struct Reservations {
    records: BTreeMap<TraceId, Reservation>,
    queue: BTreeSet<(Timestamp, TraceId)>,
    most: usize,
}

impl Reservations {
    pub(super) fn new(most: usize) -> Self {
        Self { records: BTreeMap::new(), queue: BTreeSet::new(), most }
    }

    /// Keeps a reservation; says whether there was room.
    pub(super) fn insert(&mut self, reservation: Reservation) -> bool {
        let id = reservation.id();
        if self.records.len() >= self.most && !self.records.contains_key(&id) {
            return false;
        }
        self.queue.insert((reservation.expires(), id));
        self.records.insert(id, reservation);
        true
    }

    pub(super) fn get(&self, id: TraceId) -> Option<&Reservation> {
        self.records.get(&id)
    }

    /// When the next one expires.
    pub(super) fn next_expiry(&self) -> Timestamp {
        self.queue.first().map_or(Timestamp::MAX, |(expires, _)| *expires)
    }

    /// Takes out one whose time has come.
    pub(super) fn take_expired(&mut self, now: Timestamp) -> Option<Reservation> {
        let first = self.queue.first().copied().filter(|(expires, _)| *expires <= now)?;
        self.queue.remove(&first);
        self.records.remove(&first.1)
    }
}
