//! `/v1/locks`: the accounts of logins that are locked.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::Timestamp;

use super::operator::Reader;
use super::{PageQuery, ban_id, hexadecimal, page_limit};
use crate::desk::Lock;
use crate::door::query::Query;
use crate::door::{ApiError, App, json_bytes};

/// A locked account.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Lock")]
pub(super) struct LockBody {
    /// The key of the account, by which the list is ordered.
    id: String,
    /// The digest that `GET /v1/subjects/account/{key}` has for the account. Names of accounts are not stored.
    digest: String,
    /// Consecutive failures from unknown devices.
    failures: u32,
    /// Until when it is locked for unknown devices, in Unix seconds; null at the ceiling.
    locked_until: Option<u64>,
    /// Whether it has reached the ceiling, and stays locked until a reset or an operator lifts it.
    at_ceiling: bool,
}

impl From<Lock> for LockBody {
    fn from(Lock { id, digest, failures, until }: Lock) -> Self {
        let locked_until = until.unless_never().map(Timestamp::secs_ceil);
        Self { id: hexadecimal(id), digest, failures, locked_until, at_ceiling: locked_until.is_none() }
    }
}

pub(super) async fn list(
    _: Reader,
    State(app): State<Arc<App>>,
    Query(PageQuery { limit, after }): Query<PageQuery>,
) -> Result<Response, ApiError> {
    let limit = page_limit(limit.as_deref())?;
    let after = after.map(|id| ban_id(&id)).transpose()?;
    let locks: Vec<LockBody> = app.desk.locks(after, limit).await?.into_iter().map(LockBody::from).collect();
    let body = serde_json::to_vec(&locks).unwrap_or_default();
    let permit = app.operator_answer_memory.acquire(body.len()).await?;
    Ok(json_bytes(StatusCode::OK, permit.body(body, app.bounds.client_timeout)))
}
