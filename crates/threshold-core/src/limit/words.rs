//! A limit in words, as `explain` shows it.

use std::fmt;

use super::notation::Amount;
use super::{Limit, Unit};
use crate::time::Span;

/// A limit that is displayed in words.
#[derive(Debug, Clone, Copy)]
pub struct Words<'l> {
    limit: &'l Limit,
    unit: Unit,
}

impl Limit {
    /// The limit in words, counting in `unit`: `100 at once, then one each 0.6 s; at most 200 in any minute`.
    #[must_use]
    pub const fn words(&self, unit: Unit) -> Words<'_> {
        Words { limit: self, unit }
    }
}

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.limit.describe(self.unit, f)
    }
}

/// An amount as people read it: `100`, `50MB`.
pub(crate) fn quantity(amount: u64, unit: Unit) -> String {
    Amount(amount, unit).to_string()
}

/// `minute`, `5 min`: a period after "in any" or "each".
pub(crate) fn any_period(period: Span) -> String {
    match period {
        Span::SECOND => "second".to_owned(),
        Span::MINUTE => "minute".to_owned(),
        Span::HOUR => "hour".to_owned(),
        Span::DAY => "day".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Algorithm, LimitOptions};

    #[test]
    fn every_limit_has_words() {
        let check = |text: &str, algorithm: Option<Algorithm>, unit, expect: &str| {
            let options = algorithm.map_or_else(LimitOptions::new, |own| LimitOptions::new().algorithm(own));
            assert_eq!(options.parse(text).unwrap().words(unit).to_string(), expect);
        };
        let count = Unit::Count;
        check("100/min", None, count, "100 at once, then one each 0.6 s; at most 200 in any minute");
        check("7/s burst 2", None, count, "2 at once, then one each 0.142 s; at most 9 in any second");
        check("5000000/s", None, count, "5000000 at once, then 5000000 each second; at most 10000000 in any second");
        check("10/h", None, count, "at most 10 in any hour, counted in steps of 1 min");
        check("50MB/day", None, Unit::Bytes, "at most 50MB in any day, counted in steps of 24 min");
        let bucket = Some(Algorithm::TokenBucket);
        check("10MB/min", bucket, Unit::Bytes, "10MB at once, then 10MB each minute; at most 20MB in any minute");
        check("5/5min", Some(Algorithm::SlidingLog), count, "at most 5 in any 5 min");
        check("20/h", Some(Algorithm::FixedWindow), count, "20 in each hour of the clock; at most 40 in any hour");
        check("9/h", Some(Algorithm::SlidingEstimate), count, "about 9 in any hour; at most 17 in any hour");
        check("10", Some(Algorithm::Concurrency), count, "at most 10 at once, each for up to 1 min");
        check("none", None, count, "never");
    }
}
