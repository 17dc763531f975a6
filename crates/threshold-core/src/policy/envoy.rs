//! How Envoy's rate limit descriptors become facts, and what each of its domains may do.

use std::collections::BTreeMap;

use crate::plan::Verb;

/// The part of a request that an entry of a descriptor describes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DescriptorTarget {
    /// The client's address.
    Ip,
    /// The tenant.
    Tenant,
    /// The user.
    User,
    /// The tier.
    Tier,
    /// The path.
    Path,
    /// The method.
    Method,
    /// The host.
    Host,
    /// The endpoint.
    Endpoint,
    /// The category.
    Category,
    /// The fact of this name.
    Fact(Box<str>),
    /// Nothing: the entry is ignored.
    Ignore,
}

impl DescriptorTarget {
    /// The names that a policy has for targets, besides `fact:NAME`.
    pub(super) const NAMES: &'static str =
        "ip, tenant, user, tier, path, method, host, endpoint, category, fact:NAME, ignore";

    /// Returns the target that a policy names so.
    pub(super) fn named(text: &str) -> Option<Self> {
        Some(match text {
            "ip" => Self::Ip,
            "tenant" => Self::Tenant,
            "user" => Self::User,
            "tier" => Self::Tier,
            "path" => Self::Path,
            "method" => Self::Method,
            "host" => Self::Host,
            "endpoint" => Self::Endpoint,
            "category" => Self::Category,
            "ignore" => Self::Ignore,
            _ => Self::Fact(text.strip_prefix("fact:").filter(|name| !name.is_empty())?.into()),
        })
    }
}

/// The settings of one domain. The default is that of a domain which the policy does not name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EnvoyDomain {
    /// Whether requests are decided, or only recorded: Envoy does not tell which ones it sends when a stream is done.
    pub verb: Verb,
    /// Whether descriptors may give back what they do not prove to have been charged.
    pub negative_hits: bool,
    /// Whether descriptors may bring limits of their own.
    pub overrides: bool,
}

impl Default for EnvoyDomain {
    fn default() -> Self {
        Self { verb: Verb::Check, negative_hits: false, overrides: false }
    }
}

/// The section `[envoy]` of a policy.
#[derive(Debug, Clone, Default)]
pub struct EnvoySettings {
    pub(super) descriptors: BTreeMap<Box<str>, DescriptorTarget>,
    pub(super) domains: BTreeMap<Box<str>, EnvoyDomain>,
    /// Rules by their index, and those that each of them replaces.
    pub(super) replaces: Vec<(usize, Box<[usize]>)>,
}

impl EnvoySettings {
    /// The key of the entry that Envoy's action `remote_address` makes.
    pub const REMOTE_ADDRESS: &'static str = "remote_address";

    /// Returns what an entry with this key describes, unless it is a fact of that name.
    #[must_use]
    pub fn target(&self, key: &str) -> Option<&DescriptorTarget> {
        // By name, so that a policy can make a fact of them too.
        self.descriptors.get(key).or(match key {
            Self::REMOTE_ADDRESS | "masked_remote_address" => Some(&DescriptorTarget::Ip),
            _ => None,
        })
    }

    /// Whether any rule replaces others.
    pub(crate) fn replaces_any(&self) -> bool {
        !self.replaces.is_empty()
    }

    /// Returns the indices of the rules that this one replaces.
    pub(crate) fn replaced_by(&self, rule: usize) -> impl Iterator<Item = usize> {
        self.replaces.iter().filter(move |(own, _)| *own == rule).flat_map(|(_, replaced)| replaced.iter().copied())
    }

    /// Returns the settings of a domain.
    #[must_use]
    pub fn domain(&self, name: &str) -> EnvoyDomain {
        self.domains.get(name).copied().unwrap_or_default()
    }
}
