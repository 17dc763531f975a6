//! Recognises questions that a proxy repeats for one request, so that they get the first answer and are charged once.
//!
//! nginx asks again after each internal redirect (`index`, `try_files`, `error_page`), with the same request id. A repeat
//! must equal the first question in every header: a client that smuggles an id of its own past the proxy can then only repeat
//! its own request, and only as often as nginx redirects.

use std::hash::{Hash, Hasher};
use std::net::IpAddr;

use http::HeaderName;
use http::request::Parts;
use threshold_core::Digest;

use super::PATH;
use super::original::single;
use crate::door::ApiError;
use crate::door::request_ids::RequestIds;

/// The proxy's id of the request.
const ID: HeaderName = HeaderName::from_static("x-threshold-request-id");
/// The longest id. nginx's `$request_id` has 32 characters.
const MAX_ID: usize = 64;

/// Everything that a question says.
struct Question<'p> {
    peer: IpAddr,
    parts: &'p Parts,
    length: u64,
}

impl Hash for Question<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Self { peer, parts, length } = self;
        // The peer is included, so that one proxy never gets an answer that was given to another.
        (PATH, peer, parts.method.as_str(), parts.uri.path(), parts.uri.query(), length).hash(state);
        // These include the id.
        // All header fields, in their order: a client can change nothing about its request and still share an answer.
        for (name, value) in &parts.headers {
            (name.as_str(), value.as_bytes()).hash(state);
        }
    }
}

/// Returns the digest of a trusted proxy's question; `None` if the request has no id.
pub(super) fn question(ids: &RequestIds, peer: IpAddr, parts: &Parts, length: u64) -> Result<Option<Digest>, ApiError> {
    let Some(id) = single(&parts.headers, &ID)? else { return Ok(None) };
    // The id is only hashed. The bound finds a misconfigured header, for example one that carries a whole cookie.
    if id.len() > MAX_ID || !id.as_bytes().iter().all(u8::is_ascii_graphic) {
        return Err(ApiError::bad(ID.as_str(), "an id has at most 64 visible characters"));
    }
    Ok(Some(ids.digest(&Question { peer, parts, length })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(id: &str, uri: &str, more: &[(&'static str, &str)]) -> Parts {
        let mut request = http::Request::get(uri).header(ID, id).header("x-forwarded-for", "203.0.113.7");
        for (name, value) in more {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn questions_are_equal_only_if_every_part_is() {
        let ids = RequestIds::new(1 << 20);
        let asked = |peer: [u8; 4], parts: Parts, length| question(&ids, IpAddr::from(peer), &parts, length).unwrap();
        let first = asked([127, 0, 0, 1], parts("a", "/x", &[]), 0);
        assert_eq!(asked([127, 0, 0, 1], parts("a", "/x", &[]), 0), first);
        let mut post = parts("a", "/x", &[]);
        post.method = http::Method::POST;
        let others = [
            asked([127, 0, 0, 2], parts("a", "/x", &[]), 0),
            asked([127, 0, 0, 1], parts("b", "/x", &[]), 0),
            asked([127, 0, 0, 1], parts("a", "/y", &[]), 0),
            asked([127, 0, 0, 1], parts("a", "/x?y", &[]), 0),
            asked([127, 0, 0, 1], parts("a", "/x", &[("x-user", "u1")]), 0),
            asked([127, 0, 0, 1], parts("a", "/x", &[]), 1),
            asked([127, 0, 0, 1], post, 0),
        ];
        for (number, other) in others.into_iter().enumerate() {
            assert!(other.is_some() && other != first, "{number}");
        }
    }

    #[test]
    fn an_id_is_at_most_one_header_line_of_64_visible_characters() {
        let ids = RequestIds::new(1 << 20);
        let asked = |parts: Parts| {
            question(&ids, IpAddr::from([127, 0, 0, 1]), &parts, 0).map_err(|error| error.status.as_u16())
        };
        assert_eq!(asked(parts("", "/", &[])), Ok(None));
        assert!(matches!(asked(parts(&"x".repeat(64), "/", &[])), Ok(Some(_))));
        assert_eq!(asked(parts(&"x".repeat(65), "/", &[])), Err(400));
        assert_eq!(asked(parts("a b", "/", &[])), Err(400));
        assert_eq!(asked(parts("a", "/", &[("x-threshold-request-id", "b")])), Err(400));
    }
}
