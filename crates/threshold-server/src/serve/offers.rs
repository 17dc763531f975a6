//! What a policy asks of its host and this server does not do, or does better.

use threshold_core::policy::{Consistency, Policy};

/// Why a policy cannot be put in force here: it asks for more than the store offers.
pub(crate) fn refuses(policy: &Policy) -> Option<String> {
    let leased = policy.rules().iter().find(|rule| rule.consistency == Consistency::Leased)?;
    Some(format!(
        "rule \"{}\" has consistency = \"leased\", which no store of this version offers; write \"strong\"",
        leased.name
    ))
}

/// How exact the store in memory is, for the banner: a rule that asks for less gets more.
pub(crate) fn exactness(policy: &Policy) -> &'static str {
    let eventual = policy.rules().iter().any(|rule| rule.consistency == Consistency::Eventual);
    let approximate = policy.rules().iter().any(|rule| rule.approximate);
    match (eventual, approximate) {
        (true, true) => ", exact also for eventual and approximate rules",
        (true, false) => ", exact also for eventual rules",
        (false, true) => ", exact also for approximate rules",
        (false, false) => "",
    }
}

/// Warns of what a policy says and nothing comes of yet.
pub(crate) fn warn(policy: &Policy) {
    if !policy.alerts().is_empty() {
        tracing::warn!("[alerts] raises no alerts in this version: watch threshold_blocks_total at /metrics");
    }
}
