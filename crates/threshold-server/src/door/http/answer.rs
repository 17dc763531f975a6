//! A decision as callers read it.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use threshold_core::decision::{Degraded, Reading};
use threshold_core::plan::MAX_CHARGES;
use threshold_core::policy::{Layer, Policy};
use threshold_core::{Decision, Span, TraceId};

use super::schema;
use super::write::{Any, IfAny, Json, Plain, json_object, write_list};
use crate::desk::Decided;

/// Bytes that most answers fit into: a decision with a receipt, and half a dozen limits.
pub(super) const USUAL_ANSWER: usize = 2_048;

/// The most bytes that the figures of one limit take, with its share of the receipt and without its name.
const LARGEST_READING: usize = 384;
/// The most bytes that the rest of an answer takes.
const LARGEST_REST: usize = 1_024;

/// The most bytes that an answer takes under a policy.
pub(super) fn largest_answer(policy: &Policy) -> usize {
    let longest = policy.rules().iter().map(|rule| rule.name.len()).max().unwrap_or(0);
    // A name may be escaped, character by character.
    let reading = longest.saturating_mul(2).saturating_add(LARGEST_READING);
    policy.rules().len().min(MAX_CHARGES).saturating_mul(reading).saturating_add(LARGEST_REST)
}

json_object! {
    /// What a request is told.
    #[schemars(rename = "Decision")]
    pub(super) struct Answer<'a> {
        /// Whether it may cross.
        "allowed" allowed: bool,
        #[schemars(schema_with = "schema::verdict")]
        "verdict" verdict: Plain<'a>,
        /// The rule that binds; null if none does.
        #[schemars(with = "Option<String>")]
        "rule" rule: Option<Any<'a>>,
        /// The layer of that rule, or of the penalty that denied.
        #[schemars(schema_with = "schema::layer")]
        "layer" layer: Option<Plain<'a>>,
        "limit" limit: Option<u64>,
        /// The whole cost that fits now, after this request's charge.
        "remaining" remaining: Option<u64>,
        /// When there is more, or all, again, in Unix seconds.
        "resetAt" reset_at: Option<u64>,
        /// If denied: seconds until it is worth coming back; null if it never is.
        "retryAfter" retry_after: Option<u64>,
        "retryAfterMs" retry_after_ms: Option<u64>,
        /// How long to wait before the request goes on. Do not tell its client.
        "delayMs" delay_ms: u64,
        "warning" warning: bool,
        "banned" banned: bool,
        /// Whether this was decided without the store.
        "degraded" degraded: bool,
        #[schemars(with = "Option<String>")]
        "degradedReason" degraded_reason: Option<Plain<'a>>,
        /// What /v1/refund takes.
        #[schemars(with = "Option<String>")]
        "receipt" receipt: Option<Plain<'a>>,
        #[schemars(with = "String")]
        "traceId" trace_id: TraceId,
        /// What /v1/commit and /v1/release take.
        #[schemars(with = "Option<String>")]
        "reservation" reservation: IfAny<TraceId>,
        /// Every limit that was met.
        "limits" limits: Limits<'a>,
    }
}

json_object! {
    /// One limit that was met.
    #[schemars(rename = "Reading")]
    struct LimitAnswer<'a> {
        #[schemars(with = "Option<String>")]
        "rule" rule: Option<Any<'a>>,
        #[schemars(schema_with = "schema::layer")]
        "layer" layer: Option<Plain<'a>>,
        #[schemars(with = "String", extend("enum" = ["enforce", "observe"]))]
        "mode" mode: Plain<'a>,
        "allowed" allowed: bool,
        "limit" limit: u64,
        "remaining" remaining: u64,
        "resetAt" reset_at: Option<u64>,
        "retryAfter" retry_after: Option<u64>,
    }
}

impl<'a> Answer<'a> {
    pub(super) fn new(decided: &'a Decided, policy: &'a Policy) -> Self {
        let decision = &decided.decision;
        let rule = decision.rule(policy);
        let reading = decision.bound_by();
        let wait = decision.retry_after().map(Span::from);
        Self {
            allowed: decision.allowed(),
            verdict: Plain(decision.verdict.name()),
            rule: rule.map(|rule| Any(&rule.name)),
            layer: rule.map(|rule| rule.layer).or(decision.penalty).map(Layer::name).map(Plain),
            limit: reading.map(|reading| reading.limit),
            remaining: reading.map(|reading| reading.remaining),
            reset_at: decision.reset_at(),
            retry_after: wait.map(Span::secs_ceil),
            retry_after_ms: wait.map(Span::millis_ceil),
            delay_ms: Span::from(decision.delay()).millis_ceil(),
            warning: decision.warning,
            banned: decision.banned(),
            degraded: decision.degraded.is_some(),
            degraded_reason: decision.degraded.map(Degraded::name).map(Plain),
            receipt: decided.receipt.as_deref().map(Plain),
            trace_id: decision.trace,
            reservation: IfAny(decided.reservation),
            limits: Limits { decision, policy },
        }
    }

    /// As it is sent.
    pub(super) fn to_json(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(USUAL_ANSWER);
        self.write(&mut out);
        out
    }
}

/// The limits of a decision, written without being gathered first.
#[derive(Debug)]
struct Limits<'a> {
    decision: &'a Decision,
    policy: &'a Policy,
}

impl Json for Limits<'_> {
    fn write(&self, out: &mut Vec<u8>) {
        write_list(self.decision.readings.iter().map(|reading| self.one(reading)), out);
    }
}

impl Limits<'_> {
    fn one(&self, reading: &Reading) -> LimitAnswer<'_> {
        let rule = self.policy.rules().get(reading.rule());
        LimitAnswer {
            rule: rule.map(|rule| Any(&rule.name)),
            layer: rule.map(|rule| Plain(rule.layer.name())),
            mode: Plain(if reading.enforced { "enforce" } else { "observe" }),
            allowed: reading.allowed,
            limit: reading.limit,
            remaining: reading.remaining,
            reset_at: reading.reset_at(self.decision.at),
            retry_after: reading.ready_at().map(|ready| ready.since(self.decision.at).secs_ceil()),
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
