//! Lingering close: after a request is refused unread, the connection is read for a moment before it is closed.
//!
//! Closing a socket with unread data resets the connection (RST). A peer that is still writing then sees a broken connection
//! instead of the answer, and a proxy turns it into a 502.
//!
//! The answers to requests that hyper itself cannot read have no body. They get one in JSON here, as every error of the API has.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use super::connection_watch::Socket;

/// How long a refused peer may go on sending: long enough for a round trip, too short to hold many connections.
const MAX_TIME: Duration = Duration::from_secs(1);
/// How many bytes are read and discarded. Go's servers, such as Caddy, accept a head of at most 1 MiB.
const MAX_BYTES: usize = 4 << 20;
/// The size of one read.
const CHUNK: usize = 8 << 10;
/// The status lines of answers that are sent before a request was read to its end.
const UNREAD: [&[u8]; 4] = [b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 414", b"HTTP/1.1 431"];

/// A stream with a lingering close.
#[derive(Debug)]
pub(super) struct Lingering<S> {
    stream: S,
    /// Whether the last answer refused a request that may be unread.
    refused: bool,
    /// The answer that is written in place of one without a body.
    replaced: Option<Replaced>,
    closing: Closing,
}

/// An answer in place of another one, and how much of it is written.
#[derive(Debug)]
struct Replaced {
    answer: Vec<u8>,
    written: usize,
}

#[derive(Debug)]
enum Closing {
    NotYet,
    /// The write half is shut down, and what the peer still sends is discarded.
    Draining {
        until: Pin<Box<Sleep>>,
        left: usize,
    },
    Done,
}

impl<S> Lingering<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, refused: false, replaced: None, closing: Closing::NotYet }
    }

    /// Makes the close linger, where the answer is not in HTTP.
    pub(super) fn refuse(&mut self) {
        self.refused = true;
    }

    /// Looks for the status line of an answer in written bytes. hyper writes a head in one call.
    fn note_status(&mut self, written: &[u8]) {
        if written.starts_with(b"HTTP/1.1 ") {
            // Set by each answer: on a connection that is kept alive only the last one decides how it is closed.
            self.refused = UNREAD.iter().any(|status| written.starts_with(status));
            // hyper repeats a write that was pending, with the same bytes. The replacement must then go on where it
            // stopped.
            if self.refused && self.replaced.is_none() {
                self.replaced = with_json_body(written).map(|answer| Replaced { answer, written: 0 });
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> Lingering<S> {
    /// Writes the answer in place of another one, if there is one, to its end. Then the other one counts as written.
    fn poll_replaced(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        let Some(Replaced { answer, written }) = &mut self.replaced else { return Poll::Ready(Ok(false)) };
        while let Some(rest) = answer.get(*written..).filter(|rest| !rest.is_empty()) {
            match ready!(Pin::new(&mut self.stream).poll_write(cx, rest))? {
                // Without this the loop would never end on a stream that accepts nothing.
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                more => *written = written.saturating_add(more),
            }
        }
        self.replaced = None;
        Poll::Ready(Ok(true))
    }
}

/// Returns an answer of hyper's own with a body: it has an empty one and no media type, unlike every answer of the doors.
fn with_json_body(head: &[u8]) -> Option<Vec<u8>> {
    const EMPTY: &str = "content-length: 0\r\n";
    // Only a write that is exactly one head. Anything behind it would be lost, because the whole write counts as
    // done.
    let head = std::str::from_utf8(head).ok().filter(|head| head.ends_with("\r\n\r\n"))?;
    // Both conditions: an answer of the doors has a media type, and must not be changed.
    let (before, after) = head.split_once(EMPTY).filter(|_| !head.contains("content-type:"))?;
    let (error, message) = match head.get(9..12)? {
        "431" => ("headers_too_large", "the header fields are too many or too large"),
        "414" => ("uri_too_long", "the URI is too long"),
        _ => ("bad_request", "the request is not valid HTTP/1.1"),
    };
    let body = serde_json::json!({"error": error, "message": message, "field": null}).to_string();
    let fields = format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
    Some(format!("{before}{fields}{after}{body}").into_bytes())
}

impl<S: Socket> Socket for Lingering<S> {
    fn socket(&self) -> BorrowedFd<'_> {
        self.stream.socket()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Lingering<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Lingering<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.note_status(buf);
        if ready!(this.poll_replaced(cx))? {
            // hyper counts the bytes that it gave, and not those that were written in place of them.
            return Poll::Ready(Ok(buf.len()));
        }
        Pin::new(&mut this.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        // The head is in the first buffer, and a body, if any, in those after it.
        if let Some(first) = bufs.iter().find(|buf| !buf.is_empty()) {
            this.note_status(first);
            if ready!(this.poll_replaced(cx))? {
                return Poll::Ready(Ok(first.len()));
            }
        }
        Pin::new(&mut this.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if matches!(this.closing, Closing::NotYet) {
            // The write half first: the peer sees the end of the answer, and may close by itself before the time is
            // over.
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
            this.closing = match this.refused {
                true => Closing::Draining { until: Box::pin(sleep(MAX_TIME)), left: MAX_BYTES },
                false => Closing::Done,
            };
        }
        if let Closing::Draining { until, left } = &mut this.closing {
            ready!(drain(&mut this.stream, until.as_mut(), left, cx));
            this.closing = Closing::Done;
        }
        Poll::Ready(Ok(()))
    }
}

/// Discards what the peer sends until it closes, the time is over, or too much was read.
fn drain<S: AsyncRead + Unpin>(
    stream: &mut S,
    until: Pin<&mut Sleep>,
    left: &mut usize,
    cx: &mut Context<'_>,
) -> Poll<()> {
    let mut chunk = [0; CHUNK];
    loop {
        let mut buf = ReadBuf::new(&mut chunk);
        match Pin::new(&mut *stream).poll_read(cx, &mut buf) {
            Poll::Ready(Ok(())) if !buf.filled().is_empty() && *left > 0 => {
                *left = left.saturating_sub(buf.filled().len());
            }
            // The peer has closed, the bytes are used up, or reading failed. In each case there is nothing left to
            // wait for.
            Poll::Ready(_) => return Poll::Ready(()),
            // The time is checked only when nothing can be read. A peer that sends without a pause is stopped by
            // `left`.
            Poll::Pending => return until.poll(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::Instant;

    use super::*;

    const REFUSED: &[u8] = b"HTTP/1.1 431 Request Header Fields Too Large\r\n\r\n";

    /// A peer that sends a number of bytes, and then closes or is silent.
    #[derive(Debug)]
    struct Peer {
        sends: usize,
        closes: bool,
        is_shut_down: bool,
    }

    impl AsyncRead for Peer {
        fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            assert!(self.is_shut_down, "the write half must be shut down first");
            let now = self.sends.min(buf.remaining());
            if now == 0 && !self.closes {
                return Poll::Pending;
            }
            self.sends = self.sends.saturating_sub(now);
            buf.put_slice(&vec![b'y'; now]);
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Peer {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(buf.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.is_shut_down = true;
            Poll::Ready(Ok(()))
        }
    }

    /// Writes answers to the peer and closes. Returns how many of the peer's bytes are unread, and how long that took.
    async fn close(answers: &[&[u8]], sends: usize, closes: bool) -> (usize, Duration) {
        let mut stream = Lingering::new(Peer { sends, closes, is_shut_down: false });
        for answer in answers {
            poll_fn(|cx| Pin::new(&mut stream).poll_write_vectored(cx, &[IoSlice::new(answer)])).await.unwrap();
        }
        let before = Instant::now();
        poll_fn(|cx| Pin::new(&mut stream).poll_shutdown(cx)).await.unwrap();
        (stream.stream.sends, before.elapsed())
    }

    /// Woken by: `Closing::Done` for every answer in `poll_shutdown`; leaving out `until` or `left` in `drain`.
    #[tokio::test(start_paused = true)]
    async fn what_a_refused_peer_still_sends_is_discarded_within_bounds() {
        assert_eq!(close(&[REFUSED], 1_000_000, true).await, (0, Duration::ZERO));
        let (left, waited) = close(&[REFUSED], 1_000_000, false).await;
        assert!(left == 0 && (MAX_TIME..MAX_TIME + Duration::from_millis(10)).contains(&waited), "{waited:?}");
        let (left, waited) = close(&[REFUSED], 2 * MAX_BYTES, true).await;
        assert!((MAX_BYTES - CHUNK..MAX_BYTES).contains(&left) && waited == Duration::ZERO, "{left}");
    }

    /// Woken by: leaving out `refused` in `poll_shutdown`, or the test for a status line in `note_status`.
    #[tokio::test(start_paused = true)]
    async fn after_a_request_that_was_read_the_close_does_not_linger() {
        let other: [&[u8]; 2] = [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 429 Too Many Requests\r\n\r\n"];
        for answer in other {
            assert_eq!(close(&[REFUSED, answer], 10, false).await, (10, Duration::ZERO));
        }
        assert_eq!(close(&[REFUSED, b"a part of its body"], 10, true).await.0, 0);
    }
}
