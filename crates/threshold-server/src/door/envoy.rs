//! Envoy's rate limit service: the descriptors of a request become facts, and are decided in one step.

mod descriptor;
mod response;

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use threshold_core::plan::{MAX_CHARGES, Verb};
use threshold_core::policy::{EnvoyDomain, Policy};
use threshold_core::{Facts, Span, TraceId};
use threshold_limiter::limiter::{CreditError, JointDecision, JointError, JointRequest};

use super::App;
use super::grpc::proto::{Code, RateLimitDescriptor, RateLimitOverride, RateLimitRequest, RateLimitResponse, Unit};
use super::grpc::{GrpcCode, GrpcError};
use crate::desk::new_trace;
use descriptor::{Described, EntryTexts};

/// How much of Envoy's own timeout is left for the network and the answer.
const MARGIN: Duration = Duration::from_millis(5);

/// The most entries of a descriptor. Envoy has one for each action that its operator has configured.
const MAX_ENTRIES: usize = 64;

/// The most descriptors that are recorded in one call, one after the other. Envoy has one for each that its operator has configured.
const MAX_RECORDED: usize = 256;

/// Decides the descriptors of a request together: all of them are charged, or none is.
pub(super) async fn should_rate_limit(
    app: &App,
    metadata: &HeaderMap,
    asked: &RateLimitRequest,
) -> Result<RateLimitResponse, GrpcError> {
    let policy = app.desk.policy();
    let envoy = policy.envoy();
    check_form(asked)?;
    let domain = envoy.domain(&asked.domain);
    // One decision has one id, whatever the number of descriptors.
    let trace = new_trace();
    if let Some(reason) = excess(asked, domain.verb) {
        return Ok(over_limit(app, asked, trace, &reason));
    }
    let texts: Vec<EntryTexts<'_>> = asked.descriptors.iter().map(EntryTexts::new).collect();
    let described: Vec<Described<'_>> = texts.iter().map(|texts| Described::new(texts, &asked.domain, envoy)).collect();
    let pairs: Vec<Vec<(&str, &str)>> = described.iter().map(Described::pairs).collect();
    let mut requests = Vec::with_capacity(described.len());
    let mut credits = Vec::new();
    for (index, (descriptor, (described, pairs))) in
        asked.descriptors.iter().zip(described.iter().zip(&pairs)).enumerate()
    {
        // Envoy sends a descriptor without entries where an optional header is absent. No rule is about it.
        if descriptor.entries.is_empty() {
            let facts = Facts { cost: Some(0), trace, ..Facts::default() };
            requests.push(JointRequest { facts, skips_missing: true, rate: None });
            continue;
        }
        let hits = hits(asked, descriptor);
        let rate = descriptor.limit.filter(|_| domain.overrides).and_then(|limit| rate(app, asked, limit, index));
        let facts = Facts { facts: pairs, cost: Some(hits), trace, ..described.facts };
        let mut request = JointRequest { facts, skips_missing: true, rate };
        if descriptor.is_negative_hits && hits > 0 {
            check_negative(index, domain)?;
            credits.push(request);
            // Looked at with the others: what is given back is no charge.
            request.facts.cost = Some(0);
        }
        requests.push(request);
    }
    let deadline = store_deadline(metadata.get("grpc-timeout"), app.bounds.envoy_deadline);
    let Some(decided) = decide(app, (&policy, asked), domain.verb, &mut requests, deadline).await else {
        let reason = format!("the descriptors meet more than {MAX_CHARGES} limits");
        return Ok(match domain.verb {
            Verb::Record => record_each(app, (&policy, asked), &requests, deadline).await,
            _ => over_limit(app, asked, trace, &reason),
        });
    };
    let response = response::response(&policy, &requests, &decided, domain.verb == Verb::Record);
    if response.overall_code() == Code::Ok {
        for request in &credits {
            app.desk.credit(&policy, request, &decided.replaced, deadline).await.map_err(|error| match error {
                CreditError::Plan(reason) => GrpcError::invalid(format!("descriptors: {reason}")),
                other => GrpcError::new(GrpcCode::Unavailable, format!("not everything was given back: {other}")),
            })?;
        }
    }
    Ok(response)
}

/// Denies a call whose message is too large to be read.
pub(super) fn too_large(app: &App, reason: &str) -> RateLimitResponse {
    over_limit(app, &RateLimitRequest::default(), new_trace(), reason)
}

/// Denies what no plan can hold. It is no error, because a client chooses how many of its optional headers Envoy asks about and
/// how long they are, and Envoy lets through what is an error.
fn over_limit(app: &App, asked: &RateLimitRequest, trace: TraceId, reason: &str) -> RateLimitResponse {
    let policy = app.desk.policy();
    app.desk.refuse(&policy, &format!("domain \"{}\": {reason}", asked.domain), trace);
    response::too_many(&policy, asked.descriptors.len(), trace)
}

/// Decides together, with the limits of rules in place of those of descriptors that a rule cannot have. Returns `None` if they meet
/// more limits than one plan holds.
async fn decide(
    app: &App,
    (policy, asked): (&Policy, &RateLimitRequest),
    verb: Verb,
    requests: &mut [JointRequest<'_>],
    deadline: Duration,
) -> Option<Box<JointDecision>> {
    loop {
        match app.desk.decide_jointly(policy, verb, requests, deadline).await {
            Ok(decided) => {
                tell_uncounted(app, asked, &decided);
                return Some(decided);
            }
            // Each turn leaves one of them out.
            Err(JointError::Rate { request, rule, reason }) => {
                ignore_rate(app, asked, request, &format!("rule \"{rule}\" cannot have it: {reason}"));
                requests.get_mut(request)?.rate = None;
            }
            Err(_) => return None,
        }
    }
}

/// Records descriptors one after the other that one plan does not hold together: what has happened is charged, and never denied.
async fn record_each(
    app: &App,
    (policy, asked): (&Policy, &RateLimitRequest),
    requests: &[JointRequest<'_>],
    deadline: Duration,
) -> RateLimitResponse {
    let mut response = RateLimitResponse { overall_code: Code::Ok.into(), ..RateLimitResponse::default() };
    for request in requests {
        let mut alone = [*request];
        let decided = decide(app, (policy, asked), Verb::Record, &mut alone, deadline).await;
        if decided.is_none() {
            let reason = format!("a descriptor meets more than {MAX_CHARGES} limits, and is not recorded");
            app.desk.refuse(policy, &reason, request.facts.trace);
        }
        let decided = decided.unwrap_or_default();
        response.statuses.append(&mut response::response(policy, &alone, &decided, true).statuses);
    }
    response
}

/// Logs a descriptor that cannot be counted.
fn tell_uncounted(app: &App, asked: &RateLimitRequest, decided: &JointDecision) {
    if let Some((descriptor, reason)) = decided.unplanned.first()
        && let Some(left_out) = app.refused.sample(app.desk.now())
    {
        let trace_id = decided.decision.trace;
        tracing::warn!(descriptor, %reason, domain = asked.domain, %trace_id, left_out, "descriptor over its limit: it cannot be counted");
    }
}

/// Checks what only a configuration of Envoy can cause.
fn check_form(asked: &RateLimitRequest) -> Result<(), GrpcError> {
    if asked.domain.is_empty() {
        return Err(GrpcError::invalid("domain: a request names its domain"));
    }
    if asked.descriptors.is_empty() {
        return Err(GrpcError::invalid("descriptors: a request has at least one"));
    }
    for (index, descriptor) in asked.descriptors.iter().enumerate() {
        if let Some(entry) = descriptor.entries.iter().position(|entry| entry.key.is_empty()) {
            return Err(GrpcError::invalid(format!("descriptors[{index}].entries[{entry}]: an entry has a key")));
        }
    }
    Ok(())
}

/// Returns of what a request has more than its bound.
fn excess(asked: &RateLimitRequest, verb: Verb) -> Option<String> {
    let (most, descriptors) = (if verb == Verb::Record { MAX_RECORDED } else { MAX_CHARGES }, asked.descriptors.len());
    if descriptors > most {
        return Some(format!("a request has at most {most} descriptors, this one has {descriptors}"));
    }
    let entries = asked.descriptors.iter().map(|descriptor| descriptor.entries.len()).max()?;
    (entries > MAX_ENTRIES)
        .then(|| format!("a descriptor has at most {MAX_ENTRIES} entries, one of these has {entries}"))
}

/// Returns the hits of a descriptor: its own, 0 of which only look, else those of the request.
fn hits(asked: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> u64 {
    descriptor.hits_addend.unwrap_or_else(|| u64::from(asked.hits_addend.max(1)))
}

/// Checks that a domain may give back what nothing shows to have been charged.
fn check_negative(index: usize, domain: EnvoyDomain) -> Result<(), GrpcError> {
    if domain.negative_hits {
        return Ok(());
    }
    let message = format!(
        "descriptors[{index}]: negative hits need negative_hits = true in the policy's [envoy.domains] of this domain"
    );
    Err(GrpcError::invalid(message))
}

/// Returns the amount and the period of a limit that a descriptor brings.
fn rate(
    app: &App,
    asked: &RateLimitRequest,
    RateLimitOverride { requests_per_unit, unit }: RateLimitOverride,
    index: usize,
) -> Option<(u64, Span)> {
    let unit = Unit::try_from(unit).unwrap_or(Unit::Unknown);
    let period = response::UNITS.iter().find(|(own, _)| *own == unit).map(|(_, seconds)| Span::from_secs(*seconds));
    if period.is_none() {
        ignore_rate(app, asked, index, "its unit is unknown");
    }
    Some((u64::from(requests_per_unit), period?))
}

/// Logs that the limit of a descriptor does not count, but those of its rules. An error would be let through by Envoy, which may take
/// such limits from what a client sends.
fn ignore_rate(app: &App, asked: &RateLimitRequest, descriptor: usize, reason: &str) {
    if let Some(left_out) = app.refused.sample(app.desk.now()) {
        tracing::warn!(descriptor, reason, domain = asked.domain, left_out, "limit of a descriptor ignored");
    }
}

/// Returns how long the store may take, at most `longest`, for a call with this timeout, as `grpc-timeout` writes it.
fn store_deadline(timeout: Option<&HeaderValue>, longest: Duration) -> Duration {
    let timeout = timeout.and_then(|value| parse_timeout(value.to_str().ok()?));
    let own = timeout.map_or(longest, |timeout| timeout.saturating_sub(MARGIN).min(longest));
    // A store that gets no time at all would never be asked.
    own.max(Duration::from_millis(1))
}

/// Parses at most 8 digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number.saturating_mul(3600)),
        "M" => Duration::from_secs(number.saturating_mul(60)),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by: leaving out `MARGIN`, either `min`, or the last `max` in `store_deadline`.
    #[test]
    fn the_store_gets_the_smaller_of_ten_milliseconds_and_envoys_timeout_less_five() {
        for (timeout, expect) in [
            (None, 10_000),
            (Some("20m"), 10_000),
            (Some("12m"), 7_000),
            (Some("9500u"), 4_500),
            (Some("8000000n"), 3_000),
            (Some("5m"), 1_000),
            (Some("0m"), 1_000),
            (Some("1S"), 10_000),
            (Some("99999999H"), 10_000),
            (Some("20"), 10_000),
            (Some("20 m"), 10_000),
            (Some("123456789m"), 10_000),
            (Some(""), 10_000),
        ] {
            let value = timeout.map(|text| HeaderValue::from_str(text).unwrap());
            let longest = crate::door::Bounds::default().envoy_deadline;
            assert_eq!(store_deadline(value.as_ref(), longest), Duration::from_micros(expect), "{timeout:?}");
        }
    }
}
