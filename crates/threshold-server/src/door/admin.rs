//! The operators' API: bans, subjects, locks, settings and the audit. Every change is audited, and is on disk before it is answered.

#[cfg(test)]
mod async_store;
mod audit;
mod ban_sets;
mod describe;
mod locks;
mod operator;
#[cfg(test)]
mod same_as_desk;
mod settings;
mod shadow_bans;
mod subjects;

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::policy::{Ban, Policy};
use threshold_core::{Digest, Timestamp};
use threshold_wire::{LayerName, Text, Whole, layer_named, read, unknown_layer};

use super::client_memory::{AnswerPage, ListPage};
use super::http::trace_id;
use super::json_body::JsonBody;
use super::query::Query;
use super::routes::{Route, delete, get, post, put};
use super::{ApiError, App, json};
use crate::desk;
pub(super) use describe::{change, operator_call};

pub(super) use operator::{Operator, Reader, is_same_origin, is_sent_by_another_site, memory_of};
use settings::{NewSetting, SettingBody};
use subjects::SubjectBody;

/// The number of bans in one answer by default.
const DEFAULT_PAGE: usize = 1_000;
/// The most bans in one answer.
const MAX_PAGE: usize = 10_000;
/// The number of bans that are read at a time: their reasons take memory beside the answer.
const BANS_AT_ONCE: usize = 500;

/// A ban.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Ban")]
struct BanBody {
    id: String,
    /// `edge` for an address, `tenant`, or `user`; null if only the id is known.
    layer: Option<&'static str>,
    /// The address or block, the tenant, or the user.
    key: String,
    reason: String,
    /// The operator who set it, or `ladder` for a ban by one of the policy's ladders.
    by: String,
    /// The start, in Unix seconds.
    from: u64,
    /// The end, in Unix seconds; null for a permanent ban.
    until: Option<u64>,
}

/// A ban to set.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", expecting = "an object")]
#[schemars(rename = "NewBan")]
struct NewBan<'a> {
    layer: LayerName,
    /// An address or CIDR (edge), a tenant, or a user. An IPv6 address without a prefix stands for the policy's
    /// `ipv6_prefix`; `ADDR/128` is one address. Or a digest as events and logs show it, of the last hour.
    #[serde(borrow)]
    #[schemars(length(min = 1))]
    key: Text<'a>,
    /// The reason. It is not disclosed to the banned client.
    #[serde(borrow)]
    #[schemars(length(min = 1, max = 1_000))]
    reason: Text<'a>,
    /// The length; permanent if left out.
    #[schemars(range(min = 1, max = 315_360_000))]
    duration_sec: Option<Whole>,
}

/// The answer to a change that returns nothing else.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Changed")]
struct ChangedBody {
    ok: bool,
}

/// The answer to a change that lifts all bans on a subject.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Lifted")]
struct LiftedBody {
    ok: bool,
    /// The number of bans that were lifted.
    lifted: usize,
}

/// The query of a call that lifts all bans on a subject.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SubjectQuery {
    layer: Option<String>,
    key: Option<String>,
    reason: Option<String>,
}

/// The query of a call that lists bans.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PageQuery {
    limit: Option<String>,
    after: Option<String>,
}

/// The query of a change without a body.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReasonQuery {
    reason: Option<String>,
}

pub(super) fn routes() -> Vec<Route> {
    let (subject, tenant, user) = ("/v1/subjects/{layer}/{key}", "/v1/tenants/{id}", "/v1/users/{id}");
    vec![
        get("/v1/bans", list, describe::list_bans),
        post("/v1/bans", add, describe::add_ban),
        delete("/v1/bans", lift_subject, describe::lift_subject),
        delete("/v1/bans/{id}", lift, describe::lift_ban),
        put("/v1/bans/sets/{origin}", ban_sets::replace, describe::import_bans),
        get("/v1/locks", locks::list, describe::locks),
        get("/v1/shadow-bans", shadow_bans::list, describe::shadow_bans),
        get("/v1/audit", audit::list, describe::audit),
        get(subject, subjects::show, describe::subject),
        delete(subject, subjects::forgive, describe::forgive),
        post("/v1/forgive", subjects::forgive_rule, describe::forgive_rule),
        get(tenant, settings::tenant, describe::tenant),
        put(tenant, settings::set_tenant, describe::set_tenant),
        get(user, settings::user, describe::user),
        put(user, settings::set_user, describe::set_user),
    ]
}

async fn list(
    reader: Reader,
    State(app): State<Arc<App>>,
    Query(PageQuery { limit, after }): Query<PageQuery>,
) -> Result<Response, ApiError> {
    let limit = page_limit(limit.as_deref())?;
    let after = after.map(|id| ban_id(&id)).transpose()?;
    let memory = reader.memory(&app).await?;
    memory.page(&app, ban_page(&app, after, limit).await?)
}

/// Returns as many bans as one answer has room for, at most `limit`.
async fn ban_page(app: &App, mut after: Option<Digest>, limit: usize) -> Result<AnswerPage, ApiError> {
    // One policy for the whole page, so that all names are redacted by the same rules.
    let policy = app.desk.policy();
    let (mut page, mut left) = (ListPage::new()?, limit);
    loop {
        let wanted = left.min(BANS_AT_ONCE);
        let bans = app.desk.bans(after, wanted).await?;
        for listed in &bans {
            if !page.push(&BanBody::new(listed.id, listed.ban.as_ref(), listed.until, &policy))? {
                return page.end();
            }
            after = Some(listed.id);
        }
        left = left.saturating_sub(bans.len());
        if bans.len() < wanted || left == 0 {
            return page.end();
        }
    }
}

async fn add(operator: Operator, State(app): State<Arc<App>>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    let NewBan { layer, key, reason, duration_sec } = read(&body)?;
    // The bounds are checked by the desk, which all doors share.
    let seconds = duration_sec.map(Whole::number);
    let key = app.desk.named(layer.0, key.as_str())?;
    let new = desk::NewBan { layer: layer.0, key: &key, reason: reason.as_str(), seconds };
    let (id, ban) = app.desk.ban(&operator.0, new).await?;
    Ok(json(StatusCode::OK, &BanBody::new(id, Some(&ban), ban.until, &app.desk.policy())))
}

async fn lift(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Query(ReasonQuery { reason }): Query<ReasonQuery>,
) -> Result<Response, ApiError> {
    let id = app.desk.ban_with_prefix(&id).await?;
    app.desk.lift(&operator.0, id, reason.as_deref()).await?;
    Ok(json(StatusCode::OK, &ChangedBody { ok: true }))
}

async fn lift_subject(
    operator: Operator,
    State(app): State<Arc<App>>,
    Query(SubjectQuery { layer, key, reason }): Query<SubjectQuery>,
) -> Result<Response, ApiError> {
    let layer = layer.ok_or_else(|| ApiError::bad("layer", "the layer is missing"))?;
    let layer = layer_named(&layer).ok_or_else(|| ApiError::bad("layer", unknown_layer(&layer)))?;
    let key = key.ok_or_else(|| ApiError::bad("key", "the key is missing"))?;
    let key = app.desk.named(layer, &key)?;
    let lifted = app.desk.lift_subject(&operator.0, (layer, &key), reason.as_deref()).await?;
    Ok(json(StatusCode::OK, &LiftedBody { ok: true, lifted }))
}

impl BanBody {
    fn new(id: Digest, ban: Option<&Ban>, until: Timestamp, policy: &Policy) -> Self {
        // The id stands in for a name that is not known, so that every line of a list can be told from the others.
        let key = ban.map_or_else(|| hexadecimal(id), |ban| policy.shown_key(&ban.whom));
        Self {
            id: hexadecimal(id),
            layer: ban.map(|ban| ban.whom.layer().name()),
            key,
            reason: ban.map(|ban| ban.reason.to_string()).unwrap_or_default(),
            by: ban.map_or_else(|| "ladder".to_owned(), |ban| ban.by.to_string()),
            // A start is rounded down and an end up, so that the ban covers at least the time that it is shown for.
            from: ban.map_or(0, |ban| ban.from.micros().checked_div(1_000_000).unwrap_or(0)),
            until: until.unless_never().map(Timestamp::secs_ceil),
        }
    }
}

/// Returns how many items an answer has.
fn page_limit(text: Option<&str>) -> Result<usize, ApiError> {
    text.map_or(Ok(DEFAULT_PAGE), |text| {
        let limit = text.parse().ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
        limit.ok_or_else(|| ApiError::bad("limit", format!("limit must be from 1 to {MAX_PAGE}")))
    })
}

fn ban_id(text: &str) -> Result<Digest, ApiError> {
    let id = trace_id(text).map(|id| Digest::from_u128(id.to_u128()));
    id.ok_or_else(|| ApiError::bad("id", "the id of a ban has 32 hexadecimal digits"))
}

fn hexadecimal(id: Digest) -> String {
    format!("{:032x}", id.to_u128())
}
