//! Balances that do not fit into a slot: logs, sub-windows, concurrency holds, blocked balances, refunded buckets.

use threshold_core::balance::Small;
use threshold_core::{Balance, Limit};

/// A balance with its limit.
#[derive(Debug)]
pub(super) struct Large {
    pub(super) limit: Limit,
    pub(super) balance: Balance,
}

/// Large balances by number.
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

    /// Changes a balance, which is under `limit` from now on if `change` returns `true` too. Returns its small form, if it then fits into
    /// a slot.
    pub(super) fn change<T>(
        &mut self,
        number: u32,
        limit: &Limit,
        change: impl FnOnce(&mut Balance) -> (T, bool),
    ) -> (T, Option<Small>) {
        let entry = usize::try_from(number).ok().and_then(|at| self.entries.get_mut(at)).and_then(Option::as_mut);
        let Some(large) = entry else { return (change(&mut Balance::default()).0, None) };
        // Measured before the change, which may grow or shrink the part on the heap.
        let before = bytes_of(large);
        let (answer, changed) = change(&mut large.balance);
        if !changed {
            return (answer, None);
        }
        large.limit = *limit;
        self.bytes = self.bytes.saturating_sub(before).saturating_add(bytes_of(large));
        (answer, large.balance.to_small(limit))
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
