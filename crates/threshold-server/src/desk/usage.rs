//! What is left of the limits of one caller.

use threshold_core::explain::CallerLimit;
use threshold_core::policy::Policy;
use threshold_core::{Facts, Timestamp, TraceId};
use threshold_limiter::store::{Answer, Command, StoreError};

use super::Desk;

/// What is left of one limit.
#[derive(Debug)]
pub(crate) struct LimitUsage<'p> {
    pub(crate) limit: CallerLimit<'p>,
    pub(crate) remaining: u64,
    /// When there is more, or all, again; `None` if the algorithm has no such time.
    pub(crate) reset_at: Option<Timestamp>,
}

impl Desk {
    /// Returns what is left of each limit that counts requests of this caller. It charges nothing.
    pub(crate) async fn usage<'p>(
        &self,
        policy: &'p Policy,
        facts: &Facts<'_>,
    ) -> Result<Vec<LimitUsage<'p>>, StoreError> {
        let mut usage = Vec::new();
        for limit in policy.limits_of_caller(facts) {
            let (mut remaining, mut reset_at) = (0_u64, None::<Timestamp>);
            for key in &limit.keys {
                // A cost of 0 charges nothing, and shows how much is left.
                let command = Command::Limit { key: *key, limit: limit.limit, cost: 0, id: TraceId::default() };
                let Answer::Limited { checked, at } = self.limiter.execute(command).await? else {
                    return Err(StoreError::Unavailable);
                };
                remaining = remaining.saturating_add(checked.look.available);
                reset_at = reset_at.max(limit.limit.reset_at(&checked.look, false, at).unless_never());
            }
            usage.push(LimitUsage { limit, remaining, reset_at });
        }
        Ok(usage)
    }
}
