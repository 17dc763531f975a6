//! Timers and tasks of one event.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use threshold_limiter::tower::{Runtime, Task};
use worker::js_sys::Promise;
use worker::send::{SendFuture, SendWrapper};
use worker::wasm_bindgen_futures::future_to_promise;
use worker::web_sys::Response;
use worker::{Context, Delay};

/// The runtime of one event, for [`ThresholdLayer::runtime`](threshold_limiter::tower::ThresholdLayer::runtime).
///
/// Its tasks run to their end after the response, at most as long as Cloudflare lets an event go on (30 s).
#[derive(Clone)]
pub struct EventRuntime(Arc<SendWrapper<Context>>);

impl EventRuntime {
    /// Creates the runtime of the event that this context belongs to.
    #[must_use]
    pub fn new(context: Context) -> Self {
        Self(Arc::new(SendWrapper::new(context)))
    }
}

impl EventRuntime {
    /// Runs the answer to the event to its end, also if the client leaves meanwhile.
    pub fn keep(&self, answer: impl Future<Output = worker::Result<Response>> + 'static) -> Promise {
        // Boxed, or each of the futures around it would have room for two of it: a hundred kilobytes for each request in flight.
        let answer = Box::pin(answer);
        let answer = future_to_promise(async move { Ok(answer.await?.into()) });
        // The promise is awaited all the same.
        let _ = self.0.as_ref().as_ref().wait_until(&answer);
        answer
    }
}

impl Runtime for EventRuntime {
    fn sleep(&self, delay: Duration) -> Task {
        after(delay)
    }

    fn spawn(&self, task: Task) {
        // Without `waitUntil` a task ends with the response, or with a client that leaves.
        self.0.wait_until(task);
    }
}

fn after(delay: Duration) -> Task {
    Box::pin(SendFuture::new(Delay::from(delay)))
}

impl fmt::Debug for EventRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventRuntime")
    }
}

/// The runtime of a layer before it has an event. Every event replaces it by its own.
#[derive(Debug, Clone, Copy)]
pub struct NoEvent;

impl Runtime for NoEvent {
    fn sleep(&self, delay: Duration) -> Task {
        after(delay)
    }

    fn spawn(&self, task: Task) {
        // The task may end with the event that it belongs to.
        worker::wasm_bindgen_futures::spawn_local(task);
    }
}
