//! Reservations, in the order of their expiry.

use std::collections::{BTreeMap, BTreeSet};

use threshold_core::{Reservation, Timestamp, TraceId};

/// A bounded table of reservations by id and by expiry. A reservation that has ended is kept until it expires, so that a
/// repeated end gets the same answer. When the table is full, ended ones are evicted in the order of their end.
#[derive(Debug)]
pub(super) struct Reservations {
    records: BTreeMap<TraceId, Record>,
    queue: BTreeSet<(Timestamp, TraceId)>,
    ended: BTreeSet<(u64, TraceId)>,
    /// The number of ends so far, which orders `ended`.
    ends: u64,
    max: usize,
}

#[derive(Debug)]
struct Record {
    reservation: Reservation,
    /// Its position in the order of ends; `None` while it is open.
    ended: Option<u64>,
}

/// The table is full of open reservations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AllOpen;

impl Reservations {
    pub(super) fn new(max: usize) -> Self {
        Self { records: BTreeMap::new(), queue: BTreeSet::new(), ended: BTreeSet::new(), ends: 0, max }
    }

    /// Inserts a new reservation. Returns the one that was evicted for it.
    pub(super) fn insert(&mut self, reservation: Reservation) -> Result<Option<Reservation>, AllOpen> {
        let id = reservation.id();
        let gone = if self.records.len() < self.max || self.records.contains_key(&id) {
            None
        } else {
            let (_, first) = self.ended.first().copied().ok_or(AllOpen)?;
            self.remove(first)
        };
        self.queue.insert((reservation.expires(), id));
        self.records.insert(id, Record { reservation, ended: None });
        Ok(gone)
    }

    /// Replaces a reservation by its changed state.
    pub(super) fn update(&mut self, reservation: Reservation) {
        let Some(record) = self.records.get_mut(&reservation.id()) else { return };
        // Only the first end counts: a repeated one must not move it back in the order of evictions.
        if !reservation.is_open() && record.ended.is_none() {
            self.ends = self.ends.saturating_add(1);
            record.ended = Some(self.ends);
            self.ended.insert((self.ends, reservation.id()));
        }
        record.reservation = reservation;
    }

    pub(super) fn get(&self, id: TraceId) -> Option<&Reservation> {
        self.records.get(&id).map(|record| &record.reservation)
    }

    /// Returns when the next reservation expires.
    pub(super) fn next_expiry(&self) -> Timestamp {
        self.queue.first().map_or(Timestamp::MAX, |(expires, _)| *expires)
    }

    /// Shortens reservations that were made by a clock which has since gone back. Looks at one while there are none.
    pub(super) fn bring_back(&mut self, now: Timestamp) {
        while let Some((expires, id)) = self.queue.last().copied() {
            let Some(record) = self.records.get_mut(&id) else { return };
            if !record.reservation.bring_back(now) {
                // The queue is in the order of expiry: if the last one is not too late, none is.
                return;
            }
            self.queue.remove(&(expires, id));
            self.queue.insert((record.reservation.expires(), id));
        }
    }

    /// Removes a reservation that has expired.
    pub(super) fn take_expired(&mut self, now: Timestamp) -> Option<Reservation> {
        let (_, id) = self.queue.first().copied().filter(|(expires, _)| *expires <= now)?;
        self.remove(id)
    }

    /// Removes a reservation.
    pub(super) fn remove(&mut self, id: TraceId) -> Option<Reservation> {
        let Record { reservation, ended } = self.records.remove(&id)?;
        self.queue.remove(&(reservation.expires(), id));
        if let Some(ended) = ended {
            self.ended.remove(&(ended, id));
        }
        Some(reservation)
    }
}
