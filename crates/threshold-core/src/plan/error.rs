//! Reasons why a request cannot be planned.

use super::MAX_CHARGES;
use crate::limit::Limit;
use crate::path::PathError;
use crate::policy::{CostOf, Rule};

/// The reasons why a request cannot be planned. A retry does not help with any of them.
///
/// This enum is exhaustive on purpose: each door answers each variant with a status of its own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The cost exceeds the capacity of the limit.
    #[error("a cost of {cost} never fits rule \"{rule}\", which holds {capacity}")]
    CostExceedsLimit {
        /// The name of the rule.
        rule: Box<str>,
        /// The cost of the request.
        cost: u64,
        /// The largest cost that can fit.
        capacity: u64,
        /// The quantity that the rule counts.
        cost_of: CostOf,
    },
    /// A rule needs an identity, and the request has neither it nor an address.
    #[error("rule \"{rule}\" needs {field}, or an ip to stand in for it")]
    Missing {
        /// The name of the rule.
        rule: Box<str>,
        /// The field that is missing.
        field: String,
    },
    /// The request matches more rules than a plan holds.
    #[error("the request meets more than {MAX_CHARGES} rules")]
    TooManyRules,
    /// The path cannot be matched.
    #[error(transparent)]
    Path(PathError),
}

#[cold]
pub(super) fn exceeds(rule: &Rule, cost: u64, limit: &Limit, counts: &CostOf) -> PlanError {
    let capacity = limit.capacity();
    PlanError::CostExceedsLimit { rule: rule.name.clone(), cost, capacity, cost_of: counts.clone() }
}
