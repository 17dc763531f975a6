//! The blocks of each address, in a table of a fixed size.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::steps::{Scale, Steps};

/// The most addresses that are counted at once.
///
/// A new address takes the place of the one with the fewest blocks, the oldest of those. So an address with `n` blocks is pushed out
/// only if all others have as many, which takes `n` × 8,192 blocks within the period; and one that has just come is pushed out
/// before its second block only if 8,192 new addresses are blocked in between. At 20 a minute that is 2,700 new ones a second.
///
/// An address has at most 122 counts of 16 bytes, so the table has at most 20 MB, and 1 MB if each was blocked a few times.
pub(super) const MAX_ADDRESSES: usize = 8_192;

/// The blocks of each address.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    entries: HashMap<Arc<str>, Entry>,
    /// All of them, those with the fewest blocks first, and of these the oldest.
    order: BTreeSet<(u64, u64, Arc<str>)>,
    admitted: u64,
}

#[derive(Debug)]
struct Entry {
    steps: Steps,
    /// How many were admitted before.
    admitted: u64,
}

impl Addresses {
    /// Counts blocks. An address that `keeps` is never pushed out.
    pub(super) fn add(&mut self, address: &str, (number, count): (u64, u64), keeps: impl Fn(&str) -> bool) {
        if let Some((name, entry)) = self.entries.get_key_value(address) {
            self.order.remove(&(entry.steps.sum(), entry.admitted, Arc::clone(name)));
        } else if self.entries.len() >= MAX_ADDRESSES {
            self.push_out(keeps);
        }
        let name: Arc<str> = match self.entries.get_key_value(address) {
            Some((name, _)) => Arc::clone(name),
            None => address.into(),
        };
        let entry = self.entries.entry(Arc::clone(&name)).or_insert_with(|| {
            self.admitted = self.admitted.saturating_add(1);
            Entry { steps: Steps::default(), admitted: self.admitted }
        });
        entry.steps.add(number, count);
        self.order.insert((entry.steps.sum(), entry.admitted, name));
    }

    fn push_out(&mut self, keeps: impl Fn(&str) -> bool) {
        let Some(fewest) = self.order.iter().find(|(_, _, name)| !keeps(name)).cloned() else { return };
        self.order.remove(&fewest);
        self.entries.remove(&fewest.2);
    }

    pub(super) fn remove(&mut self, address: &str) {
        if let Some((name, entry)) = self.entries.remove_entry(address) {
            self.order.remove(&(entry.steps.sum(), entry.admitted, name));
        }
    }

    /// Forgets what is no longer judged.
    pub(super) fn forget(&mut self, judged: (u64, u64)) {
        self.entries.retain(|_, entry| {
            entry.steps.forget(judged);
            !entry.steps.is_empty()
        });
        self.reorder();
    }

    pub(super) fn rescale(&mut self, from: Scale, to: Scale) {
        self.entries.values_mut().for_each(|entry| entry.steps.rescale(from, to));
    }

    fn reorder(&mut self) {
        let place = |(name, entry): (&Arc<str>, &Entry)| (entry.steps.sum(), entry.admitted, Arc::clone(name));
        self.order = self.entries.iter().map(place).collect();
    }

    /// Returns the addresses with at least this many blocks, those with the most first.
    pub(super) fn busy(&self, at_least: u64) -> impl Iterator<Item = (&Arc<str>, &Steps)> {
        let busy = self.order.iter().rev().take_while(move |(sum, ..)| *sum >= at_least);
        busy.filter_map(|(_, _, name)| Some((name, &self.entries.get(name)?.steps)))
    }

    pub(super) fn get(&self, address: &str) -> Option<&Steps> {
        self.entries.get(address).map(|entry| &entry.steps)
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> (usize, usize, usize) {
        let longest = self.entries.values().map(|entry| entry.steps.len()).max().unwrap_or(0);
        (self.entries.len(), self.order.len(), longest)
    }
}
