//! Warnings, at most one of a kind a second: neither an outage nor an attacker may fill the log.

use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use threshold_core::Span;
use threshold_core::Timestamp;
use threshold_limiter::Clock as _;
use worker::console_warn;

use crate::clock::DateClock;

/// When the last warning of one kind was logged, and how many were left out since.
#[derive(Debug, Default)]
pub(crate) struct Warnings(Mutex<(Timestamp, u64)>);

impl Warnings {
    /// Logs a warning, a JSON object, unless one was logged less than a second ago. `left_out` says how many were not. Returns
    /// whether it was logged.
    pub(crate) fn warn(&self, warning: impl FnOnce() -> Value) -> bool {
        let Some(left_out) = self.due(DateClock.now()) else { return false };
        let mut warning = warning();
        if let Some(object) = warning.as_object_mut().filter(|_| left_out > 0) {
            object.insert("left_out".to_owned(), left_out.into());
        }
        console_warn!("{warning}");
        true
    }

    /// Returns how many warnings were left out, if one may be logged now.
    fn due(&self, now: Timestamp) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, left_out) = &mut *state;
        if now >= *last && now.since(*last) < Span::SECOND {
            *left_out = left_out.saturating_add(1);
            return None;
        }
        *last = now;
        Some(std::mem::take(left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_warning_is_logged_in_a_second() {
        let warnings = Warnings::default();
        let at = |millis| Timestamp::from_secs(1_767_225_600).plus(Span::from_millis(millis));
        let logged: Vec<_> =
            (0..3_000).step_by(10).filter_map(|millis| Some((millis, warnings.due(at(millis))?))).collect();
        assert_eq!(logged, [(0, 0), (1_000, 99), (2_000, 99)]);
        assert!(warnings.due(at(0)).is_some(), "also after the clock stepped back");
    }
}
