//! Request ids as commands: an id that was answered gets the same answer again, from every node of a shared store.

use super::Records;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::{Digest, TraceId};
use crate::time::{Span, Timestamp};

/// The longest answer that is read back, in bytes.
pub(super) const MAX_ANSWER: usize = 16 << 20;

/// A request with an id, and who carries it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestKey {
    /// The digest of the id.
    pub id: Digest,
    /// The digest of what is asked under it.
    pub request: Digest,
    /// Fresh and random: whoever carries the request out is known by it, and can begin and end it more than once.
    pub by: TraceId,
}

/// How it stands with a request that has an id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestState {
    /// It is the first with its id: carry it out, then end it.
    Begun,
    /// Another one with its id is being carried out.
    UnderWay,
    /// It was carried out before, and this is what it was answered.
    Answered(Box<[u8]>),
    /// Its id was used for another request.
    Reused,
}

/// What is stored of a request that has an id. From `until` on it counts as forgotten.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestRecord {
    /// The digest of what was asked.
    request: Digest,
    /// Who carries it out, or did.
    by: TraceId,
    until: Timestamp,
    /// How often the answer was given again, where that is counted.
    repeats: u32,
    /// What it was answered; `None` while it is under way.
    answer: Option<Box<[u8]>>,
}

impl RequestRecord {
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// When it is forgotten.
    #[must_use]
    pub fn until(&self) -> Timestamp {
        self.until
    }

    /// The answer; `None` while the request is under way.
    #[must_use]
    pub fn answer(&self) -> Option<&[u8]> {
        self.answer.as_deref()
    }

    /// The bytes that are stored.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes that no such record has.
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

/// Begins a request, or says what became of the one before.
pub(super) fn begin<R: Records>(
    key: &RequestKey,
    life: Span,
    repeats: Option<u32>,
    records: &mut R,
    now: Timestamp,
) -> Result<RequestState, R::Error> {
    if let Some(mut known) = live(key.id, records, now)? {
        if known.request != key.request {
            return Ok(RequestState::Reused);
        }
        match (known.answer.clone(), repeats) {
            (Some(answer), None) => return Ok(RequestState::Answered(answer)),
            (Some(answer), Some(most)) if known.repeats < most => {
                known.repeats = known.repeats.saturating_add(1);
                records.save_request(key.id, known, now)?;
                return Ok(RequestState::Answered(answer));
            }
            // It was given as often as it may be.
            (Some(_), Some(_)) => {}
            (None, _) if known.by != key.by => return Ok(RequestState::UnderWay),
            (None, _) => {}
        }
    }
    let begun = RequestRecord { request: key.request, by: key.by, until: now.plus(life), repeats: 0, answer: None };
    records.save_request(key.id, begun, now)?;
    Ok(RequestState::Begun)
}

/// Ends a request with its answer, or forgets it. Whoever took so long that another has begun the request changes nothing.
pub(super) fn end<R: Records>(
    key: &RequestKey,
    answer: Option<&[u8]>,
    life: Span,
    records: &mut R,
    now: Timestamp,
) -> Result<(), R::Error> {
    let known = live(key.id, records, now)?;
    if known.as_ref().is_some_and(|known| known.by != key.by) || (known.is_none() && answer.is_none()) {
        return Ok(());
    }
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
