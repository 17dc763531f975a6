//! A bounded map for what must outlive a flood of keys: standings, accounts, refunded receipts.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

use threshold_core::Timestamp;

/// How many entries are looked at for one that may go.
const SEARCH: usize = 64;

/// Entries by key. When it is full, what says nothing goes first, then what the caller holds least worth keeping.
#[derive(Debug)]
pub(super) struct Side<K, V> {
    entries: Vec<(K, V)>,
    places: HashMap<K, usize, BuildHasherDefault<AlreadyHashed>>,
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

impl<K: Copy + Eq + Hash, V> Side<K, V> {
    pub(super) fn new(most: usize) -> Self {
        Self { entries: Vec::new(), places: HashMap::default(), most: most.max(8), hand: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, key: K) -> Option<&V> {
        self.entries.get(*self.places.get(&key)?).map(|(_, value)| value)
    }

    pub(super) fn get_mut(&mut self, key: K) -> Option<&mut V> {
        self.entries.get_mut(*self.places.get(&key)?).map(|(_, value)| value)
    }

    pub(super) fn entries(&self) -> &[(K, V)] {
        &self.entries
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
        let gone = if self.entries.len() >= self.most { self.free_one(worth).map(Some) } else { Some(None) };
        let Some(gone) = gone else { return Put::NoRoom };
        self.places.insert(key, self.entries.len());
        self.entries.push((key, value));
        gone.map_or(Put::Kept, Put::InPlaceOf)
    }

    pub(super) fn remove(&mut self, key: K) {
        if let Some(at) = self.places.remove(&key)
            && at < self.entries.len()
        {
            self.entries.swap_remove(at);
            if let Some((moved, _)) = self.entries.get(at) {
                self.places.insert(*moved, at);
            }
        }
    }

    fn free_one(&mut self, worth: impl Fn(&V) -> Worth) -> Option<K> {
        let mut least: Option<(Worth, K)> = None;
        for _ in 0..SEARCH.min(self.entries.len()) {
            self.hand = if self.hand < self.entries.len() { self.hand } else { 0 };
            let Some((key, value)) = self.entries.get(self.hand) else { break };
            let own = worth(value);
            if own < Worth::Protected && least.is_none_or(|(known, _)| own < known) {
                least = Some((own, *key));
            }
            self.hand = self.hand.saturating_add(1);
            if own == Worth::Nothing {
                break;
            }
        }
        let (_, key) = least?;
        self.remove(key);
        Some(key)
    }
}

/// What a value is worth that says nothing from a moment on.
pub(super) fn worth_until(silent_from: Timestamp, now: Timestamp, otherwise: Worth) -> Worth {
    if silent_from <= now { Worth::Nothing } else { otherwise }
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
