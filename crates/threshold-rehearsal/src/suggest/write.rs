//! Chooses the limits, and writes them as a policy with the figures that they are based on.

use std::fmt::Write as _;

use super::demand::Demand;
use super::endpoints::{LeftOut, MAX_TARGETS, READS_FROM, STATIC, Target, WRITES_FROM};
use crate::replay::{grouped, quantile, share};
use crate::traffic::LineCounts;

/// The smallest limit: a lower one would stop people who reload a page a few times.
const MIN_LIMIT: u64 = 5;
/// How many of the endpoints beyond the most are named.
const MAX_NAMED: usize = 10;
/// Words in the paths of logins.
const LOGIN_WORDS: [&str; 6] = ["login", "signin", "sign-in", "password", "auth", "otp"];

/// One limit, and the figures that it is based on.
struct Limit<'t> {
    target: &'t Target,
    index: usize,
    most: u64,
    busiest: Vec<u64>,
}

/// The suggested limits.
pub(super) struct Suggestion<'t> {
    limits: Vec<Limit<'t>>,
    demand: &'t Demand,
    share: f64,
    requests: u64,
    unreadable: u64,
    /// Sentences about what has no rule.
    left_out: Vec<String>,
}

impl<'t> Suggestion<'t> {
    /// Chooses limits that together affect at most this share of the addresses.
    pub(super) fn new(
        share: f64,
        targets: &'t [Target],
        demand: &'t Demand,
        requests: u64,
        counts: &LineCounts,
    ) -> Self {
        let with_demand = targets.iter().enumerate().map(|(index, target)| (index, target, demand.busiest(index)));
        let with_demand: Vec<_> = with_demand.filter(|(_, _, busiest)| !busiest.is_empty()).collect();
        // An address is affected if it exceeds any limit, so the allowance is divided among the limits.
        let each = allowance(share, demand).checked_div(with_demand.len()).unwrap_or(0);
        let limits = with_demand.into_iter().map(|(index, target, busiest)| {
            // The limit is the demand of the busiest address after the allowed ones are skipped, so that only those
            // exceed it.
            let at = busiest.len().saturating_sub(1).saturating_sub(each);
            // Rounded up and never down: a smaller limit would affect more addresses than allowed.
            let most = rounded_up(busiest.get(at).copied().unwrap_or(0).max(MIN_LIMIT));
            Limit { target, index, most, busiest }
        });
        Self { limits: limits.collect(), demand, share, requests, unreadable: counts.unreadable, left_out: Vec::new() }
    }

    /// Notes the endpoints that have no limit of their own.
    pub(super) fn without(mut self, left_out: &LeftOut) -> Self {
        if left_out.rare > 0 {
            let least = if left_out.more_rare { "at least " } else { "" };
            self.left_out.push(format!(
                "{least}{} endpoints with few requests: less than 1 in {READS_FROM} of all that read, or {WRITES_FROM} that write",
                grouped(u64::try_from(left_out.rare).unwrap_or(u64::MAX))
            ));
        }
        if left_out.odd > 0 {
            self.left_out.push(format!("{} endpoints whose path is too long or too odd for a rule", left_out.odd));
        }
        for (name, requests) in left_out.beyond.iter().take(MAX_NAMED) {
            self.left_out.push(format!(
                "{name}, with {} requests: {MAX_TARGETS} others have more, or write",
                grouped(*requests)
            ));
        }
        if let Some(more) = left_out.beyond.len().checked_sub(MAX_NAMED).filter(|more| *more > 0) {
            self.left_out.push(format!("{more} more endpoints"));
        }
        self
    }

    /// Removes a rule, notes why, and returns whether it was there.
    pub(super) fn drop_rule(&mut self, name: &str, why: &str) -> bool {
        let is_it = |limit: &Limit<'_>| name_of(limit.target) == name;
        let Some(limit) = self.limits.iter().find(|limit| is_it(limit)) else { return false };
        // The note names the rule itself.
        let why = why.strip_prefix(&format!("\"{name}\" has no effect: ")).unwrap_or(why);
        self.left_out.insert(0, format!("{name}, {}: {why}", limit.notation()));
        self.limits.retain(|limit| !is_it(limit));
        true
    }

    pub(super) fn text(&self) -> String {
        let demand = self.demand;
        let all = demand.addresses();
        let chosen: Vec<(usize, u64)> = self.limits.iter().map(|limit| (limit.index, limit.most)).collect();
        let touched = demand.touched(&chosen);
        let about = if demand.is_exact() { "" } else { "about " };
        let mut out =
            String::from("# Limits suggested from a log. Rehearse them with `threshold replay`, and watch them with\n");
        let _ = writeln!(out, "# mode = \"observe\" before they bind.");
        let _ =
            writeln!(out, "#\n# The log has {} requests of {about}{} addresses.", grouped(self.requests), grouped(all));
        if self.unreadable > 0 {
            let _ = writeln!(out, "# {} of its lines could not be read.", grouped(self.unreadable));
        }
        let percent = self.share * 100.0;
        let _ = writeln!(
            out,
            "# All limits together would have touched {about}{} of them ({}); the bound",
            grouped(touched),
            share(touched, all)
        );
        let _ = writeln!(out, "# was {percent} %.");
        if !demand.is_exact() {
            let _ = writeln!(
                out,
                "# Figures of addresses are those of a sample: one address in {} was counted.",
                demand.factor()
            );
        }
        out.push_str("\n# Behind a proxy, say so, or every client is the proxy:\n#[identity]\n#trusted_proxies = [\"127.0.0.1/32\"]\n#client_ip = \"x-forwarded-for\"\n");
        if self.limits.iter().any(|limit| *limit.target == Target::Writes) {
            out.push_str("\n[[category]]\nname   = \"writes\"\nmethod = [\"POST\", \"PUT\", \"PATCH\", \"DELETE\"]\n");
        }
        for limit in &self.limits {
            limit.write(demand, &mut out);
        }
        if !self.left_out.is_empty() {
            out.push_str("\n# Left out:\n");
        }
        for what in &self.left_out {
            let _ = writeln!(out, "# - {what}");
        }
        out
    }
}

impl Limit<'_> {
    fn notation(&self) -> String {
        let unit = if self.target.window() == 60 { "min" } else { "h" };
        format!("{}/{unit}", self.most)
    }

    fn write(&self, demand: &Demand, out: &mut String) {
        let window = if self.target.window() == 60 { "minute" } else { "hour" };
        let figures = |percent| quantile(&self.busiest, percent).map(grouped).unwrap_or_default();
        let _ = writeln!(
            out,
            "\n# In its busiest {window} half of the addresses sent up to {}, 99 % up to {}, the busiest {}.",
            figures(50),
            figures(99),
            figures(100)
        );
        let touched = demand.touched(&[(self.index, self.most)]);
        let _ = writeln!(out, "# This limit touches {} of {}.", grouped(touched), grouped(demand.addresses()));
        let _ = writeln!(out, "[[rule]]\nname      = \"{}\"", name_of(self.target));
        let is_endpoint = matches!(self.target, Target::Static | Target::Endpoint { .. });
        let layer = if is_endpoint { "endpoint" } else { "edge" };
        let _ = writeln!(out, "layer     = \"{layer}\"");
        match self.target {
            Target::Minute | Target::Hour => {}
            Target::Writes => out.push_str("match     = { category = \"writes\" }\n"),
            Target::Static => {
                let paths = STATIC.map(|ending| format!("\"**.{ending}\"")).join(", ");
                let _ = writeln!(out, "match     = {{ method = [\"GET\", \"HEAD\"], path = [{paths}] }}");
            }
            Target::Endpoint { method, pattern } => {
                let _ = writeln!(out, "match     = {{ method = \"{method}\", path = \"{pattern}\" }}");
            }
        }
        let limit = self.notation();
        let _ = writeln!(out, "per       = [\"ip\"]\nlimit     = \"{limit}\"\nalgorithm = \"fixed-window\"");
        if let Target::Endpoint { pattern, .. } = self.target
            // Without its store, such a rule denies: passwords could be guessed without a limit for as long as the
            // store is down.
            && LOGIN_WORDS.iter().any(|word| pattern.contains(word))
        {
            out.push_str("on_store_error = \"closed\"\n");
        }
    }
}

fn name_of(target: &Target) -> String {
    match target {
        Target::Minute => "address".to_owned(),
        Target::Hour => "address-hour".to_owned(),
        Target::Writes => "writes".to_owned(),
        Target::Static => "static-files".to_owned(),
        Target::Endpoint { method, pattern } => format!("{method}:{pattern}"),
    }
}

/// Returns how many of the counted addresses may be affected. A sample may miss affected addresses, so two standard deviations
/// are left as a margin.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a count is no larger than the count, and no smaller than nothing"
)]
fn allowance(share: f64, demand: &Demand) -> usize {
    let counted = demand.addresses().checked_div(demand.factor()).unwrap_or(0) as f64;
    let expected = counted * share;
    let free = if demand.is_exact() { 0.0 } else { 2.0 * expected.sqrt() };
    (expected - free).max(0.0).floor() as usize
}

/// Rounds up to a figure of two significant digits; from 20 on, the second is 0 or 5.
fn rounded_up(figure: u64) -> u64 {
    let mut scale: u64 = 1;
    while figure.checked_div(scale).unwrap_or(0) >= 100 {
        scale = scale.saturating_mul(10);
    }
    // Round figures tell a reader that the limit is an estimate, and they stay the same when the log changes a
    // little.
    let step = if figure.checked_div(scale).unwrap_or(0) >= 20 { scale.saturating_mul(5) } else { scale };
    figure.div_ceil(step.max(1)).saturating_mul(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_rounded_up_and_never_down() {
        for (figure, expect) in
            [(5, 5), (7, 7), (19, 19), (21, 25), (39, 40), (101, 110), (199, 200), (201, 250), (999, 1_000)]
        {
            assert_eq!(rounded_up(figure), expect, "{figure}");
        }
        for figure in 1..20_000 {
            assert!(rounded_up(figure) >= figure);
        }
    }
}
