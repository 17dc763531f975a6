//! Space-Saving (Metwally, Agrawal and El Abbadi, 2005): the names that occur most, in a fixed number of counters.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Counts names in at most `counters` counters.
///
/// When all are taken, a new name takes over the smallest counter with its count, which is the most by which the count of the new
/// name is too high. So, for N counted occurrences, no count is too high by more than N / `counters`, and a name without a counter
/// has occurred at most [`floor`](Self::floor) times, which is not more either.
#[derive(Debug)]
pub(super) struct SpaceSaving {
    counters: usize,
    names: HashMap<Arc<str>, Counter>,
    /// The counts in order, so that the smallest counter is found without a search.
    by_count: BTreeSet<(u64, Arc<str>)>,
    /// The most occurrences that a name without a counter can have because a counter was removed or taken over.
    dropped: u64,
}

/// What is known of one name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counter {
    /// At most so many occurrences.
    pub(super) count: u64,
    /// The most by which the count is too high.
    pub(super) error: u64,
}

impl Counter {
    /// Returns how many occurrences there were at least.
    pub(super) fn at_least(self) -> u64 {
        self.count.saturating_sub(self.error)
    }
}

impl SpaceSaving {
    pub(super) fn new(counters: usize) -> Self {
        Self { counters, names: HashMap::new(), by_count: BTreeSet::new(), dropped: 0 }
    }

    /// Counts occurrences of a name.
    pub(super) fn add(&mut self, name: &Arc<str>, occurrences: u64) {
        let mut counter = match self.names.get(name) {
            Some(counter) => {
                self.by_count.remove(&(counter.count, Arc::clone(name)));
                *counter
            }
            None => self.take_over(),
        };
        counter.count = counter.count.saturating_add(occurrences);
        self.by_count.insert((counter.count, Arc::clone(name)));
        self.names.insert(Arc::clone(name), counter);
    }

    /// Returns a counter for a new name.
    fn take_over(&mut self) -> Counter {
        if self.names.len() >= self.counters
            && let Some((count, smallest)) = self.by_count.pop_first()
        {
            self.names.remove(&smallest);
            self.dropped = self.dropped.max(count);
        }
        Counter { count: self.dropped, error: self.dropped }
    }

    /// Returns the most occurrences that a name without a counter can have.
    pub(super) fn floor(&self) -> u64 {
        self.dropped
    }

    /// Returns the names that have a counter.
    pub(super) fn counters(&self) -> impl Iterator<Item = (&Arc<str>, &Counter)> {
        self.names.iter()
    }

    /// Forgets a name.
    pub(super) fn forget(&mut self, name: &str) {
        if let Some((name, counter)) = self.names.remove_entry(name) {
            self.by_count.remove(&(counter.count, name));
        }
    }
}

#[cfg(test)]
#[expect(clippy::arithmetic_side_effects, reason = "a sum of a test that overflows should panic")]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    impl SpaceSaving {
        /// Returns what is known of a name.
        fn get(&self, name: &str) -> Counter {
            self.names.get(name).copied().unwrap_or(Counter { count: self.dropped, error: self.dropped })
        }

        /// Returns the most bytes of memory that this takes: the tables at their capacity, nodes of the tree half full, and each name with
        /// its two counts and what an allocator adds.
        pub(in super::super) fn bytes(&self) -> usize {
            let table = self.names.capacity() * 8 / 7 * (size_of::<(Arc<str>, Counter)>() + 1);
            let tree = self.by_count.len() * size_of::<(u64, Arc<str>)>() * 2;
            let names: usize = self.names.keys().map(|name| name.len() + 16 + 16).sum();
            table + tree + names
        }
    }

    fn counted(counters: usize, names: &[(u8, u64)]) -> (SpaceSaving, BTreeMap<String, u64>) {
        let (mut sketch, mut exact) = (SpaceSaving::new(counters), BTreeMap::new());
        for (name, occurrences) in names {
            let name = format!("n{name}");
            sketch.add(&name.as_str().into(), *occurrences);
            *exact.entry(name).or_default() += occurrences;
        }
        (sketch, exact)
    }

    proptest! {
        /// The two laws of the sketch, for streams of any weights.
        ///
        /// Woken by an `error` of 0 in `take_over`, by `pop_last`, and by a `floor` of 0.
        #[test]
        fn a_name_above_the_share_of_a_counter_has_one_and_counts_are_off_by_their_error_at_most(
            names in proptest::collection::vec((0..30_u8, 1..20_u64), 0..300),
            counters in 1..20_usize,
        ) {
            let (sketch, exact) = counted(counters, &names);
            let total: u64 = exact.values().sum();
            prop_assert!(sketch.counters().count() <= counters && sketch.by_count.len() == sketch.names.len());
            prop_assert!(sketch.floor() <= total / counters as u64);
            for (name, truth) in &exact {
                let counter = sketch.get(name);
                prop_assert!(counter.at_least() <= *truth && *truth <= counter.count, "{name}: {truth}, {counter:?}");
                prop_assert!(counter.error <= total / counters as u64);
                if *truth > total / counters as u64 {
                    prop_assert!(sketch.names.contains_key(name.as_str()), "{name} has {truth} of {total}");
                }
            }
        }

        #[test]
        fn few_names_are_counted_exactly(names in proptest::collection::vec((0..10_u8, 1..20_u64), 0..100)) {
            let (sketch, exact) = counted(10, &names);
            for (name, truth) in exact {
                prop_assert_eq!(sketch.get(&name), Counter { count: truth, error: 0 });
            }
        }

        /// Woken by leaving the forgotten name in `by_count`.
        #[test]
        fn a_forgotten_name_is_gone_and_the_others_keep_their_laws(
            names in proptest::collection::vec((0..12_u8, 1..20_u64), 0..100),
            forgotten in 0..12_u8,
            later in proptest::collection::vec((0..12_u8, 1..20_u64), 0..100),
        ) {
            let (mut sketch, mut exact) = counted(6, &names);
            let gone = format!("n{forgotten}");
            sketch.forget(&gone);
            prop_assert!(sketch.counters().all(|(name, _)| **name != *gone));
            exact.remove(&gone);
            for (name, occurrences) in later.into_iter().filter(|(name, _)| *name != forgotten) {
                let name = format!("n{name}");
                sketch.add(&name.as_str().into(), occurrences);
                *exact.entry(name).or_default() += occurrences;
            }
            prop_assert!(sketch.counters().count() <= 6 && sketch.by_count.len() == sketch.names.len());
            for (name, truth) in exact {
                let counter = sketch.get(&name);
                prop_assert!(counter.at_least() <= truth && truth <= counter.count, "{name}: {truth}, {counter:?}");
            }
        }
    }
}
