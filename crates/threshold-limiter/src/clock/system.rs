//! The system's clock, read by the processor's counter.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use threshold_core::Timestamp;

use super::Clock;
use super::steady::Steady;

/// How often the counter is compared with the system's clocks, in microseconds: often enough to notice a suspend at once, and
/// seldom enough that a read costs a few nanoseconds on average.
const COMPARE_EVERY: u64 = 100_000;

/// The system's clock.
///
/// It reads the processor's counter, which takes a few nanoseconds, and ten times a second compares itself with the wall
/// clock and with a monotonic clock. A wall clock that was set by more than a second, forward or back, is followed after the
/// step has lasted for a minute; smaller differences are slewed at 5 % of the time that passes. Time in suspend counts at
/// once on Linux and Android, whose `CLOCK_BOOTTIME` runs on meanwhile. On other systems a suspend is a step like any other,
/// unless the monotonic clock runs on too.
///
/// The time goes back when the wall clock was set back and has stayed so for a minute. That grants no capacity: core bounds
/// state that lies in the future.
#[derive(Debug)]
pub struct SystemClock {
    counter: quanta::Clock,
    start: u64,
    began: Instant,
    /// Microseconds to add to the time counted since the start.
    offset: AtomicI64,
    /// The time of the last comparison, in microseconds counted since the start.
    compared_at: AtomicU64,
    steady: Mutex<Steady>,
}

impl SystemClock {
    /// Creates a clock that starts from the wall clock's present time.
    #[must_use]
    pub fn new() -> Self {
        let counter = quanta::Clock::new();
        // Read right after each other, so that they stand for the same moment.
        let (start, began, wall) = (counter.raw(), Instant::now(), wall());
        let steady = Mutex::new(Steady::new(wall, boot(began)));
        Self { counter, start, began, offset: AtomicI64::new(wall), compared_at: AtomicU64::new(0), steady }
    }

    fn counted(&self) -> u64 {
        self.counted_until(self.counter.raw())
    }

    fn counted_until(&self, ticks: u64) -> u64 {
        self.counter.delta_as_nanos(self.start, ticks).checked_div(1_000).unwrap_or(0)
    }

    #[cold]
    fn compare(&self) {
        // One thread compares; the others use the offset as it is.
        let Ok(mut steady) = self.steady.try_lock() else { return };
        let used = steady.read(wall(), boot(self.began));
        // The counter only bridges the time between two comparisons, so a counter that was stopped or reset is corrected here.
        let counted = self.counted();
        // The two stores have no order. A thread that sees only one of them reads a time that lacks this correction, or
        // compares once more.
        self.offset.store(used.saturating_sub(signed(counted)), Ordering::Relaxed);
        self.compared_at.store(counted, Ordering::Relaxed);
    }
}

fn signed(micros: u64) -> i64 {
    i64::try_from(micros).unwrap_or(i64::MAX)
}

fn wall() -> i64 {
    // A wall clock before 1970 counts as 1970.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Returns the microseconds of a monotonic clock that runs on in suspend.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot(_: Instant) -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.saturating_mul(1_000_000).saturating_add(now.tv_nsec.checked_div(1_000).unwrap_or(0))
}

/// Returns the microseconds of a monotonic clock. Whether it runs on in suspend depends on the system.
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
        self.now_and_ticks().0
    }

    #[inline]
    fn now_and_ticks(&self) -> (Timestamp, u64) {
        let ticks = self.counter.raw();
        let mut counted = self.counted_until(ticks);
        // After a reset of the counter the wrapped difference is large, so that it is compared at once.
        if counted.wrapping_sub(self.compared_at.load(Ordering::Relaxed)) >= COMPARE_EVERY {
            self.compare();
            counted = self.counted();
        }
        let micros = signed(counted).saturating_add(self.offset.load(Ordering::Relaxed));
        (Timestamp::from_micros(u64::try_from(micros).unwrap_or(0)), ticks)
    }

    #[inline]
    fn ticks(&self) -> u64 {
        self.counter.raw()
    }

    #[inline]
    fn nanos_between(&self, start: u64, end: u64) -> u64 {
        self.counter.delta_as_nanos(start, end)
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
}
