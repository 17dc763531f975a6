//! Detects that a client has disconnected while its request waits.
//!
//! hyper detects it by reading from the connection while it serves a request, but it does not read while its buffer holds
//! another request. A client that pipelines a second request and disconnects would go unnoticed, so while a request waits the
//! socket itself is polled.

use std::convert::Infallible;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::FromRequestParts;
use http::request::Parts;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

/// How often the socket of a waiting request is polled.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The event of a peer that has closed the connection, or its write half: hyper treats a half-closed connection as closed too.
#[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
const PEER_CLOSED: PollFlags = PollFlags::RDHUP;
#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "freebsd")))]
const PEER_CLOSED: PollFlags = PollFlags::HUP;

/// The number of waiting requests on a connection, shared between the connection and its requests.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectionWatch(Arc<AtomicUsize>);

impl ConnectionWatch {
    /// Awaits a future that may take long. If the client disconnects meanwhile, the connection ends and drops this future.
    pub(crate) async fn until_disconnect<F: Future>(&self, future: F) -> F::Output {
        let _waiting = WaitingRequest::new(self);
        let mut future = pin!(future);
        loop {
            // The timeout wakes the connection's task, and hyper then flushes the stream, which polls the socket.
            if let Ok(output) = tokio::time::timeout(POLL_INTERVAL, future.as_mut()).await {
                return output;
            }
        }
    }

    fn is_waiting(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl<S: Sync> FromRequestParts<S> for ConnectionWatch {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

/// Marks a request as waiting until it is dropped.
struct WaitingRequest<'l>(&'l ConnectionWatch);

impl<'l> WaitingRequest<'l> {
    fn new(watch: &'l ConnectionWatch) -> Self {
        // `Relaxed` is enough: a count that is seen late delays the next poll of the socket, and nothing else depends
        // on it.
        watch.0.fetch_add(1, Ordering::Relaxed);
        Self(watch)
    }
}

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A stream over a socket, whose descriptor can be polled.
pub(super) trait Socket {
    fn socket(&self) -> BorrowedFd<'_>;
}

impl Socket for TcpStream {
    fn socket(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}

impl Socket for UnixStream {
    fn socket(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}

impl Socket for Box<TlsStream<TcpStream>> {
    fn socket(&self) -> BorrowedFd<'_> {
        self.get_ref().0.as_fd()
    }
}

/// A stream whose writes and flushes fail if a request waits and its client has disconnected. hyper flushes whenever it is
/// polled, also if it has nothing to write and does not read.
#[derive(Debug)]
pub(super) struct WatchedStream<S> {
    stream: S,
    watch: ConnectionWatch,
    is_vectored: bool,
}

impl<S: Socket> WatchedStream<S> {
    pub(super) fn new(stream: S, watch: ConnectionWatch) -> Self {
        Self { stream, watch, is_vectored: true }
    }

    /// Makes writers copy what they write together, instead of passing it in parts. A writer of HTTP/2 that passes parts writes
    /// what follows a message of 256 bytes, such as the trailers of gRPC, by another system call; one that copies, only after 1 KiB.
    pub(super) fn copied(self) -> Self {
        Self { is_vectored: false, ..self }
    }

    fn check_connected(&self) -> io::Result<()> {
        // Only while a request waits. For all others the system call would cost more than it saves.
        if self.watch.is_waiting() && is_disconnected(self.stream.socket()) {
            let message = "the client disconnected while its request waited";
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, message));
        }
        Ok(())
    }
}

/// Whether the peer has closed the connection. A socket that cannot be polled counts as open: the wait has its own timeout.
fn is_disconnected(socket: BorrowedFd<'_>) -> bool {
    let mut asked = [PollFd::from_borrowed_fd(socket, PEER_CLOSED)];
    // A timeout of zero: this runs on a thread of the runtime, and must not block it.
    poll(&mut asked, Some(&Timespec::default())).is_ok_and(|answers| answers > 0)
}

impl<S: AsyncRead + Unpin> AsyncRead for WatchedStream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Socket + Unpin> AsyncWrite for WatchedStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check_connected()?;
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_connected()?;
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.is_vectored && self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_connected()?;
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use bytes::Bytes;
    use http::{HeaderMap, HeaderValue, Request, Response};
    use http_body_util::{BodyExt as _, Empty, Full};
    use hyper::service::service_fn;
    use hyper_util::rt::{TokioExecutor, TokioIo};

    use super::*;

    /// A stream that counts how often it is written to.
    struct Counted {
        stream: UnixStream,
        writes: Arc<AtomicUsize>,
    }

    impl Socket for Counted {
        fn socket(&self) -> BorrowedFd<'_> {
            self.stream.as_fd()
        }
    }

    impl AsyncRead for Counted {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.stream).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for Counted {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            self.writes.fetch_add(1, Ordering::Relaxed);
            Pin::new(&mut self.stream).poll_write(cx, buf)
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bufs: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            self.writes.fetch_add(1, Ordering::Relaxed);
            Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
        }

        fn is_write_vectored(&self) -> bool {
            self.stream.is_write_vectored()
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.stream).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.stream).poll_shutdown(cx)
        }
    }

    /// Woken by: leaving out `is_vectored` in `is_write_vectored`. h2 then writes the trailers by themselves.
    #[tokio::test]
    async fn an_answer_of_grpc_is_one_write() {
        let (client, stream) = UnixStream::pair().unwrap();
        let writes = Arc::<AtomicUsize>::default();
        let counted = Counted { stream, writes: Arc::clone(&writes) };
        let stream = WatchedStream::new(counted, ConnectionWatch::default()).copied();
        let service = service_fn(|_| {
            let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
            let body = Full::new(Bytes::from(vec![7; 1_000])).with_trailers(ready(Some(Ok(trailers))));
            ready(Ok::<_, Infallible>(Response::new(body)))
        });
        let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        drop(tokio::spawn(server.serve_connection(TokioIo::new(stream), service)));
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client)).await.unwrap();
        drop(tokio::spawn(connection));
        let mut counts = Vec::new();
        for _ in 0..3 {
            let before = writes.load(Ordering::Relaxed);
            let answer = sender.send_request(Request::new(Empty::<Bytes>::new())).await.unwrap();
            let body = answer.into_body().collect().await.unwrap();
            assert!(body.trailers().is_some());
            counts.push(writes.load(Ordering::Relaxed).saturating_sub(before));
        }
        // The settings of the connection are written with the first answers.
        assert_eq!(counts.last(), Some(&1), "{counts:?}");
    }
}
