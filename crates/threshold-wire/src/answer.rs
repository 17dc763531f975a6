//! The JSON of a decision.

use threshold_core::decision::{Degraded, Reading};
use threshold_core::plan::MAX_CHARGES;
use threshold_core::policy::{Consistency, Layer, Policy};
use threshold_core::{Decision, Span, TraceId};

use super::write::{EscapedStr, Json, Omittable, PlainStr, json_object, write_list};

/// The most bytes that one limit takes in an answer, with its part of the receipt and without its name. The server's test
/// `an_answer_to_a_list_fits_the_memory_that_was_acquired` compares it with the largest figures.
const MAX_READING: usize = 384;
/// The most bytes that the rest of an answer takes.
const MAX_REST: usize = 1_024;

json_object! {
    /// The decision on one request.
    #[cfg_attr(feature = "schemas", schemars(rename = "Decision"))]
    pub struct Answer<'a> {
        /// Whether the request may cross.
        "allowed" allowed: bool,
        #[cfg_attr(feature = "schemas", schemars(schema_with = "super::schema::verdict"))]
        "verdict" verdict: PlainStr<'a>,
        /// The rule that binds; null if none does.
        #[cfg_attr(feature = "schemas", schemars(with = "Option<String>"))]
        "rule" rule: Option<EscapedStr<'a>>,
        /// The layer of that rule, or of the penalty that denied.
        #[cfg_attr(feature = "schemas", schemars(schema_with = "super::schema::layer"))]
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
        #[cfg_attr(feature = "schemas", schemars(with = "Option<String>"))]
        "degradedReason" degraded_reason: Option<PlainStr<'a>>,
        /// True if one of the limits is counted by a store without atomic updates. Left out otherwise.
        #[cfg_attr(feature = "schemas", schemars(with = "Option<bool>"))]
        "approximate" approximate: Omittable<bool>,
        /// The receipt that /v1/refund takes.
        #[cfg_attr(feature = "schemas", schemars(with = "Option<String>"))]
        "receipt" receipt: Option<PlainStr<'a>>,
        #[cfg_attr(feature = "schemas", schemars(with = "String"))]
        "traceId" trace_id: TraceId,
        /// The id that /v1/commit and /v1/release take.
        #[cfg_attr(feature = "schemas", schemars(with = "Option<String>"))]
        "reservation" reservation: Omittable<TraceId>,
        /// Every limit of the rules that matched.
        "limits" limits: Limits<'a>,
    }
}

json_object! {
    /// One limit of a rule that matched.
    #[cfg_attr(feature = "schemas", schemars(rename = "Reading"))]
    pub(super) struct ReadingAnswer<'a> {
        #[cfg_attr(feature = "schemas", schemars(with = "Option<String>"))]
        "rule" rule: Option<EscapedStr<'a>>,
        #[cfg_attr(feature = "schemas", schemars(schema_with = "super::schema::layer"))]
        "layer" layer: Option<PlainStr<'a>>,
        #[cfg_attr(feature = "schemas", schemars(with = "String", extend("enum" = ["enforce", "observe"])))]
        "mode" mode: PlainStr<'a>,
        "allowed" allowed: bool,
        "limit" limit: u64,
        "remaining" remaining: u64,
        "resetAt" reset_at: Option<u64>,
        "retryAfter" retry_after: Option<u64>,
        /// True if the limit is counted by a store without atomic updates. Left out otherwise.
        #[cfg_attr(feature = "schemas", schemars(with = "Option<bool>"))]
        "approximate" approximate: Omittable<bool>,
    }
}

impl<'a> Answer<'a> {
    /// The bytes that most answers fit into: a decision with a receipt and six limits.
    pub const TYPICAL_BYTES: usize = 2_048;

    /// The answer of a decision that was made under this policy, without a receipt.
    #[must_use]
    pub fn new(decision: &'a Decision, policy: &'a Policy) -> Self {
        let rule = decision.rule(policy);
        let reading = decision.bound_by();
        let wait = decision.retry_after().map(Span::from);
        Self {
            allowed: decision.allowed(),
            verdict: PlainStr(decision.verdict.name()),
            rule: rule.map(|rule| EscapedStr(&rule.name)),
            // A ban or a cool-down has no rule, and is named by the layer of its ladder.
            layer: rule.map(|rule| rule.layer).or(decision.penalty_layer()).map(Layer::name).map(PlainStr),
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
            approximate: Omittable(None),
            receipt: None,
            trace_id: decision.trace,
            reservation: Omittable(None),
            limits: Limits { decision, policy, approximates_eventual: false },
        }
    }

    /// Marks the limits of eventual rules as approximate, for a store that counts them so.
    #[must_use]
    pub fn approximating_eventual(mut self) -> Self {
        self.limits.approximates_eventual = true;
        let is_approximate = self.limits.decision.readings.iter().any(|reading| self.limits.is_approximate(reading));
        self.approximate = Omittable(is_approximate.then_some(true));
        self
    }

    /// Adds the signed receipt of the charges, which is base64 and so needs no escaping.
    #[must_use]
    pub fn with_receipt(mut self, receipt: Option<&'a str>) -> Self {
        self.receipt = receipt.map(PlainStr);
        self
    }

    /// Adds the id of a reservation.
    #[must_use]
    pub fn with_reservation(mut self, reservation: Option<TraceId>) -> Self {
        self.reservation = Omittable(reservation);
        self
    }

    /// Encodes the answer.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::TYPICAL_BYTES);
        self.write_to(&mut out);
        out
    }

    /// Appends the encoded answer.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        self.write(out);
    }

    /// Returns the most bytes that an answer takes under a policy.
    #[must_use]
    pub fn max_bytes(policy: &Policy) -> usize {
        // As if every limit had the longest name: which rules match is not known before the requests are parsed.
        let longest = policy.rules().iter().map(|rule| rule.name.len()).max().unwrap_or(0);
        // Each character of a name may need a backslash.
        let reading = longest.saturating_mul(2).saturating_add(MAX_READING);
        policy.rules().len().min(MAX_CHARGES).saturating_mul(reading).saturating_add(MAX_REST)
    }
}

/// The limits of a decision, written straight from its readings.
#[derive(Debug)]
pub(super) struct Limits<'a> {
    decision: &'a Decision,
    policy: &'a Policy,
    /// Whether the store counts eventual rules approximately.
    approximates_eventual: bool,
}

impl Json for Limits<'_> {
    fn write(&self, out: &mut Vec<u8>) {
        write_list(self.decision.readings.iter().map(|reading| self.one(reading)), out);
    }
}

impl Limits<'_> {
    fn is_approximate(&self, reading: &Reading) -> bool {
        let rule = self.policy.rules().get(reading.rule());
        self.approximates_eventual && rule.is_some_and(|rule| rule.consistency == Consistency::Eventual)
    }

    fn one(&self, reading: &Reading) -> ReadingAnswer<'_> {
        let rule = self.policy.rules().get(reading.rule());
        ReadingAnswer {
            rule: rule.map(|rule| EscapedStr(&rule.name)),
            layer: rule.map(|rule| PlainStr(rule.layer.name())),
            mode: PlainStr(if reading.enforced { "enforce" } else { "observe" }),
            allowed: reading.allowed,
            limit: reading.limit,
            remaining: reading.remaining,
            reset_at: reading.reset_at(self.decision.at),
            retry_after: reading.ready_at().map(|ready| ready.since(self.decision.at).secs_ceil()),
            approximate: Omittable(self.is_approximate(reading).then_some(true)),
        }
    }
}
