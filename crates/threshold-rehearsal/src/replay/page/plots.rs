//! The other plots of the page: use of limits, most affected subjects, hours of the week.

use std::fmt::Write as _;

use super::super::report::{Replayed, grouped, is_rehearsed, limit_text};
use super::super::tally::{Hour, Peak};
use super::scale::powers_of_ten;
use super::time_plot::{begin, hit, label, line, number, part, rect};
use super::{colour, escaped};

/// The number of rules with a plot of their own.
const MAX_RULES: usize = 12;
/// The bars of a histogram: unused, ten tenths, used up, exceeded.
const BARS: usize = 13;
/// The last three of them.
const LAST_TENTH: usize = 10;
const USED_UP: usize = 11;
const EXCEEDED: usize = 12;
const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];

/// Plots the highest use of the keys of each matched rule.
pub(super) fn against_limits(replayed: &Replayed<'_>) -> String {
    let rules = replayed.policy.rules();
    let mut bars: Vec<[u64; BARS]> = vec![[0; BARS]; rules.len()];
    for peak in replayed.tally.peaks.values() {
        if let Some(count) = bars.get_mut(peak.rule).and_then(|own| own.get_mut(bar_of(peak))) {
            *count = count.saturating_add(replayed.tally.peaks.factor());
        }
    }
    let has_keys = |(_, own): &(usize, [u64; BARS])| own.iter().any(|count| *count > 0);
    let mut met: Vec<(usize, [u64; BARS])> = bars.into_iter().enumerate().filter(has_keys).collect();
    if met.is_empty() {
        return "<p>No rule that can be rehearsed was met.</p>\n".to_owned();
    }
    // Those that were exceeded by the most, in the order of the policy.
    met.sort_by_key(|(index, own)| {
        let sum = own.iter().copied().fold(0, u64::saturating_add);
        (std::cmp::Reverse((own.last().copied(), sum)), *index)
    });
    let left_out = met.len().saturating_sub(MAX_RULES);
    met.truncate(MAX_RULES);
    // Chosen by importance, shown in the order of the policy, so that two pages can be compared side by side.
    met.sort_by_key(|(index, _)| *index);
    let mut out = String::from(
        "<p class=\"note\">How many subjects (vertical, on a logarithmic scale) used how much of the limit at their busiest \
         (horizontal, in percent). A bar begins at the figure on its left and ends before the one on its right. “0” was never \
         charged, “100” used the limit up exactly, “over” exceeded it.</p>\n<div class=\"grid\">\n",
    );
    let about = if replayed.tally.peaks.is_exact() { "" } else { "about " };
    for (index, own) in met {
        let Some(rule) = rules.get(index).filter(|rule| is_rehearsed(rule)) else { continue };
        let limit = limit_text(rule).unwrap_or_default();
        let _ = writeln!(
            out,
            "<div><h3><i class=\"dot\" style=\"background:{}\"></i>{} ({})</h3>",
            colour(index),
            escaped(&rule.name),
            escaped(&limit)
        );
        out.push_str(&histogram(&own, &rule.name, about));
        out.push_str("</div>\n");
    }
    out.push_str("</div>\n");
    if left_out > 0 {
        let _ = writeln!(out, "<p class=\"note\">{left_out} more rules are in the table below.</p>");
    }
    out
}

/// Returns the bar that a peak belongs to. Tenths are half-open: 30 % of a limit is in the bar from 30 to 40.
fn bar_of(peak: &Peak) -> usize {
    // Before the use: a denied request is not charged, so the use of an exceeded limit may be below its capacity.
    if peak.full {
        return EXCEEDED;
    }
    if peak.used == 0 {
        return 0;
    }
    if peak.used >= peak.capacity {
        return USED_UP;
    }
    let tenth = u128::from(peak.used).saturating_mul(10).checked_div(u128::from(peak.capacity)).unwrap_or(0);
    usize::try_from(tenth).unwrap_or(LAST_TENTH).saturating_add(1).min(LAST_TENTH)
}

/// Draws bars on a logarithmic scale: one subject over its limit is visible beside a million below it.
fn histogram(bars: &[u64; BARS], name: &str, about: &str) -> String {
    let (width, height, left, top) = (360.0, 130.0, 44.0, 18.0);
    let bottom = top + height;
    let mut out = begin(width, bottom + 22.0, &format!("use of {name} by subject"));
    let most = bars.iter().copied().max().unwrap_or(0);
    // `ln_1p`, because the logarithm of 0 has no place on the plot, and that of 1 would have no height.
    let scaled = |count: u64| number(count).ln_1p() / number(most).ln_1p().max(f64::MIN_POSITIVE) * height;
    line(&mut out, (left, bottom), (width, bottom));
    label(&mut out, (left - 5.0, bottom + 4.0), "end", "0");
    // A label takes 11 units: beside a large count, that of 1 would overlap the 0.
    for power in powers_of_ten(most).filter(|power| scaled(*power) >= 11.0) {
        let y = bottom - scaled(power);
        line(&mut out, (left, y), (width, y));
        label(&mut out, (left - 5.0, y + 4.0), "end", &grouped(power));
    }
    // The bars that are no tenths stand apart.
    let gap = 7.0;
    let each = (width - left - 3.0 * gap) / number(u64::try_from(BARS).unwrap_or(1));
    let mut x = left;
    for (bar, count) in bars.iter().enumerate() {
        if matches!(bar, 1 | USED_UP | EXCEEDED) {
            x += gap;
        }
        let (from, until) = (bar.saturating_sub(1).saturating_mul(10), bar.saturating_mul(10));
        let (under, range) = match bar {
            0 => ("0".to_owned(), "never charged".to_owned()),
            USED_UP => ("100".to_owned(), "used up exactly".to_owned()),
            EXCEEDED => ("over".to_owned(), "exceeded".to_owned()),
            1 => (String::new(), "more than 0 % and less than 10 %".to_owned()),
            _ => (String::new(), format!("at least {from} % and less than {until} %")),
        };
        out.push_str("<g>");
        let title = format!("{range}: {about}{} subjects", grouped(*count));
        hit(&mut out, (x, top), (each, height), &title);
        let tall = scaled(*count);
        let fill = if bar == EXCEEDED { "var(--over)" } else { "var(--calm)" };
        rect(&mut out, (x + 1.0, bottom - tall), (each - 2.0, tall), fill);
        out.push_str("</g>\n");
        if *count > 0 {
            let (middle, y) = (x + each / 2.0, bottom - tall - 4.0);
            let _ = writeln!(
                out,
                "<text class=\"count\" x=\"{middle:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>",
                short(*count)
            );
        }
        if (2..=LAST_TENTH).contains(&bar) {
            label(&mut out, (x, bottom + 15.0), "middle", &from.to_string());
        } else {
            label(&mut out, (x + each / 2.0, bottom + 15.0), "middle", &under);
        }
        x += each;
    }
    out.push_str("</svg>\n");
    out
}

/// Writes a count in at most four characters, so that those of neighbouring bars do not overlap.
fn short(count: u64) -> String {
    let units = [(1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")];
    match units.into_iter().find(|(unit, _)| count >= *unit && count >= 10_000) {
        Some((unit, name)) => format!("{}{name}", count.checked_div(unit).unwrap_or(0)),
        None => count.to_string(),
    }
}

/// One row of the most affected subjects.
pub(in super::super) struct SubjectRow {
    pub(in super::super) name: String,
    /// The length of the bar.
    pub(in super::super) count: u64,
    /// The figures at its end.
    pub(in super::super) figures: String,
    /// The first and the last time, for the tooltip.
    pub(in super::super) when: String,
}

/// Draws a bar for each subject. It is HTML rather than SVG, so that names stay readable at any width.
pub(in super::super) fn subjects(rows: &[SubjectRow]) -> String {
    if rows.is_empty() {
        return "<p>No subject was affected.</p>\n".to_owned();
    }
    let most = rows.iter().map(|row| row.count).max().unwrap_or(0);
    let mut out = String::from("<ul class=\"bars\">\n");
    for row in rows {
        // A user's name may be as long as a log line. The tooltip has all of it.
        let shown: String = row.name.chars().take(60).collect();
        let _ = writeln!(
            out,
            "<li title=\"{}: {}, {}\"><span>{}</span><b><i style=\"width:{:.1}%\"></i>{}</b></li>",
            escaped(&row.name),
            escaped(&row.figures),
            escaped(&row.when),
            escaped(&shown),
            part(row.count, most, 60.0),
            escaped(&row.figures)
        );
    }
    out.push_str("</ul>\n");
    out
}

/// Plots requests and stopped ones by hour and weekday.
pub(super) fn week(replayed: &Replayed<'_>) -> String {
    let week = &replayed.tally.week;
    let zone =
        if replayed.zone.is_given() { replayed.zone.name() } else { "the time zone that the log writes".to_owned() };
    let mut out = format!("<p class=\"note\">All weeks of the log together, in {}.</p>\n", escaped(&zone));
    out.push_str(&heat(week, "requests", "--heat", |hour| hour.requests));
    if week.iter().flatten().any(|hour| hour.stopped > 0) {
        out.push_str(&heat(week, "stopped", "--stop", |hour| hour.stopped));
    }
    out
}

fn heat(week: &[[Hour; 24]; 7], what: &str, colour: &str, of: impl Fn(&Hour) -> u64) -> String {
    let (cell, tall, left, top) = (38.0, 24.0, 44.0, 22.0);
    let most = week.iter().flatten().map(&of).max().unwrap_or(0);
    let mut out = format!("<h3>{what}</h3>\n<div class=\"plot\">");
    out.push_str(&begin(left + cell * 24.0, top + tall * 7.0, &format!("{what} by hour and weekday")));
    let mut x = left;
    for hour in 0..24 {
        label(&mut out, (x + cell / 2.0, 15.0), "middle", &format!("{hour:02}"));
        x += cell;
    }
    let mut y = top;
    for (day, name) in week.iter().zip(DAYS) {
        label(&mut out, (0.0, y + 17.0), "start", name);
        let mut x = left;
        for (hour, own) in day.iter().enumerate() {
            let count = of(own);
            // A single request must be visible beside the busiest hour, and differ from none.
            let strength = if count == 0 { 0.05 } else { 0.15 + part(count, most, 0.85) };
            let next = hour.saturating_add(1);
            out.push_str("<g>");
            let _ = write!(out, "<title>{name} {hour:02}:00 to {next:02}:00: {} {what}</title>", grouped(count));
            let fill = format!("rgba(var({colour}),{strength:.2})");
            rect(&mut out, (x + 1.0, y + 1.0), (cell - 2.0, tall - 2.0), &fill);
            out.push_str("</g>\n");
            x += cell;
        }
        y += tall;
    }
    let _ = write!(
        out,
        "</svg></div>\n<p class=\"ramp\">0<i style=\"background:linear-gradient(90deg,rgba(var({colour}),.15),\
         rgba(var({colour}),1))\"></i>{} {what} in the busiest hour, linear</p>\n",
        grouped(most)
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bar ended at its figure and another began at it: 30 % of a limit was drawn above "40%", and a limit that was used up
    /// exactly above "100%" together with 90 %.
    #[test]
    fn every_use_belongs_to_one_half_open_bar() {
        let bar = |used, full| bar_of(&Peak { rule: 0, used, capacity: 100, full });
        for (used, expect) in [(0, 0), (1, 1), (9, 1), (10, 2), (29, 3), (30, 4), (99, 10), (100, 11)] {
            assert_eq!(bar(used, false), expect, "{used}");
        }
        assert_eq!((bar(100, true), bar(40, true)), (12, 12));
        assert_eq!(bar_of(&Peak { rule: 0, used: u64::MAX - 1, capacity: u64::MAX, full: false }), 10);
    }

    #[test]
    fn counts_above_bars_are_short() {
        for (count, expect) in
            [(0, "0"), (9_999, "9999"), (10_000, "10k"), (2_500_000, "2M"), (u64::MAX, "18446744073G")]
        {
            assert_eq!(short(count), expect);
        }
    }
}
