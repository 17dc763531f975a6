//! What operators may do: see and change who is banned, look subjects up, and forgive them. Every change is written down
//! with who made it and why, and is on disk before it is answered.

#[cfg(test)]
mod another_store;
mod operator;
#[cfg(test)]
mod same;
mod settings;
mod subjects;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::{delete, get};
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::policy::{Ban, Policy};
use threshold_core::{Digest, Timestamp};

use super::http::{LayerName, Text, Whole, read, trace_id};
use super::sent::Sent;
use super::{ApiError, App, json, json_bytes};
use crate::desk;
pub(super) use operator::caller_name;
use operator::{Operator, Query, Reader};
pub(super) use settings::{NewSetting, SettingBody};
pub(super) use subjects::SubjectBody;

/// How many bans one answer lists, unless said, and at most.
const BANS_LISTED: (usize, usize) = (1_000, 10_000);

/// Somebody who is banned.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Ban")]
pub(super) struct BanBody {
    id: String,
    /// `edge` for an address, `tenant`, or `user`; null where only the number is known.
    layer: Option<&'static str>,
    /// The address or block, the tenant, or the user.
    key: String,
    reason: String,
    /// Who has set it; `ladder` for those whom the policy's own ladders ban.
    by: String,
    /// Since when, in Unix seconds.
    from: u64,
    /// Until when; null is for good.
    until: Option<u64>,
}

/// Somebody to ban.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", expecting = "an object")]
#[schemars(rename = "NewBan")]
pub(super) struct NewBan<'a> {
    layer: LayerName,
    /// An address or CIDR (edge), a tenant, or a user. An IPv6 address without a prefix stands for the policy's
    /// `ipv6_prefix`; `ADDR/128` is one address.
    #[serde(borrow)]
    #[schemars(length(min = 1))]
    key: Text<'a>,
    /// Why. Whoever is banned is never told.
    #[serde(borrow)]
    #[schemars(length(min = 1, max = 1_000))]
    reason: Text<'a>,
    /// For how long; for good unless said.
    #[schemars(range(min = 1, max = 315_360_000))]
    duration_sec: Option<Whole>,
}

/// Something was done.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Changed")]
pub(super) struct ChangedBody {
    ok: bool,
}

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/bans", get(list).post(add))
        .route("/v1/bans/{id}", delete(lift))
        .route("/v1/subjects/{layer}/{key}", get(subjects::show).delete(subjects::forgive))
        .route("/v1/tenants/{id}", get(settings::tenant).put(settings::set_tenant))
        .route("/v1/users/{id}", get(settings::user).put(settings::set_user))
}

async fn list(_: Reader, State(app): State<Arc<App>>, query: Query) -> Result<Response, ApiError> {
    let mut query = query.only(&["limit", "after"])?;
    let limit = query.take("limit").map_or(Ok(BANS_LISTED.0), |text| {
        let limit = text.parse().ok().filter(|limit| (1..=BANS_LISTED.1).contains(limit));
        limit.ok_or_else(|| ApiError::bad("limit", format!("limit is between 1 and {}", BANS_LISTED.1)))
    })?;
    let after = query.take("after").map(|id| ban_id(&id)).transpose()?;
    let policy = app.desk.policy();
    let listed = app.desk.bans(after, limit).await?;
    let listed = listed.iter().map(|listed| BanBody::new(listed.id, listed.ban.as_ref(), listed.until, &policy));
    let listed: Vec<BanBody> = listed.collect();
    let body = serde_json::to_vec(&listed).unwrap_or_default();
    let room = app.listed.room(body.len()).await?;
    Ok(json_bytes(StatusCode::OK, room.body(body, app.bounds.patience)))
}

async fn add(operator: Operator, State(app): State<Arc<App>>, Sent(body): Sent) -> Result<Response, ApiError> {
    let NewBan { layer, key, reason, duration_sec } = read(&body)?;
    let seconds = duration_sec.map(Whole::number);
    let new = desk::NewBan { layer: layer.0, key: key.as_str(), reason: reason.as_str(), seconds };
    let (id, ban) = app.desk.ban(&operator.0, new).await?;
    Ok(json(StatusCode::OK, &BanBody::new(id, Some(&ban), ban.until, &app.desk.policy())))
}

async fn lift(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    query: Query,
) -> Result<Response, ApiError> {
    let reason = reason_in(query)?;
    app.desk.lift(&operator.0, ban_id(&id)?, reason.as_deref()).await?;
    Ok(json(StatusCode::OK, &ChangedBody { ok: true }))
}

impl BanBody {
    fn new(id: Digest, ban: Option<&Ban>, until: Timestamp, policy: &Policy) -> Self {
        let key = ban.map_or_else(|| hexadecimal(id), |ban| policy.shown_key(&ban.whom));
        Self {
            id: hexadecimal(id),
            layer: ban.map(|ban| ban.whom.layer().name()),
            key,
            reason: ban.map(|ban| ban.reason.to_string()).unwrap_or_default(),
            by: ban.map_or_else(|| "ladder".to_owned(), |ban| ban.by.to_string()),
            from: ban.map_or(0, |ban| ban.from.micros().checked_div(1_000_000).unwrap_or(0)),
            until: until.unless_never().map(Timestamp::secs_ceil),
        }
    }
}

/// The reason of a call that has no body.
fn reason_in(query: Query) -> Result<Option<String>, ApiError> {
    Ok(query.only(&["reason"])?.take("reason"))
}

fn ban_id(text: &str) -> Result<Digest, ApiError> {
    let id = trace_id(text).map(|id| Digest::from_u128(id.to_u128()));
    id.ok_or_else(|| ApiError::bad("id", "the number of a ban is 32 hexadecimal digits"))
}

fn hexadecimal(id: Digest) -> String {
    format!("{:032x}", id.to_u128())
}
