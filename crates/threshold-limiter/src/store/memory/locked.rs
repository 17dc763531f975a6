//! The shards of several keys, locked at once and in one order.

use std::hint::black_box;

use arrayvec::ArrayVec;
use threshold_core::plan::MAX_CHARGES;
use threshold_core::{Balance, Digest, Limit, Timestamp};

use super::lock;
use super::table::Shard;
use crate::sync::{Mutex, MutexGuard};

/// The keys of one step.
pub(super) type Keys = ArrayVec<Digest, MAX_CHARGES>;
/// Where they are; `None` where there is no such key.
pub(super) type Places = ArrayVec<Option<usize>, MAX_CHARGES>;
/// What is known of them.
pub(super) type Balances = ArrayVec<Balance, MAX_CHARGES>;

/// Locked shards; each key knows which is its own.
#[derive(Debug, Default)]
pub(super) struct Locked<'s> {
    guards: ArrayVec<MutexGuard<'s, Shard>, MAX_CHARGES>,
    of: [u8; MAX_CHARGES],
}

impl<'s> Locked<'s> {
    /// Locks the shards of these keys, each once, in ascending order: two plans never wait for each other in a circle.
    /// Whatever was locked before is unlocked first.
    pub(super) fn lock(&mut self, shards: &'s [Mutex<Shard>], keys: &[Digest]) {
        self.guards.clear();
        // A shard and, below it, which key: sorted by the one, they still tell the other.
        let mut order = [0u16; MAX_CHARGES];
        for ((key, index), place) in keys.iter().zip(0u16..).zip(&mut order) {
            *place = u16::from(shard_of(*key, shards.len())) << 8 | index;
        }
        let order = order.get_mut(..keys.len()).unwrap_or_default();
        order.sort_unstable();
        let mut last = None;
        for [shard, index] in order.iter().map(|place| place.to_be_bytes()) {
            if last != Some(shard)
                && let Some(mutex) = shards.get(usize::from(shard))
            {
                let _ = self.guards.try_push(lock(mutex));
                last = Some(shard);
            }
            if let Some(of) = self.of.get_mut(usize::from(index)) {
                *of = u8::try_from(self.guards.len().saturating_sub(1)).unwrap_or(u8::MAX);
            }
        }
    }

    /// The shard of the `index`th key.
    #[inline]
    pub(super) fn shard(&mut self, index: usize) -> Option<&mut Shard> {
        let guard = self.guards.get_mut(usize::from(*self.of.get(index)?))?;
        Some(&mut **guard)
    }

    /// Where these keys are. The memory of all of them is asked for before any is waited for.
    pub(super) fn places(&self, keys: &[Digest], places: &mut Places) {
        let own = |index: usize| self.of.get(index).and_then(|of| self.guards.get(usize::from(*of)));
        let touch = |(index, key): (usize, &Digest)| own(index).map_or(0, |shard| shard.touch(*key));
        black_box(keys.iter().enumerate().map(touch).fold(0, std::ops::BitXor::bitxor));
        places.clear();
        for (index, key) in keys.iter().enumerate() {
            let _ = places.try_push(own(index).and_then(|shard| shard.place(*key)));
        }
    }

    /// Lends what is known of keys at these places, to be [put back](Self::put_back) one by one.
    #[inline]
    pub(super) fn lend(&mut self, places: &[Option<usize>], balances: &mut Balances) {
        for (place, of) in places.iter().zip(&self.of) {
            let shard = self.guards.get_mut(usize::from(*of));
            let known = shard.zip(*place).map(|(shard, place)| shard.lend(place));
            let _ = balances.try_push(known.unwrap_or_default());
        }
    }

    /// Puts back the balance of the `index`th key.
    #[inline]
    pub(super) fn put_back(
        &mut self,
        (index, key, place): (usize, Digest, Option<usize>),
        limit: &Limit,
        balance: &mut Balance,
        changed: bool,
        now: Timestamp,
    ) {
        let Some(shard) = self.shard(index) else { return };
        match place {
            Some(place) => shard.put_back(place, limit, balance, changed),
            None if changed => shard.keep(key, limit, std::mem::take(balance), now),
            None => {}
        }
    }
}

/// The shard of a key, by its highest bits; its lowest ones find its slot.
pub(super) fn shard_of(key: Digest, shards: usize) -> u8 {
    // There are a power of two of them, at most 256.
    let last = u8::try_from(shards.saturating_sub(1)).unwrap_or(u8::MAX);
    u8::try_from(key.to_u128() >> 120).unwrap_or(0) & last
}
