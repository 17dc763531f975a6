//! Moments and lengths of time, as the caller tells them: core never reads a clock.

use std::fmt;

/// Whole microseconds since the Unix epoch.
///
/// Microseconds, because every host must agree to the last digit: today's value needs 51 bits, so it is
/// exact in the doubles of Lua and JavaScript, where nanoseconds would not be.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The Unix epoch, which also stands for "never happened".
    pub const EPOCH: Self = Self(0);
    /// The end of time: "not while this clock runs".
    pub const MAX: Self = Self(u64::MAX);

    /// From whole microseconds since the epoch.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// From whole seconds since the epoch.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000))
    }

    /// Microseconds since the epoch.
    #[must_use]
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// Seconds since the epoch, rounded up, so that waiting until then is never too short.
    #[must_use]
    pub const fn secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// How long after `earlier` this is; nothing if it is not after it.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }

    /// This much later.
    #[must_use]
    pub const fn plus(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// This much earlier, but not before the epoch.
    #[must_use]
    pub const fn minus(self, span: Span) -> Self {
        Self(self.0.saturating_sub(span.0))
    }

    /// This moment, unless it is the end of time: that never comes.
    #[must_use]
    pub fn unless_never(self) -> Option<Self> {
        (self < Self::MAX).then_some(self)
    }

    /// The start of the clock-aligned window of this length that holds this moment.
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

/// A length of time in whole microseconds.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(u64);

impl Span {
    /// No time at all.
    pub const ZERO: Self = Self(0);
    /// One second.
    pub const SECOND: Self = Self(1_000_000);
    /// One minute.
    pub const MINUTE: Self = Self::from_secs(60);
    /// One hour.
    pub const HOUR: Self = Self::from_secs(3_600);
    /// One day of 24 hours.
    pub const DAY: Self = Self::from_secs(86_400);

    /// From whole microseconds.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// From whole milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000))
    }

    /// From whole seconds.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000))
    }

    /// Whole microseconds.
    #[must_use]
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// Milliseconds, rounded up.
    #[must_use]
    pub const fn millis_ceil(self) -> u64 {
        self.0.div_ceil(1_000)
    }

    /// Seconds, rounded up.
    #[must_use]
    pub const fn secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// Whether this is no time at all.
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

/// As a person would say it: `5 min`, `2 days`, `0.6 s`.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] =
            [(86_400_000_000, "day"), (3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s")];
        for (size, name) in UNITS {
            if self.0 >= size && self.0.is_multiple_of(size) {
                let times = self.0.checked_div(size).unwrap_or(0);
                let plural = if name == "day" && times > 1 { "s" } else { "" };
                return write!(f, "{times} {name}{plural}");
            }
        }
        let (size, name) = match self.0 {
            100_000.. => (1_000_000, "s"),
            1_000.. => (1_000, "ms"),
            _ => (1, "µs"),
        };
        write_decimal(f, self.0, size)?;
        write!(f, " {name}")
    }
}

/// Writes `value / size` with at most three decimals, cut off, without trailing zeros.
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
    fn a_span_reads_as_a_person_would_say_it() {
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
}
