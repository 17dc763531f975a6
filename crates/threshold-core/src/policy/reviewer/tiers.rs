//! Warnings about tiers that a request may not have.

use super::Placed;
use crate::policy::file::{PolicyFile, Text};
use crate::policy::load::Loader;
use crate::policy::rule::{Measure, Mode, OnMissing};
use crate::policy::tiers::Tiers;

/// Warns about rules by tier in a policy without a default tier.
pub(super) fn without_default(loader: &mut Loader<'_>, file: &PolicyFile, tiers: &Tiers, rules: &[Placed]) {
    if file.identity.default_tier.is_some() {
        return;
    }
    for (rule, span) in rules {
        let (Measure::Tier(shape) | Measure::NamedByTier(shape)) = rule.measure else { continue };
        if !tiers.is_by_tier(shape) {
            continue;
        }
        let does = match (rule.on_missing, rule.mode) {
            (OnMissing::Skip, _) => "does not limit",
            (_, Mode::Observe) => "observes a denial of",
            (_, Mode::Enforce) => "denies",
        };
        let message =
            format!("\"{}\" {does} a request without one of the policy's tiers, in exactly its case", rule.name);
        let help = "write default_tier under [identity], or state in `allow` that every request has a tier";
        loader.warning("no-default-tier", span.clone(), message, help);
    }
}

/// Warns about tiers whose names differ only in case.
pub(super) fn alike(loader: &mut Loader<'_>, file: &PolicyFile) {
    let names = file.tiers.0.iter().map(|(name, _)| name);
    for (place, name) in names.clone().enumerate() {
        let same = |other: &&Text| name.value.to_lowercase() == other.value.to_lowercase();
        if let Some(other) = names.clone().take(place).find(same) {
            let message = format!("the tiers \"{}\" and \"{}\" differ only in case", other.value, name.value);
            let help = "tiers compare exactly: rename one, or remove it";
            loader.warning("tiers-alike", name.span.clone(), message, help);
        }
    }
}
