//! Fixed window: one count, dropped when its window ends.

use std::fmt;

use super::algorithm::{AlgorithmState, Figures, LimitAlgorithm, LimitOption, periods_in};
use super::words::{any_period, quantity};
use super::{LimitError, Look, Mark, Unit, check_figures};
use crate::balance::{Shaped, Small};
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

/// Where fixed windows begin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Anchor {
    /// At the multiples of the period since the epoch, for every key alike.
    #[default]
    Clock,
    /// At the first charged request of each key.
    First,
}

impl Anchor {
    /// The tag of a limit with windows that begin there.
    const fn tag(self) -> u8 {
        match self {
            Self::Clock => 2,
            Self::First => 3,
        }
    }
}

/// A fixed window: L in each window of W.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FixedWindow {
    quota: u64,
    period: Span,
    anchor: Anchor,
}

/// The window that was charged last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowCount {
    pub(crate) start: Timestamp,
    pub(crate) used: u64,
    pub(crate) period: Span,
}

impl WindowCount {
    /// Its shape in scripts.
    const SHAPE: u8 = 2;

    #[inline]
    fn end(&self) -> Timestamp {
        self.start.plus(self.period)
    }
}

impl FixedWindow {
    /// L and W.
    pub(super) const fn rate(&self) -> Option<(u64, Span)> {
        Some((self.quota, self.period))
    }

    #[inline]
    fn start_of(&self, now: Timestamp) -> Timestamp {
        match self.anchor {
            Anchor::Clock => now.floor_to(self.period),
            Anchor::First => now,
        }
    }

    #[inline]
    fn opened(&self, now: Timestamp) -> WindowCount {
        WindowCount { start: self.start_of(now), used: 0, period: self.period }
    }

    /// The window that holds now: the one in the state, unless it has ended.
    #[inline]
    fn current(&self, state: &WindowCount, now: Timestamp) -> WindowCount {
        if now < state.end() { *state } else { self.opened(now) }
    }
}

impl LimitAlgorithm for FixedWindow {
    type State = WindowCount;

    const NAME: &'static str = "fixed-window";
    const TAGS: &'static [u8] = &[Anchor::Clock.tag(), Anchor::First.tag()];
    const OPTIONS: &'static [LimitOption] = &[LimitOption::Anchor];
    const RESET_MAKES_ROOM: bool = true;

    fn new(figures: &Figures) -> Result<Self, LimitError> {
        let Figures { quota, period, anchor, .. } = *figures;
        check_figures(quota, period)?;
        Ok(Self { quota, period, anchor })
    }

    fn figures(&self) -> Figures {
        Figures { anchor: self.anchor, ..Figures::new(self.quota, self.period) }
    }

    #[inline]
    fn quota(&self) -> u64 {
        self.quota
    }

    #[inline]
    fn period(&self) -> Span {
        self.period
    }

    /// The end of one window and the beginning of the next can both be used up within one period.
    fn bound(&self) -> u64 {
        self.quota.saturating_mul(2)
    }

    /// One window more than fit: the first and the last may be cut.
    fn most_in(&self, window: Span) -> u64 {
        self.quota.saturating_mul(periods_in(window, self.period).saturating_add(1))
    }

    fn most_in_clock_window(&self) -> u64 {
        if self.anchor == Anchor::Clock { self.quota } else { self.bound() }
    }

    fn counts_clock_windows(&self) -> bool {
        self.anchor == Anchor::Clock
    }

    fn fills_before(&self, other: &Self, same_keys: bool) -> Option<bool> {
        // Windows that begin and end together; those of single keys do so only for the same keys.
        let together =
            self.period == other.period && self.anchor == other.anchor && (same_keys || other.anchor == Anchor::Clock);
        together.then_some(self.quota < other.quota)
    }

    fn describe(&self, unit: Unit, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let any = any_period(self.period);
        let from = match self.anchor {
            Anchor::Clock => "of the clock",
            Anchor::First => "from the first request on",
        };
        let (quota, most) = (quantity(self.quota, unit), quantity(self.bound(), unit));
        write!(f, "{quota} in each {any} {from}; at most {most} in any {any}")
    }

    fn write(&self, out: &mut Writer) {
        out.byte(self.anchor.tag());
        out.number(self.quota);
        out.number(self.period.micros());
    }

    fn read(tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let anchor = if tag == Anchor::First.tag() { Anchor::First } else { Anchor::Clock };
        let figures = Figures::new(from.number()?, Span::from_micros(from.number()?));
        Self::new(&Figures { anchor, ..figures }).map_err(|_| BytesError::Malformed("limit"))
    }

    #[inline]
    fn fresh(&self, now: Timestamp) -> WindowCount {
        self.opened(now)
    }

    #[inline]
    fn is_written_under(&self, state: &WindowCount) -> bool {
        state.period == self.period
    }

    #[inline]
    fn bring(&self, state: &mut WindowCount, now: Timestamp) -> bool {
        let before = *state;
        if state.period != self.period {
            // What a running window has used moves into the window that holds now.
            let used = if now < state.end() { state.used } else { 0 };
            // Under a shorter period the window that the first charge opened may be over; another one opens now.
            let running = now < state.start.plus(self.period);
            let start = if self.anchor == Anchor::First && running { state.start } else { self.start_of(now) };
            *state = WindowCount { start, used, period: self.period };
        }
        // A state from the future means that the clock has stepped back. Its window must still last W of real
        // time and must not open a second time, so the count stays and the window never ends sooner.
        match self.anchor {
            Anchor::First => state.start = state.start.min(now),
            Anchor::Clock => {
                let next = self.start_of(now).plus(self.period);
                state.start = state.start.min(next);
            }
        }
        *state != before
    }

    #[inline]
    fn look(&self, state: &WindowCount, cost: u64, now: Timestamp) -> Look {
        let window = self.current(state, now);
        let available = self.quota.saturating_sub(window.used);
        // In debt nothing fits, not even a cost of 0.
        let fits = cost <= available && window.used <= self.quota;
        // Before its first charge a window of its own has not begun, so nothing is waiting to be reset.
        let opened = window.used > 0 || self.anchor == Anchor::Clock;
        Look {
            allowed: fits,
            available,
            ready_at: if fits {
                now
            } else if cost > self.quota {
                Timestamp::MAX
            } else {
                window.end()
            },
            reset_if_charged: if opened { window.end() } else { now.plus(self.period) },
            reset_if_not: if opened { window.end() } else { now },
        }
    }

    #[inline]
    fn charge(&self, state: &mut WindowCount, cost: u64, now: Timestamp, _id: TraceId) -> Mark {
        // A window that has ended is forgotten here, not by a timer.
        let mut window = self.current(state, now);
        // Refunds may have emptied the window that the first charge opened. The next charge is a first one again.
        if window.used == 0 && self.anchor == Anchor::First {
            window = self.opened(now);
        }
        // Debt is bounded by one more quota. The bound also keeps the count far from saturating, where a refund would
        // not be exact.
        let room = self.quota.saturating_mul(2).saturating_sub(window.used);
        let amount = cost.min(room);
        window.used = window.used.saturating_add(amount);
        *state = window;
        Mark::new(window.start, amount)
    }

    fn charge_shape(&self, cost: u64, _id: TraceId) -> Option<Shaped> {
        let from_first = u64::from(self.anchor == Anchor::First);
        let numbers = vec![self.quota, self.period.micros(), from_first, cost];
        Some(Shaped { shape: WindowCount::SHAPE, numbers })
    }

    #[inline(always)]
    fn pack(&self, state: &WindowCount) -> Option<Small> {
        self.is_written_under(state).then(|| Small { large: state.start.micros(), figure: state.used })
    }

    #[inline(always)]
    fn unpack(&self, Small { large, figure }: Small) -> Option<WindowCount> {
        Some(WindowCount { start: Timestamp::from_micros(large), used: figure, period: self.period })
    }
}

impl AlgorithmState for WindowCount {
    const TAGS: &'static [u8] = &[2];
    /// A tag and three numbers of at most 10 bytes.
    const MAX_BYTES: usize = 1 + 3 * 10;

    fn silent_from(&self) -> Timestamp {
        // A window whose charges were all given back says nothing. One from the future, after the clock has stepped back, shows its end.
        if self.used == 0 { self.start } else { self.end() }
    }

    fn set_terms(&self, figures: &mut Figures) {
        figures.period = self.period;
    }

    fn to_shape(&self) -> Option<Shaped> {
        let numbers = vec![self.start.micros(), self.used, self.period.micros()];
        Some(Shaped { shape: Self::SHAPE, numbers })
    }

    fn from_shape(shaped: &Shaped) -> Option<Self> {
        let (Self::SHAPE, [start, used, period]) = (shaped.shape, &shaped.numbers[..]) else { return None };
        Some(Self { start: Timestamp::from_micros(*start), used: *used, period: Span::from_micros(*period) })
    }

    /// A charge counts while its window is the one that is stored.
    fn give_back(&mut self, mark: &Mark, _now: Timestamp, _id: TraceId) {
        // A later window has forgotten this charge with all others of its window, so giving it back would take from
        // other charges.
        if self.start == mark.part {
            self.used = self.used.saturating_sub(mark.amount);
        }
    }

    fn newest(&self, most: u64) -> Option<Mark> {
        (self.used > 0).then(|| Mark::new(self.start, self.used.min(most)))
    }

    fn write(&self, out: &mut Writer) {
        out.byte(2);
        out.number(self.start.micros());
        out.number(self.used);
        out.number(self.period.micros());
    }

    fn read(_tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self {
            start: Timestamp::from_micros(from.number()?),
            used: from.number()?,
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
    use crate::limit::model::{Definition, Event, History};

    impl Definition for FixedWindow {
        fn used(&self, history: &History, now: u128) -> u128 {
            let period = u128::from(self.period.micros());
            match self.anchor {
                Anchor::Clock => history.sum(|at| at / period == now / period),
                Anchor::First => own_window(history, period, now),
            }
        }

        /// A window on the clock may have been charged before the clock stepped back into the one before it.
        fn longest(&self) -> Span {
            let periods = match self.anchor {
                Anchor::Clock => 2,
                Anchor::First => 1,
            };
            Span::from_micros(self.period.micros() * periods)
        }

        /// A window may end just after the change, so the one before it and the one after it both count in full.
        fn bound_across(&self, new: &Self) -> u64 {
            self.quota + self.quota.max(new.quota) + new.quota
        }

        fn opens_own_windows(&self) -> bool {
            self.anchor == Anchor::First
        }
    }

    /// The count of the window that the first charge opened; after one whose charges all came back another one opens.
    fn own_window(history: &History, period: u128, now: u128) -> u128 {
        let (mut start, mut used, mut members) = (0, 0, Vec::new());
        for (place, (at, event)) in history.events.iter().enumerate() {
            match event {
                Event::Charge { amount } => {
                    if used == 0 || *at >= start + period {
                        (start, used) = (*at, 0);
                        members.clear();
                    }
                    used += amount;
                    members.push(place);
                }
                Event::GiveBack { charge, amount } if members.contains(charge) => used -= amount,
                Event::GiveBack { .. } => {}
            }
        }
        if now < start + period { used } else { 0 }
    }
}
