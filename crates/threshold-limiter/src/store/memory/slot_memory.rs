//! The memory that the slots of a table lie in.

use std::sync::atomic::AtomicU64;

use zerocopy::{FromBytes, IntoBytes as _};

/// Words of a slot.
pub(super) const WORDS: usize = 4;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// The size from which on memory is mapped. Whoever has a smaller table mostly uses little of it.
#[cfg(target_os = "linux")]
const MAPPED: usize = 64 << 20;
/// The largest table that is taken whole at the start; to take a larger one would hold that up.
#[cfg(target_os = "linux")]
const TAKEN_WHOLE: usize = 1 << 30;

/// A piece of memory that is zero throughout, made once. The system gives it as it is touched, unless it is taken whole.
#[derive(Debug)]
pub(super) enum SlotMemory {
    Heap(Box<[u64]>),
    #[cfg(target_os = "linux")]
    Mapped(memmap2::MmapMut),
}

impl SlotMemory {
    /// Room for so many slots.
    pub(super) fn new(slots: usize) -> Self {
        let bytes = slots.saturating_mul(size_of::<[AtomicU64; WORDS]>()).saturating_add(LINE);
        #[cfg(target_os = "linux")]
        if bytes >= MAPPED
            && let Some(map) = Self::map(bytes)
        {
            return Self::Mapped(map);
        }
        Self::Heap(vec![0; bytes.div_ceil(size_of::<u64>())].into_boxed_slice())
    }

    /// Maps memory, and takes it whole if it is not too much: then no decision ever waits for the system to find a page. In
    /// large pages, where the system has them: to find its way to one of many small ones takes a processor longer than
    /// anything else that is done for a key.
    #[cfg(target_os = "linux")]
    fn map(bytes: usize) -> Option<memmap2::MmapMut> {
        use memmap2::Advice::{HugePage, PopulateWrite};
        // Whatever is never touched need not be there: a table may be made larger than the machine.
        let map = memmap2::MmapOptions::new().len(bytes).no_reserve_swap().map_anon().ok()?;
        if bytes <= TAKEN_WHOLE {
            // No more than hints: what a system does not know of, it leaves out.
            let _ = (map.advise(HugePage), map.advise(PopulateWrite));
        }
        Some(map)
    }

    /// The slots, of which there were as many to be when this was made. The first begins with a cache line.
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

    /// Small pieces, and on Linux one that is taken whole and one that is larger than machines are. Woken by leaving out `LINE`
    /// in `new`, by a `start` of 0, and by leaving out `no_reserve_swap`.
    #[test]
    fn slots_are_zero_and_never_lie_across_cache_lines() {
        let larger = if cfg!(target_os = "linux") { 1 << 34 } else { 16 };
        for count in [2, 10, 4 << 20, larger] {
            let mut piece = SlotMemory::new(count);
            let slots = piece.slots(count);
            assert_eq!(slots.len(), count);
            assert_eq!(slots.as_ptr().addr() % LINE, 0);
            for slot in [slots.first(), slots.last()].into_iter().flatten() {
                assert_eq!(slot.each_ref().map(|word| word.swap(7, Relaxed)), [0; WORDS]);
            }
        }
    }
}
