//! Rebuilds the client's request from the headers by which a proxy describes it.

use std::borrow::Cow;

use http::header::HOST;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use percent_encoding::{AsciiSet, CONTROLS, percent_encode};
use threshold_core::path::normalize_host;

use crate::door::ApiError;

/// The bytes that a URI cannot have and proxies pass on, besides those above 0x7f. The number sign is among them: what follows
/// it would be cut off here as a fragment, while some applications take it for a part of the path.
const INVALID_IN_URI: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'#').add(b'<').add(b'>').add(b'^').add(b'`');

/// The two headers for one part of a request: nginx's as configured in deploy/nginx, and that of Caddy and Traefik.
struct HeaderNames {
    original: HeaderName,
    forwarded: HeaderName,
}

static METHOD: HeaderNames = HeaderNames::new("x-original-method", "x-forwarded-method");
static URI: HeaderNames = HeaderNames::new("x-original-uri", "x-forwarded-uri");
static HOSTS: HeaderNames = HeaderNames::new("x-original-host", "x-forwarded-host");
/// The length of the client's body. Proxies ask without the body, and so without its `Content-Length`.
static LENGTH: HeaderName = HeaderName::from_static("x-original-content-length");

/// Whether a proxy describes its client's request. A browser sends these headers to another origin only after a CORS preflight.
pub(super) fn is_described(headers: &HeaderMap) -> bool {
    [&METHOD, &URI].iter().any(|names| headers.contains_key(&names.original) || headers.contains_key(&names.forwarded))
}

/// Replaces the method, the path and the host of the proxy's request by those of its client's. Returns the length of the
/// client's body, 0 if the proxy does not send it.
pub(super) fn restore_request(parts: &mut Parts) -> Result<u64, ApiError> {
    let headers = &parts.headers;
    let method = METHOD.required(headers)?;
    let method = Method::from_bytes(method.as_bytes()).map_err(|_| METHOD.bad("this is not a method"))?;
    let (authority, uri) = uri(URI.required(headers)?.as_bytes())?;
    // Compared as normalised names: proxies differ in how they write the same host.
    let host = HOSTS.find(headers, |a, b| spell(a) == spell(b))?.cloned();
    // A client could otherwise be limited under one host and served under another.
    if let (Some(authority), Some(host)) = (authority, &host)
        && spell(host).is_none_or(|host| spell_bytes(authority) != Some(host))
    {
        return Err(HOSTS.bad("the host differs from that of the URI, and applications may use either"));
    }
    let length = length(headers)?;
    (parts.method, parts.uri) = (method, uri);
    match host {
        Some(host) => drop(parts.headers.insert(HOST, host)),
        // The proxy's own Host names this server.
        None => drop(parts.headers.remove(HOST)),
    }
    Ok(length)
}

/// Removes what a proxy has put before the path of its client's request, which is the same otherwise. Returns the length of the
/// client's body: such a proxy does not tell it.
pub(super) fn remove_prefix(parts: &mut Parts, prefix: &str) -> Result<u64, ApiError> {
    // The name that the request is for stands in the target of HTTP/2.
    if let (None, Some(authority)) = (parts.headers.get(HOST), parts.uri.authority()) {
        let host =
            HeaderValue::try_from(authority.as_str()).map_err(|_| ApiError::bad("host", "this is not a host"))?;
        parts.headers.insert(HOST, host);
    }
    let target = parts.uri.path_and_query().map_or("", |target| target.as_str());
    let (_, uri) = uri(target.strip_prefix(prefix).unwrap_or(target).as_bytes())?;
    parts.uri = uri;
    Ok(0)
}

impl HeaderNames {
    const fn new(original: &'static str, forwarded: &'static str) -> Self {
        Self { original: HeaderName::from_static(original), forwarded: HeaderName::from_static(forwarded) }
    }

    fn required<'h>(&self, headers: &'h HeaderMap) -> Result<&'h HeaderValue, ApiError> {
        let Self { original, forwarded } = self;
        let missing = || self.bad(format!("a proxy must send {original} or {forwarded}"));
        self.find(headers, |a, b| a == b)?.ok_or_else(missing)
    }

    fn bad(&self, message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::bad(self.original.as_str(), message)
    }

    /// Returns the value of the two headers. A proxy sets one of them and may pass on the other as its client sent it, and the
    /// door cannot tell which is which: if they differ, the question is refused.
    fn find<'h>(
        &self,
        headers: &'h HeaderMap,
        same: fn(&HeaderValue, &HeaderValue) -> bool,
    ) -> Result<Option<&'h HeaderValue>, ApiError> {
        let found = [single(headers, &self.original)?, single(headers, &self.forwarded)?];
        match found {
            [Some(original), Some(forwarded)] if !same(original, forwarded) => {
                let message =
                    format!("{} and {} differ: configure the proxy to remove one", self.original, self.forwarded);
                Err(self.bad(message))
            }
            // At most one is set, or both are the same.
            [original, forwarded] => Ok(original.or(forwarded)),
        }
    }
}

/// Returns the value of a header that may have one line; `None` if it is missing or empty.
pub(super) fn single<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Result<Option<&'h HeaderValue>, ApiError> {
    let mut lines = headers.get_all(name).iter();
    // nginx leaves out a header whose value is empty, and other proxies send it empty. Both mean that there is none.
    let only = lines.next().filter(|line| !line.is_empty());
    match lines.next() {
        None => Ok(only),
        // One of the lines may be the client's own, which the proxy passed on beside its own.
        Some(_) => Err(ApiError::bad(name.as_str(), format!("there is more than one {name} header"))),
    }
}

fn spell(host: &HeaderValue) -> Option<String> {
    spell_bytes(host.as_bytes())
}

fn spell_bytes(host: &[u8]) -> Option<String> {
    std::str::from_utf8(host).ok().map(|host| normalize_host(host).into_owned())
}

/// Parses a path and a query. A client may also send an absolute URI; its host is returned, to be compared with the one that
/// the proxy sends.
pub(super) fn uri(text: &[u8]) -> Result<(Option<&[u8]>, Uri), ApiError> {
    let (host, path) = match text.first() {
        // An asterisk is the target of `OPTIONS *`.
        Some(b'/' | b'*') => (None, text),
        _ => split_authority(text).ok_or_else(|| URI.bad("a path must begin with a slash"))?,
    };
    // A request with invalid bytes is decided too, since the proxy and the application behind it accept it.
    let encoded = Cow::from(percent_encode(path, INVALID_IN_URI));
    let path = PathAndQuery::try_from(encoded.as_ref());
    path.map(|path| (host, Uri::from(path))).map_err(|_| URI.bad("this is not a URI"))
}

/// Splits an absolute URI into its host and its path.
fn split_authority(text: &[u8]) -> Option<(Option<&[u8]>, &[u8])> {
    let scheme = text.windows(3).position(|three| three == b"://")?;
    let rest = text.get(scheme.checked_add(3)?..)?;
    let (authority, path) = rest.split_at_checked(rest.iter().position(|byte| *byte == b'/')?)?;
    // The part before the last `@` is user information, which a client chooses freely to disguise the host.
    Some((authority.rsplit(|byte| *byte == b'@').next(), path))
}

fn length(headers: &HeaderMap) -> Result<u64, ApiError> {
    let Some(text) = single(headers, &LENGTH)? else { return Ok(0) };
    // `u64::from_str` also accepts a plus sign, which no server accepts in a length.
    let number =
        std::str::from_utf8(text.as_bytes()).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    number
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| ApiError::bad(LENGTH.as_str(), "this is not a number of bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(fields: &[(&'static str, &str)]) -> Result<(Parts, u64), ApiError> {
        let mut request = http::Request::get("/auth").header(HOST, "threshold:8080");
        for (name, value) in fields {
            request = request.header(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        restore_request(&mut parts).map(|length| (parts, length))
    }

    #[track_caller]
    fn path(uri: &str, expect: &str) {
        let (parts, _) = asked(&[("X-Original-Method", "GET"), ("X-Original-URI", uri)]).unwrap();
        assert_eq!((parts.uri.path(), parts.uri.host()), (expect, None));
    }

    #[track_caller]
    fn refused(fields: &[(&'static str, &str)], field: &str) {
        let error = asked(fields).unwrap_err();
        assert_eq!((error.status.as_u16(), error.body.field()), (400, Some(field)));
    }

    #[test]
    fn a_request_is_rebuilt_from_the_headers_of_either_kind_of_proxy() {
        let nginx = [("X-Original-Method", "POST"), ("X-Original-URI", "/a?b"), ("X-Original-Host", "example.com")];
        let traefik =
            [("X-Forwarded-Method", "POST"), ("X-Forwarded-Uri", "/a?b"), ("X-Forwarded-Host", "example.com")];
        for fields in [&nginx[..], &traefik[..], &[nginx, traefik].concat()[..]] {
            let (parts, length) = asked(fields).unwrap();
            assert_eq!((parts.method.as_str(), parts.uri.to_string().as_str(), length), ("POST", "/a?b", 0));
            assert_eq!(parts.headers[HOST], "example.com");
        }
    }

    #[test]
    fn without_the_clients_host_the_proxys_own_is_removed() {
        let (parts, length) =
            asked(&[("X-Original-Method", "PUT"), ("X-Original-URI", "/"), ("X-Original-Content-Length", "812")])
                .unwrap();
        assert_eq!((parts.headers.get(HOST), length), (None, 812));
    }

    /// Woken by: leaving out the prefix or the host of the target.
    #[test]
    fn a_prefix_is_removed_from_the_path_and_nothing_else_is_changed() {
        let restored = |target: &str, host: Option<&str>| {
            let request = http::Request::put(target);
            let request = host.into_iter().fold(request, |request, host| request.header(HOST, host));
            let (mut parts, ()) = request.header("X-Original-URI", "/forged").body(()).unwrap().into_parts();
            remove_prefix(&mut parts, "/auth").unwrap();
            let host = parts.headers.get(HOST).map(|host| host.to_str().unwrap().to_owned());
            (parts.method.to_string(), parts.uri.to_string(), host)
        };
        let own = |uri: &str| ("PUT".to_owned(), uri.to_owned(), Some("a.example".to_owned()));
        assert_eq!(restored("/auth/a/b?deny=403", Some("a.example")), own("/a/b?deny=403"));
        assert_eq!(restored("/auth/auth/x", Some("a.example")), own("/auth/x"));
        assert_eq!(restored("/auth//evil.example/x", Some("a.example")), own("//evil.example/x"));
        assert_eq!(restored("http://a.example/auth/", None), own("/"));
    }

    #[test]
    fn a_path_is_percent_encoded_and_never_read_as_a_host() {
        path("/a/b?c", "/a/b");
        path("//evil.example/x", "//evil.example/x");
        path("http://evil.example/x?y", "/x");
        path("*", "*");
        path("/a<b>\\c d#e", "/a%3Cb%3E\\c%20d%23e");
        path("/a\"b?c=\"d\"", "/a%22b");
        path("/caf\u{e9}", "/caf%C3%A9");
    }

    #[test]
    fn a_missing_repeated_or_contradicting_header_is_refused_by_name() {
        let (method, uri) = (("X-Original-Method", "GET"), ("X-Original-URI", "/"));
        refused(&[], "x-original-method");
        refused(&[method], "x-original-uri");
        refused(&[method, ("X-Original-URI", "")], "x-original-uri");
        refused(&[method, uri, uri], "x-original-uri");
        refused(&[method, ("X-Forwarded-Uri", "/a"), ("X-Forwarded-Uri", "/b")], "x-forwarded-uri");
        // A client's own header, passed on beside the proxy's.
        refused(&[method, uri, ("X-Forwarded-Uri", "/free")], "x-original-uri");
        refused(&[method, uri, ("X-Forwarded-Method", "OPTIONS")], "x-original-method");
        refused(&[method, uri, ("X-Original-Host", "a"), ("X-Forwarded-Host", "b")], "x-original-host");
        refused(&[uri, ("X-Original-Method", "G ET")], "x-original-method");
        refused(&[method, ("X-Original-URI", "evil.example")], "x-original-uri");
        for wrong in ["-1", "1e3", "99999999999999999999999", "+1"] {
            refused(&[method, uri, ("X-Original-Content-Length", wrong)], "x-original-content-length");
        }
    }

    #[test]
    fn the_host_of_an_absolute_uri_must_equal_the_host_header() {
        let asked = |uri: &str, host: &str| {
            asked(&[("X-Original-Method", "GET"), ("X-Original-URI", uri), ("X-Original-Host", host)])
        };
        for uri in ["http://example.com/x", "HTTP://me@Example.COM.:80/x"] {
            let (parts, _) = asked(uri, "example.com").unwrap();
            assert_eq!((parts.uri.path(), &parts.headers[HOST]), ("/x", &HeaderValue::from_static("example.com")));
        }
        for uri in ["http://evil.example/x", "http://example.com@evil.example/x", "http://\u{e9}/x"] {
            assert_eq!(asked(uri, "example.com").unwrap_err().body.field(), Some("x-original-host"), "{uri}");
        }
    }

    #[test]
    fn hosts_are_compared_without_case_and_port() {
        let fields = [("X-Original-Method", "GET"), ("X-Original-URI", "/"), ("X-Original-Host", "example.com")];
        let (parts, _) = asked(&[&fields[..], &[("X-Forwarded-Host", "Example.com:8443")]].concat()).unwrap();
        assert_eq!(parts.headers[HOST], "example.com");
    }
}
