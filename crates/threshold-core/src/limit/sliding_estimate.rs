//! Sliding estimate: this window's count and the last one's, weighted by how much of it is still in view.

use std::fmt;

use super::algorithm::{AlgorithmState, Figures, LimitAlgorithm, periods_in};
use super::words::{any_period, quantity};
use super::{LimitError, Look, Mark, Unit, check_figures};
use crate::balance::{Shaped, Small};
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

/// A sliding estimate: L per W, counted as if the charges of the last window had been spread evenly over it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlidingEstimate {
    quota: u64,
    period: Span,
}

/// The counts of two neighbouring windows of the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TwoWindows {
    /// Where the current window begins.
    pub(crate) start: Timestamp,
    pub(crate) current: u64,
    pub(crate) previous: u64,
    pub(crate) period: Span,
}

impl TwoWindows {
    /// Its shape in scripts.
    const SHAPE: u8 = 3;

    fn end(&self) -> Timestamp {
        self.start.plus(self.period)
    }

    /// The pair of windows as `now` sees it.
    fn rolled(&self, now: Timestamp) -> Self {
        if now < self.end() {
            return *self;
        }
        // A whole window has passed since: the stored one is not the last window before `now`, and weighs nothing.
        let previous = if now < self.end().plus(self.period) { self.current } else { 0 };
        Self { start: now.floor_to(self.period), current: 0, previous, period: self.period }
    }

    /// The part of the last window still in view, rounded up so that rounding never grants.
    fn weight(&self, now: Timestamp) -> u64 {
        // If the clock has stepped back before `start`, `since` is 0 and the last window counts in full.
        let left = self.period.micros().saturating_sub(now.since(self.start).micros());
        let share = u128::from(self.previous)
            .saturating_mul(u128::from(left))
            .div_ceil(u128::from(self.period.micros().max(1)));
        u64::try_from(share).unwrap_or(u64::MAX)
    }

    fn used(&self, now: Timestamp) -> u64 {
        self.current.saturating_add(self.weight(now))
    }
}

impl SlidingEstimate {
    /// L and W.
    pub(super) const fn rate(&self) -> Option<(u64, Span)> {
        Some((self.quota, self.period))
    }

    /// The share of the limit, in percent rounded down, that a client gets who always asks. The weight of the last window is
    /// rounded up, so it is at least 1 until that window has left: one less than the limit fits into each. A limit of 1
    /// fits into every second window.
    fn share(&self) -> u64 {
        let each_two = if self.quota == 1 { 1 } else { self.quota.saturating_sub(1).saturating_mul(2) };
        each_two.saturating_mul(50).checked_div(self.quota).unwrap_or(0)
    }

    fn begun(&self, now: Timestamp) -> TwoWindows {
        TwoWindows { start: now.floor_to(self.period), current: 0, previous: 0, period: self.period }
    }

    fn add(&self, state: &mut TwoWindows, cost: u64, now: Timestamp) -> Mark {
        let mut windows = state.rolled(now);
        // Debt is bounded by one more quota, as under every algorithm: a huge cost must not lock the key for many
        // windows.
        let room = self.quota.saturating_mul(2).saturating_sub(windows.used(now));
        let amount = cost.min(room);
        windows.current = windows.current.saturating_add(amount);
        *state = windows;
        Mark::new(windows.start, amount)
    }

    /// When one more fits than fits now; now, if nothing is counted. The end of the window is no such moment: what was counted
    /// in it is then in view as a whole.
    fn more_at(&self, windows: &TwoWindows, now: Timestamp) -> Timestamp {
        match windows.used(now) {
            0 => now,
            used => self.ready_at(windows, self.quota.saturating_sub(used).saturating_add(1)),
        }
    }

    /// When enough of the counted windows has slid out of view: in this window, else in the next.
    fn ready_at(&self, windows: &TwoWindows, cost: u64) -> Timestamp {
        let Some(free) = self.quota.checked_sub(cost) else { return Timestamp::MAX };
        let end = windows.start.plus(self.period);
        match free.checked_sub(windows.current) {
            // Some: the current count leaves room, and only the last window is in the way. None: the current count
            // alone is too much, so it has to become the last window and slide out in the next.
            Some(free) => windows.start.plus(self.slid_out(windows.previous, free)),
            None => end.plus(self.slid_out(windows.current, free)),
        }
    }

    /// How far into a window at most `free` of the `previous` one's count is still in view.
    fn slid_out(&self, previous: u64, free: u64) -> Span {
        let period = self.period.micros();
        // Exact although `weight` rounds up: for a whole number, `ceil(x) <= free` says the same as `x <= free`.
        let in_view = u128::from(free)
            .saturating_mul(u128::from(period))
            .checked_div(u128::from(previous))
            .map_or(period, |left| u64::try_from(left).unwrap_or(u64::MAX));
        Span::from_micros(period.saturating_sub(in_view))
    }
}

impl LimitAlgorithm for SlidingEstimate {
    type State = TwoWindows;

    const NAME: &'static str = "sliding-estimate";
    const TAGS: &'static [u8] = &[5];
    const RESETS_WITH_CLOCK: bool = true;

    fn new(figures: &Figures) -> Result<Self, LimitError> {
        let Figures { quota, period, .. } = *figures;
        check_figures(quota, period)?;
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

    /// Two windows can be used up next to each other, but for the 1 that the first still weighs.
    fn bound(&self) -> u64 {
        self.quota.saturating_mul(2).saturating_sub(1)
    }

    /// The count of each window of the clock is part of its estimate. One window more than fit, because the first and the last may
    /// be cut.
    fn most_in(&self, window: Span) -> u64 {
        let periods = periods_in(window, self.period);
        self.quota.saturating_mul(periods.saturating_add(1)).min(self.bound().saturating_mul(periods))
    }

    fn most_in_clock_window(&self) -> u64 {
        self.quota
    }

    /// Charges of the last window count until the end of the present one.
    fn counted_for(&self) -> Span {
        Span::from_micros(self.period.micros().saturating_mul(2))
    }

    fn fills_before(&self, other: &Self, _same_keys: bool) -> Option<bool> {
        // A shorter window lies within the longer one, and so does the one before it, or it has the smaller weight.
        let within = self.period.micros().is_multiple_of(other.period.micros().max(1));
        let tighter = self.quota < other.quota || (self.quota == other.quota && self.period != other.period);
        (within && tighter).then_some(true)
    }

    fn steady_share(&self) -> Option<u64> {
        Some(self.share())
    }

    fn describe(&self, unit: Unit, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let any = any_period(self.period);
        let (quota, most) = (quantity(self.quota, unit), quantity(self.bound(), unit));
        write!(f, "about {quota} in any {any}; at most {most} in any {any}")
    }

    fn write(&self, out: &mut Writer) {
        out.byte(5);
        out.number(self.quota);
        out.number(self.period.micros());
    }

    fn read(_tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let figures = Figures::new(from.number()?, Span::from_micros(from.number()?));
        Self::new(&figures).map_err(|_| BytesError::Malformed("limit"))
    }

    fn fresh(&self, now: Timestamp) -> TwoWindows {
        self.begun(now)
    }

    #[inline]
    fn is_written_under(&self, state: &TwoWindows) -> bool {
        state.period == self.period
    }

    fn bring(&self, state: &mut TwoWindows, now: Timestamp) -> bool {
        let before = *state;
        if state.period != self.period {
            // All that is used counts in the current window. The windows of the new period begin elsewhere, and a count
            // in the last window would begin to slide out at once.
            let used = state.rolled(now).used(now);
            *state = TwoWindows { current: used, ..self.begun(now) };
        }
        // As for a fixed window: after a step back the pair stays, and never ends sooner.
        state.start = state.start.min(now.floor_to(self.period).plus(self.period));
        *state != before
    }

    fn look(&self, state: &TwoWindows, cost: u64, now: Timestamp) -> Look {
        let windows = state.rolled(now);
        let used = windows.used(now);
        let available = self.quota.saturating_sub(used);
        // In debt nothing fits, not even a cost of 0.
        let fits = cost <= available && used <= self.quota;
        let mut charged = *state;
        self.add(&mut charged, cost, now);
        Look {
            allowed: fits,
            available,
            ready_at: if fits { now } else { self.ready_at(&windows, cost) },
            reset_if_charged: self.more_at(&charged, now),
            reset_if_not: self.more_at(&windows, now),
        }
    }

    fn charge(&self, state: &mut TwoWindows, cost: u64, now: Timestamp, _id: TraceId) -> Mark {
        self.add(state, cost, now)
    }

    fn charge_shape(&self, cost: u64, _id: TraceId) -> Option<Shaped> {
        Some(Shaped { shape: TwoWindows::SHAPE, numbers: vec![self.quota, self.period.micros(), cost] })
    }

    #[inline(always)]
    fn pack(&self, state: &TwoWindows) -> Option<Small> {
        if !self.is_written_under(state) {
            return None;
        }
        // A slot has two words, so both counts share one. Larger counts are kept unpacked.
        let (current, previous) = (u32::try_from(state.current).ok()?, u32::try_from(state.previous).ok()?);
        // `start` is a multiple of the period, so the number of the window says all of it.
        let window = state.start.micros().checked_div(state.period.micros())?;
        Some(Small { large: u64::from(current) << 32 | u64::from(previous), figure: window })
    }

    #[inline(always)]
    fn unpack(&self, Small { large, figure }: Small) -> Option<TwoWindows> {
        Some(TwoWindows {
            start: Timestamp::from_micros(figure.saturating_mul(self.period.micros())),
            current: large >> 32,
            previous: large & u64::from(u32::MAX),
            period: self.period,
        })
    }
}

impl AlgorithmState for TwoWindows {
    const TAGS: &'static [u8] = &[4];
    /// A tag and four numbers of at most 10 bytes.
    const MAX_BYTES: usize = 1 + 4 * 10;

    fn silent_from(&self) -> Timestamp {
        match (self.current, self.previous) {
            // All charges were given back.
            (0, 0) => self.start,
            (0, _) => self.end(),
            // A count in the current window still weighs as the last window's for one period more.
            _ => self.end().plus(self.period),
        }
    }

    fn set_terms(&self, figures: &mut Figures) {
        figures.period = self.period;
    }

    fn to_shape(&self) -> Option<Shaped> {
        let numbers = vec![self.start.micros(), self.current, self.previous, self.period.micros()];
        Some(Shaped { shape: Self::SHAPE, numbers })
    }

    fn from_shape(shaped: &Shaped) -> Option<Self> {
        let (Self::SHAPE, [start, current, previous, period]) = (shaped.shape, &shaped.numbers[..]) else {
            return None;
        };
        let (start, period) = (Timestamp::from_micros(*start), Span::from_micros(*period));
        Some(Self { start, current: *current, previous: *previous, period })
    }

    /// A charge counts while its window is one of the two.
    fn give_back(&mut self, mark: &Mark, _now: Timestamp, _id: TraceId) {
        if self.start == mark.part {
            self.current = self.current.saturating_sub(mark.amount);
        } else if self.start == mark.part.plus(self.period) {
            self.previous = self.previous.saturating_sub(mark.amount);
        }
    }

    fn newest(&self, most: u64) -> Option<Mark> {
        if self.current > 0 {
            return Some(Mark::new(self.start, self.current.min(most)));
        }
        (self.previous > 0).then(|| Mark::new(self.start.minus(self.period), self.previous.min(most)))
    }

    fn write(&self, out: &mut Writer) {
        out.byte(4);
        out.number(self.start.micros());
        out.number(self.current);
        out.number(self.previous);
        out.number(self.period.micros());
    }

    fn read(_tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self {
            start: Timestamp::from_micros(from.number()?),
            current: from.number()?,
            previous: from.number()?,
            period: Span::from_micros(from.number()?),
        })
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

    impl Definition for SlidingEstimate {
        fn used(&self, history: &History, now: u128) -> u128 {
            let period = u128::from(self.period.micros());
            let previous = history.sum(|at| at / period + 1 == now / period);
            history.sum(|at| at / period == now / period) + (previous * (period - now % period)).div_ceil(period)
        }

        /// Two windows, and the one that the clock may have stepped back over.
        fn longest(&self) -> Span {
            Span::from_micros(self.period.micros() * 3)
        }

        /// An estimate forgets how its count was spread, so both bounds add up.
        fn bound_across(&self, new: &Self) -> u64 {
            self.bound() + new.bound()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client asks for one as soon as it fits, for a hundred windows after the first.
    ///
    /// Woken by: `self.quota` in place of `self.quota.saturating_sub(1)` in `share`; and `div_ceil` as a division in `weight`.
    #[test]
    fn a_client_who_always_asks_gets_the_steady_share() {
        for quota in (1..=12).chain([100]) {
            let limit = SlidingEstimate::new(&Figures::new(quota, Span::MINUTE)).unwrap();
            let start = Timestamp::from_secs(1_767_225_600);
            let (mut state, mut now, mut admitted) = (limit.fresh(start), start, 0u64);
            let (first, end) = (start.plus(Span::MINUTE), start.plus(Span::from_secs(60 * 101)));
            loop {
                now = now.max(limit.look(&state, 1, now).ready_at);
                if now >= end {
                    break;
                }
                limit.charge(&mut state, 1, now, TraceId::default());
                admitted += u64::from(now >= first);
            }
            assert_eq!(admitted / quota, limit.share(), "{quota} a minute");
        }
    }
}
