//! Writes the counters as OpenMetrics.

use std::fmt::Error;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet};
use prometheus_client::metrics::MetricType;
use threshold_core::decision::Degraded;
use threshold_core::policy::{Layer, TokenError};

use super::Counts;
use super::shards::{LAYERS, RESULTS, VERDICTS};
use crate::histogram::HistogramReading;
use crate::observer::Operation;

/// The labels of one series, and its value.
type Labelled<'l, const N: usize> = ([(&'l str, &'l str); N], u64);

/// Writes metrics one after the other.
pub(super) struct Encoder<'e>(pub(super) DescriptorEncoder<'e>);

impl Encoder<'_> {
    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        metric.encode_counter::<NoLabelSet, _, u64>(&value, None)
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.0.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
    }

    /// Writes a counter with a series for each set of labels.
    pub(super) fn counters<'l, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = Labelled<'l, N>>,
    ) -> Result<(), Error>
    where
        [(&'l str, &'l str); N]: EncodeLabelSet,
    {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in series {
            metric.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
        }
        Ok(())
    }

    pub(super) fn histogram(&mut self, name: &str, help: &str, reading: &HistogramReading) -> Result<(), Error> {
        // The encoder writes it as +Inf.
        let seconds = |bound: Option<std::time::Duration>| bound.map_or(f64::INFINITY, |bound| bound.as_secs_f64());
        let buckets: Vec<_> = reading.buckets().map(|(bound, count)| (seconds(bound), count)).collect();
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(reading.sum().as_secs_f64(), reading.count(), &buckets, None)
    }
}

impl Collector for Counts {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let mut encoder = Encoder(encoder);
        self.encode_decisions(&mut encoder)?;
        self.encode_operations(&mut encoder)?;
        self.watched.encode(&mut encoder)
    }
}

impl Counts {
    fn encode_decisions(&self, encoder: &mut Encoder<'_>) -> Result<(), Error> {
        let super::Rules { counts: rules, observing, .. } =
            self.rules.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let by_verdict = rules.iter().flat_map(|((layer, rule), counts)| {
            let series = move |(verdict, count): (&'static str, u64)| {
                ([("layer", *layer), ("rule", rule.as_str()), ("verdict", verdict)], count)
            };
            VERDICTS.map(threshold_core::Verdict::name).into_iter().zip(counts.sums()).map(series)
        });
        encoder.counters("threshold_decisions", "Decisions, by the rule that bound them", by_verdict)?;
        let observed = rules
            .iter()
            .filter(|(rule, _)| observing.contains(*rule))
            .map(|((layer, rule), counts)| ([("layer", *layer), ("rule", rule.as_str())], counts.observed()));
        let help = "Requests that a rule with mode = \"observe\" would have denied";
        encoder.counters("threshold_observed", help, observed)?;
        let layers = LAYERS.map(|layer| layer.map_or("none", Layer::name));
        let by_layer = layers.into_iter().zip(self.shards.blocks()).map(|(layer, count)| ([("layer", layer)], count));
        encoder.counters("threshold_blocks", "Requests that were denied or banned, by layer", by_layer)?;
        let count = |of: fn(&super::Shard) -> &std::sync::atomic::AtomicU64| self.shards.sum(of);
        let warnings = count(|shard| &shard.warnings);
        encoder.counter("threshold_warnings", "Requests that were let through with a warning", warnings)?;
        let bans = count(|shard| &shard.user_bans);
        encoder.counter("threshold_user_bans", "Requests of users whose strike brought a ban", bans)?;
        let reasons = Degraded::ALL.map(Degraded::name).into_iter().zip(self.shards.degraded());
        let degraded = reasons.map(|(reason, count)| ([("reason", reason)], count));
        encoder.counters("threshold_degraded", "Decisions without all that they need, by reason", degraded)?;
        let refused = self.refused.load(Ordering::Relaxed);
        encoder.counter("threshold_refused", "Requests that client doors refused undecided", refused)?;
        let reasons = TokenError::ALL.map(TokenError::name).into_iter().zip(&self.tokens_refused);
        let tokens = reasons.map(|(reason, count)| ([("reason", reason)], count.load(Ordering::Relaxed)));
        encoder.counters("threshold_tokens_refused", "Bearer tokens that did not verify, by reason", tokens)
    }

    fn encode_operations(&self, encoder: &mut Encoder<'_>) -> Result<(), Error> {
        let operations = Operation::ALL.iter().flat_map(|operation| {
            let series = |(result, count)| ([("operation", operation.name()), ("result", result)], count);
            RESULTS.into_iter().zip(self.shards.operation(*operation)).map(series)
        });
        encoder.counters("threshold_operations", "What limiters were asked for, and how it ended", operations)?;
        let decision = self.shards.histogram(|shard| &shard.decision);
        encoder.histogram("threshold_decision_seconds", "How long decisions took", &decision)?;
        let store = self.shards.histogram(|shard| &shard.store);
        encoder.histogram("threshold_store_seconds", "How long decisions and operations took in the store", &store)?;
        let errors = self.shards.sum(|shard| &shard.store_errors);
        encoder.counter("threshold_store_errors", "Decisions and operations that the store failed", errors)?;
        let lost = self.returns_lost.load(Ordering::Relaxed);
        encoder.counter("threshold_returns_lost", "Requests whose refunds an asynchronous store did not receive", lost)
    }
}
