//! The audit: a record of every operators' change in the journal and in the log.

use threshold_core::Timestamp;
use threshold_core::address::{AddressGroup, parse_address};
use threshold_core::key::{is_redacted, read_name, write_name};
use threshold_core::policy::{Layer, Policy};
use threshold_limiter::journal::{AuditLine, AuditedChange};
use threshold_limiter::store::StoreError;

use super::subjects::shown_digest;
use super::{Desk, OperationError};

/// The audit record of one change.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    /// The operator or caller.
    pub(super) who: &'a str,
    /// A verb, a colon, and the old and new state.
    pub(super) action: String,
    /// The layer of the changed subject.
    pub(super) layer: &'a str,
    /// The key of the subject, as [`Desk::audited_key`] writes it, or its digest.
    pub(super) key: &'a str,
    /// The reason.
    pub(super) why: &'a str,
}

/// A change in progress. Its changes of the store reach the disk in one transaction with its audit record.
#[must_use = "a change that is dropped is recorded as not confirmed"]
pub(super) struct Change<'a> {
    desk: &'a Desk,
    /// `None` once the change is confirmed or withdrawn.
    entry: Option<Entry<'a>>,
    journal: Option<AuditedChange>,
}

impl Desk {
    /// Returns the key of a subject as the audit writes it: a name that looks like a digest is told from one.
    pub(super) fn audited_key(&self, layer: Layer, key: &str) -> String {
        let scope = self.policy().identity().user_scope;
        match layer {
            Layer::User => match scope.read(key) {
                Ok((tenant, user)) => {
                    scope.write(tenant.as_deref().map(write_name).as_deref(), &write_name(&user)).into_owned()
                }
                Err(_) => key.to_owned(),
            },
            Layer::Tenant => write_name(key).into_owned(),
            Layer::Global | Layer::Edge | Layer::Endpoint => key.to_owned(),
        }
    }

    /// Begins a change. If the audit is full, the change must not be made.
    pub(super) fn begin<'a>(&'a self, entry: Entry<'a>) -> Result<Change<'a>, OperationError> {
        // From here on the journal writes nothing until the change ends, so that its rows and its audit line cannot
        // be torn apart.
        let journal = self.journal.as_ref().map(|journal| journal.begin_change()).transpose();
        Ok(Change { desk: self, entry: Some(entry), journal: journal.map_err(|_| OperationError::NotRecorded)? })
    }
}

impl Change<'_> {
    /// Records that the change was made.
    pub(super) fn confirm(mut self) {
        if let Some(entry) = self.entry.take() {
            self.record(entry);
        }
    }

    /// Discards the record: the change was not made.
    pub(super) fn withdraw(mut self) {
        self.entry = None;
    }

    /// Handles an error of the store. Only `Full` means that nothing was changed; after any other error the change may have
    /// been made, and is recorded as not confirmed.
    pub(super) fn fail(self, error: StoreError) -> OperationError {
        if error == StoreError::Full {
            self.withdraw();
        }
        OperationError::Store(error)
    }

    /// Replaces the action, if the change turned out to be another one than was begun.
    pub(super) fn correct(&mut self, action: String) {
        if let Some(entry) = &mut self.entry {
            entry.action = action;
        }
    }

    /// Handles an error as [`fail`](Self::fail) does, but returns `when_full` if the store is full.
    pub(super) fn fail_control(self, error: StoreError, when_full: OperationError) -> OperationError {
        let failed = self.fail(error);
        if error == StoreError::Full { when_full } else { failed }
    }

    fn record(&mut self, Entry { who, action, layer, key, why }: Entry<'_>) {
        // The log is read by more people than the journal, and follows `log_identifiers`. The audit needs the name:
        // an operator must be able to tell whose ban it was.
        let policy = self.desk.policy();
        let about = |hides: bool| format!("{layer} {}", shown(&policy, layer, key, hides));
        let shown = about(!policy.identity().log_identifiers);
        tracing::info!(who, action, about = shown, why, "operator change");
        if let Some(journal) = self.journal.take() {
            let (at, who, why) = (self.desk.now(), who.to_owned(), why.to_owned());
            journal.confirm(AuditLine { at, who, action, about: about(false), why });
        }
    }
}

impl Drop for Change<'_> {
    /// A change that is neither confirmed nor withdrawn may have been made: its caller disconnected while the store was
    /// changed, or the store did not answer.
    fn drop(&mut self) {
        if let Some(mut entry) = self.entry.take() {
            entry.action.push_str(" (not confirmed)");
            self.record(entry);
        }
    }
}

/// Formats a time in RFC 3339, to the second.
pub(super) fn moment(at: Timestamp) -> String {
    let seconds = i64::try_from(at.secs_ceil()).ok();
    let read = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    read.map_or_else(|| at.secs_ceil().to_string(), |at| at.to_string())
}

/// Returns a key, or its digest: secret names are always redacted, users, accounts and addresses if `hides` is set.
fn shown(policy: &Policy, layer: &str, key: &str, hides: bool) -> String {
    let identity = policy.identity();
    let hidden = match layer {
        "user" => hides || identity.hides_users(),
        "tenant" => identity.secret_tenant,
        // An account is the name that a person logs in with, not the API key or token that `secret_user` is about. It
        // may still contain the secret name of a tenant.
        "account" => hides || identity.hides_users() && !identity.secret_user,
        "edge" => hides,
        _ => false,
    };
    // A name that was redacted before stays as it is: a digest of a digest would match nothing.
    if !hidden || is_redacted(key) {
        return key.to_owned();
    }
    // An account has the digest that locks and logins show, which is another one than that of a user of this name.
    let account = if layer == "account" { policy.account_digest(read_name(key)).ok().flatten() } else { None };
    if let Some(account) = account {
        return shown_digest(account);
    }
    // An address has the digest of the block that shares its budget, as in events.
    let block = parse_address(key).filter(|_| layer == "edge").map(|ip| AddressGroup::of(ip, identity.ipv6_prefix));
    policy.key().redact(&block.map_or_else(|| read_name(key).to_owned(), |block| block.to_string()))
}
