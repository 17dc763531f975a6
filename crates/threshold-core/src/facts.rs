//! What a door knows of one request.

use std::net::IpAddr;

use crate::key::TraceId;

/// Everything a decision may depend on, except the time and what is stored.
///
/// All of it is optional: a rule that needs what is missing says what to do (`on_missing`). Empty strings are as good
/// as missing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Facts<'a> {
    /// The client's address, as [`crate::address::ClientAddress::resolve`] found it.
    pub ip: Option<IpAddr>,
    /// The host the request is for.
    pub host: Option<&'a str>,
    /// The method, in any case.
    pub method: Option<&'a str>,
    /// The path, in any spelling.
    pub path: Option<&'a str>,
    /// The route that the application's router has found for the path, `/users/{id}`: one more reading of it.
    pub route: Option<&'a str>,
    /// Whether the path is as a client sent it, at a door that answers the client: `odd_paths` is then obeyed.
    pub from_client: bool,
    /// Whose customer this is.
    pub tenant: Option<&'a str>,
    /// Who is calling.
    pub user: Option<&'a str>,
    /// The tenant's plan.
    pub tier: Option<&'a str>,
    /// The category, where the caller knows better than the policy's `[[category]]` tables.
    pub category: Option<&'a str>,
    /// The endpoint, where the caller knows it: a router's matched route.
    pub endpoint: Option<&'a str>,
    /// The caller's own facts, by name.
    pub facts: &'a [(&'a str, &'a str)],
    /// The header fields that rules count by, by lower-case name. One that is given twice counts as missing.
    pub headers: &'a [(&'a str, &'a str)],
    /// What the request costs in requests; 1 unless said, and 0 only looks.
    pub cost: Option<u64>,
    /// What it costs in bytes.
    pub bytes: Option<u64>,
    /// What it costs in named units.
    pub costs: &'a [(&'a str, u64)],
    /// The id of the decision.
    pub trace: TraceId,
}

impl<'a> Facts<'a> {
    pub(crate) fn fact(&self, name: &str) -> Option<&'a str> {
        lookup(self.facts, name)
    }

    pub(crate) fn header(&self, name: &str) -> Option<&'a str> {
        // Two lines mean that somebody wrote one and a proxy added its own: which is whose, nobody knows.
        let mut others = self.headers.iter().filter(|(own, _)| *own == name).skip(1);
        if others.next().is_some() { None } else { lookup(self.headers, name) }
    }

    pub(crate) fn named_cost(&self, name: &str) -> u64 {
        self.costs.iter().find(|(own, _)| *own == name).map_or(0, |(_, cost)| *cost)
    }
}

fn lookup<'a>(pairs: &[(&'a str, &'a str)], name: &str) -> Option<&'a str> {
    let value = pairs.iter().find(|(own, _)| *own == name).map(|(_, value)| *value);
    value.filter(|value| !value.is_empty())
}
