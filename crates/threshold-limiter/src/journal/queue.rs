//! What waits to be written: the latest value under each key, and how far the disk has come.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::Unsaved;
use super::rebuild::Repair;
use super::rows::{AuditLine, Kind};

/// The most lines of the audit that wait for a disk. Operators are people: so many are never meant.
const MAX_LINES: usize = 10_000;
/// The most rows that are to be removed and wait for a disk, some 30 MB. What has a value is bounded by the tables in memory;
/// what was removed from those is not, while a disk fails for hours.
const MAX_REMOVED: usize = 250_000;
/// How often the file is looked at while nothing is written.
const LOOK: Duration = Duration::from_secs(1);
/// A wait as short as this is not worth while when the disk is in trouble already.
const SHORT: Duration = Duration::from_millis(100);

/// The latest value under each key. Those with a value are in the tables in memory too, which are bounded; of those without,
/// there are at most [`MAX_REMOVED`].
pub(super) type Changes = HashMap<(Kind, Box<[u8]>), Option<Vec<u8>>>;

/// What is written in one transaction.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) changes: Changes,
    pub(super) lines: Vec<AuditLine>,
    /// How many of the changes remove a row.
    removed: usize,
    /// Whether changes that remove rows were left out, for want of room: the file is then to be rebuilt from memory.
    pub(super) is_incomplete: bool,
    /// Whether the damage that the file records was reported.
    pub(super) damage_told: bool,
    /// The number of the last change in it.
    pub(super) up_to: u64,
    /// When the first of them was made.
    since: Option<Instant>,
}

#[derive(Debug, Default)]
struct Waiting {
    batch: Batch,
    /// Since when what is being written now has waited.
    under_way: Option<Instant>,
    /// Lines of the audit that are being written now; they wait again if that fails.
    lines_under_way: usize,
    /// Audited changes that have begun and not ended. Nothing is taken meanwhile, so that a change and its line are written in
    /// one transaction.
    open_changes: usize,
    stopping: bool,
}

impl Waiting {
    /// Whether one more line of the audit finds room, beside those that open changes will add.
    fn has_room_for_line(&self) -> bool {
        let lines = self.batch.lines.len().saturating_add(self.lines_under_way).saturating_add(self.open_changes);
        lines < MAX_LINES
    }
}

/// What waits, and how far the disk has come.
#[derive(Debug)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    more: Condvar,
    /// Every change up to this one is on disk.
    written: watch::Sender<u64>,
    trouble: watch::Sender<Option<Arc<str>>>,
    repair: watch::Sender<Option<Arc<Repair>>>,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            waiting: Mutex::default(),
            more: Condvar::new(),
            written: watch::Sender::new(0),
            trouble: watch::Sender::new(None),
            repair: watch::Sender::new(None),
        }
    }
}

impl Queue {
    pub(super) fn note(&self, kind: Kind, key: &[u8], value: Option<Vec<u8>>) {
        let mut waiting = self.lock();
        waiting.batch.note((kind, key.into()), value);
        self.count(waiting);
    }

    pub(super) fn audit(&self, line: AuditLine) -> Result<(), Unsaved> {
        let mut waiting = self.lock();
        if !waiting.has_room_for_line() {
            return Err(Unsaved);
        }
        waiting.batch.lines.push(line);
        self.count(waiting);
        Ok(())
    }

    /// Begins a change with a line of the audit. Nothing is taken until it ends.
    pub(super) fn begin_change(&self) -> Result<(), Unsaved> {
        let mut waiting = self.lock();
        if !waiting.has_room_for_line() {
            return Err(Unsaved);
        }
        waiting.open_changes = waiting.open_changes.saturating_add(1);
        Ok(())
    }

    /// Ends a change, with its line if it was made.
    pub(super) fn end_change(&self, line: Option<AuditLine>) {
        let mut waiting = self.lock();
        waiting.open_changes = waiting.open_changes.saturating_sub(1);
        match line {
            Some(line) => {
                waiting.batch.lines.push(line);
                self.count(waiting);
            }
            None => {
                drop(waiting);
                self.more.notify_one();
            }
        }
    }

    pub(super) fn damage_told(&self) {
        let mut waiting = self.lock();
        waiting.batch.damage_told = true;
        self.count(waiting);
    }

    pub(super) async fn saved(&self, at_most: Duration) -> Result<(), Unsaved> {
        let last = self.lock().batch.up_to;
        let mut written = self.written.subscribe();
        if *written.borrow() >= last {
            return Ok(());
        }
        if at_most <= SHORT && self.trouble.borrow().is_some() {
            return Err(Unsaved);
        }
        let reached = tokio::time::timeout(at_most, written.wait_for(|written| *written >= last)).await;
        if matches!(reached, Ok(Ok(_))) { Ok(()) } else { Err(Unsaved) }
    }

    pub(super) fn troubles(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.trouble.subscribe()
    }

    pub(super) fn repairs(&self) -> watch::Receiver<Option<Arc<Repair>>> {
        self.repair.subscribe()
    }

    /// For how long the oldest change has waited that is not on disk.
    pub(super) fn behind(&self) -> Option<Duration> {
        let waiting = self.lock();
        waiting.under_way.or(waiting.batch.since).map(|since| since.elapsed())
    }

    /// Ends the writer once nothing is left.
    pub(super) fn stop(&self) {
        self.lock().stopping = true;
        self.more.notify_all();
    }

    pub(super) fn is_clean(&self) -> bool {
        *self.written.borrow() >= self.lock().batch.up_to
    }

    /// Everything that waits, as soon as anything does; nothing, where nothing has come for a while; `None` at the end.
    pub(super) fn take(&self) -> Option<Batch> {
        let idle = |waiting: &mut Waiting| waiting.batch.is_empty() && !waiting.stopping;
        let waited = self.more.wait_timeout_while(self.lock(), LOOK, idle);
        let (waiting, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_open = |waiting: &mut Waiting| waiting.open_changes > 0;
        let mut waiting = self.more.wait_while(waiting, is_open).unwrap_or_else(PoisonError::into_inner);
        if waiting.batch.is_empty() && waiting.stopping {
            return None;
        }
        let up_to = waiting.batch.up_to;
        let batch = std::mem::replace(&mut waiting.batch, Batch { up_to, ..Batch::default() });
        waiting.under_way = batch.since;
        waiting.lines_under_way = batch.lines.len();
        Some(batch)
    }

    /// A batch is on disk.
    pub(super) fn wrote(&self, up_to: u64) {
        let mut waiting = self.lock();
        waiting.under_way = None;
        waiting.lines_under_way = 0;
        drop(waiting);
        // First this: whoever waits for the disk then finds that it is well.
        self.trouble.send_if_modified(|trouble| trouble.take().is_some());
        self.written.send_replace(up_to);
    }

    /// Something is wrong, until the next batch is on disk, unless something is already.
    pub(super) fn troubled(&self, reason: &str) {
        if self.trouble.borrow().is_none() {
            self.trouble.send_replace(Some(reason.into()));
        }
    }

    /// The file was damaged, and is whole again.
    pub(super) fn repaired(&self, repair: Repair) {
        self.repair.send_replace(Some(Arc::new(repair)));
    }

    /// A batch could not be written: it waits again, under whatever has come since. Says whether the end is near.
    pub(super) fn failed(&self, batch: Batch, reason: &str) -> bool {
        let mut waiting = self.lock();
        waiting.batch.is_incomplete |= batch.is_incomplete;
        for (key, value) in batch.changes {
            if !waiting.batch.changes.contains_key(&key) {
                waiting.batch.note(key, value);
            }
        }
        let newer = std::mem::replace(&mut waiting.batch.lines, batch.lines);
        waiting.batch.lines.extend(newer);
        waiting.batch.damage_told |= batch.damage_told;
        waiting.batch.since = batch.since.or(waiting.batch.since);
        waiting.under_way = None;
        waiting.lines_under_way = 0;
        let stopping = waiting.stopping;
        drop(waiting);
        self.trouble.send_if_modified(|trouble| {
            let is_other = trouble.as_deref() != Some(reason);
            if is_other {
                *trouble = Some(reason.into());
            }
            is_other
        });
        stopping
    }

    /// Sleeps before the next try, unless it is about to end.
    pub(super) fn rest(&self, length: Duration) {
        let waiting = self.lock();
        let _ = self.more.wait_timeout_while(waiting, length, |waiting| !waiting.stopping);
    }

    fn count(&self, mut waiting: MutexGuard<'_, Waiting>) {
        waiting.batch.up_to = waiting.batch.up_to.saturating_add(1);
        waiting.batch.since.get_or_insert_with(Instant::now);
        drop(waiting);
        self.more.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.lines.is_empty() && !self.damage_told && !self.is_incomplete
    }

    /// Its changes and lines are on disk, and only a rebuild is left to do.
    pub(super) fn clear_written(&mut self) {
        self.changes.clear();
        self.lines.clear();
        (self.removed, self.damage_told) = (0, false);
    }

    fn note(&mut self, key: (Kind, Box<[u8]>), value: Option<Vec<u8>>) {
        let removes = value.is_none();
        let removed_before = matches!(self.changes.insert(key, value), Some(None));
        self.removed = self.removed.saturating_add(usize::from(removes)).saturating_sub(usize::from(removed_before));
        if self.removed > MAX_REMOVED {
            self.changes.retain(|_, value| value.is_some());
            self.removed = 0;
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

    /// Each failed write once let in as many lines again.
    ///
    /// Fails without `lines_under_way` in `has_room_for_line`.
    #[test]
    fn lines_that_wait_are_bounded_however_often_a_write_fails() {
        let queue = Queue::default();
        for _ in 0..3 {
            while queue.audit(line()).is_ok() {}
            let batch = queue.take().unwrap();
            assert!(queue.audit(line()).is_err() && queue.begin_change().is_err(), "those under way count too");
            queue.failed(batch, "no disk");
        }
        assert_eq!(queue.lock().batch.lines.len(), MAX_LINES);
        let batch = queue.take().unwrap();
        queue.wrote(batch.up_to);
        // A change that is open has its place.
        for _ in 1..MAX_LINES {
            queue.audit(line()).unwrap();
        }
        queue.begin_change().unwrap();
        assert!(queue.audit(line()).is_err());
        queue.end_change(Some(line()));
        assert_eq!(queue.lock().batch.lines.len(), MAX_LINES);
    }

    /// What comes and goes while a disk fails once took memory for as long as it failed.
    ///
    /// Fails without the bound in `Batch::note`.
    #[test]
    fn rows_to_remove_are_bounded_and_those_with_a_value_stay() {
        let queue = Queue::default();
        queue.note(Kind::Standing, b"in memory", Some(vec![1]));
        let come_and_go = |from: usize| {
            for number in from..from + MAX_REMOVED * 2 / 3 {
                let key = number.to_be_bytes();
                queue.note(Kind::Standing, &key, Some(vec![1]));
                queue.note(Kind::Standing, &key, None);
                queue.note(Kind::Standing, &key, None);
            }
        };
        come_and_go(0);
        assert!(!queue.lock().batch.is_incomplete);
        let batch = queue.take().unwrap();
        come_and_go(MAX_REMOVED);
        queue.failed(batch, "no disk");
        come_and_go(2 * MAX_REMOVED);
        let waiting = queue.lock();
        assert!(waiting.batch.is_incomplete);
        assert!(waiting.batch.changes.len() <= MAX_REMOVED + 1, "{}", waiting.batch.changes.len());
        assert!(waiting.batch.changes.contains_key(&(Kind::Standing, (*b"in memory").into())));
    }
}
