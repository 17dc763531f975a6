//! The bodies of calls that only the server has: ends of reservations, refunds, pauses and their ends.

use schemars::JsonSchema;
use serde::Deserialize;
use threshold_wire::{LayerName, Object, Pairs, RequestBody, Text, Whole};

/// Ends a reservation with its actual cost. A cost that is left out stays as it was reserved.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "Commit")]
pub(super) struct CommitBody<'a> {
    #[serde(borrow)]
    pub(super) reservation: Text<'a>,
    pub(super) cost: Option<Whole>,
    pub(super) bytes: Option<Whole>,
    #[serde(borrow)]
    pub(super) costs: Option<Pairs<'a, Whole>>,
}

/// Ends a reservation without any cost.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "Release")]
pub(super) struct ReleaseBody<'a> {
    #[serde(borrow)]
    pub(super) reservation: Text<'a>,
}

/// Gives back what a receipt was charged.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "Refund")]
pub(super) struct RefundBody<'a> {
    #[serde(borrow)]
    pub(super) receipt: Text<'a>,
}

/// Denies a subject for a while, or what a rule counts under one key.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "Pause")]
pub(super) struct PauseBody<'a> {
    /// The layer of the subject; not with a rule.
    pub(super) layer: Option<LayerName>,
    /// The address, tenant, user or endpoint; empty for the global layer.
    #[serde(borrow, default)]
    pub(super) key: Text<'a>,
    /// The name of a rule, in place of a layer.
    #[serde(borrow)]
    pub(super) rule: Option<Text<'a>>,
    /// What the rule counts by, as in a check.
    #[serde(borrow)]
    #[schemars(with = "Option<RequestBody<'a>>")]
    pub(super) request: Option<Object<RequestBody<'a>>>,
    /// For how many seconds, at most a year.
    #[schemars(range(min = 1, max = 31_536_000))]
    pub(super) seconds: Whole,
}

/// Clears what a rule counts under one key, with its pause.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "ForgivenRule")]
pub(in crate::door) struct ForgiveBody<'a> {
    /// The name of a rule.
    #[serde(borrow)]
    pub(in crate::door) rule: Text<'a>,
    /// What the rule counts by, as in a check.
    #[serde(borrow)]
    #[schemars(with = "RequestBody<'a>")]
    pub(in crate::door) request: Object<RequestBody<'a>>,
    /// Why, for the audit.
    #[serde(borrow)]
    pub(in crate::door) reason: Option<Text<'a>>,
}
