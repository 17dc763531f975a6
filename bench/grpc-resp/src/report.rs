//! What a run found, as a table.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use findings::{Spread, grouped, machine, number, table};

use crate::load::Load;
use crate::peers::{Entry, FLOOR};
use crate::{CONNECTIONS, KEYS};

/// What one entry did in all rounds.
pub struct Series {
    name: &'static str,
    pipeline: usize,
    /// Microseconds of the server's CPU a decision, by round.
    cpu: Vec<f64>,
    /// Decisions a second, by round.
    rate: Vec<f64>,
    /// Microseconds that 99 of 100 pipelines took at most, by round.
    p99: Vec<f64>,
    errors: usize,
}

impl Series {
    /// Nothing done yet.
    pub fn new(entry: &Entry) -> Self {
        let (name, pipeline) = (entry.name, entry.pipeline);
        Self { name, pipeline, cpu: vec![], rate: vec![], p99: vec![], errors: 0 }
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
    /// Prints the table, and writes it to `bench/results/grpc-resp.md`.
    pub fn publish(&self) -> Result<()> {
        let text = self.text();
        print!("{text}");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../results");
        fs::create_dir_all(&folder).context("cannot make bench/results")?;
        fs::write(folder.join("grpc-resp.md"), text).context("cannot write bench/results/grpc-resp.md")
    }

    fn text(&self) -> String {
        let mut out = format!("# Redis clients\n\n{}; {} rounds.\n\n", machine(), self.rounds);
        let _ = writeln!(
            out,
            "{CONNECTIONS} connections with one pipeline under way each, {} keys drawn evenly, nothing denied: median (min–max).\n\
             CPU is the server's own, and × how many times that of Redis's INCR in the same round and pipeline.\n",
            grouped(KEYS as usize)
        );
        let head = ["server", "pipeline", "CPU µs a decision", "×", "decisions a second", "p99 µs of a pipeline"];
        let mut cells = vec![head.map(str::to_owned).to_vec()];
        for series in &self.series {
            let is_floor = |other: &&Series| other.name == FLOOR && other.pipeline == series.pipeline;
            let ratio = self.series.iter().find(is_floor).map_or(f64::NAN, |floor| series.ratio(floor));
            cells.push(vec![
                series.name.to_owned(),
                series.pipeline.to_string(),
                cell(&series.cpu),
                format!("{ratio:.2}"),
                cell(&series.rate),
                cell(&series.p99),
            ]);
        }
        out += &table(&cells);
        for series in self.series.iter().filter(|series| series.errors > 0) {
            let _ = writeln!(out, "\nNot as meant: {} answered {} errors.", series.name, grouped(series.errors));
        }
        for absent in &self.absent {
            let _ = writeln!(out, "\nAbsent: {absent}.");
        }
        out
    }
}

fn cell(figures: &[f64]) -> String {
    let Spread { median, min, max } = Spread::of(figures.iter().copied());
    format!("{} ({}–{})", number(median), number(min), number(max))
}
