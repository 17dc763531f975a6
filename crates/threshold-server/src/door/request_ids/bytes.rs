//! Answers as the bytes that other nodes read: a version, then what they hold.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::Answered;

/// The version of the bytes below, which a change of them raises. Nodes of different versions do not read each other's.
const VERSION: u8 = 1;

/// An answer of the API, which was charged: version, whether it is closed, generation, body.
pub(super) fn of_answer(answer: &Answered) -> Box<[u8]> {
    let mut bytes = Vec::with_capacity(answer.body.len().saturating_add(10));
    bytes.extend([VERSION, u8::from(answer.closed)]);
    bytes.extend(answer.generation.to_be_bytes());
    bytes.extend_from_slice(&answer.body);
    bytes.into()
}

/// Reads what [`of_answer`] wrote.
pub(super) fn to_answer(bytes: &[u8]) -> Option<Answered> {
    let ([VERSION, closed @ (0 | 1)], rest) = bytes.split_first_chunk()? else { return None };
    let (generation, body) = rest.split_first_chunk()?;
    let generation = u64::from_be_bytes(*generation);
    Some(Answered { body: Bytes::copy_from_slice(body), charged: true, closed: *closed == 1, generation })
}

/// The fields of an answer to a proxy: version, then of each field the lengths of name and value, and both.
pub(super) fn of_fields(fields: &HeaderMap) -> Box<[u8]> {
    let mut bytes = vec![VERSION];
    for (name, value) in fields {
        for text in [name.as_str().as_bytes(), value.as_bytes()] {
            bytes.extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(text);
        }
    }
    bytes.into()
}

/// Reads what [`of_fields`] wrote.
pub(super) fn to_fields(bytes: &[u8]) -> Option<HeaderMap> {
    let (&[VERSION], mut rest) = bytes.split_first_chunk()? else { return None };
    let mut fields = HeaderMap::new();
    while !rest.is_empty() {
        let name = HeaderName::from_bytes(text(&mut rest)?).ok()?;
        fields.append(name, HeaderValue::from_bytes(text(&mut rest)?).ok()?);
    }
    Some(fields)
}

fn text<'b>(rest: &mut &'b [u8]) -> Option<&'b [u8]> {
    let (length, after) = rest.split_first_chunk()?;
    let (text, after) = after.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
    *rest = after;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_other_nodes_read_is_what_was_answered() {
        let body = Bytes::from_static(b"{\"allowed\":true}");
        let answer = Answered { body, charged: true, closed: true, generation: u64::MAX - 1 };
        let bytes = of_answer(&answer);
        let read = to_answer(&bytes).unwrap();
        assert_eq!((read.body, read.charged, read.closed, read.generation), (answer.body, true, true, u64::MAX - 1));
        assert!(to_answer(&bytes[..9]).is_none());
        assert!(to_answer(&[&[2], &bytes[1..]].concat()).is_none());
        let mut fields = HeaderMap::new();
        fields.append("x-ratelimit-remaining", HeaderValue::from_static("2"));
        fields.append("x-twice", HeaderValue::from_static(""));
        fields.append("x-twice", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        let bytes = of_fields(&fields);
        assert_eq!(to_fields(&bytes), Some(fields));
        assert_eq!(to_fields(&of_fields(&HeaderMap::new())), Some(HeaderMap::new()));
        assert_eq!(to_fields(&bytes[..bytes.len() - 1]), None);
        assert_eq!(to_fields(&[&[2], &bytes[1..]].concat()), None);
    }
}
