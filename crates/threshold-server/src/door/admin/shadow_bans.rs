//! `/v1/shadow-bans`: the shadow bans in force.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_limiter::ActiveShadowBan;

use super::operator::Reader;
use super::page_limit;
use crate::door::query::Query;
use crate::door::{ApiError, App, json};

/// A shadow ban that this server has brought.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "ShadowBan")]
pub(super) struct ShadowBanBody {
    /// The key of its standing.
    id: String,
    /// The subject as events name it, `user=u1`; null if it was restored after a restart.
    subject: Option<String>,
    /// The layer and the key under which `/v1/subjects` finds it, if it is an address, a tenant or a user.
    layer: Option<&'static str>,
    key: Option<String>,
    /// When it ends, unless further strikes follow, in Unix seconds.
    until: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    limit: Option<String>,
}

impl From<ActiveShadowBan> for ShadowBanBody {
    fn from(ban: ActiveShadowBan) -> Self {
        let subject = ban.subject.map(String::from);
        let (layer, key) = subject.as_deref().and_then(place).unzip();
        Self { id: super::hexadecimal(ban.key), layer, key, subject, until: ban.until.secs_ceil() }
    }
}

/// Returns the layer and the key of a subject. A tenant's user is `TENANT/USER`.
fn place(subject: &str) -> Option<(&'static str, String)> {
    let parts: Vec<(&str, &str)> = subject.split(',').filter_map(|part| part.split_once('=')).collect();
    match parts.as_slice() {
        [("user", user)] => Some(("user", (*user).to_owned())),
        [("tenant", tenant)] => Some(("tenant", (*tenant).to_owned())),
        [("ip", ip)] => Some(("edge", (*ip).to_owned())),
        [("tenant", tenant), ("user", user)] => Some(("user", format!("{tenant}/{user}"))),
        _ => None,
    }
}

pub(super) async fn list(
    _: Reader,
    State(app): State<Arc<App>>,
    Query(ListQuery { limit }): Query<ListQuery>,
) -> Result<Response, ApiError> {
    let limit = page_limit(limit.as_deref())?;
    let bans: Vec<ShadowBanBody> = app.desk.shadow_bans(limit).into_iter().map(ShadowBanBody::from).collect();
    Ok(json(StatusCode::OK, &bans))
}
