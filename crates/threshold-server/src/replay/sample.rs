//! A map that never grows past its bound: when it is full it keeps half of its keys, chosen by their digest, and from then
//! on only looks at those. What it holds is a fair sample, and counts over it are multiplied.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Values by key. The key must be a digest already: its low bits choose the sample, and it is hashed no further.
#[derive(Debug)]
pub(crate) struct Sample<V> {
    values: HashMap<u64, V, BuildHasherDefault<AsItIs>>,
    most: usize,
    /// Keys are kept whose lowest bits, so many, are all zero.
    level: u32,
}

impl<V> Sample<V> {
    pub(crate) fn new(most: usize) -> Self {
        Self { values: HashMap::default(), most, level: 0 }
    }

    /// The value of a key, new or known; `None` for keys outside the sample.
    #[inline]
    pub(crate) fn entry(&mut self, key: u64, new: impl FnOnce() -> V) -> Option<&mut V> {
        if !self.takes(key) {
            return None;
        }
        while self.values.len() >= self.most && !self.values.contains_key(&key) {
            self.halve();
            if !self.takes(key) {
                return None;
            }
        }
        Some(self.values.entry(key).or_insert_with(new))
    }

    /// Whether this key is of the sample. Most of those that are not are told without a look at the table.
    #[inline]
    pub(crate) fn takes(&self, key: u64) -> bool {
        key.trailing_zeros() >= self.level
    }

    /// Changes the value of a key, new or known, if it is of the sample.
    #[inline]
    pub(crate) fn change(&mut self, key: u64, new: impl FnOnce() -> V, change: impl FnOnce(&mut V)) {
        if let Some(known) = self.values.get_mut(&key) {
            change(known);
        } else if let Some(value) = self.entry(key, new) {
            change(value);
        }
    }

    #[cold]
    fn halve(&mut self) {
        self.level = self.level.saturating_add(1);
        let level = self.level;
        self.values.retain(|key, _| key.trailing_zeros() >= level);
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &V> {
        self.values.values()
    }

    /// How many keys there are for each that is held; 1 while all of them are.
    pub(crate) fn factor(&self) -> u64 {
        1_u64.checked_shl(self.level).unwrap_or(u64::MAX)
    }

    /// Whether every key is held, so that counts are exact.
    pub(crate) fn is_exact(&self) -> bool {
        self.level == 0
    }

    /// How many keys satisfy this.
    pub(crate) fn count(&self, holds: impl Fn(&V) -> bool) -> u64 {
        let held = self.values.values().filter(|value| holds(value)).count();
        u64::try_from(held).unwrap_or(u64::MAX).saturating_mul(self.factor())
    }
}

/// Takes a digest for the hash that it is.
#[derive(Debug, Default)]
pub(crate) struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // Not reached with keys of 64 bits; any mixing will do.
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, digest: u64) {
        // The low bits chose the sample and are alike; the table looks at the low bits.
        self.0 = digest.rotate_left(32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stand-in for a keyed digest: the finaliser of splitmix64, which is a bijection.
    fn digest(number: u64) -> u64 {
        let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    #[test]
    fn counts_are_exact_until_it_is_full_and_close_after() {
        let mut sample = Sample::new(4_096);
        for number in 0..4_096_u64 {
            *sample.entry(digest(number), || 0_u64).unwrap() += 1;
        }
        assert!(sample.is_exact());
        assert_eq!((sample.count(|_| true), sample.count(|count| *count == 2)), (4_096, 0));
        for number in 0..400_000_u64 {
            if let Some(count) = sample.entry(digest(number), || 0) {
                *count += 1;
            }
            assert!(sample.values.len() <= 4_096);
        }
        assert!(!sample.is_exact());
        let all = sample.count(|_| true);
        assert!((360_000..440_000).contains(&all), "{all}");
    }
}
