//! A balance of constant size in two numbers, and what can be done with it as it lies in a table.

use super::{Balance, State};
use crate::limit::{Estimate, EstimateState, Limit, Look, Mark, Rate, RateState, Window, WindowState};
use crate::time::Timestamp;

/// A balance of constant size in two numbers, without the figures of its limit: what a table keeps in a slot of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Small {
    /// When a bucket is full again or a window begins, or both counts of an estimate.
    pub large: u64,
    /// A bucket's fraction, a window's count, or the number of an estimate's window.
    pub figure: u64,
}

/// An algorithm whose state is two numbers beside the figures of its limit.
trait Compact {
    type State;

    fn unpack(&self, small: Small) -> Self::State;
    /// `None` if the numbers are too large, or the state is in other figures.
    fn pack(&self, state: &Self::State) -> Option<Small>;
    fn bring(&self, state: &mut Self::State, now: Timestamp) -> bool;
    fn look(&self, state: &Self::State, cost: u64, now: Timestamp) -> Look;
    fn charge(&self, state: &mut Self::State, cost: u64, now: Timestamp) -> Mark;
}

/// What [`Compact`] asks of an algorithm that has it all already.
macro_rules! by_its_own_methods {
    ($state:ty) => {
        type State = $state;

        #[inline(always)]
        fn bring(&self, state: &mut $state, now: Timestamp) -> bool {
            self.bring(state, now)
        }

        #[inline(always)]
        fn look(&self, state: &$state, cost: u64, now: Timestamp) -> Look {
            self.look(state, cost, now)
        }

        #[inline(always)]
        fn charge(&self, state: &mut $state, cost: u64, now: Timestamp) -> Mark {
            self.charge(state, cost, now)
        }
    };
}

impl Compact for Rate {
    by_its_own_methods!(RateState);

    #[inline(always)]
    fn unpack(&self, Small { large, figure }: Small) -> RateState {
        let full_at = Timestamp::from_micros(large);
        RateState { full_at, part: figure, quota: self.quota(), period: self.period() }
    }

    #[inline(always)]
    fn pack(&self, state: &RateState) -> Option<Small> {
        state.is_in_terms_of(self).then(|| Small { large: state.full_at.micros(), figure: state.part })
    }
}

impl Compact for Window {
    by_its_own_methods!(WindowState);

    #[inline(always)]
    fn unpack(&self, Small { large, figure }: Small) -> WindowState {
        WindowState { start: Timestamp::from_micros(large), used: figure, period: self.period() }
    }

    #[inline(always)]
    fn pack(&self, state: &WindowState) -> Option<Small> {
        (state.period == self.period()).then(|| Small { large: state.start.micros(), figure: state.used })
    }
}

impl Compact for Estimate {
    by_its_own_methods!(EstimateState);

    #[inline(always)]
    fn unpack(&self, Small { large, figure }: Small) -> EstimateState {
        EstimateState {
            start: Timestamp::from_micros(figure.saturating_mul(self.period().micros())),
            current: large >> 32,
            previous: large & u64::from(u32::MAX),
            period: self.period(),
        }
    }

    #[inline(always)]
    fn pack(&self, state: &EstimateState) -> Option<Small> {
        if state.period != self.period() {
            return None;
        }
        let (current, previous) = (u32::try_from(state.current).ok()?, u32::try_from(state.previous).ok()?);
        let window = state.start.micros().checked_div(state.period.micros())?;
        Some(Small { large: u64::from(current) << 32 | u64::from(previous), figure: window })
    }
}

impl Small {
    /// [`look`](Self::look) and [`charge`](Self::charge) in one, for buckets that have no fraction and owe nothing, which
    /// most are. The charge counts only if it fits.
    #[must_use]
    #[inline(always)]
    pub fn glance(self, limit: &Limit, cost: u64, now: Timestamp) -> Option<(Look, Self, Mark)> {
        let Limit::Rate(rate) = limit else { return None };
        let look = rate.look_whole(Timestamp::from_micros(self.large), cost, now)?;
        // A bucket's state is when it is full again.
        let charged = Self { large: look.reset_if_charged.micros(), figure: 0 };
        Some((look, charged, Mark::new(look.reset_if_charged, cost)))
    }

    /// As [`Balance::look`] on a balance that lies in a table under this very limit. `None` where looking would change
    /// it, or it is kept whole.
    #[must_use]
    #[inline(never)]
    pub fn look(self, limit: &Limit, cost: u64, now: Timestamp) -> Option<Look> {
        match limit {
            Limit::Rate(rate) => look(rate, self, cost, now),
            Limit::Window(window) => look(window, self, cost, now),
            Limit::Estimate(estimate) => look(estimate, self, cost, now),
            Limit::Log(_) | Limit::Concurrency(_) | Limit::Never => None,
        }
    }

    /// As [`Balance::charge`], after [`look`](Self::look) at the same moment. `None` where what comes of it must be kept
    /// whole.
    #[must_use]
    #[inline(never)]
    pub fn charge(self, limit: &Limit, cost: u64, now: Timestamp) -> Option<(Self, Mark)> {
        match limit {
            Limit::Rate(rate) => charge(rate, self, cost, now),
            Limit::Window(window) => charge(window, self, cost, now),
            Limit::Estimate(estimate) => charge(estimate, self, cost, now),
            Limit::Log(_) | Limit::Concurrency(_) | Limit::Never => None,
        }
    }
}

fn look<A: Compact>(algorithm: &A, small: Small, cost: u64, now: Timestamp) -> Option<Look> {
    let mut state = algorithm.unpack(small);
    if algorithm.bring(&mut state, now) { None } else { Some(algorithm.look(&state, cost, now)) }
}

fn charge<A: Compact>(algorithm: &A, small: Small, cost: u64, now: Timestamp) -> Option<(Small, Mark)> {
    let mut state = algorithm.unpack(small);
    let mark = algorithm.charge(&mut state, cost, now);
    Some((algorithm.pack(&state)?, mark))
}

impl Balance {
    /// This balance without the figures of its limit. `None` if it is not of constant size, is in other figures, or is
    /// blocked: such a balance is kept whole.
    #[must_use]
    #[inline]
    pub fn to_small(&self, limit: &Limit) -> Option<Small> {
        if self.blocked_until > Timestamp::EPOCH {
            return None;
        }
        match (&self.state, limit) {
            (State::Rate(state), Limit::Rate(rate)) => rate.pack(state),
            (State::Window(state), Limit::Window(window)) => window.pack(state),
            (State::Estimate(state), Limit::Estimate(estimate)) => estimate.pack(state),
            _ => None,
        }
    }

    /// The balance that [`to_small`](Self::to_small) was given, under the same limit.
    #[must_use]
    #[inline]
    pub fn from_small(small: Small, limit: &Limit) -> Self {
        let state = match limit {
            Limit::Rate(rate) => State::Rate(rate.unpack(small)),
            Limit::Window(window) => State::Window(window.unpack(small)),
            Limit::Estimate(estimate) => State::Estimate(estimate.unpack(small)),
            Limit::Log(_) | Limit::Concurrency(_) | Limit::Never => State::Empty,
        };
        Self { state, blocked_until: Timestamp::EPOCH }
    }
}
