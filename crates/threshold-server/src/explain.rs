//! `threshold explain`: shows which rules a request meets, with their keys and limits, and why.

mod json;
mod server;

use threshold_core::explain::{Explained, PathReadings, Why};
use threshold_core::ledger::{Checked, Ledger};
use threshold_core::limit::Algorithm;
use threshold_core::path::{normalize_method, normalize_path};
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::{Facts, PlanError, Timestamp};

use crate::cli::ExplainArgs;
pub(crate) use json::live_json;
use json::offline_json;
use threshold_rehearsal::Report;
use threshold_rehearsal::source::Source;

pub(crate) fn run(args: &ExplainArgs) -> anyhow::Result<Report> {
    let Some(policy) = &args.policy else { return server::run(args) };
    let policy = Source::read(policy)?.policy()?;
    let pairs = CommandLinePairs::new(args);
    let facts = pairs.facts(args);
    let rules = policy.explain(&facts);
    // Decided on an empty store, as the first such request would be.
    let now = Timestamp::from_micros(u64::try_from(std::time::UNIX_EPOCH.elapsed()?.as_micros())?);
    let decided = Ledger::default().decide(&policy, Verb::Check, &facts, now);
    let text = if args.json {
        let mut text = serde_json::to_string_pretty(&offline_json(&policy, &facts, &rules, &decided))?;
        text.push('\n');
        text
    } else {
        to_text(&policy, args, &facts, &rules, &decided)
    };
    Ok(Report { text, code: if decided.is_ok() { 0 } else { 2 } })
}

/// The pairs of the command line, in the form that [`Facts`] borrows.
struct CommandLinePairs<'a> {
    facts: Vec<(&'a str, &'a str)>,
    headers: Vec<(&'a str, &'a str)>,
    costs: Vec<(&'a str, u64)>,
}

impl<'a> CommandLinePairs<'a> {
    fn new(args: &'a ExplainArgs) -> Self {
        let pairs = |list: &'a [(String, String)]| {
            list.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect::<Vec<_>>()
        };
        Self {
            facts: pairs(&args.facts),
            headers: pairs(&args.headers),
            costs: args.costs.iter().map(|(name, cost)| (name.as_str(), *cost)).collect(),
        }
    }

    fn facts(&'a self, args: &'a ExplainArgs) -> Facts<'a> {
        Facts {
            ip: args.ip,
            host: args.host.as_deref(),
            method: args.method.as_deref(),
            path: args.path.as_deref(),
            route: None,
            from_client: false,
            tenant: args.tenant.as_deref(),
            user: args.user.as_deref(),
            tier: args.tier.as_deref(),
            category: args.category.as_deref(),
            endpoint: args.endpoint.as_deref(),
            facts: &self.facts,
            headers: &self.headers,
            cost: args.cost,
            bytes: args.bytes,
            costs: &self.costs,
            trace: threshold_core::TraceId::default(),
        }
    }
}

fn to_text(
    policy: &Policy,
    args: &ExplainArgs,
    facts: &Facts<'_>,
    rules: &[Explained<'_>],
    decided: &Result<Checked, PlanError>,
) -> String {
    let mut out = request_line(args);
    out.push_str(&format!("category {}\n\n", policy.category_of(facts)));
    let path = policy.path_readings(facts);
    out.push_str(&readings_lines(&path));
    // Rules that do not apply are listed too: most questions are why a rule did not match.
    let (met, unmet): (Vec<_>, Vec<_>) = rules.iter().partition(|explained| explained.limit.is_some());
    if met.is_empty() {
        out.push_str("No rule limits this request.\n");
    }
    let width = |of: &dyn Fn(&Explained<'_>) -> usize| rules.iter().map(of).max().unwrap_or(0);
    let names = width(&|explained| explained.rule.name.chars().count());
    for explained in met {
        out.push_str(&met_lines(explained, names));
    }
    if !unmet.is_empty() {
        out.push_str("\nNot applied:\n");
    }
    for explained in unmet {
        let rule = explained.rule;
        out.push_str(&format!("  {:<8}  {:<names$}  {}\n", rule.layer, rule.name, explained.why));
    }
    out.push_str(&decision_lines(policy, decided, &path));
    out
}

/// Lists the readings of a path, if there are several.
fn readings_lines(path: &PathReadings) -> String {
    // Servers differ in how they decode and merge slashes, and a client may aim at the difference. One reading needs
    // no words.
    if path.readings.len() < 2 {
        return String::new();
    }
    let lines: String = path.readings.iter().map(|reading| format!("  {reading}\n")).collect();
    format!("Servers may read the path as any of these, and the rules of all of them apply:\n{lines}\n")
}

/// Describes how client doors refuse the path, if they do.
fn refusal_line(path: &PathReadings) -> String {
    let Some((error, status)) = path.refused.zip(path.status()) else { return String::new() };
    format!("\nThe tower layer and forward auth refuse such a path with {status}: {error}. The API:\n")
}

fn request_line(args: &ExplainArgs) -> String {
    let method = args.method.as_deref().map(normalize_method);
    let path = args.path.as_deref().map(normalize_path);
    let mut parts = Vec::new();
    if let Some(path) = &path {
        parts.push(format!("{} {path}", method.as_deref().unwrap_or("*")));
    }
    let named = [("host", &args.host), ("tenant", &args.tenant), ("user", &args.user), ("tier", &args.tier)];
    parts.extend(args.ip.map(|ip| format!("ip {ip}")));
    parts.extend(named.iter().filter_map(|(name, value)| value.as_ref().map(|value| format!("{name} {value}"))));
    format!("{}\n", parts.join(", "))
}

fn met_lines(explained: &Explained<'_>, names: usize) -> String {
    let rule = explained.rule;
    let (Some(limit), Some(key)) = (explained.limit, &explained.key) else { return String::new() };
    let algorithm = limit.algorithm().map_or("deny", Algorithm::name);
    let from = explained.from.as_ref().map(|from| format!(" ({from})")).unwrap_or_default();
    let mode = if rule.mode == threshold_core::policy::Mode::Observe { ", observed only" } else { "" };
    let words = match &explained.why {
        why @ Why::Denied(_) => why.to_string(),
        _ => limit.words(explained.unit).to_string(),
    };
    let cost = if explained.cost == 1 { String::new() } else { format!(", cost {}", explained.cost) };
    let indent = names.saturating_add(14);
    format!(
        "  {:<8}  {:<names$}  {}{from}  {key}\n{:indent$}{algorithm}: {words}{cost}{mode}\n",
        rule.layer,
        rule.name,
        explained.notation(),
        "",
    )
}

fn decision_lines(policy: &Policy, decided: &Result<Checked, PlanError>, path: &PathReadings) -> String {
    let refused = refusal_line(path);
    match decided {
        Err(error) => {
            // Only over RLS: there a descriptor is a part of a request, and elsewhere a request says all.
            let envoy = match error {
                PlanError::Missing { rule, .. } => {
                    format!(
                        "To a descriptor of Envoy with these facts, \"{rule}\" and others that need more do not apply.\n"
                    )
                }
                _ => String::new(),
            };
            format!("{refused}\nThis request cannot be decided: {error}\n{envoy}")
        }
        Ok(checked) => {
            let decision = &checked.decision;
            let mut text = format!("{refused}\nThe first such request: {}", decision.verdict);
            if let (Some(rule), Some(reading)) = (decision.rule(policy), decision.bound_by()) {
                text.push_str(&format!("; \"{}\" binds, {} of {} remain", rule.name, reading.remaining, reading.limit));
            }
            text.push('\n');
            text
        }
    }
}
