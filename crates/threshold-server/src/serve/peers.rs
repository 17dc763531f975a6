//! Counts the open connections of each peer, and its requests on those of HTTP/2, so that one peer cannot use all of them.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::http2::RequestsInProgress;
use crate::log::LogSampler;

/// The connections of each peer. Peers without one are removed, so the size is bounded by the connections.
#[derive(Debug)]
pub(super) struct PeerConnections {
    max: usize,
    max_requests: usize,
    open: Mutex<HashMap<IpAddr, Peer>>,
    /// Samples the refused connections.
    pub(super) refusals: LogSampler,
}

#[derive(Debug)]
struct Peer {
    connections: usize,
    requests: Arc<RequestsInProgress>,
}

/// Whether a peer may have any number of connections and requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exempt {
    Yes,
    No,
}

/// One counted connection. Dropping it releases the count.
#[derive(Debug)]
pub(super) struct PeerSlot {
    peers: Arc<PeerConnections>,
    group: IpAddr,
    /// The requests of the peer, unless it is exempt.
    pub(super) requests: Option<Arc<RequestsInProgress>>,
}

impl PeerConnections {
    pub(super) fn new(max: usize, max_requests: usize) -> Arc<Self> {
        Arc::new(Self { max, max_requests, open: Mutex::default(), refusals: LogSampler::default() })
    }

    /// Returns the most connections of a peer that is not exempt.
    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Counts one more connection; `None` if the peer has too many. Connections of exempt peers are counted too, because a
    /// reload may end the exemption while they are open.
    pub(super) fn admit(self: &Arc<Self>, ip: IpAddr, exempt: Exempt) -> Option<PeerSlot> {
        let group = group(ip);
        // Test and count under one lock, or two connections at once could both take the last place.
        let mut open = self.lock();
        let new = || Peer { connections: 0, requests: RequestsInProgress::new(self.max_requests) };
        let own = open.entry(group).or_insert_with(new);
        if own.connections >= self.max && exempt == Exempt::No {
            return None;
        }
        own.connections = own.connections.saturating_add(1);
        let requests = (exempt == Exempt::No).then(|| Arc::clone(&own.requests));
        drop(open);
        Some(PeerSlot { peers: Arc::clone(self), group, requests })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, Peer>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PeerSlot {
    fn drop(&mut self) {
        let mut open = self.peers.lock();
        if let Some(own) = open.get_mut(&self.group) {
            own.connections = own.connections.saturating_sub(1);
            // Without this, a client with many addresses would leave an entry for each.
            if own.connections == 0 {
                open.remove(&self.group);
            }
        }
    }
}

/// Returns the peer that an address belongs to: itself, or its /64, the smallest block that an IPv6 client gets.
pub(super) fn group(ip: IpAddr) -> IpAddr {
    // An IPv4 client of a dual-stack listener has an IPv4-mapped address. All of them are in one /64, and would share
    // one count.
    match ip.to_canonical() {
        IpAddr::V4(v4) => IpAddr::V4(v4),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Woken by: leaving out `Drop for PeerSlot`, its `open.remove`, the mask in `group`, and `exempt` in `admit`.
    #[test]
    fn the_connections_of_a_peer_are_bounded_and_released_when_they_end() {
        let peers = PeerConnections::new(2, 1);
        let mut places = Vec::new();
        for (text, expect) in [
            ("192.0.2.1", [true, true, false]),
            // The same client as the line before, whose places are used up.
            ("::ffff:192.0.2.1", [false, false, false]),
            ("192.0.2.2", [true, true, false]),
            ("2001:db8::1", [true, true, false]),
            ("2001:db8::ffff:1:2:3", [false, false, false]),
            ("2001:db8:0:1::1", [true, true, false]),
        ] {
            let admitted = expect.map(|_| {
                let place = peers.admit(ip(text), Exempt::No);
                let admitted = place.is_some();
                places.extend(place);
                admitted
            });
            assert_eq!(admitted, expect, "{text}");
        }
        // An exempt connection is counted too.
        let exempt = peers.admit(ip("192.0.2.1"), Exempt::Yes).unwrap();
        drop(places);
        let another = peers.admit(ip("192.0.2.1"), Exempt::No).unwrap();
        assert!(peers.admit(ip("192.0.2.1"), Exempt::No).is_none());
        drop((exempt, another));
        // Also no entry with a count of 0 is left behind.
        assert!(peers.lock().is_empty());
    }
}
