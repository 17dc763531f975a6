//! Fixed window: one count, forgotten when its window ends.

use super::{LimitError, Look, Mark, check_figures};
use crate::time::{Span, Timestamp};

/// Where windows begin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Anchor {
    /// At the multiples of the period since the epoch, for every key alike.
    #[default]
    Clock,
    /// At the first charged request of each key.
    First,
}

/// A fixed window: L in each window of W.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    quota: u64,
    period: Span,
    anchor: Anchor,
}

/// The window that was charged last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowState {
    pub(crate) start: Timestamp,
    pub(crate) used: u64,
    pub(crate) period: Span,
}

impl WindowState {
    #[inline]
    pub(crate) fn end(&self) -> Timestamp {
        self.start.plus(self.period)
    }

    /// Gives back a charge, if its window is still the one that counts.
    pub(crate) fn give_back(&mut self, amount: u64, window: Timestamp) {
        if self.start == window {
            self.used = self.used.saturating_sub(amount);
        }
    }
}

impl Window {
    /// `quota` in each window of `period`.
    ///
    /// # Errors
    /// Where a figure is out of range.
    pub fn new(quota: u64, period: Span, anchor: Anchor) -> Result<Self, LimitError> {
        check_figures(quota, period)?;
        Ok(Self { quota, period, anchor })
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

    /// Where windows begin.
    #[must_use]
    pub const fn anchor(&self) -> Anchor {
        self.anchor
    }

    #[inline]
    pub(super) fn fresh(&self, now: Timestamp) -> WindowState {
        WindowState { start: self.start_of(now), used: 0, period: self.period }
    }

    #[inline]
    fn start_of(&self, now: Timestamp) -> Timestamp {
        match self.anchor {
            Anchor::Clock => now.floor_to(self.period),
            Anchor::First => now,
        }
    }

    #[inline]
    pub(crate) fn bring(&self, state: &mut WindowState, now: Timestamp) -> bool {
        let before = *state;
        if state.period != self.period {
            // What a running window has used moves into the window that holds now.
            let used = if now < state.end() { state.used } else { 0 };
            // Under a shorter period the window that the first charge opened may be over; it opens anew now.
            let running = now < state.start.plus(self.period);
            let start = if self.anchor == Anchor::First && running { state.start } else { self.start_of(now) };
            *state = WindowState { start, used, period: self.period };
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

    /// The window that holds now: the one in the state, unless it has ended.
    #[inline]
    fn current(&self, state: &WindowState, now: Timestamp) -> WindowState {
        if now < state.end() { *state } else { self.fresh(now) }
    }

    #[inline]
    pub(crate) fn look(&self, state: &WindowState, cost: u64, now: Timestamp) -> Look {
        let window = self.current(state, now);
        let remaining = self.quota.saturating_sub(window.used);
        let fits = cost <= remaining && window.used <= self.quota;
        // Before its first charge a window of its own has not begun, so nothing is waiting to be reset.
        let opened = window.used > 0 || self.anchor == Anchor::Clock;
        Look {
            allowed: fits,
            remaining,
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
    pub(crate) fn charge(&self, state: &mut WindowState, cost: u64, now: Timestamp) -> Mark {
        let mut window = self.current(state, now);
        if window.used == 0 && self.anchor == Anchor::First {
            window = self.fresh(now);
        }
        let room = self.quota.saturating_mul(2).saturating_sub(window.used);
        let amount = cost.min(room);
        window.used = window.used.saturating_add(amount);
        *state = window;
        Mark::new(window.start, amount)
    }
}
