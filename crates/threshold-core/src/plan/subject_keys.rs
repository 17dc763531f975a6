//! Everything that is stored of one subject, found by the name that operators know it by.

use std::collections::{BTreeMap, BTreeSet};

use crate::address::parse_address;
use crate::caller::{Caller, DEFAULT_CATEGORY, Keyed};
use crate::facts::Facts;
use crate::key::Digest;
use crate::limit::Limit;
use crate::policy::{Identities, Known, Layer, Measure, Per, Policy, Rule};

/// What is stored of one subject alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SubjectKeys {
    /// Its budgets, with the limit each is under.
    pub balances: BTreeMap<Digest, Limit>,
    /// Its standings.
    pub standings: BTreeSet<Digest>,
}

impl SubjectKeys {
    /// The keys of both.
    pub fn all(&self) -> impl Iterator<Item = Digest> {
        self.balances.keys().chain(&self.standings).copied()
    }
}

impl Policy {
    /// The balances and standings that belong to one subject alone, named as operators name it: by layer and key. The layer
    /// says what the key is; rules of every layer that count by it are searched.
    ///
    /// A rule's budget belongs to the subject where the key gives everything the rule counts by, besides categories and
    /// tiers, which are all tried; a wider or narrower budget is shared with others and stays out. What an address stands in
    /// for where somebody has no name is the address's own. A user's name is written as
    /// [`UserScope`](crate::policy::UserScope) says; one that is not names nobody, and [`subject_key`](Self::subject_key)
    /// says why.
    #[must_use]
    pub fn keys_of(&self, layer: Layer, key: &str) -> SubjectKeys {
        let mut keys = SubjectKeys::default();
        if layer == Layer::Endpoint
            && let Some((method, path)) = key.split_once(':').filter(|(_, path)| path.starts_with('/'))
        {
            let method = Some(method).filter(|method| *method != "*");
            self.add_budgets(layer, &Facts { method, path: Some(path), ..Facts::default() }, &mut keys);
        }
        self.with_facts_of(layer, key, |facts| {
            self.add_budgets(layer, facts, &mut keys);
            keys.standings.extend(self.standings_of(layer, facts));
        });
        keys
    }

    /// The standings of one subject, named as for [`keys_of`](Self::keys_of), after a rotation: the digest of each in `old`,
    /// the same policy under the old key, and here.
    #[must_use]
    pub fn rekeyed_standings(&self, old: &Self, layer: Layer, key: &str) -> Vec<(Digest, Digest)> {
        let pairs = self.with_facts_of(layer, key, |facts| {
            old.standings_of(layer, facts).into_iter().zip(self.standings_of(layer, facts)).collect()
        });
        pairs.unwrap_or_default()
    }

    /// Shows what a request of this subject would say of it; `None` where the name is nobody's.
    fn with_facts_of<T>(&self, layer: Layer, key: &str, show: impl FnOnce(&Facts<'_>) -> T) -> Option<T> {
        let named;
        let mut facts = Facts::default();
        match layer {
            Layer::Global => {}
            Layer::Edge => facts.ip = parse_address(key),
            Layer::Tenant => facts.tenant = Some(key),
            Layer::User => {
                named = self.identity().user_scope.read(key).ok()?;
                (facts.tenant, facts.user) = (named.0.as_deref(), Some(&*named.1));
            }
            Layer::Endpoint => facts.endpoint = Some(key),
        }
        Some(show(&facts))
    }

    /// In the order of the policy's ladders.
    fn standings_of(&self, layer: Layer, facts: &Facts<'_>) -> Vec<Digest> {
        let mut standings = Vec::new();
        let caller = Caller::new(facts, self);
        let mut known = Known::nothing();
        let mut identities = Identities::new(&mut known, &caller, self);
        for subject in self.subjects.iter() {
            let keyed = self.rules.first().and_then(|rule| identities.of(subject.counted, rule));
            if keyed.is_some_and(|(_, keyed)| belongs(layer, &subject.per, keyed)) {
                standings.extend(self.subject(subject, &mut identities).map(|subject| subject.key));
            }
        }
        standings
    }

    /// The category and the tier come with each request, and the key of a limit by tier depends on both.
    fn add_budgets(&self, layer: Layer, facts: &Facts<'_>, keys: &mut SubjectKeys) {
        let categories: BTreeSet<&str> = self.categories.iter().map(|own| own.name.as_ref()).collect();
        let tiers = self.tiers.written().tiers.keys().map(|name| Some(name.as_ref()));
        // Its own tier first: the limits of that one are the likeliest.
        let tiers: Vec<Option<&str>> = [None].into_iter().chain(tiers).collect();
        for category in categories.into_iter().chain(self.tiers.written().categories()).chain([DEFAULT_CATEGORY]) {
            let facts = Facts { category: Some(category), ..*facts };
            for tier in &tiers {
                let mut caller = Caller::new(&facts, self);
                caller.tier = tier.or(caller.tier);
                self.add_budgets_of(layer, &caller, tier.is_none(), keys);
            }
        }
    }

    fn add_budgets_of(&self, layer: Layer, caller: &Caller<'_>, of_others: bool, keys: &mut SubjectKeys) {
        let mut known = Known::nothing();
        let mut identities = Identities::new(&mut known, caller, self);
        for rule in self.rules.iter() {
            let Some((identity, keyed)) = identities.of(rule.counted, rule) else { continue };
            if !belongs(layer, &rule.per, keyed) {
                continue;
            }
            for limit in self.possible_limits(rule, caller, of_others) {
                if let Some(prefix) = rule.prefix(limit) {
                    keys.balances.entry(prefix.over(identity)).or_insert(*limit);
                }
            }
        }
    }

    /// The limits that a rule may have counted this caller under: its own, and those that requests bring along. One for each
    /// algorithm is enough.
    fn possible_limits<'p>(&'p self, rule: &'p Rule, caller: &Caller<'_>, of_others: bool) -> Vec<&'p Limit> {
        let mut limits: Vec<&Limit> = Vec::new();
        let mut add = |limit: &'p Limit| {
            if limits.iter().all(|known| known.algorithm() != limit.algorithm()) {
                limits.push(limit);
            }
        };
        if let Some((measured, _)) = self.limit_of(rule, caller) {
            add(&measured.limit);
        }
        match &rule.measure {
            Measure::Fixed(measured) => add(&measured.limit),
            Measure::Tier(shape) if of_others => self.tiers.owned(*shape, caller.category).for_each(add),
            Measure::Tier(_) | Measure::Unlimited => {}
        }
        limits
    }
}

/// Whether what is counted by `per` is this subject's alone.
fn belongs(layer: Layer, per: &[Per], keyed: Keyed) -> bool {
    match (keyed, layer) {
        (Keyed::Missing, _) => false,
        (Keyed::Floored, layer) => layer == Layer::Edge,
        (Keyed::Whole, Layer::Global) => per.is_empty(),
        (Keyed::Whole, Layer::Edge) => per.iter().any(|per| matches!(per, Per::Ip | Per::IpPrefix(_))),
        (Keyed::Whole, Layer::Tenant) => per.contains(&Per::Tenant),
        (Keyed::Whole, Layer::User) => per.contains(&Per::User),
        (Keyed::Whole, Layer::Endpoint) => per.contains(&Per::Endpoint),
    }
}
