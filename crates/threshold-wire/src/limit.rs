//! `/v1/limit`: one limit by a key of the caller's own, without a policy.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use threshold_core::limit::{Algorithm, LimitOptions, MAX_PERIOD};
use threshold_core::{Limit, Span, Timestamp};

use super::names::AlgorithmName;
use super::read::read;
use super::text::{Text, Whole};
use super::{ApiError, to_json};
use threshold_limiter::LimitDecision;

/// Checks one limit by a key of your own; no policy is needed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", expecting = "an object")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema), schemars(rename = "Limit", extend("oneOf" = [
    {"required": ["windowSec"], "properties": {"windowSec": {"type": "integer"}, "windowSeconds": {"type": "null"}}},
    {"required": ["windowSeconds"], "properties": {"windowSec": {"type": "null"}, "windowSeconds": {"type": "integer"}}},
])))]
pub struct LimitBody<'a> {
    /// The key that is counted.
    #[serde(borrow)]
    #[cfg_attr(feature = "schemas", schemars(length(min = 1)))]
    key: Text<'a>,
    /// The most cost in one window.
    #[cfg_attr(feature = "schemas", schemars(range(min = 1, max = 999_999_999_999_999u64)))]
    limit: Whole,
    /// The length of a window in seconds; for concurrency, how long a request counts that never ends.
    #[cfg_attr(feature = "schemas", schemars(range(min = 1, max = 3_153_600_000u64)))]
    window_sec: Option<Whole>,
    /// The same as `windowSec`.
    #[cfg_attr(feature = "schemas", schemars(range(min = 1, max = 3_153_600_000u64)))]
    window_seconds: Option<Whole>,
    /// The algorithm; sliding-log by default. A sliding-log over 1,024 is served by sliding-window, and the answer says so.
    algorithm: Option<AlgorithmName>,
    /// The cost; 1 by default, and 0 charges nothing.
    cost: Option<Whole>,
}

/// The same without a key, for a host whose name is the key. `flatten` would share the fields, but it loses the position of an
/// error in the body.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", expecting = "an object")]
struct KeylessBody {
    limit: Whole,
    window_sec: Option<Whole>,
    window_seconds: Option<Whole>,
    algorithm: Option<AlgorithmName>,
    cost: Option<Whole>,
}

/// The answer to a check of one limit.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema), schemars(rename = "LimitAnswer"))]
pub struct LimitAnswer {
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

/// A call of `/v1/limit`: a key, a limit that exists and a cost that fits it.
#[derive(Debug)]
pub struct LimitCall<'a> {
    key: Text<'a>,
    limit: Limit,
    cost: u64,
    /// The algorithm, if it is not the requested one.
    replaced_by: Option<&'static str>,
}

impl<'a> LimitCall<'a> {
    /// Parses a body.
    ///
    /// # Errors
    /// 400 if a field is unknown, missing, empty or impossible, and `cost_exceeds_limit` for a cost that never fits.
    pub fn read(body: &'a [u8]) -> Result<Self, ApiError> {
        let LimitBody { key, limit, window_sec, window_seconds, algorithm, cost } = read(body)?;
        if key.as_str().is_empty() {
            return Err(ApiError::bad("key", "the key is empty"));
        }
        Self::new(key, &KeylessBody { limit, window_sec, window_seconds, algorithm, cost })
    }

    /// Parses a body without a key, for a host whose name is the key, such as a Durable Object.
    ///
    /// # Errors
    /// As for [`read`](Self::read); a body with a key is refused too.
    pub fn read_for_key(key: &'a str, body: &[u8]) -> Result<Self, ApiError> {
        Self::new(Text(key.into()), &read(body)?)
    }

    fn new(key: Text<'a>, body: &KeylessBody) -> Result<Self, ApiError> {
        // The exact algorithm by default: a caller that names none expects what it reads, "this many in any window".
        let requested = body.algorithm.map_or(Algorithm::SlidingLog, |name| name.0);
        let (limit, used) = body.limit(requested)?;
        let cost = body.cost.map_or(1, Whole::number);
        // An error and not a denial: a caller that waits and retries would wait forever.
        if cost > limit.capacity() {
            let message = format!("a cost of {cost} never fits a limit of {}", limit.capacity());
            return Err(ApiError::new(400, "cost_exceeds_limit", message).about(Some("cost".to_owned())));
        }
        Ok(Self { key, limit, cost, replaced_by: (used != requested).then(|| used.name()) })
    }

    /// Returns the key, which is not empty.
    #[must_use]
    pub fn key(&self) -> &str {
        self.key.as_str()
    }

    /// Returns the limit.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// Returns the cost, which fits the empty limit.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Returns the answer to this call.
    #[must_use]
    pub fn answer(&self, decision: &LimitDecision) -> LimitAnswer {
        let LimitDecision { allowed, remaining, reset_at, retry_after, .. } = *decision;
        LimitAnswer {
            allowed,
            remaining,
            reset_at: reset_at.map(|reset| Timestamp::from(reset).secs_ceil()),
            retry_after: retry_after.map(|wait| Span::from(wait).secs_ceil()),
            algorithm: self.replaced_by,
        }
    }
}

impl LimitAnswer {
    /// Encodes the answer.
    #[must_use]
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

impl KeylessBody {
    /// Returns the requested limit, and the algorithm that it uses.
    fn limit(&self, requested: Algorithm) -> Result<(Limit, Algorithm), ApiError> {
        let (seconds, field) = self.window()?;
        let (quota, period) = (self.limit.number(), Span::from_secs(seconds));
        if quota == 0 {
            return Err(ApiError::bad("limit", "a limit is at least 1"));
        }
        if period == Span::ZERO {
            return Err(ApiError::bad(field, "a window is at least one second"));
        }
        if period > MAX_PERIOD {
            return Err(ApiError::bad(field, "a window is at most a hundred years"));
        }
        // A log of a large quota would take too much memory. The answer then names the algorithm that replaces it.
        let used = requested.for_quota(quota);
        let limit = LimitOptions::new().algorithm(used).limit(quota, Duration::from_secs(seconds));
        // The window was checked above, so that the error is about the limit.
        limit.map(|limit| (limit, used)).map_err(|error| ApiError::bad("limit", error.to_string()))
    }

    /// Returns the length of a window in seconds, and the name of its field.
    fn window(&self) -> Result<(u64, &'static str), ApiError> {
        match (self.window_sec, self.window_seconds) {
            (Some(seconds), None) => Ok((seconds.number(), "windowSec")),
            (None, Some(seconds)) => Ok((seconds.number(), "windowSeconds")),
            (None, None) => Err(ApiError::bad("windowSec", "missing field `windowSec`")),
            // Refused even if both are equal: which of them counts must not depend on the order of fields.
            (Some(_), Some(_)) => {
                Err(ApiError::bad("windowSeconds", "windowSec and windowSeconds are the same: send one of them"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The object of the chat service is asked with a limit and a window only: its name is the key.
    #[test]
    fn a_host_whose_name_is_the_key_takes_a_body_without_one() {
        let call = LimitCall::read_for_key("acme:ratelimit:u1", br#"{"limit": 60, "windowSec": 60}"#).unwrap();
        assert_eq!((call.key(), call.limit().capacity(), call.cost()), ("acme:ratelimit:u1", 60, 1));
        let same = LimitCall::read(br#"{"key": "acme:ratelimit:u1", "limit": 60, "windowSec": 60}"#).unwrap();
        assert_eq!(same.limit(), call.limit());
        let refused =
            |body: &str| LimitCall::read_for_key("k", body.as_bytes()).unwrap_err().body.field().map(str::to_owned);
        assert_eq!(refused(r#"{"key": "other", "limit": 60, "windowSec": 60}"#).as_deref(), Some("key"));
        assert_eq!(refused(r#"{"limit": 60}"#).as_deref(), Some("windowSec"));
        assert_eq!(refused(r#"{"limit": 60, "windowSec": 60, "cost": 61}"#).as_deref(), Some("cost"));
    }
}
