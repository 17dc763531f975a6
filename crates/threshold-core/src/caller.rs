//! A request as rules see it: one spelling for everything, and the parts of its keys.

use std::net::IpAddr;

use crate::address::{AddressGroup, canonical};
use crate::facts::Facts;
use crate::key::{KeyBuilder, Part};
use crate::path::{HOST, METHOD, PATH, Spelled};
use crate::policy::{CostOf, Layer, Per, Policy, Rule};

/// The category of a request that no `[[category]]` matches.
pub(crate) const DEFAULT_CATEGORY: &str = "requests";

/// A request as rules see it: one spelling for everything.
#[derive(Debug)]
pub(crate) struct Caller<'a> {
    pub(crate) facts: &'a Facts<'a>,
    ipv6_prefix: u8,
    pub(crate) method: Spelled<'a>,
    pub(crate) path: Spelled<'a>,
    pub(crate) host: Spelled<'a>,
    pub(crate) tenant: Option<&'a str>,
    pub(crate) user: Option<&'a str>,
    pub(crate) tier: Option<&'a str>,
    pub(crate) category: &'a str,
}

impl<'a> Caller<'a> {
    pub(crate) fn new(facts: &'a Facts<'a>, policy: &'a Policy) -> Self {
        let mut caller = Self::named(facts, policy);
        caller.spell(policy);
        caller
    }

    /// Who is calling, and not yet what for: everything but what [`spell`](Self::spell) adds.
    #[inline]
    pub(crate) fn named(facts: &'a Facts<'a>, policy: &Policy) -> Self {
        Self {
            facts,
            ipv6_prefix: policy.identity().ipv6_prefix,
            method: Spelled::default(),
            path: Spelled::default(),
            host: Spelled::default(),
            tenant: known(facts.tenant),
            user: known(facts.user),
            tier: None,
            category: DEFAULT_CATEGORY,
        }
    }

    /// The address in its one form.
    pub(crate) fn ip(&self) -> Option<IpAddr> {
        self.facts.ip.map(canonical)
    }

    /// The addresses that share a budget with this one.
    #[inline]
    pub(crate) fn group(&self) -> Option<AddressGroup> {
        self.facts.ip.map(|ip| AddressGroup::of(ip, self.ipv6_prefix))
    }

    /// Adds the method, the path and the host, each in its one spelling, and the category and the tier.
    pub(crate) fn spell(&mut self, policy: &'a Policy) {
        let facts = self.facts;
        self.method.set(known(facts.method), METHOD);
        self.path.set(known(facts.path), PATH);
        self.host.set(known(facts.host), HOST);
        self.tier = known(facts.tier);
        let found = known(facts.category)
            .or_else(|| policy.categories.iter().find(|own| own.matches.holds(self)).map(|own| own.name.as_ref()));
        if let Some(category) = found {
            self.category = category;
        }
        let default = policy.identity().default_tier.as_deref();
        self.tier = policy.tiers.tier_of(self.user, self.tenant, self.tier, default);
    }

    /// `METHOD:/pattern`: what the caller gave, else the first pattern of this rule or of an endpoint rule that the path
    /// meets, else the path itself.
    #[inline(never)]
    pub(crate) fn endpoint<'e>(&'e self, rule: &'e Rule, policy: &'e Policy) -> Option<(Option<&'e str>, &'e str)> {
        if let Some(given) = self.facts.endpoint.filter(|given| !given.is_empty()) {
            return Some((None, given));
        }
        let path = self.path.get()?;
        let own = std::iter::once(rule);
        let endpoints = policy.rules.iter().filter(|other| other.layer == Layer::Endpoint);
        let pattern = own
            .chain(endpoints)
            .flat_map(|rule| &rule.matches.path)
            .find(|pattern| pattern.matches(path))
            .map_or(path, |pattern| pattern.as_str());
        Some((Some(self.method.get().unwrap_or("*")), pattern))
    }

    /// One part of a key, as text for people; `None` if the request does not have it.
    pub(crate) fn part_text(&self, per: &Per, rule: &Rule, policy: &Policy) -> Option<String> {
        match per {
            Per::Ip => self.group().map(|group| group.to_string()),
            Per::IpPrefix(wide) => self.facts.ip.map(|ip| AddressGroup::wider(ip, *wide, self.ipv6_prefix).to_string()),
            Per::Tenant => self.tenant.map(|name| shown(policy, policy.identity().secret_tenant, name)),
            Per::User => self.user.map(|name| shown(policy, policy.identity().secret_user, name)),
            Per::Tier => self.tier.map(str::to_owned),
            Per::Category => Some(self.category.to_owned()),
            Per::Endpoint => self.endpoint(rule, policy).map(|(method, path)| match method {
                Some(method) => format!("{method}:{path}"),
                None => path.to_owned(),
            }),
            Per::Method => self.method.get().map(str::to_owned),
            Per::Host => self.host.get().map(str::to_owned),
            Per::Header(name) => {
                let secret = matches!(name.as_ref(), "authorization" | "cookie" | "proxy-authorization");
                self.facts.header(name).map(|value| shown(policy, secret, value))
            }
            Per::Fact(name) => self.facts.fact(name).map(str::to_owned),
        }
    }

    /// Appends one part to a key; says whether the request has it.
    // Inlined into the loop over the parts, everything any of them needs would be loaded for each key.
    #[inline(never)]
    fn add_part(&self, key: &mut KeyBuilder, per: &Per, rule: &Rule, policy: &Policy) -> bool {
        let (part, value) = match per {
            Per::Ip => {
                let Some(group) = self.group() else { return false };
                key.address(Part::Address, group);
                return true;
            }
            Per::IpPrefix(wide) => {
                let Some(ip) = self.facts.ip else { return false };
                key.address(Part::Address, AddressGroup::wider(ip, *wide, self.ipv6_prefix));
                return true;
            }
            Per::Endpoint => {
                let Some((method, path)) = self.endpoint(rule, policy) else { return false };
                key.text(Part::Method, method.unwrap_or_default());
                (Part::Endpoint, Some(path))
            }
            Per::Tenant => (Part::Tenant, self.tenant),
            Per::User => (Part::User, self.user),
            Per::Tier => (Part::Tier, self.tier),
            Per::Category => (Part::Category, Some(self.category)),
            Per::Method => (Part::Method, self.method.get()),
            Per::Host => (Part::Host, self.host.get()),
            Per::Header(name) => (Part::Header, self.facts.header(name)),
            Per::Fact(name) => (Part::Fact, self.facts.fact(name)),
        };
        if let Some(value) = value {
            key.text(part, value);
        }
        value.is_some()
    }

    /// Appends every part; what is missing is replaced by the address where that is allowed.
    #[inline]
    pub(crate) fn add_parts(
        &self,
        key: &mut KeyBuilder,
        per: &[Per],
        rule: &Rule,
        policy: &Policy,
        floors: bool,
    ) -> Keyed {
        let mut keyed = Keyed::Whole;
        for per in per {
            if self.add_part(key, per, rule, policy) {
                continue;
            }
            match self.group().filter(|_| floors) {
                Some(group) => {
                    key.address(Part::Floor, group);
                    keyed = Keyed::Floored;
                }
                None => return Keyed::Missing,
            }
        }
        keyed
    }
}

/// An empty text says nothing.
fn known(value: Option<&str>) -> Option<&str> {
    value.filter(|value| !value.is_empty())
}

/// How much of a key the request could give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keyed {
    Whole,
    Floored,
    Missing,
}

fn shown(policy: &Policy, secret: bool, value: &str) -> String {
    if secret { policy.key().redact(value) } else { value.to_owned() }
}

impl CostOf {
    /// What a request costs, counted so.
    pub(crate) fn of(&self, facts: &Facts<'_>) -> u64 {
        match self {
            Self::Requests => facts.cost.unwrap_or(1),
            Self::Bytes => facts.bytes.unwrap_or(0),
            Self::Named(name) => facts.named_cost(name),
        }
    }
}

/// The field of the API that gives a part of a key.
pub(crate) fn field_of(per: &Per) -> String {
    match per {
        Per::IpPrefix(_) => "ip".to_owned(),
        Per::Endpoint => "path".to_owned(),
        Per::Fact(name) => format!("facts.{name}"),
        other => other.to_string(),
    }
}
