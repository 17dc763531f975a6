//! The identities that budgets are counted by. Rules with the same `per` share one, and it is digested once per request.

use crate::caller::{Caller, Keyed};
use crate::key::{Digest, DigestKey, Digester, Part, Partition, identity_secret};
use crate::policy::{Per, Policy, Rule, UserScope};

/// The number of digests that are cached within one request. Typical policies count by fewer identities.
pub(crate) const REMEMBERED: usize = 8;

/// One combination of parts that budgets are counted by.
#[derive(Debug, Clone)]
pub(crate) struct CountedBy {
    per: Vec<Per>,
    /// Whether the category is a part, as for limits by tier.
    category: bool,
    /// Whether the digest is the same for every rule. An endpoint depends on the rule's own patterns.
    shared: bool,
    /// Whether users belong to tenants and the tenant is not itself a part, so that it is added to the digest.
    scoped: bool,
    /// Whether the address replaces a missing part.
    floors: bool,
    /// Whether a rule that matches every request counts by this.
    common: bool,
    /// Whether it needs only the caller's [names](Caller::named), not the path or the category.
    named: bool,
    /// The single part, if there is at most one: it is digested without framing, because the secret belongs to this combination.
    alone: Option<SinglePart>,
    secret: DigestKey,
    /// The same secret, with its state precomputed.
    ready: Digester,
    /// The secret for an address that replaces a single part.
    floor: Digester,
    anchor: Anchor,
}

/// The parts that decide the partition of an identity.
#[derive(Debug, Clone)]
enum Anchor {
    /// The rule itself: no part identifies a caller.
    Rule,
    /// The tenant or the user, if they are parts, else the address.
    Name { tenant: bool, user: bool },
    /// The whole identity.
    Whole,
    /// The parts that identify a caller, sorted, and the secret that they are digested under.
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

/// The most common identities: a single part, or none.
#[derive(Debug, Clone, Copy)]
enum SinglePart {
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
        // Another secret for an address that replaces a part. Under the same one, a user whose name is spelled like the
        // bytes of an address would share its budget.
        builder.text(Part::Floor, "");
        let shared = !per.contains(&Per::Endpoint);
        // These are found after the names of the caller, and may differ between the readings of a path.
        let spelled = |per: &Per| matches!(per, Per::Tier | Per::Category | Per::Endpoint | Per::Method | Per::Host);
        let named = !category && !per.iter().any(spelled);
        let alone = match (per.as_slice(), category) {
            ([], false) => Some(SinglePart::Nothing),
            ([Per::Ip], false) => Some(SinglePart::Address),
            ([Per::Tenant], false) => Some(SinglePart::Tenant),
            // A scoped user has two parts, the tenant and the name, which need framing: without it `a` + `bc` is `ab` +
            // `c`.
            ([Per::User], false) if !scoped => Some(SinglePart::User),
            _ => None,
        };
        let (ready, floor) = (secret.digester(), builder.derive().digester());
        let anchor = Anchor::new(&per, category, scoped, key);
        Self { per, category, shared, scoped, floors, common: false, named, alone, secret, ready, floor, anchor }
    }

    /// Sets whether a rule that matches every request counts by this.
    pub(crate) fn common(mut self, common: bool) -> Self {
        self.common = common;
        self
    }

    /// Returns the index of a combination, which is added if it is new.
    pub(crate) fn find_or_add(all: &mut Vec<Self>, own: Self) -> usize {
        // The scope and the key are those of the policy, the same for all of its rules.
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

    /// Whether nearly every request needs its digest, and it can be computed first.
    pub(crate) fn is_early(&self) -> bool {
        self.common && self.named
    }

    /// Digests the identity of a request, in the partition of its anchor.
    // Writes in place: returning the digest would store it in halves and read it back whole, which stalls store forwarding.
    #[inline]
    fn digest(&self, request: &Request<'_>, anchored: &mut Anchored, into: &mut (Digest, Keyed)) {
        let Request { caller, policy, .. } = *request;
        *into = match self.alone {
            Some(SinglePart::User) => self.digest_one(caller.user, &mut anchored.user, request),
            Some(SinglePart::Tenant) => self.digest_one(caller.tenant, &mut anchored.tenant, request),
            Some(SinglePart::Address) => match caller.group() {
                Some(group) => {
                    (self.ready.digest(&group.to_bytes()).in_partition(policy.anchors.address(group)), Keyed::Whole)
                }
                // A request without an address has no key here. The rule decides by `on_missing` what becomes of it.
                None => (self.ready.digest(b""), Keyed::Missing),
            },
            Some(SinglePart::Nothing) => (self.ready.digest(b"").in_partition(NOWHERE), Keyed::Whole),
            None => self.digest_all(request, anchored),
        };
    }

    /// Digests a single name. Its digest is also that of the anchor.
    #[inline]
    fn digest_one(
        &self,
        value: Option<&str>,
        anchored: &mut Option<Digest>,
        Request { caller, policy, .. }: &Request<'_>,
    ) -> (Digest, Keyed) {
        if let Some(value) = value {
            // No partition is set: its own bits are the anchor's.
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
                // Only the parts that identify the caller, so that all budgets of one caller are in one partition,
                // whatever endpoint or method they count by.
                let mut key = secret.go_on();
                let keyed = caller.add_parts(&mut key, per, rule, policy, self.floors);
                request.floor(keyed).unwrap_or(key.finish().partition())
            }
        };
        (digest.in_partition(partition), keyed)
    }
}

/// The partition of an identity that does not distinguish callers: the rule adds its own.
const NOWHERE: Partition = Partition::from_u16(0);

/// A request as one rule of a policy sees it.
#[derive(Debug, Clone, Copy)]
struct Request<'r> {
    caller: &'r Caller<'r>,
    rule: &'r Rule,
    policy: &'r Policy,
}

impl Request<'_> {
    /// Returns the partition of the address, if it replaces a missing part.
    fn floor(&self, keyed: Keyed) -> Option<Partition> {
        let group = self.caller.group().filter(|_| keyed == Keyed::Floored);
        group.map(|group| self.policy.anchors.address(group))
    }
}

/// The cached digests of a request's tenant and user.
#[derive(Debug, Default)]
struct Anchored {
    tenant: Option<Digest>,
    user: Option<Digest>,
}

impl Anchored {
    /// Returns the partition of the tenant, or one of those that its users are spread over; else of the user, if they are parts; else of the narrowest address block among the
    /// parts; else of the address that replaces them.
    fn by_name(
        &mut self,
        (tenant, user): (Option<&str>, Option<&str>),
        per: &[Per],
        Request { caller, policy, .. }: &Request<'_>,
    ) -> Option<Partition> {
        if let Some(name) = tenant {
            let own = self.tenant.get_or_insert_with(|| policy.anchors.tenant(name)).partition();
            let Some((user, over)) = user.zip(policy.tiers.spread(name)) else { return Some(own) };
            let user = *self.user.get_or_insert_with(|| policy.anchors.user(user));
            return Some(own.spread(user, over));
        }
        if let Some(name) = user {
            return Some(self.user.get_or_insert_with(|| policy.anchors.user(name)).partition());
        }
        caller.narrowest_group(per).or_else(|| caller.group()).map(|group| policy.anchors.address(group))
    }
}

/// The identities of a request, each digested when it is first needed.
#[derive(Debug)]
pub(crate) struct Identities<'c> {
    caller: &'c Caller<'c>,
    policy: &'c Policy,
    known: &'c mut Known,
}

/// The digests that were computed for a request so far.
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

    /// Digests the identities that nearly every request needs, before anything else is done, and passes them to `expect`, which
    /// can prefetch their memory. Only the caller's names must be known.
    #[inline]
    pub(crate) fn learn(&mut self, caller: &Caller<'_>, policy: &Policy, mut expect: impl FnMut(Digest)) {
        // Early identities depend on no rule, so any rule will do.
        let Some(rule) = policy.rules.first() else { return };
        for &place in policy.early.iter() {
            if let (Some(counted), Some(digest)) = (policy.counted.get(place), self.digests.get_mut(place)) {
                counted.digest(&Request { caller, rule, policy }, &mut self.anchored, digest);
                self.bits |= bit(place);
            }
        }
        // All together: a processor resolves several cache and TLB misses in parallel.
        for &place in policy.early.iter() {
            if let Some((digest, _)) = self.digests.get(place) {
                expect(*digest);
            }
        }
    }

    /// Drops the digests that depend on the path, for another reading of it.
    pub(crate) fn forget_path_dependent(&mut self, policy: &Policy) {
        for (place, counted) in policy.counted.iter().enumerate().take(REMEMBERED) {
            // Another reading has another path, category and endpoint, but the same names.
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

    /// Whether a digest is cached.
    #[inline]
    pub(crate) fn knows(&self, place: usize) -> bool {
        self.known.has(place)
    }

    /// Returns the digest of an identity for this rule, and whether the request has all parts of it.
    #[inline]
    pub(crate) fn of(&mut self, place: usize, rule: &Rule) -> Option<(Digest, Keyed)> {
        // A rule met before has computed it, or `learn` has.
        if self.knows(place) {
            return self.known.digests.get(place).copied();
        }
        let counted = self.policy.counted.get(place)?;
        let mut digest = (Digest::from_u128(0), Keyed::Missing);
        let request = Request { caller: self.caller, rule, policy: self.policy };
        counted.digest(&request, &mut self.known.anchored, &mut digest);
        // An identity that is not shared depends on the patterns of its rule. Cached, it would charge the key of one
        // rule for another.
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
        plan.fill_with_prefetch(&facts, |digest| expected.push(digest)).unwrap();
        let beginnings = |digest: Digest| digest.halves().map(|half| half >> 32);
        let begins = |digest: Digest| (beginnings(digest)[0] >> 16, beginnings(digest)[1]);
        let (keys, users): (Vec<Digest>, Vec<usize>) =
            plan.met().iter().map(|charge| (charge.key, charge.rule.counted)).unzip();
        assert_eq!(users[2], users[3]);
        assert_eq!(begins(keys[2]), begins(keys[3]));
        let [high, low] = keys[2].halves();
        let [other_high, other_low] = keys[3].halves();
        assert!(high << 16 != other_high << 16 && low << 32 != other_low << 32);
        // Every key's memory can be prefetched.
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
