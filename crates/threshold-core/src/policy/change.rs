//! What a change of policy forgets: budgets and penalties that nobody finds again under their new names.

use std::collections::BTreeSet;

use super::{Measure, Per, Policy, Rule};
use crate::limit::Algorithm;

/// Something that a change forgets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forgotten {
    /// The rule of the new policy it is about; `None` where there is none any more.
    pub rule: Option<Box<str>>,
    /// What is forgotten.
    pub what: String,
}

impl Policy {
    /// What putting this policy in the place of `old` forgets.
    #[must_use]
    pub fn forgets(&self, old: &Self) -> Vec<Forgotten> {
        let mut forgotten = Vec::new();
        for was in old.rules() {
            let Some(now) = self.rules().iter().find(|rule| rule.name == was.name) else {
                let renamed = self.rules().iter().find(|rule| {
                    old.rules().iter().all(|other| other.name != rule.name)
                        && rule.per == was.per
                        && self.algorithms(rule) == old.algorithms(was)
                });
                let what = format!("the rule \"{}\" is gone, and with it what was used of its limit", was.name);
                let rule = renamed.map(|rule| rule.name.clone());
                forgotten.push(match &rule {
                    Some(name) => Forgotten {
                        what: format!(
                            "if \"{name}\" is the rule \"{}\" renamed, what was used of its limit is forgotten",
                            was.name
                        ),
                        rule,
                    },
                    None => Forgotten { rule, what },
                });
                continue;
            };
            let rule = Some(now.name.clone());
            if self.scopes_otherwise(old) && was.per.contains(&Per::User) {
                let what = format!("\"{}\" counts users otherwise (user_scope): everybody begins anew", now.name);
                forgotten.push(Forgotten { rule, what });
            } else if now.per != was.per {
                let what =
                    format!("\"{}\" counts by {} instead of {}: everybody begins anew", now.name, per(now), per(was));
                forgotten.push(Forgotten { rule, what });
            } else if self.algorithms(now) != old.algorithms(was) {
                let names =
                    |names: BTreeSet<Algorithm>| names.iter().map(|name| name.name()).collect::<Vec<_>>().join(", ");
                let (new, before) = (names(self.algorithms(now)), names(old.algorithms(was)));
                let what = format!("\"{}\" is a {new} instead of a {before}: everybody begins anew", now.name);
                forgotten.push(Forgotten { rule, what });
            }
        }
        self.forgets_subjects(old, &mut forgotten);
        if self.scopes_otherwise(old) {
            let what =
                "user_scope is another, so bans and settings of users, and locks of accounts, find nobody".to_owned();
            forgotten.push(Forgotten { rule: None, what });
        }
        if old.login().is_some() && self.login().is_none() {
            let what = "there is no [login] any more, and its locks hold nobody".to_owned();
            forgotten.push(Forgotten { rule: None, what });
        }
        forgotten
    }

    /// Whether a user's name means somebody else.
    fn scopes_otherwise(&self, old: &Self) -> bool {
        self.identity().user_scope != old.identity().user_scope
    }

    /// Strikes belong to the ladder's name and to what is counted by.
    fn forgets_subjects(&self, old: &Self, forgotten: &mut Vec<Forgotten>) {
        for was in old.subjects.iter() {
            let stays = |now: &&super::SubjectRule| now.per == was.per && now.ladder_name == was.ladder_name;
            let moves = self.scopes_otherwise(old) && was.per.contains(&Per::User);
            if !moves && self.subjects.iter().any(|now| stays(&now)) {
                continue;
            }
            let by = was.per.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let what = format!(
                "no rule counts strikes by {by} on the ladder \"{}\" any more: strikes, cool-downs and bans end",
                was.ladder_name
            );
            forgotten.push(Forgotten { rule: None, what });
        }
    }

    /// The algorithms a rule may count with: one, or those of the limits of its tiers.
    fn algorithms(&self, rule: &Rule) -> BTreeSet<Algorithm> {
        match &rule.measure {
            Measure::Unlimited => BTreeSet::new(),
            Measure::Fixed(measured) => measured.limit.algorithm().into_iter().collect(),
            Measure::Tier(shape) => self.tiers.algorithms(*shape),
        }
    }
}

fn per(rule: &Rule) -> String {
    if rule.per.is_empty() {
        return "nothing".to_owned();
    }
    rule.per.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
