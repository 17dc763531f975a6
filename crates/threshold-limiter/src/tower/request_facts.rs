//! Request → facts: the identity of the caller, from where the policy says or from the application.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::header::{CONTENT_LENGTH, HOST};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use http_body::SizeHint;
use threshold_core::address::Headers;
use threshold_core::path::{PathError, normalize_host};
use threshold_core::policy::{Claims, IdentitySource, Seen};
use threshold_core::{Facts, Policy, TraceId};

/// The peer's address, as an extension of the request. The program that accepts connections inserts it; clients cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

/// The address that a request came from, as far as the layer can know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    /// The address of the connection.
    Known(SocketAddr),
    /// The address of a proxy, and that of the connection to it, which it tells.
    Through { proxy: SocketAddr, peer: SocketAddr },
    /// The application was asked, and knows no address for this request: a Unix socket has none.
    Unknown,
    /// Nothing names addresses to the layer: no closure, no [`PeerAddr`], no `ConnectInfo`.
    NoSource,
}

impl Peer {
    /// Makes a peer from the answer of an application that was asked.
    pub(super) fn asked(address: Option<SocketAddr>) -> Self {
        address.map_or(Self::Unknown, Self::Known)
    }

    pub(super) fn address(self) -> Option<SocketAddr> {
        match self {
            Self::Known(address) | Self::Through { peer: address, .. } => Some(address),
            Self::Unknown | Self::NoSource => None,
        }
    }

    /// Returns whether headers that name the caller are believed: only if a trusted proxy has sent them.
    fn is_trusted(self, trusts: impl Fn(IpAddr) -> bool) -> bool {
        match self {
            Self::Known(address) => trusts(address.ip()),
            Self::Through { proxy, peer } => trusts(proxy.ip()) || trusts(peer.ip()),
            Self::Unknown | Self::NoSource => false,
        }
    }
}

/// The identity of a request, as far as the application knows it. What is `None` is found as the policy says; an empty name
/// identifies nobody.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identified {
    /// The tenant.
    pub tenant: Option<String>,
    /// The user.
    pub user: Option<String>,
    /// The tenant's plan.
    pub tier: Option<String>,
    /// The category, in place of the policy's `[[category]]` tables.
    pub category: Option<String>,
    /// The endpoint, such as the router's matched route.
    pub endpoint: Option<String>,
    /// Facts of your own, by name.
    pub facts: Vec<(String, String)>,
    /// The cost in requests; 1 by default.
    pub cost: Option<u64>,
    /// The named costs.
    pub costs: Vec<(String, u64)>,
}

/// A policy, with what the layer derives from it once and needs for every request.
#[derive(Debug)]
pub(super) struct PolicyView {
    pub(super) policy: Arc<Policy>,
    /// The header fields that rules count by.
    headers: Vec<HeaderName>,
    pub(super) counts_bytes: bool,
}

impl PolicyView {
    pub(super) fn new(policy: Arc<Policy>) -> Self {
        let names = policy.header_names();
        let headers = names.iter().filter_map(|name| HeaderName::from_bytes(name.as_bytes()).ok()).collect();
        let counts_bytes = policy.counts_bytes();
        Self { policy, headers, counts_bytes }
    }
}

/// The facts of a request, borrowed from it while it is decided, and owned where they are needed longer.
#[derive(Debug, Clone)]
pub(super) struct RequestFacts<'r> {
    ip: Option<IpAddr>,
    has_address_source: bool,
    method: Cow<'r, Method>,
    uri: Cow<'r, Uri>,
    /// The route that the application's router has matched, if known.
    route: Option<Cow<'r, str>>,
    host: Option<Cow<'r, HeaderValue>>,
    headers: Vec<(HeaderName, Cow<'r, HeaderValue>)>,
    who: Identified,
    /// The length of the body, if it is known before the body streams.
    pub(super) bytes: Option<u64>,
    pub(super) trace: TraceId,
}

impl<'r> RequestFacts<'r> {
    pub(super) fn new(
        parts: &'r Parts,
        size: &SizeHint,
        view: &PolicyView,
        peer: Peer,
        who: Identified,
        claims: impl FnOnce(&Lines<'_>) -> Option<Claims>,
    ) -> Result<Self, BadRequest> {
        one_host(parts)?;
        let identity = view.policy.identity();
        let lines = Lines(&parts.headers);
        // Core treats a field with two values like a missing one, so a third value changes nothing.
        let counted = |name| parts.headers.get_all(name).iter().take(2).map(move |line| (name, line));
        // A body of unknown size may still announce its length.
        let known = || size.exact().or_else(|| content_length(&parts.headers));
        let mut request_facts = Self {
            ip: address(parts, view, peer),
            has_address_source: peer != Peer::NoSource,
            method: Cow::Borrowed(&parts.method),
            uri: Cow::Borrowed(&parts.uri),
            route: route(parts).map(Cow::Borrowed),
            host: parts.headers.get(HOST).map(Cow::Borrowed),
            headers: view
                .headers
                .iter()
                .flat_map(counted)
                .map(|(name, line)| (name.clone(), Cow::Borrowed(line)))
                .collect(),
            who,
            bytes: if view.counts_bytes { known() } else { None },
            trace: TraceId::default(),
        };
        let sources = [
            (request_facts.who.tenant.as_ref(), identity.tenant.as_ref()),
            (request_facts.who.user.as_ref(), identity.user.as_ref()),
            (request_facts.who.tier.as_ref(), identity.tier.as_ref()),
        ];
        // A token is verified only where a name is taken from it.
        let asks_claims = |(given, source): &(Option<&String>, Option<&IdentitySource>)| {
            given.is_none() && matches!(source, Some(IdentitySource::Claim(_)))
        };
        let claims = if sources.iter().any(asks_claims) { claims(&lines) } else { None };
        let seen = Seen {
            trusted: peer.is_trusted(|ip| identity.address.trusts(ip)),
            headers: Some(&lines),
            host: request_facts.host(),
            path: Some(request_facts.uri.path()),
            claims: claims.as_ref(),
        };
        let find = |(given, source): (Option<&String>, Option<&IdentitySource>)| match (given, source) {
            (Some(given), _) => Ok(Some(given.clone())),
            (None, Some(source)) => found(source, &seen, request_facts.uri.path()),
            (None, None) => Ok(None),
        };
        let [tenant, user, tier] = sources.map(find);
        let (tenant, user, tier) = (tenant?, user?, tier?);
        (request_facts.who.tenant, request_facts.who.user, request_facts.who.tier) = (tenant, user, tier);
        Ok(request_facts)
    }

    /// Returns the client's address, if it is known.
    pub(super) fn ip(&self) -> Option<IpAddr> {
        self.ip
    }

    /// Returns whether the layer was given anything that could name the client's address.
    pub(super) fn has_address_source(&self) -> bool {
        self.has_address_source
    }

    /// Returns owned facts, which outlive the request.
    pub(super) fn into_owned(self) -> RequestFacts<'static> {
        let owned = |(name, value): (HeaderName, Cow<'_, HeaderValue>)| (name, Cow::Owned(value.into_owned()));
        RequestFacts {
            ip: self.ip,
            has_address_source: self.has_address_source,
            method: Cow::Owned(self.method.into_owned()),
            uri: Cow::Owned(self.uri.into_owned()),
            route: self.route.map(|route| Cow::Owned(route.into_owned())),
            host: self.host.map(|host| Cow::Owned(host.into_owned())),
            headers: self.headers.into_iter().map(owned).collect(),
            who: self.who,
            bytes: self.bytes,
            trace: self.trace,
        }
    }

    /// Calls `read` with the facts in the form that core takes.
    pub(super) fn facts<T>(&self, read: impl FnOnce(&Facts<'_>) -> T) -> T {
        let who = &self.who;
        let pairs: Vec<(&str, &str)> = who.facts.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let headers: Vec<(&str, &str)> =
            self.headers.iter().map(|(name, value)| (name.as_str(), readable(value))).collect();
        let costs: Vec<(&str, u64)> = who.costs.iter().map(|(name, cost)| (name.as_str(), *cost)).collect();
        read(&Facts {
            ip: self.ip,
            host: self.host(),
            method: Some(self.method.as_str()),
            path: Some(self.uri.path()),
            route: self.route.as_deref(),
            from_client: true,
            tenant: who.tenant.as_deref(),
            user: who.user.as_deref(),
            tier: who.tier.as_deref(),
            category: who.category.as_deref(),
            endpoint: who.endpoint.as_deref(),
            facts: &pairs,
            headers: &headers,
            cost: who.cost,
            bytes: self.bytes,
            costs: &costs,
            trace: self.trace,
        })
    }

    /// Returns the facts of a charge for further `bytes` alone.
    pub(super) fn for_bytes_alone(mut self, bytes: u64) -> Self {
        self.bytes = Some(bytes);
        // The request itself was counted when it came.
        self.who.cost = Some(0);
        self.who.costs.clear();
        // It is a charge of its own, and must not have the id of the first.
        self.trace = TraceId::default();
        self
    }

    /// Returns the host. The authority of an absolute URI, which is HTTP/2's `:authority` too, takes precedence over `Host`
    /// (RFC 9112, 3.2.2).
    fn host(&self) -> Option<&str> {
        self.uri.host().or_else(|| self.host.as_deref().map(readable))
    }
}

/// A request that is refused before any limit is checked: applications could read it in two ways, and rules would be matched
/// by only one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BadRequest {
    /// The header field.
    pub(super) field: &'static str,
    pub(super) message: &'static str,
}

/// Returns the name from a source, or an error if servers may read different names from the path.
fn found(source: &IdentitySource, seen: &Seen<'_, Lines<'_>>, path: &str) -> Result<Option<String>, BadRequest> {
    let name = source.find(seen);
    if name.is_none() && source.path_error(path) == Some(PathError::AmbiguousIdentity) {
        return Err(BadRequest { field: "path", message: "servers may read different callers from the path" });
    }
    Ok(name)
}

/// Returns the client's address for a request from `peer`.
pub(super) fn address(parts: &Parts, view: &PolicyView, peer: Peer) -> Option<IpAddr> {
    let peer = peer.address()?;
    Some(view.policy.identity().address.resolve(peer.ip(), &Lines(&parts.headers)))
}

/// Returns the route that axum's router has matched.
#[cfg(feature = "axum")]
fn route(parts: &Parts) -> Option<&str> {
    parts.extensions.get::<axum::extract::MatchedPath>().map(axum::extract::MatchedPath::as_str)
}

#[cfg(not(feature = "axum"))]
fn route(_: &Parts) -> Option<&str> {
    None
}

/// Checks that the authority of an absolute URI, or HTTP/2's `:authority`, and `Host` name one host. An application may read
/// either.
fn one_host(parts: &Parts) -> Result<(), BadRequest> {
    let bad = |message| BadRequest { field: "host", message };
    let mut lines = parts.headers.get_all(HOST).iter();
    let (only, more) = (lines.next(), lines.next());
    // Servers differ in which of two they read.
    if more.is_some() {
        return Err(bad("more than one Host field"));
    }
    match (parts.uri.host(), only) {
        // In the form that rules are matched with, so that a difference in spelling is none.
        (Some(authority), Some(host)) if normalize_host(authority) != normalize_host(readable(host)) => {
            Err(bad("the authority of the request and its Host field differ"))
        }
        _ => Ok(()),
    }
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Returns the value of a field as text; an empty text if it is not UTF-8.
fn readable(value: &HeaderValue) -> &str {
    std::str::from_utf8(value.as_bytes()).unwrap_or_default()
}

/// Adapts a header map to core's trait.
pub(super) struct Lines<'r>(&'r HeaderMap);

impl Headers for Lines<'_> {
    fn lines<'a>(&'a self, name: &'a str) -> impl DoubleEndedIterator<Item = &'a [u8]> {
        self.0.get_all(name).iter().map(HeaderValue::as_bytes)
    }
}
