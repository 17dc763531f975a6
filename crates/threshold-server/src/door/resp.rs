//! The RESP door: Redis clients call `CL.THROTTLE`, as on a Redis with the module redis-cell.

mod catalogue;
#[cfg(test)]
mod conformance;
mod decode;
#[cfg(test)]
mod decode_tests;
mod reply;
mod session;
#[cfg(test)]
mod tests;
mod throttle;

use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicI64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::App;
use decode::{Decoder, Trust};
use reply::Replies;
use session::{Next, Session};

/// How long a client may be idle between two commands. Redis clients keep connections in pools, for longer than browsers do.
const MAX_IDLE: Duration = Duration::from_secs(300);
/// The longest time of a client.
const MAX_WAIT: Duration = Duration::from_secs(365 * 86_400);
/// Room for one read, in bytes. A pipeline of 200 calls fits, and is answered with one write.
const READ: usize = 16 << 10;
/// Replies are written when they take as many bytes, and at the end of a pipeline.
const MAX_REPLIES: usize = 16 << 10;
/// After as many commands of a pipeline, other connections of the same thread are served.
const TURN: usize = 512;

/// The numbers of connections.
#[derive(Debug, Default)]
pub(super) struct Clients(AtomicI64);

/// How the service of a connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The client has closed, or was idle, or the server stops.
    Closed,
    /// The client may still be sending what is not read.
    Refused,
}

impl Clients {
    fn next(&self) -> i64 {
        self.0.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }
}

/// Serves a connection until the client closes it, breaks the protocol or is idle for too long, or until `stop` is set. Commands that
/// have arrived by then are answered. `proven` is called when the client has shown a right: a password, or a command where none is needed.
pub(crate) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    app: &App,
    stream: &mut S,
    peer: IpAddr,
    stop: watch::Receiver<bool>,
    proven: impl Fn(),
) -> io::Result<Ended> {
    let patience = app.bounds.client_timeout;
    let mut timer = IdleTimer::new(patience);
    let mut signal = stop.clone();
    let mut stopped = pin!(signal.wait_for(|stop| *stop));
    let mut session = Session::new(app, peer, app.resp_clients.next());
    let (mut decoder, mut replies) = (Decoder::default(), Replies::default());
    let mut input = Vec::new();
    // When the first bytes of an incomplete request came. Further bytes do not extend its time.
    let mut begun: Option<Instant> = None;
    loop {
        let (used, pipeline) = answer(&mut session, &mut decoder, &input, &mut replies).await;
        input.drain(..used);
        if used > 0 {
            begun = None;
            if session.trust() == Trust::Authenticated {
                proven();
            }
        }
        if !replies.bytes.is_empty() {
            timeout(patience, stream.write_all(&replies.bytes)).await??;
            replies.bytes.clear();
            replies.bytes.shrink_to(MAX_REPLIES);
        }
        match pipeline {
            // A client that always sends more must not outlast the drain. The value has a lock, and its version has none.
            Pipeline::Complete if stop.has_changed().unwrap_or(true) && *stop.borrow() => return Ok(Ended::Closed),
            Pipeline::Complete => {}
            Pipeline::Paused => {
                yield_now().await;
                continue;
            }
            Pipeline::Closed => return Ok(Ended::Refused),
        }
        let wait = match (input.is_empty(), session.trust()) {
            (false, _) => patience.saturating_sub(begun.get_or_insert_with(Instant::now).elapsed()),
            (true, Trust::Authenticated) => MAX_IDLE,
            (true, Trust::Unauthenticated) => patience,
        };
        // The room of a large request is given back. Half a request before the next read doubles the room once.
        if input.is_empty() && input.capacity() > 2 * READ {
            input = Vec::new();
        }
        input.reserve(READ);
        timer.begin(wait);
        let read = poll_fn(|cx| {
            if let Poll::Ready(read) = pin!(stream.read_buf(&mut input)).poll(cx) {
                return Poll::Ready(read);
            }
            // Both are polled again and again, and not made for each read: that took longer than a decision.
            if stopped.as_mut().poll(cx).is_ready() || timer.poll_over(cx) {
                return Poll::Ready(Ok(0));
            }
            Poll::Pending
        });
        if read.await? == 0 {
            return Ok(Ended::Closed);
        }
    }
}

/// The time that a client has until its next bytes. It is set for every read and seldom over, so the timer of the runtime is
/// moved only when it fires, or when the time ends before that.
struct IdleTimer {
    sleep: Pin<Box<Sleep>>,
    wait: Duration,
    /// When the time is over; `None` until a read had to wait.
    until: Option<Instant>,
}

impl IdleTimer {
    fn new(wait: Duration) -> Self {
        Self { sleep: Box::pin(sleep(wait)), wait, until: None }
    }

    /// Begins another time.
    fn begin(&mut self, wait: Duration) {
        (self.wait, self.until) = (wait, None);
    }

    fn poll_over(&mut self, cx: &mut Context<'_>) -> bool {
        let wait = self.wait;
        let until = *self.until.get_or_insert_with(|| {
            let now = Instant::now();
            // Longer than a timer can wait is as good as forever.
            now.checked_add(wait.min(MAX_WAIT)).unwrap_or(now)
        });
        if self.sleep.deadline() > until {
            self.sleep.as_mut().reset(until);
        }
        while self.sleep.as_mut().poll(cx).is_ready() {
            if self.sleep.deadline() >= until {
                return true;
            }
            self.sleep.as_mut().reset(until);
        }
        false
    }
}

/// What is left of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pipeline {
    /// No complete request.
    Complete,
    /// Perhaps more requests. The replies so far are written first.
    Paused,
    /// Nothing: a command or an error has ended the connection.
    Closed,
}

/// Answers the requests at the beginning of `input`, and returns how many bytes they are.
async fn answer(
    session: &mut Session<'_>,
    decoder: &mut Decoder,
    input: &[u8],
    replies: &mut Replies,
) -> (usize, Pipeline) {
    let mut used = 0_usize;
    for _ in 0..TURN {
        let rest = input.get(used..).unwrap_or_default();
        let length = match decoder.decode(rest, session.trust()) {
            Ok(Some(length)) => length,
            Ok(None) => return (used, Pipeline::Complete),
            Err(error) => {
                replies.error(format_args!("ERR {error}"));
                return (used, Pipeline::Closed);
            }
        };
        match session.execute(decoder.arguments(rest), replies).await {
            Next::Continue => used = used.saturating_add(length),
            Next::AfterReplies => break,
            Next::Close => return (used.saturating_add(length), Pipeline::Closed),
        }
        if replies.bytes.len() >= MAX_REPLIES {
            break;
        }
    }
    (used, Pipeline::Paused)
}
