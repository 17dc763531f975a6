//! The JSON of a decision.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use threshold_core::decision::{Degraded, Reading};
use threshold_core::plan::MAX_CHARGES;
use threshold_core::policy::{Layer, Policy};
use threshold_core::{Decision, Span, TraceId};

use super::schema;
use super::write::{EscapedStr, Json, Omittable, PlainStr, json_object, write_list};
use crate::desk::Decided;

/// The bytes that most answers fit into: a decision with a receipt and six limits.
pub(super) const TYPICAL_ANSWER: usize = 2_048;

/// The most bytes that one limit takes in an answer, with its part of the receipt and without its name.
/// `an_answer_to_a_list_fits_the_memory_that_was_acquired` in `list_tests.rs` compares it with the largest figures.
const MAX_READING: usize = 384;
/// The most bytes that the rest of an answer takes.
const MAX_REST: usize = 1_024;

/// Returns the most bytes that an answer takes under a policy.
pub(super) fn max_answer(policy: &Policy) -> usize {
    // As if every limit had the longest name: which rules match is not known before the requests are parsed.
    let longest = policy.rules().iter().map(|rule| rule.name.len()).max().unwrap_or(0);
    // Each character of a name may need a backslash.
    let reading = longest.saturating_mul(2).saturating_add(MAX_READING);
    policy.rules().len().min(MAX_CHARGES).saturating_mul(reading).saturating_add(MAX_REST)
}

json_object! {
    /// The decision on one request.
    #[schemars(rename = "Decision")]
    pub(super) struct Answer<'a> {
        /// Whether the request may cross.
        "allowed" allowed: bool,
        #[schemars(schema_with = "schema::verdict")]
        "verdict" verdict: PlainStr<'a>,
        /// The rule that binds; null if none does.
        #[schemars(with = "Option<String>")]
        "rule" rule: Option<EscapedStr<'a>>,
        /// The layer of that rule, or of the penalty that denied.
        #[schemars(schema_with = "schema::layer")]
        "layer" layer: Option<PlainStr<'a>>,
        "limit" limit: Option<u64>,
        /// The whole cost that fits now, after this request's charge.
        "remaining" remaining: Option<u64>,
        /// If allowed, when the limit resets; if denied, when to retry; in Unix seconds.
        "resetAt" reset_at: Option<u64>,
        /// If denied: seconds until the request fits; null if it never does.
        "retryAfter" retry_after: Option<u64>,
        "retryAfterMs" retry_after_ms: Option<u64>,
        /// How long to delay the request before it goes on. Do not disclose this to its client.
        "delayMs" delay_ms: u64,
        "warning" warning: bool,
        "banned" banned: bool,
        /// Whether the store or the journal failed while this was decided.
        "degraded" degraded: bool,
        #[schemars(with = "Option<String>")]
        "degradedReason" degraded_reason: Option<PlainStr<'a>>,
        /// The receipt that /v1/refund takes.
        #[schemars(with = "Option<String>")]
        "receipt" receipt: Option<PlainStr<'a>>,
        #[schemars(with = "String")]
        "traceId" trace_id: TraceId,
        /// The id that /v1/commit and /v1/release take.
        #[schemars(with = "Option<String>")]
        "reservation" reservation: Omittable<TraceId>,
        /// Every limit of the rules that matched.
        "limits" limits: Limits<'a>,
    }
}

json_object! {
    /// One limit of a rule that matched.
    #[schemars(rename = "Reading")]
    struct LimitAnswer<'a> {
        #[schemars(with = "Option<String>")]
        "rule" rule: Option<EscapedStr<'a>>,
        #[schemars(schema_with = "schema::layer")]
        "layer" layer: Option<PlainStr<'a>>,
        #[schemars(with = "String", extend("enum" = ["enforce", "observe"]))]
        "mode" mode: PlainStr<'a>,
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
            verdict: PlainStr(decision.verdict.name()),
            rule: rule.map(|rule| EscapedStr(&rule.name)),
            // A ban or a cool-down has no rule, and is named by the layer of its ladder.
            layer: rule.map(|rule| rule.layer).or(decision.penalty).map(Layer::name).map(PlainStr),
            limit: reading.map(|reading| reading.limit),
            remaining: reading.map(|reading| reading.remaining),
            reset_at: decision.reset_at(),
            // Rounded up: a client that comes back after exactly this time must fit.
            retry_after: wait.map(Span::secs_ceil),
            retry_after_ms: wait.map(Span::millis_ceil),
            delay_ms: Span::from(decision.delay()).millis_ceil(),
            warning: decision.warning,
            banned: decision.banned(),
            degraded: decision.degraded.is_some(),
            degraded_reason: decision.degraded.map(Degraded::name).map(PlainStr),
            receipt: decided.receipt.as_deref().map(PlainStr),
            trace_id: decision.trace,
            reservation: Omittable(decided.reservation),
            limits: Limits { decision, policy },
        }
    }

    /// Encodes the answer.
    pub(super) fn to_json(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(TYPICAL_ANSWER);
        self.write(&mut out);
        out
    }
}

/// The limits of a decision, written straight from its readings.
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
            rule: rule.map(|rule| EscapedStr(&rule.name)),
            layer: rule.map(|rule| PlainStr(rule.layer.name())),
            mode: PlainStr(if reading.enforced { "enforce" } else { "observe" }),
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
