//! How much each address asked for in its busiest window, for each target: the most exact a limit can be rehearsed.

use std::hash::Hasher as _;
use std::net::IpAddr;

use siphasher::sip::SipHasher13;

use super::endpoints::{Target, endpoint_of, is_write};
use crate::replay::Sample;
use crate::traffic::Request;

/// Addresses whose windows are counted one by one; with more, a sample of them stands for all.
const MAX_ADDRESSES: usize = 1 << 17;

/// One address' windows of one target.
#[derive(Debug, Clone, Copy, Default)]
struct Windows {
    /// The number of the window that is counted now, since the epoch.
    window: u64,
    count: u64,
    busiest: u64,
}

/// What addresses asked for.
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
        let Some(own) = self.addresses.entry(digest(ip), || vec![Windows::default(); many]) else { return };
        let endpoint = endpoint_of(request);
        let second = request.at.micros.checked_div(1_000_000).unwrap_or(0);
        for (target, windows) in targets.iter().zip(own) {
            let concerned = match (target, &endpoint) {
                (Target::Minute | Target::Hour, _) => true,
                (Target::Writes, Some((method, _))) => is_write(method),
                (Target::Endpoint { method, pattern }, Some((own, path))) => method == own && pattern == path,
                (Target::Writes | Target::Endpoint { .. }, None) => false,
            };
            if concerned {
                windows.add(second.checked_div(target.window()).unwrap_or(0));
            }
        }
    }

    /// How many addresses there are.
    pub(super) fn addresses(&self) -> u64 {
        self.addresses.count(|_| true)
    }

    pub(super) fn is_exact(&self) -> bool {
        self.addresses.is_exact()
    }

    /// How many addresses stand behind each that was counted.
    pub(super) fn factor(&self) -> u64 {
        self.addresses.factor()
    }

    /// What each address asked for in its busiest window of a target, in ascending order; who never did is not there.
    pub(super) fn busiest(&self, target: usize) -> Vec<u64> {
        let own = self.addresses.values().filter_map(|windows| windows.get(target));
        let mut busiest: Vec<u64> = own.map(|windows| windows.busiest).filter(|count| *count > 0).collect();
        busiest.sort_unstable();
        busiest
    }

    /// How many addresses would go over any of these limits.
    pub(super) fn touched(&self, limits: &[(usize, u64)]) -> u64 {
        self.addresses.count(|windows| {
            limits.iter().any(|(target, limit)| windows.get(*target).is_some_and(|own| own.busiest > *limit))
        })
    }
}

impl Windows {
    fn add(&mut self, window: u64) {
        if self.window != window {
            self.window = window;
            self.count = 0;
        }
        self.count = self.count.saturating_add(1);
        self.busiest = self.busiest.max(self.count);
    }
}

/// The address as a policy groups it unless it says otherwise: IPv6 by /64.
fn digest(ip: IpAddr) -> u64 {
    let mut hasher = SipHasher13::new();
    match ip.to_canonical() {
        IpAddr::V4(v4) => hasher.write_u32(v4.to_bits()),
        IpAddr::V6(v6) => hasher.write_u128(v6.to_bits() >> 64),
    }
    hasher.finish()
}
