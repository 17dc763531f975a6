//! `/v1/audit`: the operators' changes, the newest first.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_limiter::journal::AuditLine;

use super::operator::Reader;
use super::page_limit;
use crate::desk::OperationError;
use crate::door::client_memory::{AnswerPage, ListPage};
use crate::door::query::Query;
use crate::door::{ApiError, App};

/// The number of lines that are read at a time: their reasons take memory beside the answer.
const LINES_AT_ONCE: usize = 100;

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
    reader: Reader,
    State(app): State<Arc<App>>,
    Query(AuditQuery { limit, before }): Query<AuditQuery>,
) -> Result<Response, ApiError> {
    let limit = page_limit(limit.as_deref())?;
    let before = before.map(|text| text.parse().map_err(|_| ApiError::bad("before", "before must be a number")));
    let before = before.transpose()?;
    let memory = reader.memory(&app).await?;
    let shared = Arc::clone(&app);
    // SQLite blocks, and would hold up the requests of this thread.
    let page = tokio::task::spawn_blocking(move || page(&shared, before, limit)).await;
    memory.page(&app, page.map_err(|_| OperationError::AuditUnreadable)??)
}

/// Returns as many lines as one answer has room for, at most `limit`.
fn page(app: &App, mut before: Option<u64>, limit: usize) -> Result<AnswerPage, ApiError> {
    let (mut page, mut left) = (ListPage::new()?, limit);
    loop {
        let wanted = left.min(LINES_AT_ONCE);
        let lines = app.desk.audit(before, wanted)?;
        let is_last = lines.len() < wanted || left == wanted;
        left = left.saturating_sub(lines.len());
        for line in lines {
            before = Some(line.0);
            if !page.push(&AuditBody::from(line))? {
                return page.end();
            }
        }
        if is_last {
            return page.end();
        }
    }
}
