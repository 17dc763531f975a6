//! The load: connections that are kept, each with one pipeline under way at a time.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::peers::Entry;
use crate::{CONNECTIONS, KEYS};

/// What one entry did in one round.
#[derive(Debug, Default)]
pub struct Load {
    /// How long each pipeline took.
    pub latencies: Vec<Duration>,
    pub requests: usize,
    /// How many replies were errors.
    pub errors: usize,
    pub elapsed: Duration,
}

/// What a connection needs to know of an entry.
#[derive(Clone, Copy)]
struct Call {
    address: SocketAddr,
    request: fn(&mut Vec<u8>, u64),
    pipeline: usize,
    lines: usize,
}

impl Load {
    /// Asks for so long.
    pub fn of(entry: &Entry, time: Duration, seed: u64) -> Result<Self> {
        let call = Call {
            address: entry.process.address,
            request: entry.request,
            pipeline: entry.pipeline,
            lines: entry.lines,
        };
        let (start, mut all) = (Instant::now(), Self::default());
        let end = start + time;
        let threads: Vec<_> = (0..CONNECTIONS)
            .map(|connection| std::thread::spawn(move || ask(call, end, (seed << 32 | connection) << 24)))
            .collect();
        for thread in threads {
            let one = thread.join().map_err(|_| anyhow!("a connection panicked"))?;
            let one = one.with_context(|| format!("asking {}", entry.name))?;
            all.latencies.extend(one.latencies);
            all.requests += one.requests;
            all.errors += one.errors;
        }
        all.elapsed = start.elapsed();
        Ok(all)
    }
}

fn ask(call: Call, end: Instant, seed: u64) -> Result<Load> {
    let mut stream = TcpStream::connect(call.address)?;
    stream.set_nodelay(true)?;
    // A server that stops answering ends the run.
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let (mut load, mut bytes, mut read) = (Load::default(), Vec::new(), vec![0; 64 << 10]);
    let mut number = seed;
    loop {
        bytes.clear();
        for _ in 0..call.pipeline {
            number += 1;
            (call.request)(&mut bytes, mix(number) % KEYS);
        }
        let sent = Instant::now();
        if sent >= end {
            return Ok(load);
        }
        stream.write_all(&bytes)?;
        // An error has one line, and so fewer than a reply: each counts as a whole one, below.
        let (mut lines, mut wanted) = (0, call.pipeline * call.lines);
        let mut at_start = true;
        while lines < wanted {
            let size = stream.read(&mut read)?;
            if size == 0 {
                bail!("the connection was closed");
            }
            for byte in &read[..size] {
                if at_start && *byte == b'-' {
                    load.errors += 1;
                    wanted -= call.lines - 1;
                }
                at_start = *byte == b'\n';
                lines += usize::from(at_start);
            }
        }
        load.latencies.push(sent.elapsed());
        load.requests += call.pipeline;
    }
}

/// Spreads numbers evenly (splitmix64).
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
