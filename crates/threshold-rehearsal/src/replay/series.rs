//! Counts over time in a bounded number of steps: when there are too many, neighbouring steps are merged.

/// The most steps: about the width of a screen in pixels.
const MAX_STEPS: usize = 2_000;
/// The widths of a step, in seconds. Each is a multiple of the one before, so that steps can be merged; beyond a day they
/// double.
const WIDTHS: [u64; 13] = [1, 5, 15, 30, 60, 300, 900, 1_800, 3_600, 10_800, 21_600, 43_200, 86_400];

/// The counts of one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) requests: u64,
    /// The stopped requests by the rule's index; the last entry is for penalties and lists.
    pub(crate) stopped: Vec<u64>,
}

/// Steps from the first request to the last.
#[derive(Debug)]
pub(crate) struct Series {
    width: u64,
    /// The number of the first step since the epoch.
    first: u64,
    steps: Vec<Step>,
    reasons: usize,
}

impl Series {
    /// A series with this number of reasons: the rules, and one for penalties and lists.
    pub(crate) fn new(reasons: usize) -> Self {
        Self { width: 1, first: 0, steps: Vec::new(), reasons }
    }

    /// Counts a request at this second, and why it was stopped. Seconds must not decrease.
    #[inline]
    pub(crate) fn add(&mut self, second: u64, stopped: Option<usize>) {
        if self.steps.is_empty() {
            self.first = second;
            self.steps.push(self.step());
        }
        let mut at = self.place(second);
        // More than once, if the log has a gap of years or one line with a wrong date.
        while at >= MAX_STEPS {
            self.coarsen();
            at = self.place(second);
        }
        while at >= self.steps.len() {
            self.steps.push(self.step());
        }
        if let Some(step) = self.steps.get_mut(at) {
            step.requests = step.requests.saturating_add(1);
            if let Some(count) = stopped.and_then(|reason| step.stopped.get_mut(reason)) {
                *count = count.saturating_add(1);
            }
        }
    }

    /// Returns each step with its first second.
    pub(crate) fn steps(&self) -> impl ExactSizeIterator<Item = (u64, &Step)> {
        let (first, width) = (self.first, self.width);
        self.steps.iter().enumerate().map(move |(index, step)| {
            let number = first.saturating_add(u64::try_from(index).unwrap_or(u64::MAX));
            (number.saturating_mul(width), step)
        })
    }

    /// Returns the width of a step, in seconds.
    pub(crate) fn width(&self) -> u64 {
        self.width
    }

    fn step(&self) -> Step {
        Step { requests: 0, stopped: vec![0; self.reasons] }
    }

    fn place(&self, second: u64) -> usize {
        // Steps are aligned to the epoch and not to the first request, so that wide ones begin at full minutes and
        // hours.
        let number = second.checked_div(self.width).unwrap_or(0);
        usize::try_from(number.saturating_sub(self.first)).unwrap_or(usize::MAX)
    }

    #[cold]
    fn coarsen(&mut self) {
        let next = WIDTHS.into_iter().find(|width| *width > self.width);
        let next = next.unwrap_or_else(|| self.width.saturating_mul(2));
        let old = std::mem::take(&mut self.steps);
        let (first, width) = (self.first, self.width);
        // In seconds first, then in the new width: the first request may be in the middle of a wider step.
        self.first = first.saturating_mul(width).checked_div(next).unwrap_or(0);
        self.width = next;
        for (index, step) in old.into_iter().enumerate() {
            let number = first.saturating_add(u64::try_from(index).unwrap_or(u64::MAX));
            let at = self.place(number.saturating_mul(width));
            while at >= self.steps.len() {
                self.steps.push(self.step());
            }
            let Some(into) = self.steps.get_mut(at) else { continue };
            into.requests = into.requests.saturating_add(step.requests);
            for (into, from) in into.stopped.iter_mut().zip(step.stopped) {
                *into = into.saturating_add(from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_steps_loses_no_count_and_bounds_their_number() {
        let mut series = Series::new(2);
        // Ever larger gaps, so that the steps are merged several times, and a first second that is no multiple of any
        // width.
        let seconds: Vec<u64> = (0..50_000).map(|index| 1_431_857_103 + index * index / 40).collect();
        for second in &seconds {
            series.add(*second, second.is_multiple_of(3).then_some(1));
        }
        let steps: Vec<(u64, &Step)> = series.steps().collect();
        assert!(steps.len() <= MAX_STEPS && steps.len() > MAX_STEPS / 20, "{}", steps.len());
        for (start, step) in &steps {
            let own = seconds.iter().filter(|second| (*start..*start + series.width()).contains(second));
            assert_eq!(step.requests, u64::try_from(own.clone().count()).unwrap());
            let third = own.filter(|second| second.is_multiple_of(3)).count();
            assert_eq!(step.stopped, [0, u64::try_from(third).unwrap()]);
        }
    }

    #[test]
    fn a_gap_of_decades_makes_the_steps_wider() {
        let mut series = Series::new(1);
        series.add(0, None);
        series.add(9_000_000_000, Some(0));
        assert!(series.steps().len() <= MAX_STEPS);
        assert_eq!(series.steps().map(|(_, step)| step.requests).sum::<u64>(), 2);
    }
}
