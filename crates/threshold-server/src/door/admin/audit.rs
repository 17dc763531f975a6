//! `/v1/audit`: the operators' changes, the newest first.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_limiter::journal::AuditLine;

use super::operator::Reader;
use super::page_limit;
use crate::door::query::Query;
use crate::door::{ApiError, App, json_bytes};

/// A line of the audit.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "AuditLine")]
pub(super) struct AuditBody {
    /// Its number, which grows with every line.
    id: u64,
    /// The time, in Unix seconds.
    at: u64,
    /// The operator or caller.
    who: String,
    /// A verb, a colon, and the old and new state.
    action: String,
    /// The layer and key of the subject.
    about: String,
    /// The reason; empty if none was given.
    why: String,
}

/// The query of a call that lists the audit.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AuditQuery {
    limit: Option<String>,
    before: Option<String>,
}

impl From<(u64, AuditLine)> for AuditBody {
    fn from((id, AuditLine { at, who, action, about, why }): (u64, AuditLine)) -> Self {
        Self { id, at: at.micros().checked_div(1_000_000).unwrap_or(0), who, action, about, why }
    }
}

pub(super) async fn list(
    _: Reader,
    State(app): State<Arc<App>>,
    Query(AuditQuery { limit, before }): Query<AuditQuery>,
) -> Result<Response, ApiError> {
    let limit = page_limit(limit.as_deref())?;
    let before = before.map(|text| text.parse().map_err(|_| ApiError::bad("before", "before must be a number")));
    let before = before.transpose()?;
    let reader = Arc::clone(&app);
    // SQLite blocks, and would hold up the requests of this thread.
    let lines = tokio::task::spawn_blocking(move || reader.desk.audit(before, limit)).await;
    let lines = lines.map_err(|_| ApiError::from(crate::desk::OperationError::AuditUnreadable))??;
    let lines: Vec<AuditBody> = lines.into_iter().map(AuditBody::from).collect();
    let body = serde_json::to_vec(&lines).unwrap_or_default();
    let permit = app.operator_answer_memory.acquire(body.len()).await?;
    Ok(json_bytes(StatusCode::OK, permit.body(body, app.bounds.client_timeout)))
}
