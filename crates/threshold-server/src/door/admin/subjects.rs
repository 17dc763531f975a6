//! `/v1/subjects/LAYER/KEY`: the state of a subject or an account, and its forgiveness.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::Timestamp;
use threshold_core::policy::Policy;

use super::operator::{Operator, Reader};
use super::{BanBody, ChangedBody, ReasonQuery};
use crate::desk::{Subject, Target};
use crate::door::http::layer_named;
use crate::door::query::Query;
use crate::door::{ApiError, App, json};

/// The state of a subject or an account.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Subject")]
pub(super) struct SubjectBody {
    layer: String,
    key: String,
    /// The strikes that have not decayed, on the ladder with the most of them.
    strikes: u32,
    shadow_banned: bool,
    /// The end of a ladder's cool-down or ban, in Unix seconds.
    denied_until: Option<u64>,
    /// The end of a pause, or of a rule's `block_for`, under at least one of its limits, in Unix seconds.
    paused_until: Option<u64>,
    /// The end of a ladder's ban, in Unix seconds.
    banned_until: Option<u64>,
    /// The ban that an operator set, if any.
    ban: Option<BanBody>,
    /// For an account: consecutive failures from unknown devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    failures: Option<u32>,
    /// For an account: until when it is locked for unknown devices, in Unix seconds; null if it is not locked, or is locked
    /// permanently at the ceiling.
    #[serde(skip_serializing_if = "Option::is_none")]
    locked_until: Option<u64>,
    /// For an account: whether it has reached the ceiling.
    #[serde(skip_serializing_if = "Option::is_none")]
    at_ceiling: Option<bool>,
}

impl SubjectBody {
    fn new(subject: Subject, layer: String, key: String, policy: &Policy) -> Self {
        let seconds = |until: Option<Timestamp>| until.map(Timestamp::secs_ceil);
        let account = subject.account.as_ref();
        let locked = account.and_then(|account| account.locked_until);
        Self {
            layer,
            key,
            strikes: subject.strikes,
            shadow_banned: subject.shadow_banned,
            denied_until: seconds(subject.denied_until),
            paused_until: seconds(subject.paused_until),
            banned_until: seconds(subject.banned_until),
            ban: subject.ban.map(|(id, ban)| BanBody::new(id, Some(&ban), ban.until, policy)),
            failures: account.map(|account| account.failures),
            locked_until: seconds(locked.and_then(Timestamp::unless_never)),
            at_ceiling: account.map(|_| locked == Some(Timestamp::MAX)),
        }
    }
}

pub(super) async fn show(
    _: Reader,
    State(app): State<Arc<App>>,
    Path((layer, key)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let subject = app.desk.subject(target(&layer, &key)?).await?;
    Ok(json(StatusCode::OK, &SubjectBody::new(subject, layer, key, &app.desk.policy())))
}

pub(super) async fn forgive(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path((layer, key)): Path<(String, String)>,
    Query(ReasonQuery { reason }): Query<ReasonQuery>,
) -> Result<Response, ApiError> {
    app.desk.forgive(&operator.0, target(&layer, &key)?, reason.as_deref()).await?;
    Ok(json(StatusCode::OK, &ChangedBody { ok: true }))
}

fn target<'a>(layer: &str, key: &'a str) -> Result<Target<'a>, ApiError> {
    if layer == Target::ACCOUNT {
        return Ok(Target::Account(key));
    }
    let layer = layer_named(layer).ok_or_else(|| ApiError::bad("layer", format!("unknown layer \"{layer}\"")))?;
    Ok(Target::Subject(layer, key))
}
