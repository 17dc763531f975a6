//! The limits in an event: their figures at the decision, so that it can be explained later.

use serde_json::{Value, json};

use super::json::{Fields, layer};
use super::{EventError, Names};
use crate::decision::{Decision, Reading};
use crate::plan::MAX_CHARGES;
use crate::policy::Layer;

/// The most limits in one event: as many as a request can be charged under.
pub const MAX_LIMITS: usize = MAX_CHARGES;

/// The figures of one limit that a request met.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EventLimit {
    /// The name of the rule.
    pub rule: Box<str>,
    /// The layer of the rule.
    pub layer: Layer,
    /// Whether the rule is enforced, not only observed.
    pub enforced: bool,
    /// Whether the cost fits.
    pub allowed: bool,
    /// The limit, or the burst where that is larger.
    pub limit: u64,
    /// The time in which `limit` becomes available again, in milliseconds; `None` for a limit on requests in flight.
    pub period: Option<u64>,
    /// The cost that still fits, after this request's charge.
    pub remaining: u64,
    /// The cost of the request.
    pub cost: u64,
    /// If allowed, when the limit resets; if denied, when the cost fits; in Unix seconds. `None` if never.
    pub reset_at: Option<u64>,
    /// If denied: the seconds until the cost fits; `None` if never.
    pub retry_after: Option<u64>,
}

impl EventLimit {
    /// Returns the limits of a decision.
    pub(super) fn all(decision: &Decision, names: &Names<'_>) -> Box<[Self]> {
        let one = |reading: &Reading| {
            let rule = names.policy.rules().get(reading.rule())?;
            Some(Self {
                rule: names.bounded(&rule.name),
                layer: rule.layer,
                enforced: reading.enforced,
                allowed: reading.allowed,
                limit: reading.limit,
                period: (!reading.at_once).then(|| reading.period.millis_ceil()),
                remaining: reading.remaining,
                cost: reading.cost,
                reset_at: reading.reset_at(decision.at),
                retry_after: reading.ready_at().map(|ready| ready.since(decision.at).secs_ceil()),
            })
        };
        decision.readings.iter().take(MAX_LIMITS).filter_map(one).collect()
    }

    pub(super) fn write(&self) -> Value {
        json!({
            "rule": self.rule,
            "layer": self.layer.name(),
            "mode": if self.enforced { "enforce" } else { "observe" },
            "allowed": self.allowed,
            "limit": self.limit,
            "periodMs": self.period,
            "remaining": self.remaining,
            "cost": self.cost,
            "resetAt": self.reset_at,
            "retryAfter": self.retry_after,
        })
    }

    pub(super) fn read(value: &Value) -> Result<Self, EventError> {
        let Value::Object(fields) = value else { return Err(EventError::new("", "must be an object")) };
        let mut fields = Fields(fields.clone());
        let rule = fields.text("rule")?;
        let layer = fields.read("layer", "the name of a layer", |value| layer(value.as_str()?))?;
        let enforced = fields.read("mode", "enforce or observe", |value| match value.as_str()? {
            "enforce" => Some(true),
            "observe" => Some(false),
            _ => None,
        })?;
        let allowed = fields.read("allowed", "true or false", Value::as_bool)?;
        let mut number = |name| fields.read(name, "a whole number", Value::as_u64);
        let (limit, period, remaining, cost) =
            (number("limit")?, number("periodMs")?, number("remaining")?, number("cost")?);
        let (reset_at, retry_after) = (number("resetAt")?, number("retryAfter")?);
        fields.end("is no field of a limit")?;
        let limit = Self {
            rule: required("rule", rule)?,
            layer: required("layer", layer)?,
            enforced: required("mode", enforced)?,
            allowed: required("allowed", allowed)?,
            limit: required("limit", limit)?,
            period,
            remaining: required("remaining", remaining)?,
            cost: required("cost", cost)?,
            reset_at,
            retry_after,
        };
        Ok(limit)
    }
}

pub(super) fn required<T>(name: &str, value: Option<T>) -> Result<T, EventError> {
    value.ok_or_else(|| EventError::new(name, "is required"))
}
