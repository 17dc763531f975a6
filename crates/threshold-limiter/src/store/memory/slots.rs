//! The slots of one shard: a digest and two words each, in an open-addressing table with linear probing.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use threshold_core::Digest;

use super::slot_memory::{LINE, WORDS};
use crate::prefetch::prefetch;

/// A digest (two words), a large figure, and a last word that is 0 in an empty slot.
pub(super) type Slot = [u64; WORDS];

pub(super) const EMPTY: Slot = [0; WORDS];
/// The slots of a cache line. No slot crosses a cache line.
pub(super) const SLOTS_A_LINE: usize = LINE / size_of::<Slot>();
/// The lines that are prefetched for a probe. In a full table one probe in twenty goes further, and one in eleven for the
/// second key of an identity, which begins where the first does.
const PREFETCHED: usize = 3;

/// Slots that never grow. The owner ensures that one is always empty, because a probe ends at an empty slot.
///
/// The words are atomic so that a thread without the lock may [prefetch](Self::prefetch) them; a shared reference to plain
/// memory that another thread writes would be undefined behaviour. All other methods require the shard's lock, which orders
/// the relaxed loads and stores.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slots<'p>(&'p [[AtomicU64; WORDS]]);

/// The two words of a slot that hold its balance. Valid while the lock is held and no key is removed: a removal moves others.
#[derive(Debug, Clone, Copy)]
pub(super) struct SlotWords<'s> {
    large: &'s AtomicU64,
    last: &'s AtomicU64,
}

impl SlotWords<'_> {
    #[inline]
    pub(super) fn get(self) -> [u64; 2] {
        [self.large.load(Relaxed), self.last.load(Relaxed)]
    }

    #[inline]
    pub(super) fn set(self, [large, last]: [u64; 2]) {
        self.large.store(large, Relaxed);
        self.last.store(last, Relaxed);
    }
}

impl<'p> Slots<'p> {
    /// Wraps slots, of which the first begins a cache line.
    pub(super) const fn new(slots: &'p [[AtomicU64; WORDS]]) -> Self {
        Self(slots)
    }

    pub(super) fn bytes(self) -> usize {
        size_of_val(self.0)
    }

    pub(super) fn len(self) -> usize {
        self.0.len()
    }

    #[inline]
    fn slot(self, place: usize) -> Option<&'p [AtomicU64; WORDS]> {
        self.0.get(place)
    }

    /// Prefetches the line where the probe for a key begins and the lines behind it; few probes go further.
    #[inline]
    pub(super) fn prefetch(self, key: Digest) {
        let home = self.home(key);
        for line in 0..PREFETCHED {
            if let Some(slot) = self.slot(home.wrapping_add(line.wrapping_mul(SLOTS_A_LINE))) {
                prefetch(slot);
            }
        }
    }

    #[inline]
    pub(super) fn get(self, place: usize) -> Option<Slot> {
        self.slot(place).map(|slot| slot.each_ref().map(|word| word.load(Relaxed)))
    }

    #[inline]
    pub(super) fn set(self, place: usize, slot: Slot) {
        if let Some(own) = self.slot(place) {
            for (own, word) in own.iter().zip(slot) {
                own.store(word, Relaxed);
            }
        }
    }

    /// Writes the balance of a slot and leaves its key.
    #[inline]
    pub(super) fn set_words(self, place: usize, words: [u64; 2]) {
        if let Some([_, _, large, last]) = self.slot(place) {
            SlotWords { large, last }.set(words);
        }
    }

    /// Returns where the probe for a key begins: at a cache line, in proportion to the lower half of the digest.
    #[inline]
    pub(super) fn home(self, key: Digest) -> usize {
        let [_, low] = key.halves();
        // The product of two 64-bit numbers does not wrap.
        let at = u128::from(low).wrapping_mul(self.len() as u128) >> 64;
        // Rounded down to the start of a line, so that both slots of the line cost one cache miss.
        usize::try_from(at).unwrap_or(0) & !(SLOTS_A_LINE - 1)
    }

    /// Returns the slot of a key, or as an error the empty slot where its probe ends.
    #[inline]
    pub(super) fn find(self, key: Digest) -> Result<usize, usize> {
        let (place, found) = self.probe(key);
        found.map(|_| place).ok_or(place)
    }

    /// Returns where a key's probe ends, and the words of its slot if the key is there.
    #[inline]
    pub(super) fn probe(self, key: Digest) -> (usize, Option<SlotWords<'p>>) {
        let [high, low] = key.halves();
        let mut place = self.home(key);
        loop {
            match self.slot(place) {
                // Before the digests are compared: an empty slot has the digest 0, which is a valid key too.
                Some([_, _, _, last]) if last.load(Relaxed) == 0 => return (place, None),
                Some([own_high, own_low, large, last])
                    if (own_low.load(Relaxed), own_high.load(Relaxed)) == (low, high) =>
                {
                    return (place, Some(SlotWords { large, last }));
                }
                Some(_) => place = place.wrapping_add(1),
                None => place = 0,
            }
        }
    }

    pub(super) fn after(self, place: usize) -> usize {
        let next = place.saturating_add(1);
        if next < self.len() { next } else { 0 }
    }

    /// Empties a slot and shifts back the following keys whose probes would end at the gap. Returns how many.
    pub(super) fn close(self, place: usize) -> u64 {
        // Shifts back instead of leaving tombstones. A table that never grows would fill up with those, and its probes
        // would get longer and longer.
        let mut gap = place;
        let mut moved: u64 = 0;
        let mut next = self.after(gap);
        while let Some(slot) = self.get(next).filter(|slot| slot[3] != 0) {
            let home = self.home(digest(&slot));
            // A key must move if the gap is on its way from its home to its slot, around the end of the table.
            let is_cut_off = if gap <= next { home <= gap || home > next } else { home <= gap && home > next };
            if is_cut_off {
                self.set(gap, slot);
                moved = moved.saturating_add(1);
                gap = next;
            }
            next = self.after(next);
        }
        self.set(gap, EMPTY);
        moved
    }
}

fn digest(slot: &Slot) -> Digest {
    Digest::from_u128(u128::from(slot[0]) << 64 | u128::from(slot[1]))
}
