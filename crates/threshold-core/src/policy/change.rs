//! Budgets and penalties that a change of policy resets, because they are stored under an identity that no longer exists.

use std::collections::BTreeSet;

use super::{Measure, Per, Policy, Rule};
use crate::limit::Algorithm;

/// A budget or penalty that a change of policy resets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Forgotten {
    /// The rule of the new policy that it is about; `None` if there is no such rule.
    pub rule: Option<Box<str>>,
    /// What is reset, in a sentence.
    pub what: String,
}

impl Policy {
    /// Returns what replacing `old` by this policy resets.
    #[must_use]
    pub fn forgets(&self, old: &Self) -> Vec<Forgotten> {
        let mut forgotten = Vec::new();
        for was in old.rules() {
            let Some(now) = self.rules().iter().find(|rule| rule.name == was.name) else {
                // Only a rule that the old policy did not have can be the old one under a new name.
                let renamed = self.rules().iter().find(|rule| {
                    old.rules().iter().all(|other| other.name != rule.name)
                        && rule.per == was.per
                        && self.algorithms(rule) == old.algorithms(was)
                });
                let what = format!("the rule \"{}\" is removed, and its balances with it", was.name);
                let rule = renamed.map(|rule| rule.name.clone());
                forgotten.push(match &rule {
                    Some(name) => Forgotten {
                        what: format!(
                            "if \"{name}\" is the rule \"{}\" renamed, its balances start from zero",
                            was.name
                        ),
                        rule,
                    },
                    None => Forgotten { rule, what },
                });
                continue;
            };
            let rule = Some(now.name.clone());
            // Before `per`: the text of `per` stays the same, and what a user is does not.
            if self.scope_changes(old) && was.per.contains(&Per::User) {
                let what =
                    format!("\"{}\" counts users differently (user_scope), so its balances start from zero", now.name);
                forgotten.push(Forgotten { rule, what });
            } else if now.per != was.per {
                let what = format!(
                    "\"{}\" counts by {} instead of {}, so its balances start from zero",
                    now.name,
                    per(now),
                    per(was)
                );
                forgotten.push(Forgotten { rule, what });
            } else if now.shards != was.shards {
                let what = format!(
                    "\"{}\" is split over {} shards instead of {}, so its balances in the others start from zero",
                    now.name, now.shards, was.shards
                );
                forgotten.push(Forgotten { rule, what });
            } else if self.algorithms(now) != old.algorithms(was) {
                let names =
                    |names: BTreeSet<Algorithm>| names.iter().map(|name| name.name()).collect::<Vec<_>>().join(", ");
                let (new, before) = (names(self.algorithms(now)), names(old.algorithms(was)));
                let what =
                    format!("\"{}\" is a {new} instead of a {before}, so its balances start from zero", now.name);
                forgotten.push(Forgotten { rule, what });
            }
        }
        self.forgets_subjects(old, &mut forgotten);
        if self.scope_changes(old) {
            let what =
                "user_scope changes, so bans and settings of users and locks of accounts no longer apply".to_owned();
            forgotten.push(Forgotten { rule: None, what });
        }
        self.forgets_spread(old, &mut forgotten);
        if old.login().is_some() && self.login().is_none() {
            let what = "[login] is removed, and its locks no longer apply".to_owned();
            forgotten.push(Forgotten { rule: None, what });
        }
        forgotten
    }

    /// The partition of a record is part of its key, and `spread` decides the partition of users.
    fn forgets_spread(&self, old: &Self, forgotten: &mut Vec<Forgotten>) {
        let (now, before) = (&self.tiers.written().spreads, &old.tiers.written().spreads);
        let tenants: BTreeSet<&str> = now.keys().chain(before.keys()).map(AsRef::as_ref).collect();
        for tenant in tenants {
            let spread = |policy: &Self| policy.tiers.spread(tenant).unwrap_or(1);
            let (now, before) = (spread(self), spread(old));
            if now != before {
                let what = format!(
                    "the users of the tenant \"{tenant}\" are spread over {now} partitions instead of {before}, so their \
                     balances, strikes and locks start from zero"
                );
                forgotten.push(Forgotten { rule: None, what });
            }
        }
    }

    /// Whether the same name identifies another user.
    fn scope_changes(&self, old: &Self) -> bool {
        self.identity().user_scope != old.identity().user_scope
    }

    /// Strikes are stored by the ladder's name and `per`.
    fn forgets_subjects(&self, old: &Self, forgotten: &mut Vec<Forgotten>) {
        for was in old.subjects.iter() {
            let stays = |now: &&super::SubjectRule| now.per == was.per && now.ladder_name == was.ladder_name;
            let moves = self.scope_changes(old) && was.per.contains(&Per::User);
            if !moves && self.subjects.iter().any(|now| stays(&now)) {
                continue;
            }
            let by = was.per.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let what = format!(
                "no rule counts strikes by {by} on the ladder \"{}\" any more, so its strikes, cool-downs and bans end",
                was.ladder_name
            );
            forgotten.push(Forgotten { rule: None, what });
        }
    }

    /// Returns the algorithms of a rule: one, or those of the limits of its tiers.
    fn algorithms(&self, rule: &Rule) -> BTreeSet<Algorithm> {
        match &rule.measure {
            Measure::Unlimited => BTreeSet::new(),
            Measure::Fixed(measured) => measured.limit.algorithm().into_iter().collect(),
            Measure::Tier(shape) | Measure::NamedByTier(shape) => self.tiers.algorithms(*shape),
        }
    }
}

fn per(rule: &Rule) -> String {
    if rule.per.is_empty() {
        return "nothing".to_owned();
    }
    rule.per.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
