//! A histogram of times, which threads add to without a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The upper bound of the first bucket is 2 to this power in nanoseconds: 256 ns, the time of the fastest decisions in memory.
const FIRST: u32 = 8;
/// As many bits as the largest value of the first bucket has.
const SMALLEST: u64 = (1 << FIRST) - 1;
/// The number of buckets with a bound. Each bound is twice the one before, so the last one is 17.2 s, more than any timeout.
const BOUNDED: usize = 27;
/// One more bucket has everything above the last bound.
const BUCKETS: usize = BOUNDED + 1;

/// Counts times in buckets from 256 ns to 17.2 s, each twice as wide as the one before.
///
/// That suits a decision in memory, which takes less than a microsecond, as well as a call across a network. A quantile that is
/// computed from the buckets is exact to a factor of two at worst.
#[derive(Debug)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    nanos: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: std::array::from_fn(|_| AtomicU64::new(0)), nanos: AtomicU64::new(0) }
    }
}

impl Histogram {
    /// Adds a time.
    #[inline]
    pub fn observe(&self, time: Duration) {
        // More than 584 years wrap around. Nothing that is measured takes as long.
        let nanos = time.as_secs().wrapping_mul(1_000_000_000).wrapping_add(time.subsec_nanos().into());
        // The bits of the largest value in a bucket are those of its bound less one, because a bound is part of its bucket. Whatever is
        // below the first bound gets as many bits as that has.
        let zeros = (nanos.saturating_sub(1) | SMALLEST).leading_zeros();
        let place = usize::try_from(SMALLEST.leading_zeros().saturating_sub(zeros)).unwrap_or(BOUNDED).min(BOUNDED);
        if let Some(bucket) = self.buckets.get(place) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Returns what was counted so far.
    #[must_use]
    pub fn read(&self) -> HistogramReading {
        HistogramReading {
            buckets: std::array::from_fn(|place| self.buckets.get(place).map_or(0, |own| own.load(Ordering::Relaxed))),
            nanos: self.nanos.load(Ordering::Relaxed),
        }
    }
}

/// The counts of a [`Histogram`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HistogramReading {
    buckets: [u64; BUCKETS],
    nanos: u64,
}

impl HistogramReading {
    /// Returns how many times were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns the sum of all times.
    #[must_use]
    pub const fn sum(&self) -> Duration {
        Duration::from_nanos(self.nanos)
    }

    /// Returns the upper bound of each bucket and the number of times in it alone. The last bucket has no bound.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        let bound = |place: usize| {
            let power = u32::try_from(place).ok()?.saturating_add(FIRST);
            (place < BOUNDED).then(|| Duration::from_nanos(1_u64.checked_shl(power).unwrap_or(u64::MAX)))
        };
        self.buckets.iter().enumerate().map(move |(place, count)| (bound(place), *count))
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &Self) {
        for (own, other) in self.buckets.iter_mut().zip(other.buckets) {
            *own = own.wrapping_add(other);
        }
        self.nanos = self.nanos.wrapping_add(other.nanos);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by leaving out the `saturating_sub(1)`, or by another `FIRST`.
    #[test]
    fn a_time_is_counted_in_the_first_bucket_whose_bound_it_does_not_exceed() {
        for nanos in
            [0, 1, 255, 256, 257, 512, 513, 1_000, 1_000_000, 999_999_999, 17_179_869_184, 17_179_869_185, u64::MAX]
        {
            let histogram = Histogram::default();
            histogram.observe(Duration::from_nanos(nanos));
            let reading = histogram.read();
            let expected =
                reading.buckets().position(|(bound, _)| bound.is_none_or(|bound| bound.as_nanos() >= nanos.into()));
            let found = reading.buckets().position(|(_, count)| count == 1);
            assert_eq!(
                (found, reading.count(), reading.sum()),
                (expected, 1, Duration::from_nanos(nanos)),
                "{nanos} ns"
            );
        }
    }

    #[test]
    fn no_time_that_threads_add_is_lost() {
        let histogram = Histogram::default();
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let histogram = &histogram;
                scope.spawn(move || {
                    (0..1_000).for_each(|at| histogram.observe(Duration::from_nanos(thread * 1_000 + at)));
                });
            }
        });
        let mut reading = histogram.read();
        assert_eq!((reading.count(), reading.sum()), (4_000, Duration::from_nanos((0..4_000).sum())));
        reading.add(&histogram.read());
        assert_eq!(reading.count(), 8_000);
    }
}
