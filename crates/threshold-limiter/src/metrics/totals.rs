//! The sums of the counters, for a program that shows them itself.

use std::sync::PoisonError;

use threshold_core::Verdict;
use threshold_core::policy::Layer;

use super::Metrics;
use super::shards::{LAYERS, VERDICTS};
use crate::histogram::HistogramReading;

/// The sums of all decisions so far. None of them ever falls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Totals {
    /// The decisions by verdict.
    pub verdicts: [(Verdict, u64); 5],
    /// The denied requests by layer; without one, those that a list or an operator's ban denied.
    pub blocks: [(Option<Layer>, u64); 6],
    /// The decisions that were made without all that they need.
    pub degraded: u64,
    /// How often the store failed.
    pub store_errors: u64,
    /// How long decisions took.
    pub decision: HistogramReading,
    /// How long decisions and operations took in the store.
    pub store: HistogramReading,
}

impl Metrics {
    /// Returns the sums of all decisions so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let counts = &*self.0;
        let rules = counts.rules.lock().unwrap_or_else(PoisonError::into_inner);
        let mut verdicts = rules.removed;
        rules.counts.values().for_each(|own| add(&mut verdicts, own.sums()));
        drop(rules);
        let blocks = counts.shards.blocks();
        Totals {
            verdicts: paired(VERDICTS, verdicts),
            blocks: paired(LAYERS, blocks),
            degraded: counts.shards.degraded().iter().sum(),
            store_errors: counts.shards.sum(|shard| &shard.store_errors),
            decision: counts.shards.histogram(|shard| &shard.decision),
            store: counts.shards.histogram(|shard| &shard.store),
        }
    }
}

/// Adds counts by verdict.
pub(super) fn add(sums: &mut [u64; VERDICTS.len()], counts: [u64; VERDICTS.len()]) {
    for (sum, count) in sums.iter_mut().zip(counts) {
        *sum = sum.wrapping_add(count);
    }
}

/// Pairs each name with its count.
fn paired<N, const LENGTH: usize>(names: [N; LENGTH], counts: [u64; LENGTH]) -> [(N, u64); LENGTH] {
    let mut counts = counts.into_iter();
    names.map(|name| (name, counts.next().unwrap_or(0)))
}
