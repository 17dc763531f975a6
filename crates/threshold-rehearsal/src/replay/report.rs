//! The report of a replay, as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};
use threshold_core::limit::Limit;
use threshold_core::policy::{Mode, Per, Policy, Rule};
use threshold_core::text::printable;
use threshold_core::{DigestKey, Verdict};

use super::compare::{Comparison, Difference};
use super::tally::{LAYERS, PenaltyCounts, RuleTally, Tally};
use super::top_subjects::{Kind, SubjectCounts};
use super::zone::Zone;
use crate::traffic::LineCounts;

/// A finished replay.
pub(super) struct Replayed<'r> {
    pub(super) policy: &'r Policy,
    pub(super) name: &'r str,
    pub(super) tally: &'r Tally,
    pub(super) counts: &'r LineCounts,
    /// The comparison with another policy, and its name.
    pub(super) against: Option<(&'r Comparison, &'r str)>,
    pub(super) top: usize,
    pub(super) zone: &'r Zone,
    /// The key of the page's digests.
    pub(super) key: DigestKey,
}

/// Describes why there is nothing to report. `wanted` is what was looked for: a request or a login.
pub(super) fn nothing_read(counts: &LineCounts, wanted: &str) -> String {
    // The most likely mistake first: an auth log has no requests at all, and each of its lines would look broken.
    if counts.logins > 0 {
        return format!(
            "none of the log's {} lines is a request, but {} are logins: add --login, which rehearses [login]",
            grouped(counts.lines),
            grouped(counts.logins)
        );
    }
    let mut text = match (counts.lines, counts.problems.is_empty()) {
        (0, true) => "the log is empty".to_owned(),
        (0, false) => "the log could not be read".to_owned(),
        (lines, _) => format!("none of the log's {lines} lines is a {wanted}"),
    };
    text.push_str(&unreadable_lines(counts));
    text
}

/// Formats a number with commas between thousands.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        // Counted from the right, so that the first group may have fewer digits.
        if index > 0 && digits.len().saturating_sub(index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a share in percent. A small one is not rounded to 0.
#[expect(clippy::cast_precision_loss, reason = "a percentage has three digits")]
pub(crate) fn share(part: u64, whole: u64) -> String {
    match (part, whole) {
        (0, _) | (_, 0) => "0 %".to_owned(),
        (part, whole) => {
            let percent = part as f64 * 100.0 / whole as f64;
            if percent < 0.01 { "< 0.01 %".to_owned() } else { format!("{percent:.2} %") }
        }
    }
}

pub(super) fn unreadable_lines(counts: &LineCounts) -> String {
    let mut text = String::new();
    for problem in &counts.problems {
        let _ = write!(text, "\n  {}", printable(problem));
    }
    for bad in &counts.shown {
        let _ = write!(text, "\n  {}:{}: {}", printable(&bad.log), bad.number, bad.why);
        if !bad.text.is_empty() {
            let _ = write!(text, ": {}", bad.text);
        }
    }
    let more = counts.unreadable.saturating_sub(u64::try_from(counts.shown.len()).unwrap_or(0));
    if more > 0 {
        let _ = write!(text, "\n  and {} more", grouped(more));
    }
    text
}

impl Replayed<'_> {
    /// Formats a time in RFC 3339, in the zone of the report.
    pub(super) fn moment(&self, micros: u64) -> String {
        self.zone.moment(micros)
    }

    /// Returns a subject's name, or its digest if the policy marks it as secret.
    pub(super) fn shown(&self, kind: Kind, name: &str) -> String {
        let identity = self.policy.identity();
        let secret = match kind {
            Kind::Ip => false,
            Kind::User => identity.hides_users(),
            Kind::Tenant => identity.secret_tenant,
        };
        if secret { self.policy.key().redact(name) } else { name.to_owned() }
    }

    pub(super) fn reason(&self, index: usize) -> &str {
        self.policy.rules().get(index).map_or("a penalty or list", |rule| rule.name.as_ref())
    }

    pub(super) fn text(&self) -> String {
        let tally = self.tally;
        let mut out = String::new();
        let _ = writeln!(out, "{} on {} requests", printable(self.name), grouped(tally.requests));
        let _ = writeln!(out, "from {} until {}\n", self.moment(tally.from), self.moment(tally.until));
        for (name, count) in tally.by_verdict() {
            let _ = writeln!(out, "  {name:<8} {:>12}  {:>9}", grouped(count), share(count, tally.requests));
        }
        self.touched_lines(&mut out);
        self.rule_lines(&mut out);
        self.subject_lines(&mut out);
        self.against_lines(&mut out);
        self.note_lines(&mut out);
        out
    }

    fn touched_lines(&self, out: &mut String) {
        let names = [("addresses", "address"), ("users", "user"), ("tenants", "tenant")];
        for (subjects, (many, one)) in self.tally.subjects.iter().zip(names) {
            let (all, touched) = (subjects.count(|_| true), subjects.count(|subject| subject.touched));
            if all == 0 {
                continue;
            }
            let about = if subjects.is_exact() { "" } else { "about " };
            let noun = if all == 1 { one } else { many };
            let _ = writeln!(
                out,
                "\n{about}{} of {about}{} {noun} touched ({})",
                grouped(touched),
                grouped(all),
                share(touched, all)
            );
        }
    }

    fn rule_lines(&self, out: &mut String) {
        let rules = self.policy.rules();
        let width = rules.iter().map(|rule| rule.name.chars().count()).max().unwrap_or(4).max(4);
        let _ = writeln!(
            out,
            "\n  {:<8}  {:<width$}  {:>12}  {:>10}  {:>10}  {:>8}  {:>8}  when",
            "layer", "rule", "met", "full", "denied", "banned", "warned"
        );
        for (rule, own) in rules.iter().zip(&self.tally.rules) {
            let mode = if rule.mode == Mode::Observe { " (observed only)" } else { "" };
            let when = own
                .first
                .map(|first| format!("{} to {}", self.moment(first), self.moment(own.last)))
                .unwrap_or_default();
            let line = format!(
                "  {:<8}  {:<width$}  {:>12}  {:>10}  {:>10}  {:>8}  {:>8}  {when}{mode}",
                rule.layer,
                rule.name,
                grouped(own.met),
                grouped(own.full),
                grouped(own.denied),
                grouped(own.banned),
                grouped(own.warned),
            );
            let _ = writeln!(out, "{}", line.trim_end());
        }
        let names = LAYERS.iter().map(|layer| layer.name()).chain(["lists"]);
        for (own, name) in self.tally.penalties.iter().zip(names) {
            let PenaltyCounts { denied, banned, slowed } = *own;
            if denied.saturating_add(banned).saturating_add(slowed) > 0 {
                let what = if name == "lists" { "lists, or no plan" } else { "penalties" };
                let _ = writeln!(
                    out,
                    "  {name:<8}  {what:<width$}  {:>12}  {:>10}  {:>10}  {:>8}  {:>8}  {} slowed",
                    "",
                    "",
                    grouped(denied),
                    grouped(banned),
                    "",
                    grouped(slowed),
                );
            }
        }
    }

    fn subject_lines(&self, out: &mut String) {
        if self.tally.first.is_empty() {
            return;
        }
        let _ = writeln!(out, "\nFirst touched:");
        for own in &self.tally.first {
            let name = printable(&self.shown(own.kind, &own.name)).into_owned();
            let _ = writeln!(
                out,
                "  {}  {:<5} {} {name} by {}",
                self.moment(own.at),
                own.verdict.name(),
                own.kind.name(),
                self.reason(own.reason)
            );
        }
        let _ = writeln!(out, "\nTouched most:");
        for (kind, name, own) in self.tally.top_subjects.top(self.top) {
            let name = printable(&self.shown(kind, name)).into_owned();
            let _ = writeln!(
                out,
                "  {} {name}: {}, {} to {}",
                kind.name(),
                touches(own),
                self.moment(own.first),
                self.moment(own.last)
            );
        }
        // Shown, because a reader would otherwise take the figures for exact ones.
        let undercount = self.tally.top_subjects.undercount();
        if undercount > 0 {
            let _ = writeln!(
                out,
                "  (more were touched than are kept: each figure may be up to {} too low)",
                grouped(undercount)
            );
        }
    }

    fn against_lines(&self, out: &mut String) {
        let Some((comparison, name)) = self.against else { return };
        let name = printable(name);
        let directions = [
            (&comparison.newly, format!("newly stopped, that {name} lets through")),
            (&comparison.no_longer, format!("no longer stopped, that {name} stops")),
        ];
        for (difference, what) in directions {
            let _ = writeln!(out, "\n{} requests {what}", grouped(difference.requests));
            for (rule, count) in difference.by_rule() {
                let _ = writeln!(out, "  {:>10}  by {rule}", grouped(count));
            }
            for (kind, name, own) in difference.subjects.top(self.top) {
                let name = printable(&self.shown(kind, name)).into_owned();
                let _ = writeln!(out, "  {:>10}  {} {name}", grouped(own.stopped()), kind.name());
            }
        }
    }

    fn note_lines(&self, out: &mut String) {
        let counts = self.counts;
        if counts.unreadable > 0 || !counts.problems.is_empty() {
            let (bad, all) = (grouped(counts.unreadable), grouped(counts.lines));
            let _ = writeln!(out, "\n{bad} of {all} lines could not be read:{}", unreadable_lines(counts));
        }
        if counts.late > 0 {
            let late = grouped(counts.late);
            let _ =
                writeln!(out, "\n{late} lines came later than --reorder allows, and count from when they were read.");
        }
        for note in self.notes() {
            let _ = writeln!(out, "\n{note}");
        }
    }

    /// Returns notes on what the policy needs and the log does not have.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let rules = self.policy.rules();
        let held: Vec<&str> = rules.iter().filter(|rule| !is_rehearsed(rule)).map(|rule| rule.name.as_ref()).collect();
        if !held.is_empty() {
            notes.push(format!(
                "Not rehearsed, since a log does not say how long requests lasted: {}.",
                held.join(", ")
            ));
        }
        if self.policy.counts_bytes() && !self.tally.saw_bytes {
            let note = "The log has no sizes of requests, so limits in bytes were never charged; name the field with \
                        --field bytes=NAME.";
            notes.push(note.to_owned());
        }
        if self.tally.without_address > 0 {
            notes.push(format!(
                "{} requests have no address, and rules by address refuse such; name the field with --field ip=NAME.",
                grouped(self.tally.without_address)
            ));
        }
        if self.counts.logins > 0 {
            notes.push(format!(
                "{} lines look like logins rather than requests; to rehearse [login], add --login.",
                grouped(self.counts.logins)
            ));
        }
        let [_, users, tenants] = &self.tally.subjects;
        for (per, what, seen) in [(Per::User, "user", users), (Per::Tenant, "tenant", tenants)] {
            if rules.iter().any(|rule| rule.per.contains(&per)) && seen.values().next().is_none() {
                notes.push(format!(
                    "The log names no {what}s, so rules by {what} met nobody, or counted by address; name the field with \
                     --{what}-field NAME."
                ));
            }
        }
        notes
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        let tally = self.tally;
        let [addresses, users, tenants] = &tally.subjects;
        let count = |verdict| tally.of(verdict);
        let mut value = json!({
            "lines": self.counts.lines,
            "unreadable": self.counts.unreadable,
            "requests": tally.requests,
            "allowed": count(Verdict::Allow),
            "warned": count(Verdict::Warn),
            "slowed": count(Verdict::Slow),
            "denied": count(Verdict::Deny),
            "banned": count(Verdict::Ban),
            "subjects": addresses.count(|_| true),
            "touched": addresses.count(|subject| subject.touched),
            "exact": addresses.is_exact(),
            "users": { "all": users.count(|_| true), "touched": users.count(|subject| subject.touched) },
            "tenants": { "all": tenants.count(|_| true), "touched": tenants.count(|subject| subject.touched) },
            "from": self.moment(tally.from),
            "until": self.moment(tally.until),
            "late": self.counts.late,
            "rules": self.rules_json(),
            "penalties": self.penalties_json(),
            "first": tally.first.iter().map(|own| json!({
                "at": self.moment(own.at),
                "kind": own.kind.name(),
                "subject": self.shown(own.kind, &own.name),
                "verdict": own.verdict.name(),
                "rule": self.policy.rules().get(own.reason).map(|rule| rule.name.as_ref()),
            })).collect::<Vec<_>>(),
            "worst": tally.top_subjects.top(self.top).into_iter().map(|own| self.stopped_json(own)).collect::<Vec<_>>(),
            "worstUndercount": tally.top_subjects.undercount(),
            "series": self.series_json(),
            "unreadableLines": self.counts.shown.iter().map(|bad| json!({
                "log": bad.log, "line": bad.number, "why": bad.why, "text": bad.text,
            })).collect::<Vec<_>>(),
            "problems": self.counts.problems,
            "notes": self.notes(),
        });
        if let (Some((comparison, name)), Some(object)) = (self.against, value.as_object_mut()) {
            let against = json!({
                "policy": name,
                "newlyStopped": self.difference_json(&comparison.newly),
                "noLongerStopped": self.difference_json(&comparison.no_longer),
            });
            object.insert("against".to_owned(), against);
        }
        let mut text = serde_json::to_string_pretty(&value)?;
        text.push('\n');
        Ok(text)
    }

    fn rules_json(&self) -> Vec<Value> {
        let peaks = self.peaks_by_rule();
        let rules = self.policy.rules().iter().zip(&self.tally.rules).zip(peaks);
        let rule_json = |((rule, own), peaks): ((&Rule, &RuleTally), Vec<u64>)| {
            let rehearsed = is_rehearsed(rule);
            json!({
                "rule": rule.name.as_ref(),
                "layer": rule.layer.name(),
                "mode": if rule.mode == Mode::Observe { "observe" } else { "enforce" },
                "limit": limit_text(rule),
                "met": own.met,
                "full": own.full,
                "denied": own.denied,
                "banned": own.banned,
                "warned": own.warned,
                "first": own.first.map(|first| self.moment(first)),
                "last": own.first.map(|_| self.moment(own.last)),
                // Null and not 0 for a rule that was not rehearsed: 0 would say that no subject came near its limit.
                "keys": rehearsed.then(|| self.keys(peaks.len())),
                "keysCharged": rehearsed.then(|| self.keys(peaks.iter().filter(|used| **used > 0).count())),
                "peakUse": rehearsed.then(|| {
                    json!({ "median": quantile(&peaks, 50), "p99": quantile(&peaks, 99), "most": peaks.last() })
                }),
            })
        };
        rules.map(rule_json).collect()
    }

    /// Returns how many keys there are for this many that were kept.
    fn keys(&self, kept: usize) -> u64 {
        u64::try_from(kept).unwrap_or(u64::MAX).saturating_mul(self.tally.peaks.factor())
    }

    /// Returns the highest use of each key, by rule and in ascending order.
    pub(super) fn peaks_by_rule(&self) -> Vec<Vec<u64>> {
        let mut peaks: Vec<Vec<u64>> = vec![Vec::new(); self.policy.rules().len()];
        // One pass over all peaks: a pass for each rule would read the large table many times.
        for peak in self.tally.peaks.values() {
            if let Some(own) = peaks.get_mut(peak.rule) {
                own.push(peak.used);
            }
        }
        for own in &mut peaks {
            own.sort_unstable();
        }
        peaks
    }

    fn penalties_json(&self) -> Vec<Value> {
        let names = LAYERS.iter().map(|layer| layer.name()).chain(["lists"]);
        let own = self.tally.penalties.iter().zip(names);
        let some = own.filter(|(own, _)| own.denied.saturating_add(own.banned).saturating_add(own.slowed) > 0);
        some.map(|(own, name)| json!({"layer": name, "denied": own.denied, "banned": own.banned, "slowed": own.slowed}))
            .collect()
    }

    fn stopped_json(&self, (kind, name, own): (Kind, &str, &SubjectCounts)) -> Value {
        json!({
            "kind": kind.name(),
            "subject": self.shown(kind, name),
            "denied": own.denied,
            "banned": own.banned,
            "warned": own.warned,
            "slowed": own.slowed,
            "first": self.moment(own.first),
            "last": self.moment(own.last),
        })
    }

    fn difference_json(&self, difference: &Difference) -> Value {
        let rules: Vec<Value> =
            difference.by_rule().into_iter().map(|(rule, count)| json!({"rule": rule, "requests": count})).collect();
        let top = difference.subjects.top(self.top);
        let subjects: Vec<Value> = top.into_iter().map(|own| self.stopped_json(own)).collect();
        json!({"requests": difference.requests, "rules": rules, "subjects": subjects})
    }

    /// Encodes the steps that have requests.
    fn series_json(&self) -> Value {
        // A log with a gap of days would otherwise be mostly zeros.
        let steps = self.tally.series.steps().filter(|(_, step)| step.requests > 0);
        let steps = steps.map(|(at, step)| {
            json!({
                "at": self.moment(at.saturating_mul(1_000_000)),
                "requests": step.requests,
                "stopped": step.stopped.iter().sum::<u64>(),
            })
        });
        json!({"stepSec": self.tally.series.width(), "steps": steps.collect::<Vec<_>>()})
    }
}

/// Lists the verdicts on a subject: "3 denied, 1 warned".
pub(super) fn touches(own: &SubjectCounts) -> String {
    let counts = [(own.denied, "denied"), (own.banned, "banned"), (own.warned, "warned"), (own.slowed, "slowed")];
    let some = counts.iter().filter(|(count, _)| *count > 0);
    some.map(|(count, what)| format!("{} {what}", grouped(*count))).collect::<Vec<_>>().join(", ")
}

/// Whether a log is enough to decide the rule. It does not say how long requests lasted, which a concurrency limit needs.
pub(super) fn is_rehearsed(rule: &Rule) -> bool {
    !rule.fixed_limit().is_some_and(Limit::is_concurrency)
}

/// Returns a rule's limit as written, or `tier`.
pub(super) fn limit_text(rule: &Rule) -> Option<String> {
    rule.notation().or_else(|| rule.is_by_tier().then(|| "tier".to_owned()))
}

/// Returns the value at a percentile of sorted values.
pub(crate) fn quantile(sorted: &[u64], percent: usize) -> Option<u64> {
    let at = sorted.len().checked_sub(1)?.saturating_mul(percent).checked_div(100)?;
    sorted.get(at).copied()
}
