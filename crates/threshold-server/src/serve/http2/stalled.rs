//! Ends the streams of HTTP/2 whose clients do not read their answers, however lively the rest of the connection is.

use std::cell::Cell;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};

/// What a stream waits for.
#[derive(Debug, Clone, Copy)]
enum Waits {
    /// For the server, or for the body of its request, which the doors wait for.
    ForServer,
    /// For its client, since just now.
    Begins,
    /// For its client to read a part of the answer.
    ForClient,
}

tokio::task_local! {
    /// Of the stream that the current task serves. hyper does not poll an answer for which the client has no room, so the answer cannot end
    /// the stream itself.
    static WAITS: Cell<Waits>;
}

/// Notes that a part of the answer is ready, and waits for the client to read the part before.
pub(super) fn offered() {
    set(Waits::Begins);
}

/// Notes that the server has nothing to send now.
pub(super) fn waits_for_server() {
    set(Waits::ForServer);
}

fn set(waits: Waits) {
    // It fails outside of a task for a stream, where nothing has to be ended.
    let _ = WAITS.try_with(|own| own.set(waits));
}

/// Spawns the tasks of streams.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamExecutor {
    /// How long a client may take to read a part of an answer.
    pub(super) client_timeout: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for StreamExecutor {
    fn execute(&self, future: F) {
        let stream = StreamTask { future, client_timeout: self.client_timeout, timer: None };
        drop(tokio::spawn(WAITS.scope(Cell::new(Waits::ForServer), stream)));
    }
}

pin_project! {
    /// The task of a stream. When it ends before its answer does, the stream is reset.
    struct StreamTask<F> {
        #[pin]
        future: F,
        client_timeout: Duration,
        // Allocated when a client is slow: most answers are sent at once.
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future<Output = ()>> Future for StreamTask<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        if this.future.poll(cx).is_ready() {
            return Poll::Ready(());
        }
        match WAITS.with(Cell::get) {
            Waits::ForServer => *this.timer = None,
            Waits::Begins => {
                set(Waits::ForClient);
                *this.timer = Some(Box::pin(sleep(*this.client_timeout)));
            }
            Waits::ForClient => {}
        }
        let Some(timer) = this.timer else { return Poll::Pending };
        timer.as_mut().poll(cx).map(|()| tracing::debug!("stream reset: its client does not read"))
    }
}
