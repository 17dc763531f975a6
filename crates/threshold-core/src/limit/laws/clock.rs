//! The clock: steps back never grant, and old balances end.

use proptest::prelude::*;

use super::cases;
use super::world::{World, gaps, indebted, shapes, shares, starts, traces};
use crate::time::Span;

proptest! {
    #![proptest_config(cases(600))]

    /// A balance never has more room at an earlier reading of the clock than at a later one.
    ///
    /// Woken by: replacing `cost: late` with `cost: 0` in `Sliding::bring`.
    #[test]
    fn an_earlier_clock_never_grants(
        shape in shapes(),
        start in starts(),
        trace in traces(indebted()),
        back in gaps(),
        share in shares(),
    ) {
        let world = World::play(shape, start, &trace);
        let cost = share.of(world.limit.capacity());
        let (later, back) = (world.look(cost), back.after(world.now, &world.limit));
        let earlier = world.look_at(cost, world.now.minus(back));
        prop_assert!(earlier.available <= later.available);
        prop_assert!(later.allowed || !earlier.allowed);
    }

    /// However far the clock steps back, an idle key is whole again within a time that does not depend on the
    /// step: the `longest` of the algorithm's definition.
    ///
    /// Woken by: removing the `state.start.min(…)` of `SlidingEstimate::bring`.
    #[test]
    fn no_key_is_stuck_after_a_step_back(
        shape in shapes(),
        start in starts(),
        trace in traces(indebted()),
        back in 0..=1_750_000_000_000_000u64,
    ) {
        let mut world = World::play(shape, start, &trace);
        world.step_back(Span::from_micros(back));
        world.balance.bring(&world.limit, world.now);
        let whole_at = world.now.plus(world.limit.longest());
        prop_assert!(world.balance.silent_from() <= whole_at);
        let capacity = world.limit.capacity();
        prop_assert!(world.look_at(capacity, whole_at).allowed);
    }

    /// From `silent_from` on a balance answers as none does, so that dropping it then changes nothing.
    ///
    /// Woken by: replacing `self.end().plus(self.period)` with `self.end()` in `TwoWindows::silent_from`.
    #[test]
    fn a_silent_balance_says_nothing(
        shape in shapes(),
        start in starts(),
        trace in traces(indebted()),
        gap in proptest::option::of(gaps()),
        share in shares(),
    ) {
        let mut world = World::play(shape, start, &trace);
        world.now = world.now.max(world.balance.silent_from());
        if let Some(gap) = gap {
            world.wait(gap);
        }
        let cost = share.of(world.limit.capacity());
        prop_assert_eq!(world.look(cost), World::new(world.limit, world.now).look(cost));
    }
}
