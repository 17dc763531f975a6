//! A token bucket that was given back to while later charges counted: it also keeps how much.
//!
//! A mark holds when the bucket was to be full again after its charge. The part of that which lies before now has refilled,
//! and what was given back since is no longer there: the rest, up to the cost, can be given back. A bucket that forgot what
//! it gave back would give the same time back twice.
//!
//! So that one number suffices on a mark, it is the gross moment: when the bucket is full again plus all that was given back
//! so far. Giving back the latest charge leaves the bucket as if that had never been made; then nothing is kept.

use super::level::{Interval, Level};
use super::{Mark, TokenBucket};
use crate::codec::{BytesError, Reader, Writer};
use crate::time::Timestamp;

/// A bucket, and what was given back to it. Moments and amounts are in ticks, as [`Interval`] counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RefundedBucket {
    pub(crate) level: Level,
    /// All that was given back, except for refunds of the latest charge.
    pub(crate) given: u128,
    /// The latest moment at which the bucket was to be full again. No charge that was made so far counts beyond it.
    pub(crate) peak: u128,
}

impl Level {
    /// Gives back what a mark charged, as far as it still counts. Returns the bucket that has to keep that, if any.
    pub(super) fn give_back(&mut self, mark: &Mark, now: Timestamp) -> Option<RefundedBucket> {
        // The peak is taken before anything is given back: no charge so far counts beyond it.
        let mut refunded = RefundedBucket { level: *self, given: 0, peak: self.moment() };
        refunded.give_back(mark, now);
        *self = refunded.level;
        (refunded.given > 0).then_some(refunded)
    }
}

impl RefundedBucket {
    /// The first byte of a stored state.
    pub(super) const TAG: u8 = 6;
    /// Its shape in scripts.
    pub(super) const SHAPE: u8 = 5;

    /// The first moment from which this is the same as no state: all that was charged so far has refilled by then, so that
    /// no receipt gives anything back.
    pub(super) fn silent_from(&self) -> Timestamp {
        self.level.interval().round_up(self.peak)
    }

    /// The level if nothing had been given back: the most that receipts could still ask of the bucket.
    pub(super) fn at_peak(&self) -> Level {
        let (full_at, fraction) = self.level.interval().split(self.peak);
        Level { full_at, fraction, ..self.level }
    }

    /// Gives back what a mark charged, as far as it still counts.
    pub(super) fn give_back(&mut self, mark: &Mark, now: Timestamp) {
        let interval = self.level.interval();
        let full_at = self.level.moment();
        let gross = full_at.saturating_add(self.given);
        let charged = interval.moment(mark.part, mark.fraction());
        if charged > gross {
            // This bucket was never charged that far: its state was dropped since, or brought back after the clock stepped.
            return;
        }
        // A mark is gross of what was given back before its charge, so subtracting all of `given` leaves out only what
        // was given back since.
        let left = charged.saturating_sub(self.given).saturating_sub(interval.moment(now, 0));
        let back = interval.cost(mark.amount).min(left);
        (self.level.full_at, self.level.fraction) = interval.split(full_at.saturating_sub(back));
        // The latest charge is undone by the level alone: `gross` falls below its mark, so a second refund of it
        // returns above. Any other refund has to be remembered, or the same mark would give back time that later
        // charges paid for.
        if charged < gross {
            self.given = self.given.saturating_add(back);
        }
    }

    pub(super) fn charge(&mut self, limit: &TokenBucket, cost: u64, now: Timestamp) -> Mark {
        let mark = limit.charge_level(&mut self.level, cost, now);
        if !self.level.is_in_terms_of(limit) {
            // Nothing was charged.
            return mark;
        }
        let amount = mark.amount;
        let full_at = self.level.moment();
        // A charge that saturates may stop short of the latest moment by a part of a unit. Its receipt cannot tell by how much
        // (`latest_reset`), so until that moment what was given back must be known.
        let counts_until = if amount < cost { limit.latest(now) } else { full_at };
        self.peak = self.peak.max(full_at).max(counts_until);
        // Gross, so that refunds before this charge do not reduce what its own refund gives back.
        let (part, fraction) = self.level.interval().split(full_at.saturating_add(self.given));
        Mark::new(part, amount).with_fraction(fraction)
    }

    /// As [`TokenBucket::bring_level`], while there is something to keep.
    pub(super) fn bring(&mut self, limit: &TokenBucket, now: Timestamp) -> bool {
        let before = *self;
        let old = self.level.interval();
        let in_terms = self.level.is_in_terms_of(limit);
        limit.bring_level(&mut self.level, now);
        let new = limit.interval;
        if !in_terms && self.level.is_in_terms_of(limit) {
            // Receipts under the old figures give nothing back, also if those are in force again: as if all of it had been.
            let left = self.peak.saturating_sub(old.moment(now, 0));
            self.given = old.convert(self.given.saturating_add(left), new);
            self.peak = old.convert(self.peak, new);
        }
        // A clock that has stepped back must not keep this state for longer than a charge could. `read` refuses a peak
        // before the level.
        self.peak = self.peak.min(limit.furthest(&self.level, now)).max(self.level.moment());
        *self != before
    }

    pub(super) fn write(&self, out: &mut Writer) {
        self.level.write(out);
        out.wide(self.given);
        out.wide(self.peak);
    }

    pub(super) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let refunded = Self { level: Level::read(from)?, given: from.wide()?, peak: from.wide()? };
        if refunded.is_sound() { Ok(refunded) } else { Err(BytesError::Malformed("token bucket")) }
    }

    /// Returns what a script keeps beside the level: how much was given back and the latest moment, each as whole microseconds and
    /// the ticks that are left.
    pub(super) fn script_numbers(&self) -> [u64; 4] {
        let interval = self.level.interval();
        let ((given, given_rest), (peak, peak_rest)) = (interval.split(self.given), interval.split(self.peak));
        [given.micros(), given_rest, peak.micros(), peak_rest]
    }

    /// Reads what [`script_numbers`](Self::script_numbers) returned.
    pub(super) fn of_script(level: Level, [given, given_rest, peak, peak_rest]: [u64; 4]) -> Option<Self> {
        let interval = level.interval();
        let ticks = |micros: u64, rest: u64| interval.moment(Timestamp::from_micros(micros), rest);
        let refunded = Self { level, given: ticks(given, given_rest), peak: ticks(peak, peak_rest) };
        let is_sound = given_rest < interval.parts && peak_rest < interval.parts && refunded.is_sound();
        is_sound.then_some(refunded)
    }

    /// A bucket that has given nothing back is stored as a plain level. Two spellings of one state would differ for a store that
    /// compares bytes.
    fn is_sound(&self) -> bool {
        self.given > 0 && self.peak >= self.level.moment()
    }
}

impl Interval {
    /// Ticks of this interval in those of another, rounded up.
    fn convert(self, ticks: u128, other: Self) -> u128 {
        // Whole microseconds apart from the rest, so that the product stays within 128 bits.
        let parts = u128::from(self.parts);
        let whole = ticks.checked_div(parts).unwrap_or(0).saturating_mul(u128::from(other.parts));
        let rest = ticks.checked_rem(parts).unwrap_or(0).saturating_mul(u128::from(other.parts));
        whole.saturating_add(rest.div_ceil(parts))
    }
}
