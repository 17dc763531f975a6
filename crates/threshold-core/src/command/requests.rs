//! Request ids: a request that was answered gets the same answer again, from every node of a shared store.
//!
//! The node that carries a request out holds its id for a limited time. If the node dies, another one takes over after that
//! time, and an answer that comes later still changes nothing.

use super::Records;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::{Digest, TraceId};
use crate::time::{Span, Timestamp};

/// The longest stored answer, in bytes.
pub(super) const MAX_ANSWER: usize = 16 << 20;

/// A request with an id, and the caller that carries it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestKey {
    /// The digest of the id.
    pub id: Digest,
    /// The digest of the request itself. Another request under the same id is a mistake of the client.
    pub request: Digest,
    /// A random id of the caller. With the same one, a command that was lost on the way can be sent again.
    pub by: TraceId,
}

/// The state of a request with an id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestState {
    /// It is the first with its id: the caller carries it out, then ends it.
    Begun,
    /// Another caller is carrying it out.
    UnderWay,
    /// It was carried out before, with this answer.
    Answered(Box<[u8]>),
    /// Its id was used for a different request.
    Reused,
}

/// The stored record of a request with an id. From `until` on it counts as forgotten.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestRecord {
    /// The digest of the request itself.
    request: Digest,
    /// The caller that carries it out, or did.
    by: TraceId,
    until: Timestamp,
    /// How often the answer was repeated, where that is counted.
    repeats: u32,
    /// The answer; `None` while the request is under way.
    answer: Option<Box<[u8]>>,
}

impl RequestRecord {
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// Returns when the record is forgotten.
    #[must_use]
    pub fn until(&self) -> Timestamp {
        self.until
    }

    /// Returns the answer; `None` while the request is under way.
    #[must_use]
    pub fn answer(&self) -> Option<&[u8]> {
        self.answer.as_deref()
    }

    /// Returns the stored bytes.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Parses what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// Fails on an unknown version and on malformed bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    fn write(&self, out: &mut Writer) {
        let Self { request, by, until, repeats, answer } = self;
        out.wide(request.to_u128());
        out.wide(by.to_u128());
        out.number(until.micros());
        out.number(u64::from(*repeats));
        out.byte(u8::from(answer.is_some()));
        if let Some(answer) = answer {
            out.bytes(answer);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let wrong = BytesError::Malformed("request");
        Ok(Self {
            request: from.wide().map(Digest::from_u128)?,
            by: from.wide().map(TraceId::from_u128)?,
            until: from.number().map(Timestamp::from_micros)?,
            repeats: u32::try_from(from.number()?).map_err(|_| wrong)?,
            answer: match from.byte()? {
                0 => None,
                1 => Some(from.bytes(MAX_ANSWER)?.into()),
                _ => return Err(wrong),
            },
        })
    }
}

/// Begins a request, or returns the state of the one before it.
pub(super) fn begin<R: Records>(
    key: &RequestKey,
    life: Span,
    repeats: Option<u32>,
    records: &mut R,
    now: Timestamp,
) -> Result<RequestState, R::Error> {
    if let Some(mut known) = live(key.id, records, now)? {
        // Another request must never get this answer, which may hold data that its sender must not see.
        if known.request != key.request {
            return Ok(RequestState::Reused);
        }
        match (known.answer.clone(), repeats) {
            (Some(answer), None) => return Ok(RequestState::Answered(answer)),
            (Some(answer), Some(most)) if known.repeats < most => {
                // Counted in the record and not in a node, because repetitions may come to any node.
                known.repeats = known.repeats.saturating_add(1);
                records.save_request(key.id, known, now)?;
                return Ok(RequestState::Answered(answer));
            }
            // The answer was repeated as often as it may be. The request is carried out again.
            (Some(_), Some(_)) => {}
            (None, _) if known.by != key.by => return Ok(RequestState::UnderWay),
            // The same caller begins again: its first command may have been lost.
            (None, _) => {}
        }
    }
    // `until` is a lease. If the node dies, the id is free again after `life`, and a later `end` of the dead node's
    // request finds another `by`.
    let begun = RequestRecord { request: key.request, by: key.by, until: now.plus(life), repeats: 0, answer: None };
    records.save_request(key.id, begun, now)?;
    Ok(RequestState::Begun)
}

/// Ends a request with its answer, or forgets it. Changes nothing where the caller took so long that another one has begun the
/// request.
pub(super) fn end<R: Records>(
    key: &RequestKey,
    answer: Option<&[u8]>,
    life: Span,
    records: &mut R,
    now: Timestamp,
) -> Result<(), R::Error> {
    let known = live(key.id, records, now)?;
    // Without a record, because it took too long, an answer is still stored: the request was charged.
    if known.as_ref().is_some_and(|known| known.by != key.by) || (known.is_none() && answer.is_none()) {
        return Ok(());
    }
    // A record that is over already counts as forgotten. It replaces the one under way, so that a repetition begins at
    // once.
    let until = if answer.is_some() { now.plus(life) } else { now };
    let answer = answer.map(Into::into);
    let ended = RequestRecord { request: key.request, by: key.by, until, repeats: 0, answer };
    records.save_request(key.id, ended, now)
}

fn live<R: Records>(id: Digest, records: &mut R, now: Timestamp) -> Result<Option<RequestRecord>, R::Error> {
    Ok(records.request(id)?.filter(|known| now < known.until))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_a_request_reads_back() {
        let under_way = RequestRecord {
            request: Digest::from_u128(u128::MAX),
            by: TraceId::from_u128(7),
            until: Timestamp::from_secs(1_767_225_600),
            repeats: u32::MAX,
            answer: None,
        };
        let answered = RequestRecord { answer: Some([0, 255, 1].into()), ..under_way.clone() };
        let empty = RequestRecord { answer: Some(Box::default()), ..under_way.clone() };
        for record in [under_way, answered, empty] {
            let bytes = record.to_bytes(Format::PRESENT);
            assert_eq!(RequestRecord::from_bytes(&bytes), Ok(record));
            for end in 0..bytes.len() {
                assert!(RequestRecord::from_bytes(&bytes[..end]).is_err(), "{end}");
            }
        }
    }
}
