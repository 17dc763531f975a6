//! Waiting until a key has room: first come, first served, bounded, and safe to cancel at any await.

use std::hash::Hash;
use std::iter::once;
use std::time::Duration;

use threshold_core::Timestamp;
use tokio::time::{Instant, timeout_at};

use super::{KeyDecision, KeyLimiter};
use crate::clock::Clock;
use crate::limiter::wait::queues::Turn;
use crate::limiter::wait::{FOREVER, TICK};

impl<C: Clock> KeyLimiter<C> {
    /// Waits until a cost of 1 fits under this key and charges it, for `at_most` this long. Returns a denial at once if the
    /// cost cannot fit by then, or if too many callers wait already; otherwise when the time is up.
    ///
    /// Callers who wait for the same key are served in the order of their arrival. A plain [`check`](Self::check) does not
    /// queue. A future that is dropped has charged nothing, and the next one moves up. A future that is kept but not polled
    /// keeps its place and holds up those behind it.
    ///
    /// Decisions follow the limiter's clock, and the wait follows tokio's. A test that stops one must move both.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use threshold_limiter::{KeyLimiter, Limit};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let provider = KeyLimiter::new(Limit::per_second(100).burst(1));
    /// for _ in 0..3 {
    ///     assert!(provider.until_ready("api.example.com", Duration::from_secs(5)).await.allowed);
    /// }
    /// # }
    /// ```
    ///
    /// # Panics
    /// Panics outside of a tokio runtime with a timer.
    pub async fn until_ready<K: Hash + ?Sized>(&self, key: &K, at_most: Duration) -> KeyDecision {
        self.until_ready_cost(key, 1, at_most).await
    }

    /// Waits until `cost` fits under this key and charges it; see [`until_ready`](Self::until_ready). Small costs do not
    /// starve a large one that came before them.
    ///
    /// # Panics
    /// As [`until_ready`](Self::until_ready) does.
    pub async fn until_ready_cost<K: Hash + ?Sized>(&self, key: &K, cost: u64, at_most: Duration) -> KeyDecision {
        let arrived = Instant::now();
        // A millisecond of grace, because the timer and the limiter's clock are not read at the same moment.
        let deadline = arrived.checked_add(at_most.min(FOREVER).saturating_add(TICK)).unwrap_or(arrived);
        let mut place = self.waiters.arrive();
        // Two keys with one queue would only wait for each other.
        let queue = self.identity(key);
        loop {
            let now = Instant::now();
            let left = deadline.saturating_duration_since(now);
            let wait = match place.turn(once(queue)) {
                Turn::Own => {
                    let decision = self.check_cost(key, cost);
                    // Allowed, or never.
                    let Some(wait) = decision.retry_after() else { return decision };
                    if wait > left || !place.enqueue(|_| false, once(queue)) {
                        return decision;
                    }
                    // The timer cannot sleep for less, and a wait of 0 would spin.
                    wait.max(TICK)
                }
                // Those ahead notify the next when they leave.
                Turn::Behind if !left.is_zero() => left,
                Turn::Behind | Turn::NoRoom => return KeyDecision::others_ahead(self.clock.now()),
            };
            let again = now.checked_add(wait).unwrap_or(deadline).min(deadline);
            let _ = timeout_at(again, place.notified()).await;
        }
    }
}

impl KeyDecision {
    /// Makes the denial of a caller who is not the next: what there is belongs to those ahead, and there is no telling how
    /// long they take.
    fn others_ahead(now: Timestamp) -> Self {
        Self { allowed: false, remaining: 0, at: now, ready: now }
    }
}
