//! What a run found, as two tables.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use findings::{Spread, grouped, machine, number, table};

use crate::load::Load;
use crate::peers::{Call, Entry};
use crate::{KEYS, grpc, resp};

/// What one entry did in all rounds.
pub struct Series {
    name: &'static str,
    is_floor: bool,
    clients: Clients,
    /// How much is under way on each connection.
    shape: String,
    /// Microseconds of the server's CPU a decision, by round.
    cpu: Vec<f64>,
    /// Decisions a second, by round.
    rate: Vec<f64>,
    /// Microseconds that 99 of 100 calls, or pipelines, took at most, by round.
    p99: Vec<f64>,
    errors: usize,
}

/// Whose table it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Clients {
    Redis,
    Grpc,
}

impl Series {
    /// Nothing done yet.
    pub fn new(entry: &Entry) -> Self {
        let (clients, shape) = match entry.call {
            Call::Resp(call) => (Clients::Redis, call.pipeline.to_string()),
            Call::Grpc(call) => (Clients::Grpc, format!("{} × {}", call.connections, call.at_once)),
        };
        let (name, is_floor) = (entry.name, entry.is_floor());
        Self { name, is_floor, clients, shape, cpu: vec![], rate: vec![], p99: vec![], errors: 0 }
    }

    /// Adds a round.
    pub fn add(&mut self, load: &Load, cpu: Duration) {
        let mut sorted = load.latencies.clone();
        sorted.sort_unstable();
        let p99 = sorted.get(sorted.len() * 99 / 100).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6);
        let requests = load.requests.max(1) as f64;
        self.cpu.push(cpu.as_secs_f64() * 1e6 / requests);
        self.rate.push(requests / load.elapsed.as_secs_f64());
        self.p99.push(p99);
        self.errors += load.errors;
    }

    /// The median, over rounds, of how many times the CPU of `floor` in the same round.
    fn ratio(&self, floor: &Self) -> f64 {
        Spread::of(self.cpu.iter().zip(&floor.cpu).map(|(own, floor)| own / floor)).median
    }
}

/// Everything a run found.
pub struct Report {
    pub rounds: usize,
    pub series: Vec<Series>,
    pub absent: Vec<String>,
}

impl Report {
    /// Prints the tables, and writes them to `bench/results/grpc-resp.md`.
    pub fn publish(&self) -> Result<()> {
        let text = self.text();
        print!("{text}");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../results");
        fs::create_dir_all(&folder).context("cannot make bench/results")?;
        fs::write(folder.join("grpc-resp.md"), text).context("cannot write bench/results/grpc-resp.md")
    }

    fn text(&self) -> String {
        let mut out = format!("# Redis and gRPC clients\n\n{}; {} rounds.\n\n", machine(), self.rounds);
        let _ = writeln!(
            out,
            "{} keys drawn evenly, nothing denied: median (min–max). CPU is the server's own, and × how many times that of the\n\
             first server in the same round and form.\n\n## Redis clients\n\n{} connections with one pipeline under way each.\n",
            grouped(KEYS as usize),
            resp::CONNECTIONS
        );
        out += &self.table(Clients::Redis, "pipeline", "p99 µs of a pipeline");
        let _ = writeln!(
            out,
            "\n## gRPC clients\n\nConnections, of {} threads, and calls under way on each; four descriptors a call, but for throttlecrab's one key.\n",
            grpc::THREADS
        );
        out += &self.table(Clients::Grpc, "connections × calls", "p99 µs");
        for series in self.series.iter().filter(|series| series.errors > 0) {
            let Series { name, shape, errors, .. } = series;
            let _ = writeln!(out, "\nNot as meant: {name} ({shape}) answered {} errors or denials.", grouped(*errors));
        }
        for absent in &self.absent {
            let _ = writeln!(out, "\nAbsent: {absent}.");
        }
        out
    }

    fn table(&self, clients: Clients, shape: &str, p99: &str) -> String {
        let head = ["server", shape, "CPU µs a decision", "×", "decisions a second", p99];
        let mut cells = vec![head.map(str::to_owned).to_vec()];
        for series in self.series.iter().filter(|series| series.clients == clients) {
            let is_floor = |other: &&Series| other.is_floor && other.clients == clients && other.shape == series.shape;
            let ratio = self.series.iter().find(is_floor).map_or(f64::NAN, |floor| series.ratio(floor));
            cells.push(vec![
                series.name.to_owned(),
                series.shape.clone(),
                cell(&series.cpu),
                format!("{ratio:.2}"),
                cell(&series.rate),
                cell(&series.p99),
            ]);
        }
        table(&cells)
    }
}

fn cell(figures: &[f64]) -> String {
    let Spread { median, min, max } = Spread::of(figures.iter().copied());
    format!("{} ({}–{})", number(median), number(min), number(max))
}
