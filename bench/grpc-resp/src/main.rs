//! What a decision costs the server in CPU time. Redis clients: Threshold's `CL.THROTTLE` beside redis-cell, throttlecrab, and
//! Redis counting with `INCR` as the floor. gRPC clients: Envoy's `ShouldRateLimit` with four descriptors beside limitador and
//! throttlecrab, and bare tonic as the floor.

mod floor;
mod grpc;
mod load;
mod messages;
mod peers;
#[expect(dead_code, reason = "the benchmark over HTTP measures memory too")]
#[path = "../../http/src/process.rs"]
mod process;
mod report;
mod resp;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};

use load::Load;
use report::{Report, Series};

/// How many keys are drawn from.
const KEYS: u64 = 1_000_000;

fn main() -> ExitCode {
    let result = match std::env::args().nth(1).as_deref() {
        Some("floor") => floor::serve(),
        _ => run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("grpc-resp: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let quick = std::env::var_os("QUICK").is_some_and(|value| value != "0");
    let rounds = match std::env::var("ROUNDS") {
        Ok(text) => text.parse().ok().filter(|rounds| *rounds > 0).context("ROUNDS is a number above 0")?,
        Err(_) if quick => 2,
        Err(_) => 7,
    };
    let time = Duration::from_millis(if quick { 300 } else { 1_500 });
    let mut started = peers::start()?;
    if let Ok(part) = std::env::var("ONLY") {
        started.entries.retain(|entry| entry.name.contains(&part) || entry.is_floor());
    }
    let mut all: Vec<Series> = started.entries.iter().map(Series::new).collect();
    // Everybody once in each round, in an order that rotates: a slow minute of the machine slows them all. One round goes
    // ahead to warm up.
    for round in 0..=rounds {
        for place in 0..started.entries.len() {
            let at = (place + round) % started.entries.len();
            let entry = &started.entries[at];
            let before = entry.process.cpu()?;
            let load = Load::of(entry, time, round as u64)?;
            let cpu = entry.process.cpu()? - before;
            if round > 0 {
                all[at].add(&load, cpu);
            }
        }
    }
    Report { rounds, series: all, absent: started.absent }.publish()
}
