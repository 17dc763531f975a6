//! Policy, rule, match: what one policy file means, once it has been read.

mod bans;
mod change;
mod check;
mod codes;
mod counted;
mod expand;
mod file;
mod finding;
mod identity;
mod lists;
mod load;
mod pattern;
mod reviewer;
mod rule;
mod settings;
mod shared_map;
mod tiers;
mod token;
mod users;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::address::Headers;
use crate::key::{Anchors, DigestKey};
use crate::ladder::Ladder;
use crate::lockout::{Login, canonical_account};
use crate::time::{Span, Timestamp};

pub use bans::{Ban, BanSource, Banned, Bans, Who};
pub use change::Forgotten;
pub use codes::{CODES, Code, Place};
pub(crate) use counted::{CountedBy, Identities, Known, REMEMBERED};
pub use finding::{Finding, PolicyError, Severity};
pub use identity::{CLIENT_HEADERS, Identity, IdentitySource, Jwt, Seen};
pub use lists::{ListEntry, Listed, Lists, Rank};
pub(crate) use load::rules::Shape;
pub(crate) use pattern::Kind;
pub use pattern::Pattern;
pub use rule::{
    Consistency, CostOf, Disclosure, Layer, LogMode, Match, Mismatch, Mode, OnMissing, OnStoreError, Per, Rule,
    StatusSet,
};
pub(crate) use rule::{Measure, Measured, SubjectRule};
pub use settings::{MAX_TIMES, Owner, Setting, SettingError};
pub(crate) use tiers::{Source as TierSource, TiersInForce};
pub use token::{Claims, MAX_TOKEN, TokenError, TokenVerifier};
pub(crate) use users::ScopedName;
pub use users::UserScope;

/// The most rules one policy may hold.
pub const MAX_RULES: usize = 1_000;
/// The largest policy file, in bytes.
pub const MAX_FILE: usize = 4 << 20;

/// Who may cross, how often, and what happens when they do not keep to it. Copies share all that the file says.
#[derive(Debug, Clone)]
pub struct Policy {
    /// The findings of no rule that are meant, each with its reason.
    allow: Arc<[(Box<str>, Box<str>)]>,
    pub(crate) rules: Arc<[Rule]>,
    pub(crate) categories: Arc<[Category]>,
    pub(crate) tiers: TiersInForce,
    pub(crate) subjects: Arc<[SubjectRule]>,
    /// Everything that rules and subjects are counted by.
    pub(crate) counted: Arc<[CountedBy]>,
    /// Which of them are digested before anything else is done.
    pub(crate) early: Arc<[usize]>,
    pub(crate) ladders: Arc<[Ladder]>,
    identity: Arc<Identity>,
    lists: Arc<Lists>,
    /// Whether the lists hold anybody.
    any_listed: bool,
    login: Option<Arc<Login>>,
    alerts: Arc<Alerts>,
    memory: Memory,
    /// Who is banned while this policy is in force.
    bans: Option<Arc<dyn BanSource>>,
    /// What verifies tokens, where the host can.
    tokens: Option<Arc<dyn TokenVerifier>>,
    pub(crate) key: DigestKey,
    /// The partitions of identities under that key.
    pub(crate) anchors: Anchors,
    pub(crate) generation: u64,
}

/// A policy as read, with everything there is to say about it.
#[derive(Debug)]
pub struct Review {
    /// The policy, unless there are errors.
    pub policy: Option<Policy>,
    /// Errors and warnings, in the order of the file.
    pub findings: Vec<Finding>,
    /// Where each rule's name stands in the file.
    pub rule_names: Vec<(Box<str>, std::ops::Range<usize>)>,
}

impl Policy {
    /// Reads a policy. `variable` looks up `${NAME}`; core does not know of an environment.
    ///
    /// # Errors
    /// With every error found, each with its place. Warnings are left out; [`review`](Self::review) has them.
    pub fn parse(source: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, PolicyError> {
        let Review { policy, mut findings, .. } = Self::review(source, variable);
        policy.ok_or_else(|| {
            findings.retain(|finding| finding.severity == Severity::Error);
            let place = findings.first().map_or((1, 1), |first| first.place(source));
            PolicyError { findings, place }
        })
    }

    /// Reads a policy and says all that is wrong or doubtful about it.
    #[must_use]
    pub fn review(source: &str, variable: &dyn Fn(&str) -> Option<String>) -> Review {
        load::review(source, variable)
    }

    /// The same policy, with keys digested under this secret. Without it, a fixed key is used: good for rehearsals,
    /// not for a store that an attacker's keys reach.
    #[must_use]
    pub fn with_key(self, key: DigestKey) -> Self {
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
            // What a limit by tier counts, it counts in each category.
            let category = rule.is_by_tier() && !rule.per.contains(&Per::Category);
            let floors = rule.on_missing == OnMissing::Floor;
            let counted = CountedBy::new(rule.per.clone(), category, floors, scope, key);
            rule.common = rule.matches.is_everything() && !rule.fallback;
            rule.counted = place(counted.common(rule.common));
        }
        let early = counted.iter().enumerate().take(REMEMBERED).filter(|(_, counted)| counted.is_early());
        self.early = early.map(|(place, _)| place).collect();
        self.counted = counted.into();
        self
    }

    /// The same policy, together with bans that come and go while it is in force.
    #[must_use]
    pub fn with_bans(mut self, bans: Arc<dyn BanSource>) -> Self {
        self.bans = Some(bans);
        self
    }

    /// The same policy, together with what verifies the tokens of its `[identity.jwt]`.
    #[must_use]
    pub fn with_token_verifier(mut self, verifier: Arc<dyn TokenVerifier>) -> Self {
        self.tokens = Some(verifier);
        self
    }

    /// Whether it has an `[identity.jwt]` and nothing that verifies its tokens. A door that faces clients does not serve
    /// such a policy.
    #[must_use]
    pub fn lacks_token_verifier(&self) -> bool {
        self.identity.jwt.is_some() && self.tokens.is_none()
    }

    /// The claims of a request's bearer token, if it has one and the policy verifies any. `now` is asked only then.
    ///
    /// # Errors
    /// Where the token does not hold. The request then goes on without any claims.
    pub fn claims<H: Headers + ?Sized>(
        &self,
        headers: &H,
        now: impl FnOnce() -> Timestamp,
    ) -> Result<Option<Claims>, TokenError> {
        let Some(verifier) = &self.tokens else { return Ok(None) };
        token::bearer(headers)?.map(|token| verifier.verify(token, now())).transpose()
    }

    /// What the lists say of somebody, and a ban that they meet. An allowance that is narrower than a ban lifts it.
    #[inline]
    pub(crate) fn listing<'w>(&self, who: impl FnOnce() -> Who<'w>) -> (Option<Listed>, Option<Banned>) {
        // Mostly nobody is listed or banned, and then nobody need be named.
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
        let ban = bans.and_then(|bans| bans.find(who, allowed));
        (listed.map(|(_, listed)| listed), ban)
    }

    /// The users of a tenant who are denied or banned, by their own names, whose name as an account is `folded`.
    pub(crate) fn spellings(&self, tenant: Option<&str>, folded: &str) -> Vec<String> {
        let scope = self.identity.user_scope;
        let written = match scope {
            UserScope::Global => folded.to_owned(),
            UserScope::Tenant => canonical_account(&scope.write(tenant, folded)),
        };
        let mut names: Vec<Box<str>> = self.lists.spellings(&written).map(Box::from).collect();
        names.extend(self.bans.iter().flat_map(|bans| bans.spellings(&written)));
        let own = |name: &str| {
            let (of, user) = scope.read(name).ok()?;
            // Tenants that differ in case only are two, and so are names that are alike only when they are encoded.
            let same = scope == UserScope::Global || of.as_deref() == tenant && canonical_account(&user) == folded;
            same.then(|| user.into_owned())
        };
        names.iter().filter_map(|name| own(name)).collect()
    }

    /// The same policy, as the `generation`th that a process has used.
    #[must_use]
    pub fn with_generation(mut self, generation: u64) -> Self {
        self.generation = generation;
        self
    }

    /// Which of a process's policies this is; every decision carries it.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether a finding is said to be meant: in the rule that it is about, else at the top of the policy.
    #[must_use]
    pub fn allows(&self, code: &str, rule: Option<&str>) -> bool {
        let allow = match rule {
            Some(name) => self.rules.iter().find(|rule| rule.name.as_ref() == name).map(|rule| &*rule.allow),
            None => Some(&*self.allow),
        };
        allow.is_some_and(|allow| allow.iter().any(|(own, _)| own.as_ref() == code))
    }

    /// The rules, in the order in which they are met: by layer, then as in the file.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Whether it has neither rules nor `[login]`: such a policy limits nobody, whatever else it holds.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.login.is_none()
    }

    /// The header fields that rules count by, in lower case, each once.
    #[must_use]
    pub fn header_names(&self) -> BTreeSet<&str> {
        let parts = self.rules.iter().flat_map(|rule| &rule.per);
        let names = parts.filter_map(|per| if let Per::Header(name) = per { Some(name.as_ref()) } else { None });
        names.collect()
    }

    /// Whether any limit counts bytes.
    #[must_use]
    pub fn counts_bytes(&self) -> bool {
        let fixed = |rule: &Rule| matches!(&rule.measure, Measure::Fixed(Measured { cost: CostOf::Bytes, .. }));
        self.rules.iter().any(fixed) || self.tiers.counts_bytes()
    }

    /// How callers are found.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The allow and deny lists.
    #[must_use]
    pub fn lists(&self) -> &Lists {
        &self.lists
    }

    /// Protection of a login, if the policy has any.
    #[must_use]
    pub fn login(&self) -> Option<&Login> {
        self.login.as_deref()
    }

    /// When to raise an alert.
    #[must_use]
    pub fn alerts(&self) -> &Alerts {
        &self.alerts
    }

    /// How much is kept in memory.
    #[must_use]
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// The key that digests and redactions are made with.
    #[must_use]
    pub fn key(&self) -> DigestKey {
        self.key
    }
}

/// The JSON Schema of the policy file, as editors read it.
#[cfg(feature = "schema")]
#[must_use]
pub fn schema_json() -> String {
    let schema = file::policy_schema();
    let mut text = serde_json::to_string_pretty(&schema).unwrap_or_default();
    text.push('\n');
    text
}

/// A kind of request, for limits by tier.
#[derive(Debug, Clone)]
pub(crate) struct Category {
    pub(crate) name: Box<str>,
    pub(crate) matches: Match,
}

/// When to raise an alert, by what is counted: `edge_blocks`, `tenant_blocks`, `user_bans`, `ip_blocks`.
pub type Alerts = BTreeMap<&'static str, Alert>;

/// Two thresholds over a period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alert {
    /// The period.
    pub per: Span,
    /// Fires at so many.
    pub warning: u64,
    /// Fires at so many, louder.
    pub critical: u64,
}

/// How much is kept in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// The most keys that are kept.
    pub max_keys: u64,
    /// What to do with new keys when only protected ones are left.
    pub when_full: WhenFull,
}

impl Default for Memory {
    fn default() -> Self {
        Self { max_keys: 1_000_000, when_full: WhenFull::Fold }
    }
}

/// What to do with new keys when only protected ones are left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenFull {
    /// Count them by their address prefix.
    Fold,
    /// Count them all together.
    Shared,
    /// Deny them.
    Deny,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_says_what_a_door_must_look_at() {
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
