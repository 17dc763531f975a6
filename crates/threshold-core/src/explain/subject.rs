//! Explains what a policy holds against one subject: its budgets, its ladders, and the list that it is on.

use std::fmt;

use super::{TIER, Why};
use crate::caller::Caller;
use crate::facts::Facts;
use crate::key::Digest;
use crate::ladder::{Ladder, Rung, Standing};
use crate::limit::{Limit, Unit};
use crate::policy::{Layer, ListEntry, Listed, NoLimit, OnMissing, Per, Policy, Rule, Who};
use crate::time::Timestamp;

/// A budget that belongs to one subject alone.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SubjectBudget<'p> {
    /// The rule.
    pub rule: &'p Rule,
    /// The key of the balance.
    pub key: Digest,
    /// The limit.
    pub limit: Limit,
    /// What the limit counts.
    pub unit: Unit,
    /// The category of requests that it is for, where the rule has a budget for each.
    pub category: Option<String>,
    /// Whether the rule counts the subject: [`Why::Denied`] or [`Why::Skipped`] if neither the policy nor a setting gives it a tier.
    /// The limit is then that of some tier, which a request may name.
    pub why: Why,
}

/// A ladder that counts the strikes of a subject.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SubjectLadder<'p> {
    /// The ladder's name.
    pub name: &'p str,
    /// The key of the standing.
    pub key: Digest,
    ladder: &'p Ladder,
}

impl SubjectLadder<'_> {
    /// Returns the consequences of the subject's next strike.
    #[must_use]
    pub fn next_rung(&self, standing: &Standing, now: Timestamp) -> Rung {
        self.ladder.rung(standing.strikes(now).saturating_add(1))
    }
}

impl Policy {
    /// Returns the budgets of one subject, named as for [`keys_of`](Self::keys_of), each once.
    ///
    /// Left out is what counts no request that names no more than this subject: a rule that denies, unless it denies all of them, and
    /// a rule that counts by a fact and matches it.
    #[must_use]
    pub fn budgets_of(&self, layer: Layer, key: &str) -> Vec<SubjectBudget<'_>> {
        let mut budgets: Vec<SubjectBudget<'_>> = Vec::new();
        // The tier of an address or an endpoint is that of each request, and so is that of a user whose tenant is not named.
        let has_own_tier = |own: &Caller<'_>| match layer {
            Layer::Tenant => true,
            Layer::User => own.tenant.is_some() || !self.tiers.has_tenants(),
            Layer::Edge | Layer::Global | Layer::Endpoint => false,
        };
        self.each_budget_of(layer, key, &mut |rule, caller, key, (limit, unit)| {
            let own = Caller::new(caller.facts, self);
            let why = self.without_tier(rule, &own).filter(|_| has_own_tier(&own)).unwrap_or(Why::Met);
            let counts = match why {
                Why::Met if limit.is_never() => self.denies_all_of(rule, caller),
                _ => !wants_counted_fact(rule, caller),
            };
            if !counts {
                return;
            }
            // The first one found has the subject's own limit, so later ones under the same key are left out.
            if budgets.iter().all(|known| known.key != key) {
                let category = rule.is_by_category().then(|| caller.category.to_owned());
                budgets.push(SubjectBudget { rule, key, limit, unit, category, why });
            }
        });
        budgets
    }

    /// Returns what a rule that matches requests of this caller does because it finds no tier; `None` if it needs none, or finds one.
    pub(super) fn without_tier(&self, rule: &Rule, caller: &Caller<'_>) -> Option<Why> {
        let lacks = self.limit_of(rule, caller).is_err_and(|none| none == NoLimit::NoTier);
        (lacks && rule.matches.may_hold(caller)).then(|| match rule.on_missing {
            OnMissing::Skip => Why::Skipped(TIER.to_owned()),
            OnMissing::Deny | OnMissing::Floor => Why::Denied(TIER.to_owned()),
        })
    }

    /// Whether a rule denies every request of this caller, whatever else the request says.
    pub(super) fn denies_all_of(&self, rule: &Rule, caller: &Caller<'_>) -> bool {
        // A caller with another tier or category is tried to find keys, and is not the one that is asked about.
        let own = Caller::new(caller.facts, self);
        own.tier == caller.tier
            && self.limit_of(rule, caller).is_ok_and(|(measured, _)| measured.limit.is_never())
            && rule.matches.category.is_empty()
            && rule.matches.holds(caller)
            && !rule.fallback
    }

    /// Returns the ladders that count the strikes of one subject, named as for [`keys_of`](Self::keys_of).
    #[must_use]
    pub fn ladders_of(&self, layer: Layer, key: &str) -> Vec<SubjectLadder<'_>> {
        let keyed = self.standings_by_ladder(layer, key);
        let ladders = keyed.into_iter().filter_map(|(subject, key)| {
            Some(SubjectLadder { name: &subject.ladder_name, key, ladder: self.ladders.get(subject.ladder)? })
        });
        ladders.collect()
    }

    /// Calls `show` with the facts of a request by one subject, named as for [`keys_of`](Self::keys_of), and as lists and bans
    /// identify it. Returns `None` where the name cannot be a subject's.
    pub fn with_subject<T>(&self, layer: Layer, key: &str, show: impl FnOnce(&Facts<'_>, Who<'_>) -> T) -> Option<T> {
        self.with_facts_of(layer, key, |facts| self.with_who(facts, |who| show(facts, who)))
    }

    /// Calls `show` with a request's caller as lists and bans identify it.
    pub fn with_who<T>(&self, facts: &Facts<'_>, show: impl FnOnce(Who<'_>) -> T) -> T {
        let caller = Caller::new(facts, self);
        show(Who { ip: caller.ip(), user: caller.user_name(), tenant: caller.tenant })
    }

    /// Returns the entry of the policy's lists that decides about a request's caller, and its list.
    #[must_use]
    pub fn listed_entry(&self, facts: &Facts<'_>) -> Option<(ListEntry, Listed)> {
        self.with_who(facts, |who| self.lists().find_entry(who))
    }

    /// Returns the pattern that matches the path of a request: of this rule, else of any. `None` if no pattern matches; the path
    /// itself may hold secrets.
    #[must_use]
    pub fn path_pattern<'p>(&'p self, rule: Option<&'p Rule>, facts: &Facts<'_>) -> Option<&'p str> {
        let caller = Caller::new(facts, self);
        let path = caller.path.get()?;
        let own = |rule: &&Rule| rule.matches.path.iter().any(|pattern| pattern.matches(path));
        // The rule that decided may have no pattern that matches, for example one that counts by user alone.
        let rule = rule.filter(|rule| own(rule)).or_else(|| self.rules.iter().find(|rule| own(rule)))?;
        let pattern = rule.matches.path.iter().find(|pattern| pattern.matches(path))?;
        Some(pattern.as_str())
    }
}

/// Whether a rule counts by a fact that is unknown here and that its requests must have: the address never stands in for it.
fn wants_counted_fact(rule: &Rule, caller: &Caller<'_>) -> bool {
    rule.per.iter().any(|per| match per {
        Per::Fact(name) => caller.facts.fact(name).is_none() && rule.matches.fact.iter().any(|(own, _)| own == name),
        _ => false,
    })
}

impl fmt::Display for Rung {
    /// Writes the rung as a policy does: `cooldown 5 min + shadow`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |is_set: bool, word: &str| is_set.then(|| word.to_owned());
        let terms = [
            word(self.deny, "deny"),
            self.cooldown.map(|length| format!("cooldown {length}")),
            self.ban.map(|length| format!("ban {length}")),
            word(self.shadow, "shadow"),
            word(self.warn, "warn"),
        ];
        let terms: Vec<String> = terms.into_iter().flatten().collect();
        f.write_str(&terms.join(" + "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = "
        [lists]
        deny = ['198.51.100.0/24', 'user:mallory']
        [identity]
        default_tier = 'seed'
        [tiers.seed]
        requests = '5/h'
        writes = '2/h'
        [ladders.mine]
        rungs = ['warn', 'cooldown 5min + shadow', 'ban 24h']
        [[rule]]
        name = 'posts'
        match = { path = '/posts/{id}' }
        per = ['user']
        limit = '10/h'
        ladder = 'mine'
        on_missing = 'skip'
        [[rule]]
        name = 'tiers'
        per = ['user']
        limit = 'tier'
        on_missing = 'skip'
        [[rule]]
        name = 'address'
        per = ['ip']
        limit = '1MB/min'
    ";

    fn policy() -> Policy {
        Policy::parse(POLICY, &|_| None).unwrap()
    }

    /// An operator asked why a user was stopped, and got strikes without any of the limits.
    #[test]
    fn the_budgets_and_ladders_of_a_subject_are_those_that_keys_of_finds() {
        let policy = policy();
        for (layer, key, expect) in [
            (Layer::User, "u1", vec![("posts", None), ("tiers", Some("requests")), ("tiers", Some("writes"))]),
            (Layer::Edge, "203.0.113.7", vec![("address", None)]),
            (Layer::Tenant, "t1", vec![]),
        ] {
            let budgets = policy.budgets_of(layer, key);
            let mut named: Vec<(&str, Option<&str>)> =
                budgets.iter().map(|own| (&*own.rule.name, own.category.as_deref())).collect();
            named.sort_unstable();
            assert_eq!(named, expect, "{key}");
            let keys = policy.keys_of(layer, key);
            assert_eq!(
                budgets.iter().map(|own| (own.key, own.limit)).collect::<std::collections::BTreeMap<_, _>>(),
                keys.balances
            );
            let ladders = policy.ladders_of(layer, key);
            assert_eq!(ladders.iter().map(|own| own.key).collect::<std::collections::BTreeSet<_>>(), keys.standings);
        }
        let address = policy.budgets_of(Layer::Edge, "203.0.113.7");
        assert_eq!(address.first().map(|own| own.limit.notation(own.unit)).as_deref(), Some("1MB/min"));
        let ladders = policy.ladders_of(Layer::User, "u1");
        let next =
            ladders.first().map(|own| (own.name, own.next_rung(&Standing::default(), Timestamp::EPOCH).to_string()));
        assert_eq!(next, Some(("mine", "warn".to_owned())));
        assert_eq!(Rung::parse("shadow + cooldown 5min").unwrap().to_string(), "cooldown 5 min + shadow");
    }

    /// `threshold subject ip 192.0.2.9` said that it was stopped by a rule that denies another address, which a fact names.
    ///
    /// Woken by: leaving out `denies_all_of`, any of its conditions, or `wants_counted_fact`.
    #[test]
    fn rules_that_do_not_concern_the_subject_are_no_budgets_of_it() {
        let text = "
            [identity]
            default_tier = 'seed'
            [tiers.seed]
            requests = '5/h'
            writes = 'none'
            [tiers.oak]
            requests = 'none'
            [[rule]]
            name = 'one address'
            layer = 'edge'
            match = { fact = { address = '50.0.0.5' } }
            per = ['fact:domain']
            deny = true
            [[rule]]
            name = 'each address'
            layer = 'edge'
            match = { fact = { address = '**' } }
            per = ['fact:address']
            limit = '10/min'
            [[rule]]
            name = 'a path'
            layer = 'edge'
            match = { path = '/closed' }
            per = ['ip']
            deny = true
            [[rule]]
            name = 'a category'
            layer = 'edge'
            match = { category = 'writes' }
            per = ['ip']
            deny = true
            [[rule]]
            name = 'where no other applies'
            layer = 'edge'
            per = ['ip']
            deny = true
            fallback = true
            [[rule]]
            name = 'all'
            layer = 'edge'
            per = ['ip']
            deny = true
            [[rule]]
            name = 'inbox'
            layer = 'user'
            match = { fact = { kind = 'mail' } }
            per = ['fact:inbox']
            limit = '3/min'
            [[rule]]
            name = 'tier'
            layer = 'user'
            per = ['user']
            limit = 'tier'
            on_missing = 'skip'
        ";
        let policy = Policy::parse(text, &|_| None).unwrap();
        let named = |layer, key| {
            let budgets = policy.budgets_of(layer, key);
            budgets.iter().map(|own| format!("{} {:?}", own.rule.name, own.category)).collect::<Vec<_>>()
        };
        assert_eq!(named(Layer::Edge, "192.0.2.9"), ["all None", "inbox None"]);
        assert_eq!(named(Layer::User, "u1"), ["tier Some(\"requests\")", "tier Some(\"writes\")"]);
    }

    /// A tenant without a tier, of which the rule denies every request, was shown the unused budget of a tier.
    ///
    /// Woken by leaving out `without_tier` or `has_own_tier`.
    #[test]
    fn a_subject_without_a_tier_is_denied_or_skipped_and_has_no_tiers_budget() {
        let text = |more: &str| {
            let rule = |name: &str, layer: &str, per: &str, rest: &str| {
                format!("[[rule]]\nname = '{name}'\nlayer = '{layer}'\nper = ['{per}']\nlimit = 'tier'\n{rest}\n")
            };
            let tiers = "[tiers.free]\nrequests = '3/min'\n[tiers.pro]\nrequests = '7/min'\n";
            [
                tiers,
                more,
                &rule("plan", "tenant", "tenant", ""),
                &rule("skips", "tenant", "tenant", "on_missing = 'skip'"),
                &rule("other", "tenant", "tenant", "match = { tenant = 'other' }"),
                &rule("user", "user", "user", ""),
                &rule("address", "edge", "ip", ""),
            ]
            .concat()
        };
        let why = |policy: &Policy, layer, key| {
            let budgets = policy.budgets_of(layer, key);
            budgets.iter().map(|own| format!("{}: {}", own.rule.name, own.why)).collect::<Vec<_>>()
        };
        let policy = Policy::parse(&text(""), &|_| None).unwrap();
        let denied = "no tier of the policy is given, and the rule denies such requests";
        let skipped = "no tier of the policy is given, and the rule skips such requests";
        let of_t9 = why(&policy, Layer::Tenant, "t9");
        assert_eq!(of_t9[..2], [format!("plan: {denied}"), format!("skips: {skipped}")]);
        assert_eq!(why(&policy, Layer::User, "u9"), [format!("user: {denied}")]);
        let address = why(&policy, Layer::Edge, "192.0.2.9");
        assert!(address.iter().all(|own| own.ends_with(": met")), "the tier is that of each request: {address:?}");
        let policy = Policy::parse(&text("[tenants.t1]\ntier = 'pro'\n"), &|_| None).unwrap();
        assert_eq!(why(&policy, Layer::Tenant, "t1")[..2], ["plan: met", "skips: met"]);
        assert_eq!(why(&policy, Layer::Tenant, "t9"), of_t9);
        assert_eq!(why(&policy, Layer::User, "u9"), ["user: met"], "its tenant may have a tier");
    }

    #[test]
    fn the_deciding_entry_of_a_list_and_the_pattern_of_a_path_are_named() {
        let policy = policy();
        let listed = |facts: &Facts<'_>| policy.listed_entry(facts).map(|(entry, listed)| (entry.key(), listed));
        let ip = |ip: &str| Facts { ip: ip.parse().ok(), ..Facts::default() };
        assert_eq!(listed(&ip("198.51.100.7")), Some(("198.51.100.0/24".to_owned(), Listed::Deny)));
        assert_eq!(listed(&ip("203.0.113.7")), None);
        let user = Facts { user: Some("mallory"), ..Facts::default() };
        assert_eq!(listed(&user), Some(("mallory".to_owned(), Listed::Deny)));
        let path = |path| Facts { path: Some(path), ..Facts::default() };
        let (posts, tiers) = (policy.rules().first(), policy.rules().get(1));
        assert_eq!(policy.path_pattern(posts, &path("/posts/7")), Some("/posts/{id}"));
        assert_eq!(policy.path_pattern(tiers, &path("/posts/7")), Some("/posts/{id}"));
        assert_eq!(policy.path_pattern(tiers, &path("/reset/secret-token")), None);
        assert_eq!(policy.path_pattern(None, &Facts::default()), None);
    }
}
