//! What benchmarks share: the program that they measure, and what they found as a table to read and a plot to look at.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use plotters::style::RGBColor;

/// Colours that stay apart for most eyes (Okabe and Ito), Threshold's first.
pub const COLOURS: [RGBColor; 5] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(140, 140, 140),
];

/// The middle one, the smallest and the largest.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    /// The middle one.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Of at least one figure; of none, all are NaN.
    pub fn of(figures: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = figures.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
        let middle = sorted.len().saturating_sub(1);
        let median = f64::midpoint(at(middle / 2), at(middle.div_ceil(2)));
        Self { median, min: at(0), max: at(middle) }
    }
}

/// The program `threshold`: the one at `THRESHOLD_BIN`, else built from this repository, so that none that is old is
/// measured.
pub fn program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("THRESHOLD_BIN") {
        return Ok(path.into());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--release", "-p", "threshold-server"]).current_dir(&root).env_remove("CARGO_TARGET_DIR");
    ensure!(build.status().context("cannot start cargo")?.success(), "threshold does not build");
    Ok(root.join("target/release/threshold"))
}

/// Prints a text, and writes it and a plot to `bench/results/NAME.md` and `NAME.svg`.
pub fn publish(name: &str, text: &str, svg: &str) -> Result<()> {
    print!("{text}");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../results");
    fs::create_dir_all(&folder).context("cannot make bench/results")?;
    fs::write(folder.join(format!("{name}.md")), text).with_context(|| format!("cannot write {name}.md"))?;
    fs::write(folder.join(format!("{name}.svg")), svg).with_context(|| format!("cannot write {name}.svg"))
}

/// `1,000,000`.
pub fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A figure with as many digits as mean something.
pub fn number(figure: f64) -> String {
    if figure < 100.0 { format!("{figure:.1}") } else { grouped(figure.round() as usize) }
}

/// Lines of cells as a table that reads well as it is: the first line is the head, the first column is text.
pub fn table(cells: &[Vec<String>]) -> String {
    let columns = cells.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| cells.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0).max(3)).collect();
    let mut out = String::new();
    for (index, line) in cells.iter().enumerate() {
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let _ = if column == 0 { write!(out, "| {cell:<width$} ") } else { write!(out, "| {cell:>width$} ") };
        }
        out += "|\n";
        if index == 0 {
            for (column, width) in widths.iter().enumerate() {
                let _ = write!(out, "|{}{}", "-".repeat(width + 1), if column == 0 { "-" } else { ":" });
            }
            out += "|\n";
        }
    }
    out
}

/// What was measured on, without saying whose it is.
pub fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(": "));
    let model = model.map_or("unknown CPU", |(_, model)| model.trim());
    let rustc = Command::new("rustc").arg("--version").output().ok().filter(|output| output.status.success());
    let rustc =
        rustc.map_or_else(|| "rustc unknown".to_owned(), |output| String::from_utf8_lossy(&output.stdout).into());
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split_whitespace().next().unwrap_or("unknown");
    format!("{cores} cores, {model}, {}, load {load} before the run", rustc.trim())
}
