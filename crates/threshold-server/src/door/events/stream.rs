//! The stream of events: server-sent events, each with its number as id.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::response::Response;
use bytes::Bytes;
use http::HeaderMap;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::{Collect, page};
use crate::door::admin::Reader;
use crate::door::sse::{self, KEEP_ALIVE, Streams};
use crate::door::{ApiError, App, session};
use crate::signals::database::{EventQuery, Page};

/// The most streams at once. Each reads the file of events a few times a second.
const MAX_STREAMS: usize = 16;
/// The events that are sent at once.
const AT_ONCE: usize = 100;

/// Returns the places for streams of events.
pub(in crate::door) fn streams() -> Streams {
    Streams::new(MAX_STREAMS)
}

/// Opens a stream of the events after `Last-Event-ID` or `after`, or of those that come from now on.
pub(super) async fn open(
    app: Arc<App>,
    reader: &Reader,
    headers: &HeaderMap,
    query: EventQuery,
) -> Result<Response, ApiError> {
    let place = app.event_streams.take("events", reader)?;
    let after = match headers.get("last-event-id") {
        Some(id) => {
            let id = id.to_str().ok().and_then(|id| id.trim().parse().ok());
            Some(id.ok_or_else(|| ApiError::bad("Last-Event-ID", "Last-Event-ID must be the id of an event"))?)
        }
        None => query.after,
    };
    // Without a number, those that come after the newest one.
    let after = match after {
        Some(after) => after,
        None => page(&app, EventQuery { limit: 1, ..EventQuery::default() }, Collect::First).await?.next,
    };
    // One part waits to be sent while the next one is not read yet.
    let (sender, receiver) = mpsc::channel(1);
    let session = session::of(&app, headers);
    tokio::spawn(send_all(app, session, EventQuery { after: Some(after), limit: AT_ONCE, ..query }, sender));
    Ok(sse::response(receiver, place))
}

/// Sends events until the client has left or signed out, reads too slowly, or the server stops.
async fn send_all(app: Arc<App>, session: Option<HeaderMap>, mut query: EventQuery, sender: mpsc::Sender<Bytes>) {
    let mut newest = app.signals.database.newest();
    let patience = app.bounds.client_timeout;
    let send = |part: String| {
        let (app, session, sender) = (&app, session.as_ref(), &sender);
        async move {
            session::lasts(app, session) && matches!(timeout(patience, sender.send(part.into())).await, Ok(Ok(())))
        }
    };
    // Answers at once, so that a client knows that its stream is open.
    if !send(format!("retry: 1000\n{}", position(&query))).await {
        return;
    }
    loop {
        newest.mark_unchanged();
        // A file that cannot be read now may be later. One that was replaced has lower numbers than the last one.
        if let Ok(Page { events, next, .. }) = page(&app, query.clone(), Collect::Later).await {
            query.after = Some(next);
            if !events.is_empty() {
                if !send(written(&events)).await {
                    return;
                }
                continue;
            }
        }
        tokio::select! {
            changed = newest.changed() => if changed.is_err() { return },
            () = sleep(KEEP_ALIVE) => if !send(position(&query)).await { return },
            () = sender.closed() => return,
            () = app.health.until_draining() => return,
        }
    }
}

/// Writes the number after which a stream goes on, as an event without data. A client dispatches none, and resumes after this number even
/// if it has got no event yet.
fn position(query: &EventQuery) -> String {
    format!("id: {}\n\n", query.after.unwrap_or(0))
}

fn written(events: &[(u64, String)]) -> String {
    events.iter().fold(String::new(), |mut text, (number, event)| {
        let _ = write!(text, "id: {number}\ndata: {event}\n\n");
        text
    })
}
