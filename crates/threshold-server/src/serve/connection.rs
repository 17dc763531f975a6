//! Connections: how many, how large their requests, and how long they may keep the server waiting.

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
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use super::address::Listener;
use super::line::{Line, Socket, Watched};
use super::linger::Lingering;
use super::peers::{Exempt, PeerPlace, Peers};
use crate::door::{Answering, ApiError, Bounds, Doors};
use crate::log::shown_address;

/// The largest head of a request, in bytes; larger ones get 431.
const MAX_HEAD: usize = 16 << 10;
/// The most header fields of a request.
const MAX_FIELDS: usize = 100;
/// How long to rest when the system has no more files to give: asking again at once would only burn a core.
const REST: Duration = Duration::from_millis(100);

/// Who comes through a socket has no address, and is on this machine.
const ON_A_SOCKET: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));

/// A listener, and what is done with its connections.
pub(crate) struct Front {
    pub(crate) listener: Listener,
    pub(crate) tls: Option<TlsAcceptor>,
    pub(crate) doors: Doors,
    pub(crate) bounds: Bounds,
}

impl Front {
    /// Serves until `stop` says so, then lets what is under way end, but no longer than `drain`. Says whether it did.
    pub(crate) async fn serve(self, mut stop: watch::Receiver<bool>, drain: Duration) -> bool {
        let Self { listener, tls, doors, bounds } = self;
        let room = Arc::new(Semaphore::new(bounds.connections));
        let peers = Peers::new(bounds.connections_per_peer);
        let graceful = GracefulShutdown::new();
        let addressed = |peer| Addressed { doors: doors.clone(), peer, line: Line::default() };
        loop {
            // Who finds no room waits in the system's queue, where it costs this process nothing.
            let place = tokio::select! {
                place = Arc::clone(&room).acquire_owned() => place,
                _ = stop.wait_for(|stop| *stop) => break,
            };
            let Ok(place) = place else { break };
            let accepted = tokio::select! {
                accepted = accept(&listener) => accepted,
                _ = stop.wait_for(|stop| *stop) => break,
            };
            let connection =
                Connection { peer_place: None, place, watcher: graceful.watcher(), patience: bounds.patience };
            match accepted {
                Ok(Accepted::Unix(stream)) => drop(tokio::spawn(connection.serve(stream, addressed(ON_A_SOCKET)))),
                Ok(Accepted::Tcp(stream, peer)) => {
                    // Dropped, the stream is closed: before TLS, and before anything is read.
                    let Some(peer_place) = admit(&peers, peer.ip(), &doors) else { continue };
                    let connection = Connection { peer_place: Some(peer_place), ..connection };
                    match tls.clone() {
                        None => drop(tokio::spawn(connection.serve(stream, addressed(peer)))),
                        Some(tls) => drop(tokio::spawn(connection.serve_tls(stream, tls, addressed(peer)))),
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(REST).await;
                }
            }
        }
        drop(listener);
        tokio::time::timeout(drain, graceful.shutdown()).await.is_ok()
    }
}

/// A place among the connections of one peer, or a line in the log that there is none. A trusted proxy brings the requests of
/// many clients and may have as many as there are.
fn admit(peers: &Arc<Peers>, ip: IpAddr, doors: &Doors) -> Option<PeerPlace> {
    let desk = &doors.app().desk;
    let policy = desk.policy();
    let exempt = if policy.identity().address.trusts(ip) { Exempt::Yes } else { Exempt::No };
    let place = peers.admit(ip, exempt);
    if place.is_none()
        && let Some(left_out) = peers.refusals.take(desk.now())
    {
        let ip = shown_address(ip, &policy);
        tracing::warn!(ip, most = peers.most(), left_out, "connection closed: its peer has as many as it may");
    }
    place
}

/// Logs that a request was answered with 431. Its headers are unread, so all that is known is who sent them.
fn log_large_head(doors: &Doors, ip: IpAddr) {
    let desk = &doors.app().desk;
    let Some(left_out) = doors.app().refused.take(desk.now()) else { return };
    let ip = shown_address(ip, &desk.policy());
    let (most_bytes, most_fields) = (MAX_HEAD, MAX_FIELDS);
    tracing::warn!(status = 431, ip, most_bytes, most_fields, left_out, "request refused: its headers are too large");
}

enum Accepted {
    Tcp(tokio::net::TcpStream, SocketAddr),
    Unix(tokio::net::UnixStream),
}

async fn accept(listener: &Listener) -> std::io::Result<Accepted> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, peer) = listener.accept().await?;
            stream.set_nodelay(true)?;
            Ok(Accepted::Tcp(stream, peer))
        }
        Listener::Unix(listener, _) => Ok(Accepted::Unix(listener.accept().await?.0)),
    }
}

/// The doors, and the address at the other end of the connection.
struct Addressed {
    doors: Doors,
    peer: SocketAddr,
    line: Line,
}

impl hyper::service::Service<Request<Incoming>> for Addressed {
    type Response = Response;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        // hyper's own bound grows with what a connection has read before.
        if head_bytes(&request) > MAX_HEAD {
            log_large_head(&self.doors, self.peer.ip());
            let message = format!("the head of a request has at most {MAX_HEAD} bytes");
            let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
            return Answering::refusing(ApiError::new(status, "headers_too_large", message));
        }
        self.doors.call(self.peer, &self.line, request)
    }
}

/// How many bytes a request's line and fields took, as most clients write them.
fn head_bytes<B>(request: &Request<B>) -> usize {
    let uri = request.uri();
    let target = uri.path_and_query().map_or(0, |target| target.as_str().len());
    let authority = uri.authority().map_or(0, |authority| authority.as_str().len());
    let line = request.method().as_str().len().saturating_add(target).saturating_add(authority);
    let fields = request.headers().iter().map(|(name, value)| name.as_str().len().saturating_add(value.len()));
    // ": " and a line break for each field; two blanks, the version and a line break; and an empty line.
    fields.fold(line.saturating_add(14), |sum, field| sum.saturating_add(field).saturating_add(4))
}

/// One connection's places, among those of its peer and among all, which it gives back in this order when it ends: whoever
/// is accepted in its stead may be the same peer's.
struct Connection {
    peer_place: Option<PeerPlace>,
    place: OwnedSemaphorePermit,
    watcher: Watcher,
    patience: Duration,
}

impl Connection {
    async fn serve_tls(self, stream: tokio::net::TcpStream, tls: TlsAcceptor, service: Addressed) {
        match tokio::time::timeout(self.patience, tls.accept(stream)).await {
            // Boxed, since a session is some kilobytes, and most connections have none.
            Ok(Ok(stream)) => self.serve(Box::new(stream), service).await,
            Ok(Err(error)) => tracing::debug!(%error, "no TLS came of a connection"),
            Err(_) => tracing::debug!("a TLS handshake took too long"),
        }
    }

    async fn serve<S: AsyncRead + AsyncWrite + Socket + Unpin + Send + 'static>(self, stream: S, service: Addressed) {
        let Self { peer_place, place, watcher, patience } = self;
        let (doors, peer) = (service.doors.clone(), service.peer.ip());
        // hyper's timer is for reading. A client that does not read what it asked for is this one's.
        let mut stream = TimeoutStream::new(Watched::new(Lingering::new(stream), service.line.clone()));
        stream.set_write_timeout(Some(patience));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(patience)
            .max_buf_size(MAX_HEAD)
            .max_headers(MAX_FIELDS)
            .serve_connection(TokioIo::new(Box::pin(stream)), service);
        match watcher.watch(connection).await {
            Ok(()) => {}
            Err(error) if error.is_parse_too_large() => log_large_head(&doors, peer),
            Err(error) => tracing::debug!(%error, "a connection ended early"),
        }
        drop(peer_place);
        drop(place);
    }
}
