//! The clock of JavaScript.

use threshold_core::{Span, Timestamp};
use threshold_limiter::Clock;
use worker::Date;

/// Reads `Date.now()`. In production it stands still within an event until the event has waited for I/O.
#[derive(Debug, Clone, Copy, Default)]
pub struct DateClock;

impl Clock for DateClock {
    fn now(&self) -> Timestamp {
        Timestamp::EPOCH.plus(Span::from_millis(Date::now().as_millis()))
    }
}
