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
use super::admin::Reader;

pub(super) const MEDIA_TYPE: &str = "text/event-stream";
/// How often something is sent on a quiet stream, so that proxies leave it open and a client that is gone is noticed.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The streams of one kind that may be open at once. Each holds a connection.
///
/// Read-only tokens may open half of them, so that the others are left for those who have to act.
#[derive(Debug)]
pub(super) struct Streams {
    free: Arc<Semaphore>,
    free_for_readers: Arc<Semaphore>,
    most: usize,
}

/// The place of an open stream. It is free again when it is dropped.
#[derive(Debug)]
pub(super) struct StreamPlace {
    _place: OwnedSemaphorePermit,
    _of_readers: Option<OwnedSemaphorePermit>,
}

impl Streams {
    pub(super) fn new(most: usize) -> Self {
        let for_readers = most.div_ceil(2);
        Self { free: Arc::new(Semaphore::new(most)), free_for_readers: Arc::new(Semaphore::new(for_readers)), most }
    }

    /// Takes a place.
    pub(super) fn take(&self, of: &str, reader: &Reader) -> Result<StreamPlace, ApiError> {
        let busy = |message| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message);
        let of_readers = if reader.may_change {
            None
        } else {
            let place = Arc::clone(&self.free_for_readers).try_acquire_owned();
            let most = self.most.div_ceil(2);
            let message =
                || format!("{most} streams of {of} are open with read-only tokens, which are the most for them");
            Some(place.map_err(|_| busy(message()))?)
        };
        let place = Arc::clone(&self.free).try_acquire_owned();
        let place = place.map_err(|_| busy(format!("{} streams of {of} are open, which are the most", self.most)))?;
        Ok(StreamPlace { _place: place, _of_readers: of_readers })
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

/// Answers with a stream of what is received. The place is held until the stream ends.
pub(super) fn response(receiver: mpsc::Receiver<Bytes>, place: StreamPlace) -> Response {
    let mut response = Response::new(Body::new(StreamBody { receiver, _place: place }));
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
    _place: StreamPlace,
}

impl http_body::Body for StreamBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.receiver.poll_recv(cx).map(|part| part.map(|part| Ok(Frame::data(part))))
    }
}
