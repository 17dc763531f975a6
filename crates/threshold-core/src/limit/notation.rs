//! The notation of limits, `"100/5min burst 20"`, with errors that point at the character.

use std::fmt;
use std::ops::Range;

use super::{MAX_PERIOD, MAX_QUOTA};
use crate::time::Span;

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Requests, or a named cost.
    Count,
    /// Bytes.
    Bytes,
}

/// A limit as written, before an algorithm is chosen for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quota {
    /// `unlimited`, `0` or `0/min`.
    Unlimited,
    /// `none`: nothing ever fits.
    Never,
    /// `10`: so many at once.
    AtOnce(u64),
    /// `N/period`, perhaps with a burst.
    Per {
        /// N.
        amount: u64,
        /// What N counts.
        unit: Unit,
        /// The period.
        period: Span,
        /// `burst B`.
        burst: Option<u64>,
    },
}

/// Where a limit cannot be read, and what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}; {help}")]
pub struct NotationError {
    /// The bytes of the text that are wrong.
    pub at: Range<usize>,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub help: String,
}

/// The units of time in microseconds, with the other names that errors recognise.
const TIMES: [(&str, u64, &[&str]); 8] = [
    ("ms", 1_000, &["msec", "millis", "millisecond", "milliseconds"]),
    ("s", 1_000_000, &["sec", "secs", "second", "seconds"]),
    ("min", 60_000_000, &["m", "mins", "minute", "minutes"]),
    ("h", 3_600_000_000, &["hr", "hrs", "hour", "hours"]),
    ("day", 86_400_000_000, &["d", "days"]),
    ("week", 7 * 86_400_000_000, &["w", "weeks"]),
    ("month", 30 * 86_400_000_000, &["mo", "months"]),
    ("year", 365 * 86_400_000_000, &["y", "yr", "years"]),
];

/// The units of size in bytes.
const SIZES: [(&str, u64); 7] = [
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
];

/// The help of an error that has no better one.
const SHAPE: &str = "a limit is written \"100/min\", \"5/5min\", \"50MB/day\" or \"100/min burst 20\"";

impl std::str::FromStr for Quota {
    type Err = NotationError;

    fn from_str(text: &str) -> Result<Self, NotationError> {
        let mut cursor = Cursor { text, at: 0 };
        cursor.spaces();
        match cursor.rest().trim_end() {
            "unlimited" => return Ok(Self::Unlimited),
            "none" => return Ok(Self::Never),
            _ => {}
        }
        let (amount, unit) = cursor.amount("a limit")?;
        cursor.spaces();
        if cursor.is_done() {
            return match (amount, unit) {
                (0, _) => Ok(Self::Unlimited),
                (_, Unit::Bytes) => Err(cursor.wrong(0, "this limit has no period", SHAPE)),
                (amount, Unit::Count) => Ok(Self::AtOnce(amount)),
            };
        }
        cursor.expect_slash()?;
        let period = cursor.period()?;
        let burst = cursor.burst(unit)?;
        cursor.spaces();
        if !cursor.is_done() {
            return Err(cursor.wrong_word("nothing may follow the limit", SHAPE));
        }
        if amount == 0 {
            return Ok(Self::Unlimited);
        }
        Ok(Self::Per { amount, unit, period, burst })
    }
}

/// Reads a length of time: `60s`, `5min`, `1h`, `24 h`, `day`.
///
/// # Errors
/// Where the text is not a number and a unit, with the place.
pub fn parse_span(text: &str) -> Result<Span, NotationError> {
    let mut cursor = Cursor { text, at: 0 };
    cursor.spaces();
    let span = cursor.period()?;
    cursor.spaces();
    if cursor.is_done() {
        Ok(span)
    } else {
        Err(cursor.wrong_word("nothing may follow a length of time", "write \"60s\", \"5min\" or \"24h\""))
    }
}

struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn is_done(&self) -> bool {
        self.rest().is_empty()
    }

    /// Takes the characters that `wanted` accepts off the front.
    fn take(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let len = rest.find(|c| !wanted(c)).unwrap_or(rest.len());
        self.at = self.at.saturating_add(len);
        rest.get(..len).unwrap_or_default()
    }

    fn spaces(&mut self) {
        self.take(char::is_whitespace);
    }

    fn wrong(&self, from: usize, message: impl Into<String>, help: impl Into<String>) -> NotationError {
        let end = self.at.max(from.saturating_add(1)).min(self.text.len()).max(from);
        NotationError { at: from..end, message: message.into(), help: help.into() }
    }

    /// Points at the word that starts here.
    fn wrong_word(&mut self, message: &str, help: &str) -> NotationError {
        let from = self.at;
        self.take(|c| !c.is_whitespace());
        self.wrong(from, message, help)
    }

    fn number(&mut self, what: &str) -> Result<u64, NotationError> {
        let from = self.at;
        let digits = self.take(|c| c.is_ascii_digit());
        if digits.is_empty() {
            return Err(self.wrong_word(&format!("{what} starts with a whole number"), SHAPE));
        }
        // `1.000` is a thousand in some countries and one in others. Guessing could be wrong by a factor of 1,000.
        if self.rest().starts_with(['.', ',', '_']) {
            self.take(|c| c.is_ascii_digit() || matches!(c, '.' | ',' | '_'));
            return Err(self.wrong(from, "a number is whole and written without separators", SHAPE));
        }
        digits
            .parse()
            .ok()
            .filter(|&number| number <= MAX_QUOTA)
            .ok_or_else(|| self.wrong(from, format!("{digits} is too large"), format!("the largest is {MAX_QUOTA}")))
    }

    fn amount(&mut self, what: &str) -> Result<(u64, Unit), NotationError> {
        let from = self.at;
        let number = self.number(what)?;
        let suffix_at = self.at;
        let suffix = self.take(|c| c.is_ascii_alphabetic());
        if suffix.is_empty() {
            return Ok((number, Unit::Count));
        }
        let Some((_, size)) = SIZES.iter().find(|(name, _)| *name == suffix) else {
            // Sizes are case-sensitive: `mb` could be megabits, and `Mb` is.
            let close = SIZES.iter().find(|(name, _)| name.eq_ignore_ascii_case(suffix));
            let help = match close {
                Some((name, _)) => format!("write {number}{name}"),
                None if TIMES.iter().any(|(name, _, others)| *name == suffix || others.contains(&suffix)) => {
                    format!("a period follows a slash: write \"{number}/{suffix}\"")
                }
                None => "sizes are B, KB, MB, GB (powers of ten) and KiB, MiB, GiB (of two)".to_owned(),
            };
            return Err(self.wrong(suffix_at, format!("unknown size \"{suffix}\""), help));
        };
        let bytes = number.checked_mul(*size).filter(|&bytes| bytes <= MAX_QUOTA);
        let bytes = bytes.ok_or_else(|| {
            self.wrong(from, format!("{number}{suffix} is too large"), format!("the largest is {MAX_QUOTA} bytes"))
        })?;
        Ok((bytes, Unit::Bytes))
    }

    fn expect_slash(&mut self) -> Result<(), NotationError> {
        if self.rest().starts_with('/') {
            self.at = self.at.saturating_add(1);
            self.spaces();
            return Ok(());
        }
        let from = self.at;
        let word = self.take(|c| !c.is_whitespace());
        let help = if matches!(word, "per" | "a" | "an" | "each" | "every") {
            format!("write a slash for \"{word}\", as in \"10/h\"")
        } else {
            SHAPE.to_owned()
        };
        Err(self.wrong(from, format!("expected \"/\" and a period, found \"{word}\""), help))
    }

    fn period(&mut self) -> Result<Span, NotationError> {
        let from = self.at;
        let times = if self.rest().starts_with(|c: char| c.is_ascii_digit()) {
            let times = self.number("a period")?;
            self.spaces();
            times
        } else {
            1
        };
        let unit_at = self.at;
        let name = self.take(|c| !c.is_whitespace());
        // One spelling for each unit. `m` could be a minute, a month or a millisecond.
        let Some((_, size, _)) = TIMES.iter().find(|(unit, ..)| *unit == name) else {
            return Err(self.wrong(unit_at, unknown_unit(name), unit_help(name)));
        };
        if times == 0 {
            return Err(self.wrong(from, "a period of 0 is no period", SHAPE));
        }
        let micros = times.checked_mul(*size).filter(|&micros| micros <= MAX_PERIOD.micros());
        let micros = micros.ok_or_else(|| self.wrong(from, "this period is too long", "the longest is 100 years"))?;
        Ok(Span::from_micros(micros))
    }

    fn burst(&mut self, unit: Unit) -> Result<Option<u64>, NotationError> {
        self.spaces();
        let from = self.at;
        if !self.rest().starts_with("burst") {
            return Ok(None);
        }
        self.take(|c| c.is_ascii_alphabetic());
        self.spaces();
        let number_at = self.at;
        let (burst, burst_unit) = self.amount("a burst")?;
        if burst == 0 {
            return Err(self.wrong(number_at, "a burst of 0 would let nothing through", "leave \"burst\" out"));
        }
        // `50MB/day burst 5` would be a burst of five bytes.
        if burst_unit != unit {
            let help = "write both in bytes (\"50MB/day burst 5MB\") or neither";
            return Err(self.wrong(from, "the limit and its burst count different things", help));
        }
        Ok(Some(burst))
    }
}

fn unknown_unit(name: &str) -> String {
    if name.is_empty() { "a unit of time is missing".to_owned() } else { format!("unknown unit \"{name}\"") }
}

fn unit_help(name: &str) -> String {
    let lower = name.to_ascii_lowercase();
    match TIMES.iter().find(|(unit, _, others)| *unit == lower || others.contains(&lower.as_str())) {
        Some((unit, ..)) => format!("write \"{unit}\""),
        None => "units are ms, s, min, h, day, week, month (30 days) and year (365)".to_owned(),
    }
}

/// As a policy writes it.
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Unlimited => f.write_str("unlimited"),
            Self::Never => f.write_str("none"),
            Self::AtOnce(amount) => write!(f, "{amount}"),
            Self::Per { amount, unit, period, burst } => {
                write!(f, "{}/{}", Amount(amount, unit), Period(period))?;
                match burst {
                    Some(burst) => write!(f, " burst {}", Amount(burst, unit)),
                    None => Ok(()),
                }
            }
        }
    }
}

/// An amount in the largest unit that says it exactly.
pub(super) struct Amount(pub(super) u64, pub(super) Unit);

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.1 == Unit::Count {
            return write!(f, "{}", self.0);
        }
        for (name, size) in SIZES.iter().rev() {
            if self.0.is_multiple_of(*size) {
                return write!(f, "{}{name}", self.0.checked_div(*size).unwrap_or(0));
            }
        }
        write!(f, "{}B", self.0)
    }
}

/// A period in the largest unit of the notation that says it exactly.
struct Period(Span);

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Days read better than weeks, months and years, so those are tried only when they are exactly one.
        let micros = self.0.micros();
        for (name, size, _) in TIMES.iter().rev() {
            let times = micros.checked_div(*size).unwrap_or(0);
            // The first unit from the largest down that divides exactly, so that reading the text gives the same
            // period.
            if !micros.is_multiple_of(*size) || times == 0 || (times > 1 && matches!(*name, "week" | "month" | "year"))
            {
                continue;
            }
            return if times == 1 { f.write_str(name) } else { write!(f, "{times}{name}") };
        }
        write!(f, "{}µs", micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn per(amount: u64, unit: Unit, secs: u64, burst: Option<u64>) -> Quota {
        Quota::Per { amount, unit, period: Span::from_secs(secs), burst }
    }

    #[test]
    fn every_form_of_the_notation_is_read() {
        let check = |text: &str, expect| assert_eq!(text.parse::<Quota>().unwrap(), expect, "{text}");
        check("100/min", per(100, Unit::Count, 60, None));
        check("5/5min", per(5, Unit::Count, 300, None));
        check("10/h", per(10, Unit::Count, 3_600, None));
        check("50MB/day", per(50_000_000, Unit::Bytes, 86_400, None));
        check("50MiB/week", per(50 << 20, Unit::Bytes, 604_800, None));
        check("100/min burst 20", per(100, Unit::Count, 60, Some(20)));
        check("1GB/month burst 10MB", per(1_000_000_000, Unit::Bytes, 30 * 86_400, Some(10_000_000)));
        check("20/3600000ms", per(20, Unit::Count, 3_600, None));
        check(" 7 / 2 h ", per(7, Unit::Count, 7_200, None));
        check("3/year", per(3, Unit::Count, 365 * 86_400, None));
        for unlimited in ["unlimited", "0", "0/min", "0MB/day"] {
            check(unlimited, Quota::Unlimited);
        }
        check("10", Quota::AtOnce(10));
    }

    #[test]
    fn an_error_points_at_the_character_and_says_what_to_write() {
        let check = |text: &str, under: &str, help: &str| {
            let error = text.parse::<Quota>().unwrap_err();
            assert_eq!(text.get(error.at.clone()), Some(under), "{text}: {error}");
            assert!(error.help.contains(help), "{text}: {error}");
        };
        check("10 per fortnight", "per", "10/h");
        check("10/fortnight", "fortnight", "week");
        check("10/minute", "minute", "\"min\"");
        check("10/Min", "Min", "\"min\"");
        check("ten/min", "ten/min", "100/min");
        check("1.5/s", "1.5", "100/min");
        check("1,000/s", "1,000", "100/min");
        check("10mb/day", "mb", "10MB");
        check("10min", "min", "10/min");
        check("5XB/day", "XB", "KiB");
        check("5MB", "5MB", "50MB/day");
        check("10/min burst", "", "100/min");
        check("10/min burst 0", "0", "leave");
        check("10/min burst 5MB", "burst 5MB", "bytes");
        check("10/min please", "please", "100/min");
        check("10/0min", "0min", "100/min");
        check("10/", "", "week");
        check("99999999999999999999/s", "99999999999999999999", "largest");
        check("1/101year", "101year", "100 years");
        check("-5/min", "-5/min", "100/min");
        check("", "", "100/min");
    }

    #[test]
    fn a_length_of_time_is_read_like_a_period() {
        assert_eq!(parse_span("60s"), Ok(Span::MINUTE));
        assert_eq!(parse_span("1min"), Ok(Span::MINUTE));
        assert_eq!(parse_span("24 h"), Ok(Span::DAY));
        assert_eq!(parse_span("day"), Ok(Span::DAY));
        assert!(parse_span("60").is_err());
        assert!(parse_span("5 min later").is_err());
    }

    #[test]
    fn a_written_quota_reads_back() {
        for text in ["100/min", "5/5min", "50MB/day", "50KiB/h", "100/min burst 20", "unlimited", "10", "20/90s"] {
            let quota: Quota = text.parse().unwrap();
            assert_eq!(quota.to_string(), text);
        }
    }
}
