//! Background tasks: decisions and refunds that continue after the client has left.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// The most tasks at once. Each takes some kilobytes, and ends no later than the deadline of its store.
const MAX_TASKS: usize = 10_000;

/// A bounded number of tasks on the runtime that the layer is called on.
#[derive(Clone)]
pub(super) struct Background {
    permits: Arc<Semaphore>,
}

impl Background {
    pub(super) fn new() -> Self {
        Self::with_max(MAX_TASKS)
    }

    fn with_max(max: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(max)) }
    }

    /// Spawns a task.
    ///
    /// # Errors
    /// Returns the future unchanged if there are too many tasks, or no tokio runtime.
    pub(super) fn start<F>(&self, work: F) -> Result<JoinHandle<F::Output>, F>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        // Without a runtime, a permit that was acquired goes back at once.
        let (Ok(runtime), Ok(permit)) = (Handle::try_current(), Arc::clone(&self.permits).try_acquire_owned()) else {
            return Err(work);
        };
        Ok(runtime.spawn(async move {
            let done = work.await;
            drop(permit);
            done
        }))
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
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn too_many_tasks_are_refused_until_one_has_ended() {
        let background = Background::with_max(2);
        let mut ends = Vec::new();
        let work = |ends: &mut Vec<oneshot::Sender<u8>>| {
            let (end, ended) = oneshot::channel();
            ends.push(end);
            background.start(ended)
        };
        let first = work(&mut ends).unwrap();
        let _second = work(&mut ends).unwrap();
        assert!(work(&mut ends).is_err());
        ends.swap_remove(0).send(7).unwrap();
        assert_eq!(first.await.unwrap(), Ok(7));
        assert!(work(&mut ends).is_ok());
    }

    #[test]
    fn without_a_runtime_every_task_is_refused() {
        assert!(Background::new().start(async {}).is_err());
    }
}
