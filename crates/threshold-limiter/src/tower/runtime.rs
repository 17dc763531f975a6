//! The async runtime of the host: timers, and tasks that continue after the client has left.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

#[cfg(not(target_arch = "wasm32"))]
use std::panic::resume_unwind;

#[cfg(not(target_arch = "wasm32"))]
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};
#[cfg(not(target_arch = "wasm32"))]
use tokio::task::JoinHandle;

/// The most tasks at once. Each takes some kilobytes, and ends no later than the deadline of its store.
const MAX_TASKS: usize = 10_000;

/// A future that a [`Runtime`] returns or runs.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Timers and tasks of a host that has no tokio runtime, such as a Cloudflare Worker.
pub trait Runtime: Send + Sync {
    /// Returns a future that resolves after `delay`.
    fn sleep(&self, delay: Duration) -> Task;

    /// Runs a task to its end, also after the request that it belongs to has ended. It gives back what a request has not used, so
    /// a task that is dropped early leaves charges behind.
    fn spawn(&self, task: Task);
}

/// A bounded number of tasks on the runtime of the layer.
#[derive(Clone)]
pub(super) struct Background {
    permits: Arc<Semaphore>,
    host: Host,
}

/// The runtime that tasks and timers are of.
#[derive(Clone)]
enum Host {
    /// The tokio runtime that the layer is called on.
    #[cfg(not(target_arch = "wasm32"))]
    Tokio,
    Other(Arc<dyn Runtime>),
}

/// A task that was started.
pub(super) enum Started<T> {
    #[cfg(not(target_arch = "wasm32"))]
    Tokio(JoinHandle<T>),
    Other(oneshot::Receiver<T>),
}

impl Background {
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn tokio() -> Self {
        Self::new(Host::Tokio, MAX_TASKS)
    }

    pub(super) fn on(runtime: Arc<dyn Runtime>) -> Self {
        Self::new(Host::Other(runtime), MAX_TASKS)
    }

    fn new(host: Host, max: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(max)), host }
    }

    /// Replaces the runtime. Tasks of the old one count toward the same bound.
    pub(super) fn set_runtime(&mut self, runtime: Arc<dyn Runtime>) {
        self.host = Host::Other(runtime);
    }

    /// Spawns a task.
    ///
    /// # Errors
    /// Returns the future unchanged if there are too many tasks, or no tokio runtime.
    pub(super) fn start<F>(&self, work: F) -> Result<Started<F::Output>, F>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else { return Err(work) };
        match &self.host {
            #[cfg(not(target_arch = "wasm32"))]
            Host::Tokio => {
                let Ok(runtime) = Handle::try_current() else { return Err(work) };
                Ok(Started::Tokio(runtime.spawn(async move {
                    let done = work.await;
                    drop(permit);
                    done
                })))
            }
            Host::Other(runtime) => {
                let (send, done) = oneshot::channel();
                runtime.spawn(Box::pin(async move {
                    // The receiver is gone if the client has left. The output gives back its charges when it is dropped.
                    let _ = send.send(work.await);
                    drop(permit);
                }));
                Ok(Started::Other(done))
            }
        }
    }

    /// Returns a future that resolves after `delay`.
    pub(super) fn sleep(&self, delay: Duration) -> Task {
        match &self.host {
            #[cfg(not(target_arch = "wasm32"))]
            Host::Tokio => Box::pin(tokio::time::sleep(delay)),
            Host::Other(runtime) => runtime.sleep(delay),
        }
    }
}

impl<T> Started<T> {
    /// Waits for the task. If it panics, so does this.
    pub(super) async fn join(self) -> T {
        match self {
            #[cfg(not(target_arch = "wasm32"))]
            Self::Tokio(task) => task.await.unwrap_or_else(|stopped| resume_unwind(stopped.into_panic())),
            Self::Other(done) => done.await.expect("a runtime runs its tasks to their end"),
        }
    }
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Background").field("permits", &self.permits.available_permits()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn too_many_tasks_are_refused_until_one_has_ended() {
        let background = Background::new(Host::Tokio, 2);
        let mut ends = Vec::new();
        let work = |ends: &mut Vec<oneshot::Sender<u8>>| {
            let (end, ended) = oneshot::channel();
            ends.push(end);
            background.start(ended)
        };
        let first = work(&mut ends).ok().unwrap();
        let _second = work(&mut ends).ok().unwrap();
        assert!(work(&mut ends).is_err());
        ends.swap_remove(0).send(7).unwrap();
        assert_eq!(first.join().await, Ok(7));
        assert!(work(&mut ends).is_ok());
    }

    #[test]
    fn without_a_runtime_every_task_is_refused() {
        assert!(Background::tokio().start(async {}).is_err());
    }
}
