//! What a tenant or a user is given: a tier, limits of their own, or so many times as much, until a moment.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::Timestamp;
use threshold_core::policy::{Owner, Setting};

use super::operator::{Operator, Reader};
use crate::desk;
use crate::door::http::{Text, Whole, read};
use crate::door::sent::Sent;
use crate::door::{ApiError, App, json};

/// What somebody is to be given, instead of what they were given before. `{}` takes it all back.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "NewSetting")]
pub(in crate::door) struct NewSetting<'a> {
    /// A tier of the policy.
    #[serde(borrow)]
    tier: Option<Text<'a>>,
    /// Limits by category, as a policy writes them: `{"requests": "2000/min burst 200"}`.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>", extend("maxProperties" = 64))]
    limits: BTreeMap<String, String>,
    /// So many times as much as they would have.
    #[schemars(range(min = 1, max = 1_000_000))]
    times: Option<Whole>,
    /// Until when, in Unix seconds; for good unless said.
    until: Option<Whole>,
    /// Why, for the audit.
    #[serde(borrow)]
    #[schemars(length(min = 1, max = 1_000))]
    reason: Option<Text<'a>>,
}

/// What somebody was given.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[schemars(rename = "Setting")]
pub(in crate::door) struct SettingBody {
    id: String,
    tier: Option<String>,
    limits: BTreeMap<String, String>,
    times: u32,
    /// Until when, in Unix seconds; null is for good.
    until: Option<u64>,
    /// Since when; null where nothing was given.
    from: Option<u64>,
    by: Option<String>,
    reason: Option<String>,
}

pub(super) async fn tenant(
    _: Reader,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    show(&app, Owner::Tenant, id)
}

pub(super) async fn user(_: Reader, State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    show(&app, Owner::User, id)
}

pub(super) async fn set_tenant(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Sent(body): Sent,
) -> Result<Response, ApiError> {
    set(&app, &operator, Owner::Tenant, id, &body).await
}

pub(super) async fn set_user(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Sent(body): Sent,
) -> Result<Response, ApiError> {
    set(&app, &operator, Owner::User, id, &body).await
}

fn show(app: &App, owner: Owner, id: String) -> Result<Response, ApiError> {
    let setting = app.desk.given(owner, &id)?;
    Ok(json(StatusCode::OK, &SettingBody::new(id, setting.as_ref())))
}

async fn set(app: &App, operator: &Operator, owner: Owner, id: String, body: &[u8]) -> Result<Response, ApiError> {
    let new: NewSetting<'_> = read(body)?;
    let setting = app.desk.set(&operator.0, owner, &id, new.into()).await?;
    Ok(json(StatusCode::OK, &SettingBody::new(id, setting.as_ref())))
}

impl From<NewSetting<'_>> for desk::NewSetting {
    fn from(new: NewSetting<'_>) -> Self {
        Self {
            tier: new.tier.map(|tier| tier.as_str().to_owned()),
            limits: new.limits,
            times: new.times.map(Whole::number),
            until: new.until.map(Whole::number),
            reason: new.reason.map(|reason| reason.as_str().to_owned()),
        }
    }
}

impl SettingBody {
    fn new(id: String, setting: Option<&Setting>) -> Self {
        let Some(setting) = setting else { return Self { id, times: 1, ..Self::default() } };
        Self {
            id,
            tier: setting.tier.as_ref().map(ToString::to_string),
            limits: setting.limits.iter().map(|(name, limit)| (name.to_string(), limit.to_string())).collect(),
            times: setting.times,
            until: setting.until.unless_never().map(Timestamp::secs_ceil),
            from: Some(setting.from.micros().checked_div(1_000_000).unwrap_or(0)),
            by: Some(setting.by.to_string()),
            reason: Some(setting.reason.to_string()),
        }
    }
}
