//! Computes the time to use from the wall clock and a monotonic clock: a pure state machine.

/// A difference to the wall clock, in microseconds, beyond which the wall clock must have been set.
const STEPPED: i64 = 1_000_000;
/// How long a step of the wall clock must last, in microseconds, before it is followed.
const BELIEVED_AFTER: i64 = 60_000_000;
/// The slew rate, as a divisor of the time that passes: small differences to the wall clock are corrected at 5 %.
const SLEW: i64 = 20;

/// A time that follows the wall clock, except for steps that do not last.
///
/// The passing of time is measured by a monotonic clock that runs on in suspend. A wall clock that differs by more than a
/// second was set. Such a step is followed when it has lasted for a minute, so that one that is taken back at once ends no
/// ban and opens no window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Steady {
    /// The time in use.
    used: i64,
    /// The monotonic clock at that time.
    boot: i64,
    step: Option<Step>,
}

/// A step of the wall clock that is not followed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    /// When the step was first seen, by the monotonic clock.
    since: i64,
    /// The smallest difference since then: only this much of the step has lasted.
    least: i64,
}

impl Steady {
    /// Starts from the wall clock.
    pub(super) fn new(wall: i64, boot: i64) -> Self {
        Self { used: wall, boot, step: None }
    }

    /// Returns the time to use now. `boot` must not go back; if it does, no time has passed.
    pub(super) fn read(&mut self, wall: i64, boot: i64) -> i64 {
        let passed = boot.saturating_sub(self.boot).max(0);
        self.boot = self.boot.max(boot);
        self.used = self.used.saturating_add(passed);
        let off = wall.saturating_sub(self.used);
        if off.saturating_abs() <= STEPPED {
            self.step = None;
            let most = passed.checked_div(SLEW).unwrap_or(0);
            // A twentieth of what has passed at most, so that the time never goes back while it is slewed.
            self.used = self.used.saturating_add(off.clamp(most.saturating_neg(), most));
            return self.used;
        }
        let step = match self.step {
            Some(step) if step.least.signum() == off.signum() => Step { least: nearer(step.least, off), ..step },
            // The first reading of a step, or of one in the other direction: its minute begins here.
            _ => Step { since: self.boot, least: off },
        };
        self.step = Some(step);
        if self.boot.saturating_sub(step.since) >= BELIEVED_AFTER {
            // Only as much as has lasted for the whole minute. The rest is a new step, if it stays.
            self.used = self.used.saturating_add(step.least);
            self.step = None;
        }
        self.used
    }
}

/// Returns the one of two differences of the same sign that is nearer to zero.
fn nearer(one: i64, other: i64) -> i64 {
    if one.saturating_abs() < other.saturating_abs() { one } else { other }
}

#[cfg(test)]
#[expect(clippy::arithmetic_side_effects, reason = "a test whose sums overflow should say so loudly")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: i64 = 1_000_000;
    const DAY: i64 = 86_400 * SECOND;
    const START: i64 = 1_767_225_600 * SECOND;
    const TICK: i64 = SECOND / 10;

    /// A wall clock and a monotonic clock, which advance by a tenth of a second at a time.
    struct World {
        steady: Steady,
        boot: i64,
    }

    impl World {
        fn new() -> Self {
            Self { steady: Steady::new(START, 0), boot: 0 }
        }

        /// Runs for `length` with a wall clock that is wrong by `off`. Returns the largest and the last difference to the true
        /// time.
        fn run(&mut self, length: i64, off: i64) -> (i64, i64) {
            let (mut most, mut last) = (0i64, 0i64);
            let end = self.boot + length;
            while self.boot < end {
                self.boot += TICK;
                last = self.steady.read(START + self.boot + off, self.boot) - START - self.boot;
                most = most.max(last.abs());
            }
            (most, last)
        }
    }

    /// Such a step once ended a ban of 24 hours, and the time stayed ahead for weeks.
    ///
    /// Woken by: `BELIEVED_AFTER` of 0.
    #[test]
    fn a_step_that_is_taken_back_within_a_minute_does_nothing() {
        for off in [2 * SECOND, 3_600 * SECOND, DAY, 1_000 * DAY, -3_600 * SECOND, -DAY] {
            for length in [TICK, SECOND / 2, 10 * SECOND, 59 * SECOND] {
                let mut world = World::new();
                world.run(10 * SECOND, 0);
                assert_eq!(world.run(length, off), (0, 0), "{off} for {length}");
                assert_eq!(world.run(600 * SECOND, 0), (0, 0), "{off} for {length}");
            }
        }
    }

    #[test]
    fn a_step_that_lasts_counts_after_a_minute_and_so_does_its_end() {
        for off in [2 * SECOND, DAY, -DAY] {
            let mut world = World::new();
            assert_eq!(world.run(60 * SECOND, off), (0, 0));
            assert_eq!(world.run(SECOND, off).1, off);
            assert_eq!(world.run(59 * SECOND, 0).1, off);
            assert_eq!(world.run(2 * SECOND, 0).1, 0);
        }
    }

    /// Woken by: a clock that stands still in suspend as `boot`.
    #[test]
    fn suspend_counts_at_once() {
        let mut world = World::new();
        world.run(10 * SECOND, 0);
        world.boot += 8 * 3_600 * SECOND;
        assert_eq!(world.run(TICK, 0), (0, 0));
        // Where no clock goes on in suspend, it is a step like any other.
        let mut steady = Steady::new(START, 0);
        assert_eq!(steady.read(START + DAY, TICK), START + TICK);
        assert_eq!(steady.read(START + DAY + 60 * SECOND, TICK + 60 * SECOND), START + DAY + 60 * SECOND);
    }

    /// A second step, a moment before the first one is believed, has not lasted for a minute.
    ///
    /// Woken by: `off` in the place of `step.least`.
    #[test]
    fn only_what_has_lasted_counts() {
        let mut world = World::new();
        world.run(59 * SECOND, 10 * SECOND);
        assert_eq!(world.run(2 * SECOND, DAY).1, 10 * SECOND);
        assert_eq!(world.run(58 * SECOND, DAY).1, 10 * SECOND);
        assert_eq!(world.run(4 * SECOND, DAY).1, DAY);
    }

    #[test]
    fn a_small_difference_is_met_slowly() {
        let mut world = World::new();
        assert_eq!(world.run(TICK, SECOND / 2).1, TICK / SLEW);
        assert_eq!(world.run(10 * SECOND, SECOND / 2), (SECOND / 2, SECOND / 2));
        assert_eq!(world.run(TICK, 0).1, SECOND / 2 - TICK / SLEW);
        assert_eq!(world.run(10 * SECOND, 0).1, 0);
    }

    proptest! {
        /// Whatever the clocks say: nothing panics, time goes back only by a step that has lasted for a minute, and is never
        /// further ahead of the true time than the wall clock was for a whole minute, but for a second.
        ///
        /// Woken by: `BELIEVED_AFTER` of 30 s; `off` in the place of `least`.
        #[test]
        fn no_step_counts_before_its_minute(
            steps in prop::collection::vec((1i64..40 * SECOND, -DAY..DAY, prop::bool::ANY), 1..60),
        ) {
            let mut steady = Steady::new(START, 0);
            let (mut boot, mut before) = (0i64, START);
            let mut history: Vec<(i64, i64)> = vec![(0, 0)];
            for (length, off, small) in steps {
                let off = if small { off % SECOND } else { off };
                boot += length;
                history.push((boot, off));
                let used = steady.read(START + boot + off, boot);
                let minute: Vec<i64> =
                    history.iter().filter(|(at, _)| boot - at <= 60 * SECOND).map(|(_, off)| *off).collect();
                let jumped = used - before - length;
                if jumped.abs() > length / SLEW {
                    let off_before = before - START - (boot - length);
                    let lasted = minute.iter().all(|off| (off - off_before).abs() > SECOND
                        && (off - off_before).signum() == jumped.signum()
                        && (off - off_before).abs() >= jumped.abs());
                    prop_assert!(lasted, "jumped by {jumped}, {minute:?}");
                }
                before = used;
            }
        }

        #[test]
        fn nothing_panics_at_any_extreme(readings in prop::collection::vec((any::<i64>(), any::<i64>()), 0..20)) {
            let mut steady = Steady::new(i64::MAX, i64::MIN);
            for (wall, boot) in readings {
                steady.read(wall, boot);
            }
        }
    }
}
