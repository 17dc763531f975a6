//! Which of two limits is used up first, and the same limit several times over.

use super::{Limit, LimitError};
use crate::time::Span;

impl Limit {
    /// Whether this limit is used up before `other` can be, if both are charged with the same requests. `same_keys` says
    /// whether both count by the same keys.
    pub(crate) fn fills_before(&self, other: &Self, same_keys: bool) -> bool {
        self.fills_before_own(other, same_keys).unwrap_or_else(|| {
            let most = self.most_in(other.period());
            most < other.capacity() || (most == other.capacity() && self.period() != other.period())
        })
    }

    /// The most that is admitted in any window of this length.
    fn most_in(&self, window: Span) -> u64 {
        let windows = window.micros().div_ceil(self.period().micros().max(1)).max(1);
        self.bound().saturating_mul(windows)
    }

    /// `factor` times as much in the same period. Where that is more than the algorithm takes, it is the algorithm that
    /// [serves](crate::limit::Algorithm::for_quota) such a quota.
    ///
    /// # Errors
    /// Where no limit is that large.
    pub fn times(&self, factor: u64) -> Result<Self, LimitError> {
        let Some((algorithm, figures)) = self.algorithm().zip(self.figures()) else { return Ok(*self) };
        let figures = figures.times(factor);
        algorithm.for_quota(figures.quota).make(&figures)
    }
}
