//! Serves a connection of HTTP/2, within bounds on its streams, its headers and its time.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

use super::connection::{ConnectionService, MAX_HEAD};
use crate::door::{Answering, ApiError};

/// The most requests at once on one connection. Envoy opens another connection when it needs more.
const MAX_STREAMS: u32 = 256;
/// The most streams that a client may reset before they are served (rapid reset): then the connection ends. What it resets later
/// has cost no more than a request that is read to its end.
const MAX_PENDING_RESETS: usize = 32;
/// The most streams that end by an error of the client; then the connection ends.
const MAX_ERROR_RESETS: usize = 128;
/// How much of a body is accepted before it is read: as much as a small request needs, for each of the streams.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// The largest frame: the least that RFC 9113 allows.
const MAX_FRAME: u32 = 16 << 10;
/// How much of an answer waits in memory for its client.
const MAX_SEND_BUFFER: usize = 64 << 10;

/// How many requests are in progress on all connections of HTTP/2, and how many may be.
#[derive(Debug)]
pub(super) struct RequestsInProgress {
    count: AtomicUsize,
    max: usize,
}

impl RequestsInProgress {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { count: AtomicUsize::new(0), max })
    }
}

/// Serves a connection until it ends, or until `stop` is set and its requests have ended.
pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    service: ConnectionService,
    requests: Arc<RequestsInProgress>,
    client_timeout: Duration,
    mut stop: watch::Receiver<bool>,
) {
    let progress = Arc::<Progress>::default();
    let service = Http2Service { inner: service, progress: Arc::clone(&progress), requests };
    let mut connection = std::pin::pin!(
        http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
            .max_local_error_reset_streams(MAX_ERROR_RESETS)
            // HPACK counts 32 bytes more for each field than a head of HTTP/1.1 has, so this is the smaller bound.
            .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
            .max_frame_size(MAX_FRAME)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_send_buf_size(MAX_SEND_BUFFER)
            // A client that is gone, or hangs in the middle of its headers, does not answer.
            .keep_alive_interval(client_timeout)
            .keep_alive_timeout(client_timeout)
            .serve_connection(TokioIo::new(stream), service)
    );
    let mut seen = 0;
    let mut is_ending = false;
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "connection ended early");
                }
                return;
            }
            _ = stop.wait_for(|stop| *stop), if !is_ending => {
                connection.as_mut().graceful_shutdown();
                is_ending = true;
            }
            () = tokio::time::sleep(client_timeout) => match progress.since(&mut seen) {
                State::Moving => {}
                // Told first: a client that sends a request at this moment learns that it was not served, and sends it elsewhere.
                State::Idle if !is_ending => {
                    connection.as_mut().graceful_shutdown();
                    is_ending = true;
                }
                State::Idle => return,
                State::Stalled => {
                    tracing::debug!("connection closed: its client does not read");
                    return;
                }
            },
        }
    }
}

/// What has happened on a connection.
#[derive(Debug, Default)]
struct Progress {
    /// Grows with every request, and with every part of an answer.
    steps: AtomicU64,
    requests: AtomicUsize,
    /// The answers that wait for the client to read them.
    unread: AtomicUsize,
}

/// What a connection does.
enum State {
    Moving,
    /// It has no requests.
    Idle,
    /// Its client does not read its answers.
    Stalled,
}

impl Progress {
    /// Returns the state since it was last seen.
    fn since(&self, seen: &mut u64) -> State {
        // `Relaxed` everywhere: what is seen late is seen after the next interval.
        let steps = self.steps.load(Ordering::Relaxed);
        if std::mem::replace(seen, steps) != steps {
            State::Moving
        } else if self.unread.load(Ordering::Relaxed) > 0 {
            State::Stalled
        } else if self.requests.load(Ordering::Relaxed) == 0 {
            State::Idle
        } else {
            // The server has not answered yet, such as a request that waits, or has nothing to add to a stream of events.
            State::Moving
        }
    }

    fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }
}

/// A request in progress, until its answer was written.
struct InProgress {
    progress: Arc<Progress>,
    all: Arc<RequestsInProgress>,
    is_unread: bool,
}

impl InProgress {
    fn new(progress: &Arc<Progress>, all: &Arc<RequestsInProgress>) -> Self {
        progress.step();
        progress.requests.fetch_add(1, Ordering::Relaxed);
        all.count.fetch_add(1, Ordering::Relaxed);
        Self { progress: Arc::clone(progress), all: Arc::clone(all), is_unread: false }
    }

    fn set_unread(&mut self, is_unread: bool) {
        match (self.is_unread, is_unread) {
            (false, true) => self.progress.unread.fetch_add(1, Ordering::Relaxed),
            (true, false) => self.progress.unread.fetch_sub(1, Ordering::Relaxed),
            _ => return,
        };
        self.is_unread = is_unread;
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        self.set_unread(false);
        self.progress.step();
        self.progress.requests.fetch_sub(1, Ordering::Relaxed);
        self.all.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The service of one connection.
struct Http2Service {
    inner: ConnectionService,
    progress: Arc<Progress>,
    requests: Arc<RequestsInProgress>,
}

impl hyper::service::Service<Request<Incoming>> for Http2Service {
    type Response = Response<WatchedBody>;
    type Error = Infallible;
    type Future = Http2Answering;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        // Each connection may have many requests, so the number of connections does not bound their memory.
        let answering = if self.requests.count.load(Ordering::Relaxed) < self.requests.max {
            hyper::service::Service::call(&self.inner, request)
        } else {
            let message = "too many requests are in progress";
            Answering::refusing(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message))
        };
        Http2Answering { answering, request: Some(InProgress::new(&self.progress, &self.requests)) }
    }
}

pin_project! {
    /// The future of an answer.
    struct Http2Answering {
        #[pin]
        answering: Answering,
        request: Option<InProgress>,
    }
}

impl Future for Http2Answering {
    type Output = Result<Response<WatchedBody>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let Ok(response) = ready!(this.answering.poll(cx));
        let request = this.request.take();
        Poll::Ready(Ok(response.map(|body| WatchedBody::new(body, request))))
    }
}

/// The body of an answer, by which a client that does not read is noticed: hyper asks for the next part when the client has room.
struct WatchedBody {
    body: Body,
    request: Option<InProgress>,
}

impl WatchedBody {
    fn new(body: Body, mut request: Option<InProgress>) -> Self {
        if let Some(request) = &mut request {
            request.set_unread(true);
        }
        Self { body, request }
    }
}

impl http_body::Body for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        if let Some(request) = &mut this.request {
            request.progress.step();
            request.set_unread(polled.is_ready());
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
