//! What budgets are counted by: once for all rules that count by the same things, and digested once for each request.

use crate::caller::{Caller, Keyed};
use crate::key::{Digest, DigestKey, Digester, Part, Partition, identity_secret};
use crate::policy::{Per, Policy, Rule, UserScope};

/// The most entries whose digests are remembered within one request. Policies count by fewer things.
pub(crate) const REMEMBERED: usize = 8;

/// One combination of things that budgets are counted by.
#[derive(Debug, Clone)]
pub(crate) struct CountedBy {
    per: Vec<Per>,
    /// Whether the category counts too, as it does for limits by tier.
    category: bool,
    /// Whether every rule that counts by this finds the same in a request. An endpoint is found by the rule's own patterns.
    shared: bool,
    /// Whether a user is counted as this tenant's user although the tenant is not counted by.
    scoped: bool,
    /// Whether the address stands in for what a request does not have.
    floors: bool,
    /// Whether a rule that every request meets counts by this.
    common: bool,
    /// Whether it takes nothing but [who is calling](Caller::named).
    named: bool,
    /// What is digested without a frame, for the secret is this combination's own.
    alone: Option<Alone>,
    secret: DigestKey,
    /// The same secret, made ready.
    ready: Digester,
    /// The secret for an address that stands in for a single part.
    floor: Digester,
    anchor: Anchor,
}

/// What the partition of such an identity is taken from.
#[derive(Debug, Clone)]
enum Anchor {
    /// The rule: it counts by nothing that tells one caller from another.
    Rule,
    /// The tenant or the user where they are counted by, else the addresses.
    Name { tenant: bool, user: bool },
    /// All of it.
    Whole,
    /// What of it tells one caller from another, in one order, and the secret it is digested under.
    Identity(Vec<Per>, DigestKey),
}

impl Anchor {
    fn new(per: &[Per], category: bool, scoped: bool, key: DigestKey) -> Self {
        let mut identity: Vec<Per> = per.iter().filter(|per| per.is_identity()).cloned().collect();
        identity.sort();
        let is_name = |per: &Per| matches!(per, Per::Tenant | Per::User | Per::Ip | Per::IpPrefix(_));
        if identity.is_empty() {
            Self::Rule
        } else if identity.iter().any(is_name) {
            Self::Name { tenant: scoped || per.contains(&Per::Tenant), user: per.contains(&Per::User) }
        } else if identity == per && !category {
            Self::Whole
        } else {
            let secret = identity_secret(key, identity.iter().map(ToString::to_string)).derive();
            Self::Identity(identity, secret)
        }
    }
}

/// What most budgets are counted by: a single part, or none.
#[derive(Debug, Clone, Copy)]
enum Alone {
    Nothing,
    Address,
    Tenant,
    User,
}

impl CountedBy {
    pub(crate) fn new(per: Vec<Per>, category: bool, floors: bool, scope: UserScope, key: DigestKey) -> Self {
        let mut builder = identity_secret(key, per.iter().map(ToString::to_string));
        if category {
            builder.text(Part::Category, "");
        }
        let scoped = scope == UserScope::Tenant && per.contains(&Per::User) && !per.contains(&Per::Tenant);
        if scoped {
            builder.text(Part::Tenant, "");
        }
        let secret = builder.derive();
        builder.text(Part::Floor, "");
        let shared = !per.contains(&Per::Endpoint);
        let spelled = |per: &Per| matches!(per, Per::Tier | Per::Category | Per::Endpoint | Per::Method | Per::Host);
        let named = !category && !per.iter().any(spelled);
        let alone = match (per.as_slice(), category) {
            ([], false) => Some(Alone::Nothing),
            ([Per::Ip], false) => Some(Alone::Address),
            ([Per::Tenant], false) => Some(Alone::Tenant),
            ([Per::User], false) if !scoped => Some(Alone::User),
            _ => None,
        };
        let (ready, floor) = (secret.digester(), builder.derive().digester());
        let anchor = Anchor::new(&per, category, scoped, key);
        Self { per, category, shared, scoped, floors, common: false, named, alone, secret, ready, floor, anchor }
    }

    /// The same combination as a rule counts by it that every request meets, or only some.
    pub(crate) fn common(mut self, common: bool) -> Self {
        self.common = common;
        self
    }

    /// The place of a combination among those known, where it is put if it is new.
    pub(crate) fn find_or_add(all: &mut Vec<Self>, own: Self) -> usize {
        let same = |other: &Self| (&other.per, other.category, other.floors) == (&own.per, own.category, own.floors);
        if let Some(place) = all.iter().position(same) {
            if let Some(known) = all.get_mut(place) {
                known.common |= own.common;
            }
            return place;
        }
        all.push(own);
        all.len().saturating_sub(1)
    }

    /// Whether it is worth digesting before anything else is done, and can be.
    pub(crate) fn is_early(&self) -> bool {
        self.common && self.named
    }

    /// Digests what a request has of it, in the partition of its anchor.
    // Into where it stays: what was just written by halves and is then read as a whole, a processor waits for.
    #[inline]
    fn digest(&self, request: &Request<'_>, anchored: &mut Anchored, into: &mut (Digest, Keyed)) {
        let Request { caller, policy, .. } = *request;
        *into = match self.alone {
            Some(Alone::User) => self.digest_one(caller.user, &mut anchored.user, request),
            Some(Alone::Tenant) => self.digest_one(caller.tenant, &mut anchored.tenant, request),
            Some(Alone::Address) => match caller.group() {
                Some(group) => {
                    (self.ready.digest(&group.to_bytes()).in_partition(policy.anchors.address(group)), Keyed::Whole)
                }
                None => (self.ready.digest(b""), Keyed::Missing),
            },
            Some(Alone::Nothing) => (self.ready.digest(b"").in_partition(NOWHERE), Keyed::Whole),
            None => self.digest_all(request, anchored),
        };
    }

    /// The digest of a single name is also that of the anchor.
    #[inline]
    fn digest_one(
        &self,
        value: Option<&str>,
        anchored: &mut Option<Digest>,
        Request { caller, policy, .. }: &Request<'_>,
    ) -> (Digest, Keyed) {
        if let Some(value) = value {
            let digest = *anchored.get_or_insert_with(|| self.ready.digest(value.as_bytes()));
            return (digest, Keyed::Whole);
        }
        match caller.group() {
            Some(group) if self.floors => {
                let digest = self.floor.digest(&group.to_bytes());
                (digest.in_partition(policy.anchors.address(group)), Keyed::Floored)
            }
            _ => (self.ready.digest(b""), Keyed::Missing),
        }
    }

    fn digest_all(&self, request: &Request<'_>, anchored: &mut Anchored) -> (Digest, Keyed) {
        let Request { caller, rule, policy } = *request;
        let mut key = self.secret.go_on();
        if self.category {
            key.text(Part::Category, caller.category);
        }
        if self.scoped {
            // No tenant has an empty name.
            key.text(Part::Tenant, caller.tenant.unwrap_or_default());
        }
        let keyed = caller.add_parts(&mut key, &self.per, rule, policy, self.floors);
        let digest = key.finish();
        let partition = match &self.anchor {
            Anchor::Rule => NOWHERE,
            Anchor::Name { tenant, user } => {
                let tenant = caller.tenant.filter(|_| *tenant);
                let user = caller.user.filter(|_| *user);
                anchored.by_name((tenant, user), &self.per, request).unwrap_or(digest.partition())
            }
            Anchor::Whole => request.floor(keyed).unwrap_or(digest.partition()),
            Anchor::Identity(per, secret) => {
                let mut key = secret.go_on();
                let keyed = caller.add_parts(&mut key, per, rule, policy, self.floors);
                request.floor(keyed).unwrap_or(key.finish().partition())
            }
        };
        (digest.in_partition(partition), keyed)
    }
}

/// In the digest of what tells no callers apart: a rule adds its own partition.
const NOWHERE: Partition = Partition::from_u16(0);

/// What is digested: a request as one rule of a policy sees it.
#[derive(Debug, Clone, Copy)]
struct Request<'r> {
    caller: &'r Caller<'r>,
    rule: &'r Rule,
    policy: &'r Policy,
}

impl Request<'_> {
    /// The partition of the address that stands in for what the request lacks.
    fn floor(&self, keyed: Keyed) -> Option<Partition> {
        let group = self.caller.group().filter(|_| keyed == Keyed::Floored);
        group.map(|group| self.policy.anchors.address(group))
    }
}

/// The digests of a request's anchors that are known already.
#[derive(Debug, Default)]
struct Anchored {
    tenant: Option<Digest>,
    user: Option<Digest>,
}

impl Anchored {
    /// The partition of the tenant, else of the user, where they are counted by; else of the narrowest block of addresses
    /// that is counted by; else of the address that stands in for them.
    fn by_name(
        &mut self,
        (tenant, user): (Option<&str>, Option<&str>),
        per: &[Per],
        Request { caller, policy, .. }: &Request<'_>,
    ) -> Option<Partition> {
        if let Some(name) = tenant {
            return Some(self.tenant.get_or_insert_with(|| policy.anchors.tenant(name)).partition());
        }
        if let Some(name) = user {
            return Some(self.user.get_or_insert_with(|| policy.anchors.user(name)).partition());
        }
        let narrowest = per.iter().filter_map(|per| caller.group_of(per)).max_by_key(|group| group.prefix);
        narrowest.or_else(|| caller.group()).map(|group| policy.anchors.address(group))
    }
}

/// What a request has of each combination, digested when first asked for.
#[derive(Debug)]
pub(crate) struct Identities<'c> {
    caller: &'c Caller<'c>,
    policy: &'c Policy,
    known: &'c mut Known,
}

/// What of that is known already.
#[derive(Debug)]
pub(crate) struct Known {
    bits: u8,
    digests: [(Digest, Keyed); REMEMBERED],
    anchored: Anchored,
}

impl Known {
    #[inline]
    pub(crate) fn nothing() -> Self {
        let digests = [(Digest::from_u128(0), Keyed::Missing); REMEMBERED];
        Self { bits: 0, digests, anchored: Anchored::default() }
    }

    /// Digests what nearly every request is counted by, before anything else is done: `expect` then hears of it early. Of
    /// the caller no more need be known than who is calling.
    #[inline]
    pub(crate) fn learn(&mut self, caller: &Caller<'_>, policy: &Policy, mut expect: impl FnMut(Digest)) {
        let Some(rule) = policy.rules.first() else { return };
        for &place in policy.early.iter() {
            if let (Some(counted), Some(digest)) = (policy.counted.get(place), self.digests.get_mut(place)) {
                counted.digest(&Request { caller, rule, policy }, &mut self.anchored, digest);
                self.bits |= bit(place);
            }
        }
        // All at once: a processor finds several pages in the time that it takes for one.
        for &place in policy.early.iter() {
            if let Some((digest, _)) = self.digests.get(place) {
                expect(*digest);
            }
        }
    }

    /// Forgets all that takes more than who is calling.
    pub(crate) fn forget_what_was_asked(&mut self, policy: &Policy) {
        for (place, counted) in policy.counted.iter().enumerate().take(REMEMBERED) {
            if !counted.named {
                self.bits &= !bit(place);
            }
        }
    }

    #[inline]
    fn has(&self, place: usize) -> bool {
        self.bits & bit(place) != 0
    }
}

impl<'c> Identities<'c> {
    #[inline]
    pub(crate) fn new(known: &'c mut Known, caller: &'c Caller<'c>, policy: &'c Policy) -> Self {
        Self { caller, policy, known }
    }

    /// Whether a combination was digested before.
    #[inline]
    pub(crate) fn knows(&self, place: usize) -> bool {
        self.known.has(place)
    }

    /// The digest of a combination for this rule, and how much of it the request has.
    #[inline]
    pub(crate) fn of(&mut self, place: usize, rule: &Rule) -> Option<(Digest, Keyed)> {
        if self.knows(place) {
            return self.known.digests.get(place).copied();
        }
        let counted = self.policy.counted.get(place)?;
        let mut digest = (Digest::from_u128(0), Keyed::Missing);
        let request = Request { caller: self.caller, rule, policy: self.policy };
        counted.digest(&request, &mut self.known.anchored, &mut digest);
        if let Some(remembered) = self.known.digests.get_mut(place)
            && counted.shared
        {
            *remembered = digest;
            self.known.bits |= bit(place);
        }
        Some(digest)
    }
}

/// The bit of a combination that is remembered; none for the others.
#[inline]
fn bit(place: usize) -> u8 {
    u32::try_from(place).ok().and_then(|place| 1u8.checked_shl(place)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::facts::Facts;
    use crate::key::DigestKey;
    use proptest::prelude::*;

    /// Rules that count by all sorts of combinations, some of them by the same.
    fn policy() -> Policy {
        let pers =
            ["'ip'", "'tenant'", "'user'", "'user'", "'tenant', 'user'", "'user', 'tenant'", "'fact:a'", "'fact:b'"];
        let rules = pers.iter().enumerate().map(|(index, per)| {
            format!("[[rule]]\nname = 'r{index}'\nlayer = 'user'\nper = [{per}]\nlimit = '5/min'\n")
        });
        let text: String = rules.collect();
        Policy::parse(&text, &|_| None).unwrap().with_key(DigestKey::new([3; 16]))
    }

    fn name() -> impl Strategy<Value = Option<String>> {
        // The last one is spelled like the bytes of an address.
        let address = Just("\u{20}\u{4}\u{a}\u{0}\u{0}\u{1}".to_owned());
        prop::option::of(prop_oneof![3 => "[ab:\u{0}]{1,3}", 1 => address])
    }

    proptest! {
        /// Two charges share a key only if they are the same rule's and are counted by the same. Woken by digesting an
        /// address that stands in under the same secret as a name, and by not laying the rule's own secret over it.
        #[test]
        fn every_rule_and_identity_has_a_key_of_its_own(
            people in prop::collection::vec((name(), name(), name(), 0u8..3), 1..6),
        ) {
            let policy = policy();
            let mut seen = BTreeMap::new();
            for (tenant, user, fact, host) in &people {
                let facts = [("a", fact.as_deref().unwrap_or("")), ("b", fact.as_deref().unwrap_or(""))];
                let ip = std::net::IpAddr::from([10, 0, 0, *host]);
                let asked = Facts {
                    ip: Some(ip), tenant: tenant.as_deref(), user: user.as_deref(), facts: &facts, ..Facts::default()
                };
                for charge in policy.plan(&asked).unwrap().met() {
                    let caller = Caller::new(&asked, &policy);
                    let part = |per| caller.part_text(per, charge.rule, &policy).ok_or(ip);
                    let meant = (charge.index, charge.rule.per.iter().map(part).collect::<Vec<_>>());
                    let known = seen.entry(charge.key).or_insert_with(|| meant.clone());
                    prop_assert_eq!(known, &meant);
                }
            }
        }
    }

    /// Woken by laying a rule's secret over all of the digest, and by leaving more of that than the beginnings.
    #[test]
    fn keys_of_one_identity_begin_alike_and_go_on_differently() {
        let policy = policy();
        let mut expected = Vec::new();
        let mut plan = crate::plan::Plan::new(&policy, crate::plan::Verb::Check);
        let facts = Facts { ip: Some([10, 0, 0, 1].into()), tenant: Some("t"), user: Some("u"), ..Facts::default() };
        plan.fill_expecting(&facts, |digest| expected.push(digest)).unwrap();
        let beginnings = |digest: Digest| digest.halves().map(|half| half >> 32);
        let begins = |digest: Digest| (beginnings(digest)[0] >> 16, beginnings(digest)[1]);
        let (keys, users): (Vec<Digest>, Vec<usize>) =
            plan.met().iter().map(|charge| (charge.key, charge.rule.counted)).unzip();
        assert_eq!(users[2], users[3]);
        assert_eq!(begins(keys[2]), begins(keys[3]));
        let [high, low] = keys[2].halves();
        let [other_high, other_low] = keys[3].halves();
        assert!(high << 16 != other_high << 16 && low << 32 != other_low << 32);
        // Whoever fetches ahead hears of every one of them.
        assert!(keys.iter().all(|key| expected.iter().any(|digest| begins(*digest) == begins(*key))));
        assert!(begins(keys[0]) != begins(keys[1]) && begins(keys[1]) != begins(keys[2]));
    }

    #[test]
    fn what_rules_count_by_alike_is_digested_once() {
        let policy = policy();
        let places: Vec<usize> = policy.rules.iter().map(|rule| rule.counted).collect();
        assert_eq!(places, [0, 1, 2, 2, 3, 4, 5, 6]);
    }
}
