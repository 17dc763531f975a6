//! Plans of several requests: limits that a request brings itself, and which reading belongs to which request.

use super::error::exceeds;
use super::{Plan, PlanError, Verb};
use crate::facts::Facts;
use crate::limit::Limit;
use crate::settle::Outcome;
use crate::time::Span;

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
    /// Adds a request as [`add`](Self::add) does, with limits of its own in place of those of these rules; see
    /// [`limits_with`](Self::limits_with).
    ///
    /// # Errors
    /// Fails as [`add`](Self::add) does.
    pub fn add_with_limits(&mut self, facts: &Facts<'_>, limits: &'p [(usize, Limit)]) -> Result<(), PlanError> {
        let request = self.requests;
        // Without costs first: they are compared with limits that do not apply.
        self.add(&Facts { cost: Some(0), bytes: Some(0), costs: &[], ..*facts })?;
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
        let error = plan.clone().add_with_limits(&facts("v", 11), &limits).unwrap_err();
        assert!(matches!(error, PlanError::CostExceedsLimit { cost: 11, capacity: 10, .. }), "{error:?}");
        plan.add_with_limits(&facts("v", 3), &limits).unwrap();
        let costs: Vec<_> = plan.charges().iter().map(|charge| (charge.limit().quota(), charge.cost())).collect();
        assert_eq!(costs, [(5, 2), (3, 2), (10, 3), (3, 3)]);
        assert_eq!(alone.limits_with(0, Span::MINUTE).unwrap()[0].1, Limit::never());
        // More than a log keeps.
        assert_eq!(alone.limits_with(10_000, Span::MINUTE).unwrap_err().0, "user");
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
