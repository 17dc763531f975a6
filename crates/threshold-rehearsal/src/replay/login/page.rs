//! The page of a replay of logins.

use std::fmt::Write as _;

use super::super::page::{
    Names, SUBJECTS, SubjectRow, TimePlot, cards, document, escaped, notes_section, section, subjects,
};
use super::super::report::{grouped, share};
use super::super::top_subjects::Kind;
use super::REASONS;
use super::report::{LoginReport, reason};

/// How many accounts that were let in at the time the page lists.
const MAX_LET_IN_ROWS: usize = 100;

impl LoginReport<'_> {
    /// Builds the page.
    pub(super) fn html(&self) -> String {
        let names = Names { identity: self.identity, key: self.page_key };
        let (logins, zone) = (self.logins, self.zone);
        let mut out = format!(
            "<p>{} logins from <time>{}</time> until <time>{}</time>. Times are in {}.</p>\n",
            grouped(logins.attempts),
            zone.moment(logins.from),
            zone.moment(logins.until),
            escaped(&zone.name())
        );
        self.cards(&mut out);
        let plot = TimePlot {
            series: &logins.series,
            zone,
            what: "attempts",
            stopped: "held",
            reasons: REASONS.map(str::to_owned).to_vec(),
        };
        section(&mut out, "Attempts over time", &plot.draw());
        section(&mut out, "Held, and let in at the time", &self.let_in(&names));
        for (kind, title) in [(Kind::User, "Accounts held most"), (Kind::Ip, "Addresses held most")] {
            section(&mut out, title, &subjects(&self.rows(&names, kind)));
        }
        let mut notes =
            vec!["A log knows no devices: every login is rehearsed as one from an unknown device.".to_owned()];
        if self.counts.others > 0 {
            notes.push(format!("{} lines are about other things.", grouped(self.counts.others)));
        }
        notes.extend(names.note());
        notes_section(&mut out, notes, self.counts);
        document(&format!("Rehearsal of logins under {}", self.name), &out)
    }

    fn cards(&self, out: &mut String) {
        let attempts = self.logins.attempts;
        let mut all: Vec<(&str, String, String)> =
            self.figures().map(|(name, figure)| (name, grouped(figure), share(figure, attempts))).into_iter().collect();
        let subjects = [(&self.logins.accounts, "accounts locked"), (&self.logins.addresses, "addresses held")];
        for (subjects, what) in subjects {
            let (seen, touched) = (subjects.count(|_| true), subjects.count(|subject| subject.touched));
            let about = if subjects.is_exact() { "" } else { "about " };
            let of = format!("of {}, {}", grouped(seen), share(touched, seen));
            all.push((what, format!("{about}{}", grouped(touched)), of));
        }
        cards(out, &all);
    }

    fn let_in(&self, names: &Names<'_>) -> String {
        let all = self.logins.most_let_in();
        if all.is_empty() {
            return "<p>No login that succeeded would have been held.</p>\n".to_owned();
        }
        let mut out = String::from(
            "<p class=\"note\">These logins had the right secret and would have been refused: most likely people. Give them \
             more room, or let them log in from a known device.</p>\n<div class=\"scroll\" tabindex=\"0\"><table>\n\
             <thead><tr><th class=\"l\">account</th><th class=\"l\">address</th><th>logins</th><th class=\"l\">held by</th>\
             <th class=\"l\">first</th><th class=\"l\">last</th></tr></thead>\n<tbody>\n",
        );
        for (account, address, own) in all.iter().take(MAX_LET_IN_ROWS) {
            let _ = writeln!(
                out,
                "<tr><td class=\"l wrap\">{}</td><td class=\"l\">{}</td><td>{}</td><td class=\"l\">{}</td>\
                 <td class=\"l\">{}</td><td class=\"l\">{}</td></tr>",
                escaped(&names.shown(Kind::User, account)),
                escaped(&names.shown(Kind::Ip, address)),
                grouped(own.count),
                reason(own.reason),
                self.zone.moment(own.first),
                self.zone.moment(own.last)
            );
        }
        out.push_str("</tbody>\n</table></div>\n");
        if let Some(more) = all.len().checked_sub(MAX_LET_IN_ROWS).filter(|more| *more > 0) {
            let _ = writeln!(out, "<p class=\"note\">And {more} more.</p>");
        }
        out
    }

    fn rows(&self, names: &Names<'_>, wanted: Kind) -> Vec<SubjectRow> {
        let all = self.logins.top_subjects.top(usize::MAX);
        let own = all.into_iter().filter(|(kind, _, _)| *kind == wanted).take(SUBJECTS);
        own.map(|(kind, name, own)| {
            let locks = if own.banned > 0 { format!("{} locks, ", grouped(own.banned)) } else { String::new() };
            SubjectRow {
                name: names.shown(kind, name),
                count: own.touched(),
                figures: format!("{locks}{} tries held", grouped(own.denied)),
                when: format!("{} to {}", self.zone.moment(own.first), self.zone.moment(own.last)),
            }
        })
        .collect()
    }
}
