//! A request as rules see it: normalized, with the parts of its keys.

use std::cell::OnceCell;
use std::net::IpAddr;

use crate::address::{AddressGroup, canonical};
use crate::facts::Facts;
use crate::key::{KeyBuilder, Part};
use crate::path::{HOST, METHOD, Normalized, OddPaths, PATH, PathError, Readings, may_differ, normalize_path, read};
use crate::policy::{CostOf, Layer, Per, Policy, Rule, ScopedName, UserScope};

/// The category of a request that no `[[category]]` matches.
pub(crate) const DEFAULT_CATEGORY: &str = "requests";

/// A normalized request.
#[derive(Debug)]
pub(crate) struct Caller<'a> {
    pub(crate) facts: &'a Facts<'a>,
    ipv6_prefix: u8,
    pub(crate) method: Normalized<'a>,
    pub(crate) path: Normalized<'a>,
    pub(crate) host: Normalized<'a>,
    pub(crate) tenant: Option<&'a str>,
    pub(crate) user: Option<&'a str>,
    pub(crate) tier: Option<&'a str>,
    pub(crate) category: &'a str,
    scope: UserScope,
    /// The canonical name of a user who belongs to a tenant, once it was needed.
    scoped: OnceCell<ScopedName>,
    /// The other readings of the path, which an ordinary path does not have.
    odd: Option<Box<Odd<'a>>>,
}

/// The other readings of a path.
#[derive(Debug, Default)]
struct Odd<'a> {
    /// The normalized path, while another reading is in its place.
    resolved: Option<Normalized<'a>>,
    /// The readings that are still to be matched.
    others: Vec<String>,
    /// Why the path cannot be matched.
    error: Option<PathError>,
}

impl<'a> Caller<'a> {
    pub(crate) fn new(facts: &'a Facts<'a>, policy: &'a Policy) -> Self {
        let mut caller = Self::named(facts, policy);
        // In two steps, because identities can be digested as soon as the names are known, while the path is still to
        // be normalized.
        caller.spell(policy);
        caller
    }

    /// Creates a caller with its names only; [`spell`](Self::spell) adds the rest.
    #[inline]
    pub(crate) fn named(facts: &'a Facts<'a>, policy: &Policy) -> Self {
        Self {
            facts,
            ipv6_prefix: policy.identity().ipv6_prefix,
            method: Normalized::default(),
            path: Normalized::default(),
            host: Normalized::default(),
            tenant: known(facts.tenant),
            user: known(facts.user),
            tier: None,
            category: DEFAULT_CATEGORY,
            scope: policy.identity().user_scope,
            scoped: OnceCell::new(),
            odd: None,
        }
    }

    /// Returns the user's canonical name, as lists, bans and settings store it.
    #[inline]
    pub(crate) fn user_name(&self) -> Option<&str> {
        let user = self.user?;
        match self.scope {
            UserScope::Global => Some(user),
            UserScope::Tenant => Some(self.scoped.get_or_init(|| ScopedName::new(self.tenant, user))),
        }
    }

    /// Returns the address, with IPv4-mapped IPv6 addresses as IPv4.
    pub(crate) fn ip(&self) -> Option<IpAddr> {
        self.facts.ip.map(canonical)
    }

    /// Returns the address block that shares a budget.
    #[inline]
    pub(crate) fn group(&self) -> Option<AddressGroup> {
        self.facts.ip.map(|ip| AddressGroup::of(ip, self.ipv6_prefix))
    }

    /// Returns the address block that shares a budget, if `per` is an address.
    pub(crate) fn group_of(&self, per: &Per) -> Option<AddressGroup> {
        match per {
            Per::Ip => self.group(),
            Per::IpPrefix(wide) => self.facts.ip.map(|ip| AddressGroup::wider(ip, *wide, self.ipv6_prefix)),
            _ => None,
        }
    }

    /// Returns the narrowest address block among the parts of a key.
    pub(crate) fn narrowest_group(&self, per: &[Per]) -> Option<AddressGroup> {
        per.iter().filter_map(|per| self.group_of(per)).max_by_key(|group| group.prefix)
    }

    /// Normalizes the method, the path and the host, and finds the category and the tier.
    pub(crate) fn spell(&mut self, policy: &'a Policy) {
        let facts = self.facts;
        self.method.set(known(facts.method), METHOD);
        self.path.set(known(facts.path), PATH);
        if self.path.was_rewritten() && may_differ(facts.path.unwrap_or_default()) || facts.route.is_some() {
            self.read_path(policy);
        }
        self.host.set(known(facts.host), HOST);
        self.tier = known(facts.tier);
        self.categorize(policy);
        // Most policies have no tiers: then only the tier of the request counts.
        if policy.tiers.has_tiers() {
            let default = policy.identity().default_tier.as_deref();
            self.tier = policy.tiers.tier_of(self, self.tier, default);
        }
    }

    /// Finds the category of the current reading.
    fn categorize(&mut self, policy: &'a Policy) {
        // The application's word comes first: it knows better what a request is for than a pattern on its path.
        let found = known(self.facts.category)
            .or_else(|| policy.categories.iter().find(|own| own.matches.holds(self)).map(|own| own.name.as_ref()));
        self.category = found.unwrap_or(DEFAULT_CATEGORY);
    }

    /// Finds the other readings of the path.
    #[cold]
    fn read_path(&mut self, policy: &Policy) {
        let (Some(path), Some(spelled)) = (known(self.facts.path), self.path.get()) else { return };
        // Another program that asks has received the path already and needs a decision. Only doors that see the
        // client's own request can refuse it.
        let odd_paths = if self.facts.from_client { policy.identity().odd_paths } else { OddPaths::Match };
        let readings =
            if self.path.was_rewritten() { read(path, spelled, odd_paths) } else { Ok(Readings::of(spelled)) };
        let readings = readings.and_then(|mut readings| match known(self.facts.route) {
            // A router that rewrites or nests paths may serve another resource than the path names. Limits on either
            // must hold.
            Some(route) if !follows(spelled, route) => {
                readings.add(normalize_path(route).into_owned()).map(|()| readings)
            }
            _ => Ok(readings),
        });
        let odd = match readings {
            Ok(readings) => Odd { others: readings.into_others().collect(), ..Odd::default() },
            Err(error) => Odd { error: Some(error), ..Odd::default() },
        };
        if odd.error.is_some() || !odd.others.is_empty() {
            self.odd = Some(Box::new(odd));
        }
    }

    /// Why the path cannot be matched.
    #[inline]
    pub(crate) fn path_error(&self) -> Option<PathError> {
        self.odd.as_ref().and_then(|odd| odd.error)
    }

    /// Whether servers may read the path differently.
    #[inline]
    pub(crate) fn has_other_readings(&self) -> bool {
        self.odd.is_some()
    }

    /// Replaces the path by its next reading, and the category with it. Returns whether there is one.
    pub(crate) fn read_next(&mut self, policy: &'a Policy) -> bool {
        let Some(odd) = &mut self.odd else { return false };
        // `into_others` has reversed the list, so that `pop` takes the readings in order and moves no other one.
        let Some(next) = odd.others.pop() else { return false };
        let present = std::mem::replace(&mut self.path, Normalized::of(next));
        // Only the first replacement is the normalized path. Later ones replace a reading.
        odd.resolved.get_or_insert(present);
        self.categorize(policy);
        true
    }

    /// Returns the normalized path, whichever reading is the current one.
    fn resolved(&self) -> Option<&str> {
        self.odd.as_ref().and_then(|odd| odd.resolved.as_ref()).unwrap_or(&self.path).get()
    }

    /// Returns the endpoint as method and pattern: the one in the facts, else the first pattern of this rule that matches the
    /// current reading of the path, else the first pattern of an endpoint rule that matches the normalized path, else that path.
    #[inline(never)]
    pub(crate) fn endpoint<'e>(&'e self, rule: &'e Rule, policy: &'e Policy) -> Option<(Option<&'e str>, &'e str)> {
        if let Some(given) = self.facts.endpoint.filter(|given| !given.is_empty()) {
            return Some((None, given));
        }
        let (present, path) = (self.path.get()?, self.resolved()?);
        let own = rule.matches.path.iter().find(|pattern| pattern.matches(present));
        let endpoints = policy.rules.iter().filter(|other| other.layer == Layer::Endpoint);
        // A pattern and not the path itself where there is one: otherwise every id in a path would have a budget of its
        // own, and a client could have as many as it likes.
        let other = || endpoints.flat_map(|rule| &rule.matches.path).find(|pattern| pattern.matches(path));
        let pattern = own.or_else(other).map_or(path, |pattern| pattern.as_str());
        Some((Some(self.method.get().unwrap_or("*")), pattern))
    }

    /// Returns one part of a key for display; `None` if the request lacks it.
    pub(crate) fn part_text(&self, per: &Per, rule: &Rule, policy: &Policy) -> Option<String> {
        match per {
            Per::Ip | Per::IpPrefix(_) => self.group_of(per).map(|group| group.to_string()),
            Per::Tenant => self.tenant.map(|name| shown(policy, policy.identity().secret_tenant, name)),
            Per::User => self.user.map(|name| policy.shown_user(self.tenant, name)),
            Per::Tier => self.tier.map(str::to_owned),
            Per::Category => Some(self.category.to_owned()),
            Per::Endpoint => self.endpoint(rule, policy).map(|(method, path)| match method {
                Some(method) => format!("{method}:{path}"),
                None => path.to_owned(),
            }),
            Per::Method => self.method.get().map(str::to_owned),
            Per::Host => self.host.get().map(str::to_owned),
            Per::Header(name) => {
                // These hold credentials, and this text reaches logs and terminals.
                let secret = matches!(name.as_ref(), "authorization" | "cookie" | "proxy-authorization");
                self.facts.header(name).map(|value| shown(policy, secret, value))
            }
            Per::Fact(name) => self.facts.fact(name).map(str::to_owned),
        }
    }

    /// Appends one part to a key. Returns whether the request has it.
    // Not inlined into the loop over the parts, where every key would load what only some parts need.
    #[inline(never)]
    fn add_part(&self, key: &mut KeyBuilder, per: &Per, rule: &Rule, policy: &Policy) -> bool {
        let (part, value) = match per {
            Per::Ip | Per::IpPrefix(_) => {
                let Some(group) = self.group_of(per) else { return false };
                key.address(Part::Address, group);
                return true;
            }
            Per::Endpoint => {
                let Some((method, path)) = self.endpoint(rule, policy) else { return false };
                // Also without a method, so that an endpoint has the same sequence of parts in every key.
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

    /// Appends every part. With `floors`, the address replaces a missing one.
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
                // The rest is not appended: nothing is counted under a key with a missing part.
                None => return Keyed::Missing,
            }
        }
        keyed
    }
}

/// Whether a path plainly matches a route, so that the route is no other reading of it.
fn follows(path: &str, route: &str) -> bool {
    let mut segments = path.split('/');
    for part in route.trim_end_matches('/').split('/') {
        if part.starts_with("{*") {
            // A catch-all takes everything that follows, but at least one segment.
            return segments.next().is_some();
        }
        let same = |segment: &str| part.contains('{') || part.eq_ignore_ascii_case(segment);
        if !segments.next().is_some_and(same) {
            return false;
        }
    }
    segments.next().is_none()
}

/// An empty text counts as missing.
fn known(value: Option<&str>) -> Option<&str> {
    value.filter(|value| !value.is_empty())
}

/// Whether a request has every part of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keyed {
    /// It has every part.
    Whole,
    /// The address replaces a missing part.
    Floored,
    /// A part is missing.
    Missing,
}

fn shown(policy: &Policy, secret: bool, value: &str) -> String {
    if secret { policy.key().redact(value) } else { value.to_owned() }
}

impl CostOf {
    /// Returns the cost of a request.
    #[inline]
    pub(crate) fn of(&self, facts: &Facts<'_>) -> u64 {
        match self {
            Self::Requests => facts.cost.unwrap_or(1),
            Self::Bytes => facts.bytes.unwrap_or(0),
            Self::Named(name) => facts.named_cost(name),
        }
    }
}

/// Returns the field of the API that a part of a key is taken from.
pub(crate) fn field_of(per: &Per) -> String {
    match per {
        Per::IpPrefix(_) => "ip".to_owned(),
        Per::Endpoint => "path".to_owned(),
        Per::Fact(name) => format!("facts.{name}"),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::key::Digest;
    use crate::plan::PlanError;
    use proptest::prelude::*;

    const POLICY: &str = "
        [identity]
        default_tier = 't'
        [tiers.t]
        requests = '100/min'
        special = '10/min'
        [[category]]
        name = 'special'
        path = '/a/b/**'
        [[rule]]
        name = 'tier'
        per = ['ip']
        limit = 'tier'
        [[rule]]
        name = 'a'
        per = ['ip']
        match = { path = '/a' }
        limit = '5/min'
        [[rule]]
        name = 'under-b'
        per = ['ip', 'endpoint']
        match = { path = ['/b/*', '/a/b'] }
        limit = '5/min'
        [[rule]]
        name = 'others'
        layer = 'edge'
        per = ['ip', 'category']
        match = { path = '/**' }
        limit = '5/min'
        fallback = true
    ";

    fn charges(policy: &Policy, path: &str, route: Option<&str>) -> Result<BTreeSet<(usize, Digest)>, PlanError> {
        let facts = Facts { ip: Some([10, 0, 0, 1].into()), path: Some(path), route, ..Facts::default() };
        let plan = policy.plan(&facts)?;
        let charges: BTreeSet<_> = plan.met().iter().map(|met| (met.index, met.key)).collect();
        assert_eq!(charges.len(), plan.met().len(), "each budget once");
        assert_eq!(policy.explain(&facts).iter().filter(|rule| rule.limit.is_some()).count(), charges.len(), "{path}");
        Ok(charges)
    }

    proptest! {
        /// A request is charged what each of its readings would be charged, and nothing else. Woken by keeping the digest of
        /// one reading's category for the next.
        #[test]
        fn a_path_is_charged_for_each_of_its_readings(path in "(/a|/b|%2fa|%2fb|%5cb|/|;|%0a|/\\.\\.){1,5}") {
            let policy = Policy::parse(POLICY, &|_| None).unwrap();
            let Ok(readings) = read(&path, &normalize_path(&path), OddPaths::Match) else {
                prop_assert!(matches!(charges(&policy, &path, None), Err(PlanError::Path(_))));
                return Ok(());
            };
            let found = charges(&policy, &path, None).unwrap();
            let mut each = BTreeSet::new();
            let mut all_plain = true;
            for reading in readings.all() {
                let alone = read(reading, reading, OddPaths::Match).is_ok_and(|own| own.all().len() == 1);
                all_plain &= alone;
                if alone {
                    each.extend(charges(&policy, reading, None).unwrap());
                }
            }
            prop_assert!(found.is_superset(&each), "{} as {:?}", path, readings);
            prop_assert!(!all_plain || found == each, "{} as {:?}", path, readings);
        }
    }

    #[test]
    fn a_route_is_a_reading_where_it_says_something_new() {
        let policy = Policy::parse(POLICY, &|_| None).unwrap();
        let check = |path: &str, route: &str, same_as: &[&str]| {
            let found = charges(&policy, path, Some(route)).unwrap();
            let each = same_as.iter().flat_map(|path| charges(&policy, path, None).unwrap());
            assert_eq!(found, each.collect(), "{path} on {route}");
        };
        check("/b/7", "/b/{id}", &["/b/7"]);
        check("/b/7", "/{*rest}", &["/b/7"]);
        check("/a", "/a", &["/a"]);
        check("/a", "/A/", &["/a"]);
        // A router that is nested hands on what follows its prefix.
        check("/b", "/a/b", &["/b", "/a/b"]);
        check("/x", "/a", &["/x", "/a"]);
    }
}
