//! Metrics of limiters for Prometheus, as OpenMetrics text.
//!
//! Labels come from the policy and from fixed lists, never from a request, so that no caller can add a series.
//!
//! ```
//! # use std::sync::Arc;
//! use threshold_limiter::metrics::Metrics;
//! use threshold_limiter::{Facts, Limiter, Policy};
//!
//! let metrics = Metrics::new();
//! let policy = Policy::parse("[[rule]]\nname = 'posts'\nper = ['user']\nlimit = '1/h'", &|_| None)?;
//! let limiter = Arc::new(Limiter::builder(policy).observer(metrics.observer()).build());
//! metrics.watch(&limiter);
//! limiter.check(&Facts { user: Some("u1"), ..Facts::default() })?;
//! assert!(metrics.text().contains(r#"threshold_decisions_total{layer="user",rule="posts",verdict="allow"} 1"#));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod encode;
mod shards;
mod totals;
mod watched;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::registry::Registry;
use threshold_core::Verdict;
use threshold_core::decision::Degraded;
use threshold_core::policy::{Mode, Policy, TokenError};

use crate::observer::{
    ObservedDecision, ObservedOperation, Observer, Operation, OperationResult, Refused, TokenRefused,
};
use shards::{RuleCounts, Series, Shard, Shards, VERDICTS, own_shard};
pub use totals::Totals;
use watched::Watched;

/// The metrics of one or more limiters. A clone refers to the same counters.
#[derive(Debug, Clone, Default)]
pub struct Metrics(Arc<Counts>);

impl Metrics {
    /// Creates metrics that are all zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the observer that counts, for [`LimiterBuilder::observer`](crate::LimiterBuilder::observer).
    #[must_use]
    pub fn observer(&self) -> Arc<dyn Observer> {
        Arc::<Counts>::clone(&self.0)
    }

    /// Counts a decision that was marked as degraded after observers had heard of it: its strike was not saved in time.
    pub fn count_degraded(&self, reason: Degraded) {
        if let Some(shard) = self.0.shards.own(own_shard()) {
            shard.count_degraded(reason);
        }
    }

    /// Adds the metrics to a registry of your own. Their names begin with `threshold_`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register_collector(Box::new(Arc::clone(&self.0)));
    }

    /// Returns all metrics as OpenMetrics text, of the media type `application/openmetrics-text; version=1.0.0; charset=utf-8`.
    #[must_use]
    pub fn text(&self) -> String {
        let mut registry = Registry::default();
        self.register(&mut registry);
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
        text
    }
}

/// The counters, which are updated as an observer.
#[derive(Default)]
struct Counts {
    shards: Shards,
    refused: AtomicU64,
    tokens_refused: [AtomicU64; TokenError::ALL.len()],
    returns_lost: AtomicU64,
    rules: Mutex<Rules>,
    watched: Watched,
}

/// The counts by layer and rule, in the order in which they are written.
#[derive(Debug, Clone, Default)]
struct Rules {
    /// The newest policy so far; `None` before the first decision.
    generation: Option<u64>,
    counts: BTreeMap<(&'static str, String), Arc<RuleCounts>>,
    /// Those that only observe.
    observing: BTreeSet<(&'static str, String)>,
    /// The decisions by rules that later policies do not have.
    removed: [u64; VERDICTS.len()],
}

impl Observer for Counts {
    fn decided(&self, observed: &ObservedDecision<'_>) {
        let &ObservedDecision { operation, decision, policy, elapsed, in_store, .. } = observed;
        let thread = own_shard();
        let Some(shard) = self.shards.own(thread) else { return };
        let result = if decision.allowed() { OperationResult::Done } else { OperationResult::Denied };
        shard.count_operation(operation, result);
        // Nothing was asked of the store for a request that a list allows or bans.
        if !in_store.is_zero() {
            shard.store.observe(in_store);
        }
        // A peek stops nobody.
        if operation == Operation::Peek {
            return;
        }
        shard.decision.observe(elapsed);
        let mut series = shard.series();
        // Looking up a series by its name takes a lock that all threads share. It is done once for each policy, not for each decision.
        if series.generation != Some(policy.generation()) {
            drop(series);
            shard.set_series(self.series_of(policy));
            series = shard.series();
        }
        let bound = decision.bound_by().and_then(|reading| series.rules.get(reading.rule()));
        bound.unwrap_or(&series.unbound).count(thread, decision.verdict);
        if series.observes {
            count_observed(thread, &series, observed);
        }
        if decision.verdict != Verdict::Allow || decision.degraded.is_some() {
            count_unusual(shard, observed);
        }
    }

    fn performed(&self, performed: &ObservedOperation) {
        let Some(shard) = self.shards.own(own_shard()) else { return };
        shard.count_operation(performed.operation, performed.result);
        shard.store.observe(performed.elapsed);
        if let Some(reason) = performed.degraded {
            shard.count_degraded(reason);
        }
        if let OperationResult::Failed(_) = performed.result {
            shard.store_errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn refused(&self, _: Refused<'_>, _: &Policy) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    fn token_refused(&self, refused: TokenRefused, _: &Policy) {
        let place = TokenError::ALL.iter().position(|own| *own == refused.reason);
        if let Some(counter) = place.and_then(|place| self.tokens_refused.get(place)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn return_lost(&self) {
        self.returns_lost.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts what only some decisions have. Out of the way of the others.
#[inline(never)]
fn count_unusual(shard: &Shard, &ObservedDecision { decision, facts, policy, .. }: &ObservedDecision<'_>) {
    // By layer as well, so that an alert on blocks needs no list of the policy's rules.
    if !decision.allowed() {
        shard.count_block(decision.blocked_layer(policy));
    }
    if decision.verdict == Verdict::Warn {
        shard.warnings.fetch_add(1, Ordering::Relaxed);
    }
    if facts.user.is_some() && decision.escalations.iter().any(|strike| strike.banned_until.is_some()) {
        shard.user_bans.fetch_add(1, Ordering::Relaxed);
    }
    if let Some(reason) = decision.degraded {
        shard.count_degraded(reason);
    }
}

/// Counts what rules that only observe would have denied. Policies without such rules do not come here.
#[inline(never)]
fn count_observed(
    thread: usize,
    series: &Series,
    &ObservedDecision { operation, decision, .. }: &ObservedDecision<'_>,
) {
    // What is recorded has happened, and is never denied.
    if operation == Operation::Record {
        return;
    }
    for reading in decision.readings.iter().filter(|reading| !reading.enforced && !reading.allowed) {
        if let Some(counts) = series.rules.get(reading.rule()) {
            counts.count_observed(thread);
        }
    }
}

impl Counts {
    /// Returns the series of a policy. Those of rules that a newer policy does not have are removed: otherwise each reload with new
    /// names would add some.
    #[cold]
    fn series_of(&self, policy: &Policy) -> Series {
        let mut rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        let Rules { generation, counts, observing, removed } = &mut *rules;
        let observed = || policy.rules().iter().filter(|rule| rule.mode == Mode::Observe);
        let is_newest = generation.is_none_or(|newest| newest <= policy.generation());
        if is_newest {
            *generation = Some(policy.generation());
            let stays = |layer: &str, name: &str| {
                layer == "none" || policy.rules().iter().any(|rule| (rule.layer.name(), &*rule.name) == (layer, name))
            };
            counts.retain(|(layer, name), own| {
                let stays = stays(layer, name);
                if !stays {
                    totals::add(removed, own.sums());
                }
                stays
            });
            *observing = observed().map(|rule| (rule.layer.name(), rule.name.to_string())).collect();
        }
        let mut counts_of = |layer: &'static str, rule: &str| {
            let known = counts.get(&(layer, rule.to_owned())).cloned();
            // A request that was decided under the old policy may be counted after the reload. It must not bring back a series.
            known.unwrap_or_else(|| {
                let new = Arc::<RuleCounts>::default();
                if is_newest {
                    counts.insert((layer, rule.to_owned()), Arc::clone(&new));
                }
                new
            })
        };
        Series {
            generation: Some(policy.generation()),
            observes: observed().next().is_some(),
            unbound: counts_of("none", ""),
            rules: policy.rules().iter().map(|rule| counts_of(rule.layer.name(), &rule.name)).collect(),
        }
    }
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counts").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
