//! What a server says of its policy when it starts: that it limits nothing, and what deserves a warning or a note.

use threshold_core::policy::{Consistency, Policy};
use threshold_rehearsal::source::Source;

/// Logs the limits of 0. A variable that is 0 on this machine was perhaps not set where `lint` ran.
pub(crate) fn warn_of_zero_limits(source: &Source) {
    for finding in source.review().findings.iter().filter(|finding| finding.code == "zero-limit") {
        let (line, column) = finding.place(&source.text);
        tracing::warn!(policy = source.name, line, column, reason = finding.message, "limit of 0 means unlimited");
    }
}

/// Logs the ladders that lie in different partitions, for a store that settles partitions one after another.
pub(crate) fn warn_of_ladders_apart(source: &Source) {
    for finding in source.review().findings.iter().filter(|finding| finding.code == "ladders-apart") {
        let (line, column) = finding.place(&source.text);
        let (policy, reason) = (&source.name, finding.message.as_str());
        tracing::warn!(policy, line, column, reason, "ladders in different partitions");
    }
}

/// Returns why a server does not start with a policy that has no errors.
pub(crate) fn unusable(policy: &Policy, allow_empty: bool) -> Option<String> {
    let text = "the policy has no rules and no [login], so it limits nothing; --allow-empty accepts that";
    (policy.is_empty() && !allow_empty).then(|| text.to_owned())
}

/// Returns a note for the banner if rules allow less exactness than the store in memory has.
pub(crate) fn exactness_note(policy: &Policy) -> &'static str {
    let eventual = policy.rules().iter().any(|rule| rule.consistency == Consistency::Eventual);
    let approximate = policy.rules().iter().any(|rule| rule.approximate);
    match (eventual, approximate) {
        (true, true) => ", exact also for eventual and approximate rules",
        (true, false) => ", exact also for eventual rules",
        (false, true) => ", exact also for approximate rules",
        (false, false) => "",
    }
}
