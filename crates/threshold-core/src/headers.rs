//! The answer to a client: header fields and the body of a denial. Neither reveals a shadow ban.

use serde_json::{Map, Value, json};
use sfv::{ItemSerializer, KeyRef, RefBareItem, StringRef};

use crate::caller::Caller;
use crate::decision::{Decision, Reading};
use crate::facts::Facts;
use crate::key::TraceId;
use crate::limit::{MAX_QUOTA, Unit, any_period, quantity};
use crate::policy::{BodyValues, Disclosure, Layer, Listed, Per, Policy, Rule};
use crate::time::Span;

/// A header field and its value.
pub type Field = (&'static str, String);

/// The header field with the trace id of a request, on every answer of a door that faces clients.
pub const TRACE_ID: &str = "X-Trace-Id";

/// The maximum number of fields in an answer.
const MAX_FIELDS: usize = 11;
/// The usual length of an item of `RateLimit` and `RateLimit-Policy`, for allocating once.
const USUAL_ITEM: usize = 40;
/// The base URL of the draft's problem types.
const PROBLEMS: &str = "https://iana.org/assignments/http-problem-types#";

/// Returns the header fields of the answer to a client.
#[must_use]
pub fn header_fields(decision: &Decision, policy: &Policy) -> Vec<Field> {
    let mut fields = Vec::with_capacity(MAX_FIELDS);
    let shown = decision.disclosure;
    if shown == Disclosure::Full {
        x_rate_limit(decision, &mut fields);
        // Under a penalty the remaining quota would mislead: every request is denied anyway.
        if decision.penalty.is_none() {
            rate_limit(decision, policy, &mut fields);
        }
    }
    if !decision.allowed() {
        // `Disclosure` is ordered from the most to the least that is told.
        if shown < Disclosure::None
            && let Some(seconds) = decision.retry_after_secs()
        {
            fields.push(("Retry-After", seconds.to_string()));
        }
        // A shared cache must not answer other clients with this client's denial.
        fields.push(("Cache-Control", "no-store".to_owned()));
    }
    if decision.warning {
        fields.push(("X-RateLimit-Warning", "true".to_owned()));
        fields.extend(warning_cookie(decision, policy));
    }
    if decision.banned() {
        fields.push(("X-RateLimit-Banned", "true".to_owned()));
    }
    // A decision has no id if the host gave it none.
    if decision.trace != TraceId::default() {
        fields.push((TRACE_ID, decision.trace.to_string()));
    }
    fields
}

fn x_rate_limit(decision: &Decision, fields: &mut Vec<Field>) {
    let Some(reading) = decision.bound_by() else { return };
    let number = |value: u64| itoa::Buffer::new().format(value).to_owned();
    fields.push(("X-RateLimit-Limit", number(reading.limit)));
    fields.push(("X-RateLimit-Remaining", number(reading.remaining)));
    fields.extend(decision.reset_at().map(|reset| ("X-RateLimit-Reset", number(reset))));
}

/// Adds `RateLimit` and `RateLimit-Policy` in the form of drafts 08 to 11, with every enforced limit that may be disclosed.
fn rate_limit(decision: &Decision, policy: &Policy, fields: &mut Vec<Field>) {
    let room = || String::with_capacity(decision.readings.len().saturating_mul(USUAL_ITEM));
    let (mut limits, mut policies) = (room(), room());
    for reading in decision.readings.iter().filter(|reading| reading.enforced) {
        // By each rule's own setting: the binding rule may be disclosed fully while another one must stay hidden.
        let rule = policy.rules().get(reading.rule()).filter(|rule| rule.disclosure == Disclosure::Full);
        let Some((rule, static_fields)) = rule.and_then(|rule| Some((rule, rule.static_fields.as_ref()?))) else {
            continue;
        };
        if !limits.is_empty() {
            limits.push_str(", ");
            policies.push_str(", ");
        }
        limits.push_str(&static_fields.name);
        push_integer(&mut limits, ";r=", reading.remaining);
        if let Some(more) = reading.more_at(decision.at) {
            // 0 would mean now, and a client would try again at once.
            push_integer(&mut limits, ";t=", more.since(decision.at).secs_ceil().max(1));
        }
        let figures = Figures::of(reading);
        match &static_fields.policy {
            // A tenant may have other figures than the rule was written with.
            Some((known, item)) if *known == figures => policies.push_str(item),
            _ => policies.extend(policy_item(rule, figures)),
        }
    }
    if !limits.is_empty() {
        fields.push(("RateLimit", limits));
        fields.push(("RateLimit-Policy", policies));
    }
}

/// The parts of a rule's header fields that are the same in every answer, serialized when the policy is compiled.
#[derive(Debug, Clone)]
pub(crate) struct StaticFields {
    name: Box<str>,
    /// Its item of `RateLimit-Policy` for these figures, if they are the same for everyone.
    policy: Option<(Figures, Box<str>)>,
}

/// The figures of a limit in an item of `RateLimit-Policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Figures {
    limit: u64,
    period: Span,
    unit: Unit,
    at_once: bool,
}

impl Figures {
    fn of(reading: &Reading) -> Self {
        Self { limit: reading.limit, period: reading.period, unit: reading.unit, at_once: reading.at_once }
    }
}

impl StaticFields {
    /// Returns `None` if a structured field cannot contain the rule's name.
    pub(crate) fn of(rule: &Rule) -> Option<Self> {
        let name = ItemSerializer::new().bare_item(StringRef::from_str(&rule.name).ok()?).finish().into();
        let fixed = rule.fixed_limit().zip(rule.counts());
        let policy = fixed.and_then(|(limit, counts)| {
            let figures = Figures {
                limit: limit.shown_quota(),
                period: limit.shown_period(),
                unit: counts.unit(),
                at_once: limit.is_concurrency(),
            };
            Some((figures, policy_item(rule, figures)?.into()))
        });
        Some(Self { name, policy })
    }
}

/// Appends a parameter with an integer value.
fn push_integer(out: &mut String, key: &str, value: u64) {
    out.push_str(key);
    out.push_str(itoa::Buffer::new().format(clamped(value)));
}

fn policy_item(rule: &Rule, figures: Figures) -> Option<String> {
    let Figures { limit, period, unit, at_once } = figures;
    let name = StringRef::from_str(&rule.name).ok()?;
    let mut item = ItemSerializer::new().bare_item(name).parameter(key("q"), integer(limit));
    // The quota unit, unless it is requests.
    let unit = match unit {
        _ if at_once => Some("concurrent-requests"),
        Unit::Bytes => Some("content-bytes"),
        Unit::Count => None,
    };
    if let Some(unit) = unit {
        item = item.parameter(key("qu"), StringRef::constant(unit));
    }
    // A limit of 0 has no window to wait for.
    if !at_once && limit > 0 {
        item = item.parameter(key("w"), integer(period.secs_ceil().max(1)));
    }
    Some(item.finish())
}

fn key(name: &'static str) -> &'static KeyRef {
    KeyRef::constant(name)
}

/// Limits a value to the 15 digits of a structured integer.
fn clamped(value: u64) -> u64 {
    value.min(MAX_QUOTA)
}

fn integer(value: u64) -> RefBareItem<'static> {
    let value = i64::try_from(clamped(value)).unwrap_or(0);
    RefBareItem::Integer(sfv::Integer::try_from(value).unwrap_or(sfv::Integer::ZERO))
}

fn warning_cookie(decision: &Decision, policy: &Policy) -> Option<Field> {
    let warned = decision.warned_by?;
    // The value holds nothing to forge, so it is not signed. Without `HttpOnly` the scripts of a page can read it and
    // show the warning.
    let name = policy.ladders.get(warned.ladder)?.warning_cookie.as_ref()?;
    let seconds = warned.until.since(decision.at).secs_ceil();
    Some(("Set-Cookie", format!("{name}=1; Path=/; Max-Age={seconds}; SameSite=Lax")))
}

/// The body of a denial, with its status and media type.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DenialBody {
    /// The status.
    pub status: u16,
    /// The media type.
    pub content_type: &'static str,
    /// The text.
    pub text: String,
}

/// The format of a denial's body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BodyForm {
    /// Plain JSON.
    #[default]
    Json,
    /// `application/problem+json` (RFC 9457).
    Problem,
}

impl BodyForm {
    /// Returns the format that an `Accept` header asks for.
    #[must_use]
    pub fn accepted(accept: &str) -> Self {
        let wants = |part: &str| {
            let mut words = part.split(';').map(str::trim);
            let is_problem = words.next().is_some_and(|kind| kind.eq_ignore_ascii_case("application/problem+json"));
            is_problem && !words.any(|word| matches!(word, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
        };
        if accept.split(',').any(wants) { Self::Problem } else { Self::Json }
    }
}

/// Returns the body of a denial; `None` if the request is allowed.
#[must_use]
pub fn denial_body(decision: &Decision, policy: &Policy, facts: &Facts<'_>, form: BodyForm) -> Option<DenialBody> {
    if decision.allowed() {
        return None;
    }
    let rule = decision.rule(policy);
    // A client is not at fault if the store is away. 429 would tell it to send less.
    let status = if decision.unavailable() { 503 } else { rule.map_or(429, |rule| rule.status) };
    if let Some(template) = rule.and_then(|rule| rule.body.as_ref()).or(policy.envelope.as_deref()) {
        let text = template.fill(&body_values(decision, policy, status));
        return Some(DenialBody { status, content_type: template.content_type(), text });
    }
    let (content_type, body) = match form {
        BodyForm::Json => ("application/json", json_body(decision, policy, facts)),
        BodyForm::Problem => ("application/problem+json", problem_body(decision, policy, status)),
    };
    Some(DenialBody { status, content_type, text: Value::Object(body).to_string() })
}

/// Returns the value of `error` in a denial's body.
#[must_use]
pub fn error_name(decision: &Decision, policy: &Policy) -> &'static str {
    // Before the rule: a ban that this very request has earned also has a binding rule.
    if decision.banned() || decision.listed == Some(Listed::Deny) {
        return "banned";
    }
    if decision.unavailable() {
        return "unavailable";
    }
    layer_error(decision.rule(policy).map(|rule| rule.layer).or(decision.penalty_layer()))
}

/// Returns the value of `error` for a limit of a layer.
fn layer_error(layer: Option<Layer>) -> &'static str {
    match layer {
        Some(Layer::Tenant) => "tenant_rate_limited",
        Some(Layer::Endpoint) => "endpoint_rate_limited",
        _ => "rate_limited",
    }
}

/// Returns the values that a policy's own body may show, as far as `disclosure` allows.
fn body_values<'v>(decision: &Decision, policy: &'v Policy, status: u16) -> BodyValues<'v> {
    let rule = decision.rule(policy);
    let (is_full, shows_wait) = (decision.disclosure == Disclosure::Full, decision.disclosure < Disclosure::None);
    let (_, title) = problem_type(decision);
    // A rule's message is about its limit: it would be wrong about a ban or a store that fails.
    let own = rule.filter(|_| title == QUOTA_EXCEEDED.1).and_then(|rule| rule.message.as_deref());
    BodyValues {
        code: error_name(decision, policy),
        message: own.unwrap_or(title),
        trace: Some(decision.trace),
        status,
        rule: rule.filter(|_| is_full).map(|rule| rule.name.as_ref()),
        limit: decision.bound_by().filter(|_| is_full).map(|reading| reading.limit),
        retry_after: decision.retry_after_secs().filter(|_| shows_wait),
    }
}

/// Returns the body that another program sends when it enforces a rule by itself; `None` if the policy has none for it. There is
/// no decision, so there is no trace id.
#[must_use]
pub fn exported_body(rule: &Rule, policy: &Policy, limit: u64, retry_after: u64) -> Option<DenialBody> {
    let template = rule.body.as_ref().or(policy.envelope.as_deref())?;
    let shown = rule.disclosure;
    let values = BodyValues {
        code: layer_error(Some(rule.layer)),
        message: rule.message.as_deref().unwrap_or(QUOTA_EXCEEDED.1),
        trace: None,
        status: rule.status,
        rule: (shown == Disclosure::Full).then_some(&rule.name),
        limit: (shown == Disclosure::Full).then_some(limit),
        retry_after: (shown < Disclosure::None).then_some(retry_after),
    };
    Some(DenialBody { status: rule.status, content_type: template.content_type(), text: template.fill(&values) })
}

/// A request that is refused without a decision: it is malformed or ambiguous, or no decision is possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal<'r> {
    /// The status.
    pub status: u16,
    /// A stable code for programs.
    pub code: &'r str,
    /// The reason in words.
    pub message: &'r str,
    /// The part of the request that is wrong, if any.
    pub field: Option<&'r str>,
}

/// Returns the body of a refusal: the policy's own for all answers, else the usual one. It names no rule, because no rule's
/// `disclosure` applies.
#[must_use]
pub fn refusal_body(refusal: Refusal<'_>, policy: &Policy, trace: TraceId, form: BodyForm) -> DenialBody {
    let Refusal { status, code, message, field } = refusal;
    if let Some(template) = &policy.envelope {
        let trace = Some(trace);
        let values = BodyValues { code, message, trace, status, rule: None, limit: None, retry_after: None };
        return DenialBody { status, content_type: template.content_type(), text: template.fill(&values) };
    }
    let mut body = Map::new();
    let mut put = |name: &str, value: Value| body.insert(name.to_owned(), value);
    let content_type = match form {
        BodyForm::Json => {
            put("error", json!(code));
            put("message", json!(message));
            if let Some(field) = field {
                put("field", json!(field));
            }
            "application/json"
        }
        BodyForm::Problem => {
            put("type", json!("about:blank"));
            let title = match status {
                413 => "Content too large",
                414 => "URI too long",
                429 => QUOTA_EXCEEDED.1,
                500 => "Internal server error",
                503 => "Temporarily unavailable",
                _ => "Bad request",
            };
            put("title", json!(title));
            put("status", json!(status));
            put("detail", json!(message));
            "application/problem+json"
        }
    };
    put("traceId", json!(trace.to_string()));
    DenialBody { status, content_type, text: Value::Object(body).to_string() }
}

fn json_body(decision: &Decision, policy: &Policy, facts: &Facts<'_>) -> Map<String, Value> {
    let mut body = Map::new();
    let mut put = |name: &str, value: Value| {
        if !value.is_null() {
            body.insert(name.to_owned(), value);
        }
    };
    put("error", json!(error_name(decision, policy)));
    let rule = decision.rule(policy);
    let shown = decision.disclosure;
    if shown == Disclosure::Full {
        put("layer", json!(rule.map(|rule| rule.layer).or(decision.penalty_layer()).map(Layer::name)));
        put("rule", json!(rule.map(|rule| rule.name.as_ref())));
        if let Some(rule) = rule {
            let caller = Caller::new(facts, policy);
            if rule.is_by_category() {
                put("category", json!(caller.category));
            }
            if rule.layer == Layer::Endpoint || rule.per.contains(&Per::Endpoint) {
                put("endpoint", json!(caller.part_text(&Per::Endpoint, rule, policy)));
            }
        }
        let reading = decision.bound_by();
        put("limit", json!(reading.map(|reading| reading.limit)));
        put("remaining", json!(reading.map(|reading| reading.remaining)));
        put("period", json!(rule.zip(reading).map(|(rule, reading)| prose_of(rule, reading))));
    }
    put("message", json!(rule.and_then(|rule| rule.message.as_deref())));
    if shown == Disclosure::Full {
        put("retryAfter", json!(decision.retry_after_secs()));
        put("resetAt", json!(decision.reset_at().and_then(iso_8601)));
    }
    put("traceId", json!(decision.trace.to_string()));
    body
}

/// The problem type and the title of a denial by a limit.
const QUOTA_EXCEEDED: (&str, &str) = ("quota-exceeded", "Too many requests");

/// Returns the problem type and the title of a denial.
fn problem_type(decision: &Decision) -> (&'static str, &'static str) {
    if decision.banned() || decision.listed.is_some() {
        ("abnormal-usage-detected", "Access is suspended")
    } else if decision.unavailable() {
        ("temporary-reduced-capacity", "Temporarily unavailable")
    } else {
        QUOTA_EXCEEDED
    }
}

fn problem_body(decision: &Decision, policy: &Policy, status: u16) -> Map<String, Value> {
    let (kind, title) = problem_type(decision);
    let mut body = Map::new();
    body.insert("type".to_owned(), json!(format!("{PROBLEMS}{kind}")));
    body.insert("title".to_owned(), json!(title));
    body.insert("status".to_owned(), json!(status));
    let rule = decision.rule(policy);
    if let Some(message) = rule.and_then(|rule| rule.message.as_deref()) {
        body.insert("detail".to_owned(), json!(message));
    }
    let shown = decision.disclosure;
    if shown == Disclosure::Full && kind == QUOTA_EXCEEDED.0 {
        let denying = decision.readings.iter().filter(|reading| reading.enforced && !reading.allowed);
        // The decision discloses what its binding rule does. Another rule that denies as well may be hidden.
        let rules = denying.filter_map(|reading| policy.rules().get(reading.rule()));
        let names = rules.filter(|rule| rule.disclosure == Disclosure::Full).map(|rule| rule.name.as_ref());
        body.insert("violated-policies".to_owned(), json!(names.collect::<Vec<_>>()));
    }
    if shown == Disclosure::Full
        && let Some(seconds) = decision.retry_after_secs()
    {
        body.insert("retryAfter".to_owned(), json!(seconds));
    }
    body.insert("traceId".to_owned(), json!(decision.trace.to_string()));
    body
}

/// Returns the limit in prose: the rule's `period`, else `100 per minute`.
fn prose_of(rule: &Rule, reading: &Reading) -> String {
    match &rule.period {
        None if reading.at_once => format!("{} at once", reading.limit),
        _ => prose(rule, reading.limit, reading.unit, reading.period),
    }
}

/// Describes a limit over time in words.
pub(crate) fn prose(rule: &Rule, limit: u64, unit: Unit, period: Span) -> String {
    match &rule.period {
        Some(own) => own.to_string(),
        None if limit == 0 => "never".to_owned(),
        None => format!("{} per {}", quantity(limit, unit), any_period(period)),
    }
}

/// Formats a time as ISO 8601; `None` beyond the year 9999.
#[must_use]
pub fn iso_8601(unix_seconds: u64) -> Option<String> {
    let seconds = i64::try_from(unix_seconds).ok()?;
    jiff::Timestamp::from_second(seconds).ok().map(|moment| moment.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::Balance;
    use crate::settle::settle;
    use crate::time::Timestamp;

    /// A hidden rule that denied beside another one was named in the answer.
    #[test]
    fn a_problem_names_no_hidden_rule() {
        let rule = "per = []\nlimit = '1/min'\n";
        let text = format!("[[rule]]\nname = 'shown'\n{rule}[[rule]]\nname = 'trap'\n{rule}disclosure = 'none'\n");
        let policy = Policy::parse(&text, &|_| None).unwrap();
        let plan = policy.plan(&Facts::default()).unwrap();
        let (mut balances, now) = (vec![Balance::default(); 2], Timestamp::from_secs(1_767_225_630));
        assert!(plan.decide(&settle(plan.bill(), &mut balances, &mut [], now)).allowed());
        let denied = plan.decide(&settle(plan.bill(), &mut balances, &mut [], now));
        assert!(denied.readings.iter().all(|reading| !reading.allowed) && denied.disclosure == Disclosure::Full);
        assert_eq!(problem_body(&denied, &policy, 429)["violated-policies"], json!(["shown"]));
    }

    /// The precomputed item is used only for the figures that it was made for: a tenant may have ten times the limit.
    /// Woken by using it whatever the reading says.
    #[test]
    fn an_overridden_limit_is_shown_as_it_is() {
        let text = "[[rule]]\nname = 'a b'\nper = []\nlimit = '5/min'\n[[rule]]\nname = 'c'\nper = []\nlimit = '7MB/h'\n\
                    [[rule]]\nname = 'd'\nper = []\nlimit = '2'\nalgorithm = 'concurrency'\n";
        let policy = Policy::parse(text, &|_| None).unwrap();
        let facts = Facts { bytes: Some(1), ..Facts::default() };
        let plan = policy.plan(&facts).unwrap();
        let now = Timestamp::from_secs(1_767_225_630);
        let outcome = settle(plan.bill(), &mut vec![Balance::default(); 3], &mut [], now);
        let mut decision = plan.decide(&outcome);
        let told = |decision: &Decision| {
            let fields = header_fields(decision, &policy);
            fields.into_iter().find(|(name, _)| *name == "RateLimit-Policy").unwrap().1
        };
        let rest = "\"c\";q=7000000;qu=\"content-bytes\";w=3600, \"d\";q=2;qu=\"concurrent-requests\"";
        assert_eq!(told(&decision), format!("\"a b\";q=5;w=60, {rest}"));
        decision.readings[0].limit = 50;
        assert_eq!(told(&decision), format!("\"a b\";q=50;w=60, {rest}"));
        decision.readings[0].period = Span::HOUR;
        assert_eq!(told(&decision), format!("\"a b\";q=50;w=3600, {rest}"));
    }
}
