//! Policies: rules and everything they refer to, compiled from a file or from code.

mod bans;
mod body;
mod builder;
mod change;
mod check;
mod codes;
mod counted;
mod envoy;
#[cfg(feature = "toml")]
mod expand;
mod file;
mod finding;
#[cfg(feature = "files")]
mod from_file;
mod identity;
mod lists;
mod load;
mod pattern;
mod place;
mod reviewer;
mod rule;
mod settings;
mod shared_map;
mod subject_error;
mod tiers;
mod token;
mod users;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::address::Headers;
use crate::key::{Anchors, DigestKey};
use crate::ladder::Ladder;
use crate::lockout::{Login, canonical_account};
use crate::time::{Span, Timestamp};

pub use bans::{Ban, BanSource, Banned, Bans, TooBroad, Who};
pub use body::BodyTemplate;
pub(crate) use body::BodyValues;
pub use builder::{
    CategoryBuilder, IdentityBuilder, JwtBuilder, LadderBuilder, LimitText, LoginBuilder, PeriodText, PolicyBuilder,
    RuleBuilder,
};
pub use change::Forgotten;
pub use codes::{CODES, Code, Place};
pub(crate) use counted::{CountedBy, Identities, Known, REMEMBERED};
pub use envoy::{DescriptorTarget, EnvoyDomain, EnvoySettings};
pub use finding::{Finding, Location, PolicyError, Severity};
#[cfg(feature = "files")]
pub use from_file::PolicyFileError;
pub use identity::{CLIENT_HEADERS, Identity, IdentitySource, Jwt, Seen};
pub use lists::{ListEntry, Listed, Lists, Rank};
pub(crate) use load::rules::Shape;
pub(crate) use pattern::Kind;
pub use pattern::Pattern;
pub(crate) use place::LoginPlaces;
pub use place::{Placed, RecordPlace};
pub use rule::{
    Consistency, CostOf, Disclosure, Layer, LogMode, Match, Mismatch, Mode, OnMissing, OnStoreError, Per, Rule,
    StatusSet,
};
pub(crate) use rule::{Measure, Measured, Shards, SubjectRule};
pub use settings::{MAX_TIMES, Owner, Setting, SettingError};
pub use subject_error::SubjectError;
pub(crate) use tiers::{NoLimit, Source as TierSource, TiersInForce};
pub use token::{Claims, MAX_TOKEN, TokenError, TokenVerifier};
pub(crate) use users::ScopedName;
pub use users::UserScope;
pub use work::ReviewWork;

/// The maximum number of rules in a policy.
pub const MAX_RULES: usize = 1_000;
/// The maximum size of a policy file, in bytes.
pub const MAX_FILE: usize = 4 << 20;

/// Rate limits for a service: whom they count, how much they allow, and how violations are answered.
///
/// A policy comes from a TOML file ([`Policy::parse`], with the feature `toml`) or from code ([`Policy::builder`]). It is immutable
/// but for [settings](Setting) of single tenants and users, and cheap to clone: clones share everything the file says.
#[derive(Debug, Clone)]
pub struct Policy {
    /// The codes of silenced warnings that belong to no rule, each with its reason.
    allow: Arc<[(Box<str>, Box<str>)]>,
    pub(crate) rules: Arc<[Rule]>,
    pub(crate) categories: Arc<[Category]>,
    pub(crate) tiers: TiersInForce,
    pub(crate) subjects: Arc<[SubjectRule]>,
    /// The distinct identities that rules and subjects are counted by.
    pub(crate) counted: Arc<[CountedBy]>,
    /// The indexes of those that are digested first, so that their memory can be prefetched.
    pub(crate) early: Arc<[usize]>,
    pub(crate) ladders: Arc<[Ladder]>,
    identity: Arc<Identity>,
    lists: Arc<Lists>,
    /// Whether the lists have entries.
    any_listed: bool,
    login: Option<Arc<Login>>,
    pub(crate) login_places: Arc<LoginPlaces>,
    alerts: Arc<Alerts>,
    memory: Memory,
    envoy: Arc<EnvoySettings>,
    /// The body of every answer that refuses a request, unless a rule has its own.
    pub(crate) envelope: Option<Arc<BodyTemplate>>,
    /// The bans that are looked up for every request.
    bans: Option<Arc<dyn BanSource>>,
    /// The verifier of bearer tokens, if the host has one.
    tokens: Option<Arc<dyn TokenVerifier>>,
    pub(crate) key: DigestKey,
    /// Derives the partitions of identities under that key.
    pub(crate) anchors: Anchors,
    pub(crate) generation: u64,
}

/// A policy with all findings about it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Review {
    /// The policy; `None` if there are errors.
    pub policy: Option<Policy>,
    /// Errors and warnings, in the order of the file.
    pub findings: Vec<Finding>,
    /// The name of each rule, and its span in the file.
    pub rule_names: Vec<(Box<str>, std::ops::Range<usize>)>,
    /// The span of `key_file` or `key` of `[identity.jwt]`, for findings of hosts that read the key.
    pub key_span: Option<std::ops::Range<usize>>,
}

impl Policy {
    /// Begins a policy in code: the same rules as in a policy file, without TOML.
    ///
    /// ```
    /// use threshold_core::Policy;
    /// use threshold_core::policy::{Per, Rule};
    ///
    /// let policy = Policy::builder()
    ///     .rule(Rule::builder("address").per([Per::Ip]).limit("100/min burst 20"))
    ///     .rule(Rule::builder("posts").per([Per::User]).method("POST").path("/api/posts").limit("10/h"))
    ///     .build()?;
    /// # assert_eq!(policy.rules().len(), 2);
    /// # Ok::<(), threshold_core::PolicyError>(())
    /// ```
    pub fn builder() -> PolicyBuilder {
        PolicyBuilder::default()
    }

    /// Reads the text of a policy file. `variable` looks up the variables that the file names as `${NAME}`.
    ///
    /// A file without variables is read by [`str::parse`] too.
    ///
    /// # Errors
    /// If the policy cannot be used; the error has every finding. Warnings are dropped; [`review`](Self::review) has them.
    #[cfg(feature = "toml")]
    pub fn parse(source: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, PolicyError> {
        let Review { policy, findings, .. } = Self::review(source, variable);
        policy.ok_or_else(|| PolicyError::of_file(findings, finding::UNNAMED, source))
    }

    /// Reads a policy file and returns everything that is wrong or doubtful about it.
    #[cfg(feature = "toml")]
    #[must_use]
    pub fn review(source: &str, variable: &dyn Fn(&str) -> Option<String>) -> Review {
        load::review(source, variable, ReviewWork::default())
    }

    /// Reviews a draft that anyone may have written, with so much work. If that does not suffice, the last finding says so, and there is no
    /// policy.
    #[cfg(feature = "toml")]
    #[must_use]
    pub fn review_draft(source: &str, variable: &dyn Fn(&str) -> Option<String>, work: ReviewWork<'_>) -> Review {
        load::review(source, variable, work)
    }

    /// Sets the secret that keys are digested under. The default is a public constant: sufficient for tests and replays, but it
    /// lets attackers choose keys that collide in a store.
    #[must_use]
    pub fn with_key(self, key: DigestKey) -> Self {
        // Every rule is digested again under another key, which costs more than the comparison.
        if self.key == key { self } else { self.digested_with(key) }
    }

    fn digested_with(mut self, key: DigestKey) -> Self {
        self.key = key;
        self.anchors = Anchors::new(key);
        let mut counted = Vec::new();
        let mut place = |own| CountedBy::find_or_add(&mut counted, own);
        let scope = self.identity.user_scope;
        for subject in Arc::make_mut(&mut self.subjects) {
            subject.digest_with(key);
            subject.counted = place(CountedBy::new(subject.per.clone(), false, subject.floors, scope, key));
        }
        for rule in Arc::make_mut(&mut self.rules) {
            rule.digest_with(key);
            // A limit by tier has a budget for each category.
            let category = rule.is_limited_by_category() && !rule.per.contains(&Per::Category);
            let floors = rule.on_missing == OnMissing::Floor;
            let counted = CountedBy::new(rule.per.clone(), category, floors, scope, key);
            // A fallback depends on what other rules match, so its identity may not be needed at all.
            rule.common = rule.matches.is_everything() && !rule.fallback;
            rule.counted = place(counted.common(rule.common));
        }
        // Only places that are cached: an early digest that is not remembered would be computed twice.
        let early = counted.iter().enumerate().take(REMEMBERED).filter(|(_, counted)| counted.is_early());
        self.early = early.map(|(place, _)| place).collect();
        self.counted = counted.into();
        self
    }

    /// Sets where bans are looked up, which come and go while the policy is in force.
    #[must_use]
    pub fn with_bans(mut self, bans: Arc<dyn BanSource>) -> Self {
        self.bans = Some(bans);
        self
    }

    /// Sets the verifier of bearer tokens for `[identity.jwt]`.
    #[must_use]
    pub fn with_token_verifier(mut self, verifier: Arc<dyn TokenVerifier>) -> Self {
        self.tokens = Some(verifier);
        self
    }

    /// Returns whether the policy has an `[identity.jwt]` but no verifier. Client-facing doors do not serve such a policy.
    #[must_use]
    pub fn lacks_token_verifier(&self) -> bool {
        self.identity.jwt.is_some() && self.tokens.is_none()
    }

    /// Returns the claims of a request's bearer token, if it has one and the policy has a verifier. `now` is called only then.
    ///
    /// # Errors
    /// If the token is invalid. The request is then treated as one without claims.
    pub fn claims<H: Headers + ?Sized>(
        &self,
        headers: &H,
        now: impl FnOnce() -> Timestamp,
    ) -> Result<Option<Claims>, TokenError> {
        let Some(verifier) = &self.tokens else { return Ok(None) };
        token::bearer(headers)?.map(|token| verifier.verify(token, now())).transpose()
    }

    /// Looks a caller up in the lists and bans. An allow-list entry that is narrower than a ban overrides it.
    #[inline]
    pub(crate) fn listing<'w>(&self, who: impl FnOnce() -> Who<'w>) -> (Option<Listed>, Option<Banned>) {
        // Usually nobody is listed or banned: then the name, which may need an allocation, is not computed.
        if !self.any_listed && self.bans.as_ref().is_none_or(|bans| bans.is_empty()) {
            return (None, None);
        }
        self.listing_of(who())
    }

    #[inline(never)]
    fn listing_of(&self, who: Who<'_>) -> (Option<Listed>, Option<Banned>) {
        let listed = self.lists.find_ranked(who);
        let allowed = listed.filter(|(_, listed)| *listed == Listed::Allow).map(|(rank, _)| rank);
        let bans = self.bans.as_ref().filter(|bans| !bans.is_empty());
        // The rank of the allow entry goes along: a ban on a wider subject does not reach a caller whom a narrower
        // entry allows.
        let ban = bans.and_then(|bans| bans.find(who, allowed));
        (listed.map(|(_, listed)| listed), ban)
    }

    /// Returns the names of a tenant's denied or banned users whose canonical account name is `folded`.
    pub(crate) fn spellings(&self, tenant: Option<&str>, folded: &str) -> Vec<String> {
        let scope = self.identity.user_scope;
        // Names under tenants are stored whole, as `TENANT/USER`, so the lookup folds the whole name as well.
        let written = match scope {
            UserScope::Global => folded.to_owned(),
            UserScope::Tenant => canonical_account(&scope.write(tenant, folded)),
        };
        let mut names: Vec<Box<str>> = self.lists.spellings(&written).map(Box::from).collect();
        names.extend(self.bans.iter().flat_map(|bans| bans.spellings(&written)));
        let own = |name: &str| {
            let (of, user) = scope.read(name).ok()?;
            // The whole name was folded for the lookup; tenants are case-sensitive, and an encoded user name may fold differently.
            let same = scope == UserScope::Global || of.as_deref() == tenant && canonical_account(&user) == folded;
            same.then(|| user.into_owned())
        };
        names.iter().filter_map(|name| own(name)).collect()
    }

    /// Sets the number of this policy among those that the process has used.
    #[must_use]
    pub fn with_generation(mut self, generation: u64) -> Self {
        self.generation = generation;
        self
    }

    /// Returns the number of this policy among those that the process has used. Every decision carries it.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns whether a warning is silenced: in the rule that it is about, else at the top of the policy.
    #[must_use]
    pub fn allows(&self, code: &str, rule: Option<&str>) -> bool {
        let allow = match rule {
            Some(name) => self.rules.iter().find(|rule| rule.name.as_ref() == name).map(|rule| &*rule.allow),
            None => Some(&*self.allow),
        };
        allow.is_some_and(|allow| allow.iter().any(|(own, _)| own.as_ref() == code))
    }

    /// Returns the rules in the order in which they are evaluated: by layer, then as in the file.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Returns whether the policy has neither rules nor `[login]`, so that it limits nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.login.is_none()
    }

    /// Returns the names of the header fields that rules count by, in lower case.
    #[must_use]
    pub fn header_names(&self) -> BTreeSet<&str> {
        let parts = self.rules.iter().flat_map(|rule| &rule.per);
        let names = parts.filter_map(|per| if let Per::Header(name) = per { Some(name.as_ref()) } else { None });
        names.collect()
    }

    /// Returns whether any limit counts bytes.
    #[must_use]
    pub fn counts_bytes(&self) -> bool {
        let fixed = |rule: &Rule| matches!(&rule.measure, Measure::Fixed(Measured { cost: CostOf::Bytes, .. }));
        self.rules.iter().any(fixed) || self.tiers.counts_bytes()
    }

    /// Returns how callers are identified.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns the allow and deny lists.
    #[must_use]
    pub fn lists(&self) -> &Lists {
        &self.lists
    }

    /// Returns this policy without trusted proxies, for a host whose platform names the client's address itself: every header is then
    /// the client's.
    #[must_use]
    pub fn without_trusted_proxies(mut self) -> Self {
        Arc::make_mut(&mut self.identity).address.trusted.clear();
        self
    }

    /// Returns the login protection, if the policy has any.
    #[must_use]
    pub fn login(&self) -> Option<&Login> {
        self.login.as_deref()
    }

    /// Returns what the policy says of alerts; of others, the [usual thresholds](AlertOn::usual) are in force.
    #[must_use]
    pub fn alerts(&self) -> &Alerts {
        &self.alerts
    }

    /// Returns the thresholds of an alert that are in force; `None` if it is switched off.
    #[must_use]
    pub fn alert(&self, on: AlertOn) -> Option<Alert> {
        self.alerts.get(&on).copied().unwrap_or(Some(on.usual()))
    }

    /// Returns how much state the memory store keeps.
    #[must_use]
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Returns how Envoy's rate limit descriptors are understood.
    #[must_use]
    pub fn envoy(&self) -> &EnvoySettings {
        &self.envoy
    }

    /// Returns the key that digests and redactions are made with.
    #[must_use]
    pub fn key(&self) -> DigestKey {
        self.key
    }
}

/// Reads a policy file without an environment: every `${NAME}` needs a default.
///
/// ```
/// use threshold_core::Policy;
///
/// let policy: Policy = "[[rule]]\nname = 'address'\nper = ['ip']\nlimit = '100/min'".parse()?;
/// # assert_eq!(policy.rules().len(), 1);
/// # Ok::<(), threshold_core::PolicyError>(())
/// ```
#[cfg(feature = "toml")]
impl std::str::FromStr for Policy {
    type Err = PolicyError;

    fn from_str(source: &str) -> Result<Self, PolicyError> {
        Self::parse(source, &|_| None)
    }
}

/// Returns the JSON Schema of the policy file, for editors.
#[cfg(feature = "schema")]
#[must_use]
pub fn schema_json() -> String {
    let schema = file::policy_schema();
    let mut text = serde_json::to_string_pretty(&schema).unwrap_or_default();
    text.push('\n');
    text
}

/// A category of requests, for limits by tier.
#[derive(Debug, Clone)]
pub(crate) struct Category {
    pub(crate) name: Box<str>,
    pub(crate) matches: Match,
}

/// The alerts of a policy, by the event they count. One without thresholds is switched off.
pub type Alerts = BTreeMap<AlertOn, Option<Alert>>;

/// An event that alerts count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum AlertOn {
    /// Denials of the edge layer: `edge_blocks`.
    EdgeBlocks,
    /// Denials of the tenant layer: `tenant_blocks`.
    TenantBlocks,
    /// Bans of users: `user_bans`.
    UserBans,
    /// Denials of any one address: `ip_blocks`.
    IpBlocks,
}

/// Two thresholds for a count over a period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alert {
    /// The period.
    pub per: Span,
    /// The count that raises a warning.
    pub warning: u64,
    /// The count that raises a critical alert.
    pub critical: u64,
}

/// How much state the memory store keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// The maximum number of keys.
    pub max_keys: u64,
    /// How to treat new keys when the table is full and no key may be evicted.
    pub when_full: WhenFull,
}

impl Default for Memory {
    fn default() -> Self {
        Self { max_keys: 1_000_000, when_full: WhenFull::Fold }
    }
}

/// How to treat new keys when the table is full and no key may be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenFull {
    /// Counts them by their address prefix.
    Fold,
    /// Counts them in one shared budget.
    Shared,
    /// Denies them.
    Deny,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_lists_the_headers_it_counts_by() {
        let check = |text: &str, names: &[&str], bytes: bool| {
            let policy = Policy::parse(text, &|_| None).unwrap();
            assert_eq!(policy.header_names().into_iter().collect::<Vec<_>>(), names, "{text}");
            assert_eq!(policy.counts_bytes(), bytes, "{text}");
        };
        let rule = |name: &str, per: &str, limit: &str| {
            format!("[[rule]]\nname = \"{name}\"\nper = [\"{per}\"]\nlimit = \"{limit}\"\n")
        };
        check(&rule("a", "ip", "5/h"), &[], false);
        check(&rule("a", "header:X-Key", "5MB/h"), &["x-key"], true);
        let twice = rule("a", "header:b", "5/h") + &rule("b", "header:a", "5/h") + &rule("c", "header:b", "1/s");
        check(&twice, &["a", "b"], false);
        let tiers = "[identity]\ndefault_tier = \"t\"\n[tiers.t]\nrequests = \"5MB/h\"\n";
        check(&(tiers.to_owned() + &rule("a", "ip", "tier")), &[], true);
    }
}
