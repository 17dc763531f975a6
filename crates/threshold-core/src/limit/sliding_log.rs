//! Sliding log: every charge at its own time, exact.

use std::fmt;

use super::algorithm::{Figures, LimitAlgorithm};
use super::entries::{Entries, Sliding};
use super::words::{any_period, quantity};
use super::{Algorithm, LimitError, Look, MAX_LOG, Mark, Unit, check_figures};
use crate::balance::Shaped;
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

/// A sliding log: at most L in any window of W, with every charge at its own time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingLog {
    quota: u64,
    period: Span,
}

impl SlidingLog {
    /// `quota` in any window of `period`.
    ///
    /// # Errors
    /// Where a figure is out of range, or `quota` is more than [`MAX_LOG`].
    pub fn new(quota: u64, period: Span) -> Result<Self, LimitError> {
        <Self as LimitAlgorithm>::new(&Figures::new(quota, period))
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

    /// L and W.
    pub(super) const fn rate(&self) -> Option<(u64, Span)> {
        Some((self.quota, self.period))
    }

    fn at(&self, now: Timestamp) -> Sliding {
        Sliding { quota: self.quota, period: self.period, kept_at: now, max_entries: usize::from(MAX_LOG) }
    }
}

impl LimitAlgorithm for SlidingLog {
    type State = Entries;

    const NAME: &'static str = "sliding-log";
    /// That of a sliding window: the stored number of sub-windows is 0 for a log.
    const TAGS: &'static [u8] = &[4];
    const MAX_QUOTA: u64 = MAX_LOG as u64;
    const LARGER: Option<Algorithm> = Some(Algorithm::SlidingWindow);
    const RESET_MAKES_ROOM: bool = true;

    fn new(figures: &Figures) -> Result<Self, LimitError> {
        let Figures { quota, period, .. } = *figures;
        check_figures(quota, period)?;
        // A log keeps an entry for each request, so its memory is the client's to choose up to this.
        if quota > <Self as LimitAlgorithm>::MAX_QUOTA {
            return Err(LimitError::LongLog { quota });
        }
        Ok(Self { quota, period })
    }

    fn figures(&self) -> Figures {
        Figures::new(self.quota, self.period)
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

    fn describe(&self, unit: Unit, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {} in any {}", quantity(self.quota, unit), any_period(self.period))
    }

    fn write(&self, out: &mut Writer) {
        out.byte(4);
        out.number(self.quota);
        out.number(self.period.micros());
        out.number(0);
    }

    fn read(_tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let figures = Figures::new(from.number()?, Span::from_micros(from.number()?));
        // A sliding window has the same tag. `Limit::read` tries each algorithm of a tag until one accepts the figures.
        if from.number()? > 0 {
            return Err(BytesError::Malformed("limit"));
        }
        <Self as LimitAlgorithm>::new(&figures).map_err(|_| BytesError::Malformed("limit"))
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
        self.at(Timestamp::EPOCH).charge_shape(Span::ZERO, cost)
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

    impl Definition for SlidingLog {
        const KNOWS_AGES: bool = true;

        fn used(&self, history: &History, now: u128) -> u128 {
            history.sum(|at| at + u128::from(self.period.micros()) > now)
        }

        fn longest(&self) -> Span {
            self.period
        }

        fn bound_across(&self, new: &Self) -> u64 {
            self.quota.max(new.quota)
        }
    }
}
