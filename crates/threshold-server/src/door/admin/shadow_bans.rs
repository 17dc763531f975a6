//! `/v1/shadow-bans`: the shadow bans in force.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::Digest;
use threshold_core::key::is_redacted;
use threshold_core::policy::{Layer, UserScope};
use threshold_limiter::ActiveShadowBan;

use super::operator::Reader;
use super::page_limit;
use crate::desk::Desk;
use crate::door::query::Query;
use crate::door::{ApiError, App};

/// The bytes for which memory is acquired for each shadow ban.
const TYPICAL_BYTES: usize = 512;

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

impl ShadowBanBody {
    fn new(ban: ActiveShadowBan, desk: &Desk) -> Self {
        let subject = ban.subject.map(String::from);
        let (layer, key) = subject.as_deref().and_then(|subject| place(subject, ban.key, desk)).unzip();
        let layer = layer.map(Layer::name);
        Self { id: super::hexadecimal(ban.key), layer, key, subject, until: ban.until.secs_ceil() }
    }
}

/// Returns the layer and the key of the subject with this standing.
///
/// Its text alone does not say: the name of a user may contain `,` and `=`, and an operator would forgive another one.
fn place(subject: &str, standing: Digest, desk: &Desk) -> Option<(Layer, String)> {
    let policy = desk.policy();
    let (word, rest) = subject.split_once('=')?;
    let is_scoped = policy.identity().user_scope == UserScope::Tenant;
    let is_own = |(layer, key): &(Layer, String)| {
        // Nothing else looks like a digest.
        let is_digest = key.split('/').any(is_redacted);
        let is_its = |key: &str| policy.keys_of(*layer, key).standings.contains(&standing);
        is_digest || desk.named(*layer, key).is_ok_and(|key| is_its(&key))
    };
    let users = rest.match_indices(",user=").filter_map(|(at, between)| {
        let user = rest.get(at.checked_add(between.len())?..)?;
        Some((Layer::User, UserScope::Tenant.write(rest.get(..at), user).into_owned()))
    });
    match word {
        "ip" => Some((Layer::Edge, rest.to_owned())),
        "user" if !is_scoped => Some((Layer::User, rest.to_owned())).filter(is_own),
        "tenant" => users.filter(|_| is_scoped).chain([(Layer::Tenant, rest.to_owned())]).find(is_own),
        _ => None,
    }
}

pub(super) async fn list(
    reader: Reader,
    State(app): State<Arc<App>>,
    Query(ListQuery { limit }): Query<ListQuery>,
) -> Result<Response, ApiError> {
    let limit = page_limit(limit.as_deref())?;
    let memory = reader.memory_for(&app, limit.saturating_mul(TYPICAL_BYTES)).await?;
    let bans = app.desk.shadow_bans(limit).into_iter();
    let bans: Vec<ShadowBanBody> = bans.map(|ban| ShadowBanBody::new(ban, &app.desk)).collect();
    memory.json(&app, &bans)
}
