//! `threshold replay`: decides the requests of access logs under a policy, at the times of the log.

mod args;
mod compare;
mod log_digest;
mod login;
mod page;
mod rehearsal;
mod report;
mod sample;
mod series;
mod tally;
mod top_subjects;
mod zone;

use std::path::Path;

use anyhow::Context as _;
use threshold_core::DigestKey;
use threshold_core::policy::Policy;

use crate::Report;
use crate::source::Source;
use crate::traffic::{Feed, LineCounts};

pub use args::{LogArgs, ReplayArgs};
pub(crate) use report::{grouped, quantile, share};
pub(crate) use sample::Sample;

use compare::Comparison;
use log_digest::LogDigest;
use rehearsal::Rehearsal;
use report::Replayed;
use tally::Tally;
use zone::Zone;

/// Decides the requests of logs under a policy.
///
/// # Errors
/// Returns an error if the policy or a log cannot be read.
pub fn run(args: &ReplayArgs) -> anyhow::Result<Report> {
    if args.login {
        return login::run(args);
    }
    let source = Source::read(&args.policy)?;
    let policy = source.policy()?;
    let other = args.against.as_deref().map(Source::read).transpose()?;
    let other_policy = other.as_ref().map(Source::policy).transpose()?;
    let feed = Feed::open(&args.log.logs, args.log.fields()?, args.log.reorder)?;
    let zone = args.tz.clone().unwrap_or_default();
    let Rehearsed { tally, comparison, counts, key } =
        rehearse(feed, &policy, other_policy.as_ref(), (args.top, &zone));
    // A report of nothing would look like a policy that denies nothing.
    anyhow::ensure!(tally.requests > 0, report::nothing_read(&counts, "request"));
    let replayed = Replayed {
        policy: &policy,
        name: &source.name,
        tally: &tally,
        counts: &counts,
        against: comparison.as_ref().zip(other.as_ref()).map(|(own, other)| (own, other.name.as_str())),
        top: args.top,
        zone: &zone,
        key,
    };
    if let Some(file) = &args.html {
        write_page(file, &replayed.html())?;
    }
    let text = if args.json { replayed.json()? } else { replayed.text() };
    Ok(Report { text, code: 0 })
}

fn write_page(file: &Path, page: &str) -> anyhow::Result<()> {
    std::fs::write(file, page).with_context(|| format!("cannot write {}", file.display()))
}

/// The counts of a whole log.
struct Rehearsed {
    tally: Tally,
    comparison: Option<Comparison>,
    counts: LineCounts,
    key: DigestKey,
}

/// Decides all requests of the logs under one policy, or under two side by side.
fn rehearse<'p>(
    mut feed: Feed,
    policy: &'p Policy,
    other: Option<&'p Policy>,
    (top, zone): (usize, &Zone),
) -> Rehearsed {
    let mut rehearsal = Rehearsal::new(policy, top, zone.clone());
    let mut beside = other.map(|other| (Rehearsal::new(other, top, zone.clone()), Comparison::new(policy, other)));
    let mut digest = LogDigest::default();
    while let Some(mut second) = feed.next_second() {
        let mut next = second.next();
        while let Some(request) = next {
            // One ahead within a second only. The next second is sorted later, and its first request is not known
            // yet.
            let coming = second.next();
            digest.add(&request);
            let decided = rehearsal.decide(&request, coming.as_ref());
            if let Some((other, comparison)) = &mut beside {
                let decided_by_other = other.decide(&request, coming.as_ref());
                let (name, other_name) = (rehearsal.tally.last_touched(), other.tally.last_touched());
                comparison.add((&decided, name), (&decided_by_other, other_name), request.at.micros);
            }
            next = coming;
        }
    }
    let comparison = beside.map(|(_, comparison)| comparison);
    Rehearsed { tally: rehearsal.tally.finish(), comparison, counts: feed.finish(), key: digest.key() }
}
