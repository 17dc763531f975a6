//! Errors about eventual rules: what a store without atomic updates, such as Workers KV, cannot keep.

use crate::limit::{Algorithm, Limit};
use crate::policy::file::{PolicyFile, RuleFile};
use crate::policy::load::Loader;
use crate::policy::rule::{Consistency, Measure, Rule};
use crate::policy::tiers::Tiers;
use crate::policy::{Identity, RecordPlace};
use crate::time::Span;

use super::Placed;

/// Returns all limits that a rule can have.
fn limits<'r>(rule: &'r Rule, tiers: &'r Tiers) -> Vec<&'r Limit> {
    match &rule.measure {
        Measure::Fixed(measured) => vec![&measured.limit],
        Measure::Tier(shape) | Measure::NamedByTier(shape) => {
            tiers.measured_of_shape(*shape).map(|measured| &measured.limit).collect()
        }
        Measure::Unlimited => Vec::new(),
    }
}

/// Reports a ladder, and limits that need `approximate = true`.
pub(super) fn check(loader: &mut Loader<'_>, tiers: &Tiers, written: &RuleFile, rule: &Rule) {
    if let Some(ladder) = &written.ladder {
        let help = "write consistency = \"strong\", or leave the ladder out";
        let message = "an eventual rule cannot have a ladder: a strike that is counted late or twice punishes wrongly";
        loader.error("eventual-ladder", ladder.span.clone(), message, help);
    }
    let span = written.limit.as_ref().map_or(&written.name.span, |text| &text.span).clone();
    for limit in limits(rule, tiers) {
        if limit.is_concurrency() {
            let message = "requests in flight cannot be counted by an eventual rule";
            loader.error("impossible-limit", span, message, "write consistency = \"strong\"");
            return;
        }
        // A limit that never allows has nothing to count.
        if rule.approximate || limit.algorithm().is_none() {
            continue;
        }
        let help = "write approximate = true to accept that, or consistency = \"strong\"";
        if limit.period() < Span::MINUTE {
            let message = format!("an eventually consistent store is too slow for a window of {}", limit.period());
            loader.error("window-too-short", span, message, help);
            return;
        }
        if let Some(algorithm) = limit.algorithm().filter(|algorithm| *algorithm != Algorithm::FixedWindow) {
            let name = algorithm.name();
            let message =
                format!("concurrent writes of a {name} overwrite one another on an eventually consistent store");
            loader.error("not-approximate", span, message, help);
            return;
        }
    }
}

/// Reports a place whose names do not suit the store of the rule's consistency.
pub(super) fn place(loader: &mut Loader<'_>, tiers: &Tiers, identity: &Identity, written: &RuleFile, rule: &Rule) {
    let Some((text, place)) = written.place.as_ref().zip(rule.place.as_ref()) else { return };
    let is_eventual = rule.consistency == Consistency::Eventual;
    let is_fixed = matches!(rule.measure, Measure::Fixed(_) | Measure::Unlimited);
    let (message, help) = if place.has_window() && !is_eventual {
        ("only an eventual rule has one record for each window".to_owned(), "remove {window}")
    } else if !is_eventual {
        return;
    } else if place.has_window() && !limits(rule, tiers).iter().all(|limit| limit.counts_clock_windows()) {
        let message = "{window} numbers the windows of the clock, and this limit has none";
        (message.to_owned(), "remove {window}, or write algorithm = \"fixed-window\" with anchor = \"clock\"")
    } else if place.has_window() && rule.block_for.is_some() {
        (
            "a block outlasts the window of its key".to_owned(),
            "remove {window}: the record then has its window and its block",
        )
    } else if let Some(message) = place.joins_budgets(&rule.per, identity.user_scope) {
        (message, "one key of KV holds one budget; add the missing part, or {hash}")
    } else if !is_fixed && !place.names_by_hash() {
        let message = "a limit by tier has a budget for each category, which this place does not tell apart";
        (message.to_owned(), "add {hash}")
    } else {
        return;
    };
    loader.error("bad-place", text.span.clone(), message, help);
}

/// Reports eventual rules whose records could have one key: a key of KV holds one value.
pub(super) fn shared_keys(loader: &mut Loader<'_>, file: &PolicyFile, rules: &[Placed]) {
    let is_eventual = |rule: &&Rule| rule.consistency == Consistency::Eventual;
    let eventual: Vec<(&Rule, &RecordPlace)> = rules
        .iter()
        .map(|(rule, _)| rule)
        .filter(is_eventual)
        .filter_map(|rule| Some((rule, rule.place.as_ref()?)))
        .collect();
    for (at, (rule, place)) in eventual.iter().enumerate() {
        let Some((other, _)) = eventual.iter().take(at).find(|(_, other)| place.may_meet(other)) else { continue };
        let written = file.rule.iter().map(|located| &located.value).find(|own| own.name.value == *rule.name);
        let Some(text) = written.and_then(|written| written.place.as_ref()) else { continue };
        let message = format!("a record of this rule could have the key of the rule \"{}\"", other.name);
        let help = "begin the two keys differently, or write {hash} in both";
        loader.error("bad-place", text.span.clone(), message, help);
    }
}
