//! Makes a span of each operation of the limiter.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, SpanFlags, Status};
use threshold_core::TraceId;
use threshold_core::decision::Degraded;
use threshold_limiter::{ObservedDecision, ObservedOperation, Observer, OperationResult};

use super::parent::Parent;
use super::queue::SpanQueue;
use super::settings::Sampler;

/// The flag of a span that is recorded.
const SAMPLED: u32 = 1;

/// The observer that queues a record of each operation.
#[derive(Debug)]
pub(super) struct Spans {
    sampler: Sampler,
    queue: Arc<SpanQueue>,
}

/// An operation that has ended. It has no names of callers: a collector is outside of what `log_identifiers` governs.
#[derive(Debug, Default)]
pub(super) struct Record {
    parent: Option<Parent>,
    trace: u128,
    operation: &'static str,
    ended: Duration,
    elapsed: Duration,
    outcome: Outcome,
}

#[derive(Debug)]
enum Outcome {
    Decided(Decided),
    Performed(OperationResult),
}

#[derive(Debug)]
struct Decided {
    trace: TraceId,
    verdict: &'static str,
    /// The layer and the name of the binding rule.
    rule: Option<(&'static str, String)>,
    degraded: Option<&'static str>,
    generation: u64,
    in_store: Duration,
}

impl Default for Outcome {
    fn default() -> Self {
        Self::Performed(OperationResult::Done)
    }
}

impl Spans {
    pub(super) const fn new(sampler: Sampler, queue: Arc<SpanQueue>) -> Self {
        Self { sampler, queue }
    }

    /// Queues a record unless the sampler leaves it out. `own` is the trace of an operation without a parent.
    fn queue(
        &self,
        own: impl FnOnce() -> u128,
        operation: &'static str,
        elapsed: Duration,
        outcome: impl FnOnce() -> Outcome,
    ) {
        let parent = Parent::present();
        let trace = parent.as_ref().map_or_else(own, |parent| parent.trace);
        if !self.sampler.takes(parent.as_ref().map(|parent| parent.is_sampled), trace) {
            return;
        }
        let ended = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.queue.push(Record { parent, trace, operation, ended, elapsed, outcome: outcome() });
    }
}

impl Observer for Spans {
    fn decided(&self, decided: &ObservedDecision<'_>) {
        let &ObservedDecision { operation, decision, policy, elapsed, in_store, .. } = decided;
        // Without a parent, the trace that the caller was answered with.
        let own = || decision.trace.to_u128();
        self.queue(own, operation.name(), elapsed, || {
            Outcome::Decided(Decided {
                trace: decision.trace,
                verdict: decision.verdict.name(),
                rule: decision.rule(policy).map(|rule| (rule.layer.name(), rule.name.to_string())),
                degraded: decision.degraded.map(Degraded::name),
                generation: decision.generation,
                in_store,
            })
        });
    }

    fn performed(&self, performed: &ObservedOperation) {
        let &ObservedOperation { operation, result, elapsed, .. } = performed;
        self.queue(rand::random, operation.name(), elapsed, || Outcome::Performed(result));
    }
}

impl Record {
    /// Returns the span.
    pub(super) fn span(self) -> Span {
        let (attributes, is_error) = self.outcome.attributes(self.operation);
        let mut flags = SAMPLED | SpanFlags::ContextHasIsRemoteMask as u32;
        let (mut parent_span_id, mut trace_state) = (Vec::new(), String::new());
        if let Some(parent) = self.parent {
            flags |= SpanFlags::ContextIsRemoteMask as u32;
            parent_span_id = parent.span.to_be_bytes().into();
            trace_state = parent.state.to_string();
        }
        // The one value that is no id.
        let span_id: u64 = rand::random_range(1..=u64::MAX);
        let code = if is_error { StatusCode::Error } else { StatusCode::Unset };
        Span {
            trace_id: self.trace.to_be_bytes().into(),
            span_id: span_id.to_be_bytes().into(),
            trace_state,
            parent_span_id,
            flags,
            name: format!("threshold {}", self.operation),
            kind: SpanKind::Server.into(),
            start_time_unix_nano: nanos(self.ended.saturating_sub(self.elapsed)),
            end_time_unix_nano: nanos(self.ended),
            attributes,
            status: Some(Status { message: String::new(), code: code.into() }),
            ..Span::default()
        }
    }
}

impl Outcome {
    /// Returns the attributes, and whether the store failed.
    fn attributes(self, operation: &'static str) -> (Vec<KeyValue>, bool) {
        let mut attributes = vec![text("threshold.operation", operation)];
        match self {
            Self::Performed(result) => {
                attributes.push(text("threshold.result", result.name()));
                (attributes, matches!(result, OperationResult::Failed(_)))
            }
            Self::Decided(decided) => {
                attributes.push(text("threshold.trace_id", &decided.trace.to_string()));
                attributes.push(text("threshold.verdict", decided.verdict));
                if let Some((layer, rule)) = &decided.rule {
                    attributes.extend([text("threshold.layer", layer), text("threshold.rule", rule)]);
                }
                attributes.extend(decided.degraded.map(|reason| text("threshold.degraded", reason)));
                let generation = i64::try_from(decided.generation).unwrap_or(i64::MAX);
                attributes.push(attribute("threshold.policy_generation", any_value::Value::IntValue(generation)));
                let in_store = any_value::Value::DoubleValue(decided.in_store.as_secs_f64());
                attributes.push(attribute("threshold.store_seconds", in_store));
                (attributes, decided.degraded.is_some())
            }
        }
    }
}

/// Returns an attribute whose value is text.
pub(super) fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, any_value::Value::StringValue(value.to_owned()))
}

fn attribute(key: &str, value: any_value::Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

/// Returns a time in nanoseconds, as the messages have it.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
