//! A bounded map for what must outlive a flood of keys: standings, accounts, refunded receipts.

use std::hash::{Hash, Hasher};

use hashbrown::HashTable;
use threshold_core::Timestamp;

/// How many entries are looked at for one that may go.
const SEARCH: usize = 64;

/// Entries by key. When it is full, what says nothing goes first, then what the caller holds least worth keeping.
#[derive(Debug)]
pub(super) struct BoundedMap<K, V> {
    entries: Vec<(K, V)>,
    /// Where each key is among them: five bytes for a place, and no key twice.
    places: HashTable<u32>,
    most: usize,
    hand: usize,
}

/// Whether an entry may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Worth {
    /// At no loss.
    Nothing,
    /// At a loss of so much.
    Some(u64),
    /// Never.
    Protected,
}

/// What became of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Put<K> {
    /// It is here.
    Kept,
    /// It is here, and another is not any more.
    InPlaceOf(K),
    /// There was no room.
    NoRoom,
}

impl<K: Copy + Eq + Hash, V> BoundedMap<K, V> {
    pub(super) fn new(most: usize) -> Self {
        Self { entries: Vec::new(), places: HashTable::new(), most: most.max(8), hand: 0 }
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
        self.entries.len() >= self.most
    }

    /// Whether any of those that are looked at may go. Nothing goes yet.
    pub(super) fn could_free_one(&self, worth: impl Fn(&V) -> Worth) -> bool {
        self.dispensable(worth).0.is_some()
    }

    /// Keeps a value; says whether there was room. `worth` judges the others where there was not.
    pub(super) fn insert(&mut self, key: K, value: V, worth: impl Fn(&V) -> Worth) -> bool {
        self.put(key, value, worth) != Put::NoRoom
    }

    /// As [`insert`](Self::insert), and says who had to go.
    pub(super) fn put(&mut self, key: K, value: V, worth: impl Fn(&V) -> Worth) -> Put<K> {
        if let Some(own) = self.get_mut(key) {
            *own = value;
            return Put::Kept;
        }
        let gone = if self.is_full() { self.free_one(worth).map(|(gone, _)| Some(gone)) } else { Some(None) };
        let Some(gone) = gone else { return Put::NoRoom };
        // By a sixteenth, and not by as much again: there are many of these, and they stay.
        if self.entries.len() == self.entries.capacity() {
            self.entries.reserve_exact(self.entries.len().checked_div(16).unwrap_or(0).max(16));
        }
        let at = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        self.entries.push((key, value));
        let entries = &self.entries;
        let again = |at: &u32| entries.get(index(*at)).map_or(0, |(own, _)| hash(own));
        self.places.insert_unique(hash(&key), at, again);
        gone.map_or(Put::Kept, Put::InPlaceOf)
    }

    /// As [`put`](Self::put), but an entry goes only at no loss, or for one that is worth more.
    pub(super) fn put_if_worthier(&mut self, key: K, value: V, worth: impl Fn(&V) -> Worth) -> Put<K> {
        let own = worth(&value);
        self.put(key, value, |other| worth_beside(worth(other), own))
    }

    /// Whether [`put_if_worthier`](Self::put_if_worthier) would keep this. Nothing changes.
    pub(super) fn would_keep(&self, key: K, value: &V, worth: impl Fn(&V) -> Worth) -> bool {
        let own = worth(value);
        let may_go = || self.could_free_one(|other| worth_beside(worth(other), own));
        !self.is_full() || self.place(key).is_some() || may_go()
    }

    pub(super) fn remove(&mut self, key: K) -> Option<V> {
        let at = self.place(key)?;
        if let Ok(place) = self.places.find_entry(hash(&key), |own| index(*own) == at) {
            place.remove();
        }
        let (_, removed) = self.entries.swap_remove(at);
        // What was last is here now.
        let last = self.entries.len();
        if let Some((moved, _)) = self.entries.get(at)
            && let Some(place) = self.places.find_mut(hash(moved), |own| index(*own) == last)
        {
            *place = u32::try_from(at).unwrap_or(u32::MAX);
        }
        Some(removed)
    }

    /// Makes one entry go, if one may.
    pub(super) fn free_one(&mut self, worth: impl Fn(&V) -> Worth) -> Option<(K, V)> {
        let (least, hand) = self.dispensable(worth);
        self.hand = hand;
        let key = least?;
        Some((key, self.remove(key)?))
    }

    fn place(&self, key: K) -> Option<usize> {
        let is_own = |at: &u32| self.entries.get(index(*at)).is_some_and(|(own, _)| *own == key);
        self.places.find(hash(&key), is_own).map(|at| index(*at))
    }

    /// Which entry may go at the least loss, of those that are looked at; and where the next search begins.
    fn dispensable(&self, worth: impl Fn(&V) -> Worth) -> (Option<K>, usize) {
        let mut least: Option<(Worth, K)> = None;
        let mut hand = self.hand;
        for _ in 0..SEARCH.min(self.entries.len()) {
            hand = if hand < self.entries.len() { hand } else { 0 };
            let Some((key, value)) = self.entries.get(hand) else { break };
            let own = worth(value);
            if own < Worth::Protected && least.is_none_or(|(known, _)| own < known) {
                least = Some((own, *key));
            }
            hand = hand.saturating_add(1);
            if own == Worth::Nothing {
                break;
            }
        }
        (least.map(|(_, key)| key), hand)
    }
}

/// What an entry is worth that may go at no loss, or for one that is worth more.
fn worth_beside(entry: Worth, new: Worth) -> Worth {
    if entry == Worth::Nothing || entry < new { entry } else { Worth::Protected }
}

/// What a value is worth that says nothing from a moment on.
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

/// Keys here are digests under a secret, or random ids: as good as hashed.
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

    /// A subject that one rule knows takes at most 100 bytes, whatever their number, with what the table keeps free.
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
        /// A full table is asked first and then told: it keeps what it said it would, and never drops anything for what is
        /// worth no more. Woken by `entry <= new` in
        /// `worth_beside`.
        #[test]
        fn an_entry_goes_for_a_worthier_one_only(
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
        fn it_is_a_map_that_loses_nothing(steps in prop::collection::vec((0u32..24, any::<Option<u8>>()), 0..200)) {
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
