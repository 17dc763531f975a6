//! The events of a journal that an operator should know of: failed writes and repairs.

use std::sync::Arc;

use tokio::sync::watch;

use super::rebuild::Repair;

/// A change in the condition of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum JournalEvent {
    /// The database was damaged while it was in use, and has been rebuilt.
    Repaired(Arc<Repair>),
    /// Changes cannot be written, for this reason. They stay in memory and are retried.
    Degraded(Arc<str>),
    /// Every change that was queued is on disk again.
    Recovered,
}

/// The condition of a journal.
#[derive(Debug, Clone, Default)]
pub(super) struct Condition {
    /// The reason why changes cannot be written.
    pub(super) failure: Option<Arc<str>>,
    /// The last repair.
    pub(super) repair: Option<Arc<Repair>>,
    /// The number of repairs, which tells two equal ones apart.
    pub(super) repairs: u64,
}

/// A subscription to the events of a journal, which [`Journal::events`](super::Journal::events) returns.
///
/// Only the latest condition is kept: a subscriber that is slow may miss a failure that has passed, never one that lasts.
#[derive(Debug)]
pub struct JournalEvents {
    condition: watch::Receiver<Condition>,
    seen: Condition,
}

impl JournalEvents {
    /// Starts from a sound journal, so that the first event is a failure that is already there.
    pub(super) fn new(condition: watch::Receiver<Condition>) -> Self {
        Self { condition, seen: Condition::default() }
    }

    /// Waits for the next event. Returns `None` once the journal is gone.
    ///
    /// Cancel safe: no event is lost if the future is dropped. A repair comes before the recovery that it leads to.
    pub async fn next(&mut self) -> Option<JournalEvent> {
        loop {
            let Condition { failure, repair, repairs } = self.condition.borrow_and_update().clone();
            // The repair comes before the recovery that it has brought about.
            if let Some(repair) = repair.filter(|_| repairs != self.seen.repairs) {
                self.seen.repairs = repairs;
                return Some(JournalEvent::Repaired(repair));
            }
            if failure != self.seen.failure {
                self.seen.failure.clone_from(&failure);
                return Some(failure.map_or(JournalEvent::Recovered, JournalEvent::Degraded));
            }
            self.condition.changed().await.ok()?;
        }
    }
}
