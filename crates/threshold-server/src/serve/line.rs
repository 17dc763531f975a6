//! Notices that a client has left while its request waits.
//!
//! hyper reads a connection while it serves a request, and learns of its end by that, but only as long as nothing of what
//! it has read is still to be served: a second request that was sent along hides that the client is gone. So while a
//! request waits, the socket itself is asked.

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

/// How often it is looked whether the client of a request that waits is still there.
const LOOK: Duration = Duration::from_secs(1);

/// What a socket says when its other end has closed, or has closed its half: whoever sends nothing more while it waits has
/// given up, as for hyper.
#[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
const LEFT: PollFlags = PollFlags::RDHUP;
#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "freebsd")))]
const LEFT: PollFlags = PollFlags::HUP;

/// A connection, as a request on it sees it: how many requests wait there.
#[derive(Debug, Clone, Default)]
pub(crate) struct Line(Arc<AtomicUsize>);

impl Line {
    /// Awaits something that may take long. If the client leaves meanwhile, its connection ends, and drops this.
    pub(crate) async fn watch<F: Future>(&self, future: F) -> F::Output {
        let _waiting = Waiting::new(self);
        let mut future = pin!(future);
        loop {
            // That the time is up has the connection polled, which is when it looks.
            if let Ok(output) = tokio::time::timeout(LOOK, future.as_mut()).await {
                return output;
            }
        }
    }

    fn is_waiting(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl<S: Sync> FromRequestParts<S> for Line {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

/// A request that waits, for as long as this lives.
struct Waiting<'l>(&'l Line);

impl<'l> Waiting<'l> {
    fn new(line: &'l Line) -> Self {
        line.0.fetch_add(1, Ordering::Relaxed);
        Self(line)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A stream over a socket.
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

/// A stream that fails, while a request waits, once its client has left. hyper flushes whenever it is polled, also while
/// it has nothing to write and does not read.
#[derive(Debug)]
pub(super) struct Watched<S> {
    stream: S,
    line: Line,
}

impl<S: Socket> Watched<S> {
    pub(super) fn new(stream: S, line: Line) -> Self {
        Self { stream, line }
    }

    fn look(&self) -> io::Result<()> {
        if self.line.is_waiting() && has_left(self.stream.socket()) {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the client left while its request waited"));
        }
        Ok(())
    }
}

/// Whether the other end has closed. A socket that cannot be asked is taken for open: the wait ends by its own time.
fn has_left(socket: BorrowedFd<'_>) -> bool {
    let mut asked = [PollFd::from_borrowed_fd(socket, LEFT)];
    poll(&mut asked, Some(&Timespec::default())).is_ok_and(|answers| answers > 0)
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Socket + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.look()?;
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.look()?;
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.look()?;
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
