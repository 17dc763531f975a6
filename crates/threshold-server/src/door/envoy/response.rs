//! The decision on a request's descriptors → Envoy's answer.

use threshold_core::decision::Reading;
use threshold_core::headers::{BodyForm, Refusal, TRACE_ID, denial_body, header_fields, refusal_body};
use threshold_core::policy::Disclosure;
use threshold_core::{Decision, Facts, PlanError, Policy, Timestamp, TraceId};
use threshold_limiter::limiter::{JointDecision, JointRequest};

use crate::door::ext_authz::DELAY;
use crate::door::grpc::proto::{Code, DescriptorStatus, Duration, HeaderValue, RateLimit, RateLimitResponse, Unit};

/// The periods that have a name, in seconds, with the length that Envoy's own service gives a month and a year.
pub(super) const UNITS: [(Unit, u64); 7] = [
    (Unit::Second, 1),
    (Unit::Minute, 60),
    (Unit::Hour, 3_600),
    (Unit::Day, 86_400),
    (Unit::Week, 7 * 86_400),
    (Unit::Month, 30 * 86_400),
    (Unit::Year, 365 * 86_400),
];

/// Makes the answer: one status for each descriptor, in their order.
pub(super) fn response(
    policy: &Policy,
    requests: &[JointRequest<'_>],
    joint: &JointDecision,
    is_recorded: bool,
) -> RateLimitResponse {
    let JointDecision { decision, unplanned, .. } = joint;
    // What has happened is never denied.
    let is_allowed = is_recorded || (decision.allowed() && unplanned.is_empty());
    let statuses = (0..requests.len()).map(|index| status(policy, index, joint, is_allowed)).collect();
    let mut response = RateLimitResponse { overall_code: code(is_allowed), statuses, ..RateLimitResponse::default() };
    if is_recorded {
        return response;
    }
    match unplanned.first() {
        None => add_decision(&mut response, policy, requests, joint),
        Some((_, error)) => add_refusal(&mut response, policy, decision.trace, error),
    }
    response
}

/// Adds what the client is told of a decision.
fn add_decision(
    response: &mut RateLimitResponse,
    policy: &Policy,
    requests: &[JointRequest<'_>],
    JointDecision { decision, requests: owners, .. }: &JointDecision,
) {
    // Envoy waits before it passes the request on, and its client sees the figures after that.
    let fields = header_fields(&decision.after_delay(), policy).into_iter();
    response.response_headers_to_add.extend(fields.map(|(name, value)| header(name, value)));
    let binding = decision.binding.and_then(|binding| owners.get(binding)).copied().unwrap_or(0);
    let unknown = Facts::default();
    let facts = requests.get(binding).map_or(&unknown, |request| &request.facts);
    if let Some(body) = denial_body(decision, policy, facts, BodyForm::Json) {
        response.response_headers_to_add.push(header("content-type", body.content_type.to_owned()));
        response.raw_body = body.text.into_bytes();
    }
    if decision.allowed() && !decision.delay().is_zero() {
        // Envoy waits, so that it is not this server's answer that takes long.
        response.request_headers_to_add.push(header(DELAY.as_str(), decision.delay().as_millis().to_string()));
    }
}

/// Denies a request that no plan can hold.
pub(super) fn too_many(policy: &Policy, descriptors: usize, trace: TraceId) -> RateLimitResponse {
    let status = DescriptorStatus { code: code(false), ..DescriptorStatus::default() };
    let mut response = RateLimitResponse {
        overall_code: code(false),
        statuses: vec![status; descriptors],
        ..RateLimitResponse::default()
    };
    add_refusal(&mut response, policy, trace, &PlanError::TooManyRules);
    response
}

/// Adds what the client is told of a descriptor that cannot be counted.
fn add_refusal(response: &mut RateLimitResponse, policy: &Policy, trace: TraceId, error: &PlanError) {
    let (code, message) = match error {
        PlanError::CostExceedsLimit { .. } => ("cost_exceeds_limit", "The cost is more than its limit ever allows"),
        PlanError::Missing { .. } | PlanError::TooManyRules | PlanError::Path(_) => {
            ("rate_limited", "Too many requests")
        }
    };
    let refusal = Refusal { status: 429, code, message, field: None };
    let body = refusal_body(refusal, policy, trace, BodyForm::Json);
    response.response_headers_to_add = vec![
        header("cache-control", "no-store".to_owned()),
        header(TRACE_ID, trace.to_string()),
        header("content-type", body.content_type.to_owned()),
    ];
    response.raw_body = body.text.into_bytes();
}

fn header(name: &str, value: String) -> HeaderValue {
    HeaderValue { key: name.to_ascii_lowercase(), value, raw_value: Vec::new() }
}

fn code(is_allowed: bool) -> i32 {
    if is_allowed { Code::Ok.into() } else { Code::OverLimit.into() }
}

/// Makes the status of one descriptor.
fn status(policy: &Policy, index: usize, joint: &JointDecision, is_allowed: bool) -> DescriptorStatus {
    let JointDecision { decision, requests, unplanned, .. } = joint;
    if unplanned.iter().any(|(own, _)| *own == index) {
        return DescriptorStatus { code: code(is_allowed), ..DescriptorStatus::default() };
    }
    let own = || {
        let readings = decision.readings.iter().zip(requests).filter(|(_, owner)| **owner == index);
        readings.map(|(reading, _)| reading).filter(|reading| reading.enforced)
    };
    let denies = |reading: &Reading| !reading.allowed;
    // A ban or a store that fails denies every descriptor, and no limit.
    let denied_by_limit = decision.readings.iter().any(|reading| reading.enforced && denies(reading));
    let is_over = !is_allowed && (own().any(denies) || (unplanned.is_empty() && !denied_by_limit));
    let mut status = DescriptorStatus { code: code(!is_over), ..DescriptorStatus::default() };
    // The limit that binds this descriptor: of those that deny the one with the longest wait, else the one with the least left.
    let binding = match own().any(denies) {
        true => own()
            .filter(|reading| denies(reading))
            .max_by_key(|reading| (reading.ready_at().is_none(), reading.ready_at())),
        false => own().min_by_key(|reading| reading.remaining),
    };
    if let Some(reading) = binding {
        add_figures(&mut status, policy, reading, decision);
    }
    status
}

/// Adds the figures of a limit, if they may be disclosed: Envoy can show them to clients.
fn add_figures(status: &mut DescriptorStatus, policy: &Policy, reading: &Reading, decision: &Decision) {
    let rule = policy.rules().get(reading.rule()).filter(|rule| rule.disclosure == Disclosure::Full);
    let Some(rule) = rule else { return };
    let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    let unit = UNITS.iter().find(|(_, seconds)| threshold_core::Span::from_secs(*seconds) == reading.period);
    status.current_limit = Some(RateLimit {
        requests_per_unit: narrow(reading.limit),
        unit: unit.map_or(Unit::Unknown, |(unit, _)| *unit).into(),
        // A policy has no name that would end the quotes that Envoy puts around it.
        name: rule.name.to_string(),
    });
    status.limit_remaining = narrow(reading.remaining);
    let resets =
        if reading.allowed { reading.reset_at(decision.at).map(Timestamp::from_secs) } else { reading.ready_at() };
    status.duration_until_reset = resets.map(|resets| {
        // Rounded up, so that a client that waits so long finds room.
        let seconds = resets.since(decision.at).secs_ceil();
        Duration { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 }
    });
}
