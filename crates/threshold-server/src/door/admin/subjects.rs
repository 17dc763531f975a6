//! One subject as operators look it up: by a layer and a key, or an account by its name.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::Timestamp;
use threshold_core::policy::Policy;

use super::operator::{Operator, Query, Reader};
use super::{BanBody, ChangedBody, reason_in};
use crate::desk::{Subject, Target};
use crate::door::http::layer_named;
use crate::door::{ApiError, App, json};

/// How it stands with a subject.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Subject")]
pub(in crate::door) struct SubjectBody {
    layer: String,
    key: String,
    /// Strikes that still count, the most of any ladder.
    strikes: u32,
    shadow_banned: bool,
    /// Until when a ladder's cool-down or ban denies it, in Unix seconds.
    denied_until: Option<u64>,
    /// Until when a pause, or a rule's `block_for`, denies it under one of its limits at least.
    paused_until: Option<u64>,
    /// Until when a ladder has banned it.
    banned_until: Option<u64>,
    /// The operators' own ban on it, if there is one.
    ban: Option<BanBody>,
    /// Of an account: failures in a row of devices that are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    failures: Option<u32>,
    /// Of an account: until when it is locked for them; null if it is not, or for good, at the ceiling.
    #[serde(skip_serializing_if = "Option::is_none")]
    locked_until: Option<u64>,
    /// Of an account: whether it has reached the ceiling.
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
    query: Query,
) -> Result<Response, ApiError> {
    let reason = reason_in(query)?;
    app.desk.forgive(&operator.0, target(&layer, &key)?, reason.as_deref()).await?;
    Ok(json(StatusCode::OK, &ChangedBody { ok: true }))
}

fn target<'a>(layer: &str, key: &'a str) -> Result<Target<'a>, ApiError> {
    if layer == Target::ACCOUNT {
        return Ok(Target::Account(key));
    }
    let layer = layer_named(layer).ok_or_else(|| ApiError::bad("layer", format!("no layer is called \"{layer}\"")))?;
    Ok(Target::Subject(layer, key))
}
