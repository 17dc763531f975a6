//! The audit: every change with who made it, what was given and why, in the journal and in the log.

use threshold_core::Timestamp;
use threshold_core::policy::Policy;
use threshold_limiter::journal::{AuditLine, AuditedChange};
use threshold_limiter::store::StoreError;

use super::{Desk, Refused};

/// What the audit has of one change.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    /// Who makes it.
    pub(super) who: &'a str,
    /// What is done: a word, and behind a colon what is given or taken, with what was there before.
    pub(super) action: String,
    /// Whom it is done to: by layer and key.
    pub(super) layer: &'a str,
    pub(super) key: &'a str,
    pub(super) why: &'a str,
}

/// A change under way. What it notes in the journal is written in one transaction with its line of the audit.
#[must_use = "a change that is dropped is recorded as one that nobody has confirmed"]
pub(super) struct Change<'a> {
    desk: &'a Desk,
    /// `None` once it has ended.
    entry: Option<Entry<'a>>,
    journal: Option<AuditedChange>,
}

impl Desk {
    /// Begins a change. What the audit has no room for must not be done.
    pub(super) fn begin<'a>(&'a self, entry: Entry<'a>) -> Result<Change<'a>, Refused> {
        let journal = self.journal.as_ref().map(|journal| journal.begin_change()).transpose();
        Ok(Change { desk: self, entry: Some(entry), journal: journal.map_err(|_| Refused::NotRecorded)? })
    }
}

impl Change<'_> {
    /// It was made.
    pub(super) fn confirm(mut self) {
        if let Some(entry) = self.entry.take() {
            self.record(entry);
        }
    }

    /// It was not made, and never will be: there is nothing to record.
    pub(super) fn withdraw(mut self) {
        self.entry = None;
    }

    /// The store could not answer. Only one that is full has certainly changed nothing.
    pub(super) fn fail(self, error: StoreError) -> Refused {
        if error == StoreError::Full {
            self.withdraw();
        }
        Refused::Store(error)
    }

    /// As [`fail`](Self::fail), of a ban or setting: a full store has room for no more of them.
    pub(super) fn fail_control(self, error: StoreError, when_full: Refused) -> Refused {
        let refused = self.fail(error);
        if error == StoreError::Full { when_full } else { refused }
    }

    fn record(&mut self, Entry { who, action, layer, key, why }: Entry<'_>) {
        let policy = self.desk.policy();
        let about = |hides: bool| format!("{layer} {}", shown(&policy, layer, key, hides));
        let shown = about(!policy.identity().log_identifiers);
        tracing::info!(who, action, about = shown, why, "an operator has changed something");
        if let Some(journal) = self.journal.take() {
            let (at, who, why) = (self.desk.now(), who.to_owned(), why.to_owned());
            journal.confirm(AuditLine { at, who, action, about: about(false), why });
        }
    }
}

impl Drop for Change<'_> {
    /// Neither confirmed nor withdrawn: its caller has left, or the store did not say what became of it.
    fn drop(&mut self) {
        if let Some(mut entry) = self.entry.take() {
            entry.action.push_str(" (not confirmed)");
            self.record(entry);
        }
    }
}

/// A moment as operators read it, to the second.
pub(super) fn moment(at: Timestamp) -> String {
    let seconds = i64::try_from(at.secs_ceil()).ok();
    let read = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    read.map_or_else(|| at.secs_ceil().to_string(), |at| at.to_string())
}

/// A key as it may be shown: secret names never, and users, accounts and addresses not in a log that hides them.
fn shown(policy: &Policy, layer: &str, key: &str, hides: bool) -> String {
    let identity = policy.identity();
    let hidden = match layer {
        "user" => hides || identity.hides_users(),
        "tenant" => identity.secret_tenant,
        "account" => hides || identity.hides_users() && !identity.secret_user,
        "edge" => hides,
        _ => false,
    };
    if hidden && !key.starts_with('#') { policy.key().redact(key) } else { key.to_owned() }
}
