//! Explains which rules match a request, with their keys and limits, and why the others do not.

mod subject;
mod usage;

use std::borrow::Cow;
use std::fmt;

use crate::caller::{Caller, field_of};
use crate::facts::Facts;
use crate::limit::{Limit, Unit};
use crate::path::PathError;
use crate::policy::{Measured, Mismatch, NoLimit, OnMissing, Per, Policy, Rule, TierSource};
use crate::text::is_hidden;

pub use subject::{SubjectBudget, SubjectLadder};
pub use usage::CallerLimit;

/// What a request lacks for a limit by tier.
const TIER: &str = "tier of the policy";

/// Why a rule does or does not apply.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// It applies.
    Met,
    /// It applies to this other reading of the path.
    MetAs(String),
    /// One of its keys does not match.
    NotMet(Mismatch),
    /// It is a fallback, and another rule of its layer matches.
    NotFallback,
    /// It has no limit for this request.
    Unlimited,
    /// The request lacks this part of `per`, or a tier of the policy, and the rule skips such requests.
    Skipped(String),
    /// The request lacks it, and the rule denies such requests.
    Denied(String),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Met => f.write_str("met"),
            Self::MetAs(reading) => write!(f, "met, with the path read as {reading}"),
            Self::NotMet(mismatch) => mismatch.fmt(f),
            Self::NotFallback => f.write_str("a fallback, and another rule of its layer is met"),
            Self::Unlimited => f.write_str("met, and unlimited"),
            Self::Skipped(field) => write!(f, "no {field} is given, and the rule skips such requests"),
            Self::Denied(field) => write!(f, "no {field} is given, and the rule denies such requests"),
        }
    }
}

/// The explanation of one rule, without stored state.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Explained<'p> {
    /// The rule.
    pub rule: &'p Rule,
    /// Its index in the policy.
    pub index: usize,
    /// The number of this charge among those of the rule: a path with several readings may be charged more than once.
    pub nth: usize,
    /// Whether it applies, or why not.
    pub why: Why,
    /// The key of the budget, for display: `tenant=t1,category=writes`.
    pub key: Option<String>,
    /// The limit, if it applies.
    pub limit: Option<&'p Limit>,
    /// The origin of a limit by tier: `tier seedling`, `its own`.
    pub from: Option<String>,
    /// What the limit counts.
    pub unit: Unit,
    /// The cost; 0 if the rule does not apply.
    pub cost: u64,
}

impl Explained<'_> {
    /// Returns the limit as a policy writes it; empty if the rule does not apply.
    #[must_use]
    pub fn notation(&self) -> String {
        self.limit.map(|limit| limit.notation(self.unit)).unwrap_or_default()
    }
}

/// How servers may read the path of a request, and whether client-facing doors refuse it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathReadings {
    /// Every reading, the normalized path first. Empty if the request has no path, or one that cannot be matched.
    pub readings: Vec<String>,
    /// Why client-facing doors (the tower layer, forward auth) refuse the path. The API may accept it all the same.
    pub refused: Option<PathError>,
}

impl PathReadings {
    /// Returns the status of that refusal.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        self.refused.map(|error| if error == PathError::TooLong { 414 } else { 400 })
    }
}

impl Policy {
    /// Returns how servers may read the path of a request.
    #[must_use]
    pub fn path_readings(&self, facts: &Facts<'_>) -> PathReadings {
        // Asked twice: as a door that faces clients would, which may refuse odd paths, and as the API would, which
        // matches every reading.
        let client = Facts { from_client: true, ..*facts };
        let refused = Caller::new(&client, self).path_error().or_else(|| {
            let identity = self.identity();
            let mut sources = [&identity.tenant, &identity.user, &identity.tier].into_iter().flatten();
            // A path may hold an identity. Then all servers must read the same name from it, or a client could be
            // counted as one user and served as another.
            sources.find_map(|source| source.path_error(facts.path?))
        });
        let asked = Facts { from_client: false, ..*facts };
        let mut caller = Caller::new(&asked, self);
        let mut readings = Vec::new();
        if caller.path_error().is_none() {
            readings.extend(caller.path.get().map(str::to_owned));
            while caller.read_next(self) {
                readings.extend(caller.path.get().map(str::to_owned));
            }
        }
        PathReadings { readings, refused }
    }

    /// Explains which rules match a request, with their keys, and why the others do not.
    #[must_use]
    pub fn explain(&self, facts: &Facts<'_>) -> Vec<Explained<'_>> {
        let mut caller = Caller::new(facts, self);
        let explain = |caller: &Caller<'_>| {
            let rules = self.rules.iter().enumerate();
            rules.map(|(index, rule)| self.explain_rule(index, rule, caller)).collect::<Vec<_>>()
        };
        let mut all = explain(&caller);
        while caller.read_next(self) {
            for other in explain(&caller).into_iter().filter(|other| other.limit.is_some()) {
                add_reading(&mut all, other, caller.path.get().unwrap_or_default());
            }
        }
        all
    }

    fn explain_rule<'p>(&'p self, index: usize, rule: &'p Rule, caller: &Caller<'_>) -> Explained<'p> {
        let (why, unit) = (Why::Met, Unit::Count);
        let mut explained = Explained { rule, index, nth: 0, why, key: None, limit: None, from: None, unit, cost: 0 };
        if let Some(mismatch) = rule.matches.mismatch(caller) {
            explained.why = Why::NotMet(mismatch);
            return explained;
        }
        if rule.fallback && self.layer_is_met(rule.layer, caller) {
            explained.why = Why::NotFallback;
            return explained;
        }
        let (Measured { limit, cost, .. }, from, no_tier) = match self.limit_of(rule, caller) {
            Ok((measured, from)) => (measured, from, None),
            Err(NoLimit::NoTier) => (Measured::NEVER, None, Some(TIER.to_owned())),
            Err(NoLimit::Unlimited) => return Explained { why: Why::Unlimited, ..explained },
        };
        let missing = rule.per.iter().find(|per| caller.part_text(per, rule, self).is_none()).map(field_of);
        match rule.on_missing {
            // The address counts in place of an identity, and nothing in place of a tier.
            OnMissing::Floor => explained.why = no_tier.map_or(Why::Met, Why::Denied),
            OnMissing::Deny => explained.why = missing.or(no_tier).map_or(Why::Met, Why::Denied),
            OnMissing::Skip => {
                if let Some(missing) = missing.or(no_tier) {
                    return Explained { why: Why::Skipped(missing), ..explained };
                }
            }
        }
        explained.limit = Some(limit);
        explained.unit = cost.unit();
        explained.cost = cost.of(caller.facts);
        explained.from = from.map(|source| match source {
            TierSource::Own => "its own".to_owned(),
            TierSource::Tier(name) => format!("tier {name}"),
        });
        explained.key = Some(self.key_text(rule, caller));
        explained
    }

    /// Returns a key for display: `user=u1`, or `user→ip=203.0.113.7` if the address replaces the user.
    fn key_text(&self, rule: &Rule, caller: &Caller<'_>) -> String {
        let implied = rule.is_by_category() && !rule.per.contains(&Per::Category);
        let part = |per: &Per| {
            let address = caller.part_text(&Per::Ip, rule, self).filter(|_| rule.on_missing == OnMissing::Floor);
            match caller.part_text(per, rule, self) {
                Some(value) => format!("{per}={}", escaped(&value)),
                None => address.map_or_else(|| format!("{per}=?"), |ip| format!("{per}→ip={ip}")),
            }
        };
        let parts = rule.per.iter().chain(implied.then_some(&Per::Category)).map(part);
        let text = parts.collect::<Vec<_>>().join(",");
        if text.is_empty() { "all".to_owned() } else { text }
    }

    /// Returns the category of a request.
    #[must_use]
    pub fn category_of(&self, facts: &Facts<'_>) -> String {
        Caller::new(facts, self).category.to_owned()
    }
}

/// Adds a rule that matches another reading of the path, unless the same budget is already listed.
fn add_reading<'p>(all: &mut Vec<Explained<'p>>, mut other: Explained<'p>, reading: &str) {
    other.why = Why::MetAs(reading.to_owned());
    let own = |explained: &&mut Explained<'p>| explained.index == other.index;
    // A rule that no earlier reading met is explained by the first reading that meets it.
    if let Some(unmet) = all.iter_mut().filter(own).find(|explained| explained.limit.is_none()) {
        *unmet = other;
        return;
    }
    let charged = all.iter().filter(|explained| explained.index == other.index);
    if charged.clone().any(|explained| explained.key == other.key) {
        return;
    }
    other.nth = charged.count();
    // Next to the other charges of its rule, in the order of the plan's readings.
    let after = all.iter().rposition(|explained| explained.index == other.index).unwrap_or(all.len());
    all.insert(after.saturating_add(1).min(all.len()), other);
}

/// Escapes separators and invisible characters, so that different keys are displayed differently.
fn escaped(value: &str) -> Cow<'_, str> {
    let separates = |c: char| matches!(c, ',' | '=' | '%' | '→') || is_hidden(c);
    if !value.contains(separates) {
        return Cow::Borrowed(value);
    }
    let mut out = String::with_capacity(value.len());
    for c in value.chars() {
        if separates(c) {
            let mut buffer = [0; 4];
            for byte in c.encode_utf8(&mut buffer).bytes() {
                out.push_str(&format!("%{byte:02x}"));
            }
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}
