//! `threshold replay`: decides the requests of access logs under a policy, at the times of the log.

mod args;
mod compare;
mod login;
mod page;
mod rehearsal;
mod report;
mod sample;
mod series;
mod tally;
mod top_subjects;

use anyhow::Context as _;
use threshold_core::policy::Policy;

use crate::Report;
use crate::source::Source;
use crate::traffic::{Feed, LineCounts};

pub(crate) use args::{LogArgs, ReplayArgs};
pub(crate) use report::{grouped, quantile, share};
pub(crate) use sample::Sample;

use compare::Comparison;
use rehearsal::Rehearsal;
use report::Replayed;
use tally::Tally;

pub(crate) fn run(args: &ReplayArgs) -> anyhow::Result<Report> {
    if args.login {
        return login::run(args);
    }
    let source = Source::read(&args.policy)?;
    let policy = source.policy()?;
    let other = args.against.as_deref().map(Source::read).transpose()?;
    let other_policy = other.as_ref().map(Source::policy).transpose()?;
    let feed = Feed::open(&args.log.logs, args.log.fields()?, args.log.reorder)?;
    let (tally, comparison, counts) = rehearse(feed, &policy, other_policy.as_ref(), args.top);
    anyhow::ensure!(tally.requests > 0, report::nothing_read(&counts, "request"));
    let replayed = Replayed {
        policy: &policy,
        name: &source.name,
        tally: &tally,
        counts: &counts,
        against: comparison.as_ref().zip(other.as_ref()).map(|(own, other)| (own, other.name.as_str())),
        top: args.top,
    };
    if let Some(file) = &args.html {
        std::fs::write(file, replayed.html()).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let text = if args.json { replayed.json()? } else { replayed.text() };
    Ok(Report { text, code: 0 })
}

/// Decides all requests of the logs under one policy, or under two side by side.
fn rehearse<'p>(
    mut feed: Feed,
    policy: &'p Policy,
    other: Option<&'p Policy>,
    top: usize,
) -> (Tally, Option<Comparison>, LineCounts) {
    let mut rehearsal = Rehearsal::new(policy, top);
    let mut beside = other.map(|other| (Rehearsal::new(other, top), Comparison::new(policy, other)));
    while let Some(mut second) = feed.next_second() {
        let mut next = second.next();
        while let Some(request) = next {
            let coming = second.next();
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
    (rehearsal.tally.finish(), comparison, feed.finish())
}
