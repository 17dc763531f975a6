//! Requests with an id: those in flight, and the answers of those that have ended.

use std::collections::{BTreeMap, BTreeSet};

use threshold_core::command::RequestRecord;
use threshold_core::{Digest, Timestamp};

use crate::store::StoreError;

/// The bytes reserved for a request in flight: most answers are shorter.
const EXPECTED: usize = 4_096;
/// The bytes of a record besides its answer: its entries in both trees, whose nodes may be half empty.
const OVERHEAD: usize = 384;

/// A table of requests by id and by expiry, bounded in bytes. None is evicted before its time. When it is full, no new request
/// begins; the answer of one in flight is kept all the same, since that request was charged.
#[derive(Debug)]
pub(super) struct Requests {
    records: BTreeMap<Digest, RequestRecord>,
    ends: BTreeSet<(Timestamp, Digest)>,
    bytes: usize,
    max: usize,
}

impl Requests {
    /// Creates a table with room for this many bytes.
    pub(super) fn new(max: usize) -> Self {
        Self { records: BTreeMap::new(), ends: BTreeSet::new(), bytes: 0, max }
    }

    pub(super) fn get(&self, id: Digest) -> Option<&RequestRecord> {
        self.records.get(&id)
    }

    pub(super) fn save(&mut self, id: Digest, record: RequestRecord, now: Timestamp) -> Result<(), StoreError> {
        while let Some((_, over)) = self.ends.first().copied().filter(|(end, _)| *end <= now) {
            self.forget(over);
        }
        // The record that this one replaces gives back its bytes.
        let left = self.bytes.saturating_sub(self.records.get(&id).map_or(0, size));
        if record.answer().is_none() && left.saturating_add(size(&record)) > self.max && record.until() > now {
            return Err(StoreError::Full);
        }
        self.forget(id);
        // A record that is over already only ends the one before it.
        if record.until() > now {
            self.bytes = self.bytes.saturating_add(size(&record));
            self.ends.insert((record.until(), id));
            self.records.insert(id, record);
        }
        Ok(())
    }

    fn forget(&mut self, id: Digest) {
        if let Some(gone) = self.records.remove(&id) {
            self.bytes = self.bytes.saturating_sub(size(&gone));
            self.ends.remove(&(gone.until(), id));
        }
    }
}

fn size(record: &RequestRecord) -> usize {
    record.answer().map_or(EXPECTED, <[u8]>::len).saturating_add(OVERHEAD)
}
