//! Who is stopped most, in a bounded table.

use std::collections::HashMap;

use threshold_core::Verdict;

/// How many are kept for certain when the table is cut back.
const KEPT: usize = 4_096;

/// What kind of name a subject has.
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

/// What became of one subject.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Stopped {
    pub(crate) denied: u64,
    pub(crate) banned: u64,
    pub(crate) warned: u64,
    pub(crate) slowed: u64,
    /// When it was first and last touched, in microseconds.
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// The rule that touched it first, by its place.
    pub(crate) rule: Option<usize>,
}

impl Stopped {
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

    /// Those stopped weigh most; among equals, whoever was only touched.
    fn weight(&self) -> (u64, u64) {
        (self.denied.saturating_add(self.banned), self.warned.saturating_add(self.slowed))
    }

    pub(crate) fn stopped(&self) -> u64 {
        self.weight().0
    }
}

/// Subjects and what became of them: everyone while there are few, then those who are touched most.
#[derive(Debug, Default)]
pub(crate) struct Worst {
    table: HashMap<Box<str>, [Option<Stopped>; 3]>,
    /// By how much a figure may be too low, because its subject was dropped in between.
    short: u64,
}

impl Worst {
    pub(crate) fn add(&mut self, kind: Kind, name: &str, rule: Option<usize>, verdict: Verdict, micros: u64) {
        if self.table.len() >= KEPT.saturating_mul(2) && !self.table.contains_key(name) {
            self.cut_back();
        }
        if !self.table.contains_key(name) {
            self.table.insert(name.into(), [const { None }; 3]);
        }
        let slot = self.table.get_mut(name).and_then(|kinds| kinds.get_mut(kind as usize));
        if let Some(slot) = slot {
            let own = slot.get_or_insert_with(|| Stopped { first: micros, rule, ..Stopped::default() });
            own.add(verdict);
            own.last = micros;
        }
    }

    /// The worst, in order; among equals by name, so that two runs print the same.
    pub(crate) fn top(&self, most: usize) -> Vec<(Kind, &str, &Stopped)> {
        let mut all: Vec<(Kind, &str, &Stopped)> = Vec::new();
        for (name, kinds) in &self.table {
            for (kind, own) in [Kind::Ip, Kind::User, Kind::Tenant].into_iter().zip(kinds) {
                all.extend(own.as_ref().map(|own| (kind, name.as_ref(), own)));
            }
        }
        all.sort_by(|one, other| other.2.weight().cmp(&one.2.weight()).then_with(|| one.1.cmp(other.1)));
        all.truncate(most);
        all
    }

    /// By how much a figure may be too low.
    pub(crate) fn short(&self) -> u64 {
        self.short
    }

    #[cold]
    fn cut_back(&mut self) {
        let weight =
            |kinds: &[Option<Stopped>; 3]| kinds.iter().flatten().map(Stopped::weight).max().unwrap_or_default();
        let mut weights: Vec<(u64, u64)> = self.table.values().map(weight).collect();
        weights.sort_unstable_by(|one, other| other.cmp(one));
        let floor = weights.get(KEPT).copied().unwrap_or_default();
        self.short = self.short.saturating_add(floor.0);
        let mut room = KEPT;
        self.table.retain(|_, kinds| {
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
    fn the_worst_of_many_are_found_in_a_bounded_table() {
        let mut worst = Worst::default();
        for round in 0..50_u64 {
            for heavy in 0..20_u64 {
                for _ in 0..=heavy {
                    worst.add(Kind::Ip, &format!("heavy-{heavy}"), None, Verdict::Deny, round);
                }
            }
            for light in 0..1_000_u64 {
                worst.add(Kind::Ip, &format!("light-{round}-{light}"), None, Verdict::Deny, round);
            }
            assert!(worst.table.len() <= KEPT * 2);
        }
        let top = worst.top(5);
        let names: Vec<&str> = top.iter().map(|(_, name, _)| *name).collect();
        assert_eq!(names, ["heavy-19", "heavy-18", "heavy-17", "heavy-16", "heavy-15"]);
        let (_, _, first) = top.first().unwrap();
        assert!(first.denied <= 1_000 && first.denied + worst.short() >= 1_000, "{}", worst.short());
    }

    #[test]
    fn a_user_and_an_address_of_one_name_are_two() {
        let mut worst = Worst::default();
        worst.add(Kind::User, "192.0.2.1", Some(1), Verdict::Ban, 5);
        worst.add(Kind::Ip, "192.0.2.1", Some(0), Verdict::Warn, 7);
        let top = worst.top(10);
        assert_eq!(top.len(), 2);
        assert!(top.first().is_some_and(|(kind, _, own)| *kind == Kind::User && own.rule == Some(1) && own.first == 5));
    }
}
