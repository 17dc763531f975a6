//! The load of one entry in one round.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use crate::peers::{Call, Entry};
use crate::{grpc, resp};

/// What one entry did in one round.
#[derive(Debug, Default)]
pub struct Load {
    /// How long each call took, or each pipeline.
    pub latencies: Vec<Duration>,
    pub requests: usize,
    /// How many answers were errors, or denied.
    pub errors: usize,
    pub elapsed: Duration,
}

impl Load {
    /// Asks for so long.
    pub fn of(entry: &Entry, time: Duration, seed: u64) -> Result<Self> {
        let start = Instant::now();
        let (end, address) = (start + time, entry.process.address);
        let threads: Vec<JoinHandle<Result<Self>>> = match entry.call {
            Call::Resp(call) => resp::start(call, address, end, seed),
            Call::Grpc(call) => grpc::start(call, address, end, seed),
        };
        let mut all = Self::default();
        for thread in threads {
            let one = thread.join().map_err(|_| anyhow!("a thread panicked"))?;
            all.add(one.with_context(|| format!("asking {}", entry.name))?);
        }
        all.elapsed = start.elapsed();
        Ok(all)
    }

    /// Adds what others did at the same time.
    pub fn add(&mut self, other: Self) {
        self.latencies.extend(other.latencies);
        self.requests += other.requests;
        self.errors += other.errors;
    }
}

/// The first number of a stream of keys; no two streams of a run have a number in common.
pub fn stream(seed: u64, number: u64) -> u64 {
    (seed << 32 | number) << 24
}

/// Spreads numbers evenly (splitmix64).
pub fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
