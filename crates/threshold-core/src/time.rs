//! Points in time and lengths of time in whole microseconds. Core never reads a clock: callers pass the time in.

use std::fmt;
use std::time::Duration;
#[expect(clippy::disallowed_types, reason = "only converted here; the clock is not read")]
use std::time::SystemTime;

/// A point in time: whole microseconds since the Unix epoch.
///
/// The unit is the microsecond because all hosts must agree on every digit: today's value needs 51 bits, so it is exact
/// in the doubles of Lua and JavaScript. Nanoseconds would not be.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The Unix epoch, which also means "never happened".
    pub const EPOCH: Self = Self(0);
    /// The largest value, which means "never".
    pub const MAX: Self = Self(u64::MAX);

    /// Creates a point in time from whole microseconds since the epoch.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Creates a point in time from whole seconds since the epoch.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000))
    }

    /// Returns the microseconds since the epoch.
    #[must_use]
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// Returns the seconds since the epoch, rounded up, so that waiting until then is never too short.
    #[must_use]
    pub const fn secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// Returns the time since `earlier`; zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }

    /// Returns the point in time that is `span` later, at most [`MAX`](Self::MAX).
    #[must_use]
    pub const fn plus(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// Returns the point in time that is `span` earlier, but not before the epoch.
    #[must_use]
    pub const fn minus(self, span: Span) -> Self {
        Self(self.0.saturating_sub(span.0))
    }

    /// Returns `None` for [`MAX`](Self::MAX), which means "never".
    #[must_use]
    pub fn unless_never(self) -> Option<Self> {
        (self < Self::MAX).then_some(self)
    }

    /// Returns the start of the clock-aligned window of this length that contains this point in time.
    pub(crate) const fn floor_to(self, window: Span) -> Self {
        match self.0.checked_rem(window.0) {
            Some(rest) => Self(self.0.saturating_sub(rest)),
            None => self,
        }
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}µs", self.0)
    }
}

/// The latest time that every platform's `SystemTime` holds is after the year 20,000; later ones become this one.
const LATEST_SYSTEM_TIME: Duration = Duration::from_secs(18_000 * 365 * 86_400);

/// Converts exactly, up to the year 20,000. Later points in time, such as [`Timestamp::MAX`], become that year.
#[expect(clippy::disallowed_types, reason = "only converted here; the clock is not read")]
impl From<Timestamp> for SystemTime {
    fn from(at: Timestamp) -> Self {
        // `Timestamp::MAX` means "never". Adding it would overflow on some platforms, and the result would be the
        // epoch, which means the opposite.
        let since_epoch = Duration::from_micros(at.0).min(LATEST_SYSTEM_TIME);
        Self::UNIX_EPOCH.checked_add(since_epoch).unwrap_or(Self::UNIX_EPOCH)
    }
}

/// Rounds down to the microsecond. Times before the epoch become the epoch.
#[expect(clippy::disallowed_types, reason = "only converted here; the clock is not read")]
impl From<SystemTime> for Timestamp {
    fn from(at: SystemTime) -> Self {
        let since_epoch = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX))
    }
}

/// A length of time in whole microseconds.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(u64);

impl Span {
    /// Zero.
    pub const ZERO: Self = Self(0);
    /// One second.
    pub const SECOND: Self = Self(1_000_000);
    /// One minute.
    pub const MINUTE: Self = Self::from_secs(60);
    /// One hour.
    pub const HOUR: Self = Self::from_secs(3_600);
    /// One day of 24 hours.
    pub const DAY: Self = Self::from_secs(86_400);

    /// Creates a length of time from whole microseconds.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Creates a length of time from whole milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000))
    }

    /// Creates a length of time from whole seconds.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000))
    }

    /// Returns the whole microseconds.
    #[must_use]
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// Returns the milliseconds, rounded up.
    #[must_use]
    pub const fn millis_ceil(self) -> u64 {
        self.0.div_ceil(1_000)
    }

    /// Returns the seconds, rounded up.
    #[must_use]
    pub const fn secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// Returns whether this is zero.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}µs", self.0)
    }
}

/// Rounds up to the microsecond, so that a wait is never too short. Durations beyond 584,000 years saturate.
impl From<Duration> for Span {
    fn from(length: Duration) -> Self {
        Self(u64::try_from(length.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX))
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Self {
        Self::from_micros(span.0)
    }
}

/// Writes the length in its largest whole unit: `5 min`, `2 days`, `0.6 s`.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] =
            [(86_400_000_000, "day"), (3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s")];
        for (size, name) in UNITS {
            // Only exact multiples, so that `90 s` is not shown as `1.5 min`.
            if self.0 >= size && self.0.is_multiple_of(size) {
                let times = self.0.checked_div(size).unwrap_or(0);
                let plural = if name == "day" && times > 1 { "s" } else { "" };
                return write!(f, "{times} {name}{plural}");
            }
        }
        let (size, name) = match self.0 {
            // From a tenth of a second on, because waits are read in seconds: `0.6 s` and not `600 ms`.
            100_000.. => (1_000_000, "s"),
            1_000.. => (1_000, "ms"),
            _ => (1, "µs"),
        };
        write_decimal(f, self.0, size)?;
        write!(f, " {name}")
    }
}

/// Writes `value / size` with at most three decimals, truncated, without trailing zeros.
fn write_decimal(f: &mut fmt::Formatter<'_>, value: u64, size: u64) -> fmt::Result {
    let whole = value.checked_div(size).unwrap_or(0);
    let rest = value.checked_rem(size).unwrap_or(0);
    let thousandths = u128::from(rest).saturating_mul(1_000).checked_div(u128::from(size)).unwrap_or(0);
    if thousandths == 0 {
        return write!(f, "{whole}");
    }
    let digits = format!("{thousandths:03}");
    write!(f, "{whole}.{}", digits.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_written_in_its_largest_unit() {
        let check = |micros, expect: &str| assert_eq!(Span::from_micros(micros).to_string(), expect);
        check(0, "0 µs");
        check(600_000, "0.6 s");
        check(60_000, "60 ms");
        check(1_500, "1.5 ms");
        check(150, "150 µs");
        check(1_500_000, "1.5 s");
        check(60_000_000, "1 min");
        check(90_000_000, "90 s");
        check(3_600_000_000, "1 h");
        check(86_400_000_000 * 7, "7 days");
        check(8_571_428, "8.571 s");
    }

    #[test]
    fn extremes_saturate() {
        assert_eq!(Timestamp::MAX.plus(Span::DAY), Timestamp::MAX);
        assert_eq!(Timestamp::EPOCH.minus(Span::DAY), Timestamp::EPOCH);
        assert_eq!(Timestamp::EPOCH.since(Timestamp::MAX), Span::ZERO);
        assert_eq!(Span::from_secs(u64::MAX).micros(), u64::MAX);
        assert_eq!(Timestamp::from_secs(61).floor_to(Span::MINUTE), Timestamp::from_secs(60));
        assert_eq!(Timestamp::from_secs(61).floor_to(Span::ZERO), Timestamp::from_secs(61));
    }

    /// A duration rounds up, a time rounds down, and extremes saturate.
    #[test]
    #[expect(clippy::disallowed_types, reason = "only converted here; the clock is not read")]
    fn times_convert_to_those_of_the_standard_library_and_back() {
        assert_eq!(Span::from(Duration::from_nanos(1_001)), Span::from_micros(2));
        assert_eq!(Span::from(Duration::MAX), Span::from_micros(u64::MAX));
        assert_eq!(Duration::from(Span::MINUTE), Duration::from_secs(60));
        let at = Timestamp::from_micros(1_767_225_600_123_456);
        assert_eq!(Timestamp::from(SystemTime::from(at)), at);
        let nanos = SystemTime::UNIX_EPOCH + Duration::from_nanos(1_999);
        assert_eq!(Timestamp::from(nanos), Timestamp::from_micros(1));
        assert_eq!(Timestamp::from(SystemTime::UNIX_EPOCH - Duration::from_secs(1)), Timestamp::EPOCH);
        assert!(SystemTime::from(Timestamp::MAX) > SystemTime::from(at));
    }
}
