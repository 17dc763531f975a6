//! The counters that every decision adds to, in parts by thread.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use threshold_core::Verdict;
use threshold_core::decision::Degraded;
use threshold_core::policy::Layer;

use crate::histogram::{Histogram, HistogramReading};
use crate::observer::{Operation, OperationResult};

/// The number of parts. Threads that share a part still count exactly, they only take turns at a cache line.
pub(super) const SHARDS: usize = 8;

/// The layers by which blocks are counted, and none for decisions without a binding rule.
pub(super) const LAYERS: [Option<Layer>; 6] =
    [None, Some(Layer::Global), Some(Layer::Edge), Some(Layer::Tenant), Some(Layer::User), Some(Layer::Endpoint)];
pub(super) const VERDICTS: [Verdict; 5] = [Verdict::Allow, Verdict::Warn, Verdict::Slow, Verdict::Deny, Verdict::Ban];
/// The names of [`OperationResult`].
pub(super) const RESULTS: [&str; 4] = ["done", "denied", "rejected", "failed"];

/// The counters of some threads. Aligned to two cache lines, which processors fetch together, so that no other part shares them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Shard {
    pub(super) decision: Histogram,
    pub(super) store: Histogram,
    operations: [[AtomicU64; RESULTS.len()]; Operation::ALL.len()],
    blocks: [AtomicU64; LAYERS.len()],
    degraded: [AtomicU64; Degraded::ALL.len()],
    pub(super) warnings: AtomicU64,
    pub(super) user_bans: AtomicU64,
    pub(super) store_errors: AtomicU64,
    /// The series of the last policy that one of these threads has decided under.
    series: RwLock<Series>,
}

/// The counts of one policy's decisions.
#[derive(Debug, Default)]
pub(super) struct Series {
    /// `None` before the first decision.
    pub(super) generation: Option<u64>,
    /// Whether a rule of the policy only observes.
    pub(super) observes: bool,
    /// By the rule's index in the policy.
    pub(super) rules: Vec<Arc<RuleCounts>>,
    /// For decisions without a binding rule: allow-listed, banned by an operator, or matched by no rule.
    pub(super) unbound: Arc<RuleCounts>,
}

impl Shard {
    #[inline]
    pub(super) fn count_operation(&self, operation: Operation, result: OperationResult) {
        let result = match result {
            OperationResult::Done => 0,
            OperationResult::Denied => 1,
            OperationResult::Rejected => 2,
            OperationResult::Failed(_) => 3,
        };
        if let Some(counter) = self.operations.get(operation.place()).and_then(|own| own.get(result)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the series. Only a few threads share the lock, and it is written when the policy changes.
    #[inline]
    pub(super) fn series(&self) -> RwLockReadGuard<'_, Series> {
        self.series.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_series(&self, series: Series) {
        *self.series.write().unwrap_or_else(PoisonError::into_inner) = series;
    }

    pub(super) fn count_block(&self, layer: Option<Layer>) {
        let place = LAYERS.iter().position(|own| *own == layer);
        if let Some(counter) = place.and_then(|place| self.blocks.get(place)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[cold]
    pub(super) fn count_degraded(&self, reason: Degraded) {
        let place = Degraded::ALL.iter().position(|own| *own == reason);
        if let Some(counter) = place.and_then(|place| self.degraded.get(place)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        // The other reasons are no failures of the store.
        if matches!(reason, Degraded::Timeout | Degraded::StoreError | Degraded::StoreFull) {
            self.store_errors.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// All parts.
#[derive(Debug, Default)]
pub(super) struct Shards([Shard; SHARDS]);

impl Shards {
    /// Returns the part of the current thread.
    #[inline]
    pub(super) fn own(&self, thread: usize) -> Option<&Shard> {
        self.0.get(thread)
    }

    pub(super) fn sum(&self, of: impl Fn(&Shard) -> &AtomicU64) -> u64 {
        self.0.iter().map(|shard| of(shard).load(Ordering::Relaxed)).sum()
    }

    pub(super) fn histogram(&self, of: impl Fn(&Shard) -> &Histogram) -> HistogramReading {
        let mut sum = HistogramReading::default();
        self.0.iter().for_each(|shard| sum.add(&of(shard).read()));
        sum
    }

    /// Returns the counts of an operation by result.
    pub(super) fn operation(&self, operation: Operation) -> [u64; RESULTS.len()] {
        let count = |shard: &Shard, result| shard.operations.get(operation.place()).map_or(0, |own| load(own, result));
        std::array::from_fn(|result| self.0.iter().map(|shard| count(shard, result)).sum())
    }

    /// Returns the blocks by layer.
    pub(super) fn blocks(&self) -> [u64; LAYERS.len()] {
        std::array::from_fn(|place| self.0.iter().map(|shard| load(&shard.blocks, place)).sum())
    }

    /// Returns the degraded decisions by reason.
    pub(super) fn degraded(&self) -> [u64; Degraded::ALL.len()] {
        std::array::from_fn(|place| self.0.iter().map(|shard| load(&shard.degraded, place)).sum())
    }
}

/// The counts of one rule, in parts as above. A part takes one cache line.
#[derive(Debug, Default)]
pub(super) struct RuleCounts([RuleShard; SHARDS]);

#[derive(Debug, Default)]
#[repr(align(64))]
struct RuleShard {
    verdicts: [AtomicU64; VERDICTS.len()],
    /// What the rule would have denied if it were enforced.
    observed: AtomicU64,
}

impl RuleCounts {
    #[inline]
    pub(super) fn count(&self, thread: usize, verdict: Verdict) {
        let place = match verdict {
            Verdict::Allow => 0,
            Verdict::Warn => 1,
            Verdict::Slow => 2,
            Verdict::Deny => 3,
            Verdict::Ban => 4,
        };
        if let Some(counter) = self.0.get(thread).and_then(|shard| shard.verdicts.get(place)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn count_observed(&self, thread: usize) {
        if let Some(shard) = self.0.get(thread) {
            shard.observed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the counts by verdict.
    pub(super) fn sums(&self) -> [u64; VERDICTS.len()] {
        std::array::from_fn(|place| self.0.iter().map(|shard| load(&shard.verdicts, place)).sum())
    }

    /// Returns what the rule would have denied if it were enforced.
    pub(super) fn observed(&self) -> u64 {
        self.0.iter().map(|shard| shard.observed.load(Ordering::Relaxed)).sum()
    }
}

fn load(counters: &[AtomicU64], place: usize) -> u64 {
    counters.get(place).map_or(0, |own| own.load(Ordering::Relaxed))
}

/// Returns the number of the current thread's part.
#[inline]
pub(super) fn own_shard() -> usize {
    // `const`, so that reading it needs no check whether it was initialized.
    thread_local!(static OWN: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) });
    // Nothing is counted while a thread ends and its variables are gone; the first part will do.
    OWN.try_with(|own| if own.get() == usize::MAX { choose(own) } else { own.get() }).unwrap_or(0)
}

#[cold]
fn choose(own: &std::cell::Cell<usize>) -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    own.set(THREADS.fetch_add(1, Ordering::Relaxed).checked_rem(SHARDS).unwrap_or(0));
    own.get()
}
