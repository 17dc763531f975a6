//! `/v1/limit`: one limit by a key of the caller's own, without a policy.

use std::time::Duration;

use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::limit::{Algorithm, LimitOptions, Look};
use threshold_core::{Limit, Span, Timestamp};

use super::request::{LimitBody, read};
use super::text::Whole;
use crate::door::{ApiError, App, json};

/// What one limit says.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "LimitAnswer")]
pub(super) struct LimitAnswer {
    /// Whether the cost fits; if so, it was charged.
    allowed: bool,
    /// The whole cost that still fits.
    remaining: u64,
    /// When there is more, or all, again, in Unix seconds; null for concurrency.
    reset_at: Option<u64>,
    /// If not allowed: seconds until this cost fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after: Option<u64>,
    /// The algorithm, where it is not the one that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    algorithm: Option<&'static str>,
}

pub(super) async fn answer(app: &App, body: &[u8]) -> Result<Response, ApiError> {
    let asked: LimitBody<'_> = read(body)?;
    if asked.key.as_str().is_empty() {
        return Err(ApiError::bad("key", "the key is empty"));
    }
    let wanted = asked.algorithm.map_or(Algorithm::SlidingLog, |name| name.0);
    let (limit, served) = limit_of(&asked, wanted)?;
    let cost = asked.cost.map_or(1, Whole::number);
    if cost > limit.capacity() {
        let message = format!("a cost of {cost} never fits a limit of {}", limit.capacity());
        let error = ApiError::new(StatusCode::BAD_REQUEST, "cost_exceeds_limit", message);
        return Err(error.about(Some("cost".to_owned())));
    }
    // The store is the policy's, and so is its bound.
    let (checked, now) = app.desk.check_limit(asked.key.as_str(), &limit, cost).await?;
    let other = (served != wanted).then(|| served.name());
    let charged = checked.mark.map_or(0, |mark| mark.amount);
    Ok(json(StatusCode::OK, &LimitAnswer::new(&limit, &checked.look, charged, now, other)))
}

impl LimitAnswer {
    fn new(limit: &Limit, look: &Look, charged: u64, now: Timestamp, algorithm: Option<&'static str>) -> Self {
        let remaining = look.remaining.saturating_sub(charged);
        if look.allowed {
            let reset = limit.reset_at(look, charged > 0, now);
            let reset_at = reset.unless_never().map(Timestamp::secs_ceil);
            return Self { allowed: true, remaining, reset_at, retry_after: None, algorithm };
        }
        // A store with no room for a new key has no time for it either: the next second may.
        let wait = look.ready_at.since(now).secs_ceil().max(1);
        let reset_at = now.plus(Span::from_secs(wait)).secs_ceil();
        Self { allowed: false, remaining, reset_at: Some(reset_at), retry_after: Some(wait), algorithm }
    }
}

/// The limit that was asked for, and the algorithm that serves it.
fn limit_of(asked: &LimitBody<'_>, wanted: Algorithm) -> Result<(Limit, Algorithm), ApiError> {
    let (seconds, field) = asked.window()?;
    let (quota, period) = (asked.limit.number(), Span::from_secs(seconds));
    if quota == 0 {
        return Err(ApiError::bad("limit", "a limit is at least 1"));
    }
    if period == Span::ZERO {
        return Err(ApiError::bad(field, "a window is at least one second"));
    }
    if period > threshold_core::limit::MAX_PERIOD {
        return Err(ApiError::bad(field, "a window is at most a hundred years"));
    }
    let served = wanted.for_quota(quota);
    let limit = LimitOptions::new().algorithm(served).limit(quota, Duration::from_secs(seconds));
    // The window is in range, so what is wrong is the limit.
    limit.map(|limit| (limit, served)).map_err(|error| ApiError::bad("limit", error.to_string()))
}
