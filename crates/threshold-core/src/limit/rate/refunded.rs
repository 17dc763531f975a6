//! A token bucket that was given back to while later charges counted: it also keeps how much.
//!
//! A receipt holds when the bucket was to be full again after its charge. Of that moment, what lies before now has refilled,
//! and what was given back since is no longer there: the rest, up to the debit, can be given back. A bucket that forgot what
//! it gave back would give the same time back twice.
//!
//! So that one number does on a receipt, it is the gross moment: when the bucket is full again plus all that was given back so
//! far. Who gives back the latest charge leaves the bucket as if that had never been made; there is then nothing to keep.

use super::{Mark, Rate, RateState, Terms};
use crate::time::Timestamp;

/// A bucket, and what was given back to it. Moments and amounts are in parts of a microsecond, as [`Terms`] counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RefundedState {
    pub(crate) bucket: RateState,
    /// All that was given back, but for what left nothing to keep.
    pub(crate) given: u128,
    /// The latest moment at which the bucket was to be full again. No charge that was made so far counts beyond it.
    pub(crate) peak: u128,
}

impl RateState {
    fn terms(&self) -> Terms {
        Terms::new(self.quota, self.period)
    }

    fn moment(&self) -> u128 {
        self.terms().moment(self.full_at, self.part)
    }

    /// Gives back what a mark says, as far as it still counts. Returns what the bucket has become where it has to keep that.
    pub(crate) fn give_back(&mut self, mark: &Mark, now: Timestamp) -> Option<RefundedState> {
        let mut refunded = RefundedState { bucket: *self, given: 0, peak: self.moment() };
        refunded.give_back(mark, now);
        *self = refunded.bucket;
        (refunded.given > 0).then_some(refunded)
    }
}

impl RefundedState {
    /// Whether bytes could have been written by a refund.
    pub(crate) fn is_sound(&self) -> bool {
        self.bucket.is_sound() && self.given > 0 && self.peak >= self.bucket.moment()
    }

    /// The first moment at which this says the same as no state: whatever was charged so far has refilled by then, so that no
    /// receipt gives anything back.
    pub(crate) fn silent_from(&self) -> Timestamp {
        self.bucket.terms().round_up(self.peak)
    }

    /// The bucket as it would be if nothing had been given back: the most that a receipt could still ask of it.
    pub(crate) fn at_peak(&self) -> RateState {
        let (full_at, part) = self.bucket.terms().split(self.peak);
        RateState { full_at, part, ..self.bucket }
    }

    /// Gives back what a mark says, as far as it still counts.
    pub(crate) fn give_back(&mut self, mark: &Mark, now: Timestamp) {
        let terms = self.bucket.terms();
        let full_at = self.bucket.moment();
        let gross = full_at.saturating_add(self.given);
        let charged = terms.moment(mark.part, mark.fraction());
        if charged > gross {
            // This bucket has never been charged that far: it was forgotten since, or brought back after a step of the clock.
            return;
        }
        let left = charged.saturating_sub(self.given).saturating_sub(terms.moment(now, 0));
        let back = terms.cost(mark.amount).min(left);
        (self.bucket.full_at, self.bucket.part) = terms.split(full_at.saturating_sub(back));
        if charged < gross {
            self.given = self.given.saturating_add(back);
        }
    }

    pub(crate) fn charge(&mut self, limit: &Rate, cost: u64, now: Timestamp) -> Mark {
        let Mark { amount, .. } = limit.charge(&mut self.bucket, cost, now);
        let full_at = self.bucket.moment();
        self.peak = self.peak.max(full_at);
        let (part, fraction) = self.bucket.terms().split(full_at.saturating_add(self.given));
        Mark::new(part, amount).with_fraction(fraction)
    }

    /// As [`Rate::bring`], while there is something to keep.
    pub(crate) fn bring(&mut self, limit: &Rate, now: Timestamp) -> bool {
        let before = *self;
        let old = self.bucket.terms();
        let in_terms = self.bucket.is_in_terms_of(limit);
        limit.bring(&mut self.bucket, now);
        let new = limit.terms;
        if !in_terms {
            // Receipts under the old figures give nothing back, also if those are in force again: as if all of it had been.
            let left = self.peak.saturating_sub(old.moment(now, 0));
            self.given = old.convert(self.given.saturating_add(left), new);
            self.peak = old.convert(self.peak, new);
        }
        let furthest = new.moment(now, 0).saturating_add(limit.deepest());
        self.peak = self.peak.min(furthest).max(self.bucket.moment());
        *self != before
    }
}

impl Terms {
    /// A moment or an amount under other terms, rounded up.
    fn convert(self, ticks: u128, other: Self) -> u128 {
        let parts = u128::from(self.parts);
        let whole = ticks.checked_div(parts).unwrap_or(0).saturating_mul(u128::from(other.parts));
        let rest = ticks.checked_rem(parts).unwrap_or(0).saturating_mul(u128::from(other.parts));
        whole.saturating_add(rest.div_ceil(parts))
    }
}
