//! The plots of the page, as SVG. Every bar has a title with its figure, for tooltips and screen readers.

use std::fmt::Write as _;

use super::super::report::{Replayed, grouped, limit_text, moment};
use super::super::tally::Hour;
use super::escaped;

/// The width of a plot; it scales to the page.
const WIDTH: f64 = 960.0;
/// The columns over time: as many as can be distinguished.
const COLUMNS: usize = 240;
/// The number of rules with a colour of their own; the others share the last.
const COLOURS: usize = 6;
/// The number of rules with a plot of their own.
const MAX_RULES: usize = 9;
const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];

#[expect(clippy::cast_precision_loss, reason = "a plot has a thousand points a side")]
fn number(count: u64) -> f64 {
    count as f64
}

/// Scales a count to a length, so that `most` fills it.
fn part(count: u64, most: u64, length: f64) -> f64 {
    if most == 0 { 0.0 } else { number(count) / number(most) * length }
}

fn begin(height: f64, label: &str) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">\n", escaped(label))
}

fn rect(out: &mut String, at: (f64, f64), size: (f64, f64), fill: &str, title: &str) {
    let ((x, y), (width, height)) = (at, size);
    let _ = writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\"><title>{}</title></rect>",
        escaped(title)
    );
}

fn label(out: &mut String, at: (f64, f64), anchor: &str, text: &str) {
    let (x, y) = at;
    let _ = writeln!(
        out,
        "<text class=\"faint\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escaped(text)
    );
}

/// One column over time.
struct Column {
    at: u64,
    requests: u64,
    /// By colour.
    stopped: Vec<u64>,
}

/// Plots requests above, and the stopped ones by rule below, on a scale of their own.
pub(super) fn over_time(replayed: &Replayed<'_>) -> String {
    let colours = Colours::new(replayed);
    let columns = columns(replayed, &colours);
    let most = columns.iter().map(|column| column.requests).max().unwrap_or(0);
    let most_stopped = columns.iter().map(|column| column.stopped.iter().sum()).max().unwrap_or(0);
    let height = 130.0;
    let mut requests = begin(height, "requests over time");
    let mut stopped = begin(height, "stopped requests over time");
    let width = WIDTH / number(u64::try_from(columns.len().max(1)).unwrap_or(1));
    let bar = (width - 0.5).max(0.3);
    let mut x = 0.0;
    for column in &columns {
        let at = moment(column.at.saturating_mul(1_000_000));
        let tall = part(column.requests, most, height);
        let title = format!("{at}: {} requests", grouped(column.requests));
        rect(&mut requests, (x, height - tall), (bar, tall), "var(--calm)", &title);
        let mut y = height;
        for (colour, count) in column.stopped.iter().enumerate().filter(|(_, count)| **count > 0) {
            let tall = part(*count, most_stopped, height);
            y -= tall;
            let title = format!("{at}: {} stopped by {}", grouped(*count), colours.name(colour));
            rect(&mut stopped, (x, y), (bar, tall), &colour_of(colour), &title);
        }
        x += width;
    }
    let edge = |column: Option<&Column>| column.map(|own| moment(own.at.saturating_mul(1_000_000))).unwrap_or_default();
    format!(
        "<p class=\"axis\">requests, at most {} a column</p>\n{requests}</svg>\n\
         <p class=\"axis\">stopped, at most {} a column</p>\n{stopped}</svg>\n\
         <p class=\"axis ends\"><time>{}</time><time>{}</time></p>\n{}",
        grouped(most),
        grouped(most_stopped),
        edge(columns.first()),
        edge(columns.last()),
        colours.key()
    )
}

fn columns(replayed: &Replayed<'_>, colours: &Colours) -> Vec<Column> {
    let series = &replayed.tally.series;
    let together = series.steps().len().div_ceil(COLUMNS).max(1);
    let mut columns: Vec<Column> = Vec::new();
    for (index, (at, step)) in series.steps().enumerate() {
        if index.is_multiple_of(together) {
            columns.push(Column { at, requests: 0, stopped: vec![0; COLOURS.saturating_add(1)] });
        }
        let Some(column) = columns.last_mut() else { continue };
        column.requests = column.requests.saturating_add(step.requests);
        for (reason, count) in step.stopped.iter().enumerate() {
            if let Some(own) = column.stopped.get_mut(colours.of(reason)) {
                *own = own.saturating_add(*count);
            }
        }
    }
    columns
}

fn colour_of(colour: usize) -> String {
    format!("var(--c{colour})")
}

/// Assigns colours to reasons: those that stopped most have one of their own.
struct Colours {
    names: Vec<(usize, String)>,
}

impl Colours {
    fn new(replayed: &Replayed<'_>) -> Self {
        let rules = &replayed.tally.rules;
        let mut reasons: Vec<(u64, usize)> =
            rules.iter().enumerate().map(|(index, rule)| (rule.denied.saturating_add(rule.banned), index)).collect();
        let penalised = replayed.tally.penalties.iter().map(|own| own.denied.saturating_add(own.banned)).sum();
        reasons.push((penalised, rules.len()));
        reasons.retain(|(count, _)| *count > 0);
        reasons.sort_by_key(|(count, index)| (std::cmp::Reverse(*count), *index));
        let name = |index: usize| match replayed.policy.rules().get(index) {
            Some(rule) => rule.name.to_string(),
            None => "penalties and lists".to_owned(),
        };
        Self { names: reasons.into_iter().map(|(_, index)| (index, name(index))).collect() }
    }

    fn of(&self, reason: usize) -> usize {
        self.names.iter().position(|(own, _)| *own == reason).unwrap_or(COLOURS).min(COLOURS)
    }

    fn name(&self, colour: usize) -> &str {
        if colour < COLOURS { self.names.get(colour).map_or("", |(_, name)| name) } else { "others" }
    }

    fn key(&self) -> String {
        let mut out = String::from("<p class=\"key\">");
        for colour in 0..self.names.len().min(COLOURS.saturating_add(1)) {
            let _ = write!(
                out,
                "<span><i style=\"background:{}\"></i>{}</span>",
                colour_of(colour),
                escaped(self.name(colour))
            );
        }
        if self.names.is_empty() {
            out.push_str("Nothing was stopped.");
        }
        out.push_str("</p>\n");
        out
    }
}

/// Plots the highest use of the keys of each matched rule.
pub(super) fn against_limits(replayed: &Replayed<'_>) -> String {
    const BINS: usize = 11;
    let rules = replayed.policy.rules();
    let mut bins: Vec<[u64; BINS]> = vec![[0; BINS]; rules.len()];
    for peak in replayed.tally.peaks.values() {
        let tenth = peak.used.saturating_mul(10).checked_div(peak.capacity.max(1)).unwrap_or(0);
        let bin = if peak.full { BINS.saturating_sub(1) } else { usize::try_from(tenth).unwrap_or(9).min(9) };
        if let Some(count) = bins.get_mut(peak.rule).and_then(|own| own.get_mut(bin)) {
            *count = count.saturating_add(replayed.tally.peaks.factor());
        }
    }
    let mut met: Vec<(usize, [u64; BINS])> =
        bins.into_iter().enumerate().filter(|(_, own)| own.iter().any(|count| *count > 0)).collect();
    met.sort_by_key(|(_, own)| {
        (std::cmp::Reverse(own.iter().rev().copied().next()), std::cmp::Reverse(own.iter().sum::<u64>()))
    });
    if met.is_empty() {
        return "<p>No rule was met.</p>\n".to_owned();
    }
    let mut out = String::from(
        "<p>How much of its limit each subject had used at its fullest, in tenths; the last bar went over it.</p>\n<div class=\"grid\">\n",
    );
    for (index, own) in met.into_iter().take(MAX_RULES) {
        let Some(rule) = rules.get(index) else { continue };
        let limit = limit_text(rule).unwrap_or_default();
        let _ = writeln!(out, "<div><h3>{} ({})</h3>", escaped(&rule.name), escaped(&limit));
        out.push_str(&histogram(&own, &rule.name));
        out.push_str("</div>\n");
    }
    out.push_str("</div>\n");
    out
}

/// Draws bars on a logarithmic scale: one subject over its limit is visible beside a million below it.
fn histogram(bins: &[u64], name: &str) -> String {
    let height = 320.0;
    let mut out = begin(height + 40.0, &format!("use of {name} by subject"));
    let most = bins.iter().map(|count| number(*count).ln_1p()).fold(0.0, f64::max);
    let width = WIDTH / number(u64::try_from(bins.len()).unwrap_or(1));
    let mut x = 0.0;
    for (bin, count) in bins.iter().enumerate() {
        let last = bin.saturating_add(1) == bins.len();
        let tall = if most > 0.0 { number(*count).ln_1p() / most * (height - 34.0) } else { 0.0 };
        let fill = if last { "var(--c0)" } else { "var(--calm)" };
        let name = if last { "over".to_owned() } else { format!("{}%", bin.saturating_add(1).saturating_mul(10)) };
        let title = format!("{name}: {} subjects", grouped(*count));
        rect(&mut out, (x + 4.0, height - tall), (width - 8.0, tall), fill, &title);
        let middle = x + width / 2.0;
        if *count > 0 {
            let y = height - tall - 8.0;
            let _ =
                writeln!(out, "<text x=\"{middle:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>", grouped(*count));
        }
        let _ = writeln!(
            out,
            "<text class=\"faint\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{name}</text>",
            height + 30.0
        );
        x += width;
    }
    out.push_str("</svg>\n");
    out
}

/// Draws a bar for each subject. It is HTML rather than SVG, so that names stay readable at any width.
pub(super) fn subjects(rows: &[(String, u64, String)]) -> String {
    if rows.is_empty() {
        return "<p>No subject was affected.</p>\n".to_owned();
    }
    let most = rows.iter().map(|(_, count, _)| *count).max().unwrap_or(0);
    let mut out = String::from("<ul class=\"bars\">\n");
    for (name, count, when) in rows {
        let shown: String = name.chars().take(60).collect();
        let _ = writeln!(
            out,
            "<li title=\"{}: {}, {}\"><span>{}</span><b><i style=\"width:{:.1}%\"></i>{}</b></li>",
            escaped(name),
            grouped(*count),
            escaped(when),
            escaped(&shown),
            part(*count, most, 85.0),
            grouped(*count)
        );
    }
    out.push_str("</ul>\n");
    out
}

/// Plots requests and stopped ones by hour and weekday, in the log's own time zone.
pub(super) fn week(replayed: &Replayed<'_>) -> String {
    let week = &replayed.tally.week;
    let mut out = heat(week, "requests", "--heat", |hour| hour.requests);
    if week.iter().flatten().any(|hour| hour.stopped > 0) {
        out.push_str(&heat(week, "stopped", "--stop", |hour| hour.stopped));
    }
    out
}

fn heat(week: &[[Hour; 24]; 7], what: &str, colour: &str, of: impl Fn(&Hour) -> u64) -> String {
    let (cell, tall, left, top) = (37.0, 28.0, 60.0, 32.0);
    let most = week.iter().flatten().map(&of).max().unwrap_or(0);
    let mut out = format!("<h3>{what}</h3>\n");
    out.push_str(&begin(top + tall * 7.0, &format!("{what} by hour and weekday")));
    let mut x = left;
    for hour in 0..24 {
        label(&mut out, (x + cell / 2.0, 22.0), "middle", &format!("{hour:02}"));
        x += cell;
    }
    let mut y = top;
    for (day, name) in week.iter().zip(DAYS) {
        label(&mut out, (0.0, y + 20.0), "start", name);
        let mut x = left;
        for (hour, own) in day.iter().enumerate() {
            let count = of(own);
            let strength = if count == 0 { 0.04 } else { 0.12 + part(count, most, 0.88) };
            let fill = format!("rgba(var({colour}),{strength:.2})");
            let title = format!("{name} {hour:02}:00: {} {what}", grouped(count));
            rect(&mut out, (x + 1.0, y + 1.0), (cell - 2.0, tall - 2.0), &fill, &title);
            x += cell;
        }
        y += tall;
    }
    out.push_str("</svg>\n");
    out
}
