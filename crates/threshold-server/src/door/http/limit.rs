//! `/v1/limit`: checks one limit by a key of the caller's own, without a policy.

use std::time::Duration;

use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::limit::{Algorithm, LimitOptions};
use threshold_core::{Limit, Span, Timestamp};
use threshold_limiter::LimitDecision;

use super::request::{LimitBody, read};
use super::text::Whole;
use crate::door::{ApiError, App, json};

/// The answer to a check of one limit.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "LimitAnswer")]
pub(super) struct LimitAnswer {
    /// Whether the cost fits. If so, it was charged.
    allowed: bool,
    /// The whole cost that still fits.
    remaining: u64,
    /// If allowed, when the limit resets; if denied, when to retry; in Unix seconds. Null for concurrency.
    reset_at: Option<u64>,
    /// If denied: seconds until this cost fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after: Option<u64>,
    /// The algorithm, if it is not the requested one.
    #[serde(skip_serializing_if = "Option::is_none")]
    algorithm: Option<&'static str>,
}

/// Answers a call of `/v1/limit`.
pub(super) async fn answer(app: &App, body: &[u8]) -> Result<Response, ApiError> {
    let request: LimitBody<'_> = read(body)?;
    if request.key.as_str().is_empty() {
        return Err(ApiError::bad("key", "the key is empty"));
    }
    // The exact algorithm by default: a caller that names none expects what it reads, "this many in any window".
    let requested = request.algorithm.map_or(Algorithm::SlidingLog, |name| name.0);
    let (limit, used) = limit_of(&request, requested)?;
    let cost = request.cost.map_or(1, Whole::number);
    // An error and not a denial: a caller that waits and retries would wait forever.
    if cost > limit.capacity() {
        let message = format!("a cost of {cost} never fits a limit of {}", limit.capacity());
        let error = ApiError::new(StatusCode::BAD_REQUEST, "cost_exceeds_limit", message);
        return Err(error.about(Some("cost".to_owned())));
    }
    // These keys are in the policy's store, and count toward its `max_keys`.
    let decision = app.desk.check_limit(request.key.as_str(), &limit, cost).await?;
    let algorithm = (used != requested).then(|| used.name());
    Ok(json(StatusCode::OK, &LimitAnswer::new(&decision, algorithm)))
}

impl LimitAnswer {
    fn new(decision: &LimitDecision, algorithm: Option<&'static str>) -> Self {
        let LimitDecision { allowed, remaining, reset_at, retry_after, .. } = *decision;
        Self {
            allowed,
            remaining,
            reset_at: reset_at.map(|reset| Timestamp::from(reset).secs_ceil()),
            retry_after: retry_after.map(|wait| Span::from(wait).secs_ceil()),
            algorithm,
        }
    }
}

/// Returns the requested limit, and the algorithm that it uses.
fn limit_of(request: &LimitBody<'_>, requested: Algorithm) -> Result<(Limit, Algorithm), ApiError> {
    let (seconds, field) = request.window()?;
    let (quota, period) = (request.limit.number(), Span::from_secs(seconds));
    if quota == 0 {
        return Err(ApiError::bad("limit", "a limit is at least 1"));
    }
    if period == Span::ZERO {
        return Err(ApiError::bad(field, "a window is at least one second"));
    }
    if period > threshold_core::limit::MAX_PERIOD {
        return Err(ApiError::bad(field, "a window is at most a hundred years"));
    }
    // A log of a large quota would take too much memory. The answer then names the algorithm that replaces it.
    let used = requested.for_quota(quota);
    let limit = LimitOptions::new().algorithm(used).limit(quota, Duration::from_secs(seconds));
    // The window was checked above, so that the error is about the limit.
    limit.map(|limit| (limit, used)).map_err(|error| ApiError::bad("limit", error.to_string()))
}
