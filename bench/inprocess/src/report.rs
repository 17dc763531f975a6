//! What a run found, as a table to read and a plot to look at.

use std::fmt::Write as _;

use anyhow::{Result, anyhow};
use findings::{COLOURS, Spread, grouped, machine, number, table};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::contenders::Answer;
use crate::rounds::Series;

/// Who the others are measured against.
const BASE: &str = "governor";
/// One scenario and what everybody did in it.
pub struct Row {
    /// Which keys, in which order.
    pub scenario: String,
    /// What the answers are.
    pub answer: Answer,
    /// How many decide at once.
    pub threads: usize,
    /// Everybody.
    pub series: Vec<Series>,
}

/// A single figure.
pub struct Figure {
    /// Of what.
    pub name: String,
    /// How much.
    pub value: String,
}

/// What one contender asks of the heap.
struct HeapUse {
    name: &'static str,
    bytes_per_key: [f64; 2],
    allowed: f64,
    denied: f64,
}

/// Everything a run found.
pub struct Report {
    machine: String,
    rounds: usize,
    many: usize,
    heap: Vec<HeapUse>,
    /// One limit by key.
    pub rows: Vec<Row>,
    /// Four layers beside one limit.
    pub layers: Vec<Row>,
    /// The rest.
    pub figures: Vec<Figure>,
}

impl Report {
    /// Nothing found yet.
    pub fn new(rounds: usize, many: usize) -> Self {
        Self { machine: machine(), rounds, many, heap: vec![], rows: vec![], layers: vec![], figures: vec![] }
    }

    /// Notes what a contender took of the heap while it was filled, for all keys and for a tenth less, and for each
    /// decision since.
    pub fn heap(&mut self, name: &'static str, answer: Answer, bytes_per_key: [f64; 2], each: f64) {
        match answer {
            // Memory is told once, after one decision a key.
            Answer::Allowed => self.heap.push(HeapUse { name, bytes_per_key, allowed: each, denied: f64::NAN }),
            Answer::Denied => {
                for own in self.heap.iter_mut().filter(|own| own.name == name) {
                    own.denied = each;
                }
            }
        }
    }

    /// Prints the table, and writes it and the plot to `bench/results/`.
    pub fn publish(&self) -> Result<()> {
        let mut svg = String::new();
        self.plot(&mut svg).map_err(|error| anyhow!("cannot plot: {error}"))?;
        findings::publish("inprocess", &self.text(), &svg)
    }

    fn text(&self) -> String {
        let mut out = format!("# In one process\n\n{}; {} rounds.\n\n", self.machine, self.rounds);
        out += "Nanoseconds that a thread takes for one decision: median (min–max), and how many times governor's.\n\n";
        out += &table(&self.single_cells());
        out += "\nA whole decision from facts, beside one limit at as many keys:\n\n";
        out += &table(&self.layer_cells());
        out += "\nThe heap: live bytes a key after one decision each, and allocations a decision since:\n\n";
        out += &table(&self.heap_cells());
        out += "\n";
        let figures = self.figures.iter().map(|figure| vec![figure.name.clone(), figure.value.clone()]);
        out += &table(&[vec![vec!["figure".to_owned(), String::new()]], figures.collect()].concat());
        let surprises = self.surprises();
        if !surprises.is_empty() {
            let _ = write!(out, "\nAnswers that were not as the scenario means them:\n\n{surprises}");
        }
        out
    }

    fn single_cells(&self) -> Vec<Vec<String>> {
        let mut head = vec!["scenario".to_owned(), "answer".to_owned(), "threads".to_owned()];
        head.extend(self.rows.first().into_iter().flat_map(|row| row.series.iter().map(|series| series.name.clone())));
        let mut cells = vec![head];
        for row in &self.rows {
            let mut line = vec![row.scenario.clone(), word(row.answer).to_owned(), row.threads.to_string()];
            let base = row.series.iter().find(|series| series.name == BASE);
            line.extend(row.series.iter().map(|series| cell(series, base)));
            cells.push(line);
        }
        cells
    }

    fn layer_cells(&self) -> Vec<Vec<String>> {
        let mut cells = vec![["decision", "answer", "threads", "ns"].map(str::to_owned).to_vec()];
        for row in &self.layers {
            let base = row.series.iter().find(|series| series.name.starts_with(BASE));
            for series in &row.series {
                let answer = word(row.answer).to_owned();
                cells.push(vec![series.name.clone(), answer, row.threads.to_string(), cell(series, base)]);
            }
        }
        cells
    }

    fn heap_cells(&self) -> Vec<Vec<String>> {
        let bytes = [self.many, a_tenth_less(self.many)].map(|keys| format!("bytes a key at {}", grouped(keys)));
        let calls = ["allocations, allowed", "allocations, denied"].map(str::to_owned);
        let mut cells = vec![[vec!["contender".to_owned()], bytes.to_vec(), calls.to_vec()].concat()];
        for own in &self.heap {
            let bytes = own.bytes_per_key.map(|bytes| format!("{bytes:.1}"));
            let calls = [own.allowed, own.denied].map(|each| format!("{each:.3}"));
            cells.push([vec![own.name.to_owned()], bytes.to_vec(), calls.to_vec()].concat());
        }
        cells
    }

    /// Who did not answer as a scenario means it, and how often: such a figure says little.
    fn surprises(&self) -> String {
        let mut out = String::new();
        for row in self.rows.iter().chain(&self.layers) {
            for series in &row.series {
                let other = match row.answer {
                    Answer::Allowed => series.decisions - series.allowed,
                    Answer::Denied => series.allowed,
                };
                if other > 0 {
                    let share = other as f64 / series.decisions as f64 * 100.0;
                    let (name, scenario, answer) = (&series.name, &row.scenario, word(row.answer));
                    let threads = row.threads;
                    let _ = writeln!(out, "- {name}: {share:.4} % of {scenario}, {answer}, {threads} thread(s)");
                }
            }
        }
        out
    }

    fn plot(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(svg, (1_280, 920)).into_drawing_area();
        root.fill(&WHITE)?;
        let title = ("sans-serif", 22).into_font().color(&BLACK);
        let root = root.titled("Nanoseconds a decision, one limit by key (log scale; shorter is better)", title)?;
        let (machine, root) = root.split_vertically(24);
        let small = ("sans-serif", 14).into_font().color(&RGBColor(90, 90, 90));
        let line = format!("{}; median of {} rounds, the lines span min to max", self.machine, self.rounds);
        machine.draw_text(&line, &small.pos(Pos::new(HPos::Center, VPos::Top)), (640, 2))?;
        let (legend, root) = root.split_vertically(30);
        let names: Vec<&str> = self.rows.iter().take(1).flat_map(|row| &row.series).map(|s| s.name.as_str()).collect();
        for (index, name) in names.iter().enumerate() {
            let left = 250 + i32::try_from(index)? * 165;
            legend.draw(&Rectangle::new([(left, 8), (left + 16, 22)], COLOURS[index % 5].filled()))?;
            let style = ("sans-serif", 15).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
            legend.draw_text(name, &style, (left + 22, 15))?;
        }
        for (area, answer) in root.split_evenly((2, 1)).iter().zip([Answer::Allowed, Answer::Denied]) {
            self.panel(area, answer)?;
        }
        root.present()?;
        Ok(())
    }

    /// The bars of one answer.
    fn panel(
        &self,
        area: &DrawingArea<SVGBackend<'_>, Shift>,
        answer: Answer,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| row.answer == answer).collect();
        let all = || self.rows.iter().flat_map(|row| &row.series).map(Series::spread);
        let lowest = 10f64.powf(all().map(|spread| spread.min).fold(f64::MAX, f64::min).log10().floor());
        let highest = all().map(|spread| spread.max).fold(0.0, f64::max) * 1.6;
        let mut chart = ChartBuilder::on(area)
            .caption(word(answer), ("sans-serif", 18).into_font().color(&BLACK))
            .margin(8)
            .y_label_area_size(60)
            .x_label_area_size(44)
            .build_cartesian_2d(0f64..rows.len() as f64, (lowest..highest).log_scale())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .light_line_style(RGBColor(238, 238, 238))
            .bold_line_style(RGBColor(205, 205, 205))
            .y_label_formatter(&|ns| format!("{ns:.0}"))
            .label_style(("sans-serif", 14).into_font().color(&BLACK))
            .y_desc("ns")
            .draw()?;
        for (group, row) in rows.iter().enumerate() {
            let width = 0.86 / row.series.len() as f64;
            for (index, series) in row.series.iter().enumerate() {
                let spread = series.spread();
                let left = group as f64 + 0.07 + width * index as f64;
                let (middle, right) = (left + width / 2.0, left + width * 0.92);
                let bar = Rectangle::new([(left, lowest), (right, spread.median)], COLOURS[index % 5].filled());
                let line = PathElement::new(vec![(middle, spread.min), (middle, spread.max)], BLACK.stroke_width(1));
                let style = ("sans-serif", 11).into_font().color(&BLACK).pos(Pos::new(HPos::Center, VPos::Bottom));
                let label = Text::new(number(spread.median), (middle, spread.max * 1.06), style);
                chart.draw_series(std::iter::once(bar))?;
                chart.draw_series(std::iter::once(line))?;
                chart.draw_series(std::iter::once(label))?;
            }
            let (x, y) = chart.backend_coord(&(group as f64 + 0.5, lowest));
            let (origin_x, origin_y) = area.get_base_pixel();
            let style = ("sans-serif", 14).into_font().color(&BLACK).pos(Pos::new(HPos::Center, VPos::Top));
            let threads = if row.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", row.threads) };
            area.draw_text(&row.scenario, &style, (x - origin_x, y - origin_y + 6))?;
            area.draw_text(&threads, &style, (x - origin_x, y - origin_y + 24))?;
        }
        Ok(())
    }
}

/// An answer in a table.
pub fn word(answer: Answer) -> &'static str {
    match answer {
        Answer::Allowed => "allowed",
        Answer::Denied => "denied",
    }
}

/// So many keys that a table which doubles has not yet done so.
pub fn a_tenth_less(keys: usize) -> usize {
    keys / 10 * 9
}

fn cell(series: &Series, base: Option<&Series>) -> String {
    let Spread { median, min, max } = series.spread();
    let ratio = base.map_or(f64::NAN, |base| series.ratio(base));
    format!("{} ({}–{}) ×{ratio:.2}", number(median), number(min), number(max))
}
