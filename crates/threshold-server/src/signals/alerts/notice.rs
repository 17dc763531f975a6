//! What is told about an alert.

use std::sync::Arc;

use threshold_core::Timestamp;
use threshold_core::alert::{AlertChange, AlertLevel, AlertNotice};
use threshold_core::policy::{Alert, AlertOn};

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

    /// Writes the notice as JSON, on one line.
    pub(crate) fn to_json(&self) -> String {
        let &Self { on, alert, ref key, change, count, since, at } = self;
        AlertNotice { on, alert, key: key.as_deref(), change, count, since, at }.to_json()
    }

    /// Writes the line of the log.
    pub(crate) fn log(&self) {
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
                    threshold = self.threshold(),
                    periodSec = self.alert.per.secs_ceil(),
                    since = millis(self.since),
                    at = millis(self.at),
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
