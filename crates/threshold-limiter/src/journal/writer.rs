//! The writer thread: takes everything that is queued, commits it as one transaction, and retries after failures.

use std::io;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::file::JournalFile;
use super::queue::{Batch, Queue};
use super::rebuild::WriteFault;
use super::rows::Row;

/// The delay before the first retry; each further delay is twice as long.
const FIRST_DELAY: Duration = Duration::from_millis(50);
/// The longest delay: the journal is up to date this long after a disk recovers.
const MAX_DELAY: Duration = Duration::from_secs(2);
/// The number of attempts once the journal is closing.
const CLOSING_ATTEMPTS: u32 = 3;

/// The reason for a rebuild after deletions were dropped from the queue.
const INCOMPLETE: &str = "it missed more changes than there was room to remember";

/// The callback that lists every row the journal should hold.
pub(super) type RebuildSource = Arc<OnceLock<Box<dyn Fn() -> Option<Vec<Row>> + Send + Sync>>>;

pub(super) fn start(file: JournalFile, queue: Arc<Queue>, source: RebuildSource) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("journal".to_owned()).spawn(move || run(file, &queue, &source))
}

fn run(mut file: JournalFile, queue: &Queue, source: &RebuildSource) {
    let mut delay = FIRST_DELAY;
    let mut closing_attempts = 0u32;
    while let Some(mut batch) = queue.take() {
        match write(&mut file, &mut batch, queue, source) {
            Ok(()) => {
                queue.committed(batch.last_change);
                delay = FIRST_DELAY;
            }
            Err(fault) => {
                if queue.requeue(batch, &fault.to_string()) {
                    closing_attempts = closing_attempts.saturating_add(1);
                    // A disk that does not recover must not keep the process from ending.
                    if closing_attempts >= CLOSING_ATTEMPTS {
                        return;
                    }
                    // `queue.sleep` returns at once while the journal is closing.
                    std::thread::sleep(FIRST_DELAY);
                    continue;
                }
                queue.sleep(delay);
                delay = delay.saturating_mul(2).min(MAX_DELAY);
            }
        }
    }
}

/// Commits a batch. A damaged database is rebuilt first; one that missed deletions is rebuilt afterwards.
fn write(file: &mut JournalFile, batch: &mut Batch, queue: &Queue, source: &RebuildSource) -> Result<(), WriteFault> {
    let memory = || source.get().and_then(|rows| rows());
    let (begun, is_empty) = (Instant::now(), batch.is_empty());
    let written = file.write(batch);
    if written.is_ok() && !is_empty {
        queue.commit_times.observe(begun.elapsed());
    }
    match written {
        Err(WriteFault::Damaged(reason)) => {
            // Reported before the rebuild, which may take long or fail.
            queue.report_failure(&reason);
            rebuild(file, queue, &reason, memory())?;
            // Memory has the rows of this batch, or newer ones that are queued behind it. The audit lines are only
            // here.
            file.write(batch)
        }
        Ok(()) if batch.is_incomplete => {
            batch.clear_committed();
            rebuild(file, queue, INCOMPLETE, memory())
        }
        other => other,
    }
}

fn rebuild(file: &mut JournalFile, queue: &Queue, reason: &str, memory: Option<Vec<Row>>) -> Result<(), WriteFault> {
    let repair = file.rebuild(reason, memory).map_err(|error| {
        WriteFault::Unavailable(format!("{reason}, and the rebuild failed: {}", error.with_causes()))
    })?;
    queue.report_repair(repair);
    Ok(())
}
