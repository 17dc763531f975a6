//! How many connections each peer has open, so that one of them cannot take all there are.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::log::Samples;

/// The connections of each peer, counted. Those who have none are not kept, so this is bounded by the connections.
#[derive(Debug)]
pub(super) struct Peers {
    most: usize,
    open: Mutex<HashMap<IpAddr, usize>>,
    /// Which refusals become a line of the log.
    pub(super) refusals: Samples,
}

/// Whether a peer may have as many connections as it likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exempt {
    Yes,
    No,
}

/// One connection's place among those of its peer, which it gives back when it ends.
#[derive(Debug)]
pub(super) struct PeerPlace {
    peers: Arc<Peers>,
    group: IpAddr,
}

impl Peers {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, open: Mutex::default(), refusals: Samples::default() })
    }

    /// The most connections of a peer that is not exempt.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// A place for one more connection; none if this peer has as many as it may. Those of exempt peers are counted too: a
    /// peer may stop being exempt while they are open.
    pub(super) fn admit(self: &Arc<Self>, ip: IpAddr, exempt: Exempt) -> Option<PeerPlace> {
        let group = group(ip);
        let mut open = self.lock();
        let own = open.entry(group).or_insert(0);
        if *own >= self.most && exempt == Exempt::No {
            return None;
        }
        *own = own.saturating_add(1);
        drop(open);
        Some(PeerPlace { peers: Arc::clone(self), group })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PeerPlace {
    fn drop(&mut self) {
        let mut open = self.peers.lock();
        if let Some(own) = open.get_mut(&self.group) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                open.remove(&self.group);
            }
        }
    }
}

/// Whose connection it is: an IPv4 address, or the /64 that one IPv6 client has at least.
fn group(ip: IpAddr) -> IpAddr {
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

    /// Woken by: leaving out `Drop for PeerPlace`, its `open.remove`, the mask in `group`, and `exempt` in `admit`.
    #[test]
    fn a_peer_has_as_many_as_it_may_and_gives_back_what_it_had() {
        let peers = Peers::new(2);
        let mut places = Vec::new();
        for (text, expect) in [
            ("192.0.2.1", [true, true, false]),
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
        // One that is exempt is counted all the same, for when it no longer is.
        let exempt = peers.admit(ip("192.0.2.1"), Exempt::Yes).unwrap();
        drop(places);
        let another = peers.admit(ip("192.0.2.1"), Exempt::No).unwrap();
        assert!(peers.admit(ip("192.0.2.1"), Exempt::No).is_none());
        drop((exempt, another));
        assert!(peers.lock().is_empty());
    }
}
