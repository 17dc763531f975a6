//! A store that cannot be reached.

use threshold_limiter::Store;
use threshold_limiter::store::{Answer, Command, Digest, Kind, Listed, Outcome, Plan, StoreError, Timestamp};

/// A store whose calls all fail.
pub(crate) struct DeadStore;

impl Store for DeadStore {
    async fn settle(&self, _: &Plan<'_>, _: Timestamp, _: &mut Outcome) -> Result<(), StoreError> {
        Err(StoreError::Unavailable)
    }

    async fn execute(&self, _: Command, _: Timestamp) -> Result<Answer, StoreError> {
        Err(StoreError::Unavailable)
    }

    async fn list(&self, _: Kind, _: Option<Digest>, _: usize, _: Timestamp) -> Result<Vec<Listed>, StoreError> {
        Err(StoreError::Unavailable)
    }
}
