//! Two plots over time: all events, and below them those that were stopped, by reason.

use std::fmt::Write as _;

use super::super::report::grouped;
use super::super::series::Series;
use super::super::zone::Zone;
use super::scale::{ticks, time_ticks};
use super::{OTHERS, colour, escaped};

/// The size of a plot, and the room for the figures at its left and below it. It scales to the page.
const WIDTH: f64 = 960.0;
const LEFT: f64 = 58.0;
const TOP: f64 = 10.0;
const HEIGHT: f64 = 140.0;
const BELOW: f64 = 26.0;
/// The columns over time: as many as can be distinguished.
const COLUMNS: u64 = 240;
/// The widths of a column in seconds, each a figure that people count in. Longer ones are multiples of a series' step.
const WIDTHS: [u64; 15] = [1, 5, 10, 15, 30, 60, 300, 600, 900, 1_800, 3_600, 10_800, 21_600, 43_200, 86_400];
/// The most reasons with a colour of their own; the others share one.
const MAX_PARTS: usize = 10;

/// A plot of a series, and the words for it.
pub(in super::super) struct TimePlot<'r> {
    pub(in super::super) series: &'r Series,
    pub(in super::super) zone: &'r Zone,
    /// What is counted, in the plural: "requests".
    pub(in super::super) what: &'r str,
    /// What is shown below, as a participle: "stopped".
    pub(in super::super) stopped: &'r str,
    /// The names of the reasons, in the order of the series.
    pub(in super::super) reasons: Vec<String>,
}

/// One column over time.
struct Column {
    at: u64,
    all: u64,
    /// By part.
    stopped: Vec<u64>,
}

/// A reason, or several, with its colour.
struct Part {
    name: String,
    colour: String,
}

#[expect(clippy::cast_precision_loss, reason = "a plot has a thousand points a side")]
pub(super) fn number(count: u64) -> f64 {
    count as f64
}

/// Scales a count to a length, so that `most` fills it.
pub(super) fn part(count: u64, most: u64, length: f64) -> f64 {
    if most == 0 { 0.0 } else { number(count) / number(most) * length }
}

/// Begins an SVG of this size.
pub(super) fn begin(width: f64, height: f64, label: &str) -> String {
    format!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n", escaped(label))
}

/// Draws a rectangle.
pub(super) fn rect(out: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), fill: &str) {
    let _ = writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" style=\"fill:{fill}\"/>"
    );
}

/// Draws the area that shows a title wherever the pointer is above or below a bar.
pub(super) fn hit(out: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), title: &str) {
    let _ = writeln!(
        out,
        "<title>{}</title><rect class=\"hit\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/>",
        escaped(title)
    );
}

/// Writes a label.
pub(super) fn label(out: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escaped(text));
}

/// Draws a line of the grid.
pub(super) fn line(out: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(out, "<line class=\"grid-line\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>");
}

impl TimePlot<'_> {
    /// Draws both plots, with their captions and the key to the colours.
    pub(in super::super) fn draw(&self) -> String {
        let part_of = self.part_of();
        let parts = self.parts(&part_of);
        let (columns, secs) = self.columns(&part_of, parts.len());
        let each = duration(secs);
        let (what, stopped) = (self.what, self.stopped);
        let all = self.one(&columns, secs, what, |column| vec![(column.all, "var(--calm)", what)]);
        let below = self.one(&columns, secs, stopped, |column| {
            let own = column.stopped.iter().zip(&parts);
            own.map(|(count, part)| (*count, part.colour.as_str(), part.name.as_str())).collect()
        });
        let mut key = String::new();
        for part in &parts {
            let _ = write!(
                key,
                "<span><i class=\"dot\" style=\"background:{}\"></i>{}</span>",
                part.colour,
                escaped(&part.name)
            );
        }
        let below = if parts.is_empty() {
            format!("<p>Nothing was {stopped}.</p>\n")
        } else {
            format!(
                "<h3>{what} {stopped} per {each}</h3>\n<div class=\"plot\">{below}</div>\n<p class=\"key\">{key}</p>\n"
            )
        };
        format!("<h3>{what} per {each}</h3>\n<div class=\"plot\">{all}</div>\n{below}")
    }

    /// Draws one plot. `bars` returns the stacked bars of a column: their counts, colours and names.
    fn one<'c>(
        &self,
        columns: &'c [Column],
        secs: u64,
        what: &str,
        bars: impl Fn(&'c Column) -> Vec<(u64, &'c str, &'c str)>,
    ) -> String {
        let total = |column| bars(column).iter().map(|(count, ..)| *count).fold(0, u64::saturating_add);
        let most = columns.iter().map(total).max().unwrap_or(0);
        let mut out = begin(WIDTH, TOP + HEIGHT + BELOW, &format!("{what} over time"));
        self.axes(&mut out, columns, secs, most);
        let width = (WIDTH - LEFT) / number(u64::try_from(columns.len().max(1)).unwrap_or(1));
        // Thin bars stay visible in a long log, and a log of a few seconds does not become a block of colour.
        let bar = (width - 0.6).clamp(0.4, 24.0);
        let mut x = LEFT;
        for column in columns {
            let title = self.title(column, secs, what, &bars(column));
            out.push_str("<g>");
            hit(&mut out, (x, TOP), (width, HEIGHT), &title);
            let mut y = TOP + HEIGHT;
            // Empty parts are left out: each would be an element of the page, and there are thousands of columns and
            // reasons.
            for (count, fill, _) in bars(column).into_iter().filter(|(count, ..)| *count > 0) {
                let tall = part(count, most, HEIGHT);
                y -= tall;
                rect(&mut out, (x + (width - bar) / 2.0, y), (bar, tall), fill);
            }
            out.push_str("</g>\n");
            x += width;
        }
        out.push_str("</svg>\n");
        out
    }

    fn title(&self, column: &Column, secs: u64, what: &str, bars: &[(u64, &str, &str)]) -> String {
        let at = self.zone.moment(column.at.saturating_mul(1_000_000));
        let total = bars.iter().map(|(count, ..)| *count).fold(0, u64::saturating_add);
        let mut title = format!("{at} and the next {}: {} {what}", duration(secs), grouped(total));
        for (count, _, name) in bars.iter().filter(|(count, _, name)| *count > 0 && *name != what) {
            let _ = write!(title, "\n{} {name}", grouped(*count));
        }
        title
    }

    fn axes(&self, out: &mut String, columns: &[Column], secs: u64, most: u64) {
        for tick in ticks(most) {
            let y = TOP + HEIGHT - part(tick, most, HEIGHT);
            line(out, (LEFT, y), (WIDTH, y));
            label(out, (LEFT - 6.0, y + 4.0), "end", &grouped(tick));
        }
        let (Some(first), Some(last)) = (columns.first(), columns.last()) else { return };
        let until = last.at.saturating_add(secs);
        for (at, text) in time_ticks(first.at, until, self.zone) {
            let x = LEFT + part(at.saturating_sub(first.at), until.saturating_sub(first.at), WIDTH - LEFT);
            line(out, (x, TOP + HEIGHT), (x, TOP + HEIGHT + 5.0));
            // A label at the edge would be cut off.
            let anchor = if x > WIDTH - 30.0 { "end" } else { "middle" };
            label(out, (x, TOP + HEIGHT + 20.0), anchor, &text);
        }
    }

    /// Assigns a part to every reason that stopped something. Those with the most have one of their own, in the order of the
    /// policy, so that a rule has the same place and colour on every page.
    fn part_of(&self) -> Vec<Option<usize>> {
        let mut totals = vec![0_u64; self.reasons.len()];
        for (_, step) in self.series.steps() {
            for (total, count) in totals.iter_mut().zip(&step.stopped) {
                *total = total.saturating_add(*count);
            }
        }
        let mut ranked: Vec<(u64, usize)> = totals.iter().copied().zip(0..).filter(|(total, _)| *total > 0).collect();
        ranked.sort_by_key(|(total, index)| (std::cmp::Reverse(*total), *index));
        let own = |index: usize| ranked.iter().take(MAX_PARTS).any(|(_, chosen)| *chosen == index);
        let chosen = ranked.len().min(MAX_PARTS);
        let mut next = 0_usize;
        let assign = |(total, index): (&u64, usize)| {
            if own(index) {
                next = next.saturating_add(1);
                return next.checked_sub(1);
            }
            (*total > 0).then_some(chosen)
        };
        totals.iter().zip(0..).map(assign).collect()
    }

    fn parts(&self, part_of: &[Option<usize>]) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for (index, (name, part)) in self.reasons.iter().zip(part_of).enumerate() {
            if part.is_some_and(|part| part == parts.len() && part < MAX_PARTS) {
                let is_last = index.saturating_add(1) == self.reasons.len();
                let colour = if is_last { OTHERS.to_owned() } else { colour(index) };
                parts.push(Part { name: name.clone(), colour });
            }
        }
        if part_of.iter().flatten().any(|part| *part >= parts.len()) {
            parts.push(Part { name: "others".to_owned(), colour: OTHERS.to_owned() });
        }
        parts
    }

    /// Merges the steps of the series to columns of a round width, and returns them with that width in seconds.
    fn columns(&self, part_of: &[Option<usize>], parts: usize) -> (Vec<Column>, u64) {
        let (width, steps) = (self.series.width(), u64::try_from(self.series.steps().len()).unwrap_or(u64::MAX));
        let span = width.saturating_mul(steps);
        let fits = |secs: &u64| secs.is_multiple_of(width) && span.checked_div(*secs).unwrap_or(0) < COLUMNS;
        let secs =
            WIDTHS.into_iter().find(fits).unwrap_or_else(|| width.saturating_mul(steps.div_ceil(COLUMNS).max(1)));
        let mut columns: Vec<Column> = Vec::new();
        for (at, step) in self.series.steps() {
            let at = at.checked_div(secs).unwrap_or(0).saturating_mul(secs);
            if columns.last().is_none_or(|last| last.at != at) {
                columns.push(Column { at, all: 0, stopped: vec![0; parts] });
            }
            let Some(column) = columns.last_mut() else { continue };
            column.all = column.all.saturating_add(step.requests);
            for (count, part) in step.stopped.iter().zip(part_of) {
                if let Some(own) = part.and_then(|part| column.stopped.get_mut(part)) {
                    *own = own.saturating_add(*count);
                }
            }
        }
        (columns, secs)
    }
}

/// Writes a number of seconds in its largest unit: "5 min".
fn duration(secs: u64) -> String {
    let units = [(86_400, "days"), (3_600, "h"), (60, "min")];
    let unit = units.into_iter().find(|(length, _)| secs >= *length && secs.is_multiple_of(*length));
    match unit {
        Some((86_400, _)) if secs == 86_400 => "day".to_owned(),
        Some((length, name)) => format!("{} {name}", secs.checked_div(length).unwrap_or(0)),
        None => format!("{secs} s"),
    }
}
