//! Serves a connection of HTTP/2, within bounds on its streams, its headers and its time.

mod stalled;

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
use hyper_util::rt::{TokioIo, TokioTimer};
use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

use super::connection::{ConnectionService, MAX_HEAD, MAX_HEADERS};
use crate::door::{Answering, ApiError};
use stalled::StreamExecutor;

/// The most requests at once on one connection. Envoy opens another connection when it needs more.
const MAX_STREAMS: u32 = 256;
/// How much of a body is accepted before it is read: as much as a small request needs, for each of the streams.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// The largest frame: the least that RFC 9113 allows.
const MAX_FRAME: u32 = 16 << 10;
/// How much of an answer waits in memory for its client.
const MAX_SEND_BUFFER: usize = 64 << 10;

/// What a client may do on one connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClientBounds {
    /// The most streams that it may reset before they are served (rapid reset): then the connection ends. What it resets later has cost
    /// no more than a request that is read to its end.
    pending_resets: usize,
    /// The most streams that end by an error of the client; then the connection ends.
    error_resets: usize,
    /// The largest head of a request, in bytes, and the most header fields.
    pub(super) head: usize,
    pub(super) headers: usize,
}

impl ClientBounds {
    /// One client.
    pub(super) const CLIENT: Self =
        Self { pending_resets: 32, error_resets: 128, head: MAX_HEAD, headers: MAX_HEADERS };
    /// A proxy, which brings the requests of many clients over one connection, and lets them through when it ends: it passes on resets,
    /// and copies fields such as `tracestate`, up to 60 KiB by default, into its own requests. Its metadata may be many fields too.
    pub(super) const PROXY: Self =
        Self { pending_resets: 10_000, error_resets: 10_000, head: 128 << 10, headers: 1_000 };
}

/// How often a connection is looked at in the time that its client may be silent.
const LOOKS: u32 = 4;

/// How many requests are in progress, of a listener or of a peer, and how many may be.
#[derive(Debug)]
pub(super) struct RequestsInProgress {
    count: AtomicUsize,
    max: usize,
}

impl RequestsInProgress {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { count: AtomicUsize::new(0), max })
    }

    // `Relaxed` everywhere: some requests more, of those that begin at the same moment, do no harm.
    fn is_full(&self) -> bool {
        self.count.load(Ordering::Relaxed) >= self.max
    }

    fn begin(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    fn end(&self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The requests in progress of a listener.
#[derive(Debug, Clone)]
pub(super) struct ListenerRequests {
    /// Those of clients that have shown a right.
    proven: Arc<RequestsInProgress>,
    /// Those of others, which must not fill the places of the former.
    unproven: Arc<RequestsInProgress>,
}

impl ListenerRequests {
    pub(super) fn new(max: usize) -> Self {
        // As for connections: a quarter.
        Self { proven: RequestsInProgress::new(max), unproven: RequestsInProgress::new(max.div_ceil(4)) }
    }

    fn of(&self, is_proven: bool) -> &RequestsInProgress {
        if is_proven { &self.proven } else { &self.unproven }
    }
}

/// Serves a connection until it ends, or until `stop` is set and its requests have ended.
pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    service: ConnectionService,
    requests: Requests,
    (bounds, client_timeout): (ClientBounds, Duration),
    mut stop: watch::Receiver<bool>,
) {
    let requests = Arc::new(requests);
    let service = Http2Service { inner: service, requests: Arc::clone(&requests) };
    let ping = client_timeout.checked_div(2).unwrap_or(client_timeout);
    let mut connection = std::pin::pin!(
        http2::Builder::new(StreamExecutor { client_timeout })
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_pending_accept_reset_streams(bounds.pending_resets)
            .max_local_error_reset_streams(bounds.error_resets)
            // HPACK counts 32 bytes more for each field than a head of HTTP/1.1 has, so this is the smaller bound.
            .max_header_list_size(u32::try_from(bounds.head).unwrap_or(u32::MAX))
            .max_frame_size(MAX_FRAME)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_send_buf_size(MAX_SEND_BUFFER)
            // A client that is gone, or hangs in the middle of its headers, does not answer. Both times together are the client's.
            .keep_alive_interval(ping)
            .keep_alive_timeout(ping)
            .serve_connection(TokioIo::new(stream), service)
    );
    let (mut seen, mut quiet) = (0, 0_u32);
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
            () = tokio::time::sleep(client_timeout.checked_div(LOOKS).unwrap_or(client_timeout)) => {
                quiet = if requests.is_idle(&mut seen) { quiet.saturating_add(1) } else { 0 };
                if quiet > 0 && is_ending {
                    return;
                }
                // Told first: a client that sends a request at this moment learns that it was not served, and sends it elsewhere.
                if quiet >= LOOKS {
                    connection.as_mut().graceful_shutdown();
                    is_ending = true;
                }
            },
        }
    }
}

/// The requests of a connection.
#[derive(Debug)]
pub(super) struct Requests {
    /// How many have begun.
    begun: AtomicU64,
    count: AtomicUsize,
    /// Those of all connections of the listener.
    all: ListenerRequests,
    /// Those of all connections of the peer, unless it may have any number.
    of_peer: Option<Arc<RequestsInProgress>>,
}

impl Requests {
    pub(super) fn new(all: ListenerRequests, of_peer: Option<Arc<RequestsInProgress>>) -> Self {
        Self { begun: AtomicU64::new(0), count: AtomicUsize::new(0), all, of_peer }
    }

    /// Returns whether there are none, and none has begun since it was last asked.
    fn is_idle(&self, seen: &mut u64) -> bool {
        // `Relaxed` everywhere: what is seen late is seen at the next look.
        let begun = self.begun.load(Ordering::Relaxed);
        std::mem::replace(seen, begun) == begun && self.count.load(Ordering::Relaxed) == 0
    }

    /// Returns why there may be no more, if so.
    fn refusal(&self, is_proven: bool) -> Option<&'static str> {
        if self.of_peer.as_ref().is_some_and(|own| own.is_full()) {
            Some("too many requests of this client are in progress")
        } else if self.all.of(is_proven).is_full() {
            Some("too many requests are in progress")
        } else {
            None
        }
    }
}

/// A request in progress, until its answer was written.
struct InProgress {
    requests: Arc<Requests>,
    is_proven: bool,
}

impl InProgress {
    fn new(requests: &Arc<Requests>, is_proven: bool) -> Self {
        requests.begun.fetch_add(1, Ordering::Relaxed);
        requests.count.fetch_add(1, Ordering::Relaxed);
        requests.all.of(is_proven).begin();
        if let Some(of_peer) = &requests.of_peer {
            of_peer.begin();
        }
        Self { requests: Arc::clone(requests), is_proven }
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        let Self { requests, is_proven } = self;
        requests.count.fetch_sub(1, Ordering::Relaxed);
        requests.all.of(*is_proven).end();
        if let Some(of_peer) = &requests.of_peer {
            of_peer.end();
        }
    }
}

/// The service of one connection.
struct Http2Service {
    inner: ConnectionService,
    requests: Arc<Requests>,
}

impl hyper::service::Service<Request<Incoming>> for Http2Service {
    type Response = Response<WatchedBody>;
    type Error = Infallible;
    type Future = Http2Answering;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        // Each connection may have many requests, so the number of connections does not bound their memory.
        let is_proven = self.inner.prove(&request);
        let answering = match self.requests.refusal(is_proven) {
            None => self.inner.answer(request),
            Some(message) => {
                self.inner.log_refusal(503, message);
                Answering::refusing(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message))
            }
        };
        Http2Answering { answering, request: Some(InProgress::new(&self.requests, is_proven)) }
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
        stalled::offered();
        let request = this.request.take();
        Poll::Ready(Ok(response.map(|body| WatchedBody { body, _request: request })))
    }
}

/// The body of an answer, by which a client that does not read is noticed: hyper asks for the next part when the client has room.
struct WatchedBody {
    body: Body,
    _request: Option<InProgress>,
}

impl http_body::Body for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let polled = Pin::new(&mut self.get_mut().body).poll_frame(cx);
        match polled.is_ready() {
            true => stalled::offered(),
            false => stalled::waits_for_server(),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a token 64 connections kept everybody from HTTP/2 and gRPC: they asked for what needs none, and read no answer.
    ///
    /// Woken by: leaving out `all` or `of_peer` in `refusal`, or in `Drop for InProgress`, and by one count for proven ones and others.
    #[test]
    fn requests_on_all_connections_of_http2_have_a_bound() {
        let (all, of_peer) = (ListenerRequests::new(3), RequestsInProgress::new(2));
        let [own, trusted] = [Some(of_peer), None].map(|peer| Arc::new(Requests::new(all.clone(), peer)));
        let silent = InProgress::new(&trusted, false);
        assert_eq!(trusted.refusal(false), Some("too many requests are in progress"));
        let held = [InProgress::new(&own, true), InProgress::new(&own, true)];
        assert_eq!(own.refusal(true), Some("too many requests of this client are in progress"));
        assert_eq!(trusted.refusal(true), None);
        let last = InProgress::new(&trusted, true);
        assert_eq!(trusted.refusal(true), Some("too many requests are in progress"));
        drop((held, last, silent));
        assert_eq!((own.refusal(true), trusted.refusal(true), trusted.refusal(false)), (None, None, None));
        let mut seen = 0;
        // It had requests, and then none.
        assert_eq!((own.is_idle(&mut seen), own.is_idle(&mut seen)), (false, true));
        let _open = InProgress::new(&own, true);
        assert_eq!((own.is_idle(&mut seen), own.is_idle(&mut seen)), (false, false));
    }
}
