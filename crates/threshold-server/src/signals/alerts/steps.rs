//! Counts over time, in steps of a sixtieth of a period.

use std::collections::VecDeque;

use threshold_core::policy::Alert;
use threshold_core::{Span, Timestamp};

/// How long a count stays in force after its period. An alert is not resolved and raised again for a pause that is shorter.
pub(crate) const HOLD: Span = Span::from_secs(60);
/// The most steps of one period.
const MAX_STEPS: u64 = 60;
const SECOND: Span = Span::from_secs(1);

/// The steps that a period is counted in: a sixtieth of it, and at least a second, so that no history is longer than
/// 122 counts, however short the period is. A period of less than a second counts as one second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scale {
    /// The length of a step, in microseconds.
    step: u64,
    /// The steps of one period.
    steps: u64,
}

impl Scale {
    /// The most counts that are kept: of a period and of [`HOLD`], each in whole and in begun steps.
    #[cfg(test)]
    pub(super) const MAX_COUNTS: usize = 122;

    pub(super) fn new(per: Span) -> Self {
        let per = per.max(SECOND).micros();
        let steps = per.checked_div(SECOND.micros()).unwrap_or(1).clamp(1, MAX_STEPS);
        Self { step: per.checked_div(steps).unwrap_or(per), steps }
    }

    /// Returns the number of the step of a moment.
    pub(super) fn number(self, at: Timestamp) -> u64 {
        at.micros().checked_div(self.step).unwrap_or(0)
    }

    /// Returns the numbers of the steps that are judged at a moment: those that begin in the last period, or in [`HOLD`] before it.
    pub(super) fn judged(self, now: Timestamp) -> (u64, u64) {
        let begin = now.minus(self.period()).minus(HOLD);
        (begin.micros().div_ceil(self.step), self.number(now))
    }

    /// Returns the number of a step in another scale.
    pub(super) fn rescaled(self, number: u64, to: Self) -> u64 {
        to.number(self.start(number))
    }

    fn start(self, number: u64) -> Timestamp {
        Timestamp::from_micros(number.saturating_mul(self.step))
    }

    fn period(self) -> Span {
        Span::from_micros(self.step.saturating_mul(self.steps))
    }
}

/// The counts of steps, in order of time.
#[derive(Debug, Default)]
pub(super) struct Steps {
    counts: VecDeque<(u64, u64)>,
    sum: u64,
}

impl Steps {
    /// Returns the sum of all counts.
    pub(super) fn sum(&self) -> u64 {
        self.sum
    }

    pub(super) fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Adds to the count of a step. Almost always it is the last one.
    pub(super) fn add(&mut self, number: u64, count: u64) {
        self.sum = self.sum.saturating_add(count);
        let place = self.counts.partition_point(|(other, _)| *other < number);
        match self.counts.get_mut(place) {
            Some((same, sum)) if *same == number => *sum = sum.saturating_add(count),
            _ => self.counts.insert(place, (number, count)),
        }
    }

    /// Forgets what is no longer judged. Counts after the last step were made before the clock was set back, and are moved to that
    /// step: they must not stay longer than others.
    pub(super) fn forget(&mut self, (first, last): (u64, u64)) {
        let before = self.counts.len();
        while self.counts.front().is_some_and(|(number, _)| *number < first) {
            self.counts.pop_front();
        }
        while let Some((_, count)) = self.counts.pop_back_if(|(number, _)| *number > last) {
            self.add(last, count);
        }
        if self.counts.len() != before {
            // Not by subtraction, because a sum may have been saturated.
            self.sum = self.counts.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count));
        }
    }

    /// Returns the largest count in any period.
    pub(super) fn peak(&self, scale: Scale, alert: Alert) -> u64 {
        let alert = Alert { per: scale.period(), ..alert };
        alert.peak(self.counts.iter().map(|(number, count)| (scale.start(*number), *count)))
    }

    /// Returns the largest count in any period that has a part in this range of steps.
    pub(super) fn peak_in(&self, (first, last): (u64, u64), scale: Scale, alert: Alert) -> u64 {
        let alert = Alert { per: scale.period(), ..alert };
        let (begin, end) = (first.saturating_add(1).saturating_sub(scale.steps), last.saturating_add(scale.steps));
        let within = self.counts.iter().filter(|(number, _)| (begin..end).contains(number));
        alert.peak(within.map(|(number, count)| (scale.start(*number), *count)))
    }

    /// Counts in the steps of another period. What was counted in longer steps counts at their beginning.
    pub(super) fn rescale(&mut self, from: Scale, to: Scale) {
        for (number, count) in std::mem::take(self).counts {
            self.add(from.rescaled(number, to), count);
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }
}
