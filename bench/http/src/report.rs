//! What a run found: a table, and bars of what a decision costs.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Result, anyhow};
use findings::{COLOURS, Spread, grouped, machine, number, table};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::load::Load;
use crate::peers::Entry;
use crate::{CONNECTIONS, KEYS};

/// What one entry did in all rounds.
pub struct Series {
    name: String,
    floor: &'static str,
    /// Microseconds of the server's CPU a decision, by round.
    cpu: Vec<f64>,
    /// Requests a second, by round.
    rate: Vec<f64>,
    /// Microseconds that half of the requests took at most, by round.
    p50: Vec<f64>,
    /// Microseconds that 99 of 100 took at most, by round.
    p99: Vec<f64>,
    refused: usize,
    answered: usize,
}

impl Series {
    /// Nothing done yet.
    pub fn new(entry: &Entry) -> Self {
        let (name, floor) = (entry.name.clone(), entry.floor);
        Self { name, floor, cpu: vec![], rate: vec![], p50: vec![], p99: vec![], refused: 0, answered: 0 }
    }

    /// Adds a round.
    pub fn add(&mut self, load: &Load, cpu: Duration) {
        let mut sorted = load.latencies.clone();
        sorted.sort_unstable();
        let count = sorted.len().max(1) as f64;
        let at = |part: f64| sorted.get((count * part) as usize).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6);
        self.cpu.push(cpu.as_secs_f64() * 1e6 / count);
        self.rate.push(count / load.elapsed.as_secs_f64());
        self.p50.push(at(0.5));
        self.p99.push(at(0.99));
        self.refused += load.refused;
        self.answered += sorted.len();
    }

    /// The median, over rounds, of how many times the CPU of `floor` in the same round.
    fn ratio(&self, floor: &Self) -> f64 {
        Spread::of(self.cpu.iter().zip(&floor.cpu).map(|(own, floor)| own / floor)).median
    }
}

/// Everything a run found.
pub struct Report {
    machine: String,
    rounds: usize,
    absent: Vec<String>,
    /// Everybody who was asked.
    pub series: Vec<Series>,
    /// So many idle connections, and Threshold's memory before and with them.
    pub idle: Option<(usize, u64, u64)>,
}

impl Report {
    /// Nothing found yet.
    pub fn new(rounds: usize, absent: Vec<String>) -> Self {
        Self { machine: machine(), rounds, absent, series: vec![], idle: None }
    }

    /// Prints the table, and writes it and the plot to `bench/results/`.
    pub fn publish(&self) -> Result<()> {
        let mut svg = String::new();
        self.plot(&mut svg).map_err(|error| anyhow!("cannot plot: {error}"))?;
        findings::publish("http", &self.text(), &svg)
    }

    fn text(&self) -> String {
        let keys = grouped(KEYS as usize);
        let mut out = format!("# Over HTTP\n\n{}; {} rounds.\n\n", self.machine, self.rounds);
        let _ = writeln!(
            out,
            "{CONNECTIONS} connections with one request under way each, {keys} keys drawn evenly, nothing denied: median \
             (min–max).\nThreshold decides four layers; the others have one limit, and axum none. CPU is the server's own, \
             and ×\nhow many times that of the same call to axum in the same round. 1 µs a decision is 1 CPU second a \
             million.\n"
        );
        let head = ["server", "CPU µs a decision", "×", "requests a second", "p50 µs", "p99 µs"];
        let mut cells = vec![head.map(str::to_owned).to_vec()];
        for series in &self.series {
            let floor = self.series.iter().find(|other| other.name == series.floor);
            let ratio = floor.map_or(f64::NAN, |floor| series.ratio(floor));
            let figures = [&series.rate, &series.p50, &series.p99].map(|all| cell(all));
            cells
                .push([vec![series.name.clone(), cell(&series.cpu), format!("{ratio:.2}")], figures.to_vec()].concat());
        }
        out += &table(&cells);
        if let Some((connections, before, with)) = self.idle {
            let megabytes = |bytes: u64| number(bytes as f64 / 1e6);
            let (connections, before, with) = (grouped(connections), megabytes(before), megabytes(with));
            let _ = writeln!(
                out,
                "\nThreshold's memory: {before} MB after the run, {with} MB with {connections} idle connections."
            );
        }
        for series in self.series.iter().filter(|series| series.refused > 0) {
            let (name, refused, answered) = (&series.name, grouped(series.refused), grouped(series.answered));
            let _ = writeln!(out, "\nNot as meant: {name} refused {refused} of {answered}.");
        }
        for absent in &self.absent {
            let _ = writeln!(out, "\nAbsent: {absent}.");
        }
        out
    }

    fn plot(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let height = 110 + u32::try_from(self.series.len())? * 44;
        let root = SVGBackend::with_string(svg, (960, height)).into_drawing_area();
        root.fill(&WHITE)?;
        let title = ("sans-serif", 22).into_font().color(&BLACK);
        let root = root.titled("CPU of the server, microseconds a decision (shorter is better)", title)?;
        let small = ("sans-serif", 13).into_font().color(&RGBColor(90, 90, 90));
        let line = format!("{}; median of {} rounds, the lines span min to max", self.machine, self.rounds);
        root.draw_text(&line, &small.pos(Pos::new(HPos::Center, VPos::Top)), (480, 2))?;
        let most = self.series.iter().map(|series| Spread::of(series.cpu.clone()).max).fold(1.0, f64::max);
        let scale = |figure: f64| 230 + (figure / most * 620.0) as i32;
        for (index, series) in self.series.iter().enumerate() {
            let spread = Spread::of(series.cpu.clone());
            let top = 34 + i32::try_from(index)? * 44;
            let colour = if series.name.starts_with("threshold") { COLOURS[0] } else { COLOURS[4] };
            let right = |anchor| ("sans-serif", 15).into_font().color(&BLACK).pos(Pos::new(anchor, VPos::Center));
            root.draw_text(&series.name, &right(HPos::Right), (222, top + 14))?;
            root.draw(&Rectangle::new([(230, top), (scale(spread.median), top + 28)], colour.filled()))?;
            let ends = vec![(scale(spread.min), top + 14), (scale(spread.max), top + 14)];
            root.draw(&PathElement::new(ends, BLACK.stroke_width(1)))?;
            root.draw_text(&number(spread.median), &right(HPos::Left), (scale(spread.max) + 8, top + 14))?;
        }
        root.present()?;
        Ok(())
    }
}

fn cell(figures: &[f64]) -> String {
    let Spread { median, min, max } = Spread::of(figures.iter().copied());
    format!("{} ({}–{})", number(median), number(min), number(max))
}
