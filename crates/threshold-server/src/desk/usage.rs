//! What is left of the limits of one caller.

use threshold_core::explain::CallerLimit;
use threshold_core::policy::Policy;
use threshold_core::{Digest, Facts, Timestamp};
use threshold_limiter::store::StoreError;

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
        let keys =
            |policy: &Policy| policy.limits_of_caller(facts).iter().flat_map(|limit| limit.keys.clone()).collect();
        let old: Option<Vec<Digest>> = self.limiter.under_old_secret(policy, keys);
        // In the same order, because it is the same policy.
        let mut old = old.into_iter().flatten();
        for limit in policy.limits_of_caller(facts) {
            let (mut remaining, mut reset_at) = (0_u64, None::<Timestamp>);
            for key in &limit.keys {
                let (look, at) = self.look_at((*key, old.next()), limit.limit).await?;
                remaining = remaining.saturating_add(look.available);
                reset_at = reset_at.max(limit.limit.reset_at(&look, false, at).unless_never());
            }
            usage.push(LimitUsage { limit, remaining, reset_at });
        }
        Ok(usage)
    }
}
