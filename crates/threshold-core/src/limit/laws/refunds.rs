//! Refunds: what is given back, and that it is never more than was charged.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::cases;
use super::world::{Act, GUEST, Gap, Shape, World, gaps, orderly, returning, shapes, shares, starts, traces};
use crate::balance::Balance;
use crate::limit::model::Model;
use crate::limit::{Algorithm, Limit, LimitOptions};
use crate::time::{Span, Timestamp};

proptest! {
    #![proptest_config(cases(600))]

    /// After a refund there is never more room than if the request had asked for only what it kept. Others
    /// come and go meanwhile as the key with the refund lets them; none of them owes, since a debt that
    /// saturated beside the refunded charge cannot be told apart from it. The figures stay the same between the
    /// charge and the refund: a mark does not say under which ones it was made. A window that opens at its
    /// first charge stays where that charge opened it, so there the law reaches to that window's end, and the
    /// bound holds beyond.
    ///
    /// Woken by: leaving out `.min(left)` in `RefundedBucket::give_back`.
    #[test]
    fn a_refund_never_mints(
        shape in shapes(),
        start in starts(),
        traces in (traces(orderly()), traces(orderly()), traces(orderly())),
        shares in (shares(), shares()),
        gap in gaps(),
    ) {
        let mut with = World::play(shape, start, &traces.0);
        with.wait(gap);
        let mut without = with.clone();
        let cost = shares.0.of(with.limit.capacity()).min(with.look(0).available);
        let kept = shares.1.of(cost).min(cost);
        let reset = with.look(cost).reset_if_charged;
        let guest = with.charge(cost, GUEST);
        let counts_until = with.counts_until(reset, &guest);
        without.charge(kept, GUEST);
        let mut pair = Pair { with, without, until: Timestamp::MAX };
        // After the refund the two windows may begin at different times, so beyond this one they cannot be compared.
        if pair.with.limit.opens_own_windows() {
            pair.until = guest.part.plus(shape.period);
        }
        for (gap, act) in traces.1 {
            pair.act(gap, act)?;
        }
        // As a receipt does: a bucket may forget what it gave back as soon as nothing that was charged counts any more.
        if pair.with.now < counts_until {
            let back = guest.with_amount(cost - kept);
            pair.with.balance.give_back(back, pair.with.now, GUEST);
        }
        for (gap, act) in traces.2 {
            pair.act(gap, act)?;
        }
    }

    /// Whatever is charged, recorded, refunded, released and committed lower, and in whatever order: a bucket never has more room
    /// than if nothing had been charged but what was kept. The same where every balance that may be dropped is dropped at
    /// once.
    ///
    /// Woken by, in `refunded.rs`: leaving out `.saturating_sub(self.given)` (what was given back since); `charged < gross` as
    /// `false`; `self.peak` as `self.level.moment()` in `silent_from`, which drops a bucket when it is full again; and, in
    /// `World::give_back`, leaving out `counts_until`.
    #[test]
    fn a_bucket_never_has_more_room_than_without_what_was_refunded(
        shape in shapes(),
        start in starts(),
        trace in vec((gaps(), returning()), 1..60),
        dropped: bool,
    ) {
        let shape = Shape { algorithm: Algorithm::TokenBucket, ..shape };
        let mut world = World::new(shape.limit(), start);
        let (mut model, mut places) = (Model::new(world.limit), Vec::new());
        for (gap, act) in trace {
            world.wait(gap);
            if dropped && world.balance.silent_from() <= world.now {
                world.balance = Balance::default();
            }
            world.act_beside(act, &mut model, &mut places);
            let now = world.now.micros();
            let ideal = model.room_beside(model.level_without_refunds(now));
            prop_assert!(world.look(0).available <= ideal, "{} of {ideal}", world.look(0).available);
        }
    }

    /// A refund changes nothing once its charge no longer counts, whatever was charged since.
    ///
    /// Woken by: replacing `self.start == mark.part` with `true` in `WindowCount::give_back`.
    #[test]
    fn a_late_refund_is_nothing(
        shape in shapes(),
        start in starts(),
        shares in (shares(), shares()),
        gap in gaps(),
    ) {
        let mut world = World::new(shape.limit(), start);
        let guest = world.charge(shares.0.of(world.limit.capacity()), GUEST);
        world.now = world.now.max(world.balance.silent_from());
        world.wait(gap);
        world.check(shares.1.of(world.limit.capacity()));
        let before = world.look(0);
        world.balance.give_back(guest, world.now, GUEST);
        prop_assert_eq!(world.look(0), before);
    }

    /// A hold that is given back frees exactly what it held, or the part of it that was given back.
    ///
    /// Woken by: replacing `hold.cost.min(left)` with `hold.cost` in `Holds::give_back`.
    #[test]
    fn a_hold_frees_what_it_held(
        shape in shapes(),
        start in starts(),
        trace in traces(orderly()),
        shares in (shares(), shares()),
    ) {
        let shape = Shape { algorithm: Algorithm::Concurrency, ..shape };
        let mut world = World::play(shape.with_figures_of(shape), start, &trace);
        let before = world.look(0).available;
        let cost = shares.0.of(world.limit.capacity()).min(before);
        let kept = shares.1.of(cost).min(cost);
        let mark = world.charge(cost, GUEST);
        world.balance.give_back(mark.with_amount(cost - kept), world.now, GUEST);
        prop_assert_eq!(world.look(0).available, before - kept);
    }
}

/// The same key twice: in one of the two a request was charged more, and that was given back.
struct Pair {
    with: World,
    without: World,
    /// Nothing is said of moments from here on.
    until: Timestamp,
}

impl Pair {
    fn act(&mut self, gap: Gap, act: Act) -> Result<(), TestCaseError> {
        self.with.wait(gap);
        self.without.wait(gap);
        if self.with.now >= self.until {
            return Ok(());
        }
        prop_assert!(self.with.look(0).available <= self.without.look(0).available);
        if let Some(cost) = self.with.asked(act) {
            // The key with the refund decides who comes, so both keys see the same requests.
            if self.with.check(cost).allowed {
                prop_assert!(self.without.check(cost).allowed);
            }
        } else {
            self.with.act(act);
            self.without.act(act);
        }
        prop_assert!(self.with.look(0).available <= self.without.look(0).available);
        Ok(())
    }
}

/// A bucket in which a unit refills in ten microseconds, and the same bucket if what was given back had never been charged.
#[derive(Clone)]
struct Ideal {
    world: World,
    /// When each charge was made, and how much of it was not given back.
    kept: Vec<(u64, u64)>,
}

const UNIT: u64 = 10;

impl Ideal {
    fn new(burst: u64) -> Self {
        let bucket = LimitOptions::new().algorithm(Algorithm::TokenBucket).burst(burst);
        let limit = bucket.limit(1, Duration::from_micros(UNIT)).unwrap();
        Self { world: World::new(limit, Timestamp::from_secs(1_750_000_000)), kept: Vec::new() }
    }

    fn charge(&mut self, cost: u64) -> bool {
        let fits = self.world.check(cost).allowed;
        if fits {
            self.kept.push((self.world.now.micros(), cost));
        }
        fits
    }

    fn refund(&mut self, place: usize) {
        let charge = self.world.charges[place];
        if self.world.now < charge.counts_until {
            self.world.balance.give_back(charge.mark, self.world.now, charge.id);
        }
        self.kept[place].1 = 0;
    }

    /// What the bucket counts as used, in microseconds until it is full again.
    fn used(&self) -> u64 {
        self.world.look(0).reset_if_not.since(self.world.now).micros()
    }

    /// How much of that would not be there without what was given back.
    fn lost(&self) -> u64 {
        let (mut missing, mut last) = (0u64, 0);
        for (at, cost) in &self.kept {
            missing = missing.saturating_sub(at - last) + cost * UNIT;
            last = *at;
        }
        self.used().checked_sub(missing.saturating_sub(self.world.now.micros() - last)).expect("a refund never mints")
    }

    /// Returns the most that is lost after any so many steps. `waits` says whether time passes between them.
    fn most_lost(&self, steps: u32, waits: bool) -> u64 {
        let lost = self.lost();
        assert!(lost <= self.used(), "what is lost is a part of what counts as used");
        let Some(steps) = steps.checked_sub(1) else { return lost };
        let mut most = lost;
        let mut after = |step: &dyn Fn(&mut Self) -> bool| {
            let mut next = self.clone();
            if step(&mut next) {
                most = most.max(next.most_lost(steps, waits));
            }
        };
        (1..=self.world.limit.capacity()).for_each(|cost| after(&|next| next.charge(cost)));
        let refundable = self.kept.iter().enumerate().filter(|(_, (_, cost))| *cost > 0);
        refundable.for_each(|(place, _)| {
            after(&|next| {
                next.refund(place);
                true
            });
        });
        if waits && !self.kept.is_empty() {
            after(&|next| {
                next.world.now = next.world.now.plus(Span::from_micros(UNIT));
                true
            });
        }
        most
    }
}

/// The most that refunds of a bucket lose: nearly half of the burst at one moment, all of it but one unit over time, and never more
/// than what counts as used, so that nothing is lost any more once the bucket is full. The page on policies says so. Every order of
/// charges and refunds of a small bucket.
///
/// Woken by: subtracting `self.given` twice in `RefundedBucket::give_back`.
#[test]
fn what_refunds_of_a_bucket_lose_is_bounded() {
    for (burst, at_once, over_time) in [(1, 0, 0), (2, 0, 1), (3, 1, 2)] {
        assert_eq!(Ideal::new(burst).most_lost(6, false), at_once * UNIT, "burst {burst} at once");
        assert_eq!(Ideal::new(burst).most_lost(7, true), over_time * UNIT, "burst {burst} over time");
    }
    assert_eq!(Ideal::new(5).most_lost(5, false), 2 * UNIT);
}

/// The example of the page on policies: 10 a minute, of which three are in flight, and the second of them ends first.
#[test]
fn the_example_of_the_page_loses_one_of_three() {
    let lost = |order: [usize; 3]| {
        let mut bucket = Ideal::new(10);
        assert!((0..3).all(|_| bucket.charge(1)));
        order.into_iter().for_each(|place| bucket.refund(place));
        bucket.lost() / UNIT
    };
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        assert_eq!(lost(order), u64::from(order[0] == 1), "{order:?}");
    }
}

proptest! {
    #![proptest_config(cases(400))]

    /// A refund never leaves less room than no refund, and what it loses ends when the bucket is full.
    ///
    /// Woken by: giving nothing back, which loses a whole burst.
    #[test]
    fn a_refund_never_takes_and_its_loss_ends(
        burst in 1..50u64,
        trace in vec((0..40u64, any::<u8>(), any::<bool>()), 1..60),
    ) {
        let mut with = Ideal::new(burst);
        let mut without = with.clone();
        for (wait, which, refunds) in trace {
            let later = with.world.now.plus(Span::from_micros(wait));
            (with.world.now, without.world.now) = (later, later);
            let open: Vec<usize> = (0..with.kept.len()).filter(|place| with.kept[*place].1 > 0).collect();
            if refunds && !open.is_empty() {
                with.refund(open[usize::from(which) % open.len()]);
            } else {
                let cost = 1 + u64::from(which) % burst;
                // The bucket that gives nothing back decides who comes, so both see the same requests.
                if without.charge(cost) {
                    prop_assert!(with.charge(cost));
                }
            }
            prop_assert!(with.used() <= without.used());
            prop_assert!(with.lost() <= with.used().min((burst - 1) * UNIT));
        }
        with.world.now = with.world.look(0).reset_if_not;
        prop_assert_eq!((with.used(), with.lost()), (0, 0));
    }
}

/// A charge that saturates stops at whole units, before the latest moment that its receipt counts until. A bucket that had
/// given back before the charge, and was dropped between these two moments, gave the refilled charge back once more.
///
/// Woken by: `full_at` for `counts_until` in `RefundedBucket::charge`.
#[test]
fn a_saturated_charge_gives_nothing_back_once_it_has_refilled() {
    // A unit refills in 10 µs, and at most two are missing.
    let limit = Limit::token_bucket(1, Duration::from_micros(10)).unwrap();
    let mut world = World::new(limit, Timestamp::from_secs(1_750_000_000));
    world.record(1);
    world.record(1);
    let first = world.charges[0];
    world.balance.give_back(first.mark, world.now, first.id);
    world.wait(Gap::Micros(5));
    assert_eq!(world.record(5), 1);
    // The charge has refilled after 15 µs, and its receipt counts for 20.
    world.wait(Gap::Micros(16));
    if world.balance.silent_from() <= world.now {
        world.balance = Balance::default();
    }
    world.record(1);
    let before = world.look(0);
    let refilled = world.charges[2];
    assert!(world.now < refilled.counts_until);
    world.balance.give_back(refilled.mark, world.now, refilled.id);
    assert_eq!(world.look(0), before);
}
