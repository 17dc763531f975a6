//! The report of a replay as one self-contained HTML page with plots, for light and dark screens and for print.

mod plots;
mod scale;
mod time_plot;

use std::fmt::Write as _;

use threshold_core::DigestKey;
use threshold_core::policy::Identity;
use threshold_core::text::printable;

use super::report::{Replayed, grouped, limit_text, share, touches};
use super::tally::{LAYERS, PenaltyCounts};
use super::top_subjects::Kind;
use crate::traffic::LineCounts;

pub(super) use plots::{SubjectRow, subjects};
pub(super) use time_plot::TimePlot;

/// How many subjects the page lists.
pub(super) const SUBJECTS: usize = 15;
/// The colour of penalties and lists, and of the rules that have none of their own.
const OTHERS: &str = "var(--other)";
const STYLE: &str = include_str!("page/style.css");

/// Returns the colour of a rule by its place in the policy, so that it is the same on every page.
fn colour(index: usize) -> String {
    // The golden angle: neighbours are far apart, and no number of rules makes two hues equal.
    let hue = index.saturating_mul(137_508).saturating_add(20_000).checked_rem(360_000).unwrap_or(0);
    format!("hsl({} var(--tone))", hue.checked_div(1_000).unwrap_or(0))
}

/// Escapes text for HTML.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // Control characters first, then markup: a client chooses the names and paths in a log, and the page runs in the
    // operator's browser.
    for c in printable(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Shows names on a page. A page may be passed on, so names are hidden as in log lines.
pub(super) struct Names<'r> {
    pub(super) identity: &'r Identity,
    pub(super) key: DigestKey,
}

impl Names<'_> {
    /// Returns a name, or its digest.
    pub(super) fn shown(&self, kind: Kind, name: &str) -> String {
        let secret = match kind {
            Kind::User => self.identity.hides_users(),
            Kind::Tenant => self.identity.secret_tenant,
            Kind::Ip => false,
        };
        // A tenant is an organisation and not a person.
        let hidden = secret || (!self.identity.log_identifiers && kind != Kind::Tenant);
        if hidden { self.key.redact(name) } else { name.to_owned() }
    }

    /// Returns the note on digests, if names are hidden.
    pub(super) fn note(&self) -> Option<String> {
        (!self.identity.log_identifiers).then(|| {
            "Addresses and users are shown as digests, since the policy has log_identifiers = false. The same log gives the \
             same digests."
                .to_owned()
        })
    }
}

/// Builds a whole page around its sections.
pub(super) fn document(title: &str, body: &str) -> String {
    let title = escaped(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}</main>\n</body>\n</html>\n"
    )
}

/// Writes figures with their names: the name, the figure, and what it is compared with.
pub(super) fn cards(out: &mut String, cards: &[(&str, String, String)]) {
    out.push_str("<dl class=\"cards\">\n");
    for (name, figure, of) in cards {
        let _ = writeln!(out, "<div><dt>{name}</dt><dd>{figure}<small>{of}</small></dd></div>");
    }
    out.push_str("</dl>\n");
}

/// Writes a section.
pub(super) fn section(out: &mut String, title: &str, body: &str) {
    let _ = write!(out, "<section>\n<h2>{title}</h2>\n{body}</section>\n");
}

/// Writes notes, of the report and of the lines that could not be used.
pub(super) fn notes_section(out: &mut String, mut notes: Vec<String>, counts: &LineCounts) {
    notes.extend(counts.problems.iter().cloned());
    if counts.unreadable > 0 {
        notes.push(format!("{} of {} lines could not be read.", grouped(counts.unreadable), grouped(counts.lines)));
    }
    if counts.late > 0 {
        notes.push(format!(
            "{} lines came later than --reorder allows, and count from when they were read.",
            grouped(counts.late)
        ));
    }
    let items: String = notes.iter().map(|item| format!("<li>{}</li>\n", escaped(item))).collect();
    if !items.is_empty() {
        section(out, "Notes", &format!("<ul>\n{items}</ul>\n"));
    }
}

impl Replayed<'_> {
    /// Builds the page.
    pub(super) fn html(&self) -> String {
        let names = Names { identity: self.policy.identity(), key: self.key };
        let tally = self.tally;
        let mut out = format!(
            "<p>{} requests from <time>{}</time> until <time>{}</time>. Times are in {}.</p>\n",
            grouped(tally.requests),
            self.moment(tally.from),
            self.moment(tally.until),
            escaped(&self.zone.name())
        );
        self.cards(&mut out);
        section(&mut out, "Requests and blocks over time", &self.time_plot());
        section(&mut out, "Requests per subject against the limit", &plots::against_limits(self));
        self.subjects_section(&names, &mut out);
        section(&mut out, "Hour and weekday", &plots::week(self));
        self.rules_table(&mut out);
        self.against_section(&names, &mut out);
        notes_section(&mut out, self.notes().into_iter().chain(names.note()).collect(), self.counts);
        document(&format!("Rehearsal of {}", self.name), &out)
    }

    fn cards(&self, out: &mut String) {
        let tally = self.tally;
        let mut all: Vec<(&str, String, String)> = tally
            .by_verdict()
            .map(|(name, count)| (name, grouped(count), share(count, tally.requests)))
            .into_iter()
            .collect();
        let [addresses, ..] = &tally.subjects;
        let (seen, touched) = (addresses.count(|_| true), addresses.count(|subject| subject.touched));
        let about = if addresses.is_exact() { "" } else { "about " };
        let of = format!("of {}, {}", grouped(seen), share(touched, seen));
        all.push(("addresses touched", format!("{about}{}", grouped(touched)), of));
        cards(out, &all);
    }

    fn time_plot(&self) -> String {
        let names = self.policy.rules().iter().map(|rule| rule.name.to_string());
        let plot = TimePlot {
            series: &self.tally.series,
            zone: self.zone,
            what: "requests",
            stopped: "stopped",
            reasons: names.chain(["penalties and lists".to_owned()]).collect(),
        };
        plot.draw()
    }

    fn subjects_section(&self, names: &Names<'_>, out: &mut String) {
        let top = self.tally.top_subjects.top(SUBJECTS);
        let rows: Vec<SubjectRow> = top
            .iter()
            .map(|(kind, name, own)| SubjectRow {
                name: format!("{} {}", kind.name(), names.shown(*kind, name)),
                count: own.touched(),
                figures: touches(own),
                when: format!("{} to {}", self.moment(own.first), self.moment(own.last)),
            })
            .collect();
        let mut body = subjects(&rows);
        let undercount = self.tally.top_subjects.undercount();
        if undercount > 0 {
            let _ = writeln!(
                body,
                "<p class=\"note\">More subjects were touched than are kept: each figure may be up to {} too low.</p>",
                grouped(undercount)
            );
        }
        section(out, "Most affected subjects", &body);
    }

    /// The rows add up to the cards: what penalties and lists stopped has rows of its own.
    fn rules_table(&self, out: &mut String) {
        let mut rows = String::from(
            "<div class=\"scroll\" tabindex=\"0\"><table>\n<thead><tr><th class=\"l\">layer</th><th class=\"l\">rule</th>\
             <th class=\"l\">limit</th><th>met</th><th>full</th><th>denied</th><th>banned</th><th>warned</th>\
             <th>slowed</th></tr></thead>\n<tbody>\n",
        );
        for (rule, own) in self.policy.rules().iter().zip(&self.tally.rules) {
            let _ = writeln!(
                rows,
                "<tr><td class=\"l\">{}</td><td class=\"l wrap\">{}</td><td class=\"l\">{}</td><td>{}</td><td>{}</td>\
                 <td>{}</td><td>{}</td><td>{}</td><td>0</td></tr>",
                rule.layer,
                escaped(&rule.name),
                escaped(&limit_text(rule).unwrap_or_else(|| "unlimited".to_owned())),
                grouped(own.met),
                grouped(own.full),
                grouped(own.denied),
                grouped(own.banned),
                grouped(own.warned),
            );
        }
        let names = LAYERS.iter().map(|layer| layer.name()).chain(["lists"]);
        for (PenaltyCounts { denied, banned, slowed }, name) in self.tally.penalties.iter().zip(names) {
            if denied.saturating_add(*banned).saturating_add(*slowed) > 0 {
                let what = if name == "lists" { "lists, or no plan" } else { "cool-downs and bans" };
                let _ = writeln!(
                    rows,
                    "<tr><td class=\"l\">{name}</td><td class=\"l wrap\">{what}</td><td></td><td></td><td></td><td>{}</td>\
                     <td>{}</td><td>0</td><td>{}</td></tr>",
                    grouped(*denied),
                    grouped(*banned),
                    grouped(*slowed),
                );
            }
        }
        let [_, warned, slowed, denied, banned] = self.tally.by_verdict().map(|(_, count)| grouped(count));
        let _ = write!(
            rows,
            "</tbody>\n<tfoot><tr><td class=\"l\" colspan=\"5\">all</td><td>{denied}</td><td>{banned}</td><td>{warned}</td>\
             <td>{slowed}</td></tr></tfoot>\n</table></div>\n<p class=\"note\">A request counts in one row: that of the rule \
             with the longest wait, or that of the penalty.</p>\n",
        );
        section(out, "Rules", &rows);
    }

    fn against_section(&self, names: &Names<'_>, out: &mut String) {
        let Some((comparison, other)) = self.against else { return };
        let mut body = String::new();
        for (difference, what) in [(&comparison.newly, "newly stopped"), (&comparison.no_longer, "no longer stopped")] {
            let _ = writeln!(body, "<h3>{} requests {what}</h3>\n<ul>", grouped(difference.requests));
            for (rule, count) in difference.by_rule() {
                let _ = writeln!(body, "<li>{} by {}</li>", grouped(count), escaped(rule));
            }
            for (kind, name, own) in difference.subjects.top(self.top) {
                let name = escaped(&names.shown(kind, name));
                let _ = writeln!(body, "<li>{} of {} {name}</li>", grouped(own.stopped()), kind.name());
            }
            body.push_str("</ul>\n");
        }
        section(out, &format!("Against {}", escaped(other)), &body);
    }
}
