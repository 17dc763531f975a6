//! The number of requests of each address in its busiest window, for each target: from it follows whether a limit affects it.

use std::hash::Hasher as _;
use std::net::IpAddr;

use siphasher::sip::SipHasher13;

use super::endpoints::{Endpoint, Target, endpoint_of, is_write};
use crate::replay::Sample;
use crate::traffic::Request;

/// The most addresses that are counted exactly; with more, a sample is counted.
const MAX_ADDRESSES: usize = 1 << 17;

/// The windows of one address for one target.
#[derive(Debug, Clone, Copy, Default)]
struct Windows {
    /// The number of the present window since the epoch.
    window: u64,
    count: u64,
    busiest: u64,
}

/// The demand of all addresses.
#[derive(Debug)]
pub(super) struct Demand {
    addresses: Sample<Vec<Windows>>,
    targets: usize,
}

impl Demand {
    pub(super) fn new(targets: usize) -> Self {
        Self { addresses: Sample::new(MAX_ADDRESSES), targets }
    }

    pub(super) fn add(&mut self, request: &Request<'_>, targets: &[Target]) {
        let Some(ip) = request.ip else { return };
        let many = self.targets;
        // One lookup for all targets: the table is large, and each access is a cache miss.
        let Some(own) = self.addresses.entry(digest(ip), || vec![Windows::default(); many]) else { return };
        let endpoint = endpoint_of(request);
        let second = request.at.micros.checked_div(1_000_000).unwrap_or(0);
        for (target, windows) in targets.iter().zip(own) {
            let concerned = match (target, &endpoint) {
                // Also a request without a method or a path, which the limit on all requests counts.
                (Target::Minute | Target::Hour, _) => true,
                (Target::Static, own) => matches!(own, Some(Endpoint::Static)),
                (Target::Writes, Some(Endpoint::Of { method, .. })) => is_write(method),
                (Target::Endpoint { method, pattern }, Some(Endpoint::Of { method: own, pattern: path })) => {
                    method == own && pattern == path
                }
                (Target::Writes | Target::Endpoint { .. }, None | Some(Endpoint::Static)) => false,
            };
            if concerned {
                windows.add(second.checked_div(target.window()).unwrap_or(0));
            }
        }
    }

    /// Returns the number of addresses.
    pub(super) fn addresses(&self) -> u64 {
        self.addresses.count(|_| true)
    }

    pub(super) fn is_exact(&self) -> bool {
        self.addresses.is_exact()
    }

    /// Returns the number of addresses that each counted one stands for.
    pub(super) fn factor(&self) -> u64 {
        self.addresses.factor()
    }

    /// Returns the busiest window of each address for a target, in ascending order, without addresses that have none.
    pub(super) fn busiest(&self, target: usize) -> Vec<u64> {
        let own = self.addresses.values().filter_map(|windows| windows.get(target));
        let mut busiest: Vec<u64> = own.map(|windows| windows.busiest).filter(|count| *count > 0).collect();
        busiest.sort_unstable();
        busiest
    }

    /// Returns the number of addresses that exceed any of these limits.
    pub(super) fn touched(&self, limits: &[(usize, u64)]) -> u64 {
        self.addresses.count(|windows| {
            limits.iter().any(|(target, limit)| windows.get(*target).is_some_and(|own| own.busiest > *limit))
        })
    }
}

impl Windows {
    fn add(&mut self, window: u64) {
        // Requests come in order of time, so a window that was left does not come back, and one counter is enough.
        // Fixed windows, as the suggested rules have them.
        if self.window != window {
            self.window = window;
            self.count = 0;
        }
        self.count = self.count.saturating_add(1);
        self.busiest = self.busiest.max(self.count);
    }
}

/// Digests an address as policies group it by default: IPv6 by /64.
fn digest(ip: IpAddr) -> u64 {
    let mut hasher = SipHasher13::new();
    match ip.to_canonical() {
        IpAddr::V4(v4) => hasher.write_u32(v4.to_bits()),
        IpAddr::V6(v6) => hasher.write_u128(v6.to_bits() >> 64),
    }
    hasher.finish()
}
