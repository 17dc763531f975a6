//! Receipts that must not be refunded again: those that were refunded, and those of ended reservations.

use threshold_core::{Timestamp, TraceId};

use super::bounded_map::{BoundedMap, Worth, worth_until};
use crate::store::StoreError;

/// The ids of such receipts, each until a refund would have no effect anyway.
#[derive(Debug)]
pub(super) struct Refunds {
    /// Receipts that callers have: none is evicted before its time.
    refunded: BoundedMap<TraceId, Timestamp>,
    /// Receipts of reservations, which callers do not have. They take no room from the others.
    ended: BoundedMap<TraceId, Timestamp>,
}

impl Refunds {
    pub(super) fn new(max: usize) -> Self {
        Self { refunded: BoundedMap::new(max), ended: BoundedMap::new(max) }
    }

    /// Records that a receipt is refunded. Returns whether this is the first time.
    ///
    /// # Errors
    /// Returns an error if there is no room to record it: without the record it could be refunded again.
    pub(super) fn refund(&mut self, id: TraceId, void_from: Timestamp, now: Timestamp) -> Result<bool, StoreError> {
        if self.refunded.get(id).is_some() || self.ended.get(id).is_some() {
            return Ok(false);
        }
        let kept = self.refunded.insert(id, void_from, |until| worth_until(*until, now, Worth::Protected));
        // A receipt whose refund has no effect need not be recorded.
        if kept || void_from <= now { Ok(true) } else { Err(StoreError::Full) }
    }

    /// Returns the refunded receipts whose refund would still have an effect, each with the time until when.
    pub(super) fn refunded(&self, now: Timestamp) -> impl Iterator<Item = (TraceId, Timestamp)> {
        self.refunded.entries().iter().copied().filter(move |(_, void_from)| *void_from > now)
    }

    /// Records that a reservation has ended, so that its receipt is not refunded. When full, evicts the one that expires next.
    pub(super) fn end(&mut self, id: TraceId, void_from: Timestamp, now: Timestamp) {
        self.ended.insert(id, void_from, |until| worth_until(*until, now, Worth::Some(until.micros())));
    }
}
