//! Encodes answers for other nodes: a version byte, then the content.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::EncodedAnswer;

/// The version of this encoding. Raise it with every change: nodes of different versions do not read each other's answers.
const VERSION: u8 = 1;

/// Encodes a charged answer of the API: version, whether it is closed, generation, body.
pub(super) fn encode_answer(answer: &EncodedAnswer) -> Box<[u8]> {
    let mut bytes = Vec::with_capacity(answer.body.len().saturating_add(10));
    bytes.extend([VERSION, u8::from(answer.closed)]);
    bytes.extend(answer.generation.to_be_bytes());
    bytes.extend_from_slice(&answer.body);
    bytes.into()
}

/// Decodes what [`encode_answer`] wrote.
pub(super) fn decode_answer(bytes: &[u8]) -> Option<EncodedAnswer> {
    // Another version, or bytes that no node writes: the caller reports it instead of charging again.
    let ([VERSION, closed @ (0 | 1)], rest) = bytes.split_first_chunk()? else { return None };
    let (generation, body) = rest.split_first_chunk()?;
    let generation = u64::from_be_bytes(*generation);
    Some(EncodedAnswer { body: Bytes::copy_from_slice(body), charged: true, closed: *closed == 1, generation })
}

/// Encodes the header fields of an answer to a proxy: version, then each name and value with its length.
pub(super) fn encode_fields(fields: &HeaderMap) -> Box<[u8]> {
    let mut bytes = vec![VERSION];
    for (name, value) in fields {
        for text in [name.as_str().as_bytes(), value.as_bytes()] {
            // No header field is that long. If one were, the length would not match, and `decode_fields` would refuse
            // the answer.
            bytes.extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(text);
        }
    }
    bytes.into()
}

/// Decodes what [`encode_fields`] wrote.
pub(super) fn decode_fields(bytes: &[u8]) -> Option<HeaderMap> {
    let (&[VERSION], mut rest) = bytes.split_first_chunk()? else { return None };
    let mut fields = HeaderMap::new();
    while !rest.is_empty() {
        let name = HeaderName::from_bytes(next_string(&mut rest)?).ok()?;
        fields.append(name, HeaderValue::from_bytes(next_string(&mut rest)?).ok()?);
    }
    Some(fields)
}

fn next_string<'b>(rest: &mut &'b [u8]) -> Option<&'b [u8]> {
    let (length, after) = rest.split_first_chunk()?;
    let (text, after) = after.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
    *rest = after;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_returns_what_was_encoded_and_refuses_other_versions() {
        let body = Bytes::from_static(b"{\"allowed\":true}");
        let answer = EncodedAnswer { body, charged: true, closed: true, generation: u64::MAX - 1 };
        let bytes = encode_answer(&answer);
        let read = decode_answer(&bytes).unwrap();
        assert_eq!((read.body, read.charged, read.closed, read.generation), (answer.body, true, true, u64::MAX - 1));
        assert!(decode_answer(&bytes[..9]).is_none());
        assert!(decode_answer(&[&[2], &bytes[1..]].concat()).is_none());
        let mut fields = HeaderMap::new();
        fields.append("x-ratelimit-remaining", HeaderValue::from_static("2"));
        fields.append("x-twice", HeaderValue::from_static(""));
        fields.append("x-twice", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        let bytes = encode_fields(&fields);
        assert_eq!(decode_fields(&bytes), Some(fields));
        assert_eq!(decode_fields(&encode_fields(&HeaderMap::new())), Some(HeaderMap::new()));
        assert_eq!(decode_fields(&bytes[..bytes.len() - 1]), None);
        assert_eq!(decode_fields(&[&[2], &bytes[1..]].concat()), None);
    }
}
