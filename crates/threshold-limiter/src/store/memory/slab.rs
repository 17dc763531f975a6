//! Balances that outgrow a slot: logs, sub-windows, holds, and whatever is blocked.

use threshold_core::{Balance, Limit};

/// A balance kept whole, with the limit it is under.
#[derive(Debug)]
pub(super) struct Large {
    pub(super) limit: Limit,
    pub(super) balance: Balance,
}

/// Large balances by number, and how many bytes they take.
#[derive(Debug, Default)]
pub(super) struct Slab {
    entries: Vec<Option<Box<Large>>>,
    free: Vec<u32>,
    bytes: usize,
}

impl Slab {
    pub(super) fn bytes(&self) -> usize {
        let tables = self.entries.capacity().saturating_mul(size_of::<Option<Box<Large>>>());
        self.bytes.saturating_add(tables).saturating_add(self.free.capacity().saturating_mul(size_of::<u32>()))
    }

    pub(super) fn get(&self, number: u32) -> Option<&Large> {
        self.entries.get(usize::try_from(number).ok()?)?.as_deref()
    }

    /// Lends a balance until it is [replaced](Self::replace).
    pub(super) fn lend(&mut self, number: u32) -> Balance {
        let entry = usize::try_from(number).ok().and_then(|at| self.entries.get_mut(at)).and_then(Option::as_mut);
        let Some(large) = entry else { return Balance::default() };
        let balance = std::mem::take(&mut large.balance);
        self.bytes = self.bytes.saturating_sub(balance.heap_bytes());
        balance
    }

    pub(super) fn insert(&mut self, limit: Limit, balance: Balance) -> Option<u32> {
        let large = Box::new(Large { limit, balance });
        self.bytes = self.bytes.saturating_add(bytes_of(&large));
        if let Some(number) = self.free.pop()
            && let Some(entry) = self.entries.get_mut(usize::try_from(number).ok()?)
        {
            *entry = Some(large);
            return Some(number);
        }
        let number = u32::try_from(self.entries.len()).ok()?;
        self.entries.push(Some(large));
        Some(number)
    }

    pub(super) fn replace(&mut self, number: u32, limit: Limit, balance: Balance) {
        let entry = usize::try_from(number).ok().and_then(|at| self.entries.get_mut(at)).and_then(Option::as_mut);
        if let Some(large) = entry {
            let before = bytes_of(large);
            **large = Large { limit, balance };
            self.bytes = self.bytes.saturating_sub(before).saturating_add(bytes_of(large));
        }
    }

    pub(super) fn remove(&mut self, number: u32) {
        let entry = usize::try_from(number).ok().and_then(|at| self.entries.get_mut(at));
        if let Some(large) = entry.and_then(Option::take) {
            self.bytes = self.bytes.saturating_sub(bytes_of(&large));
            self.free.push(number);
        }
    }
}

fn bytes_of(large: &Large) -> usize {
    size_of::<Large>().saturating_add(large.balance.heap_bytes())
}
