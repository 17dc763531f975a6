//! The one thread that writes: it takes all that waits, writes it in one transaction, and tries again where it cannot.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use super::file::JournalFile;
use super::queue::Queue;

/// The first rest after a failure; each further one is twice as long.
const FIRST_REST: Duration = Duration::from_millis(50);
/// The longest: so soon after a disk is back, everything is on it.
const LONGEST_REST: Duration = Duration::from_secs(2);
/// How often it is tried at the end of the process.
const LAST_TRIES: u32 = 3;

pub(super) fn start(file: JournalFile, queue: Arc<Queue>) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("journal".to_owned()).spawn(move || write_all(file, &queue))
}

fn write_all(mut file: JournalFile, queue: &Queue) {
    let mut rest = FIRST_REST;
    let mut last_tries = 0u32;
    while let Some(batch) = queue.take() {
        match file.write(&batch) {
            Ok(()) => {
                queue.wrote(batch.up_to);
                rest = FIRST_REST;
            }
            Err(error) => {
                if queue.failed(batch, &error.to_string()) {
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
