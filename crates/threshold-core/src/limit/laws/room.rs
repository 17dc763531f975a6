//! Room: how much fits, and when.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::cases;
use super::world::{FEW, Shape, World, close, gaps, indebted, shapes, shares, starts, traces};
use crate::balance::Balance;
use crate::key::TraceId;
use crate::limit::model::Model;
use crate::limit::token_bucket::FUTURE;
use crate::limit::{Algorithm, Limit};
use crate::time::{Span, Timestamp};

proptest! {
    #![proptest_config(cases(600))]

    /// What was used stays used at the instant of a change: the room is the new capacity less that, at least 0.
    /// Only a state that knows the ages of its charges may have more under a shorter period.
    ///
    /// Woken by: replacing `now < state.start.plus(self.period)` with `true` in `FixedWindow::bring`.
    #[test]
    fn a_change_keeps_what_was_used(
        shapes in (shapes(), shapes()),
        start in starts(),
        trace in traces(indebted()),
        gap in gaps(),
    ) {
        let (old, new) = (shapes.0, shapes.0.with_figures_of(shapes.1));
        let mut world = World::play(old, start, &trace);
        world.wait(gap);
        let used = world.used(old);
        world.limit = new.limit();
        let remaining = world.look(0).available;
        let expect = new.limit().capacity().saturating_sub(used);
        if world.limit.knows_ages() && new.period < old.period {
            prop_assert!(remaining >= expect);
        } else {
            prop_assert_eq!(remaining, expect);
        }
    }

    /// Asking a bucket under another limit forgets nothing that is used, however small that limit is: a client with two tiers has no
    /// more under one of them after a denied request under the other. A bucket whose burst is more than its quota is bounded by the
    /// larger of that quota and the other burst.
    ///
    /// Woken by: removing `&& !self.is_overdrawn(level, now)` in `TokenBucket::bring_from_afar`, with its `convert` bounded by twice
    /// the burst; replacing `self.burst.max(level.quota)` with `self.burst` in `TokenBucket::furthest`.
    #[test]
    fn asking_under_another_limit_forgets_nothing(
        shapes in (shapes(), shapes()),
        start in starts(),
        trace in traces(indebted()),
        gap in gaps(),
        share in shares(),
    ) {
        let old = Shape { algorithm: Algorithm::TokenBucket, burst: shapes.0.burst.min(shapes.0.quota), ..shapes.0 };
        let new = old.with_figures_of(shapes.1).limit();
        let mut world = World::play(old, start, &trace);
        world.wait(gap);
        let before = world.look(0).available;
        let cost = share.of(new.capacity());
        let (asked, _) = world.balance.look(&new, cost, world.now);
        let after = world.look(0).available;
        prop_assert!(after <= before, "{after} after {before}");
        // Rounded by at most a millionth of a unit.
        prop_assert!(after + 1 >= before, "{after} after {before}");
        // A client who waits as long as it was told, and asks once in between, gets in.
        prop_assume!(cost <= new.capacity());
        let waited = Span::from_micros(asked.ready_at.since(world.now).micros());
        for part in [waited.micros() / 3, waited.micros()] {
            let mut later = world.balance.clone();
            later.look(&new, cost, world.now.plus(Span::from_micros(part)));
            let (look, _) = later.look(&new, cost, asked.ready_at);
            prop_assert!(look.allowed, "asked after {part} of {} us", waited.micros());
        }
        // The wait is bounded by what both limits take to refill, and by what converting rounds up: some millionths of a unit, and a tick
        // of the new limit, which is a large part of a unit where its period is some microseconds.
        let whole = |limit: &Limit| limit.longest().micros() + (limit.longest().micros() >> 18) + 2;
        let rounded = old.period.micros() / new.period().micros().max(1);
        let most = whole(&old.limit()) + whole(&new) + rounded;
        prop_assert!(waited.micros() <= most, "{} us and not {most}", waited.micros());
    }

    /// Whatever is asked under two limits of one key, later answers depend on what was charged and on nothing else: a look, a cost of
    /// 0 and a denied request change no balance. A client who waits as long as it was told gets in, unless others release what it
    /// waits for.
    ///
    /// Woken by: calling `self.bring` in `Limit::look_beside` whatever the figures are; in turn, leaving out `max(stays.ready_at)`
    /// in `LimitAlgorithm::look_apart`, `min(stays.ready_at)` in `Sliding::look_apart` and `rounded` in
    /// `TokenBucket::look_at_other_figures`.
    #[test]
    fn looks_and_denials_change_no_later_answer(
        shapes in (shapes(), shapes()),
        start in starts(),
        steps in vec((gaps(), any::<bool>(), any::<bool>(), shares()), 1..40),
    ) {
        let limits = [shapes.0.limit(), shapes.0.with_figures_of(shapes.1).limit()];
        // A bucket that takes longer to refill could have been written before the clock stepped back.
        prop_assume!(limits.iter().all(|limit| !limit.refills_smoothly() || limit.shown_period() <= FUTURE));
        let (mut now, mut id) = (start, 0);
        let (mut asked, mut charged) = (Balance::default(), Balance::default());
        for (gap, other, is_look, share) in steps {
            let limit = &limits[usize::from(other)];
            (now, id) = (now.plus(gap.after(now, limit)), id + 1);
            let cost = share.of(limit.capacity());
            let expected = charged.clone().look(limit, cost, now).0;
            let look = if is_look {
                asked.look(limit, cost, now).0
            } else {
                let checked = asked.check(limit, cost, now, TraceId::from_u128(id));
                if checked.mark.is_some() {
                    prop_assert_eq!(charged.check(limit, cost, now, TraceId::from_u128(id)), checked);
                }
                checked.look
            };
            prop_assert_eq!(look, expected, "{}", limit);
            if !look.allowed && cost <= limit.capacity() && !limit.is_concurrency() {
                let (then, _) = asked.clone().look(limit, cost, look.ready_at);
                prop_assert!(then.allowed, "{limit}: asked {cost} at {now:?}, told {:?}", look.ready_at);
            }
        }
    }

    /// A fresh balance takes its whole capacity at once, unit by unit, and not one more.
    ///
    /// Woken by: replacing `after <= capacity` with `after < capacity` in `TokenBucket::look_whole`.
    #[test]
    fn a_fresh_balance_takes_its_capacity(shape in shapes(), start in starts()) {
        let mut world = World::new(shape.limit(), start);
        // A million and a half charges say no more than the last few hundred of them.
        let units = world.limit.capacity().min(500);
        let lump = world.limit.capacity() - units;
        prop_assert!(world.check(lump).allowed);
        for _ in 0..units {
            prop_assert!(world.check(1).allowed);
        }
        prop_assert!(!world.check(1).allowed);
    }

    /// A token bucket loses no refill: a client who takes all there is at any moments has taken
    /// `floor(time * L / W)` after the first burst, unless the bucket stood full in between.
    ///
    /// Woken by: replacing the fraction with `0` in `Interval::split`.
    #[test]
    fn no_refill_is_lost(shape in shapes(), start in starts(), gaps in vec(gaps(), 1..40)) {
        let shape = Shape { algorithm: Algorithm::TokenBucket, ..shape };
        let mut world = World::new(shape.limit(), start);
        world.record(shape.burst);
        let (mut since, mut taken) = (start, 0u128);
        for gap in gaps {
            world.wait(gap);
            let time = u128::from(world.now.since(since).micros());
            let refilled = time * u128::from(shape.quota) / u128::from(shape.period.micros());
            let remaining = world.look(0).available;
            prop_assert_eq!(u128::from(remaining), (refilled - taken).min(shape.burst.into()));
            world.record(remaining);
            taken += u128::from(remaining);
            // The bucket stood full for some of the time, which refilled nothing. Counting begins again from here.
            if remaining == shape.burst {
                (since, taken) = (world.now, 0);
            }
        }
    }

    /// A client who is denied and stays alone is denied until `ready_at`, and admitted at it and ever after; so also
    /// after waiting the whole seconds of `retryAfter`. What never fits says so. When requests in flight end is a guess: a
    /// client who waits for each guess is admitted when they expire, at the latest.
    ///
    /// Woken by: replacing `at.plus(Span::from_micros(1))` with `at` in `Interval::round_up`.
    #[test]
    fn ready_at_is_when(
        shape in shapes(),
        start in starts(),
        trace in traces(indebted()),
        share in shares(),
        later in gaps(),
    ) {
        let world = World::play(shape, start, &trace);
        let cost = share.of(world.limit.capacity());
        let look = world.look(cost);
        prop_assert_eq!(look.ready_at == Timestamp::MAX, cost > world.limit.capacity());
        prop_assert_eq!(look.ready_at == world.now, look.allowed);
        if !look.allowed && look.ready_at < Timestamp::MAX {
            let ready_at = look.ready_at;
            prop_assert!(!world.look_at(cost, ready_at.minus(Span::from_micros(1))).allowed);
            if world.limit.is_concurrency() {
                let again = |now: &Timestamp| Some(world.look_at(cost, *now)).filter(|look| !look.allowed);
                let next = |now: &Timestamp| again(now).map(|look| look.ready_at);
                // Each guess but the first doubles the age of a hold, so that 64 cover any ttl.
                let last = std::iter::successors(Some(ready_at), next).take(64).last().unwrap();
                prop_assert!(world.look_at(cost, last).allowed);
                prop_assert!(last <= world.now.plus(world.limit.longest()));
                return Ok(());
            }
            prop_assert!(world.look_at(cost, ready_at).allowed);
            prop_assert!(world.look_at(cost, ready_at.plus(later.after(ready_at, &world.limit))).allowed);
            let retry_after = Span::from_secs(ready_at.since(world.now).secs_ceil());
            prop_assert!(world.look_at(cost, world.now.plus(retry_after)).allowed);
        }
    }

    /// `remaining` is the largest cost that fits (in debt not even 0 does), and a charge lowers it by itself.
    ///
    /// Woken by: removing `&& window.used <= self.quota` in `FixedWindow::look`.
    #[test]
    fn remaining_is_truthful(
        shape in shapes(),
        start in starts(),
        trace in traces(indebted()),
        share in shares(),
    ) {
        let mut world = World::play(shape, start, &trace);
        let remaining = world.look(0).available;
        // `remaining` is 0 both when the limit is just used up and in debt. Only in the first case a cost of 0 fits.
        let in_debt = world.used(shape) > world.limit.capacity();
        prop_assert_eq!(world.look(remaining).allowed, !in_debt);
        prop_assert!(!world.look(remaining + 1).allowed);
        let cost = share.of(world.limit.capacity());
        let look = world.check(cost);
        prop_assert_eq!(look.available, remaining);
        let charged = if look.allowed { cost } else { 0 };
        prop_assert_eq!(world.look(0).available, remaining - charged);
    }

    /// A record is never refused; it uses what it says it does, up to twice the capacity; and while no other request
    /// comes the debt only shrinks, until the whole capacity is there again.
    ///
    /// Woken by: replacing `saturating_mul(2)` with `saturating_mul(3)` in `Sliding::charge`.
    #[test]
    fn debt_saturates_and_is_paid_off(
        shape in shapes(),
        start in starts(),
        trace in traces(indebted()),
        costs in vec(shares(), 1..5),
        gaps in vec(gaps(), 1..5),
    ) {
        let mut world = World::play(shape, start, &trace);
        let (capacity, mut used) = (world.limit.capacity(), world.used(shape));
        for share in costs {
            let cost = share.of(capacity);
            let amount = world.record(cost);
            prop_assert_eq!(amount, cost.min(2 * capacity - used));
            used += amount;
            prop_assert_eq!(world.used(shape), used);
        }
        for gap in gaps {
            world.wait(gap);
            prop_assert!(world.used(shape) <= used);
            used = world.used(shape);
        }
        prop_assert!(world.balance.silent_from() <= world.now.plus(world.limit.longest()));
        prop_assert!(world.look_at(capacity, world.now.max(world.balance.silent_from())).allowed);
    }

    /// The product answers every cost as the model does, and charges as much.
    ///
    /// Woken by: replacing `<= now` with `< now` in `Entries::has_left`.
    #[test]
    fn the_model_agrees(shape in shapes(), start in starts(), trace in traces(indebted())) {
        let mut world = World::new(shape.limit(), start);
        let (mut model, mut places) = (Model::new(world.limit), Vec::new());
        for (gap, act) in trace {
            world.wait(gap);
            let now = world.now.micros();
            let asked = world.asked(act).unwrap_or(1);
            let look = world.look(asked);
            prop_assert_eq!(look.allowed, model.fits(asked, now));
            prop_assert_eq!(look.available, model.remaining(now));
            let ready_at = model.ready_at(asked, now);
            if world.limit.is_concurrency() && !look.allowed {
                prop_assert!(look.ready_at > world.now && look.ready_at.micros() <= ready_at);
            } else {
                prop_assert_eq!(look.ready_at.micros(), ready_at);
            }
            let charged = world.act_beside(act, &mut model, &mut places);
            prop_assert_eq!(charged.0, charged.1);
        }
    }
}

proptest! {
    // It breaks at exact instants only, which take more cases to meet.
    #![proptest_config(cases(3_000))]

    /// From the same balance at the same instant a limit with no smaller figures never denies more.
    ///
    /// Woken by: adding a tick to the rounded-up backlog in `TokenBucket::convert`.
    #[test]
    fn a_larger_limit_never_denies_more(
        shape in shapes(),
        start in starts(),
        trace in traces(indebted()),
        more in (select(&[0, 1, 7, FEW][..]), select(&[0, 0, 1, 7, FEW][..])),
        gap in close(),
    ) {
        let shape = Shape { quota: shape.quota.min(FEW), ..shape };
        let larger = Shape { quota: shape.quota + more.0, burst: shape.burst + more.1, ..shape };
        let mut world = World::play(shape, start, &trace);
        world.wait(gap);
        let before = world.look(0);
        world.limit = larger.limit();
        let after = world.look(0);
        prop_assert!(after.available >= before.available);
        prop_assert!(after.allowed || !before.allowed);
    }
}
