//! The balances of a plan's keys, with all of their shards locked.

use arrayvec::ArrayVec;
use threshold_core::bill::Charge;
use threshold_core::limit::{Look, Mark};
use threshold_core::plan::MAX_CHARGES;
use threshold_core::{Balance, Balances, Digest, Limit, Timestamp, TraceId};

use super::limits::Limits;
use super::slots::SlotWords;
use super::table::{Charged, Open, Seen, Shard};

/// Keys, with their shards locked, whose balances are changed in place.
#[derive(Debug)]
pub(super) struct Locked<'s> {
    shards: &'s [Shard<'s>],
    open: ArrayVec<Open<'s>, MAX_CHARGES>,
    pub(super) entries: ArrayVec<LockedEntry<'s>, MAX_CHARGES>,
    /// The numbered limits, which all shards share.
    limits: Option<&'s Limits>,
    now: Timestamp,
}

/// One key, with the position of its balance.
#[derive(Debug)]
pub(super) struct LockedEntry<'s> {
    pub(super) key: Digest,
    /// The index of its shard in `open`.
    shard: u8,
    /// Its slot, or the empty slot where its probe ended.
    at: usize,
    /// The words of its slot, if the shard has the key.
    slot: Option<SlotWords<'s>>,
    /// What to write for a charge, if the look could tell: a charge after a look is then two stores.
    charged: Option<Charged>,
}

impl LockedEntry<'_> {
    /// Returns whether the shard does not have the key yet.
    pub(super) fn is_new(&self) -> bool {
        self.slot.is_none()
    }
}

impl<'s> Locked<'s> {
    /// Creates it without any lock. It has more than a kilobyte, so it is filled in place and never moved.
    #[inline]
    pub(super) fn new(shards: &'s [Shard<'s>], now: Timestamp) -> Self {
        let limits = shards.first().map(Shard::limits);
        Self { shards, open: ArrayVec::new(), entries: ArrayVec::new(), limits, now }
    }

    /// Locks the shards of these keys, and finds the keys.
    #[inline]
    pub(super) fn take(&mut self, keys: impl Iterator<Item = Digest>) {
        for key in keys {
            // A plan has at most `MAX_CHARGES` keys, so every key has room.
            let _ = self.entries.try_push(LockedEntry { key, shard: 0, at: 0, slot: None, charged: None });
        }
        self.renew();
    }

    /// Locks and finds again after keys were replaced. Releases all locks first.
    pub(super) fn renew(&mut self) {
        self.lock();
        self.find();
    }

    /// Locks each shard once. If none is contended, in the order of the keys, without sorting; otherwise in ascending order.
    fn lock(&mut self) {
        // A thread that holds a shard while it waits for another one, in any order, could deadlock.
        self.open.clear();
        if !self.try_lock() {
            self.lock_in_order();
        }
    }

    /// Locks the shards in the order of the keys, if no other thread has locked one of them. It never waits, so any order is
    /// free of deadlock.
    fn try_lock(&mut self) -> bool {
        let mut places: ArrayVec<u8, MAX_CHARGES> = ArrayVec::new();
        for entry in &mut self.entries {
            let place = shard_of(entry.key, self.shards.len());
            // There are at most 16, so a scan is faster than a set.
            let open = places.iter().position(|other| *other == place).unwrap_or(places.len());
            if open == places.len() {
                let Some(own) = self.shards.get(usize::from(place)).and_then(Shard::try_open) else {
                    return false;
                };
                let _ = (places.try_push(place), self.open.try_push(own));
            }
            entry.shard = u8::try_from(open).unwrap_or(u8::MAX);
        }
        true
    }

    /// Locks the shards in ascending order and waits for them. The common order is what prevents a deadlock of two plans.
    #[cold]
    fn lock_in_order(&mut self) {
        // `try_lock` has locked the shards before the one that was taken.
        self.open.clear();
        // The shard in the upper byte and the key's index in the lower one: sorted by shard, they still name the key.
        let mut order: ArrayVec<u16, MAX_CHARGES> = ArrayVec::new();
        for (entry, index) in self.entries.iter().zip(0u16..) {
            let _ = order.try_push(u16::from(shard_of(entry.key, self.shards.len())) << 8 | index);
        }
        order.sort_unstable();
        let mut last = None;
        for [shard, index] in order.iter().map(|place| place.to_be_bytes()) {
            if last != Some(shard)
                && let Some(own) = self.shards.get(usize::from(shard))
            {
                let _ = self.open.try_push(own.open());
                last = Some(shard);
            }
            if let Some(entry) = self.entries.get_mut(usize::from(index)) {
                entry.shard = u8::try_from(self.open.len().saturating_sub(1)).unwrap_or(u8::MAX);
            }
        }
    }

    /// Finds the keys in their shards.
    pub(super) fn find(&mut self) {
        for entry in &mut self.entries {
            if let Some(shard) = self.open.get(usize::from(entry.shard)) {
                (entry.at, entry.slot) = shard.probe(entry.key);
            }
        }
    }

    /// Returns how many keys before the `index`th are new to the same shard.
    pub(super) fn new_before(&self, index: usize) -> usize {
        let Some(own) = self.entries.get(index) else { return 0 };
        self.entries.iter().take(index).filter(|entry| entry.is_new() && entry.shard == own.shard).count()
    }

    /// Returns the shard of the `index`th key.
    #[inline]
    pub(super) fn shard(&mut self, index: usize) -> Option<&mut Open<'s>> {
        self.open.get_mut(usize::from(self.entries.get(index)?.shard))
    }

    /// Returns the `index`th key and its shard, if the shard has the key.
    #[inline]
    fn known(&mut self, index: usize) -> Option<(&mut Open<'s>, &mut LockedEntry<'s>)> {
        let entry = self.entries.get_mut(index).filter(|entry| !entry.is_new())?;
        Some((self.open.get_mut(usize::from(entry.shard))?, entry))
    }

    #[inline(never)]
    fn charge_whole(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp, id: TraceId) -> Mark {
        let (limit, cost) = (charge.limit(), charge.cost());
        match self.known(index) {
            Some((shard, entry)) => shard.with_whole(entry.at, limit, |balance| balance.charge(limit, cost, now, id)),
            None => self.begin(index, limit, |balance| balance.charge(limit, cost, now, id)),
        }
    }

    /// Changes an empty balance, and saves it under a new key.
    fn begin<T>(&mut self, index: usize, limit: &Limit, change: impl FnOnce(&mut Balance) -> T) -> T {
        let mut balance = Balance::default();
        let changed = change(&mut balance);
        let now = self.now;
        if let Some(key) = self.entries.get(index).map(|entry| entry.key)
            && let Some(shard) = self.shard(index)
        {
            // By its key, not by `at`: another new key of the same bill may have taken that slot since.
            shard.keep(key, limit, balance, now);
        }
        changed
    }
}

impl Balances for Locked<'_> {
    #[inline(always)]
    fn glance(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> Option<Look> {
        let entry = self.entries.get_mut(index)?;
        let seen = Seen::at(entry.slot?, charge.limit(), self.limits?)?;
        let (look, charged) = seen.glance(charge.limit(), charge.cost(), now)?;
        // The words of a glance count only if the cost fits. A record, which charges past the limit, takes
        // `charge_whole`.
        entry.charged = look.allowed.then_some(charged);
        Some(look)
    }

    #[inline(never)]
    fn look(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> (Look, bool) {
        let (limit, cost) = (charge.limit(), charge.cost());
        let limits = self.limits;
        let Some((shard, entry)) = self.known(index) else { return charge.look(&mut Balance::default(), now) };
        if let (Some(slot), Some(limits)) = (entry.slot, limits)
            && let Some(seen) = Seen::at(slot, limit, limits)
            && let Some((look, charged)) = seen.look(limit, cost, now)
        {
            entry.charged = charged;
            return (look, false);
        }
        shard.look(entry.at, charge, now)
    }

    #[inline]
    fn charge(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp, id: TraceId) -> Mark {
        if let Some(LockedEntry { slot: Some(slot), charged: Some(Charged { words, mark }), .. }) =
            self.entries.get(index)
        {
            // The lock has been held since the look, so the slot still has the balance that these words were computed
            // from.
            slot.set(*words);
            return *mark;
        }
        self.charge_whole(index, charge, now, id)
    }

    fn is_blocked(&self, index: usize, now: Timestamp) -> bool {
        let Some(entry) = self.entries.get(index).filter(|entry| !entry.is_new()) else { return false };
        self.open.get(usize::from(entry.shard)).is_some_and(|shard| shard.is_blocked(entry.at, now))
    }

    fn block(&mut self, index: usize, charge: &Charge<'_>, until: Timestamp) {
        match self.known(index) {
            Some((shard, entry)) => shard.with_whole(entry.at, charge.limit(), |balance| balance.block(until)),
            None => self.begin(index, charge.limit(), |balance| balance.block(until)),
        }
    }

    fn stands_in(&self, index: usize, charge: &Charge<'_>) -> bool {
        self.entries.get(index).is_some_and(|entry| entry.key != charge.key())
    }

    fn copied(&self, index: usize) -> Balance {
        let Some(entry) = self.entries.get(index).filter(|entry| !entry.is_new()) else { return Balance::default() };
        self.open.get(usize::from(entry.shard)).map(|shard| shard.copied(entry.at)).unwrap_or_default()
    }
}

/// Returns the shard of a key, by its highest bits; the lower half finds its slot.
pub(super) fn shard_of(key: Digest, shards: usize) -> u8 {
    // There are a power of two of them, at most 256.
    let last = u8::try_from(shards.saturating_sub(1)).unwrap_or(u8::MAX);
    let [high, _] = key.halves();
    u8::try_from(high >> 56).unwrap_or(0) & last
}

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    /// The keys of one partition of a shared store spread over all shards of a table in memory.
    #[test]
    fn the_keys_of_one_partition_spread_over_all_shards() {
        let mut random = rand::rngs::StdRng::seed_from_u64(7);
        let partition = Digest::from_u128(random.random()).partition();
        let mut shards = [0u32; 256];
        for _ in 0..1 << 14 {
            let key = random.random::<u128>() & !(0xffff << 64) | u128::from(partition.to_u16()) << 64;
            let key = Digest::from_u128(key);
            assert_eq!(key.partition(), partition);
            shards[usize::from(shard_of(key, 256))] += 1;
        }
        // 64 each, give or take six standard deviations.
        assert!(shards.iter().all(|count| (16..=112).contains(count)), "{shards:?}");
    }
}
