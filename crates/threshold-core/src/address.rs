//! The client's address, behind trusted proxies.
//!
//! A forwarding header is a claim of the peer that sent it. It is believed only from a peer in `trusted`, and only as far as the
//! chain of trusted proxies reaches: each proxy appends the address it received the request from, so a list is walked from
//! the right, and the first address that is not a trusted proxy is the client. Everything further left was written by the
//! client itself and may be forged.

mod forwarded;
mod network;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use crate::key::AddressGroup;
pub use network::{Network, NetworkError};

/// The largest number of hops of a forwarding header that are read. No real chain of proxies is longer.
const MAX_HOPS: usize = 32;

/// The source of the client's address, behind a trusted peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AddressSource {
    /// The peer's own address.
    Peer,
    /// `X-Forwarded-For`, from the right, past trusted proxies.
    XForwardedFor,
    /// `Forwarded` (RFC 7239), from the right, past trusted proxies.
    Forwarded,
    /// A header with a single address, by its lower-case name, such as `cf-connecting-ip`. The proxy must overwrite it: what the
    /// client sent under that name would be believed.
    Header(Box<str>),
}

/// The header field lines of a request, in the order in which they came.
pub trait Headers {
    /// Returns every line of the field with this lower-case name. Lines are bytes and need not be UTF-8: an invalid byte spoils
    /// the hop that it is in, and no other one.
    fn lines<'a>(&'a self, name: &'a str) -> impl DoubleEndedIterator<Item = &'a [u8]>;
}

impl Headers for [(&str, &str)] {
    fn lines<'a>(&'a self, name: &'a str) -> impl DoubleEndedIterator<Item = &'a [u8]> {
        self.iter().filter(move |(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_bytes())
    }
}

impl Headers for [(&str, &[u8])] {
    fn lines<'a>(&'a self, name: &'a str) -> impl DoubleEndedIterator<Item = &'a [u8]> {
        self.iter().filter(move |(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| *value)
    }
}

/// Returns the canonical form of an address: an IPv4-mapped IPv6 address becomes the IPv4 address. Otherwise a client had two
/// budgets, one for each notation.
#[must_use]
pub fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// Parses an address as forwarding headers write it: bare or in brackets, with or without a port.
///
/// Returns `None` for anything else: zone ids, octal octets, names, blanks inside.
#[must_use]
pub fn parse_address(text: &str) -> Option<IpAddr> {
    // The common case, without the checks below.
    if let Ok(v4) = text.parse::<Ipv4Addr>() {
        return Some(v4.into());
    }
    let text = text.trim();
    if let Some(rest) = text.strip_prefix('[') {
        let (address, port) = rest.split_once(']')?;
        // Text that is not exactly an address is refused, as `[::1]80` is.
        let port_is_plain = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
        return port_is_plain.then(|| address.parse::<Ipv6Addr>().ok()).flatten().map(|v6| canonical(v6.into()));
    }
    let address = match text.split_once(':') {
        // One colon: IPv4 and a port. More: an IPv6 address, which has no port outside brackets.
        Some((address, port)) if !port.contains(':') => is_port(port).then_some(address)?,
        _ => text,
    };
    address.parse().ok().map(canonical)
}

/// Parses bytes as [`parse_address`] parses text.
fn address_in(bytes: &[u8]) -> Option<IpAddr> {
    std::str::from_utf8(bytes).ok().and_then(parse_address)
}

/// Returns whether an element of a list is empty. Recipients ignore empty elements (RFC 9110, 5.6.1).
fn is_blank(element: &[u8]) -> bool {
    element.iter().all(|byte| matches!(byte, b' ' | b'\t'))
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.len() <= 5 && text.bytes().all(|byte| byte.is_ascii_digit())
}

impl AddressGroup {
    /// Returns the addresses that share a budget with this one: only itself in IPv4, its `ipv6_prefix` in IPv6, where one client
    /// has a whole network.
    #[must_use]
    pub fn of(address: IpAddr, ipv6_prefix: u8) -> Self {
        // Made canonical before it is masked: a /56 over `::ffff:0:0/96` puts all IPv4 clients into one group (CVE-2026-30827).
        match canonical(address) {
            v4 @ IpAddr::V4(_) => Self::masked(v4, 32),
            v6 @ IpAddr::V6(_) => Self::masked(v6, ipv6_prefix),
        }
    }

    /// Returns the group of `ip/N`. A prefix up to 32 groups IPv4 and leaves IPv6 at `ipv6_prefix`; a longer one groups IPv6 and
    /// leaves IPv4 addresses alone. A rule that is meant for one family then never lumps together much of the other.
    #[must_use]
    pub fn wider(address: IpAddr, prefix: u8, ipv6_prefix: u8) -> Self {
        match canonical(address) {
            v4 @ IpAddr::V4(_) => Self::masked(v4, prefix.min(32)),
            v6 @ IpAddr::V6(_) if prefix > 32 => Self::masked(v6, prefix),
            v6 @ IpAddr::V6(_) => Self::masked(v6, ipv6_prefix),
        }
    }

    /// Returns the /24 of an IPv4 address or the /48 of an IPv6 address: the usual size of one network.
    #[must_use]
    pub fn block(address: IpAddr) -> Self {
        match canonical(address) {
            v4 @ IpAddr::V4(_) => Self::masked(v4, 24),
            v6 @ IpAddr::V6(_) => Self::masked(v6, 48),
        }
    }

    fn masked(address: IpAddr, prefix: u8) -> Self {
        let cut = |whole: u8| u32::from(whole.saturating_sub(prefix));
        match address {
            IpAddr::V4(v4) => {
                // A prefix of 0 would shift by the whole width, which is no valid shift. Then no bit is kept.
                let mask = u32::MAX.checked_shl(cut(32)).unwrap_or(0);
                Self { base: Ipv4Addr::from_bits(v4.to_bits() & mask).into(), prefix: prefix.min(32) }
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(cut(128)).unwrap_or(0);
                Self { base: Ipv6Addr::from_bits(v6.to_bits() & mask).into(), prefix: prefix.min(128) }
            }
        }
    }
}

/// The trusted proxies, and the headers in which they pass the client's address on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientAddress {
    /// The networks of the proxies whose forwarding headers are believed.
    pub trusted: Vec<Network>,
    /// Tried in order. The peer's own address is the last resort.
    pub sources: Vec<AddressSource>,
}

impl Default for ClientAddress {
    fn default() -> Self {
        Self { trusted: Vec::new(), sources: vec![AddressSource::Peer] }
    }
}

impl ClientAddress {
    /// Returns whether this peer's forwarding headers are believed: address, host, scheme and identities alike.
    #[must_use]
    pub fn trusts(&self, peer: IpAddr) -> bool {
        // A dual-stack socket reports IPv4 peers as IPv4-mapped addresses, which are in no IPv4 network.
        let peer = canonical(peer);
        self.trusted.iter().any(|net| net.contains(peer))
    }

    /// Returns the client's address. A peer that is not trusted is the client, whatever its headers claim.
    pub fn resolve<H: Headers + ?Sized>(&self, peer: IpAddr, headers: &H) -> IpAddr {
        let peer = canonical(peer);
        // Before any header is read: a client that connects directly can write anything into them.
        if !self.trusts(peer) {
            return peer;
        }
        self.sources.iter().find_map(|source| self.find(source, peer, headers)).unwrap_or(peer)
    }

    /// Returns the address from one source; `None` where the request has no such header, and the next source is tried.
    fn find<H: Headers + ?Sized>(&self, source: &AddressSource, peer: IpAddr, headers: &H) -> Option<IpAddr> {
        match source {
            AddressSource::Peer => Some(peer),
            AddressSource::XForwardedFor => {
                // Several lines are one list, so the last element of the last line is the nearest hop.
                let lines = headers.lines("x-forwarded-for").rev();
                let elements = lines.flat_map(|line| line.rsplit(|byte| *byte == b','));
                self.walk(peer, elements.filter(|element| !is_blank(element)).map(address_in))
            }
            AddressSource::Forwarded => self.walk(peer, headers.lines("forwarded").rev().flat_map(forwarded::hops)),
            AddressSource::Header(name) => {
                let mut lines = headers.lines(name);
                let only = lines.next()?;
                match lines.next() {
                    None if is_blank(only) => None,
                    // No other source is tried: a client that spoils this header could choose its address in that one.
                    None => Some(address_in(only).unwrap_or(peer)),
                    // The proxy appended instead of overwriting, and one of them is the client's own.
                    Some(_) => Some(peer),
                }
            }
        }
    }

    /// Walks from the nearest hop outwards, past trusted proxies, to the first address that is not one. A hop that cannot be
    /// parsed ends the walk at the last trusted proxy, because what lies beyond it may be forged. Returns `None` without hops.
    fn walk(&self, peer: IpAddr, hops: impl Iterator<Item = Option<IpAddr>>) -> Option<IpAddr> {
        // Bounded, because a header of 8 KiB can hold a thousand hops and a client writes most of them.
        let mut hops = hops.take(MAX_HOPS).peekable();
        hops.peek()?;
        // `last` is always a trusted proxy: where the chain breaks, that one answers for whatever it let through.
        let mut last = peer;
        for hop in hops {
            match hop {
                None => return Some(last),
                Some(hop) if self.trusts(hop) => last = hop,
                Some(client) => return Some(client),
            }
        }
        // Trusted proxies only, as for a health check: the outermost one made the request.
        Some(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// What clients write in order to be read wrongly.
    const SENT: &[u8] = b"\",;\\=for1. x\xff:[]_";

    fn client(source: AddressSource) -> ClientAddress {
        let trusted = ["10.0.0.0/8", "127.0.0.1/32", "2001:db8:ffff::/48"];
        ClientAddress { trusted: trusted.map(|net| net.parse().unwrap()).to_vec(), sources: vec![source] }
    }

    #[track_caller]
    fn check(source: AddressSource, peer: &str, headers: &[(&str, &str)], expect: &str) {
        assert_eq!(client(source).resolve(address(peer), headers), address(expect), "{headers:?}");
    }

    #[track_caller]
    fn check_bytes(source: AddressSource, lines: &[&[u8]], expect: &str) {
        let name = if source == AddressSource::Forwarded { "forwarded" } else { "x-forwarded-for" };
        let headers: Vec<(&str, &[u8])> = lines.iter().map(|line| (name, *line)).collect();
        assert_eq!(client(source).resolve(address("127.0.0.1"), &headers[..]), address(expect), "{headers:?}");
    }

    #[test]
    fn an_untrusted_peer_is_the_client_whatever_it_says() {
        let headers = [("x-forwarded-for", "1.1.1.1"), ("forwarded", "for=1.1.1.1"), ("cf-connecting-ip", "1.1.1.1")];
        check(AddressSource::XForwardedFor, "203.0.113.7", &headers, "203.0.113.7");
        check(AddressSource::Forwarded, "203.0.113.7", &headers, "203.0.113.7");
        check(AddressSource::Header("cf-connecting-ip".into()), "203.0.113.7", &headers, "203.0.113.7");
    }

    #[test]
    fn x_forwarded_for_is_walked_from_the_right() {
        let walk = |lines: &[&str], expect: &str| {
            let headers: Vec<(&str, &str)> = lines.iter().map(|line| ("X-Forwarded-For", *line)).collect();
            check(AddressSource::XForwardedFor, "127.0.0.1", &headers, expect);
        };
        walk(&["1.1.1.1, 203.0.113.7"], "203.0.113.7");
        // A scan from the left would stop at the trusted hop that was injected (cpp-httplib#2503).
        walk(&["6.6.6.6, 10.0.0.1, 203.0.113.7"], "203.0.113.7");
        walk(&["203.0.113.7, 10.0.0.1, 10.0.0.2"], "203.0.113.7");
        // All field lines count, in order (tower_governor reads the first only).
        walk(&["6.6.6.6", "203.0.113.7, 10.0.0.1"], "203.0.113.7");
        walk(&["203.0.113.7:4711"], "203.0.113.7");
        walk(&["[2001:db8::1]:4711"], "2001:db8::1");
        walk(&["::ffff:203.0.113.7"], "203.0.113.7");
        // A hop that cannot be parsed ends the walk at the last trusted one.
        walk(&["6.6.6.6, unknown, 10.0.0.9"], "10.0.0.9");
        walk(&["6.6.6.6, 010.0.0.1"], "127.0.0.1");
        // All hops are trusted: the outermost one is the client.
        walk(&["10.0.0.3, 10.0.0.4"], "10.0.0.3");
        walk(&[], "127.0.0.1");
        walk(&[""], "127.0.0.1");
        let long = vec!["10.0.0.5"; 100].join(",");
        walk(&[&format!("6.6.6.6,{long}")], "10.0.0.5");
    }

    /// A client sent `X-Forwarded-For: \xff`, the proxy appended its address, and the proxy's own address was charged.
    #[test]
    fn an_invalid_byte_spoils_its_own_hop_only() {
        let walk = |lines: &[&[u8]], expect: &str| check_bytes(AddressSource::XForwardedFor, lines, expect);
        walk(&[b"\xff, 203.0.113.7"], "203.0.113.7");
        walk(&[b"6.6.6.6, \xff, 10.0.0.9"], "10.0.0.9");
        walk(&[b"\xff", b"203.0.113.7, 10.0.0.1"], "203.0.113.7");
        walk(&[b"203.0.113.7, 10.0.0.1", b"\xff\xfe"], "127.0.0.1");
        walk(&[b"203.0.113.7\xff"], "127.0.0.1");
        let walk = |lines: &[&[u8]], expect: &str| check_bytes(AddressSource::Forwarded, lines, expect);
        walk(&[b"for=\xff, for=203.0.113.7"], "203.0.113.7");
        walk(&[b"for=\xff;x=\", for=203.0.113.7"], "203.0.113.7");
        // Allowed in quotes (RFC 9110, obs-text).
        walk(&[b"for=203.0.113.7;host=\"caf\xe9\""], "203.0.113.7");
    }

    #[test]
    fn forwarded_is_parsed_as_in_rfc_7239() {
        let walk =
            |line: &str, expect: &str| check(AddressSource::Forwarded, "127.0.0.1", &[("forwarded", line)], expect);
        walk("for=192.0.2.60;proto=http;by=203.0.113.43", "192.0.2.60");
        walk("For=\"[2001:db8:cafe::17]:4711\"", "2001:db8:cafe::17");
        walk("fOR=\"[2001:db8:cafe::17]\"", "2001:db8:cafe::17");
        walk("for=\"192.0.2.60:4823\"", "192.0.2.60");
        walk("for=\"192.0.2.60:_id\"", "192.0.2.60");
        walk("for=\"[2001:db8::1]:_a.b-c\"", "2001:db8::1");
        walk("for=\"[::ffff:188.0.2.128]:49428\"", "188.0.2.128");
        walk("for=6.6.6.6, for=203.0.113.7, for=10.0.0.1", "203.0.113.7");
        walk("for=6.6.6.6, for=_hidden, for=10.0.0.1", "10.0.0.1");
        walk("for=6.6.6.6, for=\"_hidden\", for=10.0.0.1", "10.0.0.1");
        walk("for=6.6.6.6, for=unknown", "127.0.0.1");
        walk("for=6.6.6.6, for=\"unknown:80\"", "127.0.0.1");
        walk("for=6.6.6.6;x=\"a,b\", for=203.0.113.7;x=\"a\\\",b\"", "203.0.113.7");
        walk("by=1::1;host=myhost; proto=https ; for = 203.0.113.7 ;", "203.0.113.7");
        walk(";;for=203.0.113.7;secure", "203.0.113.7");
        // A quoted pair stands for its second character.
        walk("for=\"203\\.0.113\\.7\"", "203.0.113.7");
        walk("for=\"\\[2001:db8::1\\]:4711\"", "2001:db8::1");
        walk("for=203.0.113.7;x=\"\\\\\"", "203.0.113.7");
        // Unquoted, as some proxies write it.
        walk("for=[2001:db8:cafe::17]:4711", "2001:db8:cafe::17");
        walk("for=2001:db8::2;proto=https", "2001:db8::2");
        for unreadable in [
            "proto=https",
            "for=",
            "for=\"\"",
            "for=192.0.2.999",
            "for=\"fe80::1%eth0\"",
            "for=203.0.113.7;for=203.0.113.7",
            "for=203.0.113.7;for=6.6.6.6",
            "for=\"[2001:db8::1\"]",
            "for=\"203.0.113.7\"x",
            "for=20\"3.0.113.7\"",
            "for=1.1.1.\\1",
            "for=203.0.113.7;\"a\"=b",
        ] {
            walk(unreadable, "127.0.0.1");
        }
    }

    /// Recipients ignore empty elements of a list (RFC 9110, 5.6.1). One between two addresses ended the walk, and the proxy's
    /// own address was charged. An element that is not empty and cannot be parsed still ends it.
    #[test]
    fn empty_elements_of_a_list_are_ignored() {
        let walk = |lines: &[&str], expect: &str| {
            let lines: Vec<&[u8]> = lines.iter().map(|line| line.as_bytes()).collect();
            check_bytes(AddressSource::XForwardedFor, &lines, expect);
            // The same addresses in the other header, with the same empty elements.
            let element = |element: &str| match element.trim() {
                "" => element.to_owned(),
                address => format!("for=\"{address}\""),
            };
            let forwarded = |line: &[u8]| {
                let line = std::str::from_utf8(line).unwrap();
                line.split(',').map(element).collect::<Vec<_>>().join(",").into_bytes()
            };
            let lines: Vec<Vec<u8>> = lines.iter().map(|line| forwarded(line)).collect();
            let lines: Vec<&[u8]> = lines.iter().map(Vec::as_slice).collect();
            check_bytes(AddressSource::Forwarded, &lines, expect);
        };
        walk(&["203.0.113.7, , 10.0.0.9"], "203.0.113.7");
        walk(&["203.0.113.7,\t,, ,10.0.0.9,"], "203.0.113.7");
        walk(&[",203.0.113.7, "], "203.0.113.7");
        walk(&["203.0.113.7", "", " , ", "10.0.0.9"], "203.0.113.7");
        walk(&["203.0.113.7, 10.0.0.1", ""], "203.0.113.7");
        walk(&[&format!("203.0.113.7{}10.0.0.9", ",".repeat(100))], "203.0.113.7");
        // Only commas: there is no hop.
        for nothing in [&[""][..], &[","], &[" , ,\t"], &["", ",", ""]] {
            walk(nothing, "127.0.0.1");
        }
        // A hop that cannot be parsed ends the walk, with and without empty elements around it.
        walk(&["6.6.6.6, unknown, , 10.0.0.9"], "10.0.0.9");
        walk(&["6.6.6.6, , -, , "], "127.0.0.1");
        walk(&["6.6.6.6", ", \u{a0},"], "127.0.0.1");
        let forwarded = |lines: &[&[u8]], expect: &str| check_bytes(AddressSource::Forwarded, lines, expect);
        // An element without a `for` is not an empty one.
        forwarded(&[b"for=6.6.6.6, ;, for=10.0.0.9"], "10.0.0.9");
        forwarded(&[b"for=6.6.6.6, \"\", for=10.0.0.9"], "10.0.0.9");
        // An open quote spoils what is before it.
        forwarded(&[b"for=6.6.6.6;x=\", for=203.0.113.7, "], "203.0.113.7");
        forwarded(&[b"for=6.6.6.6", b"for=1.1.1.1;x=\", "], "127.0.0.1");
    }

    /// The next source is tried, as without the header.
    #[test]
    fn a_list_of_empty_elements_is_a_missing_header() {
        let sources = vec![AddressSource::XForwardedFor, AddressSource::Header("x-real-ip".into())];
        let both = ClientAddress { sources, ..client(AddressSource::Peer) };
        let headers = [("x-forwarded-for", " , "), ("x-real-ip", "203.0.113.9")];
        assert_eq!(both.resolve(address("10.0.0.1"), &headers[..]), address("203.0.113.9"));
    }

    /// Behind a proxy that appends to the same line, a client could choose its own address with an open quote: it swallowed
    /// what the proxy appended.
    #[test]
    fn quotes_cannot_hide_what_a_proxy_appended() {
        let walk = |line: &str, expect: &str| check_bytes(AddressSource::Forwarded, &[line.as_bytes()], expect);
        walk("for=1.1.1.1;x=\", for=203.0.113.7", "203.0.113.7");
        walk("for=1.1.1.1;x=\", for=\"[2001:db8::7]:80\"", "2001:db8::7");
        walk("for=1.1.1.1;x=\"\\, for=203.0.113.7", "203.0.113.7");
        walk("for=1.1.1.1;x=\"\\\", for=203.0.113.7", "203.0.113.7");
        walk("for=1.1.1.1;x=\", for=203.0.113.7;host=\"a\"", "203.0.113.7");
        walk("for=1.1.1.1;x=\", for=203.0.113.7;host=\"a, b\"", "203.0.113.7");
        walk("\", for=203.0.113.7", "203.0.113.7");
        // Read from the left, an escaped quote of the proxy's closes the client's open one.
        walk("for=1.1.1.1;x=\", for=203.0.113.7;host=\"q\\\"r\"", "203.0.113.7");
        // The host that a client sends and the proxy quotes stays quoted, also on a line with an open quote.
        walk("for=1.1.1.1;x=\", for=203.0.113.7;host=\"h, for=6.6.6.6;z=\"", "203.0.113.7");
        // A semicolon in quotes separates nothing.
        walk("host=\"x;for=6.6.6.6;y\";for=203.0.113.7", "203.0.113.7");
        walk("for=203.0.113.7;host=\"x;for=6.6.6.6;y\"", "203.0.113.7");
        walk("host=\"x;for=6.6.6.6;y\"", "127.0.0.1");
        // Two proxies append to one line. A banned client had the budget of the outer one, and a new one at each edge.
        walk("\", for=203.0.113.7, for=10.0.0.1", "203.0.113.7");
        walk("for=1.1.1.1, for=2.2.2.2;x=\", for=203.0.113.7, for=10.0.0.2, for=10.0.0.1", "203.0.113.7");
        walk("for=1.1.1.1;x=\"\\\", for=203.0.113.7;host=\"q\\\"r\", for=\"10.0.0.1:80\"", "203.0.113.7");
        // What is before an open quote is not believed, nor are the lines before it.
        walk("for=1.1.1.1;x=\", for=unknown, for=10.0.0.1", "10.0.0.1");
        walk("for=1.1.1.1, for=2.2.2.2;x=\", for=10.0.0.1", "10.0.0.1");
        walk("for=1.1.1.1;x=\"", "127.0.0.1");
        walk("for=\"1.1.1.1", "127.0.0.1");
        let lines = |lines: &[&[u8]], expect: &str| check_bytes(AddressSource::Forwarded, lines, expect);
        lines(&[b"for=6.6.6.6", b"for=1.1.1.1;x=\", for=10.0.0.1"], "10.0.0.1");
        lines(&[b"for=1.1.1.1;x=\"", b"for=203.0.113.7, for=10.0.0.1"], "203.0.113.7");
        lines(&[b"for=1.1.1.1;x=\"", b"for=10.0.0.1"], "10.0.0.1");
        lines(&[b"for=6.6.6.6", b"for=203.0.113.7", b"for=10.0.0.1"], "203.0.113.7");
    }

    #[test]
    fn a_single_value_header_is_one_line_with_one_address() {
        let source = || AddressSource::Header("cf-connecting-ip".into());
        check(source(), "10.0.0.1", &[("cf-connecting-ip", "203.0.113.7")], "203.0.113.7");
        let twice = [("cf-connecting-ip", "6.6.6.6"), ("cf-connecting-ip", "203.0.113.7")];
        check(source(), "10.0.0.1", &twice, "10.0.0.1");
        check(source(), "10.0.0.1", &[("cf-connecting-ip", "6.6.6.6, 203.0.113.7")], "10.0.0.1");
        check(source(), "10.0.0.1", &[("cf_connecting_ip", "6.6.6.6")], "10.0.0.1");
        let both =
            ClientAddress { sources: vec![source(), AddressSource::XForwardedFor], ..client(AddressSource::Peer) };
        let resolve = |headers: &[(&str, &str)]| both.resolve(address("10.0.0.1"), headers);
        let list = ("x-forwarded-for", "203.0.113.9");
        for missing in [&[list][..], &[list, ("cf-connecting-ip", " ")]] {
            assert_eq!(resolve(missing), address("203.0.113.9"));
        }
        // Behind a proxy that adds a second line in place of overwriting the first, a client chose its address in the other header.
        for spoiled in [&[list, twice[0], twice[1]][..], &[list, ("cf-connecting-ip", "unknown")]] {
            assert_eq!(resolve(spoiled), address("10.0.0.1"));
        }
    }

    /// A zone means something on its own machine alone: `fe80::1` on two of a proxy's links is two clients.
    ///
    /// Woken by dropping what follows `%`, and by going on behind what cannot be read.
    #[test]
    fn an_address_with_a_zone_ends_the_walk_at_the_hop_that_wrote_it() {
        let list = |line, expect| check(AddressSource::XForwardedFor, "10.0.0.1", &[("x-forwarded-for", line)], expect);
        list("fe80::1%eth0", "10.0.0.1");
        list("203.0.113.7, [fe80::1%25eth0]:80, 10.0.0.2", "10.0.0.2");
        // What a client writes itself is left of its own address.
        list("fe80::1%eth0, 203.0.113.7", "203.0.113.7");
    }

    #[test]
    fn every_notation_of_an_address_is_the_same_address_or_refused() {
        let check = |text: &str, expect: Option<&str>| assert_eq!(parse_address(text), expect.map(address), "{text}");
        for text in ["1.2.3.4", "::ffff:1.2.3.4", "::ffff:102:304", "::FFFF:1.2.3.4", " 1.2.3.4 ", "1.2.3.4:5678"] {
            check(text, Some("1.2.3.4"));
        }
        check("2001:db8:1234:5678::1.2.3.4", Some("2001:db8:1234:5678::102:304"));
        check("::1", Some("::1"));
        check("::", Some("::"));
        check("[::1]:80", Some("::1"));
        for text in [
            "fe80::1%eth0",
            "010.0.0.1",
            "1.2.3",
            "1.2.3.4.",
            "1.2.3.4:",
            "1.2.3.4:x",
            "[::1",
            "[::1]80",
            "[1.2.3.4]:80",
            "unknown",
            "",
            "1.2.3.4 5",
            "1.2.3.4:123456",
        ] {
            check(text, None);
        }
    }

    #[test]
    fn groups_follow_the_bits_of_an_address() {
        let of = |text: &str, prefix| AddressGroup::of(address(text), prefix).to_string();
        for text in ["::ffff:1.2.3.4", "1.2.3.4"] {
            assert_eq!(of(text, 56), "1.2.3.4");
        }
        assert_eq!(of("2001:db8:1234:5678::1.2.3.4", 56), "2001:db8:1234:5600::/56");
        assert_eq!(of("64:ff9b::1.2.3.4", 56), "64:ff9b::/56");
        assert_eq!(of("::1", 128), "::1");
        let wider = |text: &str, prefix| AddressGroup::wider(address(text), prefix, 64).to_string();
        assert_eq!(wider("2001:db8:1:2::3", 48), "2001:db8:1::/48");
        assert_eq!(wider("203.0.113.7", 48), "203.0.113.7");
        assert_eq!(wider("203.0.113.7", 24), "203.0.113.0/24");
        assert_eq!(wider("2001:db8:1:2::3", 24), "2001:db8:1:2::/64");
    }

    proptest! {
        /// Fails if an address is masked before it is made canonical: a /56 over `::ffff:0:0/96` put all IPv4 clients into one
        /// group (CVE-2026-30827).
        #[test]
        fn each_ipv4_client_has_its_own_group(a: [u8; 4], b: [u8; 4], prefix in 1u8..=128) {
            let plain = |octets: [u8; 4]| AddressGroup::of(IpAddr::from(octets), prefix);
            let mapped = |octets: [u8; 4]| AddressGroup::of(Ipv4Addr::from(octets).to_ipv6_mapped().into(), prefix);
            prop_assert_eq!(plain(a), mapped(a));
            prop_assert_eq!(a == b, mapped(a) == plain(b));
        }

        /// Whatever a client sends, the element that the proxy appends counts. Fails if the line is split from the left, or if a
        /// `;` in quotes separates.
        #[test]
        fn what_a_proxy_appends_is_what_counts(
            sent in proptest::collection::vec(prop::sample::select(&b"\",;\\=for1. x\xff"[..]), 0..24),
            host in proptest::collection::vec(prop::sample::select(&b"\",;\\=for1. x\xff"[..]), 0..12),
        ) {
            let escaped = host.iter().flat_map(|byte| [b'\\', *byte]);
            let appended = b", for=203.0.113.7;host=\"".iter().copied().chain(escaped).chain(*b"\"");
            let line: Vec<u8> = sent.into_iter().chain(appended).collect();
            let found = client(AddressSource::Forwarded).resolve(address("127.0.0.1"), &[("forwarded", &line[..])][..]);
            prop_assert_eq!(found, address("203.0.113.7"));
        }

        /// Each proxy appends the address that it was asked from, to the last line or on one of its own. The outermost may not know
        /// it, and then it answers for its client.
        ///
        /// Woken by: ending the walk at an element before which a quote is open, and by skipping a hop that cannot be parsed.
        #[test]
        fn a_client_behind_trusted_proxies_is_found_whatever_it_sends(
            sent in proptest::collection::vec(prop::collection::vec(prop::sample::select(SENT), 0..24), 0..3),
            host in proptest::collection::vec(prop::sample::select(SENT), 0..8),
            notation in 0usize..6,
            on_own_line in proptest::collection::vec(any::<bool>(), 1..5),
            is_list in any::<bool>(),
        ) {
            let known = [("203.0.113.7", "203.0.113.7"), ("203.0.113.7:4711", "203.0.113.7"), ("[2001:db8::7]:80", "2001:db8::7")];
            let hidden = if is_list { ["unknown", "_hidden", "\"203.0.113.7\""] } else { ["unknown", "_hidden:80", "[2001:db8::7"] };
            let outer = if on_own_line.len() > 1 { "10.0.0.1" } else { "127.0.0.1" };
            let all: Vec<(&str, &str)> = known.into_iter().chain(hidden.map(|node| (node, outer))).collect();
            let (client_node, expect) = all[notation];
            let escaped: Vec<u8> = host.iter().flat_map(|byte| [b'\\', *byte]).collect();
            let mut lines: Vec<Vec<u8>> = sent;
            for (place, own_line) in on_own_line.into_iter().enumerate() {
                let proxy = format!("10.0.0.{place}");
                let node = if place == 0 { client_node } else { &proxy };
                let element = if is_list {
                    node.as_bytes().to_vec()
                } else {
                    [b"proto=https;host=\"", &escaped[..], b"\";For=\"", node.as_bytes(), b"\""].concat()
                };
                match lines.last_mut().filter(|_| !own_line) {
                    Some(line) => line.extend([b", ", &element[..]].concat()),
                    None => lines.push(element),
                }
            }
            let (source, name) =
                if is_list { (AddressSource::XForwardedFor, "x-forwarded-for") } else { (AddressSource::Forwarded, "forwarded") };
            let headers: Vec<(&str, &[u8])> = lines.iter().map(|line| (name, &line[..])).collect();
            prop_assert_eq!(client(source).resolve(address("127.0.0.1"), &headers[..]), address(expect));
        }

        #[test]
        fn no_text_panics(text: String, line: String) {
            let _ = parse_address(&text);
            let headers = [("x-forwarded-for", text.as_str()), ("forwarded", line.as_str())];
            let _ = client(AddressSource::XForwardedFor).resolve(address("127.0.0.1"), &headers[..]);
            let _ = client(AddressSource::Forwarded).resolve(address("127.0.0.1"), &headers[..]);
        }
    }
}
