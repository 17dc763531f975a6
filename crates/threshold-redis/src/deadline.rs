//! The deadline of a call to the store, which counts the time of the server and the network, and not that of a busy node.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, timeout_at};

use super::server::Latest;
use threshold_limiter::store::StoreError;

/// A timer that is later than this was held up by other work of the node. Tokio's timers have a resolution of one millisecond.
const BUSY: Duration = Duration::from_millis(2);
/// The longest wait of a busy node, unless the deadline itself is longer. Its clients wait for other reasons by then.
const LONGEST: Duration = Duration::from_millis(500);

tokio::task_local! {
    /// The deadline of all calls within [`within`].
    static CALL: Duration;
}

/// Runs a future whose calls to stores in Redis wait no longer than this for an answer, if that is shorter than the store's own
/// deadline: a caller may have a shorter one.
pub async fn within<F: Future>(deadline: Duration, future: F) -> F::Output {
    CALL.scope(deadline, future).await
}

/// Returns the deadline of this call to a store with this one.
pub(super) fn of_call(own: Duration) -> Duration {
    CALL.try_with(|call| own.min(*call)).unwrap_or(own)
}

/// Returns until when a server may execute an operation that begins now. It is later than the deadline, because a busy node waits for
/// longer, and what is executed too late is only withdrawn again.
pub(super) fn latest(deadline: Duration) -> Latest {
    std::time::Instant::now().checked_add(deadline.max(LONGEST)).map_or(Latest::Never, Latest::At)
}

/// There was no answer within the deadline.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoAnswer;

/// Waits for an operation, which goes on after the deadline because the server may have begun it.
///
/// The time begins when the operation does, and not when it is queued behind other tasks of the node. If the timer itself is late
/// by some time, the answer may have arrived in the meantime without being read, so the wait goes on for as long again. On a node
/// with time to spare timers are not late.
///
/// The operation is in a box, because a task is moved several times before it runs and after it has ended.
pub(super) async fn wait<T: Send + 'static>(
    deadline: Duration,
    operation: BoxFuture<'static, Result<T, StoreError>>,
) -> Result<Result<T, StoreError>, NoAnswer> {
    let begun = Arc::new(OnceLock::new());
    let mark = Arc::clone(&begun);
    // A spawned task is not cancelled when its handle is dropped.
    let mut task = tokio::spawn(async move {
        // Fails only if it was set before, and nothing else sets it.
        let _ = mark.set(Instant::now());
        operation.await
    });
    let queued = Instant::now();
    let mut until = queued.checked_add(deadline).unwrap_or(queued);
    loop {
        match timeout_at(until, &mut task).await {
            Ok(Ok(answered)) => return Ok(answered),
            Ok(Err(_)) => return Ok(Err(StoreError::Unavailable)),
            Err(_) => until = extended(queued, begun.get().copied(), until, deadline).ok_or(NoAnswer)?,
        }
    }
}

/// Returns the new end of a wait that has reached its end, or nothing if the time is up.
fn extended(queued: Instant, begun: Option<Instant>, until: Instant, deadline: Duration) -> Option<Instant> {
    let now = Instant::now();
    let last = queued.checked_add(deadline.max(LONGEST))?;
    let late = now.saturating_duration_since(until);
    let own_end = begun.unwrap_or(now).checked_add(deadline)?;
    let extended = match (own_end > now, late > BUSY) {
        (true, _) => own_end,
        (false, true) => now.checked_add(late)?,
        (false, false) => return None,
    };
    Some(extended.min(last)).filter(|extended| *extended > now)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_millis(20);

    async fn answer_after(time: Duration) -> Result<u32, StoreError> {
        tokio::time::sleep(time).await;
        Ok(7)
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_in_time_is_returned_and_a_late_one_is_a_timeout() {
        assert_eq!(wait(DEADLINE, Box::pin(answer_after(DEADLINE / 2))).await, Ok(Ok(7)));
        assert_eq!(wait(DEADLINE, Box::pin(answer_after(DEADLINE * 2))).await, Err(NoAnswer));
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_operation_goes_on() {
        let (ended, has_ended) = tokio::sync::oneshot::channel();
        let operation = async move {
            tokio::time::sleep(DEADLINE * 3).await;
            let _ = ended.send(());
            Ok(())
        };
        assert_eq!(wait(DEADLINE, Box::pin(operation)).await, Err(NoAnswer));
        has_ended.await.unwrap();
    }

    /// A debug build under 64 clients answered as if Redis were down, although Redis answered each call in a millisecond.
    #[tokio::test(start_paused = true)]
    async fn the_time_before_an_operation_begins_does_not_count() {
        // It runs before the operation, in the same thread: the operation begins after its deadline would have been over.
        let busy = tokio::spawn(async { tokio::time::advance(DEADLINE * 3 / 2).await });
        assert_eq!(wait(DEADLINE, Box::pin(answer_after(DEADLINE * 3 / 4))).await, Ok(Ok(7)));
        busy.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_a_busy_node_reads_late_is_in_time() {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let busy = tokio::spawn(async {
            // Lets the operation begin.
            tokio::task::yield_now().await;
            tokio::time::advance(DEADLINE * 2).await;
            tokio::time::sleep(DEADLINE / 2).await;
            answer.send(7).unwrap();
        });
        assert_eq!(wait(DEADLINE, Box::pin(async { Ok(answered.await.unwrap()) })).await, Ok(Ok(7)));
        busy.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_node_waits_a_bounded_time() {
        let busy = tokio::spawn(async { tokio::time::advance(LONGEST).await });
        assert_eq!(wait(DEADLINE, Box::pin(answer_after(DEADLINE / 2))).await, Err(NoAnswer));
        busy.await.unwrap();
    }
}
