//! Work that goes on after its request has left: giving back what it held, and decisions that a store has not answered yet.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// The most pieces of work under way at once. Each takes some kilobytes and ends with the deadline of its store.
const MAX_UNDER_WAY: usize = 10_000;

/// A bounded number of tasks on the runtime that the layer is called on.
#[derive(Clone)]
pub(super) struct Background {
    room: Arc<Semaphore>,
}

impl Background {
    pub(super) fn new() -> Self {
        Self::with_room(MAX_UNDER_WAY)
    }

    fn with_room(room: usize) -> Self {
        Self { room: Arc::new(Semaphore::new(room)) }
    }

    /// Starts a piece of work.
    ///
    /// # Errors
    /// Gives it back where there is no room, or no runtime.
    pub(super) fn start<F>(&self, work: F) -> Result<JoinHandle<F::Output>, F>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let (Ok(runtime), Ok(place)) = (Handle::try_current(), Arc::clone(&self.room).try_acquire_owned()) else {
            return Err(work);
        };
        Ok(runtime.spawn(async move {
            let done = work.await;
            drop(place);
            done
        }))
    }
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Background").field("room", &self.room.available_permits()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn work_beyond_the_room_is_given_back_and_there_is_room_again_when_some_has_ended() {
        let background = Background::with_room(2);
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
    fn work_is_given_back_where_there_is_no_runtime() {
        assert!(Background::new().start(async {}).is_err());
    }
}
