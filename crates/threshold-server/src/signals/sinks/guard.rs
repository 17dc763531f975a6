//! Guards webhooks against server-side request forgery: a URL must not lead into the operator's own network.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::Uri;
use ureq::Error;
use ureq::config::Config;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

/// Which addresses webhooks may connect to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Public ones.
    Public,
    /// All, with `--allow-private-webhooks`.
    Private,
}

impl Reach {
    fn allows(self, address: IpAddr) -> bool {
        self == Self::Private || is_public(address)
    }
}

/// Resolves names, and returns only addresses that may be connected to.
///
/// The check comes after the name is resolved, and the connection goes to the address that was checked. So neither a spelling of an
/// address nor a name that is resolved differently the next time (DNS rebinding) leads around it.
#[derive(Debug)]
pub(super) struct GuardedResolver<R> {
    pub(super) resolver: R,
    pub(super) reach: Reach,
}

impl<R: Resolver> Resolver for GuardedResolver<R> {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let mut allowed = self.empty();
        for address in &self.resolver.resolve(uri, config, timeout)? {
            if self.reach.allows(address.ip()) {
                allowed.push(*address);
            }
        }
        if allowed.is_empty() { Err(Error::Other(Box::new(PrivateAddress))) } else { Ok(allowed) }
    }
}

/// The error of a name that has no public address.
#[derive(Debug)]
pub(super) struct PrivateAddress;

impl std::error::Error for PrivateAddress {}

impl fmt::Display for PrivateAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the host has no public address (--allow-private-webhooks allows others)")
    }
}

pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// Returns whether an address is none of those that IANA's registry of special-purpose addresses has as not globally reachable.
fn is_public_v4(address: Ipv4Addr) -> bool {
    match address.octets() {
        // This network, private, loopback; multicast, reserved and broadcast.
        [0 | 10 | 127 | 224..=255, ..] => false,
        // Shared by providers (CGNAT), where some clouds have their metadata.
        [100, 64..=127, ..] => false,
        // Link-local, with the metadata of most clouds.
        [169, 254, ..] => false,
        [172, 16..=31, ..] => false,
        // Private; protocol assignments and documentation; relays of 6to4.
        [192, 168, ..] | [192, 0, 0 | 2, _] | [192, 88, 99, _] => false,
        // Benchmarks and documentation.
        [198, 18 | 19, ..] | [198, 51, 100, _] | [203, 0, 113, _] => false,
        _ => true,
    }
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let v4 = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match address.segments() {
        // An IPv4 address in another spelling: mapped, by NAT64, by 6to4.
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            v4(high, low)
        }
        // Protocol assignments with Teredo, and documentation.
        [0x2001, 0..=0x1ff | 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => false,
        // Global unicast, 2000::/3. All else is loopback, unspecified, link-local, local, multicast or not assigned.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by leaving out any one line of the tables.
    #[test]
    fn addresses_that_lead_inside_are_not_public() {
        let inside = "0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 100.127.255.255 127.0.0.1 127.255.0.1 \
            169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.8 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.19.255.255 \
            198.51.100.7 203.0.113.7 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 \
            :: ::1 ::7f00:1 ::ffff:7f00:1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe \
            64:ff9b:1::1 100::1 2001::1 2001:1ff::1 2001:db8::1 2002:7f00:1:: 2002:a00:1::1 3fff::1 4000::1 5f00::1 fc00::1 fd00::1 fe80::1 \
            fec0::1 ff02::1";
        for text in inside.split_whitespace() {
            assert!(!is_public(text.parse().unwrap()), "{text}");
            assert!(!Reach::Public.allows(text.parse().unwrap()) && Reach::Private.allows(text.parse().unwrap()));
        }
        let outside = "1.1.1.1 9.255.255.255 11.0.0.1 100.63.255.255 100.128.0.1 126.255.255.255 128.0.0.1 169.253.0.1 169.255.0.1 \
            172.15.0.1 172.32.0.1 192.0.1.1 192.167.0.1 192.169.0.1 198.17.0.1 198.20.0.1 223.255.255.255 2606:4700::1111 \
            2001:200::1 2001:4860:4860::8888 2400::1 3ffe::1 ::ffff:1.1.1.1 64:ff9b::101:101 2002:101:101::1";
        for text in outside.split_whitespace() {
            assert!(is_public(text.parse().unwrap()), "{text}");
        }
    }
}
