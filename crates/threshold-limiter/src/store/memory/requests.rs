//! Answers that are remembered by the ids of their requests, and requests with an id that are under way.

use std::collections::{BTreeMap, BTreeSet};

use threshold_core::command::RequestRecord;
use threshold_core::{Digest, Timestamp};

use crate::store::StoreError;

/// The room that a request takes while its answer is not there yet: most answers are shorter.
const EXPECTED: usize = 4_096;
/// What a record takes besides its answer: its places in both trees, which may be half empty.
const OVERHEAD: usize = 384;

/// Requests by id and by the end of their time, bounded in bytes. None is forgotten before its time. Where there is no room,
/// no other one begins; an answer is kept all the same, since its request was charged.
#[derive(Debug)]
pub(super) struct Requests {
    records: BTreeMap<Digest, RequestRecord>,
    ends: BTreeSet<(Timestamp, Digest)>,
    bytes: usize,
    most: usize,
}

impl Requests {
    /// Room for so many bytes.
    pub(super) fn new(most: usize) -> Self {
        Self { records: BTreeMap::new(), ends: BTreeSet::new(), bytes: 0, most }
    }

    pub(super) fn get(&self, id: Digest) -> Option<&RequestRecord> {
        self.records.get(&id)
    }

    pub(super) fn save(&mut self, id: Digest, record: RequestRecord, now: Timestamp) -> Result<(), StoreError> {
        while let Some((_, over)) = self.ends.first().copied().filter(|(end, _)| *end <= now) {
            self.forget(over);
        }
        let left = self.bytes.saturating_sub(self.records.get(&id).map_or(0, size));
        if record.answer().is_none() && left.saturating_add(size(&record)) > self.most && record.until() > now {
            return Err(StoreError::Full);
        }
        self.forget(id);
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
