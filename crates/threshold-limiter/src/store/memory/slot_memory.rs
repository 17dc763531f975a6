//! The memory of a table's slots.

use std::sync::atomic::AtomicU64;

use zerocopy::{FromBytes, IntoBytes as _};

/// The words of a slot.
pub(super) const WORDS: usize = 4;
/// The bytes of a cache line.
pub(super) const LINE: usize = 64;
/// The smallest size that is mapped. Programs with a smaller table usually use little of it.
#[cfg(target_os = "linux")]
const MAPPED: usize = 64 << 20;
/// The largest size that is populated at the start; a larger one would delay the start by more than two seconds.
#[cfg(target_os = "linux")]
const MAX_POPULATED: usize = 1 << 30;

/// Zeroed memory, allocated once. The system provides its pages at their first use, unless it is populated.
#[derive(Debug)]
pub(super) enum SlotMemory {
    Heap(Box<[u64]>),
    #[cfg(target_os = "linux")]
    Mapped(memmap2::MmapMut),
}

impl SlotMemory {
    /// Allocates memory for this many slots.
    pub(super) fn new(slots: usize) -> Self {
        // One line more than the slots need, because the memory may begin in the middle of a line.
        let bytes = slots.saturating_mul(size_of::<[AtomicU64; WORDS]>()).saturating_add(LINE);
        #[cfg(target_os = "linux")]
        if bytes >= MAPPED
            && let Some(map) = Self::map(bytes)
        {
            return Self::Mapped(map);
        }
        Self::Heap(vec![0; bytes.div_ceil(size_of::<u64>())].into_boxed_slice())
    }

    /// Maps memory and populates it if it is not too large, so that no decision waits for a page fault. It uses huge pages if
    /// the system has them: with small ones, the TLB misses of a large table take longer than everything else that is done
    /// for a key.
    #[cfg(target_os = "linux")]
    fn map(bytes: usize) -> Option<memmap2::MmapMut> {
        use memmap2::Advice::{HugePage, PopulateWrite};
        // Without reserved swap a table may be larger than the machine's memory, as long as few of its keys are used.
        let map = memmap2::MmapOptions::new().len(bytes).no_reserve_swap().map_anon().ok()?;
        if bytes <= MAX_POPULATED {
            // Hints, which a system may not support.
            let _ = (map.advise(HugePage), map.advise(PopulateWrite));
        }
        Some(map)
    }

    /// Returns `count` slots, of which the first begins a cache line. `count` must be the number that was allocated.
    pub(super) fn slots(&mut self, count: usize) -> &[[AtomicU64; WORDS]] {
        let bytes = match self {
            Self::Heap(words) => words.as_mut_bytes(),
            #[cfg(target_os = "linux")]
            Self::Mapped(map) => &mut **map,
        };
        let start = bytes.as_ptr().align_offset(LINE);
        let end = start.saturating_add(count.saturating_mul(size_of::<[AtomicU64; WORDS]>()));
        let own = bytes.get_mut(start..end).expect("no more slots than there is room for");
        <[[AtomicU64; WORDS]]>::mut_from_bytes(own).expect("a whole number of slots, aligned")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    /// Small sizes, and on Linux one that is populated and one that is larger than any machine's memory. Woken by leaving out
    /// `LINE` in `new`, by a `start` of 0, and by leaving out `no_reserve_swap`.
    #[test]
    fn slots_are_zero_and_do_not_cross_cache_lines() {
        let larger = if cfg!(target_os = "linux") { 1 << 34 } else { 16 };
        for count in [2, 10, 4 << 20, larger] {
            let mut memory = SlotMemory::new(count);
            let slots = memory.slots(count);
            assert_eq!(slots.len(), count);
            assert_eq!(slots.as_ptr().addr() % LINE, 0);
            for slot in [slots.first(), slots.last()].into_iter().flatten() {
                assert_eq!(slot.each_ref().map(|word| word.swap(7, Relaxed)), [0; WORDS]);
            }
        }
    }
}
