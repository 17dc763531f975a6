//! Accepts and serves connections of HTTP and RESP, within bounds on their number, the size of request heads, and the time clients take.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use super::address::Listener;
use super::connection_watch::{ConnectionWatch, Socket, WatchedStream};
use super::http2::{self, ClientBounds, ListenerRequests, Requests};
use super::linger::Lingering;
use super::peers::{Exempt, PeerConnections, PeerSlot};
use super::places::{Place, Places, Proof, Right};
use super::preface::{Protocol, Reread};
use crate::door::resp::{self, Ended};
use crate::door::{Answering, ApiError, App, Bounds, Doors};
use crate::log::shown_address;

/// The largest head of a request, in bytes; larger ones are answered with 431. nginx and Apache accept 8 KiB by default, and a
/// proxy adds headers of its own.
pub(super) const MAX_HEAD: usize = 16 << 10;
/// The most header fields of a client's request: hyper's and Apache's default.
pub(super) const MAX_HEADERS: usize = 100;
/// The pause after `accept` has failed: with no free file descriptors it fails again at once, and would take a whole core.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The address of a peer on a Unix socket, which has none and is on this machine.
const UNIX_SOCKET_PEER: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));

/// A listener with the service of its connections.
pub(crate) struct Server {
    pub(crate) listener: Listener,
    pub(crate) tls: Option<TlsAcceptor>,
    pub(crate) protocols: Protocols,
    pub(crate) doors: Doors,
    pub(crate) bounds: Bounds,
}

/// The protocols of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocols {
    /// HTTP/1.1, and HTTP/2 for clients that begin with it or choose it in their TLS handshake.
    Http,
    /// HTTP/2 only; a client of HTTP/1.1 is told so.
    Grpc,
    /// That of Redis clients.
    Resp,
}

impl Server {
    /// Serves until `stop` is set, then waits at most `drain` for requests in progress. Returns whether all of them ended, or an error
    /// if its socket accepts no more connections.
    pub(crate) async fn serve(self, stop: watch::Receiver<bool>, drain: Duration) -> std::io::Result<bool> {
        let Self { listener, tls, protocols, doors, bounds } = self;
        let places = Places::new(bounds.connections);
        let peers = PeerConnections::new(bounds.connections_per_peer, bounds.requests_per_peer);
        let graceful = GracefulShutdown::new();
        let mut stopped = stop.clone();
        let requests = ListenerRequests::new(bounds.requests);
        // One watch for each connection: a waiting request must not make others poll their sockets.
        let client = if protocols == Protocols::Grpc { ClientBounds::PROXY } else { ClientBounds::CLIENT };
        let connection_of = |peer: SocketAddr, peer_slot, place: Arc<Place>| {
            let watch = ConnectionWatch::default();
            let service =
                ConnectionService { doors: doors.clone(), peer, watch, bounds: client, place: Arc::clone(&place) };
            let connection = Connection {
                peer_slot,
                place,
                // Taken at once, and not after the TLS handshake: a drain also waits for connections that are still
                // in it.
                watcher: graceful.watcher(),
                client_timeout: bounds.client_timeout,
                protocols,
                stop: stop.clone(),
                requests: requests.clone(),
            };
            (connection, service)
        };
        loop {
            // Before `accept`, so that further connections wait in the kernel's backlog.
            tokio::select! {
                () = places.available() => {}
                _ = stopped.wait_for(|stop| *stop) => break,
            }
            let accepted = tokio::select! {
                accepted = accept(&listener) => accepted,
                _ = stopped.wait_for(|stop| *stop) => break,
            };
            let accepted = match accepted {
                Ok(accepted) => accepted,
                Err(error) if is_unusable(&error) => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(ACCEPT_BACKOFF).await;
                    continue;
                }
            };
            let Some((peer, peer_slot, right)) = admit(&peers, &accepted, &doors) else { continue };
            let place = tokio::select! {
                place = take_place(&places, peer.ip(), right, doors.app()) => Arc::new(place),
                _ = stopped.wait_for(|stop| *stop) => break,
            };
            let (connection, service) = connection_of(peer, peer_slot, Arc::clone(&place));
            let task = match (accepted, tls.clone()) {
                (Accepted::Unix(stream), _) => tokio::spawn(connection.serve_plain(stream, service)),
                (Accepted::Tcp(stream, _), None) => tokio::spawn(connection.serve_plain(stream, service)),
                (Accepted::Tcp(stream, _), Some(tls)) => tokio::spawn(connection.serve_tls(stream, tls, service)),
            };
            place.set_task(task.abort_handle());
        }
        // Closed before the drain, so that new clients are refused at once and go to another node, instead of waiting
        // in the backlog.
        drop(listener);
        Ok(tokio::time::timeout(drain, graceful.shutdown()).await.is_ok())
    }
}

/// Counts a connection of a peer, or logs that it has too many: then it is closed before its TLS handshake, and before anything is read.
/// Trusted proxies are exempt: they bring the requests of many clients.
fn admit(
    peers: &Arc<PeerConnections>,
    accepted: &Accepted,
    doors: &Doors,
) -> Option<(SocketAddr, Option<PeerSlot>, Right)> {
    // Not counted by peer: all clients of a Unix socket have the same address, and its file mode limits who they are.
    let Accepted::Tcp(_, peer) = *accepted else { return Some((UNIX_SOCKET_PEER, None, Right::Given)) };
    let ip = peer.ip();
    let desk = &doors.app().desk;
    let policy = desk.policy();
    let exempt = if policy.identity().address.trusts(ip) { Exempt::Yes } else { Exempt::No };
    // A proxy is trusted to name its clients, and not to be an operator.
    let right = if exempt == Exempt::Yes && !doors.are_for_operators() { Right::Given } else { Right::NotYet };
    let slot = peers.admit(ip, exempt);
    if slot.is_none()
        && let Some(left_out) = peers.refusals.sample(desk.now())
    {
        let ip = shown_address(ip, &policy);
        tracing::warn!(ip, max = peers.max(), left_out, "connection closed: too many connections of its peer");
    }
    Some((peer, Some(slot?), right))
}

/// Takes a place, or waits for one, and logs if another connection was closed for it.
async fn take_place(places: &Arc<Places>, ip: IpAddr, right: Right, app: &App) -> Place {
    let (place, closed) = places.take(ip, right).await;
    if let Some(ip) = closed
        && let Some(left_out) = places.closed.sample(app.desk.now())
    {
        let ip = shown_address(ip, &app.desk.policy());
        tracing::warn!(ip, left_out, "connection closed: too many have shown no token yet");
    }
    place
}

/// Logs that a request was answered with 431. Its headers were not parsed, so only the peer's address is known.
fn log_large_head(doors: &Doors, ip: IpAddr, ClientBounds { head: max_bytes, headers: max_headers, .. }: ClientBounds) {
    let desk = &doors.app().desk;
    let Some(left_out) = doors.app().refused.sample(desk.now()) else { return };
    let ip = shown_address(ip, &desk.policy());
    tracing::warn!(status = 431, ip, max_bytes, max_headers, left_out, "request refused: headers too large");
}

enum Accepted {
    Tcp(tokio::net::TcpStream, SocketAddr),
    Unix(tokio::net::UnixStream),
}

async fn accept(listener: &Listener) -> std::io::Result<Accepted> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, peer) = listener.accept().await?;
            // An answer is one small write. Nagle's algorithm would hold it back until the client acknowledges the
            // one before. It fails for a connection that is already gone, which says nothing about the listener.
            let _ = stream.set_nodelay(true);
            Ok(Accepted::Tcp(stream, peer))
        }
        Listener::Unix(listener, _) => Ok(Accepted::Unix(listener.accept().await?.0)),
    }
}

/// Whether `accept` fails because of the socket itself, and always will. Others concern one connection, or pass.
fn is_unusable(error: &std::io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    matches!(errno, Some(rustix::io::Errno::BADF | rustix::io::Errno::INVAL | rustix::io::Errno::NOTSOCK))
}

/// The service of one connection: the doors, and the peer's address.
pub(super) struct ConnectionService {
    doors: Doors,
    peer: SocketAddr,
    watch: ConnectionWatch,
    bounds: ClientBounds,
    place: Arc<Place>,
}

impl ConnectionService {
    /// Logs why a request was refused before any door has seen it.
    pub(super) fn log_refusal(&self, status: u16, reason: &str) {
        let desk = &self.doors.app().desk;
        let Some(left_out) = self.doors.app().refused.sample(desk.now()) else { return };
        let ip = shown_address(self.peer.ip(), &desk.policy());
        tracing::warn!(status, ip, left_out, "request refused: {reason}");
    }
}

impl hyper::service::Service<Request<Incoming>> for ConnectionService {
    type Response = Response;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.prove(&request);
        self.answer(request)
    }
}

impl ConnectionService {
    /// Notes whether a request shows that its client may use this listener. Returns whether this or an earlier one has.
    ///
    /// Before the answer: the connection may be closed for another one until then.
    pub(super) fn prove(&self, request: &Request<Incoming>) -> bool {
        if !self.place.is_proven() && self.doors.shows_right(self.peer, request.headers()) {
            self.place.prove(if self.doors.only_reads(request.headers()) { Proof::Lesser } else { Proof::Full });
        }
        self.place.is_proven()
    }

    pub(super) fn answer(&self, request: Request<Incoming>) -> Answering {
        // hyper's bound is on its read buffer, which a pipelined request may have grown before; for HTTP/2 it has none on fields.
        let ClientBounds { head, headers, .. } = self.bounds;
        if head_bytes(&request) > head || request.headers().len() > headers {
            log_large_head(&self.doors, self.peer.ip(), self.bounds);
            let message = format!("the head of a request has at most {head} bytes and {headers} header fields");
            let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
            return Answering::refusing(ApiError::new(status, "headers_too_large", message));
        }
        self.doors.call(self.peer, &self.watch, request)
    }
}

/// Returns the size of a request's head, as most clients write it.
fn head_bytes<B>(request: &Request<B>) -> usize {
    let uri = request.uri();
    let target = uri.path_and_query().map_or(0, |target| target.as_str().len());
    let authority = uri.authority().map_or(0, |authority| authority.as_str().len());
    let line = request.method().as_str().len().saturating_add(target).saturating_add(authority);
    let fields = request.headers().iter().map(|(name, value)| name.as_str().len().saturating_add(value.len()));
    // 4 bytes for ": " and CRLF of each field; 14 for two spaces, "HTTP/1.1", CRLF, and the CRLF of the empty line.
    fields.fold(line.saturating_add(14), |sum, field| sum.saturating_add(field).saturating_add(4))
}

/// The places of one connection. The peer's is released first: the next connection to be accepted may be the same peer's.
struct Connection {
    peer_slot: Option<PeerSlot>,
    place: Arc<Place>,
    watcher: Watcher,
    client_timeout: Duration,
    protocols: Protocols,
    stop: watch::Receiver<bool>,
    requests: ListenerRequests,
}

/// A stream that connections are served on.
trait Stream: AsyncRead + AsyncWrite + Socket + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Socket + Unpin + Send + 'static> Stream for S {}

impl Connection {
    async fn serve_tls(self, stream: tokio::net::TcpStream, tls: TlsAcceptor, service: ConnectionService) {
        // The timeouts of hyper begin after the handshake, so a client that never finishes it needs one of its own.
        match tokio::time::timeout(self.client_timeout, tls.accept(stream)).await {
            // Boxed: a TLS session is some kilobytes, which connections without TLS would take up too.
            Ok(Ok(stream)) => {
                let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2") || self.protocols == Protocols::Grpc;
                match is_http2 {
                    true => self.serve_http2(Box::new(stream), service).await,
                    false => self.serve_http1(Box::new(stream), service).await,
                }
            }
            // At DEBUG: scanners cause it all the time, and an operator can do nothing about it.
            Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
            Err(_) => tracing::debug!("TLS handshake timed out"),
        }
    }

    /// Serves a connection without TLS, whose protocol its first bytes tell.
    async fn serve_plain(mut self, stream: impl Stream, service: ConnectionService) {
        match self.protocols {
            Protocols::Http | Protocols::Grpc => {}
            Protocols::Resp => return self.serve_resp(stream, service).await,
        }
        let detected = tokio::select! {
            // In this order: a request that has arrived is served.
            biased;
            detected = tokio::time::timeout(self.client_timeout, Reread::detect(stream)) => detected,
            // A connection that has sent nothing yet has no request that a drain would wait for.
            _ = self.stop.wait_for(|stop| *stop) => return,
        };
        match detected {
            Ok(Ok((Protocol::Http1, stream))) if self.protocols == Protocols::Grpc => {
                if stream.begins_a_request() {
                    self.refuse_http1(stream, service).await;
                }
            }
            Ok(Ok((Protocol::Http1, stream))) => self.serve_http1(stream, service).await,
            Ok(Ok((Protocol::Http2, stream))) => self.serve_http2(stream, service).await,
            Ok(Err(error)) => tracing::debug!(%error, "connection ended early"),
            Err(_) => tracing::debug!("connection closed: nothing was sent on it"),
        }
    }

    async fn serve_http2(self, stream: impl Stream, service: ConnectionService) {
        let Self { peer_slot, place, watcher, client_timeout, protocols, stop, requests, .. } = self;
        let stream = WatchedStream::new(stream, service.watch.clone());
        let mut stream = TimeoutStream::new(if protocols == Protocols::Grpc { stream.copied() } else { stream });
        stream.set_write_timeout(Some(client_timeout));
        let requests = Requests::new(requests, peer_slot.as_ref().and_then(|slot| slot.requests.clone()));
        let bounds = (service.bounds, client_timeout);
        http2::serve(Box::pin(stream), service, requests, bounds, stop).await;
        // A drain waits for the watcher.
        drop((peer_slot, place, watcher));
    }

    async fn serve_http1(self, stream: impl Stream, service: ConnectionService) {
        let Self { peer_slot, place, watcher, client_timeout, .. } = self;
        let (doors, peer) = (service.doors.clone(), service.peer.ip());
        // hyper has a timeout for reading a head, but none for writing: this one ends connections of clients that do not
        // read. The order matters: the innermost layer drains on shutdown, the outer ones see every write.
        let mut stream = TimeoutStream::new(WatchedStream::new(Lingering::new(stream), service.watch.clone()));
        stream.set_write_timeout(Some(client_timeout));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(client_timeout)
            .max_buf_size(MAX_HEAD)
            .max_headers(MAX_HEADERS)
            .serve_connection(TokioIo::new(Box::pin(stream)), service);
        match watcher.watch(connection).await {
            Ok(()) => {}
            // hyper has answered this one itself, so no door has seen it.
            Err(error) if error.is_parse_too_large() => log_large_head(&doors, peer, ClientBounds::CLIENT),
            Err(error) => tracing::debug!(%error, "connection ended early"),
        }
        // After the connection, lingering close included: until then its socket is open and counts.
        drop(peer_slot);
        drop(place);
    }

    /// Tells a client of HTTP/1.1 that it has found the listener for gRPC. An answer of HTTP/2 would be no text to it.
    async fn refuse_http1(self, stream: impl Stream, service: ConnectionService) {
        service.log_refusal(400, "this listener speaks gRPC (--grpc), and not HTTP/1.1");
        let message = "this listener speaks gRPC over HTTP/2: send other requests to --http";
        let body = serde_json::json!({"error": "bad_request", "message": message, "field": null}).to_string();
        let head = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json";
        let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let mut stream = Lingering::new(stream);
        stream.refuse();
        // It fails where the client has closed first.
        let _ = tokio::time::timeout(self.client_timeout, async {
            stream.write_all(answer.as_bytes()).await?;
            stream.shutdown().await
        })
        .await;
    }

    /// Serves a Redis client.
    async fn serve_resp(self, stream: impl Stream, service: ConnectionService) {
        let Self { peer_slot, place, watcher, stop, .. } = self;
        let mut stream = Lingering::new(stream);
        match resp::serve(service.doors.app(), &mut stream, service.peer.ip(), stop, || place.prove(Proof::Full)).await
        {
            Ok(Ended::Closed) => {}
            Ok(Ended::Refused) => stream.refuse(),
            Err(error) => tracing::debug!(%error, "connection ended early"),
        }
        // It fails where the client has closed first.
        let _ = stream.shutdown().await;
        // A drain waits for the watcher.
        drop((peer_slot, place, watcher));
    }
}
