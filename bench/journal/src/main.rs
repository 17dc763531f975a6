//! What the journal costs: how long a decision takes while strikes are written to a disk that takes a second for each write,
//! how long an import of bans takes, and what a subject, an account and a ban take in the file.

mod disk;
mod import;
mod latency;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use threshold_core::{Policy, Secret};
use threshold_limiter::journal::{Journal, restore};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{BanList, Limiter, SystemClock};

use std::sync::Arc;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    // A process of its own for each figure: what is preloaded is there from the start, or not at all.
    if let (Some(disk), Some(folder)) = (args.next(), args.next()) {
        return latency::measure(&disk, Path::new(&folder));
    }
    let folder = std::env::temp_dir().join(format!("threshold-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let done = disk::report(&folder).and_then(|()| import::report(&folder)).and_then(|()| latency::report(&folder));
    std::fs::remove_dir_all(&folder)?;
    done
}

/// A limiter with its journal, as a server has it.
struct World {
    limiter: Limiter,
    journal: Arc<Journal>,
}

impl World {
    fn open(policy: &str, path: &Path) -> Result<Self> {
        let secret = Secret::new(&[7; 32]).context("32 bytes are a secret")?;
        let key = secret.digest_key();
        let policy = Policy::parse(policy, &|_| None)?.with_key(key);
        let (journal, kept) = Journal::open(path, secret.key_id())?;
        let journal = Arc::new(journal);
        let (store, bans, clock) = (MemoryStore::new(policy.memory()), BanList::default(), SystemClock::new());
        restore(&journal, &kept, (&store, &bans), (&policy, &secret.clone().into()), threshold_limiter::Clock::now(&clock));
        let store = store.with_change_sink(Arc::<Journal>::clone(&journal));
        let bans = Arc::new(bans.with_change_sink(Arc::<Journal>::clone(&journal)));
        Ok(Self { limiter: Limiter::builder(policy).store(store).clock(clock).digest_key(key).secrets(secret).bans(bans).build()?, journal })
    }
}

/// A name in a folder.
fn file(folder: &Path, name: &str) -> PathBuf {
    folder.join(name)
}
