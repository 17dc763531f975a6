//! Token bucket by GCRA: one moment says how full the bucket is.
//!
//! The theoretical arrival time (TAT) is when the bucket will be full again. A charge moves it on by
//! `cost * W / L`; it may lie at most `burst * W / L` ahead of now. The moment is kept exactly, as whole
//! microseconds and a fraction over the reduced denominator of `W / L`, so that nothing is rounded: a full
//! burst always fits, no refill is lost however fast the rate, and the bound `burst + L` is exact.

mod packed;
mod refunded;

use super::{LimitError, Look, MAX_QUOTA, Mark, check_figures};
use crate::time::{Span, Timestamp};

pub use packed::{PackedRate, Ticks};
pub(crate) use refunded::RefundedState;

/// The longest a bucket may take to fill from empty. With [`super::MAX_QUOTA`] it keeps every product below
/// within 128 bits.
const MAX_FILL: Span = Span::from_secs(1_000 * 365 * 86_400);
/// Fractional bits kept while used cost is carried from one limit to another.
const CARRY_BITS: u32 = 20;

/// A token bucket: L per W, refilled smoothly, `burst` at once.
#[derive(Debug, Clone, Copy, Eq)]
pub struct Rate {
    quota: u64,
    period: Span,
    burst: u64,
    terms: Terms,
    /// The time a burst takes to refill, in microseconds, where one unit takes a whole number of them.
    whole_capacity: Option<u64>,
    /// The same rounded up, but at least the period.
    refill: Span,
}

/// The other figures follow from these.
impl PartialEq for Rate {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        (self.quota, self.period, self.burst) == (other.quota, other.period, other.burst)
    }
}

/// `W / L` as a reduced fraction: one unit of cost takes `step / parts` microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Terms {
    step: u64,
    parts: u64,
}

impl Terms {
    fn new(quota: u64, period: Span) -> Self {
        let (mut a, mut b) = (quota, period.micros());
        while let Some(rest) = a.checked_rem(b) {
            (a, b) = (b, rest);
        }
        // `a` is now the greatest common divisor.
        Self {
            step: period.micros().checked_div(a).unwrap_or(1).max(1),
            parts: quota.checked_div(a).unwrap_or(1).max(1),
        }
    }

    fn moment(self, at: Timestamp, part: u64) -> u128 {
        u128::from(at.micros()).saturating_mul(u128::from(self.parts)).saturating_add(u128::from(part))
    }

    fn cost(self, cost: u64) -> u128 {
        u128::from(cost).saturating_mul(u128::from(self.step))
    }

    /// Splits a moment into whole microseconds and what is left.
    fn split(self, moment: u128) -> (Timestamp, u64) {
        if self.parts == 1 {
            return (Timestamp::from_micros(u64::try_from(moment).unwrap_or(u64::MAX)), 0);
        }
        let parts = u128::from(self.parts);
        let whole = moment.checked_div(parts).unwrap_or(0);
        let part = moment.checked_rem(parts).unwrap_or(0);
        match u64::try_from(whole) {
            Ok(micros) => (Timestamp::from_micros(micros), u64::try_from(part).unwrap_or(0)),
            Err(_) => (Timestamp::MAX, 0),
        }
    }

    /// A moment in whole microseconds, rounded up.
    fn round_up(self, moment: u128) -> Timestamp {
        let (at, part) = self.split(moment);
        if part == 0 { at } else { at.plus(Span::from_micros(1)) }
    }

    fn whole_cost(self, room: u128) -> u64 {
        // Most numbers fit 64 bits, where a division takes a third of the time.
        match u64::try_from(room) {
            Ok(room) => room.checked_div(self.step).unwrap_or(0),
            Err(_) => u64::try_from(room.checked_div(u128::from(self.step)).unwrap_or(0)).unwrap_or(u64::MAX),
        }
    }
}

/// When the bucket is full again, and the figures that moment was written under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RateState {
    pub(crate) full_at: Timestamp,
    /// In fractions of a microsecond, over the reduced denominator of `period / quota`.
    pub(crate) part: u64,
    pub(crate) quota: u64,
    pub(crate) period: Span,
}

impl RateState {
    /// Whether bytes could have been written by a charge.
    pub(crate) fn is_sound(&self) -> bool {
        check_figures(self.quota, self.period).is_ok() && self.part < Terms::new(self.quota, self.period).parts
    }

    /// Whether it was written under the figures of this limit.
    #[inline]
    pub(crate) fn is_in_terms_of(&self, limit: &Rate) -> bool {
        (self.quota, self.period) == (limit.quota, limit.period)
    }

    /// The first moment at which this says the same as no state.
    pub(crate) fn silent_from(&self) -> Timestamp {
        if self.part == 0 { self.full_at } else { self.full_at.plus(Span::from_micros(1)) }
    }
}

impl Rate {
    /// `quota` per `period`, and `burst` at once.
    ///
    /// # Errors
    /// Where a figure is zero or beyond what the arithmetic carries exactly.
    pub fn new(quota: u64, period: Span, burst: u64) -> Result<Self, LimitError> {
        check_figures(quota, period)?;
        if burst == 0 || burst > MAX_QUOTA {
            return Err(LimitError(format!("a burst is between 1 and {MAX_QUOTA}, not {burst}")));
        }
        let terms = Terms::new(quota, period);
        if terms.cost(burst) > terms.moment(Timestamp::EPOCH.plus(MAX_FILL), 0) {
            return Err(LimitError("this burst would take more than 1,000 years to refill".to_owned()));
        }
        let whole_capacity = (terms.parts == 1).then(|| burst.checked_mul(terms.step)).flatten();
        let (full, part) = terms.split(terms.cost(burst));
        let full = if part == 0 { full } else { full.plus(Span::from_micros(1)) };
        let refill = full.since(Timestamp::EPOCH).max(period);
        Ok(Self { quota, period, burst, terms, whole_capacity, refill })
    }

    /// L as written.
    #[must_use]
    pub const fn quota(&self) -> u64 {
        self.quota
    }

    /// W as written.
    #[must_use]
    pub const fn period(&self) -> Span {
        self.period
    }

    /// The bucket's capacity.
    #[must_use]
    pub const fn burst(&self) -> u64 {
        self.burst
    }

    /// Whether a moment can have this fraction of a microsecond, over the reduced denominator of W / L.
    pub(crate) const fn has_fraction(&self, fraction: u64) -> bool {
        fraction < self.terms.parts
    }

    /// How long an empty bucket takes to be full again, but at least the period.
    #[must_use]
    pub const fn refill(&self) -> Span {
        self.refill
    }

    #[inline]
    pub(super) fn fresh(&self, now: Timestamp) -> RateState {
        RateState { full_at: now, part: 0, quota: self.quota, period: self.period }
    }

    /// The furthest ahead of now a state may lie: a whole burst and as much debt.
    fn deepest(&self) -> u128 {
        self.terms.cost(self.burst).saturating_mul(2)
    }

    /// The latest that a bucket can be full again, whatever it is charged now: debt saturates there.
    pub(crate) fn latest_reset(&self, now: Timestamp) -> Timestamp {
        self.terms.round_up(self.terms.moment(now, 0).saturating_add(self.deepest()))
    }

    #[inline]
    pub(crate) fn bring(&self, state: &mut RateState, now: Timestamp) -> bool {
        let in_terms = state.is_in_terms_of(self);
        if in_terms && self.whole_capacity.is_some_and(|capacity| state.full_at.since(now).micros() <= capacity) {
            return false;
        }
        self.bring_from_afar(state, in_terms, now)
    }

    /// The same for a state in other figures, one with a fraction, and one far ahead.
    #[inline(never)]
    fn bring_from_afar(&self, state: &mut RateState, in_terms: bool, now: Timestamp) -> bool {
        let before = *state;
        if !in_terms {
            self.carry(state, now);
        }
        let furthest = self.terms.moment(now, 0).saturating_add(self.deepest());
        if self.terms.moment(state.full_at, state.part) > furthest {
            // Written by a clock that has since stepped back: no charge leaves a state this far ahead.
            (state.full_at, state.part) = self.terms.split(furthest);
        }
        *state != before
    }

    /// Rescales a state so that the cost it says is used stays used under the new rate.
    fn carry(&self, state: &mut RateState, now: Timestamp) {
        let old = Terms::new(state.quota, state.period);
        let backlog = old.moment(state.full_at, state.part).saturating_sub(old.moment(now, 0));
        let used = backlog
            .saturating_mul(1 << CARRY_BITS)
            .div_ceil(u128::from(old.step))
            .min(u128::from(self.burst).saturating_mul(2 << CARRY_BITS));
        let backlog = used.saturating_mul(u128::from(self.terms.step)).div_ceil(1 << CARRY_BITS);
        let (full_at, part) = self.terms.split(self.terms.moment(now, 0).saturating_add(backlog));
        *state = RateState { full_at, part, quota: self.quota, period: self.period };
    }

    #[inline]
    pub(crate) fn look(&self, state: &RateState, cost: u64, now: Timestamp) -> Look {
        self.look_whole(state.full_at, cost, now).unwrap_or_else(|| self.look_exactly(state, cost, now))
    }

    /// The same where nothing has a fraction, nothing is owed and everything fits 64 bits, as nearly always: a third of the
    /// work. `None` where that is not so.
    #[inline(always)]
    pub(crate) fn look_whole(&self, full_at: Timestamp, cost: u64, now: Timestamp) -> Option<Look> {
        let (step, capacity) = (self.terms.step, self.whole_capacity?);
        let backlog = full_at.since(now).micros();
        let after = cost.checked_mul(step)?.checked_add(backlog)?;
        if backlog > capacity {
            return None;
        }
        let later = |micros: u64| now.plus(Span::from_micros(micros));
        Some(Look {
            allowed: after <= capacity,
            remaining: capacity.saturating_sub(backlog).checked_div(step).unwrap_or(0),
            ready_at: if after <= capacity {
                now
            } else if cost > self.burst {
                Timestamp::MAX
            } else {
                later(after.saturating_sub(capacity))
            },
            reset_if_charged: later(after),
            reset_if_not: later(backlog),
        })
    }

    #[inline(never)]
    fn look_exactly(&self, state: &RateState, cost: u64, now: Timestamp) -> Look {
        let terms = self.terms;
        let capacity = terms.cost(self.burst);
        let start = terms.moment(now, 0);
        let backlog = terms.moment(state.full_at, state.part).saturating_sub(start);
        let after = backlog.saturating_add(terms.cost(cost));
        let fits = after <= capacity;
        let later = |ticks: u128| terms.round_up(start.saturating_add(ticks));
        Look {
            allowed: fits,
            remaining: terms.whole_cost(capacity.saturating_sub(backlog)),
            ready_at: if fits {
                now
            } else if cost > self.burst {
                Timestamp::MAX
            } else {
                later(after.saturating_sub(capacity))
            },
            reset_if_charged: later(after),
            reset_if_not: later(backlog),
        }
    }

    #[inline(always)]
    pub(crate) fn charge(&self, state: &mut RateState, cost: u64, now: Timestamp) -> Mark {
        if let Some(full_at) = self.charged_whole(state.full_at, cost, now) {
            state.full_at = full_at;
            return Mark::new(full_at, cost);
        }
        self.charge_exactly(state, cost, now)
    }

    #[inline(never)]
    fn charge_exactly(&self, state: &mut RateState, cost: u64, now: Timestamp) -> Mark {
        let terms = self.terms;
        let start = terms.moment(now, 0);
        let backlog = terms.moment(state.full_at, state.part).saturating_sub(start);
        let room = self.deepest().saturating_sub(backlog);
        let wanted = terms.cost(cost);
        let (added, amount) = if wanted <= room { (wanted, cost) } else { (room, terms.whole_cost(room)) };
        (state.full_at, state.part) = terms.split(start.saturating_add(backlog).saturating_add(added));
        Mark::new(state.full_at, amount).with_fraction(state.part)
    }

    /// When the bucket is full again after a charge, where nothing has a fraction and the whole cost fits.
    #[inline(always)]
    fn charged_whole(&self, full_at: Timestamp, cost: u64, now: Timestamp) -> Option<Timestamp> {
        let backlog = full_at.since(now).micros();
        let after = backlog.checked_add(cost.checked_mul(self.terms.step)?)?;
        (after <= self.whole_capacity?).then(|| now.plus(Span::from_micros(after)))
    }
}
