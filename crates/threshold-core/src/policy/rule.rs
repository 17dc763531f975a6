//! One rule: which requests it meets, whose budget it charges, and how it answers.

use std::fmt;

use crate::caller::Caller;
use crate::headers::StaticFields;
use crate::key::{Anchors, DigestKey, Domain, KeyPrefix, Part, Partition};
use crate::ladder::{RuleTag, StrikeMode};
use crate::limit::{Algorithm, Limit, Unit};
use crate::policy::Pattern;
use crate::time::Span;

/// Where a rule stands; limits are met, and ties are broken, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    /// One budget for all.
    Global,
    /// By address.
    Edge,
    /// By tenant.
    Tenant,
    /// By user.
    User,
    /// By endpoint.
    Endpoint,
}

impl Layer {
    /// How many layers there are.
    pub(crate) const COUNT: usize = 5;

    /// The name as a policy writes it.
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

/// Whether a rule binds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// It binds.
    #[default]
    Enforce,
    /// It is only watched.
    Observe,
}

/// How exact a distributed store must be for a rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Consistency {
    /// Exact.
    #[default]
    Strong,
    /// Decided locally from a part taken ahead of time.
    Leased,
    /// Approximate.
    Eventual,
}

/// What to do when the store fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnStoreError {
    /// Limit on this node alone, to its share.
    #[default]
    Local,
    /// Let through.
    Open,
    /// Refuse.
    Closed,
}

/// How much a denied client is told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Disclosure {
    /// Limit, remaining, reset, rule.
    #[default]
    Full,
    /// When to come back.
    Minimal,
    /// Nothing but the status.
    None,
}

/// How denials are logged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogMode {
    /// A sample.
    #[default]
    Sampled,
    /// Each.
    Each,
}

/// What to do without the identity a rule is counted by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnMissing {
    /// Key by the address, in a budget of its own.
    #[default]
    Floor,
    /// Leave the rule out.
    Skip,
    /// Deny.
    Deny,
}

/// What a rule charges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CostOf {
    /// `cost`, 1 unless said.
    Requests,
    /// `bytes`.
    Bytes,
    /// `costs.NAME`.
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

/// HTTP statuses, for rules that count by outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusSet(pub(crate) Vec<(u16, u16)>);

impl StatusSet {
    /// Whether a response of this status is counted.
    #[must_use]
    pub fn contains(&self, status: u16) -> bool {
        self.0.iter().any(|(low, high)| (*low..=*high).contains(&status))
    }
}

/// One thing a budget is counted by.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Per {
    /// The address, or its IPv6 prefix.
    Ip,
    /// A wider prefix of the address.
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
    /// A header, by lower-case name.
    Header(Box<str>),
    /// One of the caller's own facts.
    Fact(Box<str>),
}

impl Per {
    /// Whether this says who is calling, rather than what is asked for.
    pub(crate) const fn is_identity(&self) -> bool {
        matches!(self, Self::Ip | Self::IpPrefix(_) | Self::Tenant | Self::User | Self::Header(_) | Self::Fact(_))
    }
}

/// As a policy writes it.
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

/// A limit, and what it counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Measured {
    pub(crate) limit: Limit,
    pub(crate) cost: CostOf,
}

/// How much a rule allows.
#[derive(Debug, Clone)]
pub(crate) enum Measure {
    /// The same for everyone.
    Fixed(Measured),
    /// By tenant or user, tier and category; the number is the rule's shape in [`super::Tiers`].
    Tier(usize),
    /// No limit at all: the rule is met and charges nothing.
    Unlimited,
}

/// One limit: who it is counted by, how much, and what happens beyond it.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Its name.
    pub name: Box<str>,
    /// Where it stands.
    pub layer: Layer,
    /// Which requests it meets.
    pub matches: Match,
    /// What it is counted by.
    pub per: Vec<Per>,
    pub(crate) measure: Measure,
    /// The outcomes it counts; all requests, unless said.
    pub count: Option<StatusSet>,
    /// How long a key is denied once it has gone over.
    pub block_for: Option<Span>,
    /// Only when no other rule of its layer is met.
    pub fallback: bool,
    /// What to do without the identity it is counted by.
    pub on_missing: OnMissing,
    /// The subject whose strikes this rule adds to, if it names a ladder.
    pub(crate) subject: Option<usize>,
    /// Which violations are strikes.
    pub strike: StrikeMode,
    /// Whether it binds.
    pub mode: Mode,
    /// How exact a distributed store must be.
    pub consistency: Consistency,
    /// Whether an approximation is accepted.
    pub approximate: bool,
    /// What to do when the store fails.
    pub on_store_error: OnStoreError,
    /// How much a denied client is told.
    pub disclosure: Disclosure,
    /// The status of a denial.
    pub status: u16,
    /// A sentence for the body of a denial.
    pub message: Option<Box<str>>,
    /// The whole body of a denial.
    pub body: Option<Box<str>>,
    /// The limit in prose.
    pub period: Option<Box<str>>,
    /// How denials are logged.
    pub log: LogMode,
    /// Lint findings that are meant, with the reason.
    pub allow: Vec<(Box<str>, Box<str>)>,
    pub(crate) tag: RuleTag,
    /// The key that the rule's identity makes, one for each algorithm and one for `deny`.
    pub(crate) prefixes: Vec<KeyPrefix>,
    /// The partition of what everyone under the rule shares.
    pub(crate) partition: Partition,
    /// What it is counted by, as its place among all that the policy counts by.
    pub(crate) counted: usize,
    /// Whether every request meets it.
    pub(crate) common: bool,
    /// What clients are told of it that is the same in every answer; nothing, if its name or what it counts cannot be
    /// told in structured fields.
    pub(crate) static_fields: Option<StaticFields>,
}

impl Rule {
    /// Begins this rule's keys anew under another secret.
    pub(crate) fn digest_with(&mut self, key: DigestKey) {
        let begin = |key: DigestKey, algorithm: &str| {
            let mut builder = key.begin(Domain::Rule);
            builder.text(Part::Identity, &self.name);
            for per in &self.per {
                builder.text(Part::Identity, &per.to_string());
            }
            builder.text(Part::Identity, algorithm);
            builder
        };
        let names = Algorithm::ALL.iter().map(|algorithm| algorithm.name()).chain(["never"]);
        let per = self.per.iter().map(ToString::to_string);
        self.partition = Anchors::rule(key, [self.name.to_string()].into_iter().chain(per));
        let tells_apart = self.per.iter().any(Per::is_identity);
        let alone = (!tells_apart).then_some(self.partition);
        self.prefixes = names.map(|name| KeyPrefix::new(begin(key, name).derive(), alone)).collect();
        // The rule's name and `per` alone, under no secret: a strike outlives a change of either.
        self.tag = RuleTag::try_from(begin(DigestKey::OF_NAMES, "").finish().to_u128() >> 96).unwrap_or_default();
    }

    /// The secret that makes a budget of this rule's own out of the digest of whom it is counted by.
    #[inline]
    pub(crate) fn prefix(&self, limit: &Limit) -> Option<&KeyPrefix> {
        let index = limit.algorithm().map_or(Algorithm::ALL.len(), |algorithm| algorithm as usize);
        self.prefixes.get(index)
    }

    /// The limit everyone has under this rule; `None` if it depends on the tier, or there is none.
    #[must_use]
    pub fn fixed_limit(&self) -> Option<&Limit> {
        match &self.measure {
            Measure::Fixed(measured) => Some(&measured.limit),
            Measure::Tier(_) | Measure::Unlimited => None,
        }
    }

    /// The limit everyone has under this rule, as a policy writes it.
    #[must_use]
    pub fn notation(&self) -> Option<String> {
        match &self.measure {
            Measure::Fixed(measured) => Some(measured.limit.notation(measured.cost.unit())),
            Measure::Tier(_) | Measure::Unlimited => None,
        }
    }

    /// What the rule charges, where that is the same for everyone.
    #[must_use]
    pub fn counts(&self) -> Option<&CostOf> {
        match &self.measure {
            Measure::Fixed(measured) => Some(&measured.cost),
            Measure::Tier(_) | Measure::Unlimited => None,
        }
    }

    /// Whether the limit comes from the tier.
    #[must_use]
    pub fn is_by_tier(&self) -> bool {
        matches!(self.measure, Measure::Tier(_))
    }
}

/// A subject that rules with this `per` and ladder share.
#[derive(Debug, Clone)]
pub(crate) struct SubjectRule {
    pub(crate) per: Vec<Per>,
    pub(crate) layer: Layer,
    /// The ladder's place in the policy.
    pub(crate) ladder: usize,
    pub(crate) ladder_name: Box<str>,
    /// Whether a request without this identity is counted by its address, by any of the rules.
    pub(crate) floors: bool,
    /// The strictest of its rules': a penalty tells no more than they do.
    pub(crate) disclosure: Disclosure,
    /// The key of what it is, to be laid over the digest of whom it is.
    pub(crate) prefix: KeyPrefix,
    /// What it is counted by, as its place among all that the policy counts by.
    pub(crate) counted: usize,
}

impl SubjectRule {
    /// What it is counted by, not only its values: equal facts of two names, or two names that one address stands in for,
    /// are different subjects.
    pub(crate) fn digest_with(&mut self, key: DigestKey) {
        let mut builder = key.begin(Domain::Subject);
        builder.text(Part::Identity, &self.ladder_name);
        for per in &self.per {
            builder.text(Part::Identity, &per.to_string());
        }
        self.prefix = KeyPrefix::new(builder.derive(), None);
    }
}

/// Which requests a rule meets: every key must hold, with any of its values.
#[derive(Debug, Clone, Default)]
pub struct Match {
    /// Methods in their one spelling; empty for any.
    pub method: Vec<Box<str>>,
    /// Paths; empty for any.
    pub path: Vec<Pattern>,
    /// Hosts; empty for any.
    pub host: Vec<Pattern>,
    /// Categories; empty for any.
    pub category: Vec<Box<str>>,
    /// Tenants; empty for any.
    pub tenant: Vec<Pattern>,
    /// Tiers; empty for any.
    pub tier: Vec<Pattern>,
    /// The caller's own facts.
    pub fact: Vec<(Box<str>, Vec<Pattern>)>,
}

/// The first key of a match that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// The key: `method`, `path`, …
    pub key: String,
    /// What the rule wants.
    pub wanted: String,
    /// What the request has.
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
    /// Whether every request is met.
    pub(crate) fn is_everything(&self) -> bool {
        self.method.is_empty()
            && self.path.is_empty()
            && self.host.is_empty()
            && self.category.is_empty()
            && self.tenant.is_empty()
            && self.tier.is_empty()
            && self.fact.is_empty()
    }

    /// Whether a request is met.
    #[inline]
    pub(crate) fn holds(&self, caller: &Caller<'_>) -> bool {
        self.first_mismatch(caller).is_none()
    }

    /// Why a request is not met.
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
        // Most keys of most rules are not there: that is asked first.
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
            let holds = |values: &[Pattern], name: &str| values.is_empty() || any(values, caller.facts.fact(name));
            let missed = self.fact.iter().find(|(name, values)| !holds(values, name));
            missed.map(|(name, _)| name.as_ref())
        }
    }
}

fn list<'a>(items: impl Iterator<Item = &'a str>) -> String {
    items.collect::<Vec<_>>().join(" or ")
}
