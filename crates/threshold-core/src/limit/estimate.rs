//! Sliding estimate: this window's count and the last one's, weighted by how much of it is still in view.

use super::{LimitError, Look, Mark, check_figures};
use crate::time::{Span, Timestamp};

/// A sliding estimate: L per W, counted as if the last window had been spread evenly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    quota: u64,
    period: Span,
}

/// Two neighbouring windows of the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EstimateState {
    /// Where the current window begins.
    pub(crate) start: Timestamp,
    pub(crate) current: u64,
    pub(crate) previous: u64,
    pub(crate) period: Span,
}

impl EstimateState {
    /// The first moment at which this says the same as no state.
    pub(crate) fn silent_from(&self) -> Timestamp {
        let end = self.start.plus(self.period);
        if self.current == 0 { end } else { end.plus(self.period) }
    }

    /// Gives back a charge, if its window still counts.
    pub(crate) fn give_back(&mut self, amount: u64, window: Timestamp) {
        if self.start == window {
            self.current = self.current.saturating_sub(amount);
        } else if self.start == window.plus(self.period) {
            self.previous = self.previous.saturating_sub(amount);
        }
    }

    /// The pair of windows as `now` sees it.
    fn rolled(&self, now: Timestamp) -> Self {
        let end = self.start.plus(self.period);
        if now < end {
            return *self;
        }
        let previous = if now < end.plus(self.period) { self.current } else { 0 };
        Self { start: now.floor_to(self.period), current: 0, previous, period: self.period }
    }

    /// The part of the last window still in view, rounded up.
    fn weight(&self, now: Timestamp) -> u64 {
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

/// When the window of an estimate over `period` ends that `now` is in.
pub(crate) fn window_end(period: Span, now: Timestamp) -> Timestamp {
    now.floor_to(period).plus(period)
}

impl Estimate {
    /// `quota` per `period`.
    ///
    /// # Errors
    /// Where a figure is out of range.
    pub fn new(quota: u64, period: Span) -> Result<Self, LimitError> {
        check_figures(quota, period)?;
        Ok(Self { quota, period })
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

    /// The share of the limit, in percent rounded down, that somebody gets who always asks. The weight of the last window is
    /// rounded up, so it is at least 1 until that window has left: one less than the limit fits into each. A limit of 1
    /// fits into every second window.
    #[must_use]
    pub const fn share(&self) -> u64 {
        let each_two = if self.quota == 1 { 1 } else { self.quota.saturating_sub(1).saturating_mul(2) };
        match each_two.saturating_mul(50).checked_div(self.quota) {
            Some(share) => share,
            None => 0,
        }
    }

    pub(super) fn fresh(&self, now: Timestamp) -> EstimateState {
        EstimateState { start: now.floor_to(self.period), current: 0, previous: 0, period: self.period }
    }

    pub(crate) fn bring(&self, state: &mut EstimateState, now: Timestamp) -> bool {
        let before = *state;
        if state.period != self.period {
            let used = state.rolled(now).used(now);
            *state = EstimateState { current: used, ..self.fresh(now) };
        }
        // As for a fixed window: after a step back the pair stays, and never ends sooner.
        state.start = state.start.min(now.floor_to(self.period).plus(self.period));
        *state != before
    }

    pub(crate) fn look(&self, state: &EstimateState, cost: u64, now: Timestamp) -> Look {
        let windows = state.rolled(now);
        let used = windows.used(now);
        let remaining = self.quota.saturating_sub(used);
        let fits = cost <= remaining && used <= self.quota;
        let mut charged = *state;
        self.charge(&mut charged, cost, now);
        Look {
            allowed: fits,
            remaining,
            ready_at: if fits { now } else { self.ready_at(&windows, cost) },
            reset_if_charged: self.more_at(&charged, now),
            reset_if_not: self.more_at(&windows, now),
        }
    }

    /// When one more fits than fits now; now, if nothing is counted. The end of the window is no such moment: what was counted
    /// in it is then in view as a whole.
    fn more_at(&self, windows: &EstimateState, now: Timestamp) -> Timestamp {
        match windows.used(now) {
            0 => now,
            used => self.ready_at(windows, self.quota.saturating_sub(used).saturating_add(1)),
        }
    }

    /// When the window that `now` is in ends.
    #[must_use]
    pub fn window_end(&self, now: Timestamp) -> Timestamp {
        window_end(self.period, now)
    }

    /// When enough of the counted windows has slid out of view: in this window, else in the next.
    fn ready_at(&self, windows: &EstimateState, cost: u64) -> Timestamp {
        let Some(free) = self.quota.checked_sub(cost) else { return Timestamp::MAX };
        let end = windows.start.plus(self.period);
        match free.checked_sub(windows.current) {
            Some(free) => windows.start.plus(self.slid_out(windows.previous, free)),
            None => end.plus(self.slid_out(windows.current, free)),
        }
    }

    /// How far into a window at most `free` of the `previous` one's count is still in view.
    fn slid_out(&self, previous: u64, free: u64) -> Span {
        let period = self.period.micros();
        let in_view = u128::from(free)
            .saturating_mul(u128::from(period))
            .checked_div(u128::from(previous))
            .map_or(period, |left| u64::try_from(left).unwrap_or(u64::MAX));
        Span::from_micros(period.saturating_sub(in_view))
    }

    pub(crate) fn charge(&self, state: &mut EstimateState, cost: u64, now: Timestamp) -> Mark {
        let mut windows = state.rolled(now);
        let room = self.quota.saturating_mul(2).saturating_sub(windows.used(now));
        let amount = cost.min(room);
        windows.current = windows.current.saturating_add(amount);
        *state = windows;
        Mark::new(windows.start, amount)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Somebody who asks for one as soon as it fits, for a hundred windows after the first.
    ///
    /// Woken by: `self.quota` in place of `self.quota.saturating_sub(1)` in `share`; and `div_ceil` as a division in `weight`.
    #[test]
    fn who_always_asks_gets_the_share_that_is_told() {
        for quota in (1..=12).chain([100]) {
            let limit = Estimate::new(quota, Span::MINUTE).unwrap();
            let start = Timestamp::from_secs(1_767_225_600);
            let (mut state, mut now, mut admitted) = (limit.fresh(start), start, 0u64);
            let (first, end) = (start.plus(Span::MINUTE), start.plus(Span::from_secs(60 * 101)));
            loop {
                now = now.max(limit.look(&state, 1, now).ready_at);
                if now >= end {
                    break;
                }
                limit.charge(&mut state, 1, now);
                admitted += u64::from(now >= first);
            }
            assert_eq!(admitted / quota, limit.share(), "{quota} a minute");
        }
    }
}
