//! The one thread that writes: it takes all that waits, writes it in one transaction, and tries again where it cannot.

use std::io;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use super::file::JournalFile;
use super::queue::{Batch, Queue};
use super::rebuild::Fault;
use super::rows::Row;

/// The first rest after a failure; each further one is twice as long.
const FIRST_REST: Duration = Duration::from_millis(50);
/// The longest: so soon after a disk is back, everything is on it.
const LONGEST_REST: Duration = Duration::from_secs(2);
/// How often it is tried at the end of the process.
const LAST_TRIES: u32 = 3;

/// Why a file that is whole is rebuilt.
const INCOMPLETE: &str = "it missed more changes than there was room to remember";

/// Says everything that the journal should hold, where there is anybody to ask.
pub(super) type Source = Arc<OnceLock<Box<dyn Fn() -> Option<Vec<Row>> + Send + Sync>>>;

pub(super) fn start(file: JournalFile, queue: Arc<Queue>, source: Source) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("journal".to_owned()).spawn(move || write_all(file, &queue, &source))
}

fn write_all(mut file: JournalFile, queue: &Queue, source: &Source) {
    let mut rest = FIRST_REST;
    let mut last_tries = 0u32;
    while let Some(mut batch) = queue.take() {
        match write(&mut file, &mut batch, queue, source) {
            Ok(()) => {
                queue.wrote(batch.up_to);
                rest = FIRST_REST;
            }
            Err(fault) => {
                if queue.failed(batch, &fault.to_string()) {
                    last_tries = last_tries.saturating_add(1);
                    if last_tries >= LAST_TRIES {
                        return;
                    }
                    // At the end nobody interrupts a rest any more.
                    std::thread::sleep(FIRST_REST);
                    continue;
                }
                queue.rest(rest);
                rest = rest.saturating_mul(2).min(LONGEST_REST);
            }
        }
    }
}

/// Writes a batch; into a new file, where the old one is found damaged. A file that is to lose rows which there was no room
/// to remember is rebuilt from memory afterwards.
fn write(file: &mut JournalFile, batch: &mut Batch, queue: &Queue, source: &Source) -> Result<(), Fault> {
    let everything = || source.get().and_then(|everything| everything());
    let failed = |reason: &str, error| Fault::Cannot(format!("{reason}, and it cannot be written anew: {error}"));
    match file.write(batch) {
        Err(Fault::Damaged(reason)) => {
            // It is told before it is mended: that may take a while, or fail.
            queue.troubled(&reason);
            let repair = file.write_anew(&reason, everything());
            queue.repaired(repair.map_err(|error| failed(&reason, error))?);
            file.write(batch)
        }
        Ok(()) if batch.is_incomplete => {
            batch.clear_written();
            let repair = file.write_anew(INCOMPLETE, everything());
            queue.repaired(repair.map_err(|error| failed(INCOMPLETE, error))?);
            Ok(())
        }
        other => other,
    }
}
