//! A decision as callers read it.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Serialize, Serializer};
use threshold_core::decision::{Degraded, Reading};
use threshold_core::policy::{Layer, Policy};
use threshold_core::{Decision, Span, TraceId};

use super::schema;
use crate::desk::Decided;

/// What a request is told.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Decision")]
pub(super) struct Answer<'a> {
    /// Whether it may cross.
    allowed: bool,
    #[schemars(schema_with = "schema::verdict")]
    verdict: &'static str,
    /// The rule that binds; null if none does.
    rule: Option<&'a str>,
    /// The layer of that rule, or of the penalty that denied.
    #[schemars(schema_with = "schema::layer")]
    layer: Option<&'static str>,
    limit: Option<u64>,
    /// The whole cost that fits now, after this request's charge.
    remaining: Option<u64>,
    /// When there is more, or all, again, in Unix seconds.
    reset_at: Option<u64>,
    /// If denied: seconds until it is worth coming back; null if it never is.
    retry_after: Option<u64>,
    retry_after_ms: Option<u64>,
    /// How long to wait before the request goes on. Do not tell its client.
    delay_ms: u64,
    warning: bool,
    banned: bool,
    /// Whether this was decided without the store.
    degraded: bool,
    degraded_reason: Option<&'static str>,
    /// What /v1/refund takes.
    receipt: Option<&'a str>,
    #[schemars(with = "String")]
    trace_id: Shown<TraceId>,
    /// What /v1/commit and /v1/release take.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    reservation: Option<Shown<TraceId>>,
    /// Every limit that was met.
    limits: Limits<'a>,
}

/// One limit that was met.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Reading")]
struct LimitAnswer<'a> {
    rule: Option<&'a str>,
    #[schemars(schema_with = "schema::layer")]
    layer: Option<&'static str>,
    #[schemars(extend("enum" = ["enforce", "observe"]))]
    mode: &'static str,
    allowed: bool,
    limit: u64,
    remaining: u64,
    reset_at: Option<u64>,
    retry_after: Option<u64>,
}

impl<'a> Answer<'a> {
    pub(super) fn new(decided: &'a Decided, policy: &'a Policy) -> Self {
        let decision = &decided.decision;
        let rule = decision.rule(policy);
        let reading = decision.bound_by();
        let wait = decision.retry_after();
        Self {
            allowed: decision.allowed(),
            verdict: decision.verdict.name(),
            rule: rule.map(|rule| rule.name.as_ref()),
            layer: rule.map(|rule| rule.layer).or(decision.penalty).map(Layer::name),
            limit: reading.map(|reading| reading.limit),
            remaining: reading.map(|reading| reading.remaining),
            reset_at: decision.reset_at(),
            retry_after: wait.map(Span::secs_ceil),
            retry_after_ms: wait.map(Span::millis_ceil),
            delay_ms: decision.delay.millis_ceil(),
            warning: decision.warning,
            banned: decision.banned(),
            degraded: decision.degraded.is_some(),
            degraded_reason: decision.degraded.map(Degraded::name),
            receipt: decided.receipt.as_deref(),
            trace_id: Shown(decision.trace),
            reservation: decided.reservation.map(Shown),
            limits: Limits { decision, policy },
        }
    }
}

/// Whether a decision is a refusal for want of the store, which is answered with 503.
pub(super) fn failed_closed(decision: &Decision) -> bool {
    decision.degraded.is_some() && !decision.allowed()
}

/// Something that is written as it is displayed.
#[derive(Debug)]
struct Shown<T>(T);

impl<T: std::fmt::Display> Serialize for Shown<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

/// The limits of a decision, written without being gathered first.
#[derive(Debug)]
struct Limits<'a> {
    decision: &'a Decision,
    policy: &'a Policy,
}

impl Serialize for Limits<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.decision.readings.iter().map(|reading| self.one(reading)))
    }
}

impl Limits<'_> {
    fn one(&self, reading: &Reading) -> LimitAnswer<'_> {
        let rule = self.policy.rules().get(reading.rule);
        LimitAnswer {
            rule: rule.map(|rule| rule.name.as_ref()),
            layer: rule.map(|rule| rule.layer.name()),
            mode: if reading.enforced { "enforce" } else { "observe" },
            allowed: reading.allowed,
            limit: reading.limit,
            remaining: reading.remaining,
            reset_at: reading.reset_at(self.decision.at),
            retry_after: reading.ready_at.map(|ready| ready.since(self.decision.at).secs_ceil()),
        }
    }
}

impl JsonSchema for Limits<'_> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Readings".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        <Vec<LimitAnswer<'_>>>::json_schema(generator)
    }
}
