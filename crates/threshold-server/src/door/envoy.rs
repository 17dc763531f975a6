//! Envoy's rate limit service: the descriptors of a request become facts, and are decided in one step.

mod descriptor;
mod response;

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use threshold_core::plan::{MAX_CHARGES, Verb};
use threshold_core::policy::EnvoyDomain;
use threshold_core::{Facts, Span};
use threshold_limiter::limiter::{CreditError, JointError, JointRequest};

use super::App;
use super::grpc::proto::{Code, RateLimitDescriptor, RateLimitOverride, RateLimitRequest, RateLimitResponse, Unit};
use super::grpc::{GrpcCode, GrpcError};
use crate::desk::new_trace;
use descriptor::{Described, EntryTexts};

/// How much of Envoy's own timeout is left for the network and the answer.
const MARGIN: Duration = Duration::from_millis(5);

/// The most entries of a descriptor. Envoy has one for each action that its operator has configured.
const MAX_ENTRIES: usize = 64;

/// Decides the descriptors of a request together: all of them are charged, or none is.
pub(super) async fn should_rate_limit(
    app: &App,
    metadata: &HeaderMap,
    asked: &RateLimitRequest,
) -> Result<RateLimitResponse, GrpcError> {
    let policy = app.desk.policy();
    let envoy = policy.envoy();
    check_size(asked)?;
    let domain = envoy.domain(&asked.domain);
    let texts: Vec<EntryTexts<'_>> = asked.descriptors.iter().map(EntryTexts::new).collect();
    let described: Vec<Described<'_>> = texts.iter().map(|texts| Described::new(texts, &asked.domain, envoy)).collect();
    let pairs: Vec<Vec<(&str, &str)>> = described.iter().map(Described::pairs).collect();
    // One decision has one id, whatever the number of descriptors.
    let trace = new_trace();
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
        let rate = descriptor.limit.filter(|_| domain.overrides).map(|limit| rate(limit, index)).transpose()?;
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
    let decided = app.desk.decide_jointly(&policy, domain.verb, &requests, deadline).await;
    let decided = match decided {
        Ok(decided) => decided,
        // A client chooses how many of its optional headers Envoy asks about, and Envoy lets through what is an error.
        Err(JointError::TooManyRules) if domain.verb != Verb::Record => {
            if let Some(left_out) = app.refused.sample(app.desk.now()) {
                tracing::warn!(domain = asked.domain, limits = MAX_CHARGES, trace_id = %trace, left_out, "request over its limits: its descriptors meet more than one request is charged");
            }
            return Ok(response::too_many(&policy, requests.len(), trace));
        }
        Err(error) => return Err(refusal(&error)),
    };
    if let Some((descriptor, reason)) = decided.unplanned.first()
        && let Some(left_out) = app.refused.sample(app.desk.now())
    {
        let trace_id = decided.decision.trace;
        tracing::warn!(descriptor, %reason, domain = asked.domain, %trace_id, left_out, "descriptor over its limit: it cannot be counted");
    }
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

fn check_size(asked: &RateLimitRequest) -> Result<(), GrpcError> {
    if asked.domain.is_empty() {
        return Err(GrpcError::invalid("domain: a request names its domain"));
    }
    match asked.descriptors.len() {
        0 => return Err(GrpcError::invalid("descriptors: a request has at least one")),
        1..=MAX_CHARGES => {}
        more => {
            let message = format!("descriptors: a request has at most {MAX_CHARGES}, this one has {more}");
            return Err(GrpcError::invalid(message));
        }
    }
    for (index, descriptor) in asked.descriptors.iter().enumerate() {
        if descriptor.entries.len() > MAX_ENTRIES {
            let message = format!(
                "descriptors[{index}]: a descriptor has at most {MAX_ENTRIES} entries, this one has {}",
                descriptor.entries.len()
            );
            return Err(GrpcError::invalid(message));
        }
        if let Some(entry) = descriptor.entries.iter().position(|entry| entry.key.is_empty()) {
            return Err(GrpcError::invalid(format!("descriptors[{index}].entries[{entry}]: an entry has a key")));
        }
    }
    Ok(())
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
    RateLimitOverride { requests_per_unit, unit }: RateLimitOverride,
    index: usize,
) -> Result<(u64, Span), GrpcError> {
    let unit = Unit::try_from(unit).unwrap_or(Unit::Unknown);
    let period = response::UNITS.iter().find(|(own, _)| *own == unit).map(|(_, seconds)| Span::from_secs(*seconds));
    let message = || format!("descriptors[{index}].limit: the unit is unknown");
    Ok((u64::from(requests_per_unit), period.ok_or_else(|| GrpcError::invalid(message()))?))
}

fn refusal(error: &JointError) -> GrpcError {
    match error {
        JointError::TooManyRules => GrpcError::invalid(format!(
            "descriptors: they meet more than {MAX_CHARGES} limits together, which is the most that one request is charged"
        )),
        JointError::Rate { request, .. } => GrpcError::invalid(format!("descriptors[{request}].limit: {error}")),
        other => GrpcError::invalid(other.to_string()),
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
