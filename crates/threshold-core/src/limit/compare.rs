//! Which of two limits is used up first; a limit several times over, and one node's share of it.

use super::algorithm::{Figures, periods_in};
use super::{Limit, LimitError};
use crate::time::Span;

impl Limit {
    /// Whether this limit is used up before `other` can be, if both are charged with the same requests. `same_keys` says
    /// whether both count by the same keys.
    ///
    /// That `other` then has no effect is what `lint` says about it, so this errs on the side of `false`.
    pub(crate) fn fills_before(&self, other: &Self, same_keys: bool) -> bool {
        self.fills_before_own(other, same_keys).unwrap_or_else(|| {
            // Two equal limits are used up together, and then neither of them is the idle one.
            let (most, capacity) = (self.most_while_counted(other), other.capacity());
            most < capacity || (most == capacity && self.period() != other.period())
        })
    }

    /// The most that is admitted while a charge counts against `other`.
    fn most_while_counted(&self, other: &Self) -> u64 {
        let (own, others) = (self.period(), other.period());
        let most = self.most_in(self.counted_window(other));
        if !other.counts_clock_windows() {
            return most;
        }
        // Windows of the clock whose lengths divide each other begin together: an hour of the clock is 60 whole minutes of it.
        let in_clock_windows = self.most_in_clock_window();
        let (own_micros, others_micros) = (own.micros().max(1), others.micros().max(1));
        if own_micros.is_multiple_of(others_micros) {
            most.min(in_clock_windows)
        } else if others_micros.is_multiple_of(own_micros) {
            most.min(in_clock_windows.saturating_mul(periods_in(others, own)))
        } else {
            most
        }
    }

    /// The time for which charges count against `other`: its period, or longer where it counts in coarser steps than this
    /// limit.
    fn counted_window(&self, other: &Self) -> Span {
        let product = |one: Span, two: Span| u128::from(one.micros()).saturating_mul(u128::from(two.micros()));
        // The ratio of counted time to period, as cross products: how coarse a limit counts, whatever its period is.
        let is_coarser = product(other.counted_for(), self.period()) > product(self.counted_for(), other.period());
        // Steps that do not begin together: a charge may leave this limit before it leaves a finer one.
        let step = |limit: &Self| limit.counted_for().micros().saturating_sub(limit.period().micros());
        let divides = |one: u64, two: u64| one.checked_rem(two).is_none_or(|rest| rest == 0);
        let is_apart = !divides(step(self), step(other)) && !divides(step(other), step(self));
        // A bucket that is smaller than its limit refills sooner than its period.
        if is_coarser || is_apart { other.counted_for() } else { other.period() }
    }

    /// `factor` times as much in the same period. Where that is more than the algorithm takes, it is the algorithm that
    /// [serves](crate::limit::Algorithm::for_quota) such a quota.
    ///
    /// # Errors
    /// Where no limit is that large.
    pub fn times(&self, factor: u64) -> Result<Self, LimitError> {
        let Some((algorithm, figures)) = self.algorithm().zip(self.figures()) else { return Ok(*self) };
        let figures = figures.times(factor);
        algorithm.for_quota(figures.quota).make(&figures)
    }

    /// Returns one node's share of this limit while `nodes` nodes count apart: L divided by their number, rounded down, and one
    /// more for each of the first L mod n nodes. The shares of all places together are the limit, never more. A burst is
    /// divided the same way. A share of nothing is [`never`](Self::never).
    #[must_use]
    pub fn share(&self, place: u64, nodes: u64) -> Self {
        let Some((algorithm, figures)) = self.algorithm().zip(self.figures()) else { return *self };
        let share = |amount: u64| {
            let (whole, rest) = (amount.checked_div(nodes).unwrap_or(0), amount.checked_rem(nodes).unwrap_or(0));
            whole.saturating_add(u64::from(place < rest))
        };
        let figures = Figures { quota: share(figures.quota), burst: figures.burst.map(share), ..figures };
        // Figures that the algorithm refuses, such as 0, let nothing through: in doubt a share is too small.
        algorithm.make(&figures).unwrap_or(Self::NEVER)
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
    use crate::limit::LimitOptions;
    use crate::time::Timestamp;

    fn any_limit() -> impl Strategy<Value = Limit> {
        let algorithms = ["token-bucket", "fixed-window", "sliding-window", "sliding-estimate", "sliding-log"];
        (select(algorithms.to_vec()), 1..12_u64, select(vec![1_u64, 2, 3, 4, 6, 12]), 1..20_u64, 1..4_u32).prop_map(
            |(algorithm, quota, secs, burst, buckets)| {
                let algorithm = crate::limit::Algorithm::named(algorithm).unwrap();
                let options = LimitOptions::new().algorithm(algorithm);
                let (text, options) = match algorithm.name() {
                    "token-bucket" => (format!("{quota}/{secs}s burst {burst}"), options),
                    "sliding-window" => (format!("{quota}/{secs}s"), options.buckets(buckets)),
                    _ => (format!("{quota}/{secs}s"), options),
                };
                options.parse(&text).unwrap()
            },
        )
    }

    proptest! {
        /// Nodes that rounded their shares up admitted twice the limit together.
        #[test]
        fn the_shares_of_all_nodes_are_the_limit(limit in any_limit(), nodes in 1..30_u64, left in 0..30_u64) {
            let shares = |nodes: u64| (0..nodes).map(move |place| limit.share(place, nodes));
            prop_assert_eq!(shares(nodes).map(|share| share.capacity()).sum::<u64>() <= limit.capacity(), true);
            prop_assert!(shares(nodes).map(|share| share.quota()).sum::<u64>() <= limit.quota());
            // Only a token bucket loses some of it: where the rate or the burst is 0, both are.
            if !limit.refills_smoothly() {
                prop_assert_eq!(shares(nodes).map(|share| share.quota()).sum::<u64>(), limit.quota());
            }
            // A node that still counts a node that has left takes no more than it may.
            let place = left.checked_rem(nodes).unwrap_or(0);
            let more = |number: u64| number.saturating_add(1);
            let (before, after) = (limit.share(more(place), more(nodes)), limit.share(place, nodes));
            prop_assert!(before.quota() <= after.quota() && before.capacity() <= after.capacity());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        /// A limit that lint calls idle never denies a request that the other one admits. The other one may count more
        /// requests. Seen to fail with an estimate whose charges count for one period.
        #[test]
        fn a_limit_that_fills_later_never_denies_alone(
            one in any_limit(),
            other in any_limit(),
            steps in vec((0..2_500_000_u64, 1..3_u64, any::<bool>()), 1..80),
        ) {
            // About one pair in four.
            if !one.fills_before(&other, true) {
                return Ok(());
            }
            let (mut first, mut second) = (Balance::default(), Balance::default());
            let mut now = Timestamp::from_secs(1_431_856_800);
            for (wait, cost, both) in steps {
                // Three in five come at once.
                now = now.plus(Span::from_micros(wait.saturating_sub(1_500_000)));
                if cost > one.capacity() || !first.look(&one, cost, now).0.allowed {
                    continue;
                }
                if both {
                    prop_assert!(second.look(&other, cost, now).0.allowed, "{one} before {other} at {now:?}");
                    second.charge(&other, cost, now, TraceId::from_u128(1));
                }
                first.charge(&one, cost, now, TraceId::from_u128(1));
            }
        }
    }
}
