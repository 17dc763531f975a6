//! Turns for work that takes a processor for long: one at a time, with few waiters, and it ends when its client leaves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ApiError;

/// The turns for one kind of work.
#[derive(Debug)]
pub(super) struct Turns {
    /// Held by the work itself: a client that leaves ends the work, but not at once.
    one: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

/// A place in the queue. Whatever the work needs is read only once there is one.
#[derive(Debug)]
pub(super) struct Place {
    one: Arc<Semaphore>,
    place: OwnedSemaphorePermit,
}

/// Ends the work when its client is no longer waiting.
struct EndOnDrop(Arc<AtomicBool>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Turns {
    /// Turns for at most so many clients, of whom all but one wait.
    pub(super) fn new(places: usize) -> Self {
        Self { one: Arc::new(Semaphore::new(1)), places: Arc::new(Semaphore::new(places)) }
    }

    /// Takes a place in the queue.
    ///
    /// # Errors
    /// 503 if all of them are taken.
    pub(super) fn place(&self) -> Result<Place, ApiError> {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| busy())?;
        Ok(Place { one: Arc::clone(&self.one), place })
    }
}

impl Place {
    /// Waits for the turn and does the work on a thread that may block. The work is told whether it is still wanted.
    pub(super) async fn work<T, W>(self, work: W) -> Result<T, ApiError>
    where
        T: Send + 'static,
        W: FnOnce(&dyn Fn() -> bool) -> T + Send + 'static,
    {
        let Self { one, place } = self;
        let turn = one.acquire_owned().await.map_err(|_| busy())?;
        let wanted = Arc::new(AtomicBool::new(true));
        let _end = EndOnDrop(Arc::clone(&wanted));
        let working = tokio::task::spawn_blocking(move || {
            let done = work(&|| wanted.load(Ordering::Relaxed));
            drop((turn, place));
            done
        });
        working.await.map_err(|_| busy())
    }
}

fn busy() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "others wait for the same work already")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks of drafts waited without a bound, and went on for minutes after their clients had left.
    ///
    /// Woken by leaving out `EndOnDrop`, or the places.
    #[tokio::test]
    async fn waiters_are_bounded_and_work_ends_with_its_client() {
        let turns = Turns::new(2);
        let (started, has_started) = tokio::sync::oneshot::channel();
        let endless = turns.place().unwrap().work(|is_wanted| {
            started.send(()).unwrap();
            while is_wanted() {
                std::thread::yield_now();
            }
        });
        let endless = tokio::spawn(endless);
        has_started.await.unwrap();
        let waiter = turns.place().unwrap();
        let refused = turns.place().unwrap_err();
        assert_eq!((refused.status, refused.body.code()), (StatusCode::SERVICE_UNAVAILABLE, "busy"));
        endless.abort();
        assert_eq!(waiter.work(|_| 7).await.unwrap(), 7);
        assert!(turns.place().is_ok());
    }
}
