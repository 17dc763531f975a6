//! The bound: what is admitted in any window of the period.

use proptest::collection::vec;
use proptest::prelude::*;

use super::cases;
use super::world::{Gap, World, close, greedy, no_more_than, shapes, starts, traces};

proptest! {
    #![proptest_config(cases(600))]

    /// In any true window [t, t + W) the net admitted cost is at most `Limit::bound`, whatever mix of costs,
    /// refunds and reservations came; for concurrency, at most L are in flight at once.
    ///
    /// Woken by: replacing `now.floor_to(grain).plus(grain)` with `now.floor_to(grain)` in `SlidingWindow::at`.
    #[test]
    fn the_bound_holds(shape in shapes(), start in starts(), trace in traces(greedy())) {
        let mut world = World::new(shape.limit(), start);
        for (gap, act) in trace {
            world.wait(gap);
            world.act(act);
            no_more_than(world.limit.bound(), &world, shape.period)?;
        }
    }

    /// Across a change of figures the bound that the algorithm's definition says (`bound_across`) holds for windows of the
    /// shorter period.
    ///
    /// Woken by: replacing `entries.drain(..gone)` with `entries.clear()` in `Sliding::bring` (`drop_left`).
    #[test]
    fn the_bound_holds_across_a_change(
        shapes in (shapes(), shapes()),
        start in starts(),
        traces in (traces(greedy()), traces(greedy())),
    ) {
        let (old, new) = (shapes.0, shapes.0.with_figures_of(shapes.1));
        let at_most = old.limit().bound_across(&new.limit());
        let mut world = World::play(old, start, &traces.0);
        world.limit = new.limit();
        for (gap, act) in traces.1 {
            world.wait(gap);
            // A mark is given back under the figures it was made under; see `a_refund_never_mints`.
            if world.asked(act).is_some() {
                world.act(act);
            }
            no_more_than(at_most, &world, old.period.min(new.period))?;
        }
    }
}

proptest! {
    // It breaks at exact instants only, which take more cases to meet.
    #![proptest_config(cases(3_000))]

    /// The bound holds in true time while the clock keeps stepping back. Only charges made since the last step
    /// are refunded: the state that an older receipt names may have been moved, and a new one taken its name.
    ///
    /// Woken by: replacing `self.start_of(now).plus(self.period)` with `self.start_of(now)` in
    /// `FixedWindow::bring`.
    #[test]
    fn the_bound_holds_while_the_clock_steps_back(
        shape in shapes(),
        start in starts(),
        trace in vec((close(), greedy(), proptest::option::weighted(0.3, close())), 1..40),
    ) {
        let mut world = World::new(shape.limit(), start);
        world.wait(Gap::Edge { cut: 1, off: 0 });
        for (gap, act, back) in trace {
            world.wait(gap);
            if let Some(back) = back {
                world.step_back(back.after(world.now, &world.limit));
            }
            world.act(act);
            no_more_than(world.limit.bound(), &world, shape.period)?;
        }
    }
}
