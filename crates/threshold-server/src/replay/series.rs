//! Counts over time in a bounded number of steps: when there are too many, neighbours become one.

/// The most steps: more than a screen has columns.
const MAX_STEPS: usize = 2_000;
/// Steps that people count in, in seconds; each is a multiple of the one before. Beyond a day they double.
const WIDTHS: [u64; 13] = [1, 5, 15, 30, 60, 300, 900, 1_800, 3_600, 10_800, 21_600, 43_200, 86_400];

/// What happened in one step: how many requests, and how many each rule stopped.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) requests: u64,
    /// By the rule's place, and in the last place what penalties and lists stopped.
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
    /// For so many reasons to be stopped.
    pub(crate) fn new(reasons: usize) -> Self {
        Self { width: 1, first: 0, steps: Vec::new(), reasons }
    }

    /// One request at this second, and why it was stopped. Seconds never go backwards.
    #[inline]
    pub(crate) fn add(&mut self, second: u64, stopped: Option<usize>) {
        if self.steps.is_empty() {
            self.first = second;
            self.steps.push(self.step());
        }
        let mut at = self.place(second);
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

    /// Each step with the second at which it begins.
    pub(crate) fn steps(&self) -> impl ExactSizeIterator<Item = (u64, &Step)> {
        let (first, width) = (self.first, self.width);
        self.steps.iter().enumerate().map(move |(index, step)| {
            let number = first.saturating_add(u64::try_from(index).unwrap_or(u64::MAX));
            (number.saturating_mul(width), step)
        })
    }

    /// How long a step is, in seconds.
    pub(crate) fn width(&self) -> u64 {
        self.width
    }

    fn step(&self) -> Step {
        Step { requests: 0, stopped: vec![0; self.reasons] }
    }

    fn place(&self, second: u64) -> usize {
        let number = second.checked_div(self.width).unwrap_or(0);
        usize::try_from(number.saturating_sub(self.first)).unwrap_or(usize::MAX)
    }

    #[cold]
    fn coarsen(&mut self) {
        let next = WIDTHS.into_iter().find(|width| *width > self.width);
        let next = next.unwrap_or_else(|| self.width.saturating_mul(2));
        let old = std::mem::take(&mut self.steps);
        let (first, width) = (self.first, self.width);
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
    fn nothing_is_lost_and_the_number_of_steps_is_bounded() {
        let mut series = Series::new(2);
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
    fn a_leap_of_decades_is_only_a_coarser_series() {
        let mut series = Series::new(1);
        series.add(0, None);
        series.add(9_000_000_000, Some(0));
        assert!(series.steps().len() <= MAX_STEPS);
        assert_eq!(series.steps().map(|(_, step)| step.requests).sum::<u64>(), 2);
    }
}
