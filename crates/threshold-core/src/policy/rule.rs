//! One rule: which requests it matches, whose budget it charges, and how it answers.

use std::fmt;

use crate::bill::Terms;
use crate::caller::Caller;
use crate::headers::StaticFields;
use crate::key::{Anchors, DigestKey, Domain, KeyPrefix, Part, Partition};
use crate::ladder::{RuleTag, StrikeMode};
use crate::limit::{Algorithm, Limit, Unit};
use crate::policy::{BodyTemplate, Pattern, RecordPlace};
use crate::time::Span;

/// The layer of a rule. Limits are evaluated, and ties are broken, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    /// One budget shared by all requests.
    Global,
    /// Limits by address.
    Edge,
    /// Limits by tenant.
    Tenant,
    /// Limits by user.
    User,
    /// Limits by endpoint.
    Endpoint,
}

impl Layer {
    /// The number of layers.
    pub(crate) const COUNT: usize = 5;

    /// Returns the name as a policy writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Global => "global",
            Self::Edge => "edge",
            Self::Tenant => "tenant",
            Self::User => "user",
            Self::Endpoint => "endpoint",
        }
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Whether a rule is enforced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// Denies requests over the limit.
    #[default]
    Enforce,
    /// Only reports what it would have denied.
    Observe,
}

/// How exact a distributed store must be for a rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Consistency {
    /// Exact.
    #[default]
    Strong,
    /// Approximate.
    Eventual,
}

/// How to decide when the store fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnStoreError {
    /// Limits on this node alone, to its share.
    #[default]
    Local,
    /// Allows the request.
    Open,
    /// Denies the request.
    Closed,
}

impl OnStoreError {
    /// Returns the name, as a policy writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Open => "open",
            Self::Closed => "closed",
        }
    }
}

/// How much the answer to a denied client reveals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Disclosure {
    /// The rule, its limit, what remains, and when it resets.
    #[default]
    Full,
    /// Only when to retry.
    Minimal,
    /// Only the status.
    None,
}

/// How denials are logged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogMode {
    /// Logs a sample.
    #[default]
    Sampled,
    /// Logs every denial.
    Each,
}

/// How to treat a request that lacks a part of `per`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnMissing {
    /// Counts it by address, in a separate budget.
    #[default]
    Floor,
    /// Skips the rule.
    Skip,
    /// Denies the request.
    Deny,
}

/// The cost that a rule charges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CostOf {
    /// The number of requests: [`Facts::cost`](crate::Facts::cost), 1 by default.
    Requests,
    /// The size: [`Facts::bytes`](crate::Facts::bytes).
    Bytes,
    /// A named cost: an entry of [`Facts::costs`](crate::Facts::costs).
    Named(Box<str>),
}

impl CostOf {
    pub(crate) const fn unit(&self) -> Unit {
        match self {
            Self::Bytes => Unit::Bytes,
            Self::Requests | Self::Named(_) => Unit::Count,
        }
    }
}

/// A set of HTTP statuses, for rules that count by outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusSet(pub(crate) Vec<(u16, u16)>);

impl StatusSet {
    /// Returns whether responses with this status are counted.
    #[must_use]
    pub fn contains(&self, status: u16) -> bool {
        self.0.iter().any(|(low, high)| (*low..=*high).contains(&status))
    }
}

/// A property of requests that a budget is counted by.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Per {
    /// The client's address; for IPv6, its `ipv6_prefix`.
    Ip,
    /// A shorter prefix of the address.
    IpPrefix(u8),
    /// The tenant.
    Tenant,
    /// The user.
    User,
    /// The tier.
    Tier,
    /// The category.
    Category,
    /// The endpoint.
    Endpoint,
    /// The method.
    Method,
    /// The host.
    Host,
    /// A header field, by its lower-case name.
    Header(Box<str>),
    /// A custom fact that the application supplies.
    Fact(Box<str>),
}

impl Per {
    /// Whether this identifies the caller rather than the request.
    pub(crate) const fn is_identity(&self) -> bool {
        matches!(self, Self::Ip | Self::IpPrefix(_) | Self::Tenant | Self::User | Self::Header(_) | Self::Fact(_))
    }
}

/// Displays the part as a policy writes it.
impl fmt::Display for Per {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip => f.write_str("ip"),
            Self::IpPrefix(prefix) => write!(f, "ip/{prefix}"),
            Self::Tenant => f.write_str("tenant"),
            Self::User => f.write_str("user"),
            Self::Tier => f.write_str("tier"),
            Self::Category => f.write_str("category"),
            Self::Endpoint => f.write_str("endpoint"),
            Self::Method => f.write_str("method"),
            Self::Host => f.write_str("host"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Fact(name) => write!(f, "fact:{name}"),
        }
    }
}

/// A limit and the cost that it counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Measured {
    pub(crate) limit: Limit,
    pub(crate) cost: CostOf,
    /// The shards that the limit is split over, if it is.
    pub(crate) shards: Option<Shards>,
}

/// The shards of a limit. A request is counted by one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shards {
    pub(crate) number: u32,
    /// The share of each.
    pub(crate) limit: Limit,
}

impl Measured {
    /// The limit of a request that lacks what its rule needs: nothing fits.
    pub(crate) const NEVER: &'static Self = &Self { limit: Limit::never(), cost: CostOf::Requests, shards: None };

    /// Splits the limit over so many shards, if one object or partition could not count it.
    pub(crate) fn new(limit: Limit, cost: CostOf, shards: u32) -> Self {
        let last = u64::from(shards.saturating_sub(1));
        let share = (shards > 1 && is_hot(&limit)).then(|| limit.share(last, u64::from(shards)));
        // A burst that is smaller than the number of shards cannot be split.
        let share = share.filter(|share| !share.is_never());
        Self { limit, cost, shards: share.map(|limit| Shards { number: shards, limit }) }
    }

    /// Returns the limit that a charge is held to: the share of a shard where the limit is split.
    #[inline]
    pub(crate) fn charged(&self) -> &Limit {
        self.shards.as_ref().map_or(&self.limit, |shards| &shards.limit)
    }
}

/// Returns whether a limit admits more than 500 a second, half of what a Durable Object carries.
fn is_hot(limit: &Limit) -> bool {
    let per_second = u128::from(limit.quota()).saturating_mul(1_000_000);
    limit.is_over_time() && per_second > u128::from(limit.period().micros()).saturating_mul(500)
}

/// The limit of a rule.
#[derive(Debug, Clone)]
pub(crate) enum Measure {
    /// The same for everyone.
    Fixed(Measured),
    /// By tenant or user, tier and category. The number is the index of the rule's shape in [`Tiers`](super::tiers::Tiers).
    Tier(usize),
    /// By tenant or user and tier, under a name that does not depend on the category. The number is as for `Tier`.
    NamedByTier(usize),
    /// No limit: the rule matches and charges nothing.
    Unlimited,
}

/// A compiled rule of a [`Policy`](super::Policy): which requests it counts, by whom, up to how many, and how it answers beyond
/// that. [`Rule::builder`] begins one in code.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Rule {
    /// The name.
    pub name: Box<str>,
    /// The layer.
    pub layer: Layer,
    /// Which requests it applies to.
    pub matches: Match,
    /// What requests are counted by.
    pub per: Vec<Per>,
    pub(crate) measure: Measure,
    /// The response statuses that it counts; `None` counts every request.
    pub count: Option<StatusSet>,
    /// How long a key stays denied once it has exceeded the limit.
    pub block_for: Option<Span>,
    /// Whether it applies only if no other rule of its layer matches.
    pub fallback: bool,
    /// How to treat a request that lacks a part of `per`.
    pub on_missing: OnMissing,
    /// The index of the subject that this rule's strikes are counted for, if it has a ladder.
    pub(crate) subject: Option<usize>,
    /// Which violations count as strikes.
    pub strike: StrikeMode,
    /// Whether it is enforced.
    pub mode: Mode,
    /// How exact a distributed store must be.
    pub consistency: Consistency,
    /// Whether an approximation is accepted.
    pub approximate: bool,
    /// Where its records are stored on Cloudflare, if the policy says so.
    pub place: Option<RecordPlace>,
    /// Over how many shards its limits above 500 a second are split; 1 if they are not.
    pub shards: u32,
    /// How to decide when the store fails.
    pub on_store_error: OnStoreError,
    /// How much the answer to a denied client reveals.
    pub disclosure: Disclosure,
    /// The HTTP status of a denial.
    pub status: u16,
    /// A sentence for the body of a denial.
    pub message: Option<Box<str>>,
    /// The whole body of a denial.
    pub body: Option<BodyTemplate>,
    /// The limit in prose.
    pub period: Option<Box<str>>,
    /// How denials are logged.
    pub log: LogMode,
    /// The codes of silenced lint warnings, each with its reason.
    pub allow: Vec<(Box<str>, Box<str>)>,
    /// The part of the rule that its charges carry to the store.
    pub(crate) terms: Terms,
    /// The keys that the rule's identity is digested to: one for each algorithm, and one for `deny`.
    pub(crate) prefixes: Vec<KeyPrefix>,
    /// The partition of a budget that all requests share.
    pub(crate) partition: Partition,
    /// The index of what it is counted by in [`Policy::counted`](super::Policy).
    pub(crate) counted: usize,
    /// Whether every request matches it.
    pub(crate) common: bool,
    /// The parts of its header fields that are the same in every answer; `None` if structured fields cannot express its name
    /// or cost.
    pub(crate) static_fields: Option<StaticFields>,
}

impl Rule {
    /// Derives this rule's keys from another secret.
    pub(crate) fn digest_with(&mut self, key: DigestKey) {
        let begin = |key: DigestKey, algorithm: &str| {
            let mut builder = key.begin(Domain::Rule);
            builder.text(Part::Identity, &self.name);
            for per in &self.per {
                builder.text(Part::Identity, &per.to_string());
            }
            // The states of two algorithms mean different things, so a rule that changes its algorithm starts with new
            // keys.
            builder.text(Part::Identity, algorithm);
            builder
        };
        // `prefix` indexes by the algorithm, so the order is that of `ALL`, and `never` comes last.
        let names = Algorithm::ALL.iter().map(|algorithm| algorithm.name()).chain(["never"]);
        let per = self.per.iter().map(ToString::to_string);
        // Without the algorithm: the partition stays when that changes, and only the key is new.
        self.partition = Anchors::rule(key, [self.name.to_string()].into_iter().chain(per));
        let tells_apart = self.per.iter().any(Per::is_identity);
        // A budget that no caller anchors lives in the partition of its rule. In one common partition all such budgets
        // would load one node.
        let alone = (!tells_apart).then_some(self.partition);
        self.prefixes = names.map(|name| KeyPrefix::new(begin(key, name).derive(), alone)).collect();
        // From the rule's name and `per` alone, without a secret or an algorithm: strikes outlive a change of those.
        self.terms.tag = RuleTag::try_from(begin(DigestKey::OF_NAMES, "").finish().to_u128() >> 96).unwrap_or_default();
    }

    /// Returns the prefix that turns the digest of a caller into the key of this rule's budget.
    #[inline]
    pub(crate) fn prefix(&self, limit: &Limit) -> Option<&KeyPrefix> {
        let index = limit.algorithm().map_or(Algorithm::ALL.len(), |algorithm| algorithm as usize);
        self.prefixes.get(index)
    }

    /// Returns the limit, if it is the same for everyone; `None` if it depends on the tier, or there is none.
    #[must_use]
    pub fn fixed_limit(&self) -> Option<&Limit> {
        match &self.measure {
            Measure::Fixed(measured) => Some(&measured.limit),
            Measure::Tier(_) | Measure::NamedByTier(_) | Measure::Unlimited => None,
        }
    }

    /// Returns the limit as a policy writes it, if it is the same for everyone.
    #[must_use]
    pub fn notation(&self) -> Option<String> {
        match &self.measure {
            Measure::Fixed(measured) => Some(measured.limit.notation(measured.cost.unit())),
            Measure::Tier(_) | Measure::NamedByTier(_) | Measure::Unlimited => None,
        }
    }

    /// Returns the cost that the rule charges, if its limit is the same for everyone.
    #[must_use]
    pub fn counts(&self) -> Option<&CostOf> {
        match &self.measure {
            Measure::Fixed(measured) => Some(&measured.cost),
            Measure::Tier(_) | Measure::NamedByTier(_) | Measure::Unlimited => None,
        }
    }

    /// Returns whether the limit depends on the tier.
    #[must_use]
    pub fn is_by_tier(&self) -> bool {
        matches!(self.measure, Measure::Tier(_) | Measure::NamedByTier(_))
    }

    /// Returns whether the limit is that of the request's category, which then has a budget of its own.
    pub(crate) fn is_limited_by_category(&self) -> bool {
        matches!(self.measure, Measure::Tier(_))
    }

    /// Returns whether each category of requests has a budget of its own.
    pub(crate) fn is_by_category(&self) -> bool {
        self.is_limited_by_category() || self.per.contains(&Per::Category)
    }
}

/// The subject of penalties that rules with the same identity and ladder share.
#[derive(Debug, Clone)]
pub(crate) struct SubjectRule {
    pub(crate) per: Vec<Per>,
    pub(crate) layer: Layer,
    /// The index of the ladder in the policy.
    pub(crate) ladder: usize,
    pub(crate) ladder_name: Box<str>,
    /// Whether any of its rules counts a request without this identity by its address.
    pub(crate) floors: bool,
    /// The strictest disclosure of its rules: the answer to a penalty reveals no more than theirs.
    pub(crate) disclosure: Disclosure,
    /// The prefix that turns the digest of a caller into the key of its standing.
    pub(crate) prefix: KeyPrefix,
    /// The index of what it is counted by in [`Policy::counted`](super::Policy).
    pub(crate) counted: usize,
}

impl SubjectRule {
    /// Derives the key prefix from the names of the parts, not only their values: equal values of two facts, or one address that
    /// replaces two missing names, are different subjects.
    pub(crate) fn digest_with(&mut self, key: DigestKey) {
        let mut builder = key.begin(Domain::Subject);
        builder.text(Part::Identity, &self.ladder_name);
        for per in &self.per {
            builder.text(Part::Identity, &per.to_string());
        }
        self.prefix = KeyPrefix::new(builder.derive(), None);
    }
}

/// Which requests a rule applies to: every key must match, with any of its values. An empty list matches everything.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Match {
    /// Methods, normalized.
    pub method: Vec<Box<str>>,
    /// Path patterns.
    pub path: Vec<Pattern>,
    /// Host patterns.
    pub host: Vec<Pattern>,
    /// Categories.
    pub category: Vec<Box<str>>,
    /// Patterns of tenants' names.
    pub tenant: Vec<Pattern>,
    /// Patterns of tiers' names.
    pub tier: Vec<Pattern>,
    /// Patterns of custom facts, by name.
    pub fact: Vec<(Box<str>, Vec<Pattern>)>,
}

/// The first key of a [`Match`] that a request does not match.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mismatch {
    /// The key: `method`, `path`, …
    pub key: String,
    /// The values that the rule accepts.
    pub wanted: String,
    /// The value of the request.
    pub found: Option<String>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.found {
            Some(found) => write!(f, "{} is {found}, not {}", self.key, self.wanted),
            None => write!(f, "no {} is given, and the rule wants {}", self.key, self.wanted),
        }
    }
}

impl Match {
    /// Whether every request matches.
    pub(crate) fn is_everything(&self) -> bool {
        self.method.is_empty()
            && self.path.is_empty()
            && self.host.is_empty()
            && self.category.is_empty()
            && self.tenant.is_empty()
            && self.tier.is_empty()
            && self.fact.is_empty()
    }

    /// Whether a request matches.
    #[inline]
    pub(crate) fn holds(&self, caller: &Caller<'_>) -> bool {
        self.first_mismatch(caller).is_none()
    }

    /// Whether a request of this caller can match that has the facts that are unknown here.
    pub(crate) fn may_hold(&self, caller: &Caller<'_>) -> bool {
        let facts = self.fact.iter().filter(|(name, _)| caller.facts.fact(name).is_some());
        let known = Self {
            method: caller.method.get().map(|_| self.method.clone()).unwrap_or_default(),
            path: caller.path.get().map(|_| self.path.clone()).unwrap_or_default(),
            host: caller.host.get().map(|_| self.host.clone()).unwrap_or_default(),
            fact: facts.cloned().collect(),
            ..self.clone()
        };
        known.holds(caller)
    }

    /// Returns why a request does not match.
    pub(crate) fn mismatch(&self, caller: &Caller<'_>) -> Option<Mismatch> {
        let key = self.first_mismatch(caller)?;
        let patterns = |patterns: &[Pattern]| list(patterns.iter().map(Pattern::as_str));
        let (wanted, found) = match key {
            "method" => (list(self.method.iter().map(AsRef::as_ref)), caller.method.get()),
            "path" => (patterns(&self.path), caller.path.get()),
            "host" => (patterns(&self.host), caller.host.get()),
            "category" => (list(self.category.iter().map(AsRef::as_ref)), Some(caller.category)),
            "tenant" => (patterns(&self.tenant), caller.tenant),
            "tier" => (patterns(&self.tier), caller.tier),
            name => {
                let wanted = self.fact.iter().find(|(own, _)| own.as_ref() == name);
                let wanted = wanted.map(|(_, values)| patterns(values)).unwrap_or_default();
                return Some(Mismatch {
                    key: format!("fact.{name}"),
                    wanted,
                    found: caller.facts.fact(name).map(str::to_owned),
                });
            }
        };
        Some(Mismatch { key: key.to_owned(), wanted, found: found.map(str::to_owned) })
    }

    fn first_mismatch(&self, caller: &Caller<'_>) -> Option<&str> {
        // Most rules have few keys, so whether a key is set is tested first.
        let any = |patterns: &[Pattern], value: Option<&str>| {
            value.is_some_and(|value| patterns.iter().any(|pattern| pattern.matches(value)))
        };
        let one_of = |names: &[Box<str>], value: &str| names.iter().any(|name| name.as_ref() == value);
        if !self.method.is_empty() && !caller.method.get().is_some_and(|method| one_of(&self.method, method)) {
            Some("method")
        } else if !self.category.is_empty() && !one_of(&self.category, caller.category) {
            Some("category")
        } else if !self.path.is_empty() && !any(&self.path, caller.path.get()) {
            Some("path")
        } else if !self.host.is_empty() && !any(&self.host, caller.host.get()) {
            Some("host")
        } else if !self.tenant.is_empty() && !any(&self.tenant, caller.tenant) {
            Some("tenant")
        } else if !self.tier.is_empty() && !any(&self.tier, caller.tier) {
            Some("tier")
        } else {
            // A fact without patterns is no condition.
            let holds = |values: &[Pattern], name: &str| values.is_empty() || any(values, caller.facts.fact(name));
            let missed = self.fact.iter().find(|(name, values)| !holds(values, name));
            missed.map(|(name, _)| name.as_ref())
        }
    }
}

fn list<'a>(items: impl Iterator<Item = &'a str>) -> String {
    items.collect::<Vec<_>>().join(" or ")
}
