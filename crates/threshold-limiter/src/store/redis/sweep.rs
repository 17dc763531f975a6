//! The search for reservations that have expired and give back their charges. Every node does it twice a second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ::redis::{Cmd, Value};
use futures_util::future::join_all;
use threshold_core::receipt::CommitError;
use threshold_core::{Answer, Command, TraceId};

use super::executor::Executor;
use super::server::{ServerScript, jittered};
use super::{keys, reply};
use crate::store::StoreError;

static EXPIRED: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("expired.lua")));

/// The pause between two searches.
const PAUSE: Duration = Duration::from_millis(500);
/// The largest number of reservations that one search ends in one partition.
const MAX_SWEPT: usize = 64;

/// Ends reservations that have expired, until `is_open` returns false.
pub(super) fn start(executor: Executor, expired: Arc<AtomicU64>, is_open: impl Fn() -> bool + Send + 'static) {
    tokio::spawn(async move {
        while is_open() {
            // While a server is away there is nothing to end. It is tried again after the pause.
            let ended = release_expired(&executor).await.unwrap_or(0);
            expired.fetch_add(u64::try_from(ended).unwrap_or(0), Ordering::Relaxed);
            tokio::time::sleep(jittered(PAUSE)).await;
        }
    });
}

/// Ends the reservations that have expired, and returns their number.
pub(super) async fn release_expired(executor: &Executor) -> Result<usize, StoreError> {
    let (mut ended, mut failed) = (0_usize, None);
    let (due, unread) = expired(executor).await;
    for id in due {
        // One record that cannot be read, or whose server is away, must not keep the others from their end.
        match end(executor, id).await {
            Ok(()) => ended = ended.saturating_add(1),
            Err(error) => failed = Some(error),
        }
    }
    failed.or(unread).map_or(Ok(ended), Err)
}

async fn end(executor: &Executor, id: TraceId) -> Result<(), StoreError> {
    if let Answer::Ended(Err(CommitError::Unknown)) = executor.execute(Command::Expire { id }).await? {
        // Its record is gone or was ended before, and only the index is left of it.
        let (index, mut remove) = (keys::expiring(keys::home(id)), Cmd::new());
        remove.arg("ZREM").arg(&index).arg(keys::member(id));
        executor.servers.send(&index, &remove).await?;
    }
    Ok(())
}

/// Returns reservations that have expired by the clocks of their servers, and an error if an index could not be read.
async fn expired(executor: &Executor) -> (Vec<TraceId>, Option<StoreError>) {
    let most = [MAX_SWEPT.to_string().into_bytes()];
    let searches = keys::homes().map(|home| {
        let (index, most) = ([keys::expiring(home)], &most);
        async move { executor.servers.run(&EXPIRED, &index, most).await }
    });
    let (mut due, mut failed) = (Vec::new(), None);
    for found in join_all(searches).await {
        let found = match found.map_err(StoreError::from).and_then(reply::array) {
            Ok(found) => found,
            Err(error) => {
                failed = Some(error);
                continue;
            }
        };
        let mut parts = found.into_iter();
        while let (Some(Value::BulkString(member)), Some(score)) = (parts.next(), parts.next()) {
            due.extend(keys::id_of_member(&member).zip(reply::number(Some(score)).ok()));
        }
    }
    // In the order in which they were due, as core does it: the first to give back may make the others void.
    due.sort_unstable_by_key(|(id, score)| (*score, *id));
    (due.into_iter().map(|(id, _)| id).collect(), failed)
}
