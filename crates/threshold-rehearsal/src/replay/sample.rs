//! A map of bounded size: when it is full, it keeps half of its keys, chosen by their digests, and ignores the others from
//! then on. The kept keys are a uniform sample, and counts over them are multiplied.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Values by key. The key must be a digest: its low bits choose the sample, and the map does not hash it again.
#[derive(Debug)]
pub(crate) struct Sample<V> {
    values: HashMap<u64, V, BuildHasherDefault<IdentityHasher>>,
    most: usize,
    /// The number of low bits that are zero in every kept key.
    level: u32,
}

impl<V> Sample<V> {
    pub(crate) fn new(most: usize) -> Self {
        Self { values: HashMap::default(), most, level: 0 }
    }

    /// Returns the value of a key, inserting a new one; `None` for keys outside of the sample.
    #[inline]
    pub(crate) fn entry(&mut self, key: u64, new: impl FnOnce() -> V) -> Option<&mut V> {
        if !self.takes(key) {
            return None;
        }
        // Again, if by chance all keys share the next bit and nothing was dropped.
        while self.values.len() >= self.most && !self.values.contains_key(&key) {
            self.halve();
            if !self.takes(key) {
                return None;
            }
        }
        Some(self.values.entry(key).or_insert_with(new))
    }

    /// Whether a key belongs to the sample. This needs no access to the table.
    #[inline]
    pub(crate) fn takes(&self, key: u64) -> bool {
        key.trailing_zeros() >= self.level
    }

    /// Changes the value of a key, inserting a new one, if it belongs to the sample.
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
        // The test depends on the key alone and not on when it came, so the kept ones have been counted from their
        // first request.
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
pub(crate) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
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
        // The low bits of all keys in a sample are zero, and hashbrown selects a bucket by the low bits.
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
    fn counts_are_exact_until_the_map_is_full_and_estimates_after() {
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
