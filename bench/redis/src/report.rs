//! What a run found: a table for each scenario, how it compares with what was aimed at, and bars of what a decision costs Redis.

use std::fmt::Write as _;

use anyhow::{Result, anyhow};
use findings::{COLOURS, Spread, grouped, machine, number, table};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::Scenario;
use crate::load::Round;

/// The contenders that others are compared with, and those that are compared.
pub const SCRIPT: &str = "one-limit script";
pub const LIMITADOR_ONE: &str = "limitador, one limit";
pub const LIMITADOR_FOUR: &str = "limitador, four limits";
pub const ONE: &str = "threshold, one limit";
pub const FOUR: &str = "threshold, four layers";
pub const STRIKES: &str = "threshold, grove, with strikes";

/// What one contender did in all rounds of a scenario. Times are microseconds for each decision.
pub struct Series {
    name: &'static str,
    rate: Vec<f64>,
    redis_cpu: Vec<f64>,
    node_cpu: Vec<f64>,
    reads: Vec<f64>,
    scripts: Vec<f64>,
    p99: Vec<f64>,
    allowed: usize,
    degraded: usize,
    decisions: usize,
}

impl Series {
    /// Returns a series without a round.
    pub fn new(name: &'static str) -> Self {
        let none = Vec::new;
        let (rate, redis_cpu, node_cpu, reads, scripts, p99) = (none(), none(), none(), none(), none(), none());
        Self { name, rate, redis_cpu, node_cpu, reads, scripts, p99, allowed: 0, degraded: 0, decisions: 0 }
    }

    /// Adds a round.
    pub fn add(&mut self, round: &Round) {
        let decisions = round.decisions.max(1) as f64;
        self.rate.push(decisions / round.elapsed.as_secs_f64());
        self.redis_cpu.push(round.redis_cpu.as_secs_f64() * 1e6 / decisions);
        self.node_cpu.push(round.node_cpu.as_secs_f64() * 1e6 / decisions);
        self.reads.push(round.reads as f64 / decisions);
        self.scripts.push(round.scripts as f64 / decisions);
        self.p99.push(round.p99.as_secs_f64() * 1e6);
        self.allowed += round.allowed;
        self.degraded += round.degraded;
        self.decisions += round.decisions;
    }
}

/// What all contenders did in one scenario.
pub struct Table {
    pub scenario: Scenario,
    pub series: Vec<Series>,
}

impl Table {
    fn find(&self, name: &str) -> Option<&Series> {
        self.series.iter().find(|series| series.name == name)
    }

    /// Returns the median, over rounds, of a figure's ratio to that of another contender in the same round.
    fn ratio(&self, name: &str, other: &str, figure: impl Fn(&Series) -> &Vec<f64>) -> Option<f64> {
        let (own, other) = (figure(self.find(name)?), figure(self.find(other)?));
        Some(Spread::of(own.iter().zip(other).map(|(own, other)| own / other)).median)
    }

    fn text(&self) -> String {
        let head = [
            "limiter",
            "decisions a second",
            "Redis CPU µs",
            "× script",
            "node CPU µs",
            "reads",
            "script calls",
            "p99 µs",
            "allowed",
        ];
        let mut cells = vec![head.map(str::to_owned).to_vec()];
        for series in &self.series {
            let ratio = self.ratio(series.name, SCRIPT, |series| &series.redis_cpu).unwrap_or(f64::NAN);
            let median = |figures: &[f64]| Spread::of(figures.iter().copied()).median;
            let share = 100.0 * series.allowed as f64 / series.decisions.max(1) as f64;
            cells.push(vec![
                series.name.to_owned(),
                grouped(median(&series.rate).round() as usize),
                cell(&series.redis_cpu),
                format!("{ratio:.2}"),
                cell(&series.node_cpu),
                format!("{:.2}", median(&series.reads)),
                format!("{:.2}", median(&series.scripts)),
                number(median(&series.p99)),
                format!("{share:.0} %"),
            ]);
        }
        let mut out = format!("## {}\n\n{}", capital(&self.scenario.title()), table(&cells));
        for (own, other) in [(ONE, LIMITADOR_ONE), (FOUR, LIMITADOR_FOUR)] {
            if let Some(ratio) = self.ratio(own, other, |series| &series.rate) {
                let _ = writeln!(out, "\n{own}: {ratio:.1} times the decisions a second of {other}.");
            }
        }
        for series in self.series.iter().filter(|series| series.degraded > 0) {
            let (degraded, decisions) = (grouped(series.degraded), grouped(series.decisions));
            let _ = writeln!(
                out,
                "\nNot as meant: {} made {degraded} of {decisions} decisions without the store.",
                series.name
            );
        }
        out
    }
}

/// Everything that a run found.
pub struct Report {
    machine: String,
    rounds: usize,
    /// Contenders that could not be opened, and why.
    pub absent: Vec<String>,
    /// One for each scenario.
    pub tables: Vec<Table>,
    /// Bytes of a balance on a server, by algorithm.
    pub memory: Option<Vec<(&'static str, f64)>>,
}

impl Report {
    /// Returns a report without a table.
    pub fn new(rounds: usize) -> Self {
        Self { machine: machine(), rounds, absent: vec![], tables: vec![], memory: None }
    }

    /// Prints the tables, and writes them and the plot to `bench/results/`.
    pub fn publish(&self) -> Result<()> {
        let mut svg = String::new();
        self.plot(&mut svg).map_err(|error| anyhow!("cannot plot: {error}"))?;
        findings::publish("redis", &self.text(), &svg)
    }

    fn text(&self) -> String {
        let mut out = format!("# On Redis\n\n{}; {} rounds.\n\n", self.machine, self.rounds);
        out += "CPU is that of one decision, median (min–max); the node's includes the benchmark itself. × is the median of the rounds'\n\
                ratios to the script for one limit. Reads are those of the servers from their sockets: with one decision in\n\
                flight, the round trips of a decision.\n";
        for table in &self.tables {
            let _ = write!(out, "\n{}", table.text());
        }
        for (algorithm, bytes) in self.memory.iter().flatten() {
            let _ = writeln!(
                out,
                "\nA balance of {algorithm} takes {bytes:.0} bytes on the server, with its key and its time to live."
            );
        }
        for absent in &self.absent {
            let _ = writeln!(out, "\nAbsent: {absent}.");
        }
        out
    }

    /// Draws the first scenario.
    fn plot(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let Some(Table { scenario, series: all }) = self.tables.first() else { return Ok(()) };
        let height = 110 + u32::try_from(all.len())? * 44;
        let root = SVGBackend::with_string(svg, (960, height)).into_drawing_area();
        root.fill(&WHITE)?;
        let title = ("sans-serif", 22).into_font().color(&BLACK);
        let root = root.titled("CPU of Redis, microseconds a decision (shorter is better)", title)?;
        let small = ("sans-serif", 13).into_font().color(&RGBColor(90, 90, 90));
        let line = format!("{}; {}; median of {} rounds", scenario.title(), self.machine, self.rounds);
        root.draw_text(&line, &small.pos(Pos::new(HPos::Center, VPos::Top)), (480, 2))?;
        let most = all.iter().map(|series| Spread::of(series.redis_cpu.clone()).max).fold(1.0, f64::max);
        let scale = |figure: f64| 250 + (figure / most * 600.0) as i32;
        for (index, series) in all.iter().enumerate() {
            let spread = Spread::of(series.redis_cpu.clone());
            let top = 34 + i32::try_from(index)? * 44;
            let colour = if series.name.starts_with("threshold") { COLOURS[0] } else { COLOURS[4] };
            let style = |anchor| ("sans-serif", 15).into_font().color(&BLACK).pos(Pos::new(anchor, VPos::Center));
            root.draw_text(series.name, &style(HPos::Right), (242, top + 14))?;
            root.draw(&Rectangle::new([(250, top), (scale(spread.median), top + 28)], colour.filled()))?;
            let ends = vec![(scale(spread.min), top + 14), (scale(spread.max), top + 14)];
            root.draw(&PathElement::new(ends, BLACK.stroke_width(1)))?;
            root.draw_text(&number(spread.median), &style(HPos::Left), (scale(spread.max) + 8, top + 14))?;
        }
        root.present()?;
        Ok(())
    }
}

fn cell(figures: &[f64]) -> String {
    let Spread { median, min, max } = Spread::of(figures.iter().copied());
    format!("{} ({}–{})", number(median), number(min), number(max))
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| format!("{}{}", first.to_uppercase(), letters.as_str()))
}
