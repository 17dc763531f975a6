//! Series for charts: what was decided over five minutes, an hour and a day.
//!
//! A point is a second, ten seconds or five minutes. Memory is bounded, whatever the load.

use std::collections::VecDeque;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::Timestamp;
#[cfg(test)]
use threshold_core::Verdict;
use threshold_core::policy::Layer;
use threshold_limiter::histogram::HistogramReading;
use threshold_limiter::metrics::Totals;
use tokio::sync::watch;

/// A period, and the steps that it is divided into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChartPeriod {
    FiveMinutes,
    Hour,
    Day,
}

impl ChartPeriod {
    const ALL: [Self; 3] = [Self::FiveMinutes, Self::Hour, Self::Day];

    /// Returns the length of a step in seconds.
    const fn step(self) -> u64 {
        match self {
            Self::FiveMinutes => 1,
            Self::Hour => 10,
            Self::Day => 300,
        }
    }

    /// Returns the number of steps.
    const fn steps(self) -> usize {
        match self {
            Self::FiveMinutes => 300,
            Self::Hour => 360,
            Self::Day => 288,
        }
    }

    const fn place(self) -> usize {
        match self {
            Self::FiveMinutes => 0,
            Self::Hour => 1,
            Self::Day => 2,
        }
    }
}

/// The decisions of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Step {
    /// The number of the step since 1970.
    number: u64,
    verdicts: [u64; 5],
    blocks: [u64; 5],
    degraded: u64,
    store_errors: u64,
    keys: u64,
    decision: HistogramReading,
}

impl Step {
    fn add(&mut self, other: &Self) {
        for (own, other) in self.verdicts.iter_mut().zip(other.verdicts) {
            *own = own.saturating_add(other);
        }
        for (own, other) in self.blocks.iter_mut().zip(other.blocks) {
            *own = own.saturating_add(other);
        }
        self.degraded = self.degraded.saturating_add(other.degraded);
        self.store_errors = self.store_errors.saturating_add(other.store_errors);
        self.keys = other.keys;
        self.decision.add(&other.decision);
    }
}

/// The steps of all periods.
#[derive(Debug)]
pub(crate) struct SeriesBook {
    before: Option<Totals>,
    steps: [VecDeque<Step>; 3],
    /// The newest second, for those who follow.
    newest: watch::Sender<Option<Sample>>,
}

impl Default for SeriesBook {
    fn default() -> Self {
        Self { before: None, steps: std::array::from_fn(|_| VecDeque::new()), newest: watch::Sender::new(None) }
    }
}

impl SeriesBook {
    /// Adds what was decided since the last call, as of `now`. To be called each second.
    pub(crate) fn add(&mut self, totals: &Totals, keys: u64, now: Timestamp) {
        let before = self.before.replace(*totals);
        // The first reading has all since the start of the process, which may be long ago: it is only what others are compared with.
        let Some(before) = before else { return };
        let step = difference(totals, &before, keys);
        let seconds = now.micros().checked_div(1_000_000).unwrap_or(0);
        for period in ChartPeriod::ALL {
            let number = seconds.checked_div(period.step()).unwrap_or(0);
            let Some(steps) = self.steps.get_mut(period.place()) else { continue };
            // A clock that was set back adds to the newest step.
            match steps.back_mut().filter(|newest| newest.number >= number) {
                Some(newest) => newest.add(&step),
                None => {
                    // A step in which nothing was measured, such as while the machine slept, is one without decisions.
                    let first = steps.back().map_or(number, |newest| newest.number.saturating_add(1));
                    let oldest =
                        number.saturating_sub(u64::try_from(period.steps()).unwrap_or(u64::MAX).saturating_sub(1));
                    steps.extend((first.max(oldest)..number).map(|number| Step { number, keys, ..Step::default() }));
                    steps.push_back(Step { number, ..step });
                }
            }
            let surplus = steps.len().saturating_sub(period.steps());
            steps.drain(..surplus);
        }
        let newest = self.steps.first().and_then(VecDeque::back);
        self.newest.send_replace(newest.map(|newest| Sample::new(newest, ChartPeriod::FiveMinutes)));
    }

    /// Returns the steps of a period, the newest last.
    pub(crate) fn series(&self, period: ChartPeriod) -> Series {
        let steps = self.steps.get(period.place()).into_iter().flatten();
        let samples: Vec<Sample> = steps.map(|step| Sample::new(step, period)).collect();
        let of = |value: fn(&Sample) -> u64| samples.iter().map(value).collect();
        let time = |value: fn(&Sample) -> Option<f64>| samples.iter().map(value).collect();
        Series {
            step_sec: period.step(),
            times: of(|sample| sample.at),
            decisions: ByVerdict {
                allow: of(|sample| sample.decisions.allow),
                warn: of(|sample| sample.decisions.warn),
                slow: of(|sample| sample.decisions.slow),
                deny: of(|sample| sample.decisions.deny),
                ban: of(|sample| sample.decisions.ban),
            },
            blocks: ByLayer {
                edge: of(|sample| sample.blocks.edge),
                tenant: of(|sample| sample.blocks.tenant),
                user: of(|sample| sample.blocks.user),
                endpoint: of(|sample| sample.blocks.endpoint),
                other: of(|sample| sample.blocks.other),
            },
            degraded: of(|sample| sample.degraded),
            store_errors: of(|sample| sample.store_errors),
            keys: of(|sample| sample.keys),
            p50: time(|sample| sample.p50),
            p99: time(|sample| sample.p99),
        }
    }

    /// Returns what tells of each new second.
    pub(crate) fn newest(&self) -> watch::Receiver<Option<Sample>> {
        self.newest.subscribe()
    }
}

fn difference(totals: &Totals, before: &Totals, keys: u64) -> Step {
    let verdict = |place: usize| {
        let of = |totals: &Totals| totals.verdicts.get(place).map_or(0, |(_, count)| *count);
        of(totals).saturating_sub(of(before))
    };
    let blocks_of = |wanted: &dyn Fn(Option<Layer>) -> bool| {
        let sum = |totals: &Totals| -> u64 {
            totals.blocks.iter().filter(|(layer, _)| wanted(*layer)).map(|(_, count)| *count).sum()
        };
        sum(totals).saturating_sub(sum(before))
    };
    let is_other = |layer: Option<Layer>| matches!(layer, None | Some(Layer::Global));
    Step {
        number: 0,
        verdicts: std::array::from_fn(verdict),
        blocks: [
            blocks_of(&|layer| layer == Some(Layer::Edge)),
            blocks_of(&|layer| layer == Some(Layer::Tenant)),
            blocks_of(&|layer| layer == Some(Layer::User)),
            blocks_of(&|layer| layer == Some(Layer::Endpoint)),
            blocks_of(&is_other),
        ],
        degraded: totals.degraded.saturating_sub(before.degraded),
        store_errors: totals.store_errors.saturating_sub(before.store_errors),
        keys,
        decision: totals.decision.since(&before.decision),
    }
}

/// Counts by verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "ByVerdict")]
pub(crate) struct ByVerdict<T> {
    allow: T,
    warn: T,
    slow: T,
    deny: T,
    ban: T,
}

/// Blocks by layer, as `/v1/stats` counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "ByLayer")]
pub(crate) struct ByLayer<T> {
    edge: T,
    tenant: T,
    user: T,
    endpoint: T,
    other: T,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Sample {
    /// When it began, in milliseconds.
    at: u64,
    decisions: ByVerdict<u64>,
    blocks: ByLayer<u64>,
    /// The decisions that were made without all that they need.
    degraded: u64,
    /// How often the store failed.
    store_errors: u64,
    /// The keys in memory at its end.
    keys: u64,
    /// The time that half of the decisions did not exceed, in seconds; null without decisions.
    p50: Option<f64>,
    /// The time that 99 % of the decisions did not exceed.
    p99: Option<f64>,
}

impl Sample {
    fn new(step: &Step, period: ChartPeriod) -> Self {
        let quantile = |share| step.decision.quantile(share).map(|time: Duration| time.as_secs_f64());
        let [allow, warn, slow, deny, ban] = step.verdicts;
        let [edge, tenant, user, endpoint, other] = step.blocks;
        Self {
            at: step.number.saturating_mul(period.step()).saturating_mul(1_000),
            decisions: ByVerdict { allow, warn, slow, deny, ban },
            blocks: ByLayer { edge, tenant, user, endpoint, other },
            degraded: step.degraded,
            store_errors: step.store_errors,
            keys: step.keys,
            p50: quantile(0.5),
            p99: quantile(0.99),
        }
    }
}

/// The steps of a period, the newest last: each list has one value for each step.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Series {
    /// The length of a step in seconds.
    step_sec: u64,
    /// When each step began, in milliseconds.
    times: Vec<u64>,
    decisions: ByVerdict<Vec<u64>>,
    blocks: ByLayer<Vec<u64>>,
    degraded: Vec<u64>,
    store_errors: Vec<u64>,
    keys: Vec<u64>,
    p50: Vec<Option<f64>>,
    p99: Vec<Option<f64>>,
}

/// The order of [`Step::verdicts`], which is that of [`Totals::verdicts`].
#[cfg(test)]
const VERDICTS: [Verdict; 5] = [Verdict::Allow, Verdict::Warn, Verdict::Slow, Verdict::Deny, Verdict::Ban];

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use threshold_limiter::metrics::Metrics;
    use threshold_limiter::{Facts, Limiter, Policy};

    use super::*;

    const START: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn at(seconds: u64) -> Timestamp {
        START.plus(threshold_core::Span::from_secs(seconds))
    }

    /// Woken by counting totals in place of differences, or by a wrong step.
    #[test]
    fn each_step_has_the_decisions_of_its_time_and_all_periods_have_the_same_sums() {
        let metrics = Metrics::new();
        let policy = "[[rule]]\nname = 'posts'\nlayer = 'user'\nper = ['user']\nlimit = '2/h'";
        let limiter = Limiter::builder(Policy::parse(policy, &|_| None).unwrap()).observer(metrics.observer()).build();
        let limiter = Arc::new(limiter);
        assert_eq!(metrics.totals().verdicts.map(|(verdict, _)| verdict), VERDICTS);
        let mut book = SeriesBook::default();
        let check = |user: &str| limiter.check(&Facts { user: Some(user), ..Facts::default() }).unwrap();
        // Before the first reading: no step shows them.
        let _ = check("u0");
        book.add(&metrics.totals(), 1, at(0));
        let mut newest = book.newest();
        for second in 1..=25 {
            (0..3).for_each(|_| drop(check(&format!("u{second}"))));
            book.add(&metrics.totals(), second, at(second));
        }
        assert!(newest.has_changed().unwrap());
        let sample = newest.borrow_and_update().unwrap();
        assert_eq!((sample.decisions.allow, sample.decisions.deny, sample.blocks.user, sample.keys), (2, 1, 1, 25));
        assert!(sample.p50.is_some());
        for (period, steps) in [(ChartPeriod::FiveMinutes, 25), (ChartPeriod::Hour, 3), (ChartPeriod::Day, 1)] {
            let series = book.series(period);
            assert_eq!(series.times.len(), steps, "{period:?}");
            assert_eq!(series.decisions.allow.iter().sum::<u64>(), 50, "{period:?}");
            assert_eq!(series.blocks.user.iter().sum::<u64>(), 25, "{period:?}");
            assert_eq!(series.keys.last(), Some(&25));
        }
        // A second without a reading is a step without decisions.
        book.add(&metrics.totals(), 25, at(28));
        assert_eq!(book.series(ChartPeriod::FiveMinutes).times.len(), 28);
        assert_eq!(book.series(ChartPeriod::FiveMinutes).decisions.allow.iter().sum::<u64>(), 50);
    }

    /// Woken by leaving out `drain`.
    #[test]
    fn memory_is_bounded_and_a_clock_that_jumps_does_no_harm() {
        let totals = Metrics::new().totals();
        let mut book = SeriesBook::default();
        for second in 0..4_000 {
            book.add(&totals, 0, at(second));
        }
        let sizes = |book: &SeriesBook| ChartPeriod::ALL.map(|period| book.series(period).times.len());
        assert_eq!(sizes(&book), [300, 360, 14]);
        book.add(&totals, 0, at(2_000));
        book.add(&totals, 0, Timestamp::MAX);
        assert_eq!(sizes(&book), [300, 360, 288]);
        book.add(&totals, 0, START);
        assert_eq!(sizes(&book), [300, 360, 288]);
    }
}
