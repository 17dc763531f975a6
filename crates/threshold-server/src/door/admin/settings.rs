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

use super::audit::{Change, audit, in_words};
use super::operator::{Operator, Reader};
use super::{reason_of, saved};
use crate::desk::Refused;
use crate::door::http::{Text, Whole, read};
use crate::door::sent::Sent;
use crate::door::{ApiError, App, json};

/// The most limits of one setting.
const MOST_LIMITS: usize = 64;
/// The longest name, in bytes.
const MOST_NAME: usize = 1_024;

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
    let id = name(id)?;
    let setting = app.desk.setting(owner, &id);
    Ok(json(StatusCode::OK, &SettingBody::new(id, setting.as_ref())))
}

async fn set(app: &App, operator: &Operator, owner: Owner, id: String, body: &[u8]) -> Result<Response, ApiError> {
    let new: NewSetting<'_> = read(body)?;
    let id = name(id)?;
    let setting = new.meant(&operator.0, app.desk.limiter.now())?;
    // What is refused is no change, and is not written down as one.
    app.desk.refuses(owner, &id, &setting).map_or(Ok(()), |refused| Err(told(refused)))?;
    let word = if setting.is_empty() { "take-back" } else { "give" };
    let before = in_words(app.desk.setting(owner, &id).as_ref());
    let action = format!("{word}: {before} -> {}", in_words(Some(&setting)));
    let layer = if owner == Owner::User { "user" } else { "tenant" };
    audit(app, &operator.0, &Change { action, layer, key: &id, why: &setting.reason })?;
    app.desk.give(owner, &id, &setting).map_err(told)?;
    saved(app).await?;
    Ok(json(StatusCode::OK, &SettingBody::new(id, Some(&setting).filter(|setting| !setting.is_empty()))))
}

fn told(refused: Refused) -> ApiError {
    match refused {
        Refused::Wrong(error) => ApiError::bad(error.field, error.message),
        Refused::TooMany => {
            ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "too_many_settings", "there are too many settings already")
        }
    }
}

impl NewSetting<'_> {
    fn meant(self, by: &str, now: Timestamp) -> Result<Setting, ApiError> {
        if self.limits.len() > MOST_LIMITS {
            return Err(ApiError::bad("limits", format!("at most {MOST_LIMITS} limits")));
        }
        let times = match self.times.map_or(1, Whole::number) {
            0 => return Err(ApiError::bad("times", "times is at least 1")),
            times => u32::try_from(times).map_err(|_| ApiError::bad("times", "times is too large"))?,
        };
        let until = self.until.map_or(Timestamp::MAX, |until| Timestamp::from_secs(until.number()));
        if until <= now {
            return Err(ApiError::bad("until", "this moment has passed; it is in Unix seconds"));
        }
        let reason = self.reason.map_or_else(|| Ok(String::new()), |reason| reason_of(reason.as_str()))?;
        Ok(Setting {
            tier: self.tier.map(|tier| tier.as_str().into()),
            limits: self.limits.into_iter().map(|(category, limit)| (category.into(), limit.into())).collect(),
            times,
            until,
            from: now,
            by: by.into(),
            reason: reason.into(),
        })
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

fn name(id: String) -> Result<String, ApiError> {
    if id.trim().is_empty() || id.len() > MOST_NAME {
        return Err(ApiError::bad("id", format!("a name has between 1 and {MOST_NAME} bytes")));
    }
    Ok(id)
}
