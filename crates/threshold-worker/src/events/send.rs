//! Sends events to a Threshold server, and alerts to an operator's URL.

use std::time::Duration;

use futures_util::future::{Either, select};
use http::Uri;
use threshold_core::event::sql;
use worker::wasm_bindgen::JsValue;
use worker::{Delay, Fetch, Headers, Method, Request, RequestInit, RequestRedirect};

use super::database::{Database, DatabaseError, number};

/// The events of one request. A server takes 8 MiB of them, and an event with the most limits and the longest names has less than 32 KiB.
const BATCH: u64 = 100;
/// The most requests of one run.
const MAX_BATCHES: usize = 50;
/// How long a receiver may take to answer.
const DEADLINE: Duration = Duration::from_secs(10);

/// Why something was not received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiverError {
    #[error("{0} must be a URL with http or https")]
    Url(&'static str),
    #[error("{0} was not reached: {1}")]
    Unreachable(&'static str, String),
    #[error("{0} answered {1}")]
    Refused(&'static str, u16),
}

/// A URL that takes JSON.
pub(crate) struct Receiver {
    /// The variable that names it.
    name: &'static str,
    url: String,
    token: Option<String>,
}

impl Receiver {
    /// Returns the receiver at a URL, if there is one.
    pub(crate) fn new(
        name: &'static str,
        url: Option<String>,
        token: Option<String>,
    ) -> Result<Option<Self>, ReceiverError> {
        let Some(url) = url else { return Ok(None) };
        let parsed = url.parse::<Uri>().ok();
        let is_http = parsed.is_some_and(|url| matches!(url.scheme_str(), Some("http" | "https")));
        if is_http { Ok(Some(Self { name, url, token })) } else { Err(ReceiverError::Url(name)) }
    }

    /// Posts a body, and waits until it is accepted.
    pub(crate) async fn post(&self, body: &str) -> Result<(), ReceiverError> {
        let unreachable = |reason: String| ReceiverError::Unreachable(self.name, reason);
        let request = self.request(body).map_err(|error| unreachable(error.to_string()))?;
        let fetch = Fetch::Request(request);
        let answered = match select(std::pin::pin!(fetch.send()), std::pin::pin!(Delay::from(DEADLINE))).await {
            Either::Left((answered, _)) => answered.map_err(|error| unreachable(error.to_string()))?,
            Either::Right(_) => return Err(unreachable("no answer in time".to_owned())),
        };
        match answered.status_code() {
            200..=299 => Ok(()),
            status => Err(ReceiverError::Refused(self.name, status)),
        }
    }

    fn request(&self, body: &str) -> worker::Result<Request> {
        let headers = Headers::new();
        headers.set("content-type", "application/json")?;
        if let Some(token) = &self.token {
            headers.set("authorization", &format!("Bearer {token}"))?;
        }
        let mut init = RequestInit::new();
        init.with_method(Method::Post).with_headers(headers).with_body(Some(JsValue::from_str(body)));
        // The token is for this URL alone.
        init.with_redirect(RequestRedirect::Manual);
        Request::new_with_init(&self.url, &init)
    }
}

/// Sends the events that the server has not accepted yet, the oldest first. What it may have received without this Worker hearing of
/// it is sent again, and known by its id.
pub(super) async fn send_all(database: &Database, server: &Receiver) -> Result<(), super::flush::FlushError> {
    for _ in 0..MAX_BATCHES {
        let batch = unsent(database).await?;
        if batch == "[]" {
            break;
        }
        server.post(&batch).await?;
        database.run(sql::SENT, &[JsValue::from_str(&batch)]).await?;
    }
    Ok(())
}

async fn unsent(database: &Database) -> Result<String, DatabaseError> {
    database.text(sql::UNSENT, &[number(BATCH)], "batch").await
}
