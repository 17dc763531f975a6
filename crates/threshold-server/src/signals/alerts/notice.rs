//! What is told about an alert.

use std::sync::Arc;

use serde_json::{Map, Value};
use threshold_core::Timestamp;
use threshold_core::alert::{AlertChange, AlertLevel, AlertNotice};
use threshold_core::policy::{Alert, AlertOn};
use threshold_core::text::printable;

use super::node::Node;

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
}

impl Notice {
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

    /// Returns the runbook.
    pub(crate) fn runbook(&self, node: &Node) -> String {
        node.runbook(self.on)
    }

    /// Returns the fields of the JSON: those of every host, and those of a server.
    pub(crate) fn fields(&self, node: &Node) -> Map<String, Value> {
        let &Self { on, alert, ref key, change, count, peak, since, at } = self;
        let json = AlertNotice { on, alert, key: key.as_deref(), change, count, since, at }.to_json();
        let mut fields: Map<String, Value> = serde_json::from_str(&json).unwrap_or_default();
        fields.insert("peak".to_owned(), peak.into());
        fields.insert("node".to_owned(), node.name.as_ref().into());
        fields.insert("runbook".to_owned(), self.runbook(node).into());
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
                    node = &*node.name,
                    runbook = self.runbook(node),
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
