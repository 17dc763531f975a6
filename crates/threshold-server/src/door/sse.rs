//! Streams of server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body::Frame;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::ApiError;

pub(super) const MEDIA_TYPE: &str = "text/event-stream";
/// How often something is sent on a quiet stream, so that proxies leave it open and a client that is gone is noticed.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The streams of one kind that may be open at once. Each holds a connection.
#[derive(Debug)]
pub(super) struct Streams {
    free: Arc<Semaphore>,
    most: usize,
}

impl Streams {
    pub(super) fn new(most: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(most)), most }
    }

    /// Takes a place. It is free again when it is dropped.
    pub(super) fn take(&self, of: &str) -> Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.free).try_acquire_owned().map_err(|_| {
            let message = format!("{} streams of {of} are open, which are the most", self.most);
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message)
        })
    }

    /// Returns how many streams are open.
    #[cfg(test)]
    pub(super) fn open(&self) -> usize {
        self.most.saturating_sub(self.free.available_permits())
    }
}

/// Whether a client asks for a stream.
pub(super) fn is_wanted(headers: &HeaderMap) -> bool {
    let accepts = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut kinds = accepts.flat_map(|value| value.split(',')).map(|kind| kind.split(';').next().unwrap_or("").trim());
    kinds.any(|kind| kind.eq_ignore_ascii_case(MEDIA_TYPE))
}

/// Answers with a stream of what is received. The permit is held until the stream ends.
pub(super) fn response(receiver: mpsc::Receiver<Bytes>, permit: OwnedSemaphorePermit) -> Response {
    let mut response = Response::new(Body::new(StreamBody { receiver, _permit: permit }));
    let fields = response.headers_mut();
    fields.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    fields.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // nginx would hold the events back.
    fields.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

/// The body of a stream. Dropping it ends the stream.
struct StreamBody {
    receiver: mpsc::Receiver<Bytes>,
    _permit: OwnedSemaphorePermit,
}

impl http_body::Body for StreamBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.receiver.poll_recv(cx).map(|part| part.map(|part| Ok(Frame::data(part))))
    }
}
