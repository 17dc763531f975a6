//! Counts of a period, in steps, of which the oldest ends when a new one begins.

use threshold_core::Timestamp;

use super::Period;

/// The steps of one period, with the counts of each.
#[derive(Debug)]
pub(super) struct Ring<C> {
    pub(super) period: Period,
    /// One more than the period has, because the present one has only begun. The step with the number N is at N modulo their number.
    steps: Box<[Step<C>]>,
}

#[derive(Debug, Default)]
struct Step<C> {
    /// The time of its beginning, in lengths of a step.
    number: u64,
    counts: C,
}

impl<C: Default> Ring<C> {
    pub(super) fn new(period: Period) -> Self {
        let (_, steps) = period.steps();
        Self { period, steps: (0..=steps).map(|_| Step::default()).collect() }
    }

    /// Returns the number of the step at a time.
    fn number(&self, at: Timestamp) -> u64 {
        let (length, _) = self.period.steps();
        at.micros().checked_div(length.micros()).unwrap_or(0)
    }

    /// Returns the counts of the step of an event; `None` if it is before the period.
    pub(super) fn at(&mut self, at: Timestamp, now: Timestamp) -> Option<&mut C> {
        let (number, newest, count) = (self.number(at), self.number(now), self.steps.len() as u64);
        if newest.saturating_sub(number) >= count {
            return None;
        }
        let place = usize::try_from(number.checked_rem(count)?).ok()?;
        let step = self.steps.get_mut(place)?;
        // An older one is over. A newer one was written before the clock was set back.
        if step.number != number {
            *step = Step { number, counts: C::default() };
        }
        Some(&mut step.counts)
    }

    /// Returns the counts of the steps of the last period.
    pub(super) fn last(&self, now: Timestamp) -> impl Iterator<Item = &C> {
        let (newest, count) = (self.number(now), self.steps.len() as u64);
        let is_in = move |step: &&Step<C>| step.number <= newest && newest.saturating_sub(step.number) < count;
        self.steps.iter().filter(is_in).map(|step| &step.counts)
    }

    /// Returns the counts of all steps, also of those that are over.
    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut C> {
        self.steps.iter_mut().map(|step| &mut step.counts)
    }

    #[cfg(test)]
    pub(super) fn all(&self) -> impl Iterator<Item = &C> {
        self.steps.iter().map(|step| &step.counts)
    }
}
