//! The charges of one request: which rules it meets, whose budgets they are, and what they cost.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

use arrayvec::ArrayVec;

use crate::address::AddressGroup;
use crate::facts::Facts;
use crate::key::{Digest, Domain, KeyBuilder, Part, TraceId};
use crate::ladder::Ladder;
use crate::limit::{Limit, Unit};
use crate::path::{spell_host, spell_method, spell_path};
use crate::policy::{CostOf, Layer, Listed, Measure, Mismatch, Mode, OnMissing, Per, Policy, Rule, SubjectRule, TierSource};

/// The most charges of one plan.
pub const MAX_CHARGES: usize = 16;
/// The most subjects of one plan.
pub const MAX_SUBJECTS: usize = 4;
/// The category of a request that no `[[category]]` matches.
const DEFAULT_CATEGORY: &str = "requests";

/// What is to be settled for one request: distinct keys, inline, nothing on the heap.
#[derive(Debug)]
#[must_use = "a plan decides nothing until it is settled"]
pub struct Plan<'p> {
    pub(crate) policy: &'p Policy,
    pub(crate) verb: Verb,
    pub(crate) listed: Option<Listed>,
    pub(crate) charges: ArrayVec<Charge<'p>, MAX_CHARGES>,
    pub(crate) subjects: ArrayVec<Subject<'p>, MAX_SUBJECTS>,
    pub(crate) trace: TraceId,
    /// Whether the door sees responses: rules that count by outcome are then charged now and given back if the
    /// outcome is not theirs.
    pub(crate) outcomes_seen: bool,
}

/// What is done with a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Decide and charge.
    Check,
    /// Say what `Check` would answer; change nothing.
    Peek,
    /// Charge after the fact; never denies.
    Record,
}

/// One cost on one key under one limit.
#[derive(Debug, Clone, Copy)]
pub struct Charge<'p> {
    pub(crate) key: Digest,
    pub(crate) limit: &'p Limit,
    pub(crate) cost: u64,
    pub(crate) rule: &'p Rule,
    /// The rule's place in the policy.
    pub(crate) index: usize,
    /// The subject in the plan that a violation strikes.
    pub(crate) subject: Option<usize>,
}

impl Charge<'_> {
    /// Whose budget.
    #[must_use]
    pub fn key(&self) -> Digest {
        self.key
    }

    /// Under which limit.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        self.limit
    }

    /// How much.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Of which rule.
    #[must_use]
    pub fn rule(&self) -> &Rule {
        self.rule
    }

    pub(crate) fn enforced(&self) -> bool {
        self.rule.mode == Mode::Enforce
    }
}

/// Who is punished for going over.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'p> {
    pub(crate) key: Digest,
    pub(crate) ladder: &'p Ladder,
    pub(crate) layer: Layer,
}

impl Subject<'_> {
    /// Whose standing.
    #[must_use]
    pub fn key(&self) -> Digest {
        self.key
    }
}

/// Why a request cannot be planned: the caller's mistake, never a reason to try again later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanError {
    /// The cost is more than the limit holds at all.
    CostExceedsLimit {
        /// The rule.
        rule: Box<str>,
        /// The cost that was asked.
        cost: u64,
        /// The most that can fit.
        capacity: u64,
        /// What is counted.
        cost_of: CostOf,
    },
    /// A rule needs an identity, and not even an address is there.
    Missing {
        /// The rule.
        rule: Box<str>,
        /// The field that would do.
        field: String,
    },
    /// More rules are met than a plan holds.
    TooManyRules,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CostExceedsLimit { rule, cost, capacity, .. } => {
                write!(f, "a cost of {cost} never fits rule \"{rule}\", which holds {capacity}")
            }
            Self::Missing { rule, field } => write!(f, "rule \"{rule}\" needs {field}, or an ip to stand in for it"),
            Self::TooManyRules => write!(f, "the request meets more than {MAX_CHARGES} rules"),
        }
    }
}

impl std::error::Error for PlanError {}

/// A request as rules see it: one spelling for everything.
#[derive(Debug)]
pub(crate) struct Caller<'a> {
    pub(crate) facts: &'a Facts<'a>,
    pub(crate) ip: Option<IpAddr>,
    pub(crate) method: Option<Cow<'a, str>>,
    pub(crate) path: Option<Cow<'a, str>>,
    pub(crate) host: Option<Cow<'a, str>>,
    pub(crate) tenant: Option<&'a str>,
    pub(crate) user: Option<&'a str>,
    pub(crate) tier: Option<&'a str>,
    pub(crate) category: &'a str,
}

impl<'a> Caller<'a> {
    pub(crate) fn new(facts: &'a Facts<'a>, policy: &'a Policy) -> Self {
        let known = |value: Option<&'a str>| value.filter(|value| !value.is_empty());
        let mut caller = Self {
            facts,
            ip: facts.ip.map(|ip| ip.to_canonical()),
            method: known(facts.method).map(spell_method),
            path: known(facts.path).map(spell_path),
            host: known(facts.host).map(spell_host),
            tenant: known(facts.tenant),
            user: known(facts.user),
            tier: known(facts.tier),
            category: DEFAULT_CATEGORY,
        };
        let found = known(facts.category)
            .or_else(|| policy.categories.iter().find(|own| own.matches.holds(&caller)).map(|own| own.name.as_ref()));
        if let Some(category) = found {
            caller.category = category;
        }
        caller
    }

    /// `METHOD:/pattern`: what the caller gave, else the first pattern of this rule or of an endpoint rule that the path
    /// meets, else the path itself.
    pub(crate) fn endpoint<'e>(&'e self, rule: &'e Rule, policy: &'e Policy) -> Option<(Option<&'e str>, &'e str)> {
        if let Some(given) = self.facts.endpoint.filter(|given| !given.is_empty()) {
            return Some((None, given));
        }
        let path = self.path.as_deref()?;
        let own = std::iter::once(rule);
        let endpoints = policy.rules.iter().filter(|other| other.layer == Layer::Endpoint);
        let pattern = own
            .chain(endpoints)
            .flat_map(|rule| &rule.matches.path)
            .find(|pattern| pattern.matches(path))
            .map_or(path, |pattern| pattern.as_str());
        Some((Some(self.method.as_deref().unwrap_or("*")), pattern))
    }

    /// One part of a key, as text for people; `None` if the request does not have it.
    pub(crate) fn part_text(&self, per: &Per, rule: &Rule, policy: &Policy) -> Option<String> {
        let prefix = policy.identity().ipv6_prefix;
        match per {
            Per::Ip => self.ip.map(|ip| AddressGroup::of(ip, prefix).to_string()),
            Per::IpPrefix(wide) => self.ip.map(|ip| AddressGroup::wider(ip, *wide, prefix).to_string()),
            Per::Tenant => self.tenant.map(|name| shown(policy, policy.identity().secret_tenant, name)),
            Per::User => self.user.map(|name| shown(policy, policy.identity().secret_user, name)),
            Per::Tier => self.tier_or_default(policy).map(str::to_owned),
            Per::Category => Some(self.category.to_owned()),
            Per::Endpoint => self.endpoint(rule, policy).map(|(method, path)| match method {
                Some(method) => format!("{method}:{path}"),
                None => path.to_owned(),
            }),
            Per::Method => self.method.as_deref().map(str::to_owned),
            Per::Host => self.host.as_deref().map(str::to_owned),
            Per::Header(name) => {
                let secret = matches!(name.as_ref(), "authorization" | "cookie" | "proxy-authorization");
                self.facts.header(name).map(|value| shown(policy, secret, value))
            }
            Per::Fact(name) => self.facts.fact(name).map(str::to_owned),
        }
    }

    fn tier_or_default<'t>(&'t self, policy: &'t Policy) -> Option<&'t str> {
        self.tier.or(policy.identity().default_tier.as_deref())
    }

    /// Appends one part to a key; says whether the request has it.
    fn add_part(&self, key: &mut KeyBuilder, per: &Per, rule: &Rule, policy: &Policy) -> bool {
        let prefix = policy.identity().ipv6_prefix;
        let mut text = |part: Part, value: Option<&str>| match value {
            Some(value) => {
                key.text(part, value);
                true
            }
            None => false,
        };
        match per {
            Per::Ip | Per::IpPrefix(_) => {
                let Some(ip) = self.ip else { return false };
                let group = match per {
                    Per::IpPrefix(wide) => AddressGroup::wider(ip, *wide, prefix),
                    _ => AddressGroup::of(ip, prefix),
                };
                key.address(Part::Address, group);
                true
            }
            Per::Tenant => text(Part::Tenant, self.tenant),
            Per::User => text(Part::User, self.user),
            Per::Tier => text(Part::Tier, self.tier_or_default(policy)),
            Per::Category => text(Part::Category, Some(self.category)),
            Per::Endpoint => {
                let Some((method, path)) = self.endpoint(rule, policy) else { return false };
                text(Part::Method, Some(method.unwrap_or_default()));
                text(Part::Endpoint, Some(path))
            }
            Per::Method => text(Part::Method, self.method.as_deref()),
            Per::Host => text(Part::Host, self.host.as_deref()),
            Per::Header(name) => text(Part::Header, self.facts.header(name)),
            Per::Fact(name) => text(Part::Fact, self.facts.fact(name)),
        }
    }

    /// Appends every part; what is missing is replaced by the address where that is allowed.
    fn add_parts(&self, key: &mut KeyBuilder, per: &[Per], rule: &Rule, policy: &Policy, floors: bool) -> Keyed {
        let mut keyed = Keyed::Whole;
        for per in per {
            if self.add_part(key, per, rule, policy) {
                continue;
            }
            match self.ip.filter(|_| floors) {
                Some(ip) => {
                    key.address(Part::Floor, AddressGroup::of(ip, policy.identity().ipv6_prefix));
                    keyed = Keyed::Floored;
                }
                None => return Keyed::Missing,
            }
        }
        keyed
    }
}

/// How much of a key the request could give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keyed {
    Whole,
    Floored,
    Missing,
}

fn shown(policy: &Policy, secret: bool, value: &str) -> String {
    if secret { policy.key().redact(value) } else { value.to_owned() }
}

/// Why a rule does or does not apply, for `explain`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// It applies.
    Met,
    /// One of its keys does not hold.
    NotMet(Mismatch),
    /// Another rule of its layer was met.
    NotFallback,
    /// It has no limit for this request.
    Unlimited,
    /// The request lacks what it counts by, and it says to skip.
    Skipped(String),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Met => f.write_str("met"),
            Self::NotMet(mismatch) => mismatch.fmt(f),
            Self::NotFallback => f.write_str("a fallback, and another rule of its layer is met"),
            Self::Unlimited => f.write_str("met, and unlimited"),
            Self::Skipped(field) => write!(f, "no {field} is given, and the rule skips such requests"),
        }
    }
}

/// What `explain` says of one rule, before anything is looked up.
#[derive(Debug, Clone)]
pub struct Explained<'p> {
    /// The rule.
    pub rule: &'p Rule,
    /// Its place in the policy.
    pub index: usize,
    /// Whether it applies, or why not.
    pub why: Why,
    /// Whose budget, in words: `tenant=t1,category=writes`.
    pub key: Option<String>,
    /// The limit, if it applies.
    pub limit: Option<&'p Limit>,
    /// Where a limit by tier was found: `tier seedling`, `its own`.
    pub from: Option<String>,
    /// What it would be charged.
    pub cost: u64,
}

impl Explained<'_> {
    /// The limit as a policy writes it; empty if the rule does not apply.
    #[must_use]
    pub fn notation(&self) -> String {
        let unit = if self.rule.cost == CostOf::Bytes { Unit::Bytes } else { Unit::Count };
        self.limit.map(|limit| limit.notation(unit)).unwrap_or_default()
    }
}

impl Policy {
    /// The plan of a `check`.
    ///
    /// # Errors
    /// Where the request cannot be decided as asked; see [`PlanError`].
    pub fn plan(&self, facts: &Facts<'_>) -> Result<Plan<'_>, PlanError> {
        self.plan_for(Verb::Check, facts)
    }

    /// The plan of any verb.
    ///
    /// # Errors
    /// As for [`plan`](Self::plan). A `record` takes any cost: what does not fit saturates.
    pub fn plan_for(&self, verb: Verb, facts: &Facts<'_>) -> Result<Plan<'_>, PlanError> {
        let caller = Caller::new(facts, self);
        let mut plan = Plan {
            policy: self,
            verb,
            listed: self.lists().find(caller.ip, caller.user, caller.tenant),
            charges: ArrayVec::new(),
            subjects: ArrayVec::new(),
            trace: facts.trace,
            outcomes_seen: false,
        };
        if plan.listed.is_some() {
            return Ok(plan);
        }
        let mut positions = [None; MAX_SUBJECTS];
        for (index, subject) in self.subjects.iter().enumerate() {
            if let Some(planned) = self.subject(subject, &caller)
                && let Some(position) = positions.get_mut(index)
            {
                *position = Some(plan.subjects.len());
                let _ = plan.subjects.try_push(planned);
            }
        }
        for (index, rule) in self.rules.iter().enumerate() {
            if rule.fallback || !rule.matches.holds(&caller) {
                continue;
            }
            self.add_charge(&mut plan, &positions, index, rule, &caller)?;
        }
        if self.rules.iter().any(|rule| rule.fallback) {
            self.add_fallbacks(&mut plan, &positions, &caller)?;
        }
        Ok(plan)
    }

    /// Adds the fallbacks of layers in which nothing else was met, and puts all charges back in order.
    fn add_fallbacks<'p>(
        &'p self,
        plan: &mut Plan<'p>,
        positions: &[Option<usize>; MAX_SUBJECTS],
        caller: &Caller<'_>,
    ) -> Result<(), PlanError> {
        for (index, rule) in self.rules.iter().enumerate().filter(|(_, rule)| rule.fallback) {
            if rule.matches.holds(caller) && !self.layer_is_met(rule.layer, caller) {
                self.add_charge(plan, positions, index, rule, caller)?;
            }
        }
        plan.charges.sort_unstable_by_key(|charge| charge.index);
        Ok(())
    }

    fn layer_is_met(&self, layer: Layer, caller: &Caller<'_>) -> bool {
        self.rules.iter().any(|rule| rule.layer == layer && !rule.fallback && rule.matches.holds(caller))
    }

    /// The limit of a rule for this caller, and where one by tier was found; `None` is unlimited.
    fn limit_of<'p>(&'p self, rule: &'p Rule, caller: &Caller<'_>) -> Option<(&'p Limit, Option<TierSource<'p>>)> {
        match &rule.measure {
            Measure::Fixed(limit) => Some((limit, None)),
            Measure::Unlimited => None,
            Measure::Tier(shape) => {
                let default = self.identity().default_tier.as_deref();
                let (limit, source) = self.tiers.limit(*shape, &rule.per, caller, default)?;
                Some((limit, Some(source)))
            }
        }
    }

    fn add_charge<'p>(
        &'p self,
        plan: &mut Plan<'p>,
        positions: &[Option<usize>; MAX_SUBJECTS],
        index: usize,
        rule: &'p Rule,
        caller: &Caller<'_>,
    ) -> Result<(), PlanError> {
        const NEVER: &Limit = &Limit::Never;
        let Some((mut limit, _)) = self.limit_of(rule, caller) else { return Ok(()) };
        let floors = rule.on_missing == OnMissing::Floor;
        let Some((key, keyed)) = self.key_of(rule, limit, caller, floors) else { return Ok(()) };
        if keyed == Keyed::Missing {
            match rule.on_missing {
                OnMissing::Skip => return Ok(()),
                OnMissing::Deny => limit = NEVER,
                OnMissing::Floor => return Err(self.missing(rule, caller)),
            }
        }
        let cost = rule.cost_of(caller.facts);
        let hopeless = cost > limit.capacity() && *limit != Limit::Never;
        if hopeless && rule.mode == Mode::Enforce && plan.verb != Verb::Record {
            return Err(PlanError::CostExceedsLimit {
                rule: rule.name.clone(),
                cost,
                capacity: limit.capacity(),
                cost_of: rule.cost.clone(),
            });
        }
        let subject = rule.subject.and_then(|subject| positions.get(subject).copied().flatten());
        let charge = Charge { key, limit, cost, rule, index, subject };
        plan.charges.try_push(charge).map_err(|_| PlanError::TooManyRules)
    }

    /// The digest of a rule's key for this caller. What a limit by tier counts, it counts in each category.
    fn key_of(&self, rule: &Rule, limit: &Limit, caller: &Caller<'_>, floors: bool) -> Option<(Digest, Keyed)> {
        let mut key = rule.prefix(limit)?;
        if rule.is_by_tier() && !rule.per.contains(&Per::Category) {
            key.text(Part::Category, caller.category);
        }
        let keyed = caller.add_parts(&mut key, &rule.per, rule, self, floors);
        Some((key.finish(), keyed))
    }

    fn missing(&self, rule: &Rule, caller: &Caller<'_>) -> PlanError {
        let absent = rule.per.iter().find(|per| caller.part_text(per, rule, self).is_none());
        PlanError::Missing { rule: rule.name.clone(), field: absent.map_or_else(|| "ip".to_owned(), field_of) }
    }

    fn subject<'p>(&'p self, subject: &'p SubjectRule, caller: &Caller<'_>) -> Option<Subject<'p>> {
        let ladder = self.ladders.get(subject.ladder)?;
        // A subject has no endpoint, so any rule will do.
        let any_rule = self.rules.first()?;
        let mut key = self.key.begin(Domain::Subject);
        key.text(Part::Identity, &subject.ladder_name);
        if caller.add_parts(&mut key, &subject.per, any_rule, self, subject.floors) == Keyed::Missing {
            return None;
        }
        Some(Subject { key: key.finish(), ladder, layer: subject.layer })
    }

    /// Which rules a request meets, by which keys, and why not the others.
    #[must_use]
    pub fn explain(&self, facts: &Facts<'_>) -> Vec<Explained<'_>> {
        let caller = Caller::new(facts, self);
        self.rules.iter().enumerate().map(|(index, rule)| self.explain_rule(index, rule, &caller)).collect()
    }

    fn explain_rule<'p>(&'p self, index: usize, rule: &'p Rule, caller: &Caller<'_>) -> Explained<'p> {
        let cost = rule.cost_of(caller.facts);
        let mut explained = Explained { rule, index, why: Why::Met, key: None, limit: None, from: None, cost };
        if let Some(mismatch) = rule.matches.mismatch(caller) {
            explained.why = Why::NotMet(mismatch);
            return explained;
        }
        if rule.fallback && self.layer_is_met(rule.layer, caller) {
            explained.why = Why::NotFallback;
            return explained;
        }
        let Some((limit, from)) = self.limit_of(rule, caller) else {
            explained.why = Why::Unlimited;
            return explained;
        };
        let missing = rule.per.iter().find(|per| caller.part_text(per, rule, self).is_none());
        if let Some(per) = missing
            && rule.on_missing == OnMissing::Skip
        {
            explained.why = Why::Skipped(field_of(per));
            return explained;
        }
        explained.limit = Some(limit);
        explained.from = from.map(|source| match source {
            TierSource::Own => "its own".to_owned(),
            TierSource::Tier(name) => format!("tier {name}"),
        });
        explained.key = Some(self.key_text(rule, caller));
        explained
    }

    /// A key in words: `user=u1`, and `user→ip=203.0.113.7` where the address stands in.
    fn key_text(&self, rule: &Rule, caller: &Caller<'_>) -> String {
        let implied = rule.is_by_tier() && !rule.per.contains(&Per::Category);
        let part = |per: &Per| {
            let floor = || caller.part_text(&Per::Ip, rule, self).map(|ip| format!("{per}→ip={ip}"));
            match caller.part_text(per, rule, self) {
                Some(value) => format!("{per}={}", escaped(&value)),
                None => floor().unwrap_or_else(|| format!("{per}=?")),
            }
        };
        let parts = rule.per.iter().chain(implied.then_some(&Per::Category)).map(part);
        let text = parts.collect::<Vec<_>>().join(",");
        if text.is_empty() { "all".to_owned() } else { text }
    }

    /// The balances and standings that belong to one subject alone, named as operators name it: by layer and key.
    ///
    /// A rule's budget belongs to the subject where the key gives everything the rule counts by; a wider or narrower
    /// budget is shared with others and stays out.
    #[must_use]
    pub fn keys_of(&self, layer: Layer, key: &str) -> Vec<Digest> {
        let mut facts = Facts::default();
        match layer {
            Layer::Global => {}
            Layer::Edge => facts.ip = crate::address::parse_address(key),
            Layer::Tenant => facts.tenant = Some(key),
            Layer::User => facts.user = Some(key),
            Layer::Endpoint => facts.endpoint = Some(key),
        }
        let mut keys = Vec::new();
        let names = self.categories.iter().map(|category| category.name.as_ref()).chain([DEFAULT_CATEGORY]);
        for category in names {
            facts.category = Some(category);
            let caller = Caller::new(&facts, self);
            for rule in self.rules.iter().filter(|rule| rule.layer == layer) {
                let Some((limit, _)) = self.limit_of(rule, &caller) else { continue };
                if let Some((digest, Keyed::Whole)) = self.key_of(rule, limit, &caller, false) {
                    keys.push(digest);
                }
            }
        }
        let caller = Caller::new(&facts, self);
        let own = self.subjects.iter().filter(|subject| subject.layer == layer && !subject.per.is_empty());
        keys.extend(own.filter_map(|subject| self.subject(subject, &caller)).map(|subject| subject.key));
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// The category that a request falls into.
    #[must_use]
    pub fn category_of(&self, facts: &Facts<'_>) -> String {
        Caller::new(facts, self).category.to_owned()
    }
}

/// Keeps the words for keys injective: what separates parts is escaped inside them.
fn escaped(value: &str) -> Cow<'_, str> {
    if !value.contains([',', '=', '%', '→']) && !value.contains(char::is_control) {
        return Cow::Borrowed(value);
    }
    let mut out = String::with_capacity(value.len());
    for c in value.chars() {
        if matches!(c, ',' | '=' | '%' | '→') || c.is_control() {
            let mut buffer = [0; 4];
            for byte in c.encode_utf8(&mut buffer).bytes() {
                out.push_str(&format!("%{byte:02x}"));
            }
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// The field of the API that gives a part of a key.
fn field_of(per: &Per) -> String {
    match per {
        Per::IpPrefix(_) => "ip".to_owned(),
        Per::Endpoint => "path".to_owned(),
        Per::Fact(name) => format!("facts.{name}"),
        other => other.to_string(),
    }
}

impl Rule {
    fn cost_of(&self, facts: &Facts<'_>) -> u64 {
        match &self.cost {
            CostOf::Requests => facts.cost.unwrap_or(1),
            CostOf::Bytes => facts.bytes.unwrap_or(0),
            CostOf::Named(name) => facts.named_cost(name),
        }
    }
}

impl<'p> Plan<'p> {
    /// The charges, in the order in which they are met.
    #[must_use]
    pub fn charges(&self) -> &[Charge<'p>] {
        &self.charges
    }

    /// The subjects whose standing counts.
    #[must_use]
    pub fn subjects(&self) -> &[Subject<'p>] {
        &self.subjects
    }

    /// What is done with this plan.
    #[must_use]
    pub fn verb(&self) -> Verb {
        self.verb
    }

    /// The same plan at a door that sees responses: rules that count by outcome are charged now, and the door gives
    /// back those whose outcome did not come.
    #[must_use]
    pub fn seeing_outcomes(mut self) -> Self {
        self.outcomes_seen = true;
        self
    }

    /// The id of the decision.
    #[must_use]
    pub fn trace(&self) -> TraceId {
        self.trace
    }
}
