//! What time it is: the system's clock, cheaply and never backwards by much; and one you set by hand.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use threshold_core::{Span, Timestamp};

/// Tells the time. A limiter asks once for each decision.
pub trait Clock: Send + Sync {
    /// Now.
    fn now(&self) -> Timestamp;
}

/// How often the counter is compared with the wall clock.
const COMPARE_EVERY: u64 = 100_000;
/// A difference to the wall clock beyond which it has been set, or this machine has slept.
const STEPPED: i64 = 1_000_000;
/// By how much of the time that passes the clock is slowed or hurried to meet the wall clock again, as a divisor.
const SLEW: i64 = 20;

/// The system's clock.
///
/// It reads the processor's counter, which takes a few nanoseconds, and compares itself with the wall clock ten times a
/// second. If that is ahead by more than a second, the machine has slept or was set forward, and the clock jumps after
/// it. If it is behind, somebody set it back: the clock then runs 5 % slower until they meet. So time never stands still,
/// and never runs backwards by more than 5 ms, which grants nothing: core counts on no more.
#[derive(Debug)]
pub struct SystemClock {
    counter: quanta::Clock,
    start: u64,
    /// Microseconds to add to those counted since the start.
    offset: AtomicI64,
    /// When to compare next, in microseconds since the start.
    compare_at: AtomicU64,
}

impl SystemClock {
    /// Begins to count now.
    #[must_use]
    pub fn new() -> Self {
        let counter = quanta::Clock::new();
        let start = counter.raw();
        let clock = Self { counter, start, offset: AtomicI64::new(0), compare_at: AtomicU64::new(COMPARE_EVERY) };
        clock.offset.store(wall(), Ordering::Relaxed);
        clock
    }

    fn counted(&self) -> u64 {
        self.counter.delta_as_nanos(self.start, self.counter.raw()).checked_div(1_000).unwrap_or(0)
    }

    #[cold]
    fn compare(&self, counted: u64, due: u64) {
        // One thread does it; the others go on with what they have.
        let next = counted.saturating_add(COMPARE_EVERY);
        if self.compare_at.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        let passed = counted.saturating_sub(due).saturating_add(COMPARE_EVERY);
        let offset = self.offset.load(Ordering::Relaxed);
        let ahead = wall().saturating_sub(signed(counted).saturating_add(offset));
        self.offset.store(offset.saturating_add(correction(ahead, signed(passed))), Ordering::Relaxed);
    }
}

/// How the offset changes when the wall clock is `ahead` by so much after `passed`.
fn correction(ahead: i64, passed: i64) -> i64 {
    let most = passed.checked_div(SLEW).unwrap_or(0).min(COMPARE_EVERY.cast_signed());
    if ahead > STEPPED { ahead } else { ahead.clamp(most.saturating_neg(), most) }
}

fn signed(micros: u64) -> i64 {
    i64::try_from(micros).unwrap_or(i64::MAX)
}

fn wall() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let counted = self.counted();
        let due = self.compare_at.load(Ordering::Relaxed);
        if counted >= due {
            self.compare(counted, due);
        }
        let micros = signed(counted).saturating_add(self.offset.load(Ordering::Relaxed));
        Timestamp::from_micros(u64::try_from(micros).unwrap_or(0))
    }
}

/// A clock that stands still until it is moved, for tests.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Set to a moment.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self(AtomicU64::new(now.micros()))
    }

    /// Moves it on.
    pub fn advance(&self, by: Span) {
        self.0.fetch_add(by.micros(), Ordering::Relaxed);
    }

    /// Sets it, backwards too.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_agrees_with_the_wall() {
        let clock = SystemClock::new();
        let difference = signed(clock.now().micros()).saturating_sub(wall()).abs();
        assert!(difference < 1_000_000, "{difference} µs apart");
    }

    #[test]
    fn a_clock_that_was_set_back_is_met_slowly_and_one_ahead_at_once() {
        // In step: nothing, or the little there is.
        assert_eq!(correction(0, 100_000), 0);
        assert_eq!(correction(40, 100_000), 40);
        assert_eq!(correction(-40, 100_000), -40);
        // Eight hours of sleep.
        assert_eq!(correction(28_800_000_000, 100_000), 28_800_000_000);
        // Set back an hour: 5 % of what has passed, so that time goes on.
        assert_eq!(correction(-3_600_000_000, 100_000), -5_000);
        // Nobody asked for a day: no more than a tenth of a second at once.
        assert_eq!(correction(-3_600_000_000, 86_400_000_000), -100_000);
    }

    #[test]
    fn a_manual_clock_moves_when_told() {
        let clock = ManualClock::new(Timestamp::from_secs(10));
        clock.advance(Span::SECOND);
        assert_eq!(clock.now(), Timestamp::from_secs(11));
        clock.set(Timestamp::from_secs(5));
        assert_eq!(clock.now(), Timestamp::from_secs(5));
    }
}
