//! A token bucket whose whole state is one number, for tables that keep millions of them.
//!
//! The moment at which the bucket is full again is counted in ticks: as many to a microsecond as `W / L` has parts. So a
//! state has no fraction beside it, and one compare-and-swap changes it. The answers are those of [`TokenBucket`], to the
//! last figure.

use super::TokenBucket;
use crate::limit::Look;
use crate::time::{Span, Timestamp};

/// The last moment that is counted in ticks, in the year 2255. Bits for a later one would be missed elsewhere.
const HORIZON: Timestamp = Timestamp::from_micros(1 << 53);
/// A clock beyond this, in the year 2112, is wrong today, and could reach the horizon while the process runs.
const LATEST_START: Timestamp = Timestamp::from_micros(1 << 52);

/// When a bucket is full again, in ticks since the Unix epoch. 0 is a bucket that was never charged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticks(pub u64);

/// A rate whose states are [`Ticks`].
///
/// It is made by [`Limit::packed_rate`](crate::Limit::packed_rate). Beyond the year 2255 time stands still for it: nothing
/// refills, so that nothing is granted that should not be.
#[derive(Debug, Clone, Copy)]
pub struct PackedRate {
    rate: TokenBucket,
    /// The ticks that a burst takes to refill.
    capacity: u64,
    /// The furthest ahead of now a state may lie.
    deepest: u64,
    /// No state is beyond this.
    last: Ticks,
}

impl PackedRate {
    /// `None` where a state would not fit: a denominator beyond a thousand or so, a bucket that takes centuries to fill, or
    /// a clock that stands near the horizon.
    pub(super) fn new(rate: TokenBucket, now: Timestamp) -> Option<Self> {
        let capacity = rate.burst.checked_mul(rate.interval.step)?;
        // As `TokenBucket::furthest`, for a state in the figures of this limit.
        let deepest = rate.burst.max(rate.quota).checked_mul(rate.interval.step)?.checked_mul(2)?;
        // The largest number that `next` and `start` ever compute. As it fits 64 bits, they need no checks of their
        // own.
        let last = HORIZON.micros().checked_mul(rate.interval.parts)?.checked_add(deepest)?;
        (now <= LATEST_START).then_some(Self { rate, capacity, deepest, last: Ticks(last) })
    }

    /// No state is beyond this.
    #[must_use]
    pub const fn last(&self) -> Ticks {
        self.last
    }

    /// The state after `cost` was asked for: charged if it fits. Returns `state` itself if there is nothing to save.
    #[must_use]
    #[inline(always)]
    pub fn next(&self, state: Ticks, cost: u64, now: Timestamp) -> Ticks {
        let (start, backlog) = self.bring(state, now);
        match self.after(backlog, cost) {
            // A cost of 0 must not write. For a full bucket `start` differs from its state, so each look would be a
            // change.
            Some(after) if after <= self.capacity && cost > 0 => Ticks(start.wrapping_add(after)),
            // Brought back, if it was written by a clock that has since stepped back.
            _ => state.min(Ticks(start.wrapping_add(self.deepest))),
        }
    }

    /// Whether `cost` fits in this state, and when.
    #[must_use]
    #[inline(always)]
    pub fn look(&self, state: Ticks, cost: u64, now: Timestamp) -> Look {
        let (_, backlog) = self.bring(state, now);
        let after = self.after(backlog, cost);
        let fits = after.is_some_and(|after| after <= self.capacity);
        Look {
            allowed: fits,
            available: self.available(backlog),
            // Beyond the horizon time stands still, in answers too.
            ready_at: match after {
                _ if fits => now.min(HORIZON),
                Some(after) if cost <= self.rate.burst => self.later(now, after.saturating_sub(self.capacity)),
                _ => Timestamp::MAX,
            },
            reset_if_charged: after.map_or_else(|| self.much_later(now, backlog, cost), |after| self.later(now, after)),
            reset_if_not: self.later(now, backlog),
        }
    }

    /// Whether the bucket is full, which is the same as no state.
    #[must_use]
    #[inline]
    pub fn is_silent(&self, state: Ticks, now: Timestamp) -> bool {
        state <= Ticks(self.start(now))
    }

    /// Whether more than half of the burst is used. A table that is full evicts no such state: a client could reset its own
    /// limit by a flood of new keys.
    #[must_use]
    pub fn is_protected(&self, state: Ticks, now: Timestamp) -> bool {
        let (_, backlog) = self.bring(state, now);
        self.available(backlog).saturating_mul(2) < self.rate.burst
    }

    /// Now in ticks, and how far ahead of it the state lies: at most as far as a clock that stepped back may leave it.
    #[inline]
    fn bring(&self, state: Ticks, now: Timestamp) -> (u64, u64) {
        let start = self.start(now);
        (start, state.0.saturating_sub(start).min(self.deepest))
    }

    #[inline]
    fn start(&self, now: Timestamp) -> u64 {
        // At most `last`, whose product did not overflow in `new`.
        now.min(HORIZON).micros().wrapping_mul(self.rate.interval.parts)
    }

    /// How far ahead the state would lie with this cost.
    #[inline]
    fn after(&self, backlog: u64, cost: u64) -> Option<u64> {
        cost.checked_mul(self.rate.interval.step)?.checked_add(backlog)
    }

    #[inline]
    fn available(&self, backlog: u64) -> u64 {
        self.capacity.saturating_sub(backlog).checked_div(self.rate.interval.step).unwrap_or(0)
    }

    /// So many ticks after now, rounded up.
    #[inline]
    fn later(&self, now: Timestamp, ticks: u64) -> Timestamp {
        let parts = self.rate.interval.parts;
        // Mostly there is one to a microsecond, and a division takes longer than all the rest.
        let micros = if parts == 1 { ticks } else { ticks.div_ceil(parts.max(1)) };
        now.min(HORIZON).plus(Span::from_micros(micros))
    }

    /// The same after a cost whose ticks do not fit 64 bits.
    #[cold]
    fn much_later(&self, now: Timestamp, backlog: u64, cost: u64) -> Timestamp {
        let ticks = self.rate.interval.cost(cost).saturating_add(u128::from(backlog));
        let micros = ticks.div_ceil(u128::from(self.rate.interval.parts));
        now.min(HORIZON).plus(Span::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use crate::balance::Balance;
    use crate::key::TraceId;
    use crate::limit::algorithm::{Figures, LimitAlgorithm as _};
    use crate::limit::{Limit, LimitError};

    /// Today, the epoch, and the last moment at which a packed rate begins.
    const STARTS: [u64; 3] = [1_767_225_600_000_000, 0, 1 << 52];
    /// L and W in microseconds: whole, with few parts, with many, and as small and as large as they come.
    const FIGURES: [(u64, u64); 10] = [
        (100, 60_000_000),
        (7, 60_000_000),
        (3, 1_000_000),
        (997, 1_000_000),
        (1_500_000, 1_000_000),
        (1, 1),
        (1, 3_153_600_000_000_000),
        (999_999_999_999_999, 999_999_999_999_999),
        (13, 1_009),
        (1_000, 86_400_000_000),
    ];

    fn bucket(quota: u64, period: u64, burst: u64) -> Result<TokenBucket, LimitError> {
        TokenBucket::new(&Figures { burst: Some(burst), ..Figures::new(quota, Span::from_micros(period)) })
    }

    fn packed() -> impl Strategy<Value = (TokenBucket, u64)> {
        let bursts = select(&[1, 2, 3, 7, 1_000, 250_000_000, 999_999_999_999_999][..]);
        (select(&FIGURES[..]), bursts, select(&STARTS[..]))
            .prop_map(|((quota, period), burst, start)| (bucket(quota, period, burst), start))
            .prop_filter_map("no such rate, or not in ticks", |(rate, start)| {
                let rate = rate.ok()?;
                PackedRate::new(rate, Timestamp::from_micros(start)).map(|_| (rate, start))
            })
    }

    /// A cost, and how the clock moves before it is asked for.
    fn steps() -> impl Strategy<Value = Vec<(u64, bool, u64)>> {
        let cost = prop_oneof![8 => 0..4u64, 2 => 0..1_000u64, 1 => any::<u64>(), 1 => Just(250_000_000)];
        let span = prop_oneof![3 => 0..3u64, 3 => 0..100_000_000u64, 1 => 0..1u64 << 50, 1 => any::<u64>()];
        vec((cost, any::<bool>(), span), 1..40)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2_048) })]

        /// Whatever is asked for, and however the clock moves, forwards and backwards: the answers are those of a balance
        /// under the limit itself, and so is whether anything is to be saved, says anything, or must be kept.
        ///
        /// Woken by: leaving out `min(self.deepest)` in `bring`, or the `min` in `next`; `div_ceil` as `/` in `later`; `<`
        /// for `<=` in `next`, `look` or `is_silent`; and `cost > 0` left out.
        #[test]
        fn the_answers_are_those_of_the_rate((rate, start) in packed(), steps in steps()) {
            let packed = PackedRate::new(rate, Timestamp::from_micros(start)).unwrap();
            let (mut balance, mut state, mut now) = (Balance::default(), Ticks::default(), start);
            for (cost, back, span) in steps {
                now = if back { now.saturating_sub(span) } else { now.saturating_add(span) }.min(HORIZON.micros());
                let moment = Timestamp::from_micros(now);
                prop_assert_eq!(packed.is_silent(state, moment), balance.silent_from() <= moment);
                prop_assert_eq!(packed.is_protected(state, moment), balance.is_protected(&Limit::from(rate), moment));
                // Its keys have one limit, so a level from the future is never that of another.
                let brought = balance.bring(&Limit::from(rate), moment);
                let checked = balance.check(&Limit::from(rate), cost, moment, TraceId::default());
                let next = packed.next(state, cost, moment);
                prop_assert_eq!(packed.look(state, cost, moment), checked.look);
                prop_assert_eq!(next != state, brought || checked.changed);
                prop_assert!(next <= packed.last());
                state = next;
            }
        }
    }

    /// Woken by: `now` for `now.min(HORIZON)` in `start`.
    #[test]
    fn beyond_the_horizon_nothing_refills() {
        let rate = bucket(7, 60_000_000, 3).unwrap();
        let packed = PackedRate::new(rate, Timestamp::EPOCH).unwrap();
        let mut state = Ticks::default();
        for (hour, fits) in [(0, true), (1, true), (2, true), (3, false), (u64::MAX, false)] {
            let now = HORIZON.plus(Span::from_micros(Span::HOUR.micros().saturating_mul(hour)));
            assert_eq!(packed.look(state, 1, now).allowed, fits, "after {hour} h");
            state = packed.next(state, 1, now);
        }
    }

    #[test]
    fn a_rate_whose_states_do_not_fit_is_refused() {
        let check = |quota, period, burst, start, expect| {
            let rate = bucket(quota, period, burst).unwrap();
            assert_eq!(PackedRate::new(rate, Timestamp::from_micros(start)).is_some(), expect, "{rate:?} from {start}");
        };
        check(100, 60_000_000, 100, 0, true);
        check(1, 20_000_000, 250_000_000, 1 << 52, true);
        // A thousand parts; then twice as many.
        check(1_009, 1_000_000, 1, 0, true);
        check(2_053, 1_000_000, 1, 0, false);
        // A bucket that takes 950 years to fill: in microseconds, then in a thousandth of them.
        check(1, 1_000_000, 30_000_000_000, 0, true);
        check(1_009, 1_000_000, 30_000_000_000_000, 0, false);
        // A clock that stands in the year 2113.
        check(100, 60_000_000, 100, (1 << 52) + 1, false);
    }
}
