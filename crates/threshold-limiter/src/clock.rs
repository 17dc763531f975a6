//! What time it is: the system's clock, cheaply, and without steps that do not last; and one you set by hand.

mod steady;

use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use steady::Steady;
use threshold_core::{Span, Timestamp};

/// Tells the time. A limiter asks once for each decision.
pub trait Clock: Send + Sync {
    /// Now.
    fn now(&self) -> Timestamp;
}

/// How often the counter is compared with the system's clocks, in microseconds.
const COMPARE_EVERY: u64 = 100_000;

/// The system's clock.
///
/// It reads the processor's counter, which takes a few nanoseconds, and ten times a second compares itself with the wall
/// clock and with a clock that nobody sets. A wall clock that was set by more than a second, forward or back, counts when that
/// has lasted for a minute; smaller differences are met at 5 % of the time that passes. Time in suspend counts at once on
/// Linux and Android, which have a clock that goes on meanwhile (`CLOCK_BOOTTIME`). Elsewhere it is a step like any other,
/// unless the system's monotonic clock goes on too.
///
/// Time goes back when a wall clock that was set back has stayed so for a minute. That grants nothing: core keeps what lies in
/// the future in a form that ends.
#[derive(Debug)]
pub struct SystemClock {
    counter: quanta::Clock,
    start: u64,
    began: Instant,
    /// Microseconds to add to those counted since the start.
    offset: AtomicI64,
    /// When it was last compared, in microseconds counted since the start.
    compared_at: AtomicU64,
    steady: Mutex<Steady>,
}

impl SystemClock {
    /// Begins to count now.
    #[must_use]
    pub fn new() -> Self {
        let counter = quanta::Clock::new();
        let (start, began, wall) = (counter.raw(), Instant::now(), wall());
        let steady = Mutex::new(Steady::new(wall, boot(began)));
        Self { counter, start, began, offset: AtomicI64::new(wall), compared_at: AtomicU64::new(0), steady }
    }

    fn counted(&self) -> u64 {
        self.counter.delta_as_nanos(self.start, self.counter.raw()).checked_div(1_000).unwrap_or(0)
    }

    #[cold]
    fn compare(&self) {
        // One thread does it; the others go on with what they have.
        let Ok(mut steady) = self.steady.try_lock() else { return };
        let used = steady.read(wall(), boot(self.began));
        // The counter only fills the time between two comparisons: if it was stopped or reset, that ends here.
        let counted = self.counted();
        self.offset.store(used.saturating_sub(signed(counted)), Ordering::Relaxed);
        self.compared_at.store(counted, Ordering::Relaxed);
    }
}

fn signed(micros: u64) -> i64 {
    i64::try_from(micros).unwrap_or(i64::MAX)
}

fn wall() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Microseconds on a clock that nobody sets, and that goes on in suspend.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot(_: Instant) -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.saturating_mul(1_000_000).saturating_add(now.tv_nsec.checked_div(1_000).unwrap_or(0))
}

/// Microseconds on a clock that nobody sets. Whether it goes on in suspend depends on the system.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot(began: Instant) -> i64 {
    i64::try_from(began.elapsed().as_micros()).unwrap_or(i64::MAX)
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let mut counted = self.counted();
        // A counter that was reset gives a difference that is too large, and not one that is too small.
        if counted.wrapping_sub(self.compared_at.load(Ordering::Relaxed)) >= COMPARE_EVERY {
            self.compare();
            counted = self.counted();
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
    fn a_manual_clock_moves_when_told() {
        let clock = ManualClock::new(Timestamp::from_secs(10));
        clock.advance(Span::SECOND);
        assert_eq!(clock.now(), Timestamp::from_secs(11));
        clock.set(Timestamp::from_secs(5));
        assert_eq!(clock.now(), Timestamp::from_secs(5));
    }
}
