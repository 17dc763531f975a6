//! A block of addresses in CIDR notation.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net};

/// A block of addresses: `203.0.113.0/24`, or a single address.
///
/// The bits behind the prefix are zero, and a block of IPv4-mapped IPv6 addresses is that IPv4 block, so that equal blocks are
/// equal values.
///
/// ```
/// use threshold_core::address::Network;
///
/// let network: Network = "203.0.113.7/24".parse()?;
/// assert_eq!(network.to_string(), "203.0.113.0/24");
/// assert!(network.contains([203, 0, 113, 200].into()));
/// # Ok::<(), threshold_core::address::NetworkError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Network(IpNet);

impl Network {
    /// Returns the block of the addresses that share the first `prefix` bits of `ip`, or `None` if the address has fewer bits.
    #[must_use]
    pub fn new(ip: IpAddr, prefix: u8) -> Option<Self> {
        IpNet::new(ip, prefix).ok().map(Self::canonical)
    }

    fn canonical(net: IpNet) -> Self {
        let net = net.trunc();
        let v4 = match (net.addr().to_canonical(), net.prefix_len().checked_sub(96)) {
            // A mapped block with a prefix below 96 also holds IPv6 addresses, so it stays an IPv6 block.
            (IpAddr::V4(v4), Some(prefix)) if matches!(net, IpNet::V6(_)) => Ipv4Net::new(v4, prefix).ok(),
            _ => None,
        };
        Self(v4.map_or(net, |v4| IpNet::V4(v4.trunc())))
    }

    /// Returns the first address of the block.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.0.addr()
    }

    /// Returns the number of bits that all addresses of the block share.
    #[must_use]
    pub fn prefix_len(&self) -> u8 {
        self.0.prefix_len()
    }

    /// Returns whether the block is a single address.
    #[must_use]
    pub fn is_single(&self) -> bool {
        self.0.prefix_len() == self.0.max_prefix_len()
    }

    /// Returns whether the block contains an address.
    #[must_use]
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.0.contains(&ip)
    }

    /// Returns whether the blocks have an address in common.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.0.contains(&other.0) || other.0.contains(&self.0)
    }

    pub(crate) const fn net(self) -> IpNet {
        self.0
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A single address is a block of one.
impl From<IpAddr> for Network {
    fn from(ip: IpAddr) -> Self {
        Self::canonical(IpNet::from(ip))
    }
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let net = text.parse::<IpNet>().ok().or_else(|| Some(IpNet::from(text.parse::<IpAddr>().ok()?)));
        net.map(Self::canonical).ok_or(NetworkError(()))
    }
}

/// Text that is neither an address nor a block in CIDR notation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetworkError(());

impl fmt::Display for NetworkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not an address or a block in CIDR notation")
    }
}

impl std::error::Error for NetworkError {}
