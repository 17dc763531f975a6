//! The limits that count the requests of one caller, in order to show what is left of each.

use std::collections::BTreeSet;

use super::Why;
use crate::caller::{Caller, DEFAULT_CATEGORY, Keyed};
use crate::facts::Facts;
use crate::headers::prose;
use crate::key::Digest;
use crate::limit::Limit;
use crate::policy::{CostOf, Identities, Known, Measured, Per, Policy, Rule};

/// A limit that counts the requests of one caller.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CallerLimit<'p> {
    /// The rule.
    pub rule: &'p Rule,
    /// The keys of its balances: one, or one for each shard of a limit that is split.
    pub keys: Vec<Digest>,
    /// The limit of each balance.
    pub limit: Limit,
    /// The limit as the policy writes it.
    pub whole: Limit,
    /// What the limit counts.
    pub cost_of: &'p CostOf,
    /// The category of requests that it is for, where the rule has a budget for each.
    pub category: Option<String>,
    /// Whether the rule counts the caller: [`Why::Denied`] if it has no tier of the policy, and the rule denies for that.
    pub why: Why,
}

impl CallerLimit<'_> {
    /// Describes the limit in words, as denials do: `10 per hour`.
    #[must_use]
    pub fn period(&self) -> String {
        prose(self.rule, self.whole.shown_quota(), self.cost_of.unit(), self.whole.shown_period())
    }
}

impl Policy {
    /// Returns the limits that count requests of this caller, in the order of the policy's layers.
    ///
    /// What the facts leave open of a request is not asked for: without a method or a path, a rule that matches some of them is
    /// returned, and a limit by category is returned for each category. What rules with `match` want of the tenant and the tier
    /// must hold. A rule that denies is returned if it denies all requests with these facts, or the caller for having no tier. A fallback is returned too, which applies only where no other rule of its layer does.
    ///
    /// Not returned are limits that the caller shares with all others (`per` without an identity), limits on requests in flight, of
    /// which nothing is used up, and those for which a part of `per` is unknown. If that part is the tenant or the user, and the
    /// address counts in place of it, the limit of the address is returned.
    #[must_use]
    pub fn limits_of_caller(&self, facts: &Facts<'_>) -> Vec<CallerLimit<'_>> {
        let mut limits: Vec<(usize, CallerLimit<'_>)> = Vec::new();
        for category in self.categories_of(facts) {
            let facts = Facts { category: Some(category), ..*facts };
            let caller = Caller::new(&facts, self);
            let mut known = Known::nothing();
            let mut identities = Identities::new(&mut known, &caller, self);
            for (index, rule) in self.rules.iter().enumerate() {
                let counts = rule.per.iter().any(Per::is_identity) && rule.per.iter().all(|per| is_known(per, &caller));
                if !counts || !rule.matches.may_hold(&caller) {
                    continue;
                }
                let (measured, why) = match (self.limit_of(rule, &caller), self.without_tier(rule, &caller)) {
                    (Ok((measured, _)), _) => (measured, Why::Met),
                    // Left out, it would look like no limit.
                    (Err(_), Some(why @ Why::Denied(_))) => (Measured::NEVER, why),
                    (Err(_), _) => continue,
                };
                let (limit, whole) = (*measured.charged(), measured.limit);
                // It uses up nothing. What it denies is known only where it denies all.
                if whole.is_never() && why == Why::Met && !self.denies_all_of(rule, &caller) {
                    continue;
                }
                let identity = identities.of(rule.counted, rule).filter(|(_, keyed)| *keyed != Keyed::Missing);
                let Some(key) = identity.and_then(|(identity, _)| Some(rule.prefix(&limit)?.over(identity))) else {
                    continue;
                };
                let shards = measured.shards.as_ref().map_or(1, |shards| shards.number);
                let keys: Vec<Digest> = (0..shards).map(|shard| key.in_shard(shard)).collect();
                if whole.is_concurrency() || limits.iter().any(|(_, known)| known.keys == keys) {
                    continue;
                }
                let category = rule.is_by_category().then(|| category.to_owned());
                limits.push((index, CallerLimit { rule, keys, limit, whole, cost_of: &measured.cost, category, why }));
            }
        }
        limits.sort_by_key(|(index, _)| *index);
        limits.into_iter().map(|(_, limit)| limit).collect()
    }

    /// Returns the categories that requests of this caller may have: that of the path, if it is known, else all.
    fn categories_of<'a>(&'a self, facts: &'a Facts<'_>) -> BTreeSet<&'a str> {
        if facts.category.is_some() || facts.path.is_some() {
            return BTreeSet::from([Caller::new(facts, self).category]);
        }
        let named = self.categories.iter().map(|own| own.name.as_ref());
        named.chain(self.tiers.written().categories()).chain([DEFAULT_CATEGORY]).collect()
    }
}

/// Returns whether a part of a key is known. A missing tenant or user may be replaced by the address, which is the caller's too; any
/// other part would be replaced only because the question leaves it open.
fn is_known(per: &Per, caller: &Caller<'_>) -> bool {
    match per {
        Per::Endpoint => caller.facts.endpoint.is_some() || caller.path.get().is_some(),
        Per::Method => caller.method.get().is_some(),
        Per::Host => caller.host.get().is_some(),
        Per::Header(name) => caller.facts.header(name).is_some(),
        Per::Fact(name) => caller.facts.fact(name).is_some(),
        Per::Ip | Per::IpPrefix(_) | Per::Tenant | Per::User | Per::Tier | Per::Category => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = "
        [identity]
        default_tier = 'seed'
        [tiers.seed]
        requests = '5/h'
        writes = '2/h'
        [tiers.oak]
        requests = '50/h'
        [[category]]
        name = 'writes'
        method = 'POST'
        [[rule]]
        name = 'all'
        per = []
        layer = 'global'
        limit = '1000/s'
        [[rule]]
        name = 'tier'
        layer = 'tenant'
        per = ['tenant']
        limit = 'tier'
        [[rule]]
        name = 'posts'
        match = { method = 'POST', path = '/posts/**' }
        per = ['tenant', 'user']
        limit = '10/h'
        [[rule]]
        name = 'oak only'
        match = { tier = 'oak' }
        per = ['user']
        limit = '3/day'
        [[rule]]
        name = 'acme only'
        match = { tenant = 'acme' }
        per = ['user']
        limit = '4/day'
        on_missing = 'skip'
        [[rule]]
        name = 'endpoint'
        layer = 'endpoint'
        per = ['user', 'endpoint']
        limit = '6/min'
        [[rule]]
        name = 'each endpoint'
        layer = 'endpoint'
        per = ['endpoint']
        limit = '6/min'
        [[rule]]
        name = 'at once'
        per = ['user']
        limit = '3'
        algorithm = 'concurrency'
        [[rule]]
        name = 'bytes'
        per = ['ip']
        limit = '1MB/min'
        period = 'one megabyte a minute'
        [[rule]]
        name = 'closed'
        match = { path = '/closed' }
        per = ['user']
        deny = true
        on_missing = 'skip'
    ";

    fn listed(facts: &Facts<'_>) -> Vec<(String, String)> {
        let policy = Policy::parse(POLICY, &|_| None).unwrap();
        let limits = policy.limits_of_caller(facts);
        limits
            .iter()
            .map(|limit| {
                let of = limit.category.as_ref().map(|category| format!(" {category}")).unwrap_or_default();
                (format!("{}{of}", limit.rule.name), limit.period())
            })
            .collect()
    }

    fn names(facts: &Facts<'_>) -> Vec<String> {
        listed(facts).into_iter().map(|(name, _)| name).collect()
    }

    /// Woken by leaving out any condition of `limits_of_caller`.
    #[test]
    fn the_limits_of_a_caller_are_those_that_count_by_it() {
        let ip = Some("203.0.113.7".parse().unwrap());
        let acme = Facts { tenant: Some("acme"), user: Some("u1"), ip, ..Facts::default() };
        assert_eq!(
            listed(&acme),
            [
                ("bytes", "one megabyte a minute"),
                ("tier requests", "5 per hour"),
                ("tier writes", "2 per hour"),
                ("posts", "10 per hour"),
                ("acme only", "4 per day"),
            ]
            .map(|(name, period)| (name.to_owned(), period.to_owned()))
        );
        let oak = Facts { tier: Some("oak"), tenant: Some("other"), ..acme };
        assert_eq!(names(&oak), ["bytes", "tier requests", "posts", "oak only"]);
        assert_eq!(names(&Facts { ip: None, ..acme }), ["tier requests", "tier writes", "posts", "acme only"]);
        // With a request, only what applies to it.
        let read = Facts { method: Some("GET"), path: Some("/a"), ..acme };
        assert_eq!(names(&read), ["bytes", "tier requests", "acme only", "endpoint"]);
        let write = Facts { method: Some("POST"), path: Some("/posts/1"), ..acme };
        assert_eq!(names(&write), ["bytes", "tier writes", "posts", "acme only", "endpoint"]);
        // What denies some requests is not a limit of the others.
        assert!(names(&Facts { path: Some("/closed"), ..acme }).contains(&"closed".to_owned()));
        let named = Facts { endpoint: Some("login"), ..acme };
        assert!(names(&named).contains(&"endpoint".to_owned()));
        // The address stands in for a user who is not named, and for nothing else.
        assert_eq!(names(&Facts { ip, ..Facts::default() }), ["bytes", "tier requests", "tier writes", "posts"]);
        assert_eq!(names(&Facts::default()), [""; 0]);
    }

    /// A caller without a tier, of whom the rule denies every request, had no limits, as if it were unlimited.
    ///
    /// Woken by leaving out `without_tier`, and by returning rules that skip.
    #[test]
    fn a_rule_that_denies_a_caller_without_a_tier_is_a_limit_of_it() {
        let plan = "[tiers.pro]\nrequests = '7/min'\n[[rule]]\nname = 'plan'\nper = ['tenant']\nlimit = 'tier'\n";
        let listed = |text: &str, tier| {
            let policy = Policy::parse(text, &|_| None).unwrap();
            let limits = policy.limits_of_caller(&Facts { tenant: Some("t9"), tier, ..Facts::default() });
            limits.iter().map(|own| (own.whole.shown_quota(), own.why.to_string())).collect::<Vec<_>>()
        };
        let denied = "no tier of the policy is given, and the rule denies such requests";
        assert_eq!(listed(plan, None), [(0, denied.to_owned())]);
        assert_eq!(listed(plan, Some("Pro")), [(0, denied.to_owned())], "tiers are compared exactly");
        assert_eq!(listed(plan, Some("pro")), [(7, "met".to_owned())]);
        assert_eq!(listed(&format!("{plan}on_missing = 'skip'"), None), []);
        assert_eq!(listed(&format!("{plan}match = {{ tenant = 'other' }}"), None), []);
    }

    /// The keys are those that a request is charged on.
    #[test]
    fn what_a_request_uses_is_used_of_the_limits_of_its_caller() {
        let policy = Policy::parse(POLICY, &|_| None).unwrap();
        let ip = Some("203.0.113.7".parse().unwrap());
        let request = Facts {
            tenant: Some("acme"),
            user: Some("u1"),
            method: Some("POST"),
            path: Some("/posts/1"),
            ip,
            ..Facts::default()
        };
        let plan = policy.plan(&request).unwrap();
        let charged: BTreeSet<Digest> = plan.charges().iter().map(crate::bill::Charge::key).collect();
        for limit in policy.limits_of_caller(&request) {
            assert!(limit.keys.iter().all(|key| charged.contains(key)), "{}", limit.rule.name);
        }
    }
}
