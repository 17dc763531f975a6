//! The keys of everything that is stored for one subject, found by the name that operators use.

use std::collections::{BTreeMap, BTreeSet};

use crate::address::parse_address;
use crate::caller::{Caller, DEFAULT_CATEGORY, Keyed};
use crate::facts::Facts;
use crate::key::Digest;
use crate::limit::{Limit, Unit};
use crate::policy::{Identities, Known, Layer, Measure, Per, Policy, Rule, SubjectRule};

/// Receives a budget: its rule, a caller that it is for, its key, its limit and what the limit counts.
pub(crate) type ShowBudget<'s, 'p> = dyn FnMut(&'p Rule, &Caller<'_>, Digest, (Limit, Unit)) + 's;

/// The keys of what is stored for one subject alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SubjectKeys {
    /// The keys of its budgets, each with its limit.
    pub balances: BTreeMap<Digest, Limit>,
    /// The keys of its standings.
    pub standings: BTreeSet<Digest>,
}

impl SubjectKeys {
    /// Returns the keys of both.
    pub fn all(&self) -> impl Iterator<Item = Digest> {
        self.balances.keys().chain(&self.standings).copied()
    }
}

impl Policy {
    /// Returns the keys of the balances and standings that belong to one subject alone. `layer` and `key` name the subject as
    /// operators do. The layer tells what the key is; rules of every layer that count by it are searched.
    ///
    /// A rule's budget belongs to the subject where `key` gives everything that the rule counts by, apart from categories and
    /// tiers, which are all tried. A wider or narrower budget is shared with others and is left out. A budget in which an
    /// address stands in for a missing user belongs to the address. A user's name is written as
    /// [`UserScope`](crate::policy::UserScope) defines. For any other name there are no keys, and
    /// [`subject_key`](Self::subject_key) returns the reason.
    #[must_use]
    pub fn keys_of(&self, layer: Layer, key: &str) -> SubjectKeys {
        let mut keys = SubjectKeys::default();
        self.each_budget_of(layer, key, &mut |_, _, key, (limit, _)| {
            keys.balances.entry(key).or_insert(limit);
        });
        keys.standings.extend(self.standings_by_ladder(layer, key).into_iter().map(|(_, key)| key));
        keys
    }

    /// Returns the keys of the budgets in which a rule counts a request with these facts, whatever its `match` says. There are none
    /// if no rule has this name, or if the facts lack what it counts by.
    #[must_use]
    pub fn keys_of_rule(&self, rule: &str, facts: &Facts<'_>) -> SubjectKeys {
        let mut keys = SubjectKeys::default();
        let show: &mut ShowBudget<'_, '_> = &mut |_, _, key, (limit, _)| {
            keys.balances.entry(key).or_insert(limit);
        };
        self.add_budgets_of(Wanted::Rule(rule), &Caller::new(facts, self), false, show);
        keys
    }

    /// Calls `show` with the budgets of one subject. A budget may come more than once; the first time it has the subject's own
    /// limit.
    pub(crate) fn each_budget_of<'p>(&'p self, layer: Layer, key: &str, show: &mut ShowBudget<'_, 'p>) {
        if layer == Layer::Endpoint
            && let Some((method, path)) = key.split_once(':').filter(|(_, path)| path.starts_with('/'))
        {
            let method = Some(method).filter(|method| *method != "*");
            self.add_budgets(layer, &Facts { method, path: Some(path), ..Facts::default() }, show);
        }
        // Also for a method and a path: an application may send that very text as its endpoint.
        self.with_facts_of(layer, key, |facts| self.add_budgets(layer, facts, show));
    }

    /// Returns the keys of one subject's standings, each with the ladder's subject, in the order of the policy's ladders.
    pub(crate) fn standings_by_ladder(&self, layer: Layer, key: &str) -> Vec<(&SubjectRule, Digest)> {
        self.with_facts_of(layer, key, |facts| self.standings_of(layer, facts)).unwrap_or_default()
    }

    /// Returns the keys of one subject's standings before and after a rotation of the secret, as pairs. `old` is the same policy
    /// under the old secret, and the subject is named as for [`keys_of`](Self::keys_of).
    #[must_use]
    pub fn rekeyed_standings(&self, old: &Self, layer: Layer, key: &str) -> Vec<(Digest, Digest)> {
        let pairs = self.with_facts_of(layer, key, |facts| {
            let keys =
                |policy: &Self| policy.standings_of(layer, facts).into_iter().map(|(_, key)| key).collect::<Vec<_>>();
            // Both lists follow the policy's ladders, so equal positions are the same ladder.
            keys(old).into_iter().zip(keys(self)).collect()
        });
        pairs.unwrap_or_default()
    }

    /// Calls `show` with the facts of a request by this subject. Returns `None` where the name cannot be a subject's.
    pub(crate) fn with_facts_of<T>(&self, layer: Layer, key: &str, show: impl FnOnce(&Facts<'_>) -> T) -> Option<T> {
        let named;
        let mut facts = Facts::default();
        match layer {
            Layer::Global => {}
            Layer::Edge => facts.ip = parse_address(key),
            Layer::Tenant => facts.tenant = Some(key),
            Layer::User => {
                // Under `user_scope = "tenant"` the name holds the tenant as well. Both are needed, because the key of
                // a user's budget depends on both.
                named = self.identity().user_scope.read(key).ok()?;
                (facts.tenant, facts.user) = (named.0.as_deref(), Some(&*named.1));
            }
            Layer::Endpoint => facts.endpoint = Some(key),
        }
        Some(show(&facts))
    }

    /// Returns the keys of a subject's standings, in the order of the policy's ladders.
    fn standings_of(&self, layer: Layer, facts: &Facts<'_>) -> Vec<(&SubjectRule, Digest)> {
        let mut standings = Vec::new();
        let caller = Caller::new(facts, self);
        let mut known = Known::nothing();
        let mut identities = Identities::new(&mut known, &caller, self);
        for subject in self.subjects.iter() {
            // Any rule will do: only an endpoint depends on the rule, and no subject is counted by endpoint.
            let keyed = self.rules.first().and_then(|rule| identities.of(subject.counted, rule));
            if keyed.is_some_and(|(_, keyed)| belongs(layer, &subject.per, keyed)) {
                standings.extend(self.subject(subject, &mut identities).map(|keyed| (subject, keyed.key)));
            }
        }
        standings
    }

    /// Adds the budgets under every category and tier. Both come with each request, and the key of a limit by tier depends on
    /// them.
    fn add_budgets<'p>(&'p self, layer: Layer, facts: &Facts<'_>, show: &mut ShowBudget<'_, 'p>) {
        let categories: BTreeSet<&str> = self.categories.iter().map(|own| own.name.as_ref()).collect();
        let tiers = self.tiers.written().tiers.keys().map(|name| Some(name.as_ref()));
        // The subject's own tier comes first, because the first limit found for a key is the one that is returned.
        let tiers: Vec<Option<&str>> = [None].into_iter().chain(tiers).collect();
        for category in categories.into_iter().chain(self.tiers.written().categories()).chain([DEFAULT_CATEGORY]) {
            let facts = Facts { category: Some(category), ..*facts };
            for tier in &tiers {
                let mut caller = Caller::new(&facts, self);
                // Set after the caller was made, which replaces the tier of a request by the subject's own.
                caller.tier = tier.or(caller.tier);
                self.add_budgets_of(Wanted::Subject(layer), &caller, tier.is_none(), show);
            }
        }
    }

    fn add_budgets_of<'p>(
        &'p self,
        wanted: Wanted<'_>,
        caller: &Caller<'_>,
        of_others: bool,
        show: &mut ShowBudget<'_, 'p>,
    ) {
        let mut known = Known::nothing();
        let mut identities = Identities::new(&mut known, caller, self);
        for rule in self.rules.iter() {
            let Some((identity, keyed)) = identities.of(rule.counted, rule) else { continue };
            let is_wanted = match wanted {
                Wanted::Subject(layer) => belongs(layer, &rule.per, keyed),
                Wanted::Rule(name) => *rule.name == *name && keyed != Keyed::Missing,
            };
            if !is_wanted {
                continue;
            }
            let unit = self.limit_of(rule, caller).map_or(Unit::Count, |(measured, _)| measured.cost.unit());
            for limit in self.possible_limits(rule, caller, of_others) {
                if let Some(prefix) = rule.prefix(limit) {
                    let key = prefix.over(identity);
                    (0..rule.shards).for_each(|shard| show(rule, caller, key.in_shard(shard), (*limit, unit)));
                }
            }
        }
    }

    /// Returns the limits under which a rule may have counted this caller: its own, and those of tiers that requests can name.
    /// One for each algorithm is enough, because the key depends on the algorithm and not on the figures.
    fn possible_limits<'p>(&'p self, rule: &'p Rule, caller: &Caller<'_>, of_others: bool) -> Vec<&'p Limit> {
        let mut limits: Vec<&Limit> = Vec::new();
        let mut add = |limit: &'p Limit| {
            if limits.iter().all(|known| known.algorithm() != limit.algorithm()) {
                limits.push(limit);
            }
        };
        if let Ok((measured, _)) = self.limit_of(rule, caller) {
            add(measured.charged());
        }
        match &rule.measure {
            Measure::Fixed(measured) => add(measured.charged()),
            Measure::Tier(shape) | Measure::NamedByTier(shape) if of_others => {
                self.tiers.owned(*shape, caller.category).for_each(add);
            }
            Measure::Tier(_) | Measure::NamedByTier(_) | Measure::Unlimited => {}
        }
        limits
    }
}

/// Which budgets of a caller are searched.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    /// Those that belong to a subject of this layer alone.
    Subject(Layer),
    /// Those of the rule with this name.
    Rule(&'a str),
}

/// Returns whether a budget counted by `per` is this subject's alone.
fn belongs(layer: Layer, per: &[Per], keyed: Keyed) -> bool {
    match (keyed, layer) {
        (Keyed::Missing, _) => false,
        // The key has the address in place of a name, so it belongs to the address, whatever `per` says.
        (Keyed::Floored, layer) => layer == Layer::Edge,
        (Keyed::Whole, Layer::Global) => per.is_empty(),
        (Keyed::Whole, Layer::Edge) => per.iter().any(|per| matches!(per, Per::Ip | Per::IpPrefix(_))),
        (Keyed::Whole, Layer::Tenant) => per.contains(&Per::Tenant),
        (Keyed::Whole, Layer::User) => per.contains(&Per::User),
        (Keyed::Whole, Layer::Endpoint) => per.contains(&Per::Endpoint),
    }
}
