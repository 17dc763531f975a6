//! Redis clients: connections that are kept, each with one pipeline under way at a time.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::KEYS;
use crate::load::{Load, mix, stream};

/// How many connections ask at once, each in a thread of its own.
pub const CONNECTIONS: u64 = 16;
/// How many requests a pipeline has.
pub const PIPELINES: [usize; 2] = [1, 16];
/// So many requests at once, and so many a second: none is denied.
const FAR: &str = "1000000000";

/// How a server is asked.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Writes the request for a key.
    pub request: fn(&mut Vec<u8>, u64),
    pub pipeline: usize,
    /// How many lines a reply has.
    pub lines: usize,
}

/// Starts the connections, which ask until `end`.
pub fn start(call: Call, address: SocketAddr, end: Instant, seed: u64) -> Vec<JoinHandle<Result<Load>>> {
    let one = |number| std::thread::spawn(move || ask(call, address, end, stream(seed, number)));
    (0..CONNECTIONS).map(one).collect()
}

fn ask(call: Call, address: SocketAddr, end: Instant, mut number: u64) -> Result<Load> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    // A server that stops answering ends the run.
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let (mut load, mut bytes, mut read) = (Load::default(), Vec::new(), vec![0; 64 << 10]);
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

pub fn incr(bytes: &mut Vec<u8>, key: u64) {
    command(bytes, &["INCR", &format!("user{key}")]);
}

pub fn cl_throttle(bytes: &mut Vec<u8>, key: u64) {
    command(bytes, &["CL.THROTTLE", &format!("user{key}"), FAR, FAR, "1"]);
}

pub fn throttle(bytes: &mut Vec<u8>, key: u64) {
    command(bytes, &["THROTTLE", &format!("user{key}"), FAR, FAR, "1"]);
}

fn command(bytes: &mut Vec<u8>, words: &[&str]) {
    bytes.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
}
