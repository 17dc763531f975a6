//! Warnings about stores that fail, at most one a second: an outage must not fill the log.

use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use threshold_core::Span;
use threshold_core::Timestamp;
use threshold_core::policy::OnStoreError;
use threshold_limiter::Clock as _;
use worker::console_warn;

use crate::clock::DateClock;

/// When the last warning of one kind was logged.
#[derive(Debug, Default)]
pub(super) struct Warnings(Mutex<Timestamp>);

impl Warnings {
    /// Logs a warning as JSON, unless one was logged less than a second ago.
    pub(super) fn warn(&self, warning: impl FnOnce() -> Value) {
        if self.is_due(DateClock.now()) {
            console_warn!("{}", warning());
        }
    }

    fn is_due(&self, now: Timestamp) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = now < *last || now.since(*last) >= Span::SECOND;
        if is_due {
            *last = now;
        }
        is_due
    }
}

/// Returns how a policy writes what is done while a store fails.
pub(super) fn mode(on_store_error: OnStoreError) -> &'static str {
    match on_store_error {
        OnStoreError::Open => "open",
        OnStoreError::Closed => "closed",
        OnStoreError::Local => "local",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_warning_is_logged_in_a_second() {
        let warnings = Warnings::default();
        let at = |millis| Timestamp::from_secs(1_767_225_600).plus(Span::from_millis(millis));
        let logged: Vec<u64> = (0..3_000).step_by(10).filter(|millis| warnings.is_due(at(*millis))).collect();
        assert_eq!(logged, [0, 1_000, 2_000]);
        assert!(warnings.is_due(at(0)), "also after the clock stepped back");
    }
}
