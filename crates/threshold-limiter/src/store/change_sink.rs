//! What a store in memory tells whoever keeps it beyond the process.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;

use threshold_core::lockout::Account;
use threshold_core::policy::{Ban, Owner, Setting};
use threshold_core::{Digest, Standing};

/// Whether everything that was told before is safe: it is ready when that is so, or when waiting longer would be too long.
pub type Durability = Pin<Box<dyn Future<Output = bool> + Send>>;

/// Takes down what must outlive the process. It is called under the lock that guards the entry, so for one key the calls
/// come in the order of the changes; it must not wait, and must not call the store.
pub trait ChangeSink: Debug + Send + Sync {
    /// This is how it stands with a subject now; `None` where nothing is known of it any more.
    fn standing(&self, key: Digest, standing: Option<&Standing>);

    /// This is what is known of an account now; `None` where nothing is.
    fn account(&self, key: Digest, account: Option<&Account>);

    /// This is the ban of this number now; `None` where it has ended.
    fn ban(&self, id: Digest, ban: Option<&Ban>);

    /// This is whom a ladder has banned under a subject; `None` where that is over.
    fn named(&self, subject: Digest, ban: Option<&Ban>);

    /// This is what a tenant or a user is given now; `None` where nothing is.
    fn setting(&self, owner: Owner, name: &str, setting: Option<&Setting>);

    /// Ready when everything that was told before is safe, but no later than a request that strikes may wait.
    fn durability(&self) -> Durability;
}
