//! Extremes: no figures, times or costs panic or overflow.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::cases;
use super::world::{Shape, World, max_quota};
use crate::balance::Balance;
use crate::codec::Format;
use crate::limit::{Algorithm, Anchor, Limit, MAX_BUCKETS, MAX_CONCURRENCY, MAX_LOG, MAX_PERIOD, MAX_QUOTA};
use crate::time::{Span, Timestamp};

proptest! {
    #![proptest_config(cases(600))]

    /// No figures, times or costs, however extreme, and in whatever order, panic or overflow.
    ///
    /// Woken by: replacing `saturating_add` with `+` in `Timestamp::plus`.
    #[test]
    fn nothing_panics(
        algorithm in select(&Algorithm::ALL[..]),
        clock: bool,
        figures in vec((extremes(), extremes(), extremes(), extremes()), 2),
        acts in vec((extremes(), extremes(), 0..2usize, any::<Index>()), 1..12),
    ) {
        let anchor = if clock { Anchor::Clock } else { Anchor::First };
        let limits: Vec<Limit> = figures.iter().map(|figures| extreme(algorithm, anchor, *figures)).collect();
        let mut world = World::new(limits[0], Timestamp::EPOCH);
        for (now, cost, limit, which) in acts {
            (world.limit, world.now) = (limits[limit], Timestamp::from_micros(now));
            world.check(cost);
            world.record(cost);
            world.look(cost);
            world.give_back(which, cost);
            prop_assert!(world.balance.silent_from() <= Timestamp::MAX);
            prop_assert_eq!(Balance::from_bytes(&world.balance.to_bytes(Format::PRESENT)), Ok(world.balance.clone()));
        }
    }
}

/// Numbers at and around the ends of every range.
fn extremes() -> impl Strategy<Value = u64> {
    let ends =
        [0, 1, 2, MAX_LOG.into(), MAX_CONCURRENCY.into(), MAX_QUOTA, MAX_PERIOD.micros(), u64::MAX / 2, u64::MAX];
    prop_oneof![
        (select(ends.to_vec()), 0..3u64).prop_map(|(end, off)| end.saturating_add(off).saturating_sub(1)),
        any::<u64>(),
        (0..64u32).prop_map(|shift| 1 << shift),
    ]
}

/// A limit with figures as extreme as its algorithm can have.
fn extreme(algorithm: Algorithm, anchor: Anchor, figures: (u64, u64, u64, u64)) -> Limit {
    let quota = figures.0.clamp(1, max_quota(algorithm));
    let period = Span::from_micros(figures.1.clamp(1, MAX_PERIOD.micros()));
    let buckets = u32::try_from(figures.3.clamp(1, MAX_BUCKETS.into())).unwrap();
    let shape = Shape { algorithm, anchor, quota, period, burst: figures.2.clamp(1, MAX_QUOTA), buckets };
    // A burst that would take too long to fill is no limit; one of L never does.
    shape.try_limit().unwrap_or_else(|_| Shape { burst: quota, ..shape }.limit())
}
