//! Clocks: the system's, cheap to read and without short-lived steps, and one that is set by hand.

#[cfg(feature = "memory")]
mod steady;
#[cfg(feature = "memory")]
mod system;

use std::sync::atomic::{AtomicU64, Ordering};

use threshold_core::{Span, Timestamp};

#[cfg(feature = "memory")]
pub use system::SystemClock;

/// A source of the time. A limiter reads it once for each decision.
pub trait Clock: Send + Sync {
    /// Returns the current time.
    fn now(&self) -> Timestamp;

    /// Returns the value of a counter, to measure how long something takes. A limiter with observers reads it some times for each
    /// decision, so it is in the counter's own unit.
    fn ticks(&self) -> u64 {
        self.now().micros()
    }

    /// Returns the current time and [`ticks`](Self::ticks), of about the same moment.
    fn now_and_ticks(&self) -> (Timestamp, u64) {
        (self.now(), self.ticks())
    }

    /// Returns the nanoseconds between two values of [`ticks`](Self::ticks); 0 if the counter has gone back.
    fn nanos_between(&self, start: u64, end: u64) -> u64 {
        end.saturating_sub(start).saturating_mul(1_000)
    }
}

/// A clock for tests, which stands still until it is moved.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Creates a clock that is set to `now`.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self(AtomicU64::new(now.micros()))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Span) {
        self.0.fetch_add(by.micros(), Ordering::Relaxed);
    }

    /// Sets the clock, forward or back.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.micros(), Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::Relaxed))
    }
}

impl<C: Clock + ?Sized> Clock for std::sync::Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }

    #[inline]
    fn ticks(&self) -> u64 {
        (**self).ticks()
    }

    #[inline]
    fn now_and_ticks(&self) -> (Timestamp, u64) {
        (**self).now_and_ticks()
    }

    #[inline]
    fn nanos_between(&self, start: u64, end: u64) -> u64 {
        (**self).nanos_between(start, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_moves_by_hand_only() {
        let clock = ManualClock::new(Timestamp::from_secs(10));
        clock.advance(Span::SECOND);
        assert_eq!(clock.now(), Timestamp::from_secs(11));
        clock.set(Timestamp::from_secs(5));
        assert_eq!(clock.now(), Timestamp::from_secs(5));
    }
}
