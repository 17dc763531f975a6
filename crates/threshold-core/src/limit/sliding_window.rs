//! Sliding window: the period in sub-windows that leave one by one.

use std::fmt;

use super::algorithm::{Figures, LimitAlgorithm, LimitOption};
pub(crate) use super::entries::Entries;
use super::entries::{MAX_ENTRIES, Sliding};
use super::words::{any_period, quantity};
use super::{LimitError, Look, MAX_BUCKETS, Mark, Unit, check_figures};
use crate::balance::Shaped;
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

/// A sliding window: at most L in any window of W, counted in sub-windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlidingWindow {
    quota: u64,
    period: Span,
    buckets: u32,
}

impl SlidingWindow {
    /// L and W.
    pub(super) const fn rate(&self) -> Option<(u64, Span)> {
        Some((self.quota, self.period))
    }

    /// A window with as many sub-windows as in a policy that does not say. The figures are in range.
    pub(super) const fn in_range(quota: u64, period: Span) -> Self {
        Self { quota, period, buckets: Figures::BUCKETS }
    }

    /// How long a sub-window is: at least a microsecond. The period may be a little longer than all of them.
    fn grain(&self) -> Span {
        Span::from_micros(self.period.micros().checked_div(u64::from(self.buckets)).unwrap_or(1))
    }

    fn at(&self, now: Timestamp) -> Sliding {
        let grain = self.grain();
        // At the end of the sub-window and not at its beginning: a charge then counts for a whole period at least, and
        // at most a grain longer.
        let kept_at = now.floor_to(grain).plus(grain);
        Sliding { quota: self.quota, period: self.period, kept_at, max_entries: MAX_ENTRIES }
    }
}

impl LimitAlgorithm for SlidingWindow {
    type State = Entries;

    const NAME: &'static str = "sliding-window";
    const TAGS: &'static [u8] = &[4];
    const OPTIONS: &'static [LimitOption] = &[LimitOption::Buckets];
    const RESET_MAKES_ROOM: bool = true;

    fn new(figures: &Figures) -> Result<Self, LimitError> {
        let Figures { quota, period, buckets, .. } = *figures;
        check_figures(quota, period)?;
        if buckets == 0 || buckets > MAX_BUCKETS {
            return Err(LimitError::Buckets { buckets });
        }
        if u64::from(buckets) > period.micros() {
            return Err(LimitError::ShortBuckets { period, buckets });
        }
        Ok(Self { quota, period, buckets })
    }

    fn figures(&self) -> Figures {
        Figures { buckets: self.buckets, ..Figures::new(self.quota, self.period) }
    }

    #[inline]
    fn quota(&self) -> u64 {
        self.quota
    }

    #[inline]
    fn period(&self) -> Span {
        self.period
    }

    fn bound(&self) -> u64 {
        self.quota
    }

    /// A sub-window leaves when its end is a period old.
    fn counted_for(&self) -> Span {
        Span::from_micros(self.period.micros().saturating_add(self.grain().micros()))
    }

    fn describe(&self, unit: Unit, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (quota, any) = (quantity(self.quota, unit), any_period(self.period));
        write!(f, "at most {quota} in any {any}, counted in steps of {}", self.grain())
    }

    fn write(&self, out: &mut Writer) {
        out.byte(4);
        out.number(self.quota);
        out.number(self.period.micros());
        out.number(u64::from(self.buckets));
    }

    /// 0 sub-windows are a sliding log, which this refuses.
    fn read(_tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let figures = Figures::new(from.number()?, Span::from_micros(from.number()?));
        let buckets = u32::try_from(from.number()?).map_err(|_| BytesError::Malformed("limit"))?;
        Self::new(&Figures { buckets, ..figures }).map_err(|_| BytesError::Malformed("limit"))
    }

    fn fresh(&self, _now: Timestamp) -> Entries {
        Entries::none(self.period)
    }

    #[inline]
    fn is_written_under(&self, state: &Entries) -> bool {
        state.period == self.period
    }

    fn bring(&self, state: &mut Entries, now: Timestamp) -> bool {
        self.at(now).bring(state, now)
    }

    #[inline]
    fn is_brought(&self, state: &Entries, now: Timestamp) -> bool {
        self.at(now).is_brought(state)
    }

    fn look_apart(&self, own: Option<&Self>, state: &mut Entries, cost: u64, now: Timestamp) -> (Look, bool) {
        let own = own.filter(|_| cost > 0 && state.is_of_the_future(now));
        let changed = own.is_some_and(|own| own.bring(state, now));
        (self.at(now).look_apart(state, cost, now), changed)
    }

    fn look(&self, state: &Entries, cost: u64, now: Timestamp) -> Look {
        self.at(now).look(state, cost, now)
    }

    fn charge(&self, state: &mut Entries, cost: u64, now: Timestamp, _id: TraceId) -> Mark {
        self.at(now).charge(state, cost, now)
    }

    fn charge_shape(&self, cost: u64, _id: TraceId) -> Option<Shaped> {
        // The script computes `kept_at` from its own clock and the grain, so the time given here does not matter.
        self.at(Timestamp::EPOCH).charge_shape(self.grain(), cost)
    }
}

#[cfg(test)]
#[expect(
    clippy::arithmetic_side_effects,
    reason = "a definition reads as the specification does; overflow fails the test"
)]
mod definition {
    use super::*;
    use crate::limit::model::{Definition, History};

    impl Definition for SlidingWindow {
        const KNOWS_AGES: bool = true;

        /// A charge counts from its sub-window's end on.
        fn used(&self, history: &History, now: u128) -> u128 {
            let period = u128::from(self.period.micros());
            let grain = period / u128::from(self.buckets);
            history.sum(|at| (at / grain + 1) * grain + period > now)
        }

        /// The period, and the sub-window that a charge is moved to the end of.
        fn longest(&self) -> Span {
            Span::from_micros(self.period.micros() * 2)
        }

        fn bound_across(&self, new: &Self) -> u64 {
            self.quota.max(new.quota)
        }
    }
}
