//! The OpenAPI descriptions of the calls about events.

use schemars::JsonSchema;
use serde_json::{Value, json};
use threshold_core::decision::Cause;

use super::{ErasedBody, MAX_PAGE, ReportedBody, VERDICTS};
use crate::door::admin::{change, operator_call};
use crate::door::openapi::{LONG_QUERY, Operation, Schemas, json_content};
use crate::door::sse;

const UNAVAILABLE: (u16, &str) =
    (503, "The events cannot be reached, or too many answers or streams are open (`busy`)");

/// An event, as core reads and writes it.
#[derive(JsonSchema)]
#[schemars(rename = "Event", rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used: core reads and writes the JSON")]
struct EventBody {
    #[schemars(extend("format" = "uuid"))]
    id: String,
    /// When the decision was made, in Unix milliseconds.
    #[schemars(range(max = 9_007_199_254_740_u64))]
    at: u64,
    #[schemars(extend("enum" = ["global", "edge", "tenant", "user", "endpoint", null]))]
    layer: Option<String>,
    /// Whether the request was denied.
    blocked: bool,
    #[schemars(length(min = 1, max = 256))]
    tenant: Option<String>,
    #[schemars(length(min = 1, max = 256))]
    user_id: Option<String>,
    #[schemars(length(min = 1, max = 256))]
    endpoint: Option<String>,
    #[schemars(length(min = 1, max = 256))]
    ip: Option<String>,
    #[schemars(length(min = 1, max = 256))]
    rule: Option<String>,
    #[schemars(extend("enum" = ["allow", "warn", "slow", "deny", "ban", null]))]
    verdict: Option<String>,
    /// How many equal decisions this event stands for.
    #[schemars(range(min = 1, max = 1_000_000_000_u64))]
    count: Option<u64>,
    /// To whom a strike was added.
    #[schemars(length(min = 1, max = 256))]
    subject: Option<String>,
    #[schemars(range(max = 4_294_967_295_u64))]
    strikes: Option<u32>,
    #[schemars(range(max = 9_007_199_254_740_u64))]
    shadow_until: Option<u64>,
    #[schemars(range(max = 9_007_199_254_740_u64))]
    banned_until: Option<u64>,
    /// Why the request was denied.
    #[schemars(extend("enum" = ["limit", "missing", "ban", "ladder", "pause", "list", "outage", "login", null]))]
    cause: Option<String>,
    /// When the ban, the penalty, the pause or the lock ends that denied.
    #[schemars(range(max = 9_007_199_254_740_u64))]
    until: Option<u64>,
    /// Why the decision was made without the store, or with less than it needs from it.
    #[schemars(extend("enum" = ["store_timeout", "store_error", "store_full", "too_many_rules", "journal", "shared_budget", null]))]
    degraded: Option<String>,
    #[schemars(regex(pattern = "^[0-9a-fA-F]{32}$"))]
    trace_id: Option<String>,
    /// The limits that the request met.
    #[schemars(length(max = 16))]
    limits: Option<Vec<LimitBody>>,
}

/// The figures of a limit at the decision.
#[derive(JsonSchema)]
#[schemars(rename = "EventLimit", rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used: core reads and writes the JSON")]
struct LimitBody {
    #[schemars(length(min = 1, max = 256))]
    rule: String,
    #[schemars(extend("enum" = ["global", "edge", "tenant", "user", "endpoint"]))]
    layer: String,
    #[schemars(extend("enum" = ["enforce", "observe"]))]
    mode: String,
    allowed: bool,
    limit: u64,
    period_ms: Option<u64>,
    remaining: u64,
    cost: u64,
    reset_at: Option<u64>,
    retry_after: Option<u64>,
}

pub(super) fn list(schemas: &mut Schemas) -> Operation {
    let answer = json!({
        "type": "object",
        "required": ["events", "next", "previous"],
        "properties": {
            "events": {"type": "array", "items": schemas.of::<EventBody>(), "maxItems": MAX_PAGE},
            "next": {"type": "integer", "minimum": 0, "description": "What `after` of the next page is"},
            "previous": {"type": ["integer", "null"], "minimum": 0, "description": "What `before` of the page of older events is; null if there are none, or with `after`"},
        },
    });
    let mut content = json_content(&answer);
    if let Some(content) = content.as_object_mut() {
        let stream = json!({"schema": {"type": "string", "description": "Server-sent events, as they come"}});
        content.insert(sse::MEDIA_TYPE.to_owned(), stream);
    }
    let text = |name: &str| parameter(name, "", &json!({"type": "string", "minLength": 1}));
    let whole = json!({"type": "integer", "minimum": 0, "maximum": u64::MAX});
    let layers = json!({"type": "string", "enum": ["global", "edge", "ip", "tenant", "user", "endpoint"]});
    let verdicts = json!({"type": "string", "enum": VERDICTS});
    let causes = json!({"type": "string", "enum": Cause::ALL.map(Cause::name)});
    let limit = json!({"type": "integer", "minimum": 1, "maximum": MAX_PAGE});
    let trace = json!({"type": "string", "pattern": "^[0-9a-fA-F]{32}$"});
    let after = "The events that arrived after the one with this number; the newest if left out";
    operator_call("events", "List events, in order of arrival, or stream them", &answer)
        .response(200, "The answer", &content)
        .parameter(parameter("after", after, &whole))
        .parameter(parameter("before", "The newest of the events that arrived before the one with this number", &whole))
        .parameter(parameter("limit", "", &limit))
        .parameter(parameter("since", "Those decided since, in Unix milliseconds", &whole))
        .parameter(parameter("layer", "", &layers))
        .parameter(parameter("blocked", "", &json!({"type": "boolean"})))
        .parameter(parameter("verdict", "", &verdicts))
        .parameter(parameter("cause", "", &causes))
        .parameter(parameter("traceId", "", &trace))
        .parameter(text("tenant"))
        .parameter(text("userId"))
        .parameter(text("ip"))
        .parameter(text("endpoint"))
        .parameter(text("rule"))
        .parameter(text("subject"))
        .errors(&[LONG_QUERY, UNAVAILABLE])
}

pub(super) fn report(schemas: &mut Schemas) -> Operation {
    let batch = json!({"type": "array", "items": schemas.of::<EventBody>(), "maxItems": 1_000});
    let described = |text: &str| json!({"type": "string", "description": text});
    let lines = described("An event, or a record of Cloudflare's firewall_events, on each line");
    let compressed = described("The array or the lines, compressed with gzip, with or without Content-Encoding");
    let summary = "Report events of another system: an array, or lines of JSON, such as Cloudflare's firewall_events";
    // A body is recognised by its first bytes, whatever its media type is. Logpush sends its lines as text.
    Operation::call("reportEvents", summary, &schemas.of::<ReportedBody>())
        .body(batch)
        .body_as("application/x-ndjson", &lines)
        .body_as("text/plain", &lines)
        .body_as("application/gzip", &compressed)
        .errors(&[(415, "The body has another Content-Encoding than gzip, or a web page sent it without Content-Type: application/json")])
        .errors(&[(503, "Too many events are being reported")])
}

pub(super) fn erase(schemas: &mut Schemas) -> Operation {
    let text = |name: &str| parameter(name, "", &json!({"type": "string", "minLength": 1}));
    let reason = json!({"type": "string", "minLength": 1, "maxLength": 1_000});
    change("eraseEvents", "Erase the events of a user, an address or a tenant", &schemas.of::<ErasedBody>())
        .parameter(text("userId"))
        .parameter(text("ip"))
        .parameter(text("tenant"))
        .parameter(parameter("reason", "The reason, for the audit", &reason))
        .errors(&[LONG_QUERY])
}

fn parameter(name: &str, description: &str, schema: &Value) -> Value {
    let mut parameter = json!({"name": name, "in": "query", "schema": schema});
    if let Some(fields) = parameter.as_object_mut().filter(|_| !description.is_empty()) {
        fields.insert("description".to_owned(), description.into());
    }
    parameter
}
