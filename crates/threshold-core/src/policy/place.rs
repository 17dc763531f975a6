//! Names of records, for stores that have names: Durable Objects and Workers KV.
//!
//! Keys are digests, from which no name can be computed. A store that places records by name is therefore told the name of each key
//! when a request is planned.

use std::fmt::Write as _;
use std::iter;

use crate::address::AddressGroup;
use crate::caller::Caller;
use crate::facts::Facts;
use crate::key::{Digest, DigestKey};
use crate::limit::NotationError;
use crate::lockout::{AttemptKeys, LoginRequest, canonical_account};
use crate::plan::Plan;
use crate::policy::users::encode_where;
use crate::policy::{Consistency, Identities, Known, Per, Policy, Rule, UserScope};

/// The longest value that is written into a name. A longer one is replaced by its digest, so that names stay readable.
const MAX_VALUE: usize = 96;
/// The longest binding and the longest pattern.
const MAX_PATTERN: usize = 128;
/// The longest name of an eventual rule: a key of KV has at most 512 bytes, and the number of a window takes at most 20.
const MAX_EVENTUAL_NAME: usize = 480;
/// Stands in a name for the number of the clock window. No value can contain it, since braces are encoded in values.
const WINDOW: &str = "{window}";

/// The place of a rule's records, written `BINDING/NAME`: the Durable Object with this name, or the key of a KV namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordPlace {
    binding: Box<str>,
    name: Box<[Piece]>,
}

/// One of the two budgets of logins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoginBudget {
    Account,
    Ip,
}

/// The places of the records of logins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LoginPlaces {
    account: Option<RecordPlace>,
    ip: Option<RecordPlace>,
}

impl LoginPlaces {
    /// Sets the place of one of them.
    ///
    /// # Errors
    /// Returns why it cannot have this place.
    pub(crate) fn set(&mut self, budget: LoginBudget, place: RecordPlace) -> Result<(), String> {
        if let Some(why) = place.misfit_of_login(budget) {
            return Err(why);
        }
        match budget {
            LoginBudget::Account => self.account = Some(place),
            LoginBudget::Ip => self.ip = Some(place),
        }
        Ok(())
    }
}

/// The place of one record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed<'p> {
    /// The key of the record.
    pub key: Digest,
    /// The binding of the Worker; `None` where the policy names none.
    pub binding: Option<&'p str>,
    /// The name in it.
    pub name: String,
    /// The consistency of its rule. A record of an eventual rule is the only one with its name.
    pub consistency: Consistency,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(Box<str>),
    Value(Placeholder),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placeholder {
    Tenant,
    User,
    Address,
    Account,
    Hash,
    Window,
}

const NAMES: [(&str, Placeholder); 6] = [
    ("tenant", Placeholder::Tenant),
    ("user", Placeholder::User),
    ("ip", Placeholder::Address),
    ("account", Placeholder::Account),
    ("hash", Placeholder::Hash),
    ("window", Placeholder::Window),
];

impl RecordPlace {
    /// Parses `BINDING/NAME`.
    pub(crate) fn parse(text: &str) -> Result<Self, NotationError> {
        let bad = |at, message: String, help: &str| NotationError { at, message, help: help.to_owned() };
        let whole = 0..text.len();
        let Some((binding, pattern)) = text.split_once('/') else {
            let help = "write BINDING/NAME, such as \"TENANTS/tenant:{tenant}\"";
            return Err(bad(whole, "the binding is missing".to_owned(), help));
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let starts_well = binding.bytes().next().is_some_and(|first| !first.is_ascii_digit());
        if !starts_well || !binding.bytes().all(is_name) || binding.len() > MAX_PATTERN {
            let message = format!("\"{binding}\" is not the name of a binding");
            return Err(bad(0..binding.len(), message, "use letters, digits and _"));
        }
        if pattern.is_empty() || pattern.len() > MAX_PATTERN {
            return Err(bad(whole, format!("a name has 1 to {MAX_PATTERN} bytes"), ""));
        }
        let mut name = Vec::new();
        let mut rest = pattern;
        while !rest.is_empty() {
            let at = text.len().saturating_sub(rest.len());
            let Some(inner) = rest.strip_prefix('{') else {
                let end = rest.find('{').unwrap_or(rest.len());
                let (literal, after) = rest.split_at(end);
                name.push(Piece::Text(literal.into()));
                rest = after;
                continue;
            };
            let word = inner.split('}').next().unwrap_or_default();
            let end = at.saturating_add(word.len()).saturating_add(2).min(text.len());
            let found = NAMES.iter().find(|(known, _)| *known == word).filter(|_| inner.len() > word.len());
            let Some((_, value)) = found else {
                let known: Vec<String> = NAMES.iter().map(|(known, _)| format!("{{{known}}}")).collect();
                let help = format!("known: {}", known.join(", "));
                return Err(bad(at..end, format!("unknown placeholder {{{word}}}"), &help));
            };
            name.push(Piece::Value(*value));
            rest = text.get(end..).unwrap_or_default();
        }
        Ok(Self { binding: binding.into(), name: name.into() })
    }

    /// Returns the binding.
    #[must_use]
    pub fn binding(&self) -> &str {
        &self.binding
    }

    /// Returns why a rule cannot have this place; `None` if it can.
    ///
    /// A name must follow from the key: a budget that is counted by tenant and named by user would be in several places.
    pub(crate) fn misfit(&self, per: &[Per], scope: UserScope) -> Option<String> {
        let scoped = scope == UserScope::Tenant && per.contains(&Per::User);
        self.placeholders().find_map(|placeholder| {
            let (fits, name) = match placeholder {
                Placeholder::Tenant => (scoped || per.contains(&Per::Tenant), "tenant"),
                Placeholder::User => (per.contains(&Per::User), "user"),
                Placeholder::Address => (per.iter().any(|per| matches!(per, Per::Ip | Per::IpPrefix(_))), "ip"),
                // Only a login has one: see `misfit_of_login`.
                Placeholder::Account => (false, "account"),
                Placeholder::Hash | Placeholder::Window => return None,
            };
            (!fits).then(|| format!("the rule is not counted by {name}, so one budget would have many places"))
        })
    }

    /// Returns why an eventual rule with this `per` cannot have this place; `None` if it can.
    ///
    /// An object holds many records, and a key of KV holds one value. The name must therefore tell all budgets of the rule apart.
    pub(crate) fn joins_budgets(&self, per: &[Per], scope: UserScope) -> Option<String> {
        let has = |placeholder: Placeholder| self.placeholders().any(|own| own == placeholder);
        if self.names_by_hash() {
            return None;
        }
        let joined = per.iter().find(|per| match per {
            Per::Tenant => !has(Placeholder::Tenant),
            // Under this scope equal names of two tenants are two users.
            Per::User => !has(Placeholder::User) || (scope == UserScope::Tenant && !has(Placeholder::Tenant)),
            Per::Ip | Per::IpPrefix(_) => !has(Placeholder::Address),
            _ => true,
        })?;
        Some(format!("the rule is counted by {joined}, which its place does not tell apart"))
    }

    /// Returns whether the name has the number of the clock window.
    #[must_use]
    pub fn has_window(&self) -> bool {
        self.placeholders().any(|own| own == Placeholder::Window)
    }

    /// Returns whether the name has the digest of the key.
    pub(crate) fn names_by_hash(&self) -> bool {
        self.placeholders().any(|own| own == Placeholder::Hash)
    }

    /// Returns whether a record of this place could have the name of another place's record.
    pub(crate) fn may_meet(&self, other: &Self) -> bool {
        let beginning = |place: &Self| match place.name.first() {
            Some(Piece::Text(text)) => text.to_string(),
            Some(Piece::Value(_)) | None => String::new(),
        };
        let (own, others) = (beginning(self), beginning(other));
        let begin_alike = own.starts_with(&others) || others.starts_with(&own);
        // Digests of two rules differ.
        self.binding == other.binding && begin_alike && !(self.names_by_hash() && other.names_by_hash())
    }

    /// Returns why a budget of logins cannot have this place; `None` if it can.
    fn misfit_of_login(&self, counted: LoginBudget) -> Option<String> {
        let (own, name) = match counted {
            LoginBudget::Account => (Placeholder::Account, "account"),
            LoginBudget::Ip => (Placeholder::Address, "ip"),
        };
        let fits = |placeholder: Placeholder| placeholder == own || placeholder == Placeholder::Hash;
        let misfit = || format!("this budget is counted by {name}, so only {{{name}}} and {{hash}} name its places");
        (!self.placeholders().all(fits)).then(misfit)
    }

    fn placeholders(&self) -> impl Iterator<Item = Placeholder> {
        self.name.iter().filter_map(|piece| match piece {
            Piece::Value(placeholder) => Some(*placeholder),
            Piece::Text(_) => None,
        })
    }

    fn name(&self, key: Digest, value: impl Fn(Placeholder) -> Option<String>) -> String {
        let mut name = String::new();
        for piece in &self.name {
            match piece {
                Piece::Text(text) => name.push_str(text),
                Piece::Value(Placeholder::Window) => name.push_str(WINDOW),
                Piece::Value(placeholder) => match value(*placeholder) {
                    Some(value) => name.push_str(&value),
                    None => push_hash(&mut name, key),
                },
            }
        }
        name
    }
}

fn push_hash(name: &mut String, key: Digest) {
    // Writing to a string does not fail.
    let _ = write!(name, "{:032x}", key.to_u128());
}

/// Returns a value as it is written into a name. What separates the parts of a name is encoded, so that no value looks like two.
fn written(value: &str, key: DigestKey) -> String {
    if value.len() > MAX_VALUE {
        return key.redact(value);
    }
    let mut text = String::with_capacity(value.len());
    // Writing to a string does not fail.
    let _ = encode_where(&mut text, value, |c| c.is_ascii_control() || matches!(c, '%' | ':' | '/' | '{' | '}' | '#'));
    text
}

/// An address that replaces a missing name. A name cannot look like it, because its colon would be encoded.
fn floored(group: Option<AddressGroup>) -> Option<String> {
    group.map(|group| format!("ip:{group}"))
}

impl Plan<'_> {
    /// Returns the place of each record that this plan can read or change: one for each key of its charges and subjects. `facts` are
    /// those that it was planned from.
    #[must_use]
    pub fn places(&self, facts: &Facts<'_>) -> Vec<Placed<'_>> {
        let policy = self.policy();
        let caller = Caller::named(facts, policy);
        let charges = self.met().iter().map(|met| {
            let mut placed = policy.place_of(met.rule, met.key, &caller);
            if met.shard > 0 {
                // Writing to a string does not fail.
                let _ = write!(placed.name, ":{}", met.shard);
            }
            placed
        });
        let mut places: Vec<Placed<'_>> = charges.collect();
        if !self.subjects().is_empty() {
            policy.add_places_of_subjects(&caller, &mut places);
        }
        places
    }
}

impl LoginRequest<'_> {
    /// Returns the place of each record that an attempt with these keys can read or change: the penalties of its caller, the account,
    /// and the budget of its address.
    #[must_use]
    pub fn places<'p>(&self, policy: &'p Policy, keys: &AttemptKeys) -> Vec<Placed<'p>> {
        let mut places = Vec::new();
        let names = self.names(policy);
        // Those of the address and the tenant, and those of the user under each name that is looked up.
        for user in iter::once(None).chain(names.iter().map(|name| Some(name.as_str()))) {
            let facts = Facts { ip: self.ip, tenant: self.tenant, user, ..Facts::default() };
            policy.add_places_of_subjects(&Caller::named(&facts, policy), &mut places);
        }
        let own = &policy.login_places;
        let group = self.ip.map(|ip| AddressGroup::of(ip, policy.identity().ipv6_prefix));
        let value = |placeholder| match placeholder {
            Placeholder::Account => self.account.map(|name| written(&canonical_account(name), policy.key())),
            Placeholder::Address => group.map(|group| group.to_string()),
            _ => None,
        };
        let named = |place: &'p Option<RecordPlace>, kind: &str, key| {
            let place = place.as_ref();
            Placed::strong(key, place, place.map_or_else(|| anchored(kind, key), |place| place.name(key, value)))
        };
        places.extend(keys.account.map(|key| named(&own.account, "account", key)));
        places.extend(keys.address.map(|key| named(&own.ip, "login", key)));
        places
    }
}

impl<'p> Placed<'p> {
    fn strong(key: Digest, place: Option<&'p RecordPlace>, name: String) -> Self {
        Self { key, binding: place.map(RecordPlace::binding), name, consistency: Consistency::Strong }
    }

    /// Returns whether the name has the number of the clock window, which [`in_window`](Self::in_window) fills in.
    #[must_use]
    pub fn has_window(name: &str) -> bool {
        name.contains(WINDOW)
    }

    /// Returns a name with the number of a clock window.
    #[must_use]
    pub fn in_window(name: &str, window: u64) -> String {
        name.replace(WINDOW, &window.to_string())
    }
}

fn anchored(kind: &str, digest: Digest) -> String {
    let mut name = format!("{kind}:");
    push_hash(&mut name, digest);
    name
}

/// Returns a name that KV accepts: one that is too long, or a path to itself, is replaced by the digest.
fn eventual_name(name: String, key: Digest) -> String {
    if name.len() <= MAX_EVENTUAL_NAME && !matches!(name.as_str(), "." | "..") {
        return name;
    }
    let mut by_digest = anchored("key", key);
    if name.contains(WINDOW) {
        by_digest.push(':');
        by_digest.push_str(WINDOW);
    }
    by_digest
}

impl Policy {
    /// Returns the bindings that the places of logins name; `None` for records without a place. Empty without `[login]`.
    #[must_use]
    pub fn login_bindings(&self) -> Vec<Option<&str>> {
        let LoginPlaces { account, ip } = &*self.login_places;
        let places = [account, ip].into_iter().filter(|_| self.login().is_some());
        places.map(|place| place.as_ref().map(RecordPlace::binding)).collect()
    }

    fn place_of<'p>(&'p self, rule: &'p Rule, key: Digest, caller: &Caller<'_>) -> Placed<'p> {
        let place = rule.place.as_ref();
        let is_eventual = rule.consistency == Consistency::Eventual;
        let name = match place {
            Some(place) => place.name(key, |placeholder| self.value(placeholder, rule, caller)),
            None if is_eventual => anchored("key", key),
            None => self.default_name(rule, key, caller),
        };
        let name = if is_eventual { eventual_name(name, key) } else { name };
        Placed { consistency: rule.consistency, ..Placed::strong(key, place, name) }
    }

    /// Adds the place of every standing of a caller: that of the first rule that strikes it. Rules of one subject may have different
    /// places, and all requests must find the standing in the same one.
    fn add_places_of_subjects<'p>(&'p self, caller: &Caller<'_>, places: &mut Vec<Placed<'p>>) {
        let mut known = Known::nothing();
        let mut identities = Identities::new(&mut known, caller, self);
        for (index, subject) in self.subjects.iter().enumerate() {
            let Some(rule) = self.rules.iter().find(|rule| rule.subject == Some(index)) else { continue };
            if let Some(subject) = self.subject(subject, &mut identities) {
                places.push(self.place_of(rule, subject.key(), caller));
            }
        }
    }

    fn value(&self, placeholder: Placeholder, rule: &Rule, caller: &Caller<'_>) -> Option<String> {
        let named = |name: Option<&str>| match name {
            Some(name) => Some(written(name, self.key())),
            None => floored(caller.group()),
        };
        match placeholder {
            // A user without a tenant is the same one from every address.
            Placeholder::Tenant if !rule.per.contains(&Per::Tenant) && caller.user.is_some() => {
                Some(caller.tenant.map_or_else(String::new, |tenant| written(tenant, self.key())))
            }
            Placeholder::Tenant => named(caller.tenant),
            Placeholder::User => named(caller.user),
            Placeholder::Address => caller.narrowest_group(&rule.per).map(|group| group.to_string()),
            // A rule is not counted by account, which is refused where the policy is loaded.
            Placeholder::Account | Placeholder::Hash | Placeholder::Window => None,
        }
    }

    /// Returns the name of a rule without a place. All records with the same anchor share one object, so that most requests are
    /// settled in one step: those of a tenant if `per` has it, else of the user, else of the address. Names are digests, because
    /// anyone who can see the account at Cloudflare can read them.
    fn default_name(&self, rule: &Rule, key: Digest, caller: &Caller<'_>) -> String {
        let has = |per: &Per| rule.per.contains(per);
        let by_tenant = has(&Per::Tenant) || self.identity().user_scope == UserScope::Tenant && has(&Per::User);
        if let Some(tenant) = caller.tenant.filter(|_| by_tenant) {
            // The partition tells apart the parts that a tenant's users are spread over.
            return format!("{}:{}", anchored("tenant", self.anchors.tenant(tenant)), key.partition());
        }
        if let Some(user) = caller.user.filter(|_| has(&Per::User)) {
            return anchored("user", self.anchors.user(user));
        }
        let tells_apart = rule.per.iter().any(Per::is_identity);
        let is_name = |per: &Per| matches!(per, Per::Tenant | Per::User | Per::Ip | Per::IpPrefix(_));
        match caller.narrowest_group(&rule.per).or_else(|| caller.group()) {
            _ if !tells_apart => format!("rule:{}", rule.name),
            Some(group) if rule.per.iter().any(is_name) => format!("address:{}", self.key().redact(&group.to_string())),
            // Counted by headers or facts alone: the key is the whole identity.
            _ => anchored("key", key),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const POLICY: &str = "
        [identity]
        ipv6_prefix = 64
        [[rule]]
        name = 'tenant'
        per = ['tenant']
        limit = '10/min'
        place = 'TENANTS/tenant:{tenant}'
        [[rule]]
        name = 'user'
        per = ['tenant', 'user']
        limit = '10/min'
        place = 'RATE_LIMITER/{tenant}:ratelimit:{user}'
        ladder = 'graduated'
        [[rule]]
        name = 'posts'
        per = ['user', 'endpoint']
        limit = '10/min'
        ladder = 'strict'
        [[rule]]
        name = 'messages'
        per = ['user']
        limit = '20/h'
        place = 'RATE_LIMITER/ratelimit:{user}'
        [[rule]]
        name = 'addresses'
        per = ['ip']
        limit = '10/min'
        place = 'ADDRESSES/ip:{hash}'
        [[rule]]
        name = 'all'
        per = []
        limit = '1000/min'
    ";

    fn policy() -> Policy {
        Policy::parse(POLICY, &|_| None).unwrap()
    }

    /// Users belong to tenants, and so do the places of budgets that are counted by user alone.
    fn scoped_policy() -> Policy {
        let text = POLICY.replace("ipv6_prefix = 64", "user_scope = 'tenant'");
        let text = text.replace("RATE_LIMITER/ratelimit:{user}", "RATE_LIMITER/{tenant}:ratelimit:{user}");
        Policy::parse(&text, &|_| None).unwrap()
    }

    /// Returns the binding and name of each record of a request, in the order of the rules.
    fn names(policy: &Policy, facts: &Facts<'_>) -> Vec<String> {
        let plan = policy.plan(facts).unwrap();
        let places = plan.places(facts);
        places.iter().map(|placed| format!("{}/{}", placed.binding.unwrap_or("-"), placed.name)).collect()
    }

    #[test]
    fn names_are_those_of_the_policy() {
        let policy = policy();
        let ip = Some([203, 0, 113, 7].into());
        let facts = Facts { ip, tenant: Some("acme"), user: Some("u1"), path: Some("/"), ..Facts::default() };
        let found = names(&policy, &facts);
        for name in ["TENANTS/tenant:acme", "RATE_LIMITER/acme:ratelimit:u1", "RATE_LIMITER/ratelimit:u1", "-/rule:all"]
        {
            assert!(found.iter().any(|own| own == name), "{name} in {found:?}");
        }
        assert!(found.iter().any(|own| own.starts_with("ADDRESSES/ip:") && own.len() == "ADDRESSES/ip:".len() + 32));
        // The standing of the ladder lies beside the budgets that strike.
        assert_eq!(found.iter().filter(|own| *own == "RATE_LIMITER/acme:ratelimit:u1").count(), 2, "{found:?}");
        // What separates parts is encoded, and an address that replaces a user cannot be claimed by one.
        let odd = names(&policy, &Facts { tenant: Some("a:b%/"), user: Some("ip:203.0.113.7"), ..facts });
        assert!(odd.contains(&"RATE_LIMITER/a%3Ab%25%2F:ratelimit:ip%3A203.0.113.7".to_owned()), "{odd:?}");
        let floored = names(&policy, &Facts { user: None, ..facts });
        assert!(floored.contains(&"RATE_LIMITER/acme:ratelimit:ip:203.0.113.7".to_owned()), "{floored:?}");
        let long = "x".repeat(2_000);
        let long = names(&policy, &Facts { user: Some(&long), ..facts });
        assert!(long.iter().all(|name| name.len() < 256), "{long:?}");
    }

    #[test]
    fn a_place_that_does_not_follow_from_the_key_is_refused() {
        let check = |rule: &str, message: &str| {
            let error = Policy::parse(&format!("[[rule]]\nname = 'r'\nlimit = '1/min'\n{rule}"), &|_| None);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        };
        check("per = ['ip']\nplace = 'X/{user}'", "the rule is not counted by user");
        check("per = ['user']\nplace = 'X/{tenant}:{user}'", "the rule is not counted by tenant");
        check("per = ['user']\nplace = '{user}'", "the binding is missing");
        check("per = ['user']\nplace = '9X/{user}'", "\"9X\" is not the name of a binding");
        check("per = ['user']\nplace = 'X/{usr}'", "unknown placeholder {usr}");
        check("per = ['user']\nplace = 'X/{user'", "unknown placeholder {user}");
        check("per = ['user']\nplace = 'X/'", "a name has 1 to 128 bytes");
        check("per = ['user']\nplace = 'X/{user}:{window}'", "only an eventual rule has one record for each window");
        let eventual = |rule: &str| format!("consistency = 'eventual'\nalgorithm = 'fixed-window'\n{rule}");
        check(
            &eventual("per = ['user', 'method']\nplace = 'X/{user}:{window}'"),
            "the rule is counted by method, which its place does not tell apart",
        );
        check(
            &eventual("per = ['user']\nanchor = 'first'\nplace = 'X/{user}:{window}'"),
            "{window} numbers the windows of the clock",
        );
        check(
            &eventual("per = ['user']\nblock_for = '1h'\nplace = 'X/{user}:{window}'"),
            "a block outlasts the window",
        );
        check(
            &eventual(
                "per = ['user']\nplace = 'X/a:{user}'\n[[rule]]\nname = 's'\nlimit = '5/h'\nper = ['ip']\nalgorithm = 'fixed-window'\nconsistency = 'eventual'\nplace = 'X/a:{ip}'",
            ),
            "could have the key of the rule \"r\"",
        );
    }

    #[test]
    fn eventual_rules_have_a_key_for_each_budget() {
        let policy = Policy::parse(
            "[[rule]]
            name = 'messages'
            per = ['user']
            limit = '20/h'
            algorithm = 'fixed-window'
            consistency = 'eventual'
            place = 'RATE_LIMIT_KV/ratelimit:{user}:{window}'
            [[rule]]
            name = 'all'
            per = []
            limit = '100/h'
            algorithm = 'fixed-window'
            consistency = 'eventual'",
            &|_| None,
        );
        let policy = policy.unwrap();
        let found = |user: &str| {
            let facts = Facts { user: Some(user), ..Facts::default() };
            let plan = policy.plan(&facts).unwrap();
            let places = plan.places(&facts);
            assert!(places.iter().all(|placed| placed.consistency == Consistency::Eventual));
            let name = |at: usize| places.get(at).map(|placed| Placed::in_window(&placed.name, 490_000)).unwrap();
            (name(1), name(0))
        };
        let (messages, all) = found("42");
        assert_eq!(messages, "ratelimit:42:490000");
        assert!(all.starts_with("key:") && all.len() == 36, "{all}");
        // A value cannot bring the number of a window into a name, and no name is longer than a key of KV.
        assert_eq!(found("{window}").0, "ratelimit:%7Bwindow%7D:490000");
        assert!(found(&"{".repeat(96)).0.len() <= 512);
    }

    #[cfg(feature = "login")]
    #[test]
    fn a_login_has_a_place_for_each_name_of_its_caller_and_for_both_budgets() {
        let policy = format!(
            "{POLICY}\n[lists]\ndeny = ['user:EVE']\n[login]\nip_place = 'SESSIONS/auth:ip:{{ip}}'\n\
             account_place = 'SESSIONS/auth:user:{{account}}'"
        );
        let policy = Policy::parse(&policy, &|_| None).unwrap();
        let secrets = crate::Secrets::new(crate::Secret::new(&[9; 32]).unwrap());
        let ip = Some([203, 0, 113, 7].into());
        let (id, tenant) = (crate::TraceId::from_u128(1), Some("acme"));
        for (account, user) in [(Some(" Eve"), None), (Some("Eve"), Some("u1")), (None, None)] {
            let login = LoginRequest { account, user, ip, tenant, ..LoginRequest::default() };
            let keys = login.attempt_keys(&policy, &secrets, id);
            let places = login.places(&policy, &keys);
            // A penalty that cannot be looked up refuses every login of its caller.
            for check in login.penalty_checks(&policy, id) {
                for subject in check.subjects() {
                    assert!(places.iter().any(|placed| placed.key == subject.key()), "{account:?} {user:?}");
                }
            }
            let at = |key: Option<Digest>| {
                let placed = places.iter().find(|placed| Some(placed.key) == key)?;
                Some(format!("{}/{}", placed.binding.unwrap_or("-"), placed.name))
            };
            assert_eq!(at(keys.account), account.map(|_| "SESSIONS/auth:user:eve".to_owned()));
            assert_eq!(at(keys.address).as_deref(), Some("SESSIONS/auth:ip:203.0.113.7"));
        }
        assert_eq!(policy.login_bindings(), [Some("SESSIONS"), Some("SESSIONS")]);
        for (place, message) in [
            ("account_place = 'X/{ip}'", "only {account} and {hash} name its places"),
            ("ip_place = 'X/{account}'", "only {ip} and {hash} name its places"),
            ("ip_place = '{ip}'", "the binding is missing"),
        ] {
            let error = Policy::parse(&format!("[login]\n{place}"), &|_| None).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    proptest! {
        /// One record is in one place, whatever request asks for it, and every key of a plan has a place. Woken by naming the
        /// standing of a subject by the first rule that the request has met.
        #[test]
        fn a_name_follows_from_the_key(
            requests in prop::collection::vec((0_u8..3, 0_u8..3, 0_u8..3, 0_u8..2), 1..20),
            scoped in any::<bool>(),
        ) {
            let policy = if scoped { scoped_policy() } else { policy() };
            let mut known: BTreeMap<Digest, (Option<String>, String)> = BTreeMap::new();
            for (tenant, user, host, path) in requests {
                let (tenant, user) = (["", "a", "b"][usize::from(tenant)], ["", "a", "b"][usize::from(user)]);
                let facts = Facts {
                    ip: Some([10, 0, host, 1].into()),
                    tenant: Some(tenant),
                    user: Some(user),
                    path: Some(["/x", "/y"][usize::from(path)]),
                    ..Facts::default()
                };
                let plan = policy.plan(&facts).unwrap();
                let places = plan.places(&facts);
                for placed in &places {
                    let name = (placed.binding.map(str::to_owned), placed.name.clone());
                    prop_assert_eq!(known.entry(placed.key).or_insert_with(|| name.clone()), &name);
                }
                let charges = plan.charges().iter().map(crate::bill::Charge::key);
                for key in charges.chain(plan.subjects().iter().map(crate::plan::Subject::key)) {
                    prop_assert!(places.iter().any(|placed| placed.key == key));
                }
            }
        }
    }
}
