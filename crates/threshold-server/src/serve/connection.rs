//! Connections: how many, how large their requests, and how long they may keep the server waiting.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use super::address::Listener;
use crate::door::{Answering, Bounds, Doors};

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
        let graceful = GracefulShutdown::new();
        let addressed = |peer| Addressed { doors: doors.clone(), peer };
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
            let connection = Connection { place, watcher: graceful.watcher(), patience: bounds.patience };
            match accepted {
                Ok(Accepted::Unix(stream)) => drop(tokio::spawn(connection.serve(stream, addressed(ON_A_SOCKET)))),
                Ok(Accepted::Tcp(stream, peer)) => match tls.clone() {
                    None => drop(tokio::spawn(connection.serve(stream, addressed(peer)))),
                    Some(tls) => drop(tokio::spawn(connection.serve_tls(stream, tls, addressed(peer)))),
                },
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
}

impl hyper::service::Service<Request<Incoming>> for Addressed {
    type Response = Response;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.doors.call(self.peer, request)
    }
}

/// One connection's place among all, which it gives back when it ends.
struct Connection {
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

    async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(self, stream: S, service: Addressed) {
        let Self { place, watcher, patience } = self;
        // hyper's timer is for reading. A client that does not read what it asked for is this one's.
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(patience));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(patience)
            .max_buf_size(MAX_HEAD)
            .max_headers(MAX_FIELDS)
            .serve_connection(TokioIo::new(Box::pin(stream)), service);
        if let Err(error) = watcher.watch(connection).await {
            tracing::debug!(%error, "a connection ended early");
        }
        drop(place);
    }
}
