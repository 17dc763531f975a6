//! The blocks of each address, in a table of a fixed size.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use threshold_core::Event;
use threshold_core::policy::Alert;

use super::causes::{Causes, Why};
use super::steps::{Scale, Steps};

/// The most addresses that are counted at once.
///
/// A new address takes the place of the one with the lowest rank, and its rank (Space-Saving): so every address with more than a
/// 8,192th of all blocks of the period is counted, whatever the others do. Its count begins when it takes its place, and lacks what it
/// had before: at most that same share.
///
/// An address has at most 122 counts of 16 bytes and the names of 4 rules, so the table has at most 30 MB, and 2 MB if each was
/// blocked a few times.
pub(super) const MAX_ADDRESSES: usize = 8_192;

/// The blocks of each address.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    entries: HashMap<Arc<str>, Entry>,
    /// All of them, those with the lowest rank first, and of these the oldest.
    order: BTreeSet<(u64, u64, Arc<str>)>,
    admitted: u64,
    /// How often addresses were judged.
    turn: u64,
}

#[derive(Debug)]
struct Entry {
    steps: Steps,
    causes: Causes,
    /// How many were admitted before.
    admitted: u64,
    /// The rank of the address whose place it has taken, and the step in which it did.
    inherited: u64,
    since: u64,
    /// The first and the last step of the blocks that were counted in a turn, and that turn.
    new: (u64, u64),
    turn: u64,
}

impl Entry {
    /// The most blocks that it can have had.
    fn rank(&self) -> u64 {
        self.steps.sum().saturating_add(self.inherited)
    }
}

impl Addresses {
    /// Counts blocks, of which `event` says why if that is known. An address that `keeps` is never pushed out.
    pub(super) fn add(
        &mut self,
        address: &str,
        (number, count): (u64, u64),
        event: Option<&Event>,
        keeps: impl Fn(&str) -> bool,
    ) {
        if let Some((name, entry)) = self.entries.get_key_value(address) {
            self.order.remove(&(entry.rank(), entry.admitted, Arc::clone(name)));
        }
        let is_full = self.entries.len() >= MAX_ADDRESSES && !self.entries.contains_key(address);
        let inherited = if is_full { self.push_out(keeps) } else { 0 };
        let name: Arc<str> = match self.entries.get_key_value(address) {
            Some((name, _)) => Arc::clone(name),
            None => address.into(),
        };
        let entry = self.entries.entry(Arc::clone(&name)).or_insert_with(|| {
            self.admitted = self.admitted.saturating_add(1);
            let (new, turn) = ((number, number), self.turn);
            let (steps, causes) = (Steps::default(), Causes::default());
            Entry { steps, causes, admitted: self.admitted, inherited, since: number, new, turn }
        });
        if entry.turn != self.turn {
            (entry.new, entry.turn) = ((number, number), self.turn);
        }
        entry.new = (entry.new.0.min(number), entry.new.1.max(number));
        entry.steps.add(number, count);
        event.into_iter().for_each(|event| entry.causes.add(event, number));
        self.order.insert((entry.rank(), entry.admitted, name));
    }

    /// Pushes out the address with the lowest rank, and returns that rank.
    fn push_out(&mut self, keeps: impl Fn(&str) -> bool) -> u64 {
        let Some(lowest) = self.order.iter().find(|(_, _, name)| !keeps(name)).cloned() else { return 0 };
        self.order.remove(&lowest);
        self.entries.remove(&lowest.2);
        lowest.0
    }

    pub(super) fn remove(&mut self, address: &str) {
        if let Some((name, entry)) = self.entries.remove_entry(address) {
            self.order.remove(&(entry.rank(), entry.admitted, name));
        }
    }

    /// Forgets what is no longer judged.
    pub(super) fn forget(&mut self, judged: (u64, u64)) {
        self.entries.retain(|_, entry| {
            entry.steps.forget(judged);
            // The blocks that it stands for are as old.
            if entry.since < judged.0 {
                entry.inherited = 0;
            }
            !entry.steps.is_empty()
        });
        self.reorder();
    }

    pub(super) fn rescale(&mut self, from: Scale, to: Scale) {
        self.entries.values_mut().for_each(|entry| {
            entry.steps.rescale(from, to);
            entry.inherited = 0;
            entry.new = (from.rescaled(entry.new.0, to), from.rescaled(entry.new.1, to));
        });
        self.reorder();
    }

    fn reorder(&mut self) {
        let place = |(name, entry): (&Arc<str>, &Entry)| (entry.rank(), entry.admitted, Arc::clone(name));
        self.order = self.entries.iter().map(place).collect();
    }

    /// Returns the addresses with at least this many blocks that go on: the warning threshold is reached in the period that ends with
    /// the step `now`, or in one of the blocks that are new in this turn, which may be reported late. Those with the most blocks come
    /// first.
    pub(super) fn busy(
        &self,
        at_least: u64,
        now: u64,
        (scale, alert): (Scale, Alert),
    ) -> impl Iterator<Item = (&Arc<str>, &Steps)> {
        let busy = self.order.iter().rev().take_while(move |(rank, ..)| *rank >= at_least);
        let entries = busy.filter_map(|(_, _, name)| Some((name, self.entries.get(name)?)));
        let goes_on = move |entry: &Entry| {
            let new = Some(entry.new).filter(|_| entry.turn == self.turn);
            let mut parts = std::iter::once((now, now)).chain(new);
            parts.any(|part| entry.steps.peak_in(part, scale, alert) >= alert.warning)
        };
        let busy = entries.filter(move |(_, entry)| entry.steps.sum() >= at_least && goes_on(entry));
        busy.map(|(name, entry)| (name, &entry.steps))
    }

    /// Begins the next turn.
    pub(super) fn next_turn(&mut self) {
        self.turn = self.turn.wrapping_add(1);
    }

    /// Returns why an address was blocked.
    pub(super) fn why(&self, address: &str) -> Why {
        self.entries.get(address).map(|entry| entry.causes.most()).unwrap_or_default()
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
