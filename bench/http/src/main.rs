//! Threshold's server beside its peers, over HTTP and in one run: requests a second, latency, and what a decision costs
//! the server in CPU time.

mod floor;
mod load;
mod peers;
mod process;
mod report;
mod requests;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};

use peers::Started;
use process::Running;
use report::{Report, Series};

/// How many connections ask at once.
const CONNECTIONS: usize = 32;
/// How many keys they draw from.
const KEYS: u32 = 1_000_000;
/// How many connections do nothing while memory is read.
const IDLE: usize = 10_000;

fn main() -> ExitCode {
    let result = match std::env::args().nth(1).as_deref() {
        None => run(),
        // The floor runs in a process of its own, as all others do.
        Some("floor") => floor::serve(),
        Some(other) => Err(anyhow::anyhow!("there is no \"{other}\"; run it without arguments")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("http: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// How much to measure.
struct Settings {
    rounds: usize,
    /// For how long each is asked in one round.
    time: Duration,
    idle: usize,
}

impl Settings {
    fn from_env() -> Result<Self> {
        let quick = std::env::var_os("QUICK").is_some_and(|value| value != "0");
        let usual = if quick { 2 } else { 7 };
        let rounds = match std::env::var("ROUNDS") {
            Ok(text) => text.parse().ok().filter(|rounds| *rounds > 0).context("ROUNDS is a number above 0")?,
            Err(_) => usual,
        };
        let time = Duration::from_millis(if quick { 200 } else { 1_500 });
        Ok(Self { rounds, time, idle: if quick { 500 } else { IDLE } })
    }
}

fn run() -> Result<()> {
    let settings = Settings::from_env()?;
    process::allow_files(u64::try_from(settings.idle)? + 1_000);
    let Started { mut entries, absent } = peers::start()?;
    if let Ok(part) = std::env::var("ONLY") {
        entries.retain(|entry| entry.name.contains(&part) || entry.name.starts_with("axum"));
    }
    let mut report = Report::new(settings.rounds, absent);
    let runtime = tokio::runtime::Runtime::new()?;
    let mut all: Vec<Series> = entries.iter().map(Series::new).collect();
    // Everybody once in each round, in an order that rotates: a slow minute of the machine slows them all. One round goes
    // ahead to warm up.
    for round in 0..=settings.rounds {
        for place in 0..entries.len() {
            let at = (place + round) % entries.len();
            let entry = &entries[at];
            progress(&format!("round {round} of {}: {}", settings.rounds, entry.name));
            let seed = u32::try_from(round * entries.len() + place)?;
            let before = entry.process.cpu()?;
            let load = runtime.block_on(load::run(entry, CONNECTIONS, settings.time, seed))?;
            let cpu = entry.process.cpu()?.saturating_sub(before);
            if round > 0 {
                all[at].add(&load, cpu);
            }
        }
    }
    report.series = all;
    progress("idle connections");
    report.idle = Some(runtime.block_on(idle(&peers::fresh()?, settings.idle))?);
    report.publish()
}

/// How many connections were held open, and the memory of the process before and while.
async fn idle(process: &Running, connections: usize) -> Result<(usize, u64, u64)> {
    let before = process.memory()?;
    let mut open = Vec::with_capacity(connections);
    for _ in 0..connections {
        open.push(tokio::net::TcpStream::connect(process.address).await.context("an idle connection")?);
    }
    // One answer on the last of them: by then the others have been accepted.
    let last = open.pop().context("there is a last one")?;
    load::once(last, b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n").await?;
    Ok((connections, before, process.memory()?))
}

fn progress(what: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("· {what}");
    }
}
