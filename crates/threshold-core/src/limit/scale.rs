//! The same limit so many times over.

use super::{Concurrency, Estimate, Limit, LimitError, Log, Rate, Window};

/// Sub-windows of a log that has become too large to be exact.
const BUCKETS: u32 = 60;

impl Limit {
    /// So many times as much in the same period. A log that would be too large to be exact is kept in sub-windows.
    ///
    /// # Errors
    /// Where no limit is that large.
    pub fn times(&self, factor: u64) -> Result<Self, LimitError> {
        let more = |quota: u64| quota.saturating_mul(factor.max(1));
        Ok(match self {
            Self::Never => Self::Never,
            Self::Rate(own) => Self::Rate(Rate::new(more(own.quota()), own.period(), more(own.burst()))?),
            Self::Window(own) => Self::Window(Window::new(more(own.quota()), own.period(), own.anchor())?),
            Self::Log(own) if own.buckets() > 0 => {
                Self::Log(Log::bucketed(more(own.quota()), own.period(), own.buckets())?)
            }
            Self::Log(own) => Self::Log(
                Log::exact(more(own.quota()), own.period())
                    .or_else(|_| Log::bucketed(more(own.quota()), own.period(), BUCKETS))?,
            ),
            Self::Estimate(own) => Self::Estimate(Estimate::new(more(own.quota()), own.period())?),
            Self::Concurrency(own) => Self::Concurrency(Concurrency::new(more(own.quota()), own.ttl())?),
        })
    }
}
