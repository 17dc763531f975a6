//! Plans of several requests: limits that a request brings itself, and which reading belongs to which request.

use super::error::exceeds;
use super::{Plan, PlanError, Verb};
use crate::caller::Caller;
use crate::facts::Facts;
use crate::limit::Limit;
use crate::policy::{NoLimit, Policy, Rule};
use crate::settle::Outcome;
use crate::time::Span;

impl Policy {
    /// Returns the indices of the rules that apply to none of these requests, because a rule that replaces them applies to one of
    /// them (`[envoy.replaces]`). Each request says whether rules whose identity it lacks apply to it, see [`Plan::skip_missing`].
    pub fn replaced_rules<'f>(&self, requests: impl IntoIterator<Item = (&'f Facts<'f>, bool)>) -> Vec<usize> {
        if !self.envoy().replaces_any() {
            return Vec::new();
        }
        let applied = requests.into_iter().flat_map(|(facts, skips_missing)| self.rules_of(facts, skips_missing));
        applied.flat_map(|rule| self.envoy().replaced_by(rule)).collect()
    }

    /// Returns the rules that certainly apply to a request, also those that do not limit it, which a plan leaves out.
    fn rules_of(&self, facts: &Facts<'_>, skips_missing: bool) -> Vec<usize> {
        let facts = Facts { cost: Some(0), bytes: Some(0), costs: &[], ..*facts };
        let mut caller = Caller::named(&facts, self);
        caller.spell(self);
        let mut plan = Plan::new(self, Verb::Peek);
        plan.skip_missing(skips_missing);
        // A path that can be read in several ways meets the rules of all of them, and must not leave out any.
        if caller.has_other_readings() || plan.add(&facts).is_err() {
            return Vec::new();
        }
        let is_unlimited = |rule: &Rule| {
            rule.matches.holds(&caller)
                && !(rule.fallback && self.layer_is_met(rule.layer, &caller))
                && self.limit_of(rule, &caller).is_err_and(|none| none == NoLimit::Unlimited)
        };
        let rules = self.rules.iter().enumerate();
        let unlimited = rules.filter(|(_, rule)| is_unlimited(rule)).map(|(index, _)| index);
        plan.met.iter().map(|met| met.index).chain(unlimited).collect()
    }
}

impl Plan<'_> {
    /// Returns the limits of all rules that the plan's requests meet, with another amount and period: the index of each rule, and its
    /// limit. Limits of a kind that has no period stay as they are, and so do those that are split over shards.
    ///
    /// # Errors
    /// Returns the name of the first rule whose limit cannot have this amount and period, and why.
    pub fn limits_with(&self, amount: u64, period: Span) -> Result<Vec<(usize, Limit)>, (&str, String)> {
        let over_time = self.met.iter().filter(|met| met.limit.is_over_time() && met.shards == 1);
        // A request that brings an amount of 0 means that nothing fits, and not that it is unlimited.
        let limit =
            |met: &super::Met<'_>| if amount == 0 { Ok(Limit::never()) } else { met.limit.with_rate(amount, period) };
        over_time
            .map(|met| match limit(met) {
                Ok(limit) => Ok((met.index, limit)),
                Err(error) => Err((self.policy.rules.get(met.index).map_or("", |rule| &rule.name), error.to_string())),
            })
            .collect()
    }
}

impl<'p> Plan<'p> {
    /// Adds a request as [`add`](Self::add) does, with limits of its own in place of those of these rules, see
    /// [`limits_with`](Self::limits_with), and without the rules that are replaced, see [`Policy::replaced_rules`].
    ///
    /// # Errors
    /// Fails as [`add`](Self::add) does.
    pub fn add_changed(
        &mut self,
        facts: &Facts<'_>,
        limits: &'p [(usize, Limit)],
        replaced: &[usize],
    ) -> Result<(), PlanError> {
        let request = self.requests;
        // Without costs first: they are compared with limits that do not apply.
        self.add(&Facts { cost: Some(0), bytes: Some(0), costs: &[], ..*facts })?;
        self.met.retain(|met| met.request != request || !replaced.contains(&met.index));
        for met in self.met.iter_mut().filter(|met| met.request == request) {
            if let Some((_, limit)) = limits.iter().find(|(index, _)| *index == met.index) {
                (met.limit, met.whole) = (limit, limit);
            }
            met.cost = met.counts.of(facts);
            let fits_never = met.cost > met.limit.capacity() && !met.limit.is_never();
            if fits_never && met.enforced() && self.bill.verb != Verb::Record {
                return Err(exceeds(met.rule, met.cost, met.limit, met.counts));
            }
        }
        self.merge_charges()
    }

    /// Returns the index of the request that each reading of the decision on this plan belongs to. A decision without figures, such
    /// as one about a ban, has fewer readings, or none.
    pub fn requests_of_readings(&self, outcome: &Outcome) -> impl Iterator<Item = usize> {
        self.met.iter().filter(|met| outcome.is_read(met.charge)).map(|met| met.request)
    }
}

#[cfg(test)]
mod tests {
    use crate::balance::Balance;
    use crate::settle::settle;
    use crate::time::Timestamp;
    use crate::{Policy, TraceId};

    use super::*;

    const POLICY: &str = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/h'\nalgorithm = 'sliding-log'\n\
        [[rule]]\nname = 'at once'\nper = ['user']\nlimit = '3'\nalgorithm = 'concurrency'\n";

    fn facts(user: &str, cost: u64) -> Facts<'_> {
        Facts { user: Some(user).filter(|user| !user.is_empty()), cost: Some(cost), ..Facts::default() }
    }

    /// Woken by: comparing the cost with the policy's limit, and leaving out the comparison with its own.
    #[test]
    fn a_request_brings_limits_in_place_of_those_of_its_rules() {
        let policy = Policy::parse(POLICY, &|_| None).unwrap();
        let mut alone = Plan::new(&policy, Verb::Peek);
        alone.add(&facts("u", 0)).unwrap();
        let limits = alone.limits_with(10, Span::MINUTE).unwrap();
        // A number of requests at once has no period.
        assert_eq!(
            limits.iter().map(|(rule, limit)| (*rule, limit.quota(), limit.period())).collect::<Vec<_>>(),
            [(0, 10, Span::MINUTE)]
        );
        let mut plan = Plan::new(&policy, Verb::Check);
        plan.add(&Facts { cost: Some(2), ..facts("u", 2) }).unwrap();
        let error = plan.clone().add_changed(&facts("v", 11), &limits, &[]).unwrap_err();
        assert!(matches!(error, PlanError::CostExceedsLimit { cost: 11, capacity: 10, .. }), "{error:?}");
        plan.add_changed(&facts("v", 3), &limits, &[]).unwrap();
        let costs: Vec<_> = plan.charges().iter().map(|charge| (charge.limit().quota(), charge.cost())).collect();
        assert_eq!(costs, [(5, 2), (3, 2), (10, 3), (3, 3)]);
        assert_eq!(alone.limits_with(0, Span::MINUTE).unwrap()[0].1, Limit::never());
        // More than a log keeps.
        assert_eq!(alone.limits_with(10_000, Span::MINUTE).unwrap_err().0, "user");
    }

    /// Woken by: leaving out `retain`, `unlimited`, `has_other_readings` or `layer_is_met`.
    #[test]
    fn a_rule_that_applies_to_one_request_replaces_rules_of_the_others() {
        let rule = |name: &str, rest: &str| format!("[[rule]]\nname = '{name}'\nlayer = 'edge'\n{rest}\n");
        let text = [
            "[envoy.replaces]\nspecial = ['general', 'other']\nfree = 'general'\nrest = 'other'\n".to_owned(),
            rule("general", "match = { fact.kind = 'read' }\nper = ['fact:kind']\nlimit = '2/h'"),
            rule("other", "match = { fact.kind = 'write' }\nper = ['fact:kind']\nlimit = '2/h'"),
            rule("special", "match = { path = '/special' }\nper = ['method']\nlimit = '9/h'"),
            rule("free", "match = { path = '/free' }\nper = ['method']\nlimit = 'unlimited'"),
            rule("rest", "fallback = true\nper = ['method']\nlimit = 'unlimited'"),
        ];
        let policy = Policy::parse(&text.concat(), &|_| None).unwrap();
        let names =
            |rules: &[usize]| rules.iter().map(|rule| policy.rules()[*rule].name.to_string()).collect::<Vec<_>>();
        let at = |path| Facts { path: Some(path), method: Some("GET"), ..Facts::default() };
        let (special, free, rest, odd) = (at("/special"), at("/free"), at("/elsewhere"), at("/x/..%2fspecial"));
        let reads = Facts { facts: &[("kind", "read")], ..Facts::default() };
        let replaced =
            |requests: &[&Facts<'_>]| names(&policy.replaced_rules(requests.iter().map(|facts| (*facts, true))));
        assert_eq!(replaced(&[&reads, &special]), ["general", "other"]);
        assert_eq!(replaced(&[&reads, &free]), ["general"]);
        assert_eq!(replaced(&[&rest]), ["other"]);
        assert_eq!(replaced(&[&reads, &odd]), [""; 0]);
        let mut plan = Plan::new(&policy, Verb::Check);
        let dropped = policy.replaced_rules([(&reads, true), (&special, true)]);
        // More than the limit of the rule that is replaced.
        plan.add_changed(&Facts { cost: Some(5), ..reads }, &[], &dropped).unwrap();
        plan.add_changed(&special, &[], &dropped).unwrap();
        assert_eq!(plan.met().iter().map(|met| &*met.rule().name).collect::<Vec<_>>(), ["special"]);
        assert_eq!(plan.charges().len(), 1);
    }

    /// Woken by: leaving out `skips_missing` in `add_charge`.
    #[test]
    fn a_rule_that_needs_what_a_request_lacks_does_not_apply_if_it_is_skipped() {
        let policy = Policy::parse(POLICY, &|_| None).unwrap();
        let mut plan = Plan::new(&policy, Verb::Check);
        assert!(matches!(plan.clone().add(&facts("", 1)), Err(PlanError::Missing { .. })));
        plan.skip_missing(true);
        plan.add(&facts("", 1)).unwrap();
        plan.add(&facts("u", 1)).unwrap();
        let mut balances = vec![Balance::default(); plan.charges().len()];
        plan.identify(|| TraceId::from_u128(7));
        let outcome = settle(plan.bill(), &mut balances, &mut [], Timestamp::from_secs(1_767_225_600));
        assert_eq!(plan.requests_of_readings(&outcome).collect::<Vec<_>>(), [1, 1]);
    }
}
