//! Bytes: a balance is its bytes, and any bytes are one balance or none.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::cases;
use super::world::{GUEST, Gap, World, indebted, shapes, starts, traces};
use crate::balance::Balance;
use crate::codec::{BytesError, Format};
use crate::limit::{
    Algorithm, Entries, Entry, Hold, Holds, Limit, LimitOptions, MAX_BUCKETS, MAX_LOG, MAX_QUOTA, State,
};
use crate::time::{Span, Timestamp};

proptest! {
    #![proptest_config(cases(600))]

    /// A balance is its bytes, and no beginning of them; another version is refused.
    ///
    /// Woken by: replacing `out.number(self.fraction)` with `out.number(0)` in `Level::write`.
    #[test]
    fn bytes_round_trip(
        shape in shapes(),
        start in starts(),
        trace in traces(indebted()),
        version in 2..=255u8,
    ) {
        let mut world = World::play(shape, start, &trace);
        world.balance.block(start);
        let mut bytes = world.balance.to_bytes(Format::PRESENT);
        prop_assert_eq!(Balance::from_bytes(&bytes), Ok(world.balance));
        for end in 0..bytes.len() {
            prop_assert!(Balance::from_bytes(&bytes[..end]).is_err());
        }
        for version in [0, version] {
            bytes[0] = version;
            prop_assert_eq!(Balance::from_bytes(&bytes), Err(BytesError::UnknownVersion { found: version, oldest: 1, newest: 1 }));
        }
    }

    /// Whatever bytes decode are the only bytes of what they decode to, and can be asked anything.
    ///
    /// Woken by: removing `from.finish()?` in `Balance::from_bytes`.
    #[test]
    fn any_bytes_are_one_balance_or_none(
        shapes in (shapes(), shapes()),
        start in starts(),
        trace in traces(indebted()),
        damage in vec((any::<Index>(), prop_oneof![Just(255), Just(127), Just(0), any::<u8>()]), 1..12),
        noise in vec(any::<u8>(), 0..40),
        tag in 0..16u8,
    ) {
        let world = World::play(shapes.0, start, &trace);
        let mut bytes = world.balance.to_bytes(Format::PRESENT);
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
            // The version stays valid, or every case would end at the first byte.
            bytes[0] = 1;
            survive(&bytes, &shapes.1.limit())?;
        }
        survive(&noise, &shapes.1.limit())?;
        // With a valid beginning, so that the noise reaches the reader of each state.
        survive(&[&[1, 0, tag], &noise[..]].concat(), &shapes.1.limit())?;
    }
}

/// What decodes has these bytes and no others, and answers whatever it is asked.
fn survive(bytes: &[u8], limit: &Limit) -> Result<(), TestCaseError> {
    if let Ok(balance) = Balance::from_bytes(bytes) {
        prop_assert_eq!(balance.to_bytes(Format::PRESENT), bytes);
        let mut world = World { balance, ..World::new(*limit, Timestamp::from_micros(1_750_000_000_000_000)) };
        world.check(1);
        world.record(limit.capacity());
        prop_assert!(world.balance.silent_from() <= Timestamp::MAX);
    }
    Ok(())
}

/// A log in debt, and a window whose period grew while its old sub-windows still count, have the most entries.
/// The newest entry takes in what would be one too many, so that the bytes can be read back.
///
/// Woken by: replacing `MAX_ENTRIES` with `usize::MAX` in `SlidingWindow::at`.
#[test]
fn a_log_never_outgrows_its_bytes() {
    let check = |stretches: &[(Limit, u64)], gap: u64| {
        let mut world = World::new(stretches[0].0, Timestamp::from_secs(1_750_000_000));
        let mut used = 0;
        for (limit, charges) in stretches {
            world.limit = *limit;
            for _ in 0..*charges {
                world.wait(Gap::Micros(gap));
                used += world.record(1);
            }
        }
        assert!(Balance::from_bytes(&world.balance.to_bytes(Format::PRESENT)).is_ok_and(|read| read == world.balance));
        assert_eq!(world.look(0).available, world.limit.capacity().saturating_sub(used));
        let longest = Span::from_micros(2 * world.limit.period().micros());
        assert!(world.balance.silent_from() <= world.now.plus(longest));
    };
    let bucketed = |micros| {
        let options = LimitOptions::new().algorithm(Algorithm::SlidingWindow).buckets(MAX_BUCKETS);
        options.limit(MAX_QUOTA, Duration::from_micros(micros)).unwrap()
    };
    check(&[(Limit::sliding_log(MAX_LOG.into(), Duration::from_secs(1)).unwrap(), 2_400)], 400);
    check(&[(bucketed(2_047), 2_047), (bucketed(65_536), 32_768)], 1);
}

/// Steps of time that add up to more than a time can be are no balance: read as the end of time, they would be
/// written back as other bytes.
///
/// Woken by: replacing `checked_add` with a saturating one in `read_time`.
#[test]
fn times_past_the_end_of_time_are_malformed() {
    let check = |state: State, last_step: &[u8]| {
        let mut bytes = Balance { state, ..Balance::default() }.to_bytes(Format::PRESENT);
        assert!(Balance::from_bytes(&bytes).is_ok());
        let at = bytes.windows(last_step.len()).rposition(|window| window == last_step).unwrap();
        bytes[at] += 1;
        assert!(matches!(Balance::from_bytes(&bytes), Err(BytesError::Malformed(_))));
    };
    let early = Timestamp::MAX.minus(Span::from_micros(5));
    let entries = [early, Timestamp::MAX].map(|time| Entry { time, cost: 1 }).to_vec();
    check(State::Entries(Entries { entries, period: Span::SECOND }), &[5, 1]);
    let holds = [early, Timestamp::MAX].map(|expires| Hold { id: GUEST, cost: 1, expires }).to_vec();
    check(State::Holds(Holds { holds, ..Holds::default() }), &[5, 0, 0]);
}
