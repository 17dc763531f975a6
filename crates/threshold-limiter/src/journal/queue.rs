//! The queue of changes: the latest value of each key, and how far the disk has come.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::SaveError;
use super::events::{Condition, JournalEvents};
use super::rebuild::Repair;
use super::rows::{AuditLine, Kind};
use crate::bans::MAX_BANS;
use crate::histogram::Histogram;

/// The most audit lines that wait for the disk. People make them, so this many never come by intent.
const MAX_AUDIT_LINES: usize = 10_000;
/// The most deletions that wait for the disk, about 30 MB. Rows with a value are bounded by the tables in memory; deletions
/// are not, while a disk fails for hours.
const MAX_DELETIONS: usize = 250_000;
/// The most deletions of bans that wait for the disk. An import may replace all of them, and is one transaction.
const MAX_BAN_DELETIONS: usize = MAX_BANS;
/// How often the writer verifies the files while there is nothing to write.
const IDLE_CHECK: Duration = Duration::from_secs(1);
/// Waits up to this long end at once while the disk is failing: it will not recover in time.
const SHORT_WAIT: Duration = Duration::from_millis(100);

/// The latest value of each key; `None` deletes the row. Rows with a value are in the tables in memory too, which are
/// bounded. There are at most [`MAX_DELETIONS`] and [`MAX_BAN_DELETIONS`] without one.
pub(super) type Changes = HashMap<(Kind, Box<[u8]>), Option<Vec<u8>>>;

/// The changes of one transaction.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) changes: Changes,
    pub(super) lines: Vec<AuditLine>,
    /// The number of changes that delete a row other than a ban.
    deletions: usize,
    /// The number of changes that delete a ban.
    ban_deletions: usize,
    /// Whether deletions were dropped to bound the queue. The database is then rebuilt from memory.
    pub(super) is_incomplete: bool,
    /// Whether the record of earlier damage is removed.
    pub(super) acknowledges_damage: bool,
    /// The sequence number of the last change.
    pub(super) last_change: u64,
    /// The time of the first change.
    since: Option<Instant>,
}

#[derive(Debug, Default)]
struct Pending {
    batch: Batch,
    /// The time of the first change in the batch that is being written.
    in_flight_since: Option<Instant>,
    /// The number of audit lines in the batch that is being written. They return to the queue if the write fails.
    lines_in_flight: usize,
    /// The number of audited changes that have begun and not ended. The writer takes nothing meanwhile, so that a change and
    /// its audit line are one transaction.
    open_changes: usize,
    is_closing: bool,
}

impl Pending {
    /// Returns whether there is room for one more audit line, besides those that open changes will add.
    fn has_room_for_line(&self) -> bool {
        let lines = self.batch.lines.len().saturating_add(self.lines_in_flight).saturating_add(self.open_changes);
        lines < MAX_AUDIT_LINES
    }
}

/// The queue between the limiter, which changes rows, and the thread that writes them.
#[derive(Debug)]
pub(super) struct Queue {
    pending: Mutex<Pending>,
    /// Wakes the writer.
    changed: Condvar,
    /// The sequence number of the last change that is on disk.
    committed: watch::Sender<u64>,
    condition: watch::Sender<Condition>,
    pub(super) commit_times: Histogram,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            pending: Mutex::default(),
            changed: Condvar::new(),
            committed: watch::Sender::new(0),
            condition: watch::Sender::new(Condition::default()),
            commit_times: Histogram::default(),
        }
    }
}

impl Queue {
    /// Queues the latest value of a key.
    pub(super) fn put(&self, kind: Kind, key: &[u8], value: Option<Vec<u8>>) {
        let mut pending = self.lock();
        pending.batch.put((kind, key.into()), value);
        self.count_change(pending);
    }

    pub(super) fn audit(&self, line: AuditLine) -> Result<(), SaveError> {
        let mut pending = self.lock();
        if !pending.has_room_for_line() {
            return Err(SaveError::AuditFull);
        }
        pending.batch.lines.push(line);
        self.count_change(pending);
        Ok(())
    }

    /// Begins an audited change. The writer takes nothing until it ends.
    pub(super) fn begin_change(&self) -> Result<(), SaveError> {
        let mut pending = self.lock();
        if !pending.has_room_for_line() {
            return Err(SaveError::AuditFull);
        }
        pending.open_changes = pending.open_changes.saturating_add(1);
        Ok(())
    }

    /// Ends an audited change, with its line if the change was made.
    pub(super) fn end_change(&self, line: Option<AuditLine>) {
        let mut pending = self.lock();
        pending.open_changes = pending.open_changes.saturating_sub(1);
        match line {
            Some(line) => {
                pending.batch.lines.push(line);
                self.count_change(pending);
            }
            None => {
                // The writer waits until no change is open, whether or not the change was made.
                drop(pending);
                self.changed.notify_one();
            }
        }
    }

    pub(super) fn acknowledge_damage(&self) {
        let mut pending = self.lock();
        pending.batch.acknowledges_damage = true;
        self.count_change(pending);
    }

    /// Waits until every change so far is on disk.
    pub(super) async fn saved(&self, timeout: Duration) -> Result<(), SaveError> {
        // Read first: changes after this one are not the caller's.
        let last = self.lock().batch.last_change;
        let mut committed = self.committed.subscribe();
        if *committed.borrow() >= last {
            return Ok(());
        }
        if timeout <= SHORT_WAIT && self.failure().is_some() {
            return Err(SaveError::NotOnDisk);
        }
        let reached = tokio::time::timeout(timeout, committed.wait_for(|committed| *committed >= last)).await;
        if matches!(reached, Ok(Ok(_))) { Ok(()) } else { Err(SaveError::NotOnDisk) }
    }

    pub(super) fn events(&self) -> JournalEvents {
        JournalEvents::new(self.condition.subscribe())
    }

    /// Returns why changes cannot be written.
    pub(super) fn failure(&self) -> Option<Arc<str>> {
        self.condition.borrow().failure.clone()
    }

    pub(super) fn last_repair(&self) -> Option<Arc<Repair>> {
        self.condition.borrow().repair.clone()
    }

    /// Returns the age of the oldest change that is not on disk.
    pub(super) fn write_lag(&self) -> Option<Duration> {
        let pending = self.lock();
        // What is being written is older than what waits.
        pending.in_flight_since.or(pending.batch.since).map(|since| since.elapsed())
    }

    /// Ends the writer once the queue is empty.
    pub(super) fn close(&self) {
        self.lock().is_closing = true;
        self.changed.notify_all();
    }

    /// Returns whether every change so far is on disk.
    pub(super) fn is_saved(&self) -> bool {
        *self.committed.borrow() >= self.lock().batch.last_change
    }

    /// Takes everything that is queued, waiting for a change. After [`IDLE_CHECK`] without one it returns an empty batch;
    /// `None` ends the writer.
    pub(super) fn take(&self) -> Option<Batch> {
        let is_idle = |pending: &mut Pending| pending.batch.is_empty() && !pending.is_closing;
        let waited = self.changed.wait_timeout_while(self.lock(), IDLE_CHECK, is_idle);
        let (pending, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let has_open_change = |pending: &mut Pending| pending.open_changes > 0;
        let mut pending = self.changed.wait_while(pending, has_open_change).unwrap_or_else(PoisonError::into_inner);
        if pending.batch.is_empty() && pending.is_closing {
            return None;
        }
        // The numbers go on from batch to batch: `saved` compares them with the last one on disk.
        let last_change = pending.batch.last_change;
        let batch = std::mem::replace(&mut pending.batch, Batch { last_change, ..Batch::default() });
        pending.in_flight_since = batch.since;
        pending.lines_in_flight = batch.lines.len();
        Some(batch)
    }

    /// Records that a batch is on disk.
    pub(super) fn committed(&self, last_change: u64) {
        let mut pending = self.lock();
        pending.in_flight_since = None;
        pending.lines_in_flight = 0;
        drop(pending);
        // First the failure: a caller that waits for the commit then finds that the disk is well.
        self.condition.send_if_modified(|condition| condition.failure.take().is_some());
        self.committed.send_replace(last_change);
    }

    /// Reports a failure until the next commit, unless one is reported already.
    pub(super) fn report_failure(&self, reason: &str) {
        self.condition.send_if_modified(|condition| {
            let is_new = condition.failure.is_none();
            condition.failure.get_or_insert_with(|| reason.into());
            is_new
        });
    }

    /// Reports that the database was rebuilt.
    pub(super) fn report_repair(&self, repair: Repair) {
        self.condition.send_modify(|condition| {
            condition.repair = Some(Arc::new(repair));
            condition.repairs = condition.repairs.saturating_add(1);
        });
    }

    /// Returns a batch that was not written to the queue, under the changes that came since. Returns whether the journal is
    /// closing.
    pub(super) fn requeue(&self, batch: Batch, reason: &str) -> bool {
        let mut pending = self.lock();
        pending.batch.is_incomplete |= batch.is_incomplete;
        for (key, value) in batch.changes {
            // A value that was queued since is newer than the one that could not be written.
            if !pending.batch.changes.contains_key(&key) {
                pending.batch.put(key, value);
            }
        }
        // The lines that could not be written are older, so they come first.
        let newer = std::mem::replace(&mut pending.batch.lines, batch.lines);
        pending.batch.lines.extend(newer);
        pending.batch.acknowledges_damage |= batch.acknowledges_damage;
        // The oldest change tells how far the disk is behind.
        pending.batch.since = batch.since.or(pending.batch.since);
        pending.in_flight_since = None;
        pending.lines_in_flight = 0;
        let is_closing = pending.is_closing;
        drop(pending);
        self.condition.send_if_modified(|condition| {
            // A disk may fail for hours, with the same reason at every attempt. Subscribers hear of it once.
            let is_new = condition.failure.as_deref() != Some(reason);
            if is_new {
                condition.failure = Some(reason.into());
            }
            is_new
        });
        is_closing
    }

    /// Sleeps until the next attempt, or until the journal is closing.
    pub(super) fn sleep(&self, duration: Duration) {
        let pending = self.lock();
        let _ = self.changed.wait_timeout_while(pending, duration, |pending| !pending.is_closing);
    }

    fn count_change(&self, mut pending: MutexGuard<'_, Pending>) {
        pending.batch.last_change = pending.batch.last_change.saturating_add(1);
        pending.batch.since.get_or_insert_with(Instant::now);
        drop(pending);
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.lines.is_empty() && !self.acknowledges_damage && !self.is_incomplete
    }

    /// Drops what is on disk. Only the rebuild of an incomplete batch is left.
    pub(super) fn clear_committed(&mut self) {
        self.changes.clear();
        self.lines.clear();
        (self.deletions, self.ban_deletions, self.acknowledges_damage) = (0, 0, false);
    }

    fn put(&mut self, key: (Kind, Box<[u8]>), value: Option<Vec<u8>>) {
        let (is_ban, is_deletion) = (key.0 == Kind::Ban, value.is_none());
        let was_deletion = matches!(self.changes.insert(key, value), Some(None));
        let count = if is_ban { &mut self.ban_deletions } else { &mut self.deletions };
        *count = count.saturating_add(usize::from(is_deletion)).saturating_sub(usize::from(was_deletion));
        if self.deletions > MAX_DELETIONS || self.ban_deletions > MAX_BAN_DELETIONS {
            // All of them at once: the rebuild from memory covers every deletion, also those that would still have had
            // room.
            self.changes.retain(|_, value| value.is_some());
            (self.deletions, self.ban_deletions) = (0, 0);
            self.is_incomplete = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> AuditLine {
        let text = String::new;
        AuditLine { at: threshold_core::Timestamp::EPOCH, who: text(), action: text(), about: text(), why: text() }
    }

    /// Each failed write used to make room for as many lines again.
    ///
    /// Fails without `lines_in_flight` in `has_room_for_line`.
    #[test]
    fn audit_lines_are_bounded_however_often_a_write_fails() {
        let queue = Queue::default();
        for _ in 0..3 {
            while queue.audit(line()).is_ok() {}
            let batch = queue.take().unwrap();
            assert!(queue.audit(line()).is_err() && queue.begin_change().is_err(), "lines in flight count too");
            queue.requeue(batch, "no disk");
        }
        assert_eq!(queue.lock().batch.lines.len(), MAX_AUDIT_LINES);
        let batch = queue.take().unwrap();
        queue.committed(batch.last_change);
        // An open change reserves a line.
        for _ in 1..MAX_AUDIT_LINES {
            queue.audit(line()).unwrap();
        }
        queue.begin_change().unwrap();
        assert!(queue.audit(line()).is_err());
        queue.end_change(Some(line()));
        assert_eq!(queue.lock().batch.lines.len(), MAX_AUDIT_LINES);
    }

    /// Replacing a list of 300,000 bans by another one dropped the deletions of the first, so that a crash found both.
    ///
    /// Fails if deletions of bans count against [`MAX_DELETIONS`].
    #[test]
    fn all_bans_can_be_replaced_in_one_batch() {
        let queue = Queue::default();
        for number in 0..MAX_BANS {
            queue.put(Kind::Ban, &number.to_be_bytes(), None);
        }
        assert!(!queue.lock().batch.is_incomplete);
        queue.put(Kind::Ban, b"one more", None);
        assert!(queue.lock().batch.is_incomplete && queue.lock().batch.changes.is_empty());
    }

    /// Rows that came and went while the disk failed used to take memory until it recovered.
    ///
    /// Fails without the bound in `Batch::put`.
    #[test]
    fn deletions_are_bounded_and_rows_with_a_value_stay() {
        let queue = Queue::default();
        queue.put(Kind::Standing, b"in memory", Some(vec![1]));
        let come_and_go = |from: usize| {
            for number in from..from + MAX_DELETIONS * 2 / 3 {
                let key = number.to_be_bytes();
                queue.put(Kind::Standing, &key, Some(vec![1]));
                queue.put(Kind::Standing, &key, None);
                queue.put(Kind::Standing, &key, None);
            }
        };
        come_and_go(0);
        assert!(!queue.lock().batch.is_incomplete);
        let batch = queue.take().unwrap();
        come_and_go(MAX_DELETIONS);
        queue.requeue(batch, "no disk");
        come_and_go(2 * MAX_DELETIONS);
        let pending = queue.lock();
        assert!(pending.batch.is_incomplete);
        assert!(pending.batch.changes.len() <= MAX_DELETIONS + 1, "{}", pending.batch.changes.len());
        assert!(pending.batch.changes.contains_key(&(Kind::Standing, (*b"in memory").into())));
    }
}
