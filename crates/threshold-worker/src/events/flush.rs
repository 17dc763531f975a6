//! The scheduled handler: moves events from KV to D1, sends them to a server, raises alerts, deletes old ones.

use futures_util::future::join_all;
use threshold_core::event::{Event, EventId, sql};
use threshold_core::{Policy, Span};
use threshold_limiter::Clock as _;
use worker::kv::{KvError, KvStore};
use worker::wasm_bindgen::JsValue;
use worker::{Env, console_error, console_warn};

use super::database::{Database, DatabaseError, millis, number};
use super::send::{Receiver, ReceiverError};
use super::{ALERT_URL, EVENTS_TOKEN, EVENTS_URL, MONITOR_KV, PREFIX, alerts, send};
use crate::clock::DateClock;
use crate::config::text;

/// The events of one step. KV returns at most 100 values at once.
const STEP: u64 = 100;
/// The most steps of one run: each event costs a deletion, and a run has at most 10,000 calls.
const MAX_STEPS: usize = 45;
/// How long events are kept in D1.
const RETENTION: Span = Span::from_secs(30 * 86_400);
/// The most events that are kept in D1.
const MAX_EVENTS: u64 = 1_000_000;

/// Why a run of the scheduled handler failed. What it has not moved or sent is left for the next one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FlushError {
    #[error("bind a KV namespace as {MONITOR_KV}")]
    NoNamespace,
    #[error("{MONITOR_KV}: {0}")]
    Kv(#[from] KvError),
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Receiver(#[from] ReceiverError),
}

/// Does what is due every minute.
pub(crate) async fn scheduled(env: &Env, policy: &Policy) {
    if let Err(error) = run(env, policy).await {
        console_error!("{}", serde_json::json!({"event": "events_failed", "reason": error.to_string()}));
    }
}

async fn run(env: &Env, policy: &Policy) -> Result<(), FlushError> {
    let namespace = env.kv(MONITOR_KV).map_err(|_| FlushError::NoNamespace)?;
    let server = Receiver::new(EVENTS_URL, text(env, EVENTS_URL), text(env, EVENTS_TOKEN))?;
    let operator = Receiver::new(ALERT_URL, text(env, ALERT_URL), None)?;
    let database = Database::open(env).await?;
    let moved = move_all(&namespace, &database, server.is_some()).await;
    // What is in the database already is sent and counted also if KV fails.
    match &server {
        Some(server) => send::send_all(&database, server).await?,
        // A server raises them itself, from the events of all its Workers.
        None => alerts::raise(&database, policy, operator.as_ref()).await?,
    }
    let oldest = millis(DateClock.now().minus(RETENTION));
    database
        .run_all(vec![
            database.statement(sql::DELETE_OLD, &[oldest])?,
            database.statement(sql::DELETE_SURPLUS, &[number(MAX_EVENTS)])?,
        ])
        .await?;
    moved
}

/// Moves the events in KV to the database, the oldest first.
async fn move_all(namespace: &KvStore, database: &Database, is_sent: bool) -> Result<(), FlushError> {
    let mut cursor = None;
    for _ in 0..MAX_STEPS {
        let mut list = namespace.list().prefix(PREFIX.to_owned()).limit(STEP);
        if let Some(cursor) = cursor {
            list = list.cursor(cursor);
        }
        let page = list.execute().await?;
        let keys: Vec<String> = page.keys.into_iter().map(|key| key.name).filter(|key| is_of_event(key)).collect();
        move_step(namespace, database, &keys, is_sent).await?;
        cursor = page.cursor;
        if page.list_complete || cursor.is_none() {
            return Ok(());
        }
    }
    console_warn!("{}", serde_json::json!({"event": "events_backlog", "moved": STEP.saturating_mul(MAX_STEPS as u64)}));
    Ok(())
}

/// Returns whether a key is that of an event. The namespace may hold keys of others that begin alike, such as counters.
fn is_of_event(key: &str) -> bool {
    let parts = key.strip_prefix(PREFIX).and_then(|rest| rest.split_once(':'));
    parts.is_some_and(|(millis, id)| millis.parse::<u64>().is_ok() && EventId::parse(id).is_some())
}

/// Moves the events with these keys. They are deleted from KV when the database has them: a run that ends in between leaves them in
/// both, and the next one inserts none of them twice.
async fn move_step(namespace: &KvStore, database: &Database, keys: &[String], is_sent: bool) -> Result<(), FlushError> {
    if keys.is_empty() {
        return Ok(());
    }
    let values = namespace.get_bulk(keys).text().await?;
    let (mut events, mut moved) = (Vec::new(), Vec::new());
    // A key without a value has expired, or its value has not arrived at this location yet.
    for (key, value) in keys.iter().filter_map(|key| Some((key, values.get(key)?.as_deref()?))) {
        match Event::from_json(value) {
            Ok(event) => events.push(event),
            // It would be read again in every run.
            Err(error) => console_error!(
                "{}",
                serde_json::json!({"event": "event_deleted", "key": key, "reason": error.to_string()})
            ),
        }
        moved.push(key);
    }
    let unsent = if is_sent { number(1) } else { JsValue::NULL };
    database.run(sql::INSERT, &[Event::batch_to_json(&events).into(), unsent]).await?;
    let deleted = join_all(moved.into_iter().map(|key| namespace.delete(key))).await;
    Ok(deleted.into_iter().collect::<Result<(), KvError>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A counter of an eventual rule in the same namespace was deleted as an event that is none.
    #[test]
    fn only_keys_of_events_are_moved() {
        assert!(is_of_event("ratelimit:1767225600123:3f1c0c2e-5a0b-4c59-9d0e-0a4a5a6f1c77"));
        for other in
            ["ratelimit:u1:20500", "ratelimit:17:20500", "ratelimit:1767225600123", "events:1:2", "ratelimit::"]
        {
            assert!(!is_of_event(other), "{other}");
        }
    }
}
