//! A limit in words, as `explain` says it.

use std::fmt;

use super::notation::Amount;
use super::{Anchor, Limit, Rate, Unit};
use crate::time::Span;

/// A limit that is about to be said.
#[derive(Debug, Clone, Copy)]
pub struct Words<'l> {
    pub(super) limit: &'l Limit,
    pub(super) unit: Unit,
}

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let say = |amount| quantity(amount, self.unit);
        let quota = say(self.limit.quota());
        let (most, any) = (say(self.limit.bound()), any_period(self.limit.period()));
        match self.limit {
            Limit::Never => f.write_str("never"),
            Limit::Rate(rate) => {
                write!(f, "{} at once, then ", say(rate.burst()))?;
                match step(rate).filter(|_| self.unit == Unit::Count) {
                    Some(each) => write!(f, "one each {each}")?,
                    None => write!(f, "{quota} each {any}")?,
                }
                write!(f, "; at most {most} in any {any}")
            }
            Limit::Window(window) => {
                let from = if window.anchor() == Anchor::Clock { "of the clock" } else { "from the first request on" };
                write!(f, "{quota} in each {any} {from}; at most {most} in any {any}")
            }
            Limit::Estimate(_) => write!(f, "about {quota} in any {any}; at most {most} in any {any}"),
            Limit::Concurrency(concurrency) => {
                write!(f, "at most {quota} at once, each for up to {}", concurrency.ttl())
            }
            Limit::Log(log) => {
                write!(f, "at most {quota} in any {any}")?;
                match log.period().micros().checked_div(u64::from(log.buckets())) {
                    None => Ok(()),
                    Some(grain) => write!(f, ", counted in steps of {}", Span::from_micros(grain)),
                }
            }
        }
    }
}

/// In words, counting requests.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.words(Unit::Count).fmt(f)
    }
}

/// How long one unit takes to refill, if that is at least a microsecond.
fn step(rate: &Rate) -> Option<Span> {
    let micros = rate.period().micros().checked_div(rate.quota()).filter(|micros| *micros > 0)?;
    let exact = rate.period().micros().is_multiple_of(rate.quota());
    Some(Span::from_micros(if exact { micros } else { micros.saturating_add(1) }))
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
    use crate::limit::Algorithm;

    #[test]
    fn every_limit_can_be_said() {
        let check = |text: &str, algorithm, unit, expect: &str| {
            let limit = Limit::parse(text, algorithm).unwrap();
            assert_eq!(limit.words(unit).to_string(), expect);
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
    }
}
