//! Tells HTTP/2 from HTTP/1.1 by the first bytes of a connection.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};

use super::connection_watch::Socket;

/// What every HTTP/2 connection begins with (RFC 9113, section 3.4), and no request of HTTP/1.1.
const PREFACE: [u8; 24] = *b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// A stream whose first bytes were read already, and are read again.
#[derive(Debug)]
pub(super) struct Reread<S> {
    stream: S,
    first: [u8; PREFACE.len()],
    /// Which of them are still to be read.
    from: usize,
    until: usize,
}

impl<S: AsyncRead + Unpin> Reread<S> {
    /// Reads until the protocol is known: usually once.
    pub(super) async fn detect(stream: S) -> io::Result<(Protocol, Self)> {
        let mut reread = Self { stream, first: [0; PREFACE.len()], from: 0, until: 0 };
        loop {
            let (read, unread) = reread.first.split_at_mut_checked(reread.until).unwrap_or_default();
            if !PREFACE.starts_with(read) {
                return Ok((Protocol::Http1, reread));
            }
            if unread.is_empty() {
                return Ok((Protocol::Http2, reread));
            }
            match reread.stream.read(unread).await? {
                // The end of the connection is one of HTTP/1.1, which answers nothing to no request.
                0 => return Ok((Protocol::Http1, reread)),
                more => reread.until = reread.until.saturating_add(more),
            }
        }
    }
}

impl<S> Reread<S> {
    /// Whether the first byte may begin a request of HTTP/1.1, and not a TLS handshake or nothing at all.
    pub(super) fn begins_a_request(&self) -> bool {
        self.until > 0 && self.first.first().is_some_and(u8::is_ascii_uppercase)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Reread<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let Some(rest) = this.first.get(this.from..this.until).filter(|rest| !rest.is_empty()) else {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        };
        let now = rest.get(..rest.len().min(buf.remaining())).unwrap_or_default();
        buf.put_slice(now);
        this.from = this.from.saturating_add(now.len());
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Reread<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

impl<S: Socket> Socket for Reread<S> {
    fn socket(&self) -> BorrowedFd<'_> {
        self.stream.socket()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn check(chunks: &[&[u8]], expect: Protocol) {
        let mut mock = tokio::io::join(chunked(chunks), tokio::io::sink());
        let (protocol, mut reread) = Reread::detect(&mut mock).await.unwrap();
        let mut all = Vec::new();
        reread.read_to_end(&mut all).await.unwrap();
        assert_eq!((protocol, all), (expect, chunks.concat()), "{chunks:?}");
    }

    /// A reader that returns one chunk a read.
    fn chunked(chunks: &[&[u8]]) -> Box<dyn AsyncRead + Unpin> {
        let first: Box<dyn AsyncRead + Unpin> = Box::new(tokio::io::empty());
        chunks.iter().rev().fold(first, |rest, chunk| Box::new(io::Cursor::new(chunk.to_vec()).chain(rest)))
    }

    /// Woken by: leaving out `starts_with`, `until` or `from`.
    #[tokio::test]
    async fn the_protocol_is_told_by_the_first_bytes_and_none_is_lost() {
        check(&[&PREFACE[..], b"frames"], Protocol::Http2).await;
        check(&[b"PRI * HTTP/2.0\r\n", b"\r\nSM\r\n\r", b"\nframes"], Protocol::Http2).await;
        let each: Vec<&[u8]> = PREFACE.chunks(1).collect();
        check(&each, Protocol::Http2).await;
        for other in ["POST /v1/check HTTP/1.1\r\n\r\n", "PRI * HTTP/1.1\r\n\r\n", "GET", "P", "PRI * HTTP/2.0\r\n", ""]
        {
            check(&[other.as_bytes()], Protocol::Http1).await;
        }
    }
}
