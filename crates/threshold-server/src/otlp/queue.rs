//! The spans that wait for their export.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::spans::Record;

/// The most spans that wait. Further ones are lost, and counted.
const MAX_WAITING: usize = 4_096;
/// The spans of one export. As many that wait wake the exporter before its time.
pub(super) const BATCH: usize = 512;

/// A bounded queue, which never makes a decision wait.
#[derive(Debug, Default)]
pub(super) struct SpanQueue {
    waiting: Mutex<Waiting>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    spans: Vec<Record>,
    lost: u64,
    is_stopping: bool,
}

/// What is taken out of the queue at once.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) spans: Vec<Record>,
    /// How many were lost since the last time.
    pub(super) lost: u64,
    pub(super) is_stopping: bool,
}

impl SpanQueue {
    pub(super) fn push(&self, span: Record) {
        let mut waiting = self.lock();
        if waiting.spans.len() >= MAX_WAITING {
            waiting.lost = waiting.lost.saturating_add(1);
            return;
        }
        waiting.spans.push(span);
        // Once for a batch: waking a thread costs more than the span.
        if waiting.spans.len() == BATCH {
            self.wake.notify_one();
        }
    }

    /// Tells the exporter to export what is left and to end.
    pub(super) fn stop(&self) {
        self.lock().is_stopping = true;
        self.wake.notify_one();
    }

    /// Waits until `deadline`, until there are `enough` spans, or until it is told to stop.
    pub(super) fn wait(&self, deadline: Instant, enough: usize) {
        let mut waiting = self.lock();
        while !waiting.is_stopping && waiting.spans.len() < enough {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            waiting =
                self.wake.wait_timeout(waiting, left).map_or_else(|error| error.into_inner().0, |(guard, _)| guard);
        }
    }

    /// Takes at most `most` spans.
    pub(super) fn take(&self, most: usize) -> Taken {
        let mut waiting = self.lock();
        let count = most.min(waiting.spans.len());
        let spans = waiting.spans.drain(..count).collect();
        Taken { spans, lost: std::mem::take(&mut waiting.lost), is_stopping: waiting.is_stopping }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_loses_new_spans_and_counts_them() {
        let queue = SpanQueue::default();
        for _ in 0..MAX_WAITING + 3 {
            queue.push(Record::default());
        }
        let Taken { spans, lost, is_stopping } = queue.take(BATCH);
        assert_eq!((spans.len(), lost, is_stopping), (BATCH, 3, false));
        queue.push(Record::default());
        let Taken { spans, lost, .. } = queue.take(usize::MAX);
        assert_eq!((spans.len(), lost), (MAX_WAITING - BATCH + 1, 0));
        // Returns at once.
        queue.stop();
        queue.wait(Instant::now() + std::time::Duration::from_secs(3_600), BATCH);
        assert!(queue.take(1).is_stopping);
    }
}
