//! A bounded map for records that must survive a flood of keys: standings, accounts, refunded receipts.

use std::hash::{Hash, Hasher};

use hashbrown::HashTable;
use threshold_core::Timestamp;

/// How many entries are searched for one to evict.
const SEARCH: usize = 64;

/// A map of at most `max` entries. When it is full, worthless entries are evicted first, then those of the least worth.
#[derive(Debug)]
pub(super) struct BoundedMap<K, V> {
    entries: Vec<(K, V)>,
    /// The index of each key in `entries`. Five bytes an entry; the keys themselves are not stored twice.
    places: HashTable<u32>,
    max: usize,
    /// Where the next search for an entry to evict begins, as in a clock algorithm.
    hand: usize,
}

/// The worth of an entry: what would be lost by its eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Worth {
    /// Nothing would be lost.
    Nothing,
    /// This much would be lost; comparable with that of others.
    Some(u64),
    /// The entry must not be evicted.
    Protected,
}

/// The result of an insertion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Put<K> {
    /// The value was stored.
    Kept,
    /// The value was stored, and the entry with this key was evicted.
    InPlaceOf(K),
    /// There was no room.
    NoRoom,
}

impl<K: Copy + Eq + Hash, V> BoundedMap<K, V> {
    pub(super) fn new(max: usize) -> Self {
        Self { entries: Vec::new(), places: HashTable::new(), max: max.max(8), hand: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, key: K) -> Option<&V> {
        self.entries.get(self.place(key)?).map(|(_, value)| value)
    }

    pub(super) fn get_mut(&mut self, key: K) -> Option<&mut V> {
        let at = self.place(key)?;
        self.entries.get_mut(at).map(|(_, value)| value)
    }

    pub(super) fn entries(&self) -> &[(K, V)] {
        &self.entries
    }

    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= self.max
    }

    /// Returns whether an entry could be evicted. Evicts nothing.
    pub(super) fn could_free_one(&self, worth: impl Fn(&V) -> Worth) -> bool {
        self.least_worth(worth).0.is_some()
    }

    /// Stores a value, and evicts another by `worth` if the map is full. Returns whether there was room.
    pub(super) fn insert(&mut self, key: K, value: V, worth: impl Fn(&V) -> Worth) -> bool {
        self.put(key, value, worth) != Put::NoRoom
    }

    /// Stores a value as [`insert`](Self::insert) does, and returns which entry was evicted.
    pub(super) fn put(&mut self, key: K, value: V, worth: impl Fn(&V) -> Worth) -> Put<K> {
        if let Some(own) = self.get_mut(key) {
            *own = value;
            return Put::Kept;
        }
        let gone = if self.is_full() { self.free_one(worth).map(|(gone, _)| Some(gone)) } else { Some(None) };
        let Some(gone) = gone else { return Put::NoRoom };
        // Grows by a sixteenth instead of doubling: the entries are many and permanent, and slack would be memory for nothing.
        if self.entries.len() == self.entries.capacity() {
            self.entries.reserve_exact(self.entries.len().checked_div(16).unwrap_or(0).max(16));
        }
        let at = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        self.entries.push((key, value));
        let entries = &self.entries;
        // The index holds no hashes, so it asks for them again when it grows.
        let again = |at: &u32| entries.get(index(*at)).map_or(0, |(own, _)| hash(own));
        self.places.insert_unique(hash(&key), at, again);
        gone.map_or(Put::Kept, Put::InPlaceOf)
    }

    /// Stores a value as [`put`](Self::put) does, but evicts only entries that are worth nothing or less than the new one.
    pub(super) fn put_if_worthier(&mut self, key: K, value: V, worth: impl Fn(&V) -> Worth) -> Put<K> {
        let own = worth(&value);
        self.put(key, value, |other| worth_beside(worth(other), own))
    }

    /// Returns whether [`put_if_worthier`](Self::put_if_worthier) would store this value. Changes nothing.
    pub(super) fn would_keep(&self, key: K, value: &V, worth: impl Fn(&V) -> Worth) -> bool {
        let own = worth(value);
        let may_go = || self.could_free_one(|other| worth_beside(worth(other), own));
        !self.is_full() || self.place(key).is_some() || may_go()
    }

    pub(super) fn remove(&mut self, key: K) -> Option<V> {
        let at = self.place(key)?;
        // Before `swap_remove`: after it, this index belongs to another entry.
        if let Ok(place) = self.places.find_entry(hash(&key), |own| index(*own) == at) {
            place.remove();
        }
        let (_, removed) = self.entries.swap_remove(at);
        // `swap_remove` has moved the last entry here.
        let last = self.entries.len();
        if let Some((moved, _)) = self.entries.get(at)
            && let Some(place) = self.places.find_mut(hash(moved), |own| index(*own) == last)
        {
            *place = u32::try_from(at).unwrap_or(u32::MAX);
        }
        Some(removed)
    }

    /// Evicts one entry, if one may be evicted.
    pub(super) fn free_one(&mut self, worth: impl Fn(&V) -> Worth) -> Option<(K, V)> {
        let (least, hand) = self.least_worth(worth);
        self.hand = hand;
        let key = least?;
        Some((key, self.remove(key)?))
    }

    fn place(&self, key: K) -> Option<usize> {
        let is_own = |at: &u32| self.entries.get(index(*at)).is_some_and(|(own, _)| *own == key);
        self.places.find(hash(&key), is_own).map(|at| index(*at))
    }

    /// Returns the entry of the least worth among those searched, and where the next search begins.
    fn least_worth(&self, worth: impl Fn(&V) -> Worth) -> (Option<K>, usize) {
        let mut least: Option<(Worth, K)> = None;
        let mut hand = self.hand;
        for _ in 0..SEARCH.min(self.entries.len()) {
            // The map may have shrunk since the last search.
            hand = if hand < self.entries.len() { hand } else { 0 };
            let Some((key, value)) = self.entries.get(hand) else { break };
            let own = worth(value);
            if own < Worth::Protected && least.is_none_or(|(known, _)| own < known) {
                least = Some((own, *key));
            }
            hand = hand.saturating_add(1);
            // No entry is worth less.
            if own == Worth::Nothing {
                break;
            }
        }
        (least.map(|(_, key)| key), hand)
    }
}

/// Returns the worth of an entry beside a new one: protected, unless it is worth nothing or less than the new one.
fn worth_beside(entry: Worth, new: Worth) -> Worth {
    if entry == Worth::Nothing || entry < new { entry } else { Worth::Protected }
}

/// Returns the worth of a value that has no effect from `silent_from` on.
pub(super) fn worth_until(silent_from: Timestamp, now: Timestamp, otherwise: Worth) -> Worth {
    if silent_from <= now { Worth::Nothing } else { otherwise }
}

fn hash(key: &impl Hash) -> u64 {
    let mut hasher = AlreadyHashed::default();
    key.hash(&mut hasher);
    hasher.finish()
}

fn index(place: u32) -> usize {
    usize::try_from(place).unwrap_or(usize::MAX)
}

/// A hasher for keys that are digests under a secret or random ids, and so need no hashing.
#[derive(Debug, Default)]
pub(super) struct AlreadyHashed(u64);

impl Hasher for AlreadyHashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u128(&mut self, value: u128) {
        // Both halves: the lowest bits have chosen the shard of a standing, and so are the same for all keys of one
        // map.
        self.0 = u64::try_from(value >> 64).unwrap_or(0) ^ u64::try_from(value & u128::from(u64::MAX)).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use threshold_core::{Digest, Standing};

    fn digest(number: u32) -> Digest {
        Digest::from_u128(u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    /// A subject with strikes of one rule takes at most 100 bytes, including the map's slack.
    #[test]
    fn a_subject_takes_at_most_a_hundred_bytes() {
        assert_eq!(size_of::<(Digest, Standing)>(), 80);
        let mut map = BoundedMap::new(usize::MAX);
        for number in 0..100_000u32 {
            map.insert(digest(number), Standing::default(), |_| Worth::Protected);
            let bytes = map.entries.capacity() * size_of::<(Digest, Standing)>() + map.places.allocation_size();
            assert!(number < 1_000 || bytes <= 100 * map.len(), "{bytes} bytes for {} subjects", map.len());
        }
    }

    proptest! {
        /// `would_keep` foretells `put_if_worthier`, which never evicts an entry for one that is not worth more. Woken by
        /// `entry <= new` in `worth_beside`.
        #[test]
        fn an_entry_is_evicted_for_a_worthier_one_only(
            values in prop::collection::vec(0u64..4, 8),
            new in prop::collection::vec((8u32..40, 0u64..4), 1..20),
        ) {
            let worth = |value: &u64| match value {
                0 => Worth::Nothing,
                3 => Worth::Protected,
                some => Worth::Some(*some),
            };
            let mut map = BoundedMap::new(8);
            for (number, value) in (0u32..).zip(&values) {
                prop_assert_eq!(map.put_if_worthier(digest(number), *value, worth), Put::Kept);
            }
            for (number, value) in new {
                let before: Vec<(Digest, u64)> = map.entries().to_vec();
                let known = map.get(digest(number)).is_some();
                let foretold = map.would_keep(digest(number), &value, worth);
                let put = map.put_if_worthier(digest(number), value, worth);
                prop_assert_eq!(foretold, put != Put::NoRoom);
                prop_assert_eq!(map.get(digest(number)).is_some(), foretold);
                let least = before.iter().map(|(_, own)| *own).min();
                prop_assert_eq!(foretold, known || least == Some(0) || least < Some(value));
                if let Put::InPlaceOf(gone) = put {
                    let gone = before.iter().find(|(key, _)| *key == gone).map(|(_, own)| *own);
                    prop_assert!(gone == Some(0) || gone < Some(value));
                }
            }
        }

        #[test]
        fn it_agrees_with_a_btree_map(steps in prop::collection::vec((0u32..24, any::<Option<u8>>()), 0..200)) {
            let mut map = BoundedMap::new(1_000);
            let mut model = BTreeMap::new();
            for (number, value) in steps {
                match value {
                    Some(value) => {
                        prop_assert!(map.insert(digest(number), value, |_| Worth::Protected));
                        model.insert(number, value);
                    }
                    None => {
                        map.remove(digest(number));
                        model.remove(&number);
                    }
                }
                prop_assert_eq!(map.len(), model.len());
                for number in 0..24 {
                    prop_assert_eq!(map.get(digest(number)), model.get(&number));
                }
            }
        }
    }
}
