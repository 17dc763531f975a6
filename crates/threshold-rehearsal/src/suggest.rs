//! `threshold suggest`: writes a policy whose limits would have affected at most a given share of a log's addresses.

mod demand;
mod endpoints;
mod write;

use std::path::Path;

use anyhow::bail;
use clap::Args;
use threshold_core::policy::{Policy, Severity};

use crate::Report;
use crate::replay::LogArgs;
use crate::traffic::{Feed, LineCounts};

use demand::Demand;
use endpoints::Endpoints;
use write::Suggestion;

/// What `threshold suggest` is given.
#[derive(Debug, Args)]
pub struct SuggestArgs {
    #[command(flatten)]
    pub(crate) log: LogArgs,
    /// The largest share of addresses that the limits may affect
    #[arg(long, default_value = "0.1%", value_name = "SHARE", value_parser = touch)]
    pub(crate) touch: f64,
}

/// Suggests limits for the requests of logs.
///
/// # Errors
/// Returns an error if a log cannot be read.
pub fn run(args: &SuggestArgs) -> anyhow::Result<Report> {
    if args.log.logs.iter().any(|log| log == Path::new("-")) {
        bail!("suggest reads its logs twice, which is not possible from standard input: save it to a file first");
    }
    // Two passes over the logs: the endpoints must be known before the demand for each is counted, and to count all
    // of them at once would not be bounded.
    let mut endpoints = Endpoints::default();
    let counts = each_request(args, |request| endpoints.add(request))?;
    if endpoints.requests() == 0 {
        bail!("none of the log's {} lines is a request with an address", counts.lines);
    }
    let (targets, left_out) = endpoints.targets();
    let mut demand = Demand::new(targets.len());
    each_request(args, |request| demand.add(request, &targets))?;
    let suggestion = Suggestion::new(args.touch, &targets, &demand, endpoints.requests(), &counts).without(&left_out);
    Ok(Report { text: without_idle_rules(suggestion)?, code: 0 })
}

fn each_request(args: &SuggestArgs, mut each: impl FnMut(&crate::traffic::Request<'_>)) -> anyhow::Result<LineCounts> {
    let mut feed = Feed::open(&args.log.logs, args.log.fields()?, args.log.reorder)?;
    while let Some(second) = feed.next_second() {
        second.for_each(|request| each(&request));
    }
    Ok(feed.finish())
}

/// Removes the rules that lint finds to have no effect beside the others, and notes them. Fewer rules never affect more addresses.
fn without_idle_rules(mut suggestion: Suggestion<'_>) -> anyhow::Result<String> {
    loop {
        let text = suggestion.text();
        // The linter judges the text itself, so that a suggestion never contains what `lint` would complain about.
        let review = Policy::review(&text, &|_| None);
        let Some(finding) = review.findings.first() else { return Ok(text) };
        let before = |(_, span): &&(Box<str>, std::ops::Range<usize>)| span.start <= finding.span.start;
        // The last rule that begins before the finding is the one that contains it.
        let name = review.rule_names.iter().rfind(before).map(|(name, _)| name.to_string());
        let dropped = name.is_some_and(|name| suggestion.drop_rule(&name, &finding.message));
        // Without this the loop would never end on a finding that belongs to no rule.
        if !dropped {
            let severity = if finding.severity == Severity::Error { "error" } else { "warning" };
            bail!("the suggested policy has an {severity}: {}", finding.message);
        }
    }
}

/// `0.1%` or `0.001`.
fn touch(text: &str) -> Result<f64, String> {
    let (digits, scale) = text.trim().strip_suffix('%').map_or((text, 1.0), |digits| (digits, 0.01));
    let share = digits.trim().parse::<f64>().map_err(|_| format!("\"{text}\" is not a share, such as 0.1%"))? * scale;
    // The range also excludes NaN.
    if (0.0..1.0).contains(&share) { Ok(share) } else { Err("a share is at least 0% and below 100%".to_owned()) }
}
