//! The facts of one request that a decision depends on.

use std::net::IpAddr;

use crate::key::TraceId;

/// Everything a decision depends on, except the time and the stored state.
///
/// Every field is optional; `on_missing` of a rule decides about requests that lack a part of its `per`. An empty string counts as
/// missing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Facts<'a> {
    /// The client's address; behind a proxy, as [`ClientAddress::resolve`](crate::address::ClientAddress::resolve) returns it.
    pub ip: Option<IpAddr>,
    /// The host the request is for.
    pub host: Option<&'a str>,
    /// The method, in upper or lower case.
    pub method: Option<&'a str>,
    /// The path, not normalized.
    pub path: Option<&'a str>,
    /// The route that the application's router matched, `/users/{id}`. It counts as another reading of the path.
    pub route: Option<&'a str>,
    /// Whether the path comes from the client directly, so that `odd_paths` applies.
    pub from_client: bool,
    /// The tenant: the customer that the request belongs to.
    pub tenant: Option<&'a str>,
    /// The user.
    pub user: Option<&'a str>,
    /// The tier: the tenant's plan.
    pub tier: Option<&'a str>,
    /// The category, which takes precedence over the policy's `[[category]]` tables.
    pub category: Option<&'a str>,
    /// The endpoint, which takes precedence over the patterns of rules.
    pub endpoint: Option<&'a str>,
    /// Custom facts, by name.
    pub facts: &'a [(&'a str, &'a str)],
    /// The header fields that rules count by, by lower-case name. A field that occurs twice counts as missing.
    pub headers: &'a [(&'a str, &'a str)],
    /// The cost of the request for limits that count requests: 1 by default. A cost of 0 charges nothing.
    pub cost: Option<u64>,
    /// The cost in bytes.
    pub bytes: Option<u64>,
    /// Named costs.
    pub costs: &'a [(&'a str, u64)],
    /// The id of the decision.
    pub trace: TraceId,
}

impl<'a> Facts<'a> {
    pub(crate) fn fact(&self, name: &str) -> Option<&'a str> {
        lookup(self.facts, name)
    }

    pub(crate) fn header(&self, name: &str) -> Option<&'a str> {
        // Of two lines, one may be the client's and one the proxy's, and nothing tells them apart.
        let mut others = self.headers.iter().filter(|(own, _)| *own == name).skip(1);
        if others.next().is_some() { None } else { lookup(self.headers, name) }
    }

    pub(crate) fn named_cost(&self, name: &str) -> u64 {
        self.costs.iter().find(|(own, _)| *own == name).map_or(0, |(_, cost)| *cost)
    }
}

fn lookup<'a>(pairs: &[(&'a str, &'a str)], name: &str) -> Option<&'a str> {
    let value = pairs.iter().find(|(own, _)| *own == name).map(|(_, value)| *value);
    // Proxies send an empty field for a missing one. If it counted as a value, all such callers would share one budget
    // and skip `on_missing`.
    value.filter(|value| !value.is_empty())
}
