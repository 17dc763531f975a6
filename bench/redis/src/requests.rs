//! The requests that every contender decides, in the same order.

use std::net::{IpAddr, Ipv4Addr};

/// The number of requests before the first one comes again.
const REQUESTS: usize = 16_384;
/// The number of tenants of spread traffic, and of users of each tenant.
const TENANTS: usize = 1_000;
const USERS: usize = 10;

/// What a door knows of a request.
pub struct Request {
    /// The client's address, one for each user.
    pub ip: IpAddr,
    /// The tenant. Contenders with one limit count by it.
    pub tenant: String,
    /// The user.
    pub user: String,
    /// Whether the tenant's limit is full after its first request.
    pub is_denied: bool,
}

/// Which tenants send requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// A thousand tenants of ten users each, drawn evenly.
    Spread,
    /// One tenant of ten thousand users; where half is denied, another one that is denied.
    OneTenant,
}

/// Returns requests in the order in which they are sent. Of those that are denied, every tenant's first one is allowed.
pub fn requests(traffic: Traffic, half_denied: bool) -> Vec<Request> {
    // Deterministic, so that every round sends the same.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let draw = |index: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let user = usize::try_from(state >> 33).unwrap_or(0) % (TENANTS * USERS);
        let is_denied = half_denied && index % 2 == 1;
        let kind = if is_denied { "denied" } else { "allowed" };
        let tenant = match traffic {
            Traffic::Spread => format!("{kind}-{:06}", user / USERS),
            Traffic::OneTenant => format!("{kind}-hot"),
        };
        let address = 0x0a00_0000 | u32::try_from(user).unwrap_or(0) | if is_denied { 0x0080_0000 } else { 0 };
        Request { ip: Ipv4Addr::from_bits(address).into(), tenant, user: format!("user-{user:06}"), is_denied }
    };
    (0..REQUESTS).map(draw).collect()
}
