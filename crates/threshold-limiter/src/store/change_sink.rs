//! The sink for changes that must outlive the process.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;

use threshold_core::lockout::Account;
use threshold_core::policy::{Ban, Owner, Setting};
use threshold_core::{Digest, Standing};

/// A future that resolves when all earlier changes are on disk (`true`), or when waiting takes too long (`false`).
pub type Durability = Pin<Box<dyn Future<Output = bool> + Send>>;

/// Receives the changes that must outlive the process. It is called under the lock that guards the entry, so that for one key
/// the calls come in the order of the changes. It must not block, and must not call the store, which would deadlock.
pub trait ChangeSink: Debug + Send + Sync {
    /// Called with the new standing of a subject; `None` if it was removed.
    fn standing(&self, key: Digest, standing: Option<&Standing>);

    /// Called with the new state of an account; `None` if it was removed.
    fn account(&self, key: Digest, account: Option<&Account>);

    /// Called with a ban that was set; `None` if it was lifted or has ended.
    fn ban(&self, id: Digest, ban: Option<&Ban>);

    /// Called with the name of a subject that a ladder has banned; `None` if it was removed.
    fn named(&self, subject: Digest, ban: Option<&Ban>);

    /// Called with a setting of a tenant or user; `None` if it was removed.
    fn setting(&self, owner: Owner, name: &str, setting: Option<&Setting>);

    /// Returns a future that resolves when all earlier changes are on disk, but no later than a request that strikes may wait.
    fn durability(&self) -> Durability;
}
