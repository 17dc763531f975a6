//! Receipts that give nothing back any more: those that were refunded, and those of reservations that have ended.

use threshold_core::{Timestamp, TraceId};

use super::bounded_map::{BoundedMap, Worth, worth_until};
use crate::store::StoreError;

/// Ids of receipts, each until refunding it would do nothing anyway.
#[derive(Debug)]
pub(super) struct Refunds {
    /// Those that callers hold: none is forgotten before its time.
    refunded: BoundedMap<TraceId, Timestamp>,
    /// Those of reservations, which are handed to nobody. They take no room from the others.
    ended: BoundedMap<TraceId, Timestamp>,
}

impl Refunds {
    pub(super) fn new(most: usize) -> Self {
        Self { refunded: BoundedMap::new(most), ended: BoundedMap::new(most) }
    }

    /// Remembers that a receipt is refunded. SlotWords whether this is the first time.
    ///
    /// # Errors
    /// Where it cannot be remembered: refunded all the same, it could be refunded again.
    pub(super) fn refund(&mut self, id: TraceId, void_from: Timestamp, now: Timestamp) -> Result<bool, StoreError> {
        if self.refunded.get(id).is_some() || self.ended.get(id).is_some() {
            return Ok(false);
        }
        let kept = self.refunded.insert(id, void_from, |until| worth_until(*until, now, Worth::Protected));
        // One that gives nothing back need not be remembered.
        if kept || void_from <= now { Ok(true) } else { Err(StoreError::Full) }
    }

    /// Receipts that were refunded and would still give something back, each with when they no longer would.
    pub(super) fn refunded(&self, now: Timestamp) -> impl Iterator<Item = (TraceId, Timestamp)> {
        self.refunded.entries().iter().copied().filter(move |(_, void_from)| *void_from > now)
    }

    /// Remembers that a reservation has given back what its receipt says. Where there is no room, the one goes that would
    /// be forgotten next.
    pub(super) fn end(&mut self, id: TraceId, void_from: Timestamp, now: Timestamp) {
        self.ended.insert(id, void_from, |until| worth_until(*until, now, Worth::Some(until.micros())));
    }
}
