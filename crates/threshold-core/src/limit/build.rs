//! Limits from code and from text.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::algorithm::{Figures, LimitOption};
use super::sliding_window::SlidingWindow;
use super::token_bucket::TokenBucket;
use super::{Algorithm, Anchor, Limit, LimitError, Quota, Unit};
use crate::time::Span;

/// # Limits from code
///
/// The constructors for a second, minute, hour and day are `const` and cannot fail. They mean what a policy means by
/// `"100/s"`, `"100/min"`, `"100/h"` and `"100/day"`: a token bucket up to a minute, a sliding window beyond. An amount of
/// 0 lets nothing through, like [`never`](Self::never); in a policy, 0 is written for "unlimited" instead.
///
/// Those that take a [`Duration`] return an error where a figure is out of range, because both figures may come from a
/// configuration: a period of zero must not become a limit that lets everything through. A fraction of a microsecond is
/// rounded up.
impl Limit {
    /// `amount` per second and as many at once: a token bucket.
    ///
    /// ```
    /// # use threshold_core::Limit;
    /// const PER_SECOND: Limit = Limit::per_second(10);
    /// assert_eq!(Ok(PER_SECOND), "10/s".parse());
    /// ```
    #[must_use]
    pub const fn per_second(amount: u32) -> Self {
        Self::per(amount, Span::SECOND)
    }

    /// `amount` per minute and as many at once: a token bucket. [`burst`](Self::burst) changes how many at once.
    ///
    /// ```
    /// # use threshold_core::Limit;
    /// const PER_MINUTE: Limit = Limit::per_minute(100).burst(20);
    /// assert_eq!(Ok(PER_MINUTE), "100/min burst 20".parse());
    /// ```
    #[must_use]
    pub const fn per_minute(amount: u32) -> Self {
        Self::per(amount, Span::MINUTE)
    }

    /// `amount` in any hour: a sliding window.
    #[must_use]
    pub const fn per_hour(amount: u32) -> Self {
        Self::per(amount, Span::HOUR)
    }

    /// `amount` in any 24 hours: a sliding window.
    #[must_use]
    pub const fn per_day(amount: u32) -> Self {
        Self::per(amount, Span::DAY)
    }

    const fn per(amount: u32, period: Span) -> Self {
        if amount == 0 {
            return Self::never();
        }
        // Every other amount is in range: it is less than 2^32, and so refills within its period.
        let amount = amount as u64;
        if is_short(period) {
            return Self::of_bucket(TokenBucket::clamped(amount, period, amount));
        }
        Self::of_window(SlidingWindow::in_range(amount, period))
    }

    /// The same rate as a token bucket with `burst` at once.
    ///
    /// A burst of 0 lets nothing through. One that would take more than 1,000 years to refill is lowered to the largest that
    /// does not. A limit without a rate, [`concurrent`](Self::concurrent) or [`never`](Self::never), stays as it is.
    #[must_use]
    pub const fn burst(self, burst: u32) -> Self {
        let Some((quota, period)) = self.rate() else { return self };
        if burst == 0 {
            return Self::never();
        }
        Self::of_bucket(TokenBucket::clamped(quota, period, burst as u64))
    }

    /// Nothing ever fits.
    #[must_use]
    pub const fn never() -> Self {
        Self::NEVER
    }

    /// `amount` per `period`, refilled smoothly, and as many at once. [`burst`](Self::burst) changes how many at once.
    ///
    /// # Errors
    /// Where a figure is zero or too large.
    pub fn token_bucket(amount: u64, period: Duration) -> Result<Self, LimitError> {
        LimitOptions::new().algorithm(Algorithm::TokenBucket).limit(amount, period)
    }

    /// `amount` in any window of `period`, counted in 60 sub-windows.
    ///
    /// # Errors
    /// Where a figure is zero or too large, or the period is shorter than 60 µs.
    pub fn sliding(amount: u64, period: Duration) -> Result<Self, LimitError> {
        LimitOptions::new().algorithm(Algorithm::SlidingWindow).limit(amount, period)
    }

    /// `amount` in any window of `period`, exactly: every charge is kept at its own time.
    ///
    /// # Errors
    /// Where a figure is zero or too large; `amount` is at most [`MAX_LOG`](super::MAX_LOG).
    pub fn sliding_log(amount: u64, period: Duration) -> Result<Self, LimitError> {
        LimitOptions::new().algorithm(Algorithm::SlidingLog).limit(amount, period)
    }

    /// About `amount` in any window of `period`, in constant memory: two counts, weighted.
    ///
    /// # Errors
    /// Where a figure is zero or too large.
    pub fn sliding_estimate(amount: u64, period: Duration) -> Result<Self, LimitError> {
        LimitOptions::new().algorithm(Algorithm::SlidingEstimate).limit(amount, period)
    }

    /// `amount` in each window of `period` of the clock.
    ///
    /// # Errors
    /// Where a figure is zero or too large.
    pub fn fixed(amount: u64, period: Duration) -> Result<Self, LimitError> {
        LimitOptions::new().algorithm(Algorithm::FixedWindow).limit(amount, period)
    }

    /// `amount` at once; what is never given back no longer counts after `ttl`.
    ///
    /// # Errors
    /// Where a figure is zero or too large; `amount` is at most [`MAX_CONCURRENCY`](super::MAX_CONCURRENCY).
    pub fn concurrent(amount: u64, ttl: Duration) -> Result<Self, LimitError> {
        LimitOptions::new().algorithm(Algorithm::Concurrency).limit(amount, ttl)
    }
}

/// Reads a limit as a policy writes it (`"100/min"`, `"5/min burst 20"`, `"1GB/h"`, `"none"`), with the algorithm that a
/// policy would choose. [`LimitOptions`] names another algorithm.
///
/// ```
/// # use threshold_core::Limit;
/// # use threshold_core::limit::Algorithm;
/// let limit: Limit = "100/h".parse()?;
/// assert_eq!(limit.algorithm(), Some(Algorithm::SlidingWindow));
/// # Ok::<(), threshold_core::limit::LimitError>(())
/// ```
impl FromStr for Limit {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        LimitOptions::new().parse(text)
    }
}

/// Writes the limit as a policy does, counting requests: `100/min burst 20`. A limit of the algorithm that a policy would
/// choose reads back as itself. [`notation`](Limit::notation) counts in bytes, and [`words`](Limit::words) explains.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_quota(Unit::Count).fmt(f)
    }
}

impl Limit {
    /// The limit as a policy writes it, counting in `unit`.
    #[must_use]
    pub fn notation(&self, unit: Unit) -> String {
        self.to_quota(unit).to_string()
    }

    /// Splits the limit into the quota and the options that make it, with the burst as an option.
    pub(crate) fn to_parts(self) -> (Quota, LimitOptions) {
        let mut quota = self.to_quota(Unit::Count);
        let defaults = LimitOptions::new();
        let Some(figures) = self.figures() else { return (quota, defaults) };
        let mut options = LimitOptions {
            algorithm: self.algorithm(),
            anchor: figures.anchor,
            buckets: figures.buckets,
            ttl: figures.period,
            ..defaults
        };
        if let Quota::Per { burst, .. } = &mut quota {
            options.burst = burst.take();
        }
        (quota, options)
    }

    fn to_quota(self, unit: Unit) -> Quota {
        let Some(figures) = self.figures() else { return Quota::Never };
        if self.is_concurrency() {
            return Quota::AtOnce(figures.quota);
        }
        // The default is left out, so that a limit reads back as it was written.
        let burst = figures.burst.filter(|burst| *burst != figures.quota);
        Quota::Per { amount: figures.quota, unit, period: figures.period, burst }
    }
}

/// How a limit is counted, beyond its quota and period.
///
/// ```
/// # use threshold_core::limit::{Algorithm, Anchor, LimitOptions};
/// let limit = LimitOptions::new().algorithm(Algorithm::FixedWindow).anchor(Anchor::First).parse("20/h")?;
/// assert_eq!(limit.bound(), 40);
/// # Ok::<(), threshold_core::limit::LimitError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitOptions {
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) anchor: Anchor,
    pub(crate) buckets: u32,
    pub(crate) burst: Option<u64>,
    pub(crate) ttl: Span,
}

impl Default for LimitOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LimitOptions {
    /// The algorithm that a policy would choose, and the defaults of its options.
    #[must_use]
    pub const fn new() -> Self {
        Self { algorithm: None, anchor: Anchor::Clock, buckets: Figures::BUCKETS, burst: None, ttl: Span::MINUTE }
    }

    /// Counts with this algorithm.
    #[must_use]
    pub const fn algorithm(self, algorithm: Algorithm) -> Self {
        Self { algorithm: Some(algorithm), ..self }
    }

    /// Sets where fixed windows begin: at the multiples of the period, unless said.
    #[must_use]
    pub const fn anchor(self, anchor: Anchor) -> Self {
        Self { anchor, ..self }
    }

    /// Sets how many sub-windows a sliding window has: 60, unless said.
    #[must_use]
    pub const fn buckets(self, buckets: u32) -> Self {
        Self { buckets, ..self }
    }

    /// Sets how much a token bucket holds: the quota, unless said here or in the text.
    #[must_use]
    pub const fn burst(self, burst: u64) -> Self {
        Self { burst: Some(burst), ..self }
    }

    /// Sets how long a request counts as in flight under a concurrency limit that is read from a text: a minute, unless said.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { ttl: span(ttl), ..self }
    }

    /// Reads a limit as a policy writes it.
    ///
    /// # Errors
    /// Where the text is not a limit, or not one that the algorithm can have.
    pub fn parse(&self, text: &str) -> Result<Limit, LimitError> {
        self.of_quota(text.parse()?, false)?.ok_or(LimitError::Unlimited)
    }

    /// Makes a limit of `amount` per `period`; for concurrency, of `amount` at once for at most `period`.
    ///
    /// # Errors
    /// Where a figure is out of range, or is not one that the algorithm can have.
    pub fn limit(&self, amount: u64, period: Duration) -> Result<Limit, LimitError> {
        self.of_figures(Figures::new(amount, span(period)), Unit::Count, false)
    }

    /// The limit of a quota as written; `None` is unlimited. `named_cost` says that it counts neither requests nor bytes.
    pub(crate) fn of_quota(&self, quota: Quota, named_cost: bool) -> Result<Option<Limit>, LimitError> {
        let held = self.algorithm.is_some_and(Algorithm::is_concurrency);
        match quota {
            Quota::Unlimited => Ok(None),
            Quota::Never => Ok(Some(Limit::never())),
            Quota::AtOnce(amount) if held => {
                self.of_figures(Figures::new(amount, self.ttl), Unit::Count, named_cost).map(Some)
            }
            // A bare number under any other algorithm is a limit whose period was forgotten, not one of so many at
            // once.
            Quota::AtOnce(quota) => Err(LimitError::NoPeriod { quota }),
            Quota::Per { .. } if held => Err(LimitError::ConcurrencyPeriod),
            Quota::Per { amount, unit, period, burst } => {
                let figures = Figures { burst, ..Figures::new(amount, period) };
                self.of_figures(figures, unit, named_cost).map(Some)
            }
        }
    }

    fn of_figures(&self, figures: Figures, unit: Unit, named_cost: bool) -> Result<Limit, LimitError> {
        let algorithm = self.algorithm.unwrap_or_else(|| Algorithm::default_for(figures.period, unit, named_cost));
        let burst = figures.burst.or(self.burst);
        // Ignoring it would leave a limit in force that differs from what the policy says.
        if burst.is_some() && !algorithm.takes(LimitOption::Burst) {
            return Err(LimitError::BurstOf { algorithm });
        }
        algorithm.make(&Figures { burst, anchor: self.anchor, buckets: self.buckets, ..figures })
    }
}

impl Algorithm {
    /// The algorithm of a limit that names none: a token bucket up to a minute, a sliding window beyond, since a bucket
    /// that starts full would give an idle client twice a day's quota.
    #[must_use]
    pub const fn default_for(period: Span, unit: Unit, named_cost: bool) -> Self {
        if is_short(period) && matches!(unit, Unit::Count) && !named_cost {
            Self::TokenBucket
        } else {
            Self::SlidingWindow
        }
    }
}

/// Whether requests per this period are counted by a token bucket, unless another algorithm is named.
const fn is_short(period: Span) -> bool {
    period.micros() <= Span::MINUTE.micros()
}

/// A period in whole microseconds, rounded up: a longer period never lets more through.
fn span(period: Duration) -> Span {
    Span::from_micros(u64::try_from(period.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use crate::limit::{MAX_CONCURRENCY, MAX_LOG, MAX_QUOTA};

    const MINUTE: Duration = Duration::from_secs(60);

    /// A limit of code is the one that a policy makes of the same words.
    ///
    /// Woken by: `Span::HOUR` in `per_day`; `<` for `<=` in `is_short`; and `burst` that keeps the algorithm.
    #[test]
    fn a_limit_from_code_is_the_one_from_text() {
        let check = |limit: Limit, text: &str| assert_eq!(Ok(limit), text.parse(), "{text}");
        check(Limit::per_second(10), "10/s");
        check(Limit::per_minute(100), "100/min");
        check(Limit::per_hour(100), "100/h");
        check(Limit::per_day(u32::MAX), "4294967295/day");
        check(Limit::per_minute(100).burst(20), "100/min burst 20");
        check(Limit::never(), "none");
        let named = |algorithm, text: &str| LimitOptions::new().algorithm(algorithm).parse(text);
        assert_eq!(Ok(Limit::per_hour(100).burst(20)), named(Algorithm::TokenBucket, "100/h burst 20"));
        assert_eq!(Limit::token_bucket(7, MINUTE), named(Algorithm::TokenBucket, "7/min"));
        assert_eq!(Limit::sliding(7, MINUTE), named(Algorithm::SlidingWindow, "7/min"));
        assert_eq!(Limit::sliding_log(7, MINUTE), named(Algorithm::SlidingLog, "7/min"));
        assert_eq!(Limit::sliding_estimate(7, MINUTE), named(Algorithm::SlidingEstimate, "7/min"));
        assert_eq!(Limit::fixed(7, MINUTE), named(Algorithm::FixedWindow, "7/min"));
        assert_eq!(Limit::concurrent(7, MINUTE), named(Algorithm::Concurrency, "7"));
    }

    /// Every limit that code makes is one: nothing that comes from a configuration panics or lets everything through.
    ///
    /// Woken by: leaving out the test for 0 in `per` or in `burst`, or the one for `most` in `TokenBucket::clamped`.
    #[test]
    fn figures_at_the_ends_make_a_limit_or_an_error() {
        for nothing in [Limit::per_second(0), Limit::per_day(0), Limit::per_minute(9).burst(0), Limit::never().burst(5)]
        {
            assert!(nothing.is_never(), "{nothing}");
        }
        let held = Limit::concurrent(3, MINUTE).unwrap();
        assert_eq!(held.burst(9), held);
        // A unit a day refills 365,000 in 1,000 years.
        assert_eq!(Limit::per_day(1).burst(u32::MAX), Limit::per_day(1).burst(365_000));
        assert_eq!(Limit::per_day(1).burst(365_000).capacity(), 365_000);
        assert_eq!(Limit::sliding(1, Duration::ZERO), Err(LimitError::Period));
        assert_eq!(Limit::fixed(1, Duration::MAX), Err(LimitError::Period));
        assert_eq!(Limit::token_bucket(0, MINUTE), Err(LimitError::Quota { quota: 0 }));
        assert_eq!(Limit::sliding_estimate(u64::MAX, MINUTE), Err(LimitError::Quota { quota: u64::MAX }));
        let quota = u64::from(MAX_LOG) + 1;
        assert_eq!(Limit::sliding_log(quota, MINUTE), Err(LimitError::LongLog { quota }));
        let quota = u64::from(MAX_CONCURRENCY) + 1;
        assert_eq!(Limit::concurrent(quota, MINUTE), Err(LimitError::Concurrency { quota }));
        assert_eq!(Limit::concurrent(1, Duration::ZERO), Err(LimitError::Ttl));
        assert!(Limit::token_bucket(MAX_QUOTA, MINUTE).is_ok());
        // Rounded up, so never more than was asked for.
        assert_eq!(Limit::fixed(1, Duration::from_nanos(1)), Limit::fixed(1, Duration::from_micros(1)));
    }

    #[test]
    fn an_error_says_why_and_the_notation_is_its_source() {
        let check = |text: &str, expect: &str| assert_eq!(text.parse::<Limit>().unwrap_err().to_string(), expect);
        check("unlimited", "unlimited is no limit");
        check("10", "a limit needs a period: write \"10/min\", or algorithm = \"concurrency\" for so many at once");
        let in_hours = "5/h burst 2";
        check(in_hours, &LimitError::BurstOf { algorithm: Algorithm::SlidingWindow }.to_string());
        let held = LimitOptions::new().algorithm(Algorithm::Concurrency).parse("10/min");
        assert_eq!(held, Err(LimitError::ConcurrencyPeriod));
        let source = "10 per min".parse::<Limit>().unwrap_err();
        let source = source.source().and_then(|source| source.downcast_ref::<crate::limit::NotationError>()).unwrap();
        assert_eq!(source.at, 3..6);
    }

    /// A quota's number, its period in the notation, and its burst.
    fn texts() -> impl Strategy<Value = String> {
        let amount = prop_oneof![1..2_000u64, Just(MAX_QUOTA)];
        const PERIODS: [&str; 12] =
            ["ms", "7ms", "s", "90s", "min", "5min", "h", "day", "36h", "week", "month", "year"];
        let size = select(&["", "", "B", "KB", "MiB"][..]);
        let burst = prop::option::of(1..5_000u64);
        (amount, size, select(&PERIODS[..]), burst).prop_filter_map("no such limit", |(amount, size, period, burst)| {
            let amount = if size.is_empty() { amount } else { amount.min(5_000) };
            let burst = burst.map(|burst| format!(" burst {burst}{size}")).unwrap_or_default();
            Some(format!("{amount}{size}/{period}{burst}"))
        })
    }

    proptest! {
        /// What a limit displays reads back as the same limit: by itself if it counts requests with the algorithm that a policy
        /// would choose, else with its algorithm named.
        ///
        /// Woken by: leaving out `burst` in `to_quota`; and `Unit::Count` for `unit` in `notation`.
        #[test]
        fn a_displayed_limit_reads_back(text in texts(), algorithm in select(&Algorithm::ALL[..])) {
            if let Ok(limit) = text.parse::<Limit>() {
                let chosen = Algorithm::default_for(limit.period(), Unit::Count, false);
                if limit.algorithm() == Some(chosen) {
                    prop_assert_eq!(limit.to_string().parse::<Limit>(), Ok(limit));
                }
                let bytes = limit.notation(Unit::Bytes).parse::<Limit>();
                if limit.algorithm() == Some(Algorithm::SlidingWindow) {
                    prop_assert_eq!(bytes, Ok(limit));
                }
            }
            let options = LimitOptions::new().algorithm(algorithm);
            if let Ok(limit) = options.parse(&text) {
                prop_assert_eq!(options.parse(&limit.to_string()), Ok(limit));
            }
        }
    }
}
