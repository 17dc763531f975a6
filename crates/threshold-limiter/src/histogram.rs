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

    /// Returns a time that this share of the counted times does not exceed, such as 0.99; `None` if nothing was counted. Times are
    /// taken as evenly spread within a bucket, and those above the last bound as that bound.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53, up to which a float is exact")]
        let as_float = |count: u64| count as f64;
        let wanted = as_float(self.count()) * share.clamp(0.0, 1.0);
        let (mut below, mut lower) = (0.0, Duration::ZERO);
        for (bound, count) in self.buckets() {
            let Some(bound) = bound else { break };
            let within = as_float(count);
            if count > 0 && below + within >= wanted {
                let part = ((wanted - below) / within).clamp(0.0, 1.0);
                return Some(lower.saturating_add(bound.saturating_sub(lower).mul_f64(part)));
            }
            below += within;
            lower = bound;
        }
        (self.count() > 0).then_some(lower)
    }

    /// Returns what was counted since an earlier reading of the same histogram.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let count = |place: usize| {
            let of = |reading: &Self| reading.buckets.get(place).copied().unwrap_or(0);
            of(self).saturating_sub(of(earlier))
        };
        Self { buckets: std::array::from_fn(count), nanos: self.nanos.saturating_sub(earlier.nanos) }
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

    /// Woken by returning the lower bound of the bucket, or by counting the wanted share from the end.
    #[test]
    fn a_quantile_lies_in_the_bucket_of_its_time() {
        let histogram = Histogram::default();
        assert_eq!(histogram.read().quantile(0.5), None);
        (0..90).for_each(|_| histogram.observe(Duration::from_nanos(900)));
        let earlier = histogram.read();
        (0..10).for_each(|_| histogram.observe(Duration::from_millis(3)));
        let reading = histogram.read();
        let within = |share: f64, low: u64, high: u64| {
            let found = reading.quantile(share).unwrap();
            assert!((low..=high).contains(&u64::try_from(found.as_nanos()).unwrap()), "{share}: {found:?}");
        };
        within(0.0, 512, 1_024);
        within(0.5, 512, 1_024);
        within(0.9, 512, 1_024);
        within(0.91, 2_097_152, 4_194_304);
        within(1.0, 2_097_152, 4_194_304);
        let later = reading.since(&earlier);
        assert_eq!((later.count(), later.sum()), (10, Duration::from_millis(30)));
        assert_eq!(earlier.since(&reading).count(), 0, "a reading never falls below zero");
        histogram.observe(Duration::from_secs(100));
        assert_eq!(histogram.read().quantile(1.0), Some(Duration::from_nanos(17_179_869_184)));
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
