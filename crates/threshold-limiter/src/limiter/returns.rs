//! What is given back when nobody is there to wait for it: a request that was dropped, in a store that takes a while.

use std::collections::VecDeque;
use std::sync::PoisonError;

use threshold_core::command::Command;
use threshold_core::{Receipt, Timestamp};

use super::Limiter;
use crate::clock::Clock;
use crate::store::{Store, at_once};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// How many are queued at most. Beyond, what a request holds is held until its time is up: less is admitted, never more.
const MAX_QUEUED: usize = 65_536;

/// Commands that nobody waits for, oldest first.
#[derive(Debug, Default)]
pub(super) struct Returns {
    queue: Mutex<VecDeque<(Command, Timestamp)>>,
    /// How many there are, so that an empty queue costs one load.
    len: AtomicUsize,
    dropped: AtomicU64,
}

impl Returns {
    fn push(&self, command: Command, now: Timestamp) {
        // A poisoned lock is taken all the same: a queue is never half changed.
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.len() < MAX_QUEUED {
            queue.push_back((command, now));
            self.len.store(queue.len(), Ordering::Release);
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn pop(&self) -> Option<(Command, Timestamp)> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let first = queue.pop_front();
        self.len.store(queue.len(), Ordering::Release);
        first
    }
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Gives back what was taken out of a pending request: at once, or, where the store takes a while, before the next
    /// thing that it is asked.
    pub(crate) fn give_back(&self, taken: Receipt) {
        let keys: Vec<_> = taken.keys().collect();
        let (command, now) = (Command::GiveBack(Box::new(taken)), self.clock.now());
        if self.store.answers_at_once() {
            let _ = at_once(self.store.execute(command, now));
            self.made_room(keys);
        } else {
            self.returns.push(command, now);
        }
    }

    /// Gives back what is queued. Every verb does this first; a limiter that is seldom asked may do it now and then, so
    /// that others see what was given back.
    #[inline]
    pub async fn give_back_queued(&self) {
        if self.returns.len.load(Ordering::Acquire) > 0 {
            self.drain_returns().await;
        }
    }

    /// How many gave nothing back because too many were queued; what they held is held until its time is up.
    pub fn dropped_returns(&self) -> u64 {
        self.returns.dropped.load(Ordering::Relaxed)
    }

    #[cold]
    async fn drain_returns(&self) {
        while let Some((command, now)) = self.returns.pop() {
            let keys: Vec<_> = match &command {
                Command::GiveBack(receipt) => receipt.keys().collect(),
                _ => Vec::new(),
            };
            // As of then: a charge that has expired since gives nothing back.
            if self.store.execute(command, now.max(self.clock.now())).await.is_err() {
                self.returns.dropped.fetch_add(1, Ordering::Relaxed);
            }
            self.made_room(keys);
        }
    }
}
