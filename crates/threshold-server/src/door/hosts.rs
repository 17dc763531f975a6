//! Guards a server without tokens against DNS rebinding: `Host` and `Origin` must be an address or a name of the server.
//!
//! An attacker's web page can have its own name resolve to 127.0.0.1, and then call this server from the victim's browser as
//! if it were the page's origin. Such a request carries the attacker's name in `Host`.

use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use http::header::{HOST, ORIGIN};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, Version};
use threshold_core::TraceId;

use super::{ApiError, forward_auth};

/// The most characters of a header in a log line: names are shorter, and a client chooses the value.
const MAX_LOGGED: usize = 80;

/// The names that requests may call a listener by.
#[derive(Debug, Clone)]
pub(crate) enum Hosts {
    /// Any name: callers need a token, which no page knows, or a Unix socket, which no page can open.
    Any,
    /// Loopback addresses, `localhost`, and these.
    Own(Arc<[HostName]>),
}

/// A name or an address that `--allow-host` allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostName(String);

impl FromStr for HostName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A wildcard or a port would never match a request, and the operator would find out only from refused
        // clients.
        let is_name = |name: &str| {
            !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
        };
        // An IPv6 address is copied with its brackets from a URL, or without them from an interface.
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        if let Ok(ip) = bare.parse::<IpAddr>() {
            return Ok(Self(ip.to_canonical().to_string()));
        }
        if is_name(text) {
            return Ok(Self(text.trim_end_matches('.').to_ascii_lowercase()));
        }
        Err("expected a name or an address, without a scheme, a port or wildcards".to_owned())
    }
}

/// Why a request is refused before it is routed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The request violates HTTP/1.1.
    Invalid(&'static str),
    /// `Host` or `Origin` is not a name of this server.
    Misdirected { header: &'static str, value: String },
}

impl Hosts {
    /// Checks `Host` and `Origin`.
    pub(super) fn check(&self, version: Version, uri: &Uri, headers: &HeaderMap) -> Result<(), Refusal> {
        let mut hosts = headers.get_all(HOST).iter();
        let host = hosts.next();
        // RFC 9112 requires a 400 here. Without a name, nothing could be compared below. HTTP/2 names the host in its target.
        if host.is_none() && version >= Version::HTTP_11 && (version < Version::HTTP_2 || uri.authority().is_none()) {
            return Err(Refusal::Invalid("HTTP/1.1 requires a Host header, and HTTP/2 an authority"));
        }
        // Proxies and servers disagree about which of two Host lines counts (request smuggling), so neither is accepted.
        if hosts.next().is_some() {
            return Err(Refusal::Invalid("there is more than one Host header"));
        }
        // The checks above protect every server. From here on, only one without tokens.
        let Self::Own(names) = self else { return Ok(()) };
        // A request line may carry a host too, and RFC 9112 has it override `Host`. Both must be names of this
        // server.
        let target = uri.authority().map(|target| target.as_str().as_bytes());
        // A request with neither is HTTP/1.0, which no browser sends.
        let named = host.map(HeaderValue::as_bytes).into_iter().chain(target);
        if let Some(other) = { named }.find(|named| !is_own(host_of(named), names)) {
            return Err(Refusal::misdirected("Host", other));
        }
        // A proxy passes on its client's Origin. A page cannot send the headers by which a proxy describes a request: its
        // browser would send a CORS preflight first, which this server does not answer.
        if uri.path() == forward_auth::PATH && forward_auth::describes_a_request(headers) {
            return Ok(());
        }
        // Every line is compared: a browser sends one, and of two a check of the first would miss the other.
        let mut origins = headers.get_all(ORIGIN).iter().map(HeaderValue::as_bytes);
        match origins.find(|origin| !is_own(host_of_origin(origin), names)) {
            None => Ok(()),
            Some(origin) => Err(Refusal::misdirected("Origin", origin)),
        }
    }
}

impl Refusal {
    fn misdirected(header: &'static str, value: &[u8]) -> Self {
        let value = String::from_utf8_lossy(value).chars().take(MAX_LOGGED).collect();
        Self::Misdirected { header, value }
    }

    /// Logs the refusal: a proxy's operator may never see what the proxy is answered.
    pub(super) fn log(&self, trace: TraceId, left_out: u64) {
        match self {
            Self::Invalid(reason) => {
                tracing::debug!(reason, trace_id = %trace, left_out, "request refused: invalid Host");
            }
            Self::Misdirected { header, value } => {
                tracing::warn!(
                    header,
                    ?value,
                    trace_id = %trace,
                    left_out,
                    "request refused: not a name of this server (--allow-host)"
                );
            }
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Invalid(message) => Self::new(StatusCode::BAD_REQUEST, "bad_request", message),
            Refusal::Misdirected { header, .. } => {
                let message = format!(
                    "{header} is neither an address of this machine, nor localhost, nor a name that the server was \
                     started with (--allow-host NAME)"
                );
                Self::new(StatusCode::FORBIDDEN, "forbidden", message)
            }
        }
    }
}

fn is_own(host: Option<&str>, names: &[HostName]) -> bool {
    let Some(host) = host else { return false };
    if let Ok(ip) = host.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        // An address cannot be rebound: a page that was loaded from it is this machine's own.
        return ip.is_loopback() || names.iter().any(|name| name.0.parse() == Ok(ip));
    }
    // A trailing dot marks a fully qualified name, and resolves to the same address.
    let host = host.strip_suffix('.').unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || names.iter().any(|name| name.0.eq_ignore_ascii_case(host))
}

/// Returns the host of `HOST[:PORT]`. The port is ignored: a tunnel may listen on another one than the server.
fn host_of(authority: &[u8]) -> Option<&str> {
    let authority = std::str::from_utf8(authority).ok()?;
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    // What follows a bracket or a colon must be a port. `localhost:80@evil.example` is not this server.
    (port.is_empty() || port.strip_prefix(':').is_some_and(is_port)).then_some(host)
}

/// Returns the host of `SCHEME://HOST[:PORT]`; `None` for an opaque origin, which is sent as `null`.
fn host_of_origin(origin: &[u8]) -> Option<&str> {
    let origin = std::str::from_utf8(origin).ok()?;
    // Extensions and files have other schemes, or `null`. None of them is a page of this server.
    let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"))?;
    host_of(authority.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(hosts: &Hosts, uri: &str, fields: &[(&'static str, &'static str)]) -> Result<(), Refusal> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_static(value));
        }
        hosts.check(Version::HTTP_11, &uri.parse().unwrap(), &headers)
    }

    fn own(names: &[&str]) -> Hosts {
        Hosts::Own(names.iter().map(|name| name.parse().unwrap()).collect())
    }

    #[track_caller]
    fn refused(hosts: &Hosts, uri: &str, fields: &[(&'static str, &'static str)], because: &str) {
        match check(hosts, uri, fields) {
            Err(Refusal::Misdirected { header, .. }) => assert_eq!(header, because),
            other => panic!("{fields:?}: {other:?}"),
        }
    }

    #[test]
    fn a_host_must_be_a_loopback_address_or_a_name_of_the_server() {
        let (bare, named) = (own(&[]), own(&["threshold.internal.", "Box", "10.0.0.5", "[fd00::1]"]));
        for host in
            ["127.0.0.1", "127.9.9.9:8080", "[::1]:80", "[::1]", "localhost", "LocalHost.:9", "[::ffff:127.0.0.1]"]
        {
            assert_eq!(check(&bare, "/", &[("host", host)]), Ok(()), "{host}");
        }
        for host in ["threshold.internal", "THRESHOLD.internal:80", "box.", "10.0.0.5:1", "[FD00:0::1]:1"] {
            assert_eq!(check(&named, "/", &[("host", host)]), Ok(()), "{host}");
            refused(&bare, "/", &[("host", host)], "Host");
        }
        let others = [
            "evil.example",
            "localhost.evil.example",
            "evil.example:8080",
            // Names that begin or end like an own one, addresses that are not loopback, and spellings that some
            // resolvers accept.
            "127.0.0.1.evil.example",
            "0.0.0.0",
            "10.0.0.6",
            "[::]",
            "::1",
            "[::1",
            "localhost:x",
            "localhost:80:80",
            "user@localhost",
            "",
            "127.1",
            "localhost/",
        ];
        for host in others {
            refused(&named, "/", &[("host", host)], "Host");
            assert_eq!(check(&Hosts::Any, "/", &[("host", host)]), Ok(()), "{host}");
        }
        // An own name in `Host` does not excuse another one in the request line.
        refused(&named, "http://evil.example/", &[("host", "localhost")], "Host");
    }

    #[test]
    fn an_origin_must_be_a_name_of_the_server_unless_a_proxy_passes_it_on() {
        let hosts = own(&["box"]);
        let page = |origin| [("host", "localhost"), ("origin", origin)];
        for origin in ["http://localhost:3000", "https://box", "http://127.0.0.1", "http://[::1]:8080"] {
            assert_eq!(check(&hosts, "/v1/check", &page(origin)), Ok(()), "{origin}");
        }
        for origin in ["https://evil.example", "null", "", "localhost", "file://localhost", "http://box.evil.example"] {
            refused(&hosts, "/v1/check", &page(origin), "Origin");
            // A page may call `/auth` as well, but cannot send the headers that describe a request.
            refused(&hosts, "/auth", &page(origin), "Origin");
            assert_eq!(check(&Hosts::Any, "/", &page(origin)), Ok(()), "{origin}");
        }
        let two = [("host", "localhost"), ("origin", "http://localhost"), ("origin", "https://evil.example")];
        refused(&hosts, "/", &two, "Origin");
        // A proxy passes on its client's Origin.
        let proxied = [("host", "localhost"), ("origin", "https://evil.example"), ("x-original-uri", "/")];
        assert_eq!(check(&hosts, "/auth?deny=403", &proxied), Ok(()));
        refused(&hosts, "/v1/check", &proxied, "Origin");
        let rebound = [("host", "evil.example"), ("x-original-uri", "/")];
        refused(&hosts, "/auth", &rebound, "Host");
    }

    #[test]
    fn a_request_has_exactly_one_host_header_and_http_1_0_may_have_none() {
        for hosts in [Hosts::Any, own(&[])] {
            assert!(matches!(check(&hosts, "/", &[]), Err(Refusal::Invalid(_))));
            let two = [("host", "localhost"), ("host", "localhost")];
            assert!(matches!(check(&hosts, "/", &two), Err(Refusal::Invalid(_))));
            assert_eq!(hosts.check(Version::HTTP_10, &Uri::from_static("/"), &HeaderMap::new()), Ok(()));
        }
    }

    #[test]
    fn only_a_name_or_an_address_can_be_allowed() {
        for wrong in ["", "*", "*.example.com", "http://box", "box:8080", "[::1]:80", "a b", "caf\u{e9}"] {
            assert!(wrong.parse::<HostName>().is_err(), "{wrong}");
        }
    }
}
