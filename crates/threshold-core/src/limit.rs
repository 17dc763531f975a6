//! The closed list of algorithms, and the one match over it.
//!
//! Each algorithm is a file of its own that answers the same four questions about the state of one key:
//! `bring` (is the state still in my terms?), `look` (does this cost fit, and if not, when?), `charge`, and
//! `give_back`. Looking never changes anything; charging never asks again.

mod bytes;
mod concurrency;
mod estimate;
#[cfg(test)]
mod laws;
mod log;
#[cfg(test)]
mod model;
mod notation;
mod rate;
mod scale;
mod window;
mod words;

use std::fmt;
use std::num::NonZeroU64;

use crate::balance::State;
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

pub use concurrency::Concurrency;
pub(crate) use concurrency::{Hold, HoldsState, MAX_HOLDS};
pub use estimate::Estimate;
pub(crate) use estimate::{EstimateState, window_end as estimate_window_end};
pub use log::Log;
pub(crate) use log::{Entry, LogState, MAX_ENTRIES};
pub use notation::{NotationError, Quota, Unit, parse_span};
pub use rate::{PackedRate, Rate, Ticks};
pub(crate) use rate::{RateState, RefundedState};
pub(crate) use window::WindowState;
pub use window::{Anchor, Window};
pub use words::Words;
pub(crate) use words::{any_period, quantity};

/// The largest quota or burst: the largest integer a structured header field can carry.
pub const MAX_QUOTA: u64 = 999_999_999_999_999;
/// The longest period: a hundred years.
pub const MAX_PERIOD: Span = Span::from_secs(100 * 365 * 86_400);
/// The most requests a sliding log keeps for one key.
pub const MAX_LOG: u16 = 1_024;
/// The most that may be in flight at once under one key.
pub const MAX_CONCURRENCY: u32 = 65_536;
/// The most sub-windows a sliding window is cut into.
pub const MAX_BUCKETS: u32 = 1_024;

/// The names of the algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// GCRA: a bucket that refills smoothly.
    TokenBucket,
    /// One count per window.
    FixedWindow,
    /// Sub-windows that leave one by one.
    SlidingWindow,
    /// Two windows, weighted.
    SlidingEstimate,
    /// Every request's time.
    SlidingLog,
    /// How many at once.
    Concurrency,
}

impl Algorithm {
    /// Every algorithm, in the order of the specification.
    pub const ALL: [Self; 6] = [
        Self::TokenBucket,
        Self::FixedWindow,
        Self::SlidingWindow,
        Self::SlidingEstimate,
        Self::SlidingLog,
        Self::Concurrency,
    ];

    /// The name as a policy writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TokenBucket => "token-bucket",
            Self::FixedWindow => "fixed-window",
            Self::SlidingWindow => "sliding-window",
            Self::SlidingEstimate => "sliding-estimate",
            Self::SlidingLog => "sliding-log",
            Self::Concurrency => "concurrency",
        }
    }

    /// The algorithm a quota gets when its rule names none: a bucket up to a minute, sub-windows beyond, since
    /// a bucket that starts full would give an idle client twice a day's quota.
    #[must_use]
    pub fn default_for(period: Span, unit: Unit, named_cost: bool) -> Self {
        if period <= Span::MINUTE && unit == Unit::Count && !named_cost {
            Self::TokenBucket
        } else {
            Self::SlidingWindow
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One limit, ready to be asked: an algorithm with its figures.
#[derive(Debug, Clone, Copy, Eq)]
pub enum Limit {
    /// `token-bucket`.
    Rate(Rate),
    /// `fixed-window`.
    Window(Window),
    /// `sliding-window` and `sliding-log`.
    Log(Log),
    /// `sliding-estimate`.
    Estimate(Estimate),
    /// `concurrency`.
    Concurrency(Concurrency),
    /// `none`, or `deny = true`: nothing ever fits.
    Never,
}

/// A table asks this of every balance it charges, and nearly all are buckets.
impl PartialEq for Limit {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        if let (Self::Rate(own), Self::Rate(other)) = (self, other) { own == other } else { self.is_otherwise(other) }
    }
}

/// How a quota is counted, beyond its figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) anchor: Anchor,
    pub(crate) buckets: u32,
    pub(crate) burst: Option<u64>,
    pub(crate) ttl: Span,
}

impl Default for Options {
    fn default() -> Self {
        Self { algorithm: None, anchor: Anchor::Clock, buckets: 60, burst: None, ttl: Span::MINUTE }
    }
}

impl Options {
    /// The limit a quota makes; `None` is unlimited.
    pub(crate) fn limit(&self, quota: Quota, named_cost: bool) -> Result<Option<Limit>, LimitError> {
        let (amount, unit, period, burst) = match quota {
            Quota::Unlimited => return Ok(None),
            Quota::Never => return Ok(Some(Limit::Never)),
            Quota::AtOnce(amount) if self.algorithm == Some(Algorithm::Concurrency) => {
                return Concurrency::new(amount, self.ttl).map(|limit| Some(Limit::Concurrency(limit)));
            }
            Quota::AtOnce(amount) => {
                return Err(LimitError(format!(
                    "a limit needs a period: write \"{amount}/min\", or algorithm = \"concurrency\" for so many at once"
                )));
            }
            Quota::Per { amount, unit, period, burst } => (amount, unit, period, burst),
        };
        let algorithm = self.algorithm.unwrap_or_else(|| Algorithm::default_for(period, unit, named_cost));
        let burst = burst.or(self.burst);
        if burst.is_some() && algorithm != Algorithm::TokenBucket {
            let message = format!(
                "a burst belongs to a token-bucket, and this limit is a {algorithm}; write algorithm = \"token-bucket\""
            );
            return Err(LimitError(message));
        }
        let limit = match algorithm {
            Algorithm::TokenBucket => Rate::new(amount, period, burst.unwrap_or(amount)).map(Limit::Rate),
            Algorithm::FixedWindow => Window::new(amount, period, self.anchor).map(Limit::Window),
            Algorithm::SlidingWindow => Log::bucketed(amount, period, self.buckets).map(Limit::Log),
            Algorithm::SlidingEstimate => Estimate::new(amount, period).map(Limit::Estimate),
            Algorithm::SlidingLog => Log::exact(amount, period).map(Limit::Log),
            Algorithm::Concurrency => {
                let message = "a concurrency limit has no period: write limit = \"10\" and a ttl";
                Err(LimitError(message.to_owned()))
            }
        };
        limit.map(Some)
    }
}

/// Figures that no limit can have; the text says which and what can.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitError(pub String);

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LimitError {}

/// What a look at one key's state found, for one cost at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Whether the cost fits now.
    pub allowed: bool,
    /// The whole cost that fits now, before any charge.
    pub remaining: u64,
    /// When this cost fits if nobody else comes; `Timestamp::MAX` if it never will.
    pub ready_at: Timestamp,
    /// `resetAt` if this cost is charged now; `Timestamp::MAX` where the algorithm has none. For a sliding estimate, whose
    /// `resetAt` is the end of its window, it is when more fits.
    pub reset_if_charged: Timestamp,
    /// `resetAt` if nothing is charged; likewise.
    pub reset_if_not: Timestamp,
}

/// What a charge wrote: enough to give exactly that back, and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Which part of the state was charged: the window's start, the log entry's or bucket's time, the hold's
    /// end; for a token bucket, when it is full again after the charge, plus what was given back before it.
    pub part: Timestamp,
    /// The cost that was charged. Less than was asked only where a debt saturates.
    pub amount: u64,
    /// What a token bucket's `part` has beyond whole microseconds, plus one. Never 0, so that an `Option<Mark>` is no
    /// larger than a mark.
    fraction: NonZeroU64,
}

impl Mark {
    /// A charge of `amount` to `part`.
    #[inline(always)]
    pub(crate) const fn new(part: Timestamp, amount: u64) -> Self {
        Self { part, amount, fraction: NonZeroU64::MIN }
    }

    /// Only so much of the same charge.
    pub(crate) const fn with_amount(self, amount: u64) -> Self {
        Self { amount, ..self }
    }

    /// The same charge, to a part that has a fraction of a microsecond.
    pub(crate) const fn with_fraction(self, fraction: u64) -> Self {
        Self { fraction: NonZeroU64::MIN.saturating_add(fraction), ..self }
    }

    /// What `part` has beyond whole microseconds, over the denominator of the bucket that was charged.
    pub(crate) const fn fraction(&self) -> u64 {
        self.fraction.get().saturating_sub(1)
    }
}

impl Limit {
    #[inline(never)]
    fn is_otherwise(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Window(own), Self::Window(other)) => own == other,
            (Self::Log(own), Self::Log(other)) => own == other,
            (Self::Estimate(own), Self::Estimate(other)) => own == other,
            (Self::Concurrency(own), Self::Concurrency(other)) => own == other,
            (Self::Never, Self::Never) => true,
            _ => false,
        }
    }

    /// The algorithm's name; `None` for `Never`.
    #[must_use]
    pub const fn algorithm(&self) -> Option<Algorithm> {
        match self {
            Self::Rate(_) => Some(Algorithm::TokenBucket),
            Self::Window(_) => Some(Algorithm::FixedWindow),
            Self::Log(log) if log.is_exact() => Some(Algorithm::SlidingLog),
            Self::Log(_) => Some(Algorithm::SlidingWindow),
            Self::Estimate(_) => Some(Algorithm::SlidingEstimate),
            Self::Concurrency(_) => Some(Algorithm::Concurrency),
            Self::Never => None,
        }
    }

    /// Reads a limit as a policy writes it; without an algorithm, the one a policy would choose.
    ///
    /// # Errors
    /// Where the text is no limit, or one that the algorithm cannot have.
    pub fn parse(text: &str, algorithm: Option<Algorithm>) -> Result<Self, LimitError> {
        let quota: Quota = text.parse().map_err(|error: NotationError| LimitError(error.to_string()))?;
        let unlimited = || LimitError("unlimited is no limit".to_owned());
        Options { algorithm, ..Options::default() }.limit(quota, false)?.ok_or_else(unlimited)
    }

    /// The limit in words, counting in `unit`: `100 at once, then one each 0.6 s; at most 200 in any minute`.
    #[must_use]
    pub const fn words(&self, unit: Unit) -> Words<'_> {
        Words { limit: self, unit }
    }

    /// The limit as a policy writes it, counting in `unit`.
    #[must_use]
    pub fn notation(&self, unit: Unit) -> String {
        let quota = match self {
            Self::Never => Quota::Never,
            Self::Concurrency(concurrency) => Quota::AtOnce(concurrency.quota()),
            Self::Rate(rate) if rate.burst() != rate.quota() => {
                let burst = Some(rate.burst());
                Quota::Per { amount: rate.quota(), unit, period: rate.period(), burst }
            }
            other => Quota::Per { amount: other.quota(), unit, period: other.period(), burst: None },
        };
        quota.to_string()
    }

    /// L as written.
    #[must_use]
    #[inline]
    pub const fn quota(&self) -> u64 {
        match self {
            Self::Rate(rate) => rate.quota(),
            Self::Window(window) => window.quota(),
            Self::Log(log) => log.quota(),
            Self::Estimate(estimate) => estimate.quota(),
            Self::Concurrency(concurrency) => concurrency.quota(),
            Self::Never => 0,
        }
    }

    /// The most that can fit at once: the burst of a bucket, else L. A larger cost is the caller's error.
    #[must_use]
    #[inline]
    pub const fn capacity(&self) -> u64 {
        match self {
            Self::Rate(rate) => rate.burst(),
            other => other.quota(),
        }
    }

    /// W as written; for concurrency, how long a hold lasts at most.
    #[must_use]
    #[inline]
    pub const fn period(&self) -> Span {
        match self {
            Self::Rate(rate) => rate.period(),
            Self::Window(window) => window.period(),
            Self::Log(log) => log.period(),
            Self::Estimate(estimate) => estimate.period(),
            Self::Concurrency(concurrency) => concurrency.ttl(),
            Self::Never => Span::ZERO,
        }
    }

    /// The `limit` of an answer: L as written, or the burst where that is larger. So `remaining` never exceeds it.
    #[must_use]
    #[inline]
    pub const fn shown_quota(&self) -> u64 {
        match self {
            Self::Rate(rate) if rate.burst() > rate.quota() => rate.burst(),
            other => other.quota(),
        }
    }

    /// The time in which [`shown_quota`](Self::shown_quota) is available again: W as written, or what the burst takes
    /// to refill where that is larger.
    #[must_use]
    #[inline]
    pub const fn shown_period(&self) -> Span {
        match self {
            Self::Rate(rate) => rate.refill(),
            other => other.period(),
        }
    }

    /// The most this limit admits in any window of its period, by the bound of its algorithm.
    #[must_use]
    pub const fn bound(&self) -> u64 {
        match self {
            Self::Rate(rate) => rate.burst().saturating_add(rate.quota()),
            Self::Window(window) => window.quota().saturating_mul(2),
            Self::Log(log) => log.quota(),
            Self::Estimate(estimate) => estimate.quota().saturating_mul(2).saturating_sub(1),
            Self::Concurrency(concurrency) => concurrency.quota(),
            Self::Never => 0,
        }
    }

    /// This limit with the figures that a state was written under, so that the state can be charged as it is.
    pub(crate) fn in_terms_of(&self, state: &State) -> Self {
        let limit = match (self, state) {
            (Self::Rate(limit), State::Rate(state)) => {
                Rate::new(state.quota, state.period, limit.burst()).map(Self::Rate)
            }
            (Self::Rate(limit), State::Refunded(state)) => {
                Rate::new(state.bucket.quota, state.bucket.period, limit.burst()).map(Self::Rate)
            }
            (Self::Window(limit), State::Window(state)) => {
                Window::new(limit.quota(), state.period, limit.anchor()).map(Self::Window)
            }
            (Self::Log(limit), State::Log(state)) if limit.is_exact() => {
                Log::exact(limit.quota(), state.period).map(Self::Log)
            }
            (Self::Log(limit), State::Log(state)) => {
                Log::bucketed(limit.quota(), state.period, limit.buckets()).map(Self::Log)
            }
            (Self::Estimate(limit), State::Estimate(state)) => {
                Estimate::new(limit.quota(), state.period).map(Self::Estimate)
            }
            _ => Ok(*self),
        };
        limit.unwrap_or(*self)
    }

    /// How long after a charge it can matter at the most.
    pub(crate) fn memory(&self) -> Span {
        let twice = |span: Span| Span::from_micros(span.micros().saturating_mul(2));
        match self {
            Self::Rate(rate) => twice(rate.refill()),
            other => twice(other.period()),
        }
    }

    /// Puts state that was written under other figures, or by a clock that has since stepped back, into this
    /// limit's terms at `now`. What was used stays used. Returns whether anything changed.
    #[inline]
    pub(crate) fn bring(&self, state: &mut State, now: Timestamp) -> bool {
        match (self, state) {
            (Self::Rate(limit), State::Rate(state)) => limit.bring(state, now),
            (Self::Rate(limit), state @ State::Refunded(_)) => bring_refunded(limit, state, now),
            (Self::Window(limit), State::Window(state)) => limit.bring(state, now),
            (Self::Log(limit), State::Log(state)) => limit.bring(state, now),
            (Self::Estimate(limit), State::Estimate(state)) => limit.bring(state, now),
            (Self::Concurrency(limit), State::Holds(state)) => limit.bring(state, now),
            _ => false,
        }
    }

    /// Whether `cost` fits now. The state must have been brought to `now`.
    #[inline]
    pub(crate) fn look(&self, state: &State, cost: u64, now: Timestamp) -> Look {
        match (self, state) {
            (Self::Rate(limit), State::Rate(state)) => limit.look(state, cost, now),
            (Self::Rate(limit), State::Refunded(state)) => limit.look(&state.bucket, cost, now),
            (Self::Rate(limit), _) => limit.look(&limit.fresh(now), cost, now),
            (Self::Window(limit), State::Window(state)) => limit.look(state, cost, now),
            (Self::Window(limit), _) => limit.look(&limit.fresh(now), cost, now),
            (Self::Log(limit), State::Log(state)) => limit.look(state, cost, now),
            (Self::Log(limit), _) => limit.look(&limit.fresh(), cost, now),
            (Self::Estimate(limit), State::Estimate(state)) => limit.look(state, cost, now),
            (Self::Estimate(limit), _) => limit.look(&limit.fresh(now), cost, now),
            (Self::Concurrency(limit), State::Holds(state)) => limit.look(state, cost, now),
            (Self::Concurrency(limit), _) => limit.look(&HoldsState::default(), cost, now),
            (Self::Never, _) => {
                let never = Timestamp::MAX;
                Look { allowed: false, remaining: 0, ready_at: never, reset_if_charged: never, reset_if_not: never }
            }
        }
    }

    /// Charges `cost`, whether or not it fits: past the capacity it becomes debt, up to one capacity more.
    #[inline]
    pub(crate) fn charge(&self, state: &mut State, cost: u64, now: Timestamp, id: TraceId) -> Mark {
        match self {
            Self::Rate(limit) => {
                if !matches!(state, State::Rate(_) | State::Refunded(_)) {
                    *state = State::Rate(limit.fresh(now));
                }
            }
            Self::Window(limit) => {
                if !matches!(state, State::Window(_)) {
                    *state = State::Window(limit.fresh(now));
                }
            }
            Self::Log(limit) => {
                if !matches!(state, State::Log(_)) {
                    *state = State::Log(limit.fresh());
                }
            }
            Self::Estimate(limit) => {
                if !matches!(state, State::Estimate(_)) {
                    *state = State::Estimate(limit.fresh(now));
                }
            }
            Self::Concurrency(_) => {
                if !matches!(state, State::Holds(_)) {
                    *state = State::Holds(HoldsState::default());
                }
            }
            Self::Never => {}
        }
        match (self, state) {
            (Self::Rate(limit), State::Rate(state)) => limit.charge(state, cost, now),
            (Self::Rate(limit), State::Refunded(state)) => state.charge(limit, cost, now),
            (Self::Window(limit), State::Window(state)) => limit.charge(state, cost, now),
            (Self::Log(limit), State::Log(state)) => limit.charge(state, cost, now),
            (Self::Estimate(limit), State::Estimate(state)) => limit.charge(state, cost, now),
            (Self::Concurrency(limit), State::Holds(state)) => limit.charge(state, cost, now, id),
            _ => Mark::new(now, 0),
        }
    }
}

/// Brings a bucket that was given back to; it becomes a plain one as soon as that says the same.
#[cold]
fn bring_refunded(limit: &Rate, state: &mut State, now: Timestamp) -> bool {
    let State::Refunded(refunded) = state else { return false };
    if refunded.silent_from() > now {
        return refunded.bring(limit, now);
    }
    let mut bucket = refunded.bucket;
    limit.bring(&mut bucket, now);
    *state = State::Rate(bucket);
    true
}

/// Checks the two figures every windowed limit has.
fn check_figures(quota: u64, period: Span) -> Result<(), LimitError> {
    if quota == 0 || quota > MAX_QUOTA {
        return Err(LimitError(format!("a limit is between 1 and {MAX_QUOTA}, not {quota}")));
    }
    if period.is_zero() || period > MAX_PERIOD {
        return Err(LimitError("a period is between 1 µs and 100 years".to_owned()));
    }
    Ok(())
}
