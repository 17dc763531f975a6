//! What is told about an alert.

use std::sync::Arc;

use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use threshold_core::Timestamp;
use threshold_core::alert::{AlertChange, AlertLevel, AlertNotice};
use threshold_core::decision::Cause;
use threshold_core::policy::{Alert, AlertOn};
use threshold_core::text::printable;

use super::causes::Why;
use super::node::Node;
use super::together::Group;

/// A change of an alert: it is raised, rises, or is resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notice {
    pub(crate) on: AlertOn,
    /// Its thresholds.
    pub(crate) alert: Alert,
    /// The address, for alerts on one address.
    pub(crate) key: Option<Arc<str>>,
    pub(crate) change: AlertChange,
    pub(crate) count: u64,
    /// The highest count of the episode so far.
    pub(crate) peak: u64,
    /// When the episode began.
    pub(crate) since: Timestamp,
    /// When this was noticed.
    pub(crate) at: Timestamp,
    /// The name of the server on which the episode began. Receivers know the episode by it, also if the server is started again
    /// under another name.
    pub(crate) node: Arc<str>,
    /// Why most of what was counted was stopped.
    pub(crate) why: Why,
    /// The addresses, if it is about several.
    pub(crate) group: Option<Group>,
}

/// What an episode is known by: the alert, the address if it is about one, and when it began.
pub(crate) type EpisodeId = (AlertOn, Option<Arc<str>>, Timestamp);

impl Notice {
    /// Returns what the episode is known by.
    pub(crate) fn id(&self) -> EpisodeId {
        (self.on, self.key.clone(), self.since)
    }

    /// Returns the level that the alert has reached.
    pub(crate) const fn level(&self) -> AlertLevel {
        match self.change {
            AlertChange::Raised(level) | AlertChange::Resolved(level) => level,
        }
    }

    /// Returns whether the episode is over.
    pub(crate) const fn is_resolved(&self) -> bool {
        matches!(self.change, AlertChange::Resolved(_))
    }

    /// Returns the threshold of its level.
    pub(crate) const fn threshold(&self) -> u64 {
        match self.level() {
            AlertLevel::Warning => self.alert.warning,
            AlertLevel::Critical => self.alert.critical,
        }
    }

    /// Returns the notice of the end of this episode, which is not due to its count.
    pub(super) fn ended(self, now: Timestamp) -> Self {
        Self { change: AlertChange::Resolved(self.level()), count: 0, at: now, ..self }
    }

    /// Returns the notice that this episode is raised, for a receiver that has not heard of it.
    pub(crate) fn raised_again(&self) -> Self {
        let at = if self.is_resolved() { self.since } else { self.at };
        Self { change: AlertChange::Raised(self.level()), count: self.peak.max(self.count), at, ..self.clone() }
    }

    /// Returns an id that is the same whenever this notice is sent: by it a receiver knows what it has already got, also from the
    /// process before.
    pub(crate) fn message_id(&self) -> String {
        let key = self.key.as_deref().unwrap_or_default();
        let state = if self.is_resolved() { "resolved" } else { "raised" };
        let times = [self.since, self.at].map(millis);
        let parts = format!("{:?}", (&*self.node, self.on.name(), key, state, self.level().name(), times));
        let digest: String = Sha256::digest(parts).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        format!("msg_{digest}")
    }

    /// Forgets the name of the largest address of several, if it is this one.
    pub(crate) fn forget_largest(&mut self, address: &str) {
        if let Some(group) = &mut self.group {
            group.largest.take_if(|largest| **largest == *address);
        }
    }

    /// Returns the address that it is about, or the largest of several.
    pub(crate) fn address(&self) -> Option<&Arc<str>> {
        self.key.as_ref().or_else(|| self.group.as_ref()?.largest.as_ref())
    }

    /// Returns the runbook.
    pub(crate) fn runbook(&self, node: &Node) -> String {
        node.runbook(self.on, self.why.cause)
    }

    /// Returns the fields of the JSON: those of every host, and those of a server.
    pub(crate) fn fields(&self, node: &Node) -> Map<String, Value> {
        let &Self { on, alert, ref key, change, count, peak, since, at, node: ref own, ref why, ref group } = self;
        let json = AlertNotice { on, alert, key: key.as_deref(), change, count, since, at }.to_json();
        let mut fields: Map<String, Value> = serde_json::from_str(&json).unwrap_or_default();
        fields.insert("peak".to_owned(), peak.into());
        fields.insert("node".to_owned(), own.as_ref().into());
        fields.insert("runbook".to_owned(), self.runbook(node).into());
        fields.insert("cause".to_owned(), why.cause.map(Cause::name).into());
        fields.insert("rule".to_owned(), why.rule.as_deref().into());
        fields.insert("addresses".to_owned(), group.as_ref().map(|group| group.addresses).into());
        fields.insert("largest".to_owned(), group.as_ref().and_then(|group| group.largest.as_deref()).into());
        fields
    }

    /// Writes the notice as JSON, on one line. Characters that terminals interpret are escaped.
    pub(crate) fn to_json(&self, node: &Node) -> String {
        printable(&Value::from(self.fields(node)).to_string()).into_owned()
    }

    /// Writes the line of the log.
    pub(crate) fn log(&self, node: &Node) {
        // A macro, because tracing takes a level only as a constant.
        macro_rules! line {
            ($level:ident, $state:literal) => {
                tracing::$level!(
                    alert = self.on.name(),
                    state = $state,
                    // Not `level`, which is that of the line.
                    severity = self.level().name(),
                    key = self.key.as_deref(),
                    count = self.count,
                    peak = self.peak,
                    threshold = self.threshold(),
                    periodSec = self.alert.per.secs_ceil(),
                    since = millis(self.since),
                    at = millis(self.at),
                    node = &*self.node,
                    runbook = self.runbook(node),
                    cause = self.why.cause.map(Cause::name),
                    rule = self.why.rule.as_deref(),
                    addresses = self.group.as_ref().map(|group| group.addresses),
                    largest = self.group.as_ref().and_then(|group| group.largest.as_deref()),
                    "alert"
                )
            };
        }
        match self.change {
            AlertChange::Raised(AlertLevel::Critical) => line!(error, "raised"),
            AlertChange::Raised(AlertLevel::Warning) => line!(warn, "raised"),
            AlertChange::Resolved(_) => line!(info, "resolved"),
        }
    }
}

fn millis(at: Timestamp) -> u64 {
    at.micros().checked_div(1_000).unwrap_or(0)
}
