//! How full a token bucket is, exactly: a moment in fractions of a microsecond.

use super::super::check_figures;
use super::{CARRY_BITS, TokenBucket};
use crate::codec::{BytesError, Reader, Writer};
use crate::time::{Span, Timestamp};

/// GCRA's emission interval `W / L` as a reduced fraction: one unit of cost takes `step / parts` microseconds.
///
/// Moments and lengths of time are counted in ticks, `parts` of them to a microsecond. A cost is then a whole number of
/// ticks, `cost * step`, and adding and subtracting costs is exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interval {
    pub(super) step: u64,
    pub(super) parts: u64,
}

impl Interval {
    /// The interval of a quota and a period that are not 0.
    pub(super) const fn new(quota: u64, period: Span) -> Self {
        let (mut a, mut b) = (quota, period.micros());
        while let Some(rest) = a.checked_rem(b) {
            (a, b) = (b, rest);
        }
        // `a` is now the greatest common divisor.
        Self { step: divided(period.micros(), a), parts: divided(quota, a) }
    }

    pub(super) const fn moment(self, at: Timestamp, fraction: u64) -> u128 {
        // Does not saturate: `parts` is at most `MAX_QUOTA`, below 2^50.
        (at.micros() as u128).saturating_mul(self.parts as u128).saturating_add(fraction as u128)
    }

    pub(super) const fn cost(self, cost: u64) -> u128 {
        (cost as u128).saturating_mul(self.step as u128)
    }

    /// The largest cost that refills within a length of time.
    pub(super) const fn most_within(self, span: Span) -> u64 {
        self.whole_cost(self.moment(Timestamp::from_micros(span.micros()), 0))
    }

    /// Splits ticks into whole microseconds and the ticks that are left.
    pub(super) const fn split(self, ticks: u128) -> (Timestamp, u64) {
        // A unit takes whole microseconds under most limits; that saves two wide divisions.
        if self.parts == 1 {
            return (Timestamp::from_micros(saturated(ticks)), 0);
        }
        let parts = self.parts as u128;
        match (ticks.checked_div(parts), ticks.checked_rem(parts)) {
            (Some(whole), Some(rest)) if whole <= u64::MAX as u128 => {
                (Timestamp::from_micros(saturated(whole)), saturated(rest))
            }
            // Past the end of time. Without a fraction, so that this moment has one spelling.
            _ => (Timestamp::MAX, 0),
        }
    }

    /// Ticks in whole microseconds, rounded up.
    pub(super) const fn round_up(self, ticks: u128) -> Timestamp {
        let (at, rest) = self.split(ticks);
        if rest == 0 { at } else { at.plus(Span::from_micros(1)) }
    }

    /// The largest whole cost that so many ticks make, rounded down.
    pub(super) const fn whole_cost(self, ticks: u128) -> u64 {
        // Most numbers fit 64 bits, where a division takes a third of the time.
        if ticks <= u64::MAX as u128 {
            return match saturated(ticks).checked_div(self.step) {
                Some(cost) => cost,
                None => 0,
            };
        }
        match ticks.checked_div(self.step as u128) {
            Some(cost) => saturated(cost),
            None => 0,
        }
    }
}

/// `value / divisor`, at least 1.
const fn divided(value: u64, divisor: u64) -> u64 {
    match value.checked_div(divisor) {
        Some(0) | None => 1,
        Some(quotient) => quotient,
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "numbers that do not fit are replaced first; `try_from` is not const"
)]
const fn saturated(value: u128) -> u64 {
    if value > u64::MAX as u128 { u64::MAX } else { value as u64 }
}

/// When the bucket is full again, and the figures that moment was written under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) full_at: Timestamp,
    /// The ticks beyond whole microseconds, over the reduced denominator of `period / quota`.
    pub(crate) fraction: u64,
    pub(crate) quota: u64,
    pub(crate) period: Span,
}

impl Level {
    /// The first byte of a stored level.
    pub(super) const TAG: u8 = 1;
    /// Its shape in scripts.
    pub(super) const SHAPE: u8 = 1;

    /// Whether it was written under the figures of this limit.
    #[inline]
    pub(super) fn is_in_terms_of(&self, limit: &TokenBucket) -> bool {
        (self.quota, self.period) == (limit.quota, limit.period)
    }

    pub(super) fn interval(&self) -> Interval {
        Interval::new(self.quota, self.period)
    }

    /// The cost that is used and has not refilled, in [`CARRY_BITS`] fractional bits, rounded up.
    pub(super) fn used(&self, now: Timestamp) -> u128 {
        let interval = self.interval();
        // The backlog and not the moment: what has refilled by now is not used any more.
        let backlog = self.moment().saturating_sub(interval.moment(now, 0));
        backlog.saturating_mul(1 << CARRY_BITS).div_ceil(u128::from(interval.step))
    }

    /// When the bucket is full again, in ticks.
    pub(super) fn moment(&self) -> u128 {
        self.interval().moment(self.full_at, self.fraction)
    }

    /// The first moment from which this is the same as no state: the bucket is full.
    pub(super) fn silent_from(&self) -> Timestamp {
        // At `full_at` a fraction of a microsecond still has to refill.
        if self.fraction == 0 { self.full_at } else { self.full_at.plus(Span::from_micros(1)) }
    }

    pub(super) fn write(&self, out: &mut Writer) {
        out.number(self.full_at.micros());
        out.number(self.fraction);
        out.number(self.quota);
        out.number(self.period.micros());
    }

    pub(super) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let level = Self {
            full_at: Timestamp::from_micros(from.number()?),
            fraction: from.number()?,
            quota: from.number()?,
            period: Span::from_micros(from.number()?),
        };
        if level.is_sound() { Ok(level) } else { Err(BytesError::Malformed("token bucket")) }
    }

    /// Whether a charge can leave these numbers.
    pub(super) fn is_sound(&self) -> bool {
        // The figures first: an interval of 0 has no ticks.
        check_figures(self.quota, self.period).is_ok() && self.fraction < self.interval().parts
    }
}
