//! `/v1/locks`: the accounts of logins that are locked.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::Timestamp;

use super::operator::Reader;
use super::{PageQuery, ban_id, hexadecimal, page_limit};
use crate::desk::Lock;
use crate::door::client_memory::{ListPage, PAGE_BYTES};
use crate::door::query::Query;
use crate::door::{ApiError, App};

/// The most accounts for which an answer has room: each takes more than 100 bytes.
const MAX_LOCKS: usize = PAGE_BYTES / 100;

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
    reader: Reader,
    State(app): State<Arc<App>>,
    Query(PageQuery { limit, after }): Query<PageQuery>,
) -> Result<Response, ApiError> {
    let limit = page_limit(limit.as_deref())?;
    let after = after.map(|id| ban_id(&id)).transpose()?;
    let memory = reader.memory(&app).await?;
    let locks = app.desk.locks(after, limit.min(MAX_LOCKS)).await?;
    let mut page = ListPage::new()?;
    for lock in locks {
        if !page.push(&LockBody::from(lock))? {
            // The rest is in the next page.
            break;
        }
    }
    memory.page(&app, page.end()?)
}
