//! `CL.THROTTLE`: one limit by a key of the caller's own, as redis-cell answers it.

use std::time::Duration;

use threshold_core::limit::{Algorithm, LimitOptions};
use threshold_core::{Limit, Span};
use threshold_limiter::LimitDecision;

use super::decode::{Arguments, integer};
use super::reply::Replies;

/// What redis-cell answers to a wrong number of arguments.
const USAGE: &str = "Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]";
/// In place of a number of seconds: there is no such time.
const NEVER: i64 = -1;

/// Why a call cannot be decided. The texts are redis-cell's where it has one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ThrottleError(String);

impl std::fmt::Display for ThrottleError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cell error: {}", self.0)
    }
}

/// The limit of the last call. Most connections ask under one limit or a few, and to build one takes longer than to compare.
#[derive(Debug, Default)]
pub(super) struct LastLimit(Option<(Figures, Limit)>);

/// The figures of a limit as the caller writes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Figures {
    max_burst: u64,
    count: u64,
    period: u64,
}

/// A call of `CL.THROTTLE`.
#[derive(Debug)]
pub(super) struct Throttle<'a> {
    pub(super) key: &'a str,
    pub(super) limit: Limit,
    quantity: u64,
}

impl<'a> Throttle<'a> {
    pub(super) fn read(arguments: &Arguments<'a>, last: &mut LastLimit) -> Result<Self, ThrottleError> {
        let (Some(key), Some(max_burst), Some(count), Some(period), 5 | 6) =
            (arguments.get(1), arguments.get(2), arguments.get(3), arguments.get(4), arguments.len())
        else {
            return Err(ThrottleError(USAGE.to_owned()));
        };
        let figures = Figures {
            max_burst: number("max_burst", max_burst)?,
            count: number("count", count)?,
            period: number("period", period)?,
        };
        let quantity = arguments.get(5).map_or(Ok(1), |quantity| number("quantity", quantity))?;
        let limit = match &last.0 {
            Some((same, limit)) if *same == figures => *limit,
            _ => last.0.insert((figures, figures.limit()?)).1,
        };
        // Two keys that are not text must not become one, as they would if they were converted.
        let key = std::str::from_utf8(key).map_err(|_| ThrottleError("the key is not UTF-8".to_owned()))?;
        Ok(Self { key, limit, quantity })
    }

    /// The cost to charge. A quantity that never fits charges nothing, and only looks for the other figures.
    pub(super) fn cost(&self) -> u64 {
        if self.never_fits() { 0 } else { self.quantity }
    }

    fn never_fits(&self) -> bool {
        self.quantity > self.limit.capacity()
    }

    /// Replies with five integers: whether the call was limited, the capacity, what remains of it, and in how many seconds to retry
    /// and until everything is available again.
    pub(super) fn answer(&self, decision: &LimitDecision, replies: &mut Replies) {
        let is_limited = !decision.allowed || self.never_fits();
        let retry_after = match decision.retry_after {
            Some(wait) if !self.never_fits() => seconds(wait),
            _ => NEVER,
        };
        replies.array(5);
        replies.integer(i64::from(is_limited));
        replies.integer(whole(self.limit.capacity()));
        replies.integer(whole(decision.remaining));
        replies.integer(retry_after);
        replies.integer(decision.reset_after.map_or(NEVER, seconds));
    }
}

impl Figures {
    fn limit(self) -> Result<Limit, ThrottleError> {
        let Self { max_burst, count, period } = self;
        if count == 0 || period == 0 {
            return Err(ThrottleError("Zero rates are not supported".to_owned()));
        }
        // `max_burst` is what fits beyond the first.
        let options = LimitOptions::new().algorithm(Algorithm::TokenBucket).burst(max_burst.saturating_add(1));
        options.limit(count, Duration::from_secs(period)).map_err(|error| ThrottleError(error.to_string()))
    }
}

fn number(name: &str, text: &[u8]) -> Result<u64, ThrottleError> {
    // redis-cell accepts a plus.
    let Some(number) = integer(text.strip_prefix(b"+").unwrap_or(text)) else {
        // The whole text could be large.
        let shown: String = String::from_utf8_lossy(text).chars().take(64).collect();
        return Err(ThrottleError(format!("Couldn't parse as integer: {shown}")));
    };
    u64::try_from(number).map_err(|_| ThrottleError(format!("{name} is negative: {number}")))
}

/// Whole seconds, rounded up, so that a client that waits so long is admitted.
fn seconds(time: Duration) -> i64 {
    whole(Span::from(time).secs_ceil())
}

fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
