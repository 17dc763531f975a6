//! `/v1/tenants/ID` and `/v1/users/ID`: settings that override the policy for one tenant or user, until a time.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::Timestamp;
use threshold_core::policy::{Layer, Owner, Setting};
use threshold_wire::{Text, Whole, read};

use super::operator::{Operator, Reader};
use crate::desk;
use crate::door::json_body::JsonBody;
use crate::door::{ApiError, App, json};

/// A setting, which replaces the earlier one. `{}` removes it.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "NewSetting")]
pub(super) struct NewSetting<'a> {
    /// A tier of the policy.
    #[serde(borrow)]
    tier: Option<Text<'a>>,
    /// Limits by category, as a policy writes them: `{"requests": "2000/min burst 200"}`.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>", extend("maxProperties" = 64))]
    limits: BTreeMap<String, String>,
    /// The factor by which every limit is multiplied.
    #[schemars(range(min = 1, max = 1_000_000))]
    times: Option<Whole>,
    /// The end, in Unix seconds; permanent if left out.
    until: Option<Whole>,
    /// The reason, for the audit.
    #[serde(borrow)]
    #[schemars(length(min = 1, max = 1_000))]
    reason: Option<Text<'a>>,
}

/// The setting of a tenant or a user.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[schemars(rename = "Setting")]
pub(super) struct SettingBody {
    id: String,
    tier: Option<String>,
    limits: BTreeMap<String, String>,
    times: u32,
    /// The end, in Unix seconds; null for a permanent one.
    until: Option<u64>,
    /// The start, in Unix seconds; null if there is no setting.
    from: Option<u64>,
    by: Option<String>,
    reason: Option<String>,
}

pub(super) async fn tenant(
    _: Reader,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    show(&app, Owner::Tenant, &id)
}

pub(super) async fn user(_: Reader, State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    show(&app, Owner::User, &id)
}

pub(super) async fn set_tenant(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    set(&app, &operator, Owner::Tenant, &id, &body).await
}

pub(super) async fn set_user(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    set(&app, &operator, Owner::User, &id, &body).await
}

fn show(app: &App, owner: Owner, id: &str) -> Result<Response, ApiError> {
    let (name, shown) = named(app, owner, id)?;
    let setting = app.desk.setting_of(owner, &name)?;
    Ok(json(StatusCode::OK, &SettingBody::new(shown, setting.as_ref())))
}

async fn set(app: &App, operator: &Operator, owner: Owner, id: &str, body: &[u8]) -> Result<Response, ApiError> {
    let new: NewSetting<'_> = read(body)?;
    let (name, shown) = named(app, owner, id)?;
    let setting = app.desk.set(&operator.0, owner, &name, new.into()).await?;
    Ok(json(StatusCode::OK, &SettingBody::new(shown, setting.as_ref())))
}

/// Returns the name behind a digest, or the id as it is, and the form in which the answer shows it.
fn named<'a>(app: &App, owner: Owner, id: &'a str) -> Result<(Cow<'a, str>, String), ApiError> {
    let layer = if owner == Owner::User { Layer::User } else { Layer::Tenant };
    let name = app.desk.named(layer, id).map_err(|error| ApiError::from(error).about(Some("id".to_owned())))?;
    let shown = if name == id { id.to_owned() } else { app.desk.shown_name(layer, &name) };
    Ok((name, shown))
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
        // A factor of 1 leaves every limit as it is. The default of 0 would say that nothing is allowed.
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
