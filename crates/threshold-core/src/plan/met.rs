//! The rules that a request meets and the subjects that it can strike, as a plan holds them.

use crate::bill;
use crate::key::{Digest, TraceId};
use crate::ladder::Ladder;
use crate::limit::Limit;
use crate::policy::{CostOf, Disclosure, Layer, Mode, Rule};
use crate::time::Span;

/// A rule that a request meets, with what it asks for. Each has one reading in the decision.
///
/// A request that meets a rule once has a charge with the same key and limit beside it. They are not always the same: where a
/// plan holds several requests, two of them can meet one key under the limits of two tiers, and share one charge under the
/// smaller. The readings show each request its own limit.
#[derive(Debug, Clone, Copy)]
pub struct Met<'p> {
    pub(crate) key: Digest,
    /// The limit that the charge is held to: the share of a shard where the limit is split.
    pub(crate) limit: &'p Limit,
    /// The limit as the policy writes it.
    pub(crate) whole: &'p Limit,
    pub(crate) counts: &'p CostOf,
    pub(crate) cost: u64,
    pub(crate) rule: &'p Rule,
    /// The rule's index in the policy.
    pub(crate) index: usize,
    /// The index in the plan of the subject that a violation strikes.
    pub(crate) subject: Option<usize>,
    /// The index of the request, among those added to the plan.
    pub(crate) request: usize,
    /// The index on the bill of the charge that it is part of.
    pub(crate) charge: usize,
    /// Over how many shards the limit is split; 1 if it is not.
    pub(crate) shards: u32,
    /// The shard that this request is counted by.
    pub(crate) shard: u32,
    /// Whether the request is denied because it lacks a part of the rule's identity, or the tier whose limit the rule takes.
    pub(crate) lacks: bool,
}

impl<'p> Met<'p> {
    /// Returns the key of the budget.
    #[must_use]
    pub fn key(&self) -> Digest {
        self.key
    }

    /// Returns the limit for this request; where it is split over shards, the share of one.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        self.limit
    }

    /// Returns this request's share of the charge.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Returns the rule.
    #[must_use]
    pub fn rule(&self) -> &Rule {
        self.rule
    }

    /// Returns the index of the request that met the rule, in the order in which requests were [added](super::Plan::add).
    #[must_use]
    pub fn request(&self) -> usize {
        self.request
    }

    /// Chooses the shard by the id of the decision, which is random.
    pub(super) fn choose_shard(&mut self, trace: TraceId) {
        let shard = trace.to_u128().checked_rem(u128::from(self.shards)).unwrap_or(0);
        self.shard = u32::try_from(shard).unwrap_or(0);
        self.key = self.key.in_shard(self.shard);
    }

    pub(crate) fn enforced(&self) -> bool {
        self.rule.mode == Mode::Enforce
    }

    pub(super) fn to_charge(self) -> bill::Charge<'p> {
        let Self { key, limit, cost, rule, subject, .. } = self;
        bill::Charge { key, limit, cost, terms: &rule.terms, subject }
    }
}

/// An identity that is punished for exceeding limits, with the ladder that says how.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'p> {
    pub(crate) key: Digest,
    pub(crate) ladder: &'p Ladder,
    /// The ladder's index in the policy.
    pub(crate) ladder_index: usize,
    pub(crate) layer: Layer,
    pub(crate) disclosure: Disclosure,
}

impl Subject<'_> {
    /// Returns the key of the standing.
    #[must_use]
    pub fn key(&self) -> Digest {
        self.key
    }

    /// Returns how long after the last strike its strikes are forgotten.
    #[must_use]
    pub fn decay(&self) -> Span {
        self.ladder.decay
    }

    /// Returns the kind of identity.
    #[must_use]
    pub fn layer(&self) -> Layer {
        self.layer
    }
}
