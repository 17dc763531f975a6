//! The subjects that are stopped most, in a bounded table.

use std::collections::HashMap;

use threshold_core::Verdict;

/// How many subjects stay when the table is trimmed, at half of its bound.
const MIN_KEPT: usize = 4_096;

/// The kind of a subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Ip,
    User,
    Tenant,
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::User => "user",
            Self::Tenant => "tenant",
        }
    }
}

/// The verdicts on the requests of one subject, other than allow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SubjectCounts {
    pub(crate) denied: u64,
    pub(crate) banned: u64,
    pub(crate) warned: u64,
    pub(crate) slowed: u64,
    /// The times of the first and the last such verdict, in microseconds.
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// The index of the rule of the first one.
    pub(crate) rule: Option<usize>,
}

impl SubjectCounts {
    pub(crate) fn add(&mut self, verdict: Verdict) {
        let count = match verdict {
            Verdict::Allow => return,
            Verdict::Warn => &mut self.warned,
            Verdict::Slow => &mut self.slowed,
            Verdict::Deny => &mut self.denied,
            Verdict::Ban => &mut self.banned,
        };
        *count = count.saturating_add(1);
    }

    /// The order of subjects: by requests that were stopped, then by those that were warned or slowed.
    fn weight(&self) -> (u64, u64) {
        (self.denied.saturating_add(self.banned), self.warned.saturating_add(self.slowed))
    }

    pub(crate) fn stopped(&self) -> u64 {
        self.weight().0
    }

    /// Returns the number of all verdicts other than allow.
    pub(crate) fn touched(&self) -> u64 {
        let (stopped, others) = self.weight();
        stopped.saturating_add(others)
    }
}

/// Subjects with their counts: all of them while there are few, then those with the most.
#[derive(Debug, Default)]
pub(crate) struct TopSubjects {
    table: HashMap<Box<str>, [Option<SubjectCounts>; 3]>,
    /// The most by which a count may be too low, because its subject was trimmed in between.
    undercount: u64,
}

impl TopSubjects {
    pub(crate) fn add(&mut self, kind: Kind, name: &str, rule: Option<usize>, verdict: Verdict, micros: u64) {
        // At twice the number that stays, so that the cost of a trim is shared by thousands of new subjects.
        if self.table.len() >= MIN_KEPT.saturating_mul(2) && !self.table.contains_key(name) {
            self.trim();
        }
        if !self.table.contains_key(name) {
            self.table.insert(name.into(), [const { None }; 3]);
        }
        let slot = self.table.get_mut(name).and_then(|kinds| kinds.get_mut(kind as usize));
        if let Some(slot) = slot {
            let own = slot.get_or_insert_with(|| SubjectCounts { first: micros, rule, ..SubjectCounts::default() });
            own.add(verdict);
            own.last = micros;
        }
    }

    /// Returns the subjects with the most, in order; equal ones by name, so that two runs print the same.
    pub(crate) fn top(&self, most: usize) -> Vec<(Kind, &str, &SubjectCounts)> {
        let mut all: Vec<(Kind, &str, &SubjectCounts)> = Vec::new();
        for (name, kinds) in &self.table {
            for (kind, own) in [Kind::Ip, Kind::User, Kind::Tenant].into_iter().zip(kinds) {
                all.extend(own.as_ref().map(|own| (kind, name.as_ref(), own)));
            }
        }
        all.sort_by(|one, other| other.2.weight().cmp(&one.2.weight()).then_with(|| one.1.cmp(other.1)));
        all.truncate(most);
        all
    }

    /// Returns the most by which a count may be too low.
    pub(crate) fn undercount(&self) -> u64 {
        self.undercount
    }

    #[cold]
    fn trim(&mut self) {
        let weight = |kinds: &[Option<SubjectCounts>; 3]| {
            kinds.iter().flatten().map(SubjectCounts::weight).max().unwrap_or_default()
        };
        let mut weights: Vec<(u64, u64)> = self.table.values().map(weight).collect();
        weights.sort_unstable_by(|one, other| other.cmp(one));
        // The largest weight that is dropped. A dropped subject begins at zero again, so its count lacks at most this
        // much, and each trim adds to the error.
        let floor = weights.get(MIN_KEPT).copied().unwrap_or_default();
        self.undercount = self.undercount.saturating_add(floor.0);
        let mut room = MIN_KEPT;
        self.table.retain(|_, kinds| {
            // Strictly more: of many subjects with the same weight, such as a scan with one denial each, none is
            // worth keeping before the others.
            let stays = weight(kinds) > floor && room > 0;
            room = room.saturating_sub(usize::from(stays));
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_subjects_of_many_are_found_in_a_bounded_table() {
        let mut table = TopSubjects::default();
        for round in 0..50_u64 {
            for heavy in 0..20_u64 {
                for _ in 0..=heavy {
                    table.add(Kind::Ip, &format!("heavy-{heavy}"), None, Verdict::Deny, round);
                }
            }
            for light in 0..1_000_u64 {
                table.add(Kind::Ip, &format!("light-{round}-{light}"), None, Verdict::Deny, round);
            }
            assert!(table.table.len() <= MIN_KEPT * 2);
        }
        let top = table.top(5);
        let names: Vec<&str> = top.iter().map(|(_, name, _)| *name).collect();
        assert_eq!(names, ["heavy-19", "heavy-18", "heavy-17", "heavy-16", "heavy-15"]);
        let (_, _, first) = top.first().unwrap();
        assert!(first.denied <= 1_000 && first.denied + table.undercount() >= 1_000, "{}", table.undercount());
    }

    #[test]
    fn a_user_and_an_address_with_one_name_are_two_subjects() {
        let mut table = TopSubjects::default();
        table.add(Kind::User, "192.0.2.1", Some(1), Verdict::Ban, 5);
        table.add(Kind::Ip, "192.0.2.1", Some(0), Verdict::Warn, 7);
        let top = table.top(10);
        assert_eq!(top.len(), 2);
        assert!(top.first().is_some_and(|(kind, _, own)| *kind == Kind::User && own.rule == Some(1) && own.first == 5));
    }
}
