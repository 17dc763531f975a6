//! `/v1/series`: what was decided over time, for charts; as a stream, each second.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use http::HeaderMap;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::admin::{Reader, operator_call};
use super::openapi::{Operation, Schemas};
use super::query::Query;
use super::routes::{Route, get};
use super::sse::{self, Streams};
use super::{ApiError, App, session};
use crate::signals::lock;
use crate::signals::series::{ChartPeriod, Sample, Series};

/// The most streams at once. A page has one.
const MAX_STREAMS: usize = 32;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SeriesQuery {
    period: Option<String>,
}

/// Returns the places for streams of samples.
pub(super) fn streams() -> Streams {
    Streams::new(MAX_STREAMS)
}

pub(super) fn routes() -> Vec<Route> {
    vec![get("/v1/series", show, describe)]
}

fn describe(schemas: &mut Schemas) -> Operation {
    let period = json!({
        "name": "period",
        "in": "query",
        "description": "Five minutes in steps of a second, an hour in steps of ten seconds, or a day in steps of five minutes",
        "schema": {"type": "string", "enum": ["5min", "h", "day"], "default": "5min"},
    });
    // The schema of a sample is in the document too: it is what a stream has.
    let _ = schemas.of::<Sample>();
    let summary = "Count decisions over time. With `Accept: text/event-stream`, stream a `Sample` each second";
    operator_call("series", summary, &schemas.of::<Series>())
        .parameter(period)
        .errors(&[(503, "Too many streams are open (`busy`)")])
}

async fn show(
    reader: Reader,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Query(SeriesQuery { period }): Query<SeriesQuery>,
) -> Result<Response, ApiError> {
    let period = match period.as_deref() {
        None | Some("5min") => ChartPeriod::FiveMinutes,
        Some("h") => ChartPeriod::Hour,
        Some("day") => ChartPeriod::Day,
        Some(_) => return Err(ApiError::bad("period", "must be 5min, h or day")),
    };
    if !sse::is_wanted(&headers) {
        let memory = reader.memory(&app).await?;
        let series = lock(&app.signals.series).series(period);
        return memory.json(&app, &series);
    }
    if period != ChartPeriod::FiveMinutes {
        return Err(ApiError::bad("period", "a stream has steps of a second"));
    }
    let place = app.series_streams.take("series", &reader)?;
    let (sender, receiver) = mpsc::channel(1);
    let session = session::of(&app, &headers);
    tokio::spawn(send_all(app, session, sender));
    Ok(sse::response(receiver, place))
}

/// Sends samples until the client has left or signed out, reads too slowly, or the server stops.
async fn send_all(app: Arc<App>, session: Option<HeaderMap>, sender: mpsc::Sender<Bytes>) {
    let mut newest = lock(&app.signals.series).newest();
    let patience: Duration = app.bounds.client_timeout;
    let mut part = Bytes::from_static(b"retry: 1000\n\n");
    loop {
        if !session::lasts(&app, session.as_ref()) || !matches!(timeout(patience, sender.send(part)).await, Ok(Ok(())))
        {
            return;
        }
        tokio::select! {
            changed = newest.changed() => if changed.is_err() { return },
            () = sender.closed() => return,
            () = app.health.until_draining() => return,
        }
        let sample = *newest.borrow_and_update();
        let sample = sample.and_then(|sample| serde_json::to_string(&sample).ok());
        // Before the first second a comment, which clients ignore.
        part = sample.map_or_else(|| ":\n\n".into(), |sample| format!("data: {sample}\n\n").into());
    }
}
