//! Several requests in one decision: all of them are allowed and charged, or none is.

use threshold_core::bill::Charge;
use threshold_core::command::{Command, KeyMoves};
use threshold_core::decision::Cause;
use threshold_core::plan::Verb;
use threshold_core::policy::OnStoreError;
use threshold_core::{Decision, Facts, Limit, Outcome, Plan, PlanError, Policy, Span};

use super::Limiter;
use super::under::Settled;
use crate::clock::Clock;
use crate::observer::{Operation, Refused};
use crate::random_id;
use crate::store::{Store, StoreError, at_once};

/// One of several requests that are decided in one step.
#[derive(Debug, Clone, Copy, Default)]
pub struct JointRequest<'r> {
    /// The request.
    pub facts: Facts<'r>,
    /// Whether rules whose identity it lacks, and an address to stand in for it, do not apply to it.
    pub skips_missing: bool,
    /// An amount and a period in place of those of the rules that it meets.
    pub rate: Option<(u64, Span)>,
}

/// The decision on several requests.
#[derive(Debug, Clone, Default)]
#[must_use = "a decision that nobody reads protects nothing"]
pub struct JointDecision {
    /// The decision on those that could be planned.
    pub decision: Decision,
    /// The index of the request that each of its readings belongs to; empty if it has no figures.
    pub requests: Vec<usize>,
    /// The rules, by index, that another rule replaced: they applied to none of the requests.
    pub replaced: Vec<usize>,
    /// The index of each request that could not be planned, and why. If there are any, nothing was charged, unless it was recorded.
    pub unplanned: Vec<(usize, PlanError)>,
}

/// Why several requests cannot be decided in one step.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JointError {
    /// They meet more rules than a plan holds.
    #[error("the requests meet more than {} rules", threshold_core::plan::MAX_CHARGES)]
    TooManyRules,
    /// A rule cannot have the rate that a request brings.
    #[error("rule \"{rule}\" cannot have this rate: {reason}")]
    Rate {
        /// The index of the request.
        request: usize,
        /// The name of the rule.
        rule: String,
        /// The reason.
        reason: String,
    },
}

/// Why nothing, or not everything, was given back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CreditError {
    /// The request cannot be planned.
    #[error(transparent)]
    Plan(PlanError),
    /// The store cannot answer.
    #[error(transparent)]
    Store(StoreError),
}

/// The limits of one request in place of those of its rules.
type OwnLimits = Vec<(usize, Limit)>;

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Checks, peeks or records several requests in one step under a policy that the caller holds. A budget that two of them meet is
    /// charged once, with the sum of their costs.
    ///
    /// A request that cannot be planned denies all: the others are then looked at and not charged. Observers are notified once, with
    /// the request that the binding limit belongs to. Not for stores that have to learn where records are.
    ///
    /// # Errors
    /// Returns an error if the requests do not fit in one plan, or bring rates that their rules cannot have.
    pub async fn decide_jointly(
        &self,
        policy: &Policy,
        verb: Verb,
        requests: &[JointRequest<'_>],
    ) -> Result<Box<JointDecision>, JointError> {
        // A plan and an outcome are kilobytes. On the stack they are not copied with the future of the caller.
        if self.store.answers_at_once() {
            return at_once(self.settle_jointly(policy, verb, requests));
        }
        Box::pin(self.settle_jointly(policy, verb, requests)).await
    }

    async fn settle_jointly(
        &self,
        policy: &Policy,
        verb: Verb,
        requests: &[JointRequest<'_>],
    ) -> Result<Box<JointDecision>, JointError> {
        let start = self.start();
        let (mut joint, mut outcome) = (Box::<JointDecision>::default(), Outcome::default());
        let facts = requests.iter().map(|request| (&request.facts, request.skips_missing));
        let replaced = policy.replaced_rules(facts);
        let own_limits = own_limits(policy, requests)?;
        let mut plan = Plan::new(policy, verb);
        plan_jointly(&mut plan, requests, (&own_limits, &replaced), &mut joint.unplanned)?;
        plan.identify(random_id);
        let moves = self.moves_of_joint(requests, (&joint.unplanned, &replaced), &plan);
        let Settled { in_store, answered } = self.settle_moving(moves, &plan, &mut outcome, &mut joint.decision).await;
        // Nothing is charged: what is left is what was left before.
        if answered && verb != Verb::Record && !joint.unplanned.is_empty() && outcome.forget_charges() {
            joint.decision = plan.decide(&outcome);
        }
        joint.requests.extend(plan.requests_of_readings(&outcome));
        // The decision on a penalty or without the store has no figures.
        if joint.requests.len() != joint.decision.readings.len() {
            joint.requests.clear();
        }
        // The plan counts only the requests that it holds.
        if !joint.unplanned.is_empty() {
            let positions: Vec<usize> = planned(requests, &joint.unplanned).map(|(index, _)| index).collect();
            for request in &mut joint.requests {
                *request = positions.get(*request).copied().unwrap_or(*request);
            }
        }
        if !joint.decision.escalations.is_empty() {
            let planned = planned(requests, &joint.unplanned);
            let all: Vec<&Facts<'_>> = planned.map(|(_, request)| &request.facts).collect();
            self.name_banned_of(&plan, &all, &joint.decision);
        }
        match joint.unplanned.first() {
            // What was only looked at because of another request is no decision that anybody asked for.
            Some((index, error)) if verb != Verb::Record => {
                let ip = requests.get(*index).and_then(|request| request.facts.ip);
                let Decision { at, trace, .. } = joint.decision;
                self.tell_refusal(Refused { at, ip, status: 429, reason: &error.to_string(), trace }, policy);
            }
            _ => {
                if let Some(JointRequest { facts, .. }) = concerned(policy, requests, &joint) {
                    self.tell(plan.verb().into(), facts, &joint.decision, policy, (start, in_store));
                }
            }
        }
        joint.replaced = replaced;
        Ok(joint)
    }

    /// Gives back the cost of a request on every enforced limit that it meets, at most what still counts there, but for the rules that
    /// are `replaced`. Without a receipt nothing shows that it was ever charged: only for a caller that is trusted with it. Rules that
    /// count by outcome or in flight are left out.
    ///
    /// # Errors
    /// Returns an error if the request cannot be planned, or if the store cannot answer; then a part of it may have been given back.
    pub async fn credit(
        &self,
        policy: &Policy,
        request: &JointRequest<'_>,
        replaced: &[usize],
    ) -> Result<(), CreditError> {
        let mut plan = Plan::new(policy, Verb::Record);
        add(&mut plan, request, &[], replaced).map_err(CreditError::Plan)?;
        let first = plan.charges().first().map(Charge::key);
        self.perform(Operation::Refund, first, async {
            // One after the other: unlike a charge, each of them is right by itself.
            for (key, limit, amount) in plan.bill().recorded_charges() {
                self.execute(Command::Credit { key, limit, amount }).await?;
                self.made_room([key]);
            }
            Ok(())
        })
        .await
        .map_err(CreditError::Store)
    }

    /// Returns the records that must move before a plan of these requests is settled; `None` unless the secret is rotated.
    fn moves_of_joint(
        &self,
        requests: &[JointRequest<'_>],
        (unplanned, replaced): (&[(usize, PlanError)], &[usize]),
        plan: &Plan<'_>,
    ) -> Option<Box<KeyMoves>> {
        self.moves_from(plan, |old| {
            for (_, JointRequest { facts, skips_missing, .. }) in planned(requests, unplanned) {
                old.skip_missing(*skips_missing);
                // Costs do not change keys, and one that never fits would fail.
                let facts = Facts { trace: plan.trace(), cost: Some(0), bytes: Some(0), costs: &[], ..*facts };
                old.add_changed(&facts, &[], replaced).ok()?;
            }
            Some(())
        })
    }
}

/// Returns the request that a decision is about: the one that was stopped, else the one with the binding limit.
fn concerned<'r, 'f>(
    policy: &Policy,
    requests: &'r [JointRequest<'f>],
    JointDecision { decision, requests: owners, .. }: &JointDecision,
) -> Option<&'r JointRequest<'f>> {
    let alone = |request: &JointRequest<'_>, is_it: &dyn Fn(&Plan<'_>) -> bool| {
        let mut plan = Plan::new(policy, Verb::Peek);
        plan.skip_missing(request.skips_missing);
        let facts = Facts { cost: Some(0), bytes: Some(0), costs: &[], ..request.facts };
        plan.add(&facts).is_ok() && is_it(&plan)
    };
    let found = |is_it: &dyn Fn(&Plan<'_>) -> bool| requests.iter().find(|request| alone(request, is_it));
    let stopped = match (decision.cause(), decision.penalty_layer()) {
        (Some(Cause::Ban | Cause::List), _) => found(&|plan| plan.is_denied_by_name()),
        (Some(Cause::Ladder), Some(layer)) => found(&|plan| plan.subjects().iter().any(|own| own.layer() == layer)),
        (Some(Cause::Outage), _) => found(&|plan| plan.on_store_error() == OnStoreError::Closed),
        _ => None,
    };
    let bound = || requests.get(*owners.get(decision.binding?)?);
    stopped.or_else(bound).or(requests.first())
}

/// Returns the requests that are in the plan, with their positions.
fn planned<'r, 'f>(
    requests: &'r [JointRequest<'f>],
    unplanned: &[(usize, PlanError)],
) -> impl Iterator<Item = (usize, &'r JointRequest<'f>)> {
    requests.iter().enumerate().filter(|(index, _)| !unplanned.iter().any(|(own, _)| own == index))
}

/// Adds a request to a plan, with limits of its own and without the rules that are replaced.
fn add<'p>(
    plan: &mut Plan<'p>,
    JointRequest { facts, skips_missing, .. }: &JointRequest<'_>,
    own_limits: &'p [(usize, Limit)],
    replaced: &[usize],
) -> Result<(), PlanError> {
    plan.skip_missing(*skips_missing);
    if own_limits.is_empty() && replaced.is_empty() {
        return plan.add(facts);
    }
    plan.add_changed(facts, own_limits, replaced)
}

/// Plans all requests that can be planned in a plan that is empty, and lists the others.
fn plan_jointly<'p>(
    plan: &mut Plan<'p>,
    requests: &[JointRequest<'_>],
    (own_limits, replaced): (&'p [OwnLimits], &[usize]),
    unplanned: &mut Vec<(usize, PlanError)>,
) -> Result<(), JointError> {
    // Each turn finds one more request that cannot be planned.
    while let Err((index, error)) = add_planned(plan, requests, (own_limits, replaced), unplanned) {
        if error == PlanError::TooManyRules {
            return Err(JointError::TooManyRules);
        }
        unplanned.push((index, error));
        // What happens is recorded whatever happened beside it.
        let verb = if plan.verb() == Verb::Record { Verb::Record } else { Verb::Peek };
        // A plan must not be used after an error.
        *plan = Plan::new(plan.policy(), verb);
    }
    Ok(())
}

/// Adds all requests but those that cannot be planned, or returns the first that cannot be planned either.
fn add_planned<'p>(
    plan: &mut Plan<'p>,
    requests: &[JointRequest<'_>],
    (own_limits, replaced): (&'p [OwnLimits], &[usize]),
    unplanned: &[(usize, PlanError)],
) -> Result<(), (usize, PlanError)> {
    for (index, request) in planned(requests, unplanned) {
        let own_limits = own_limits.get(index).map_or(&[][..], Vec::as_slice);
        add(plan, request, own_limits, replaced).map_err(|error| (index, error))?;
    }
    Ok(())
}

/// Makes the limits that requests bring: they must live longer than the plan that refers to them.
fn own_limits(policy: &Policy, requests: &[JointRequest<'_>]) -> Result<Vec<OwnLimits>, JointError> {
    if requests.iter().all(|request| request.rate.is_none()) {
        return Ok(Vec::new());
    }
    let limits = requests.iter().enumerate().map(|(index, request)| {
        let Some((amount, period)) = request.rate else { return Ok(Vec::new()) };
        let mut plan = Plan::new(policy, Verb::Peek);
        plan.skip_missing(request.skips_missing);
        let facts = Facts { cost: Some(0), bytes: Some(0), costs: &[], ..request.facts };
        // What cannot be planned here cannot be planned with the others either, and is found there.
        if plan.add(&facts).is_err() {
            return Ok(Vec::new());
        }
        plan.limits_with(amount, period).map_err(|(rule, reason)| JointError::Rate {
            request: index,
            rule: rule.to_owned(),
            reason,
        })
    });
    limits.collect()
}
