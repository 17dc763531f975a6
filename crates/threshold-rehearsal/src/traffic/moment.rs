//! Parses the times of access logs and of JSON. The last day and time are cached, because most lines repeat them.

use jiff::Timestamp;
use jiff::civil::Date;

/// A time in a log, with its offset from UTC.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Moment {
    /// Microseconds since the Unix epoch.
    pub(crate) micros: u64,
    /// The offset from UTC, in seconds.
    pub(crate) offset: i32,
}

impl Moment {
    /// Returns the seconds since the epoch in the log's own time zone.
    pub(crate) fn local_secs(self) -> u64 {
        let secs = self.micros.checked_div(1_000_000).unwrap_or(0);
        secs.saturating_add_signed(i64::from(self.offset))
    }
}

/// A parser of times, with a cache.
#[derive(Debug, Default)]
pub(crate) struct MomentReader {
    /// The last day, such as `17/May/2015`, and the seconds of its midnight.
    day: ([u8; 11], u64),
    /// The last time and its value: a busy server writes many lines in one second.
    last: Option<([u8; 26], Moment)>,
}

const MONTHS: [&[u8]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];

impl MomentReader {
    /// Parses the format of access logs: `17/May/2015:10:05:03 +0200`.
    pub(crate) fn common(&mut self, text: &str) -> Option<Moment> {
        let whole = text.as_bytes().first_chunk::<26>().filter(|_| text.len() == 26);
        if let (Some(whole), Some((last, moment))) = (whole, &self.last)
            && whole == last
        {
            return Some(*moment);
        }
        let moment = self.read_common(text)?;
        self.last = whole.map(|whole| (*whole, moment));
        Some(moment)
    }

    fn read_common(&mut self, text: &str) -> Option<Moment> {
        let (day, rest) = text.as_bytes().split_first_chunk::<11>()?;
        let [b':', h1, h2, b':', m1, m2, b':', s1, s2, zone @ ..] = rest else { return None };
        // The initial value is eleven zero bytes, which no text of a log begins with.
        if self.day.0 != *day {
            self.day = (*day, midnight(day)?);
        }
        let (hour, minute, second) = (two(*h1, *h2)?, two(*m1, *m2)?, two(*s1, *s2)?);
        // 60 is a leap second.
        if hour > 23 || minute > 59 || second > 60 {
            return None;
        }
        let of_day = hour.checked_mul(3_600)?.checked_add(minute.checked_mul(60)?)?.checked_add(second)?;
        let offset = match zone {
            [] => 0,
            [b' ', zone @ ..] => zone_offset(zone)?,
            _ => return None,
        };
        // A local time east of Greenwich is ahead of UTC, so the offset is subtracted.
        let secs = self.day.1.checked_add(of_day)?.checked_add_signed(i64::from(offset).checked_neg()?)?;
        Some(Moment { micros: secs.checked_mul(1_000_000)?, offset })
    }

    /// Parses any format: that of access logs, Unix time, RFC 3339 with or without a zone, or an HTTP date. A time without a
    /// zone is UTC.
    pub(crate) fn text(&mut self, text: &str) -> Option<Moment> {
        let text = text.trim_matches(['[', ']']);
        // The cheapest test first. A Unix time is tried before dates, because a date is never a plain number.
        if let Some(moment) = self.common(text) {
            return Some(moment);
        }
        if let Ok(number) = text.parse::<f64>() {
            return number_of_seconds(number);
        }
        if let Ok(timestamp) = text.parse::<Timestamp>() {
            return Some(Moment { micros: micros(timestamp)?, offset: written_offset(text) });
        }
        if let Ok(zoned) = jiff::fmt::rfc2822::parse(text) {
            return Some(Moment { micros: micros(zoned.timestamp())?, offset: zoned.offset().seconds() });
        }
        // nginx's error log and others write `2015/05/17 10:05:03`.
        let civil = text.strip_suffix(" UTC").or(text.strip_suffix(" GMT")).unwrap_or(text);
        let civil: jiff::civil::DateTime = civil.replace('/', "-").parse().ok()?;
        Some(Moment { micros: micros(civil.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())?, offset: 0 })
    }
}

/// Converts seconds, milliseconds, microseconds or nanoseconds since the epoch. They are distinguished by size, which is
/// unambiguous until 2286.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the value is checked to be between nothing and the year 2286 first"
)]
pub(crate) fn number_of_seconds(number: f64) -> Option<Moment> {
    const YEAR_2286: f64 = 1e10;
    // The first unit in which the number is before 2286. A number of milliseconds since 1970 would be beyond it in
    // seconds. No comparison holds for NaN, which is refused here.
    let scale = [1e6, 1e3, 1.0, 1e-3].into_iter().find(|scale| number * scale < YEAR_2286 * 1e6)?;
    let micros = (number * scale).round();
    (micros >= 0.0).then_some(Moment { micros: micros as u64, offset: 0 })
}

pub(super) fn micros(timestamp: Timestamp) -> Option<u64> {
    u64::try_from(timestamp.as_microsecond()).ok()
}

fn midnight(day: &[u8; 11]) -> Option<u64> {
    let [d1, d2, b'/', a, b, c, b'/', y1, y2, y3, y4] = day else { return None };
    let month = MONTHS.iter().position(|name| *name == [*a, *b, *c].as_slice())?;
    let month = i8::try_from(month.checked_add(1)?).ok()?;
    let year = i16::try_from(two(*y1, *y2)?.checked_mul(100)?.checked_add(two(*y3, *y4)?)?).ok()?;
    let date = Date::new(year, month, i8::try_from(two(*d1, *d2)?).ok()?).ok()?;
    let zoned = date.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
    u64::try_from(zoned.timestamp().as_second()).ok()
}

fn two(tens: u8, ones: u8) -> Option<u64> {
    let digit = |byte: u8| char::from(byte).to_digit(10).map(u64::from);
    digit(tens)?.checked_mul(10)?.checked_add(digit(ones)?)
}

/// Parses `+0200` or `+02:00` to seconds.
pub(crate) fn zone_offset(zone: &[u8]) -> Option<i32> {
    let (sign, digits) = zone.split_first()?;
    let (hours, minutes) = match digits {
        [h1, h2, m1, m2] | [h1, h2, b':', m1, m2] => (two(*h1, *h2)?, two(*m1, *m2)?),
        _ => return None,
    };
    let secs = i32::try_from(hours.checked_mul(3_600)?.checked_add(minutes.checked_mul(60)?)?).ok()?;
    match sign {
        b'+' => Some(secs),
        b'-' => secs.checked_neg(),
        _ => None,
    }
}

/// Returns the offset at the end of an RFC 3339 time; 0 if there is none.
fn written_offset(text: &str) -> i32 {
    let at = text.len().saturating_sub(6);
    text.as_bytes().get(at..).and_then(zone_offset).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: Option<(u64, i32)>) {
        let moment = MomentReader::default().text(text);
        assert_eq!(moment.map(|moment| (moment.micros, moment.offset)), expect, "{text}");
    }

    #[test]
    fn every_format_of_a_time_is_parsed() {
        // 2015-05-17 10:05:03 UTC, as `date` gives it.
        let secs = 1_431_857_103;
        check("17/May/2015:10:05:03 +0000", Some((secs * 1_000_000, 0)));
        check("[17/May/2015:12:05:03 +0200]", Some((secs * 1_000_000, 7_200)));
        check("17/May/2015:04:35:03 -0530", Some((secs * 1_000_000, -19_800)));
        check("2015-05-17T10:05:03Z", Some((secs * 1_000_000, 0)));
        check("2015-05-17T12:05:03.25+02:00", Some((secs * 1_000_000 + 250_000, 7_200)));
        check("2015-05-17 10:05:03.25 UTC", Some((secs * 1_000_000 + 250_000, 0)));
        check("Sun, 17 May 2015 10:05:03 GMT", Some((secs * 1_000_000, 0)));
        check("Sun, 17 May 2015 12:05:03 +0200", Some((secs * 1_000_000, 7_200)));
        check("2015-05-17 10:05:03", Some((secs * 1_000_000, 0)));
        check("1431857103", Some((secs * 1_000_000, 0)));
        check("1431857103.5", Some((secs * 1_000_000 + 500_000, 0)));
        check("1431857103000", Some((secs * 1_000_000, 0)));
        check("1431857103000000", Some((secs * 1_000_000, 0)));
    }

    #[test]
    fn an_invalid_time_is_none() {
        for text in ["", "-", "31/Feb/2015:10:05:03 +0000", "17/Mai/2015:10:05:03 +0000", "17/May/2015:25:05:03 +0000"]
        {
            check(text, None);
        }
        for text in ["17/May/2015:10:05:03 0000", "-5", "nan", "1e300", "17/May/2015:10:05:0x +0000"] {
            check(text, None);
        }
    }
}
