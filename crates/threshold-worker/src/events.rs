//! Events: recorded in KV after the answer, and moved to D1 by the scheduled handler, which also raises alerts.

mod alerts;
mod buffer;
mod database;
mod flush;
mod send;

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use threshold_core::event::EventId;
use threshold_core::{Event, Span, Timestamp};
use threshold_limiter::{Clock as _, ObservedDecision, Observer};
use worker::kv::{KvError, KvStore};
use worker::send::{SendFuture, SendWrapper};
use worker::{Delay, Env, console_warn};

use crate::clock::DateClock;
use buffer::Buffer;
pub(crate) use database::{Database, DatabaseError, millis};
pub(crate) use flush::scheduled;

/// The KV namespace that events are recorded in.
pub const MONITOR_KV: &str = "MONITOR_KV";
/// The D1 database that the scheduled handler moves them to.
pub const DATABASE: &str = "DB";
/// The variable with the URL of a Threshold server's `/v1/events`, which hears of them too.
pub const EVENTS_URL: &str = "THRESHOLD_EVENTS_URL";
/// The token for that server.
pub const EVENTS_TOKEN: &str = "THRESHOLD_EVENTS_TOKEN";
/// The variable with the URL that alerts are posted to.
pub const ALERT_URL: &str = "THRESHOLD_ALERT_URL";

/// What the keys of events begin with.
const PREFIX: &str = "ratelimit:";
/// How long an event waits for the scheduled handler, in seconds.
const TTL: u64 = 3_600;

/// Records the events of an isolate.
pub(crate) struct Events {
    /// Without one, strikes are logged and nothing is recorded.
    namespace: Option<SendWrapper<KvStore>>,
    buffer: Mutex<Buffer>,
}

impl Events {
    /// Returns the recorder of an isolate.
    pub(crate) fn new(env: &Env) -> Self {
        Self { namespace: env.kv(MONITOR_KV).ok().map(SendWrapper::new), buffer: Mutex::default() }
    }

    /// Records that a tenant's configuration was refused. Nothing was decided, so the event blocks nobody and counts nowhere.
    pub(crate) fn note_refused(&self, tenant: &str, file: &str, now: Timestamp) {
        let event = serde_json::json!({
            "id": event_id(0).to_string(), "at": now.micros() / 1_000, "layer": "tenant", "blocked": false, "tenant": tenant, "rule": file,
            "verdict": "allow",
        });
        // A name that is too long for an event is in the log only.
        if let (Some(_), Ok(event)) = (&self.namespace, Event::from_json(&event.to_string())) {
            self.buffer().add(event);
        }
    }

    /// Writes the events that wait, or leaves them to a task that will. A Worker calls it after each request, with `waitUntil`.
    pub(crate) async fn write(&self) {
        let Some(wait) = self.buffer().begin(DateClock.now()) else { return };
        SendFuture::new(async {
            if wait > Span::ZERO {
                Delay::from(Duration::from(wait)).await;
            }
            self.put_all().await;
        })
        .await;
    }

    async fn put_all(&self) {
        let (events, unnamed) = self.buffer().take(DateClock.now());
        if unnamed > 0 {
            console_warn!("{}", serde_json::json!({"event": "events_unnamed", "count": unnamed}));
        }
        let Some(namespace) = &self.namespace else { return };
        let results = join_all(events.iter().map(|event| put(namespace, event))).await;
        let failed = results.iter().zip(&events).filter_map(|(result, event)| Some((result.as_ref().err()?, event)));
        let (mut lost, mut reason) = (0_u64, None);
        for (error, event) in failed {
            lost = lost.saturating_add(event.count);
            reason.get_or_insert_with(|| error.to_string());
        }
        if let Some(reason) = reason {
            console_warn!("{}", serde_json::json!({"event": "events_lost", "count": lost, "reason": reason}));
        }
    }

    fn buffer(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Draws the id of an event. Without random numbers, it is that of the decision; the platform has always some.
fn event_id(decision: u128) -> EventId {
    let mut random = [0; 16];
    if getrandom::fill(&mut random).is_err() {
        random = decision.to_be_bytes();
    }
    EventId::new(random)
}

async fn put(namespace: &KvStore, event: &Event) -> Result<(), KvError> {
    let millis = event.at.micros().checked_div(1_000).unwrap_or(0);
    let key = format!("{PREFIX}{millis}:{}", event.id);
    namespace.put(&key, event.to_json())?.expiration_ttl(TTL).execute().await
}

impl Observer for Events {
    fn decided(&self, &ObservedDecision { facts, decision, policy, .. }: &ObservedDecision<'_>) {
        let id = || event_id(decision.trace.to_u128());
        let Some(event) = Event::from_decision(decision, facts, policy, id) else { return };
        if let Some(line) = event.escalation_to_json() {
            console_warn!("{line}");
        }
        if self.namespace.is_some() {
            self.buffer().add(event);
        }
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}
