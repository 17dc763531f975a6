//! Requests that are kept after their lines are gone: records in one vector, and all of their strings in one other.

use std::net::IpAddr;

use super::{Moment, Request};

#[derive(Default)]
pub(super) struct Batch {
    records: Vec<Record>,
    text: String,
}

/// One request of a batch.
#[derive(Clone, Copy)]
struct Record {
    at: Moment,
    ip: Option<IpAddr>,
    status: Option<u16>,
    bytes: Option<u64>,
    repeated: u64,
    /// Where its strings begin in the batch's text, one after the other, and the length of each.
    start: usize,
    lengths: [u32; 6],
}

/// The length of an absent string.
const ABSENT: u32 = u32::MAX;

impl Batch {
    /// Adds a request, and returns the bytes of its strings.
    pub(super) fn push(&mut self, request: &Request<'_>) -> usize {
        let Request { at, ip, status, bytes, repeated, method, path, host, user, tenant, tier } = *request;
        let start = self.text.len();
        let lengths = [method, path, host, user, tenant, tier].map(|part| {
            let Some(part) = part else { return ABSENT };
            // No line is that long.
            let length = u32::try_from(part.len()).unwrap_or(ABSENT);
            if length != ABSENT {
                self.text.push_str(part);
            }
            length
        });
        self.records.push(Record { at, ip, status, bytes, repeated, start, lengths });
        self.text.len().saturating_sub(start)
    }

    pub(super) fn first(&self) -> Option<Request<'_>> {
        self.records.first().map(|record| self.request(record))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Request<'_>> {
        self.records.iter().map(|record| self.request(record))
    }

    fn request(&self, record: &Record) -> Request<'_> {
        let Record { at, ip, status, bytes, repeated, start, lengths } = *record;
        // In the order in which `push` wrote them.
        let mut rest = self.text.get(start..).unwrap_or_default();
        let [method, path, host, user, tenant, tier] = lengths.map(|length| {
            if length == ABSENT {
                return None;
            }
            let (part, after) = rest.split_at_checked(usize::try_from(length).ok()?)?;
            rest = after;
            Some(part)
        });
        Request { at, ip, method, path, host, user, tenant, tier, status, bytes, repeated }
    }

    /// Sorts by time. The sort is stable, so that equal times keep the order of the log, and fast on sorted input.
    pub(super) fn sort(&mut self) {
        self.records.sort_by_key(|record| record.at.micros);
    }

    pub(super) fn len(&self) -> usize {
        self.records.len()
    }

    pub(super) fn text_len(&self) -> usize {
        self.text.len()
    }

    pub(super) fn clear(&mut self) {
        self.records.clear();
        self.text.clear();
    }
}
