//! The report of a replay as one self-contained HTML page with plots, for light and dark screens and for print.

mod plots;

use std::fmt::Write as _;

use threshold_core::DigestKey;
use threshold_core::text::printable;

use super::report::{Replayed, grouped, limit_text, moment, share};
use super::top_subjects::Kind;

/// How many subjects the page lists.
const SUBJECTS: usize = 15;

/// Escapes text for HTML.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
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

/// Shows names on the page. A page may be passed on, so names are hidden as in log lines.
struct Names<'r> {
    replayed: &'r Replayed<'r>,
    key: DigestKey,
}

impl<'r> Names<'r> {
    fn new(replayed: &'r Replayed<'r>) -> Self {
        // A random key for each page: with a known key, a reader could test guesses of a name against its digest.
        Self { replayed, key: DigestKey::new(rand::random()) }
    }

    fn shown(&self, kind: Kind, name: &str) -> String {
        let identity = self.replayed.policy.identity();
        let secret = match kind {
            Kind::User => identity.hides_users(),
            Kind::Tenant => identity.secret_tenant,
            Kind::Ip => false,
        };
        let hidden = secret || (!identity.log_identifiers && kind != Kind::Tenant);
        if hidden { self.key.redact(name) } else { name.to_owned() }
    }
}

impl Replayed<'_> {
    /// Builds the page.
    pub(super) fn html(&self) -> String {
        let names = Names::new(self);
        let title = format!("Rehearsal of {}", escaped(self.name));
        let mut out = format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
             <style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        );
        let tally = self.tally;
        let _ = writeln!(
            out,
            "<p>{} requests from <time>{}</time> until <time>{}</time>.</p>",
            grouped(tally.requests),
            moment(tally.from),
            moment(tally.until)
        );
        self.cards(&mut out);
        section(&mut out, "Requests and blocks over time", &plots::over_time(self));
        section(&mut out, "Requests per subject against the limit", &plots::against_limits(self));
        self.subjects_section(&names, &mut out);
        section(&mut out, "Hour and weekday", &plots::week(self));
        self.rules_table(&mut out);
        self.against_section(&names, &mut out);
        self.notes_section(&mut out);
        out.push_str("</main>\n</body>\n</html>\n");
        out
    }

    fn cards(&self, out: &mut String) {
        let tally = self.tally;
        out.push_str("<dl class=\"cards\">\n");
        for (name, count) in tally.by_verdict() {
            let part = share(count, tally.requests);
            let _ = writeln!(out, "<div><dt>{name}</dt><dd>{}<small>{part}</small></dd></div>", grouped(count));
        }
        let [addresses, ..] = &tally.subjects;
        let (all, touched) = (addresses.count(|_| true), addresses.count(|subject| subject.touched));
        let about = if addresses.is_exact() { "" } else { "about " };
        let _ = writeln!(
            out,
            "<div><dt>addresses touched</dt><dd>{about}{}<small>of {}, {}</small></dd></div>\n</dl>",
            grouped(touched),
            grouped(all),
            share(touched, all)
        );
    }

    fn subjects_section(&self, names: &Names<'_>, out: &mut String) {
        let top = self.tally.top_subjects.top(SUBJECTS);
        let rows: Vec<(String, u64, String)> = top
            .iter()
            .map(|(kind, name, own)| {
                let name = format!("{} {}", kind.name(), names.shown(*kind, name));
                let when = format!("{} to {}", moment(own.first), moment(own.last));
                (name, own.stopped().max(own.warned.saturating_add(own.slowed)), when)
            })
            .collect();
        section(out, "Most affected subjects", &plots::subjects(&rows));
    }

    fn rules_table(&self, out: &mut String) {
        let mut rows = String::from(
            "<table>\n<tr><th>layer</th><th>rule</th><th>limit</th><th>met</th><th>full</th><th>denied</th><th>banned</th>\
             <th>warned</th></tr>\n",
        );
        for (rule, own) in self.policy.rules().iter().zip(&self.tally.rules) {
            let _ = writeln!(
                rows,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
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
        rows.push_str("</table>\n");
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

    fn notes_section(&self, out: &mut String) {
        let counts = self.counts;
        let mut items: Vec<String> = self.notes();
        items.extend(counts.problems.iter().cloned());
        if counts.unreadable > 0 {
            items.push(format!("{} of {} lines could not be read.", grouped(counts.unreadable), grouped(counts.lines)));
        }
        if counts.late > 0 {
            items.push(format!("{} lines came too late to be put in their place.", grouped(counts.late)));
        }
        if !self.policy.identity().log_identifiers {
            items.push(
                "Addresses and users are shown as digests, since the policy has log_identifiers = false.".to_owned(),
            );
        }
        let items: String = items.iter().map(|item| format!("<li>{}</li>\n", escaped(item))).collect();
        if !items.is_empty() {
            section(out, "Notes", &format!("<ul>\n{items}</ul>\n"));
        }
    }
}

fn section(out: &mut String, title: &str, body: &str) {
    let _ = write!(out, "<section>\n<h2>{title}</h2>\n{body}</section>\n");
}

/// Colours have names, so that the dark page differs from the others only in what the names mean. What scales with a plot
/// is written larger where plots are small.
const STYLE: &str = "
:root{--paper:#fff;--ink:#1c2430;--faint:#5d6675;--line:#d9dee7;--calm:#9db2d6;--c0:#c4320a;--c1:#175cd3;--c2:#6941c6;\
--c3:#027a48;--c4:#a37000;--c5:#c11574;--c6:#667085;--heat:23,92,211;--stop:196,50,10}
@media screen and (prefers-color-scheme:dark){:root{--paper:#12161d;--ink:#e6e9ef;--faint:#98a2b3;--line:#2c3442;\
--calm:#5a70a0;--c0:#ff7a52;--c1:#6ea8ff;--c2:#b497ff;--c3:#4ade9a;--c4:#f5c542;--c5:#ff7fb0;--c6:#98a2b3;\
--heat:110,168,255;--stop:255,122,82}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.5 system-ui,sans-serif}
main{max-width:68rem;margin:0 auto;padding:1.5rem}
h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .5rem}
h3{font-size:1rem;margin:1rem 0 .25rem;overflow-wrap:anywhere}time{white-space:nowrap}li{overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.75rem;margin:1rem 0}
.cards div{border:1px solid var(--line);border-radius:.5rem;padding:.5rem .75rem}
dt{color:var(--faint)}dd{margin:0;font-size:1.25rem;font-variant-numeric:tabular-nums}
small{display:block;font-size:.8rem;color:var(--faint)}
svg{width:100%;height:auto;display:block}
svg text{font:14px system-ui,sans-serif;fill:var(--ink)}svg .faint{fill:var(--faint)}
.grid svg text{font-size:26px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(18rem,1fr));gap:1rem;align-items:end}
.axis{margin:.5rem 0 .15rem;font-size:.8rem;color:var(--faint)}.ends{display:flex;justify-content:space-between}
.key{display:flex;flex-wrap:wrap;gap:.25rem 1rem;margin:.25rem 0;font-size:.85rem}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:.15rem;margin-right:.35rem;vertical-align:-.1rem}
.bars{list-style:none;margin:0;padding:0;font-size:.85rem;font-variant-numeric:tabular-nums}
.bars li{display:grid;grid-template-columns:16rem 1fr;align-items:center;padding:.1rem 0}
.bars span{padding-right:.75rem}
.bars b{display:flex;align-items:center;gap:.5rem;font-weight:400}
.bars i{height:1rem;min-width:1px;background:var(--c0)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}
section{overflow-x:auto}
th,td{text-align:right;padding:.2rem .5rem;border-bottom:1px solid var(--line)}
th:nth-child(-n+3),td:nth-child(-n+3){text-align:left}td:nth-child(2){min-width:9rem;overflow-wrap:anywhere}
@media screen and (max-width:45rem){main{padding:1rem}svg text{font-size:25px}table{font-size:.75rem}th,td{padding:.2rem .3rem}\
td:nth-child(2){min-width:6rem}.bars li{grid-template-columns:1fr}}
@media print{html{font-size:11px}:root{--ink:#000;--faint:#444;--line:#bbb}main{max-width:none;padding:0}\
section{overflow:visible;break-inside:avoid}h2,h3{break-after:avoid}svg,.grid div,li,tr{break-inside:avoid}\
.cards{grid-template-columns:repeat(6,1fr)}.grid{grid-template-columns:1fr 1fr}.bars li{grid-template-columns:14rem 1fr}\
body{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
";
