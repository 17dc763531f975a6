//! The memory that the slots of a table lie in.

use std::sync::atomic::AtomicU64;

use zerocopy::{FromBytes, IntoBytes as _};

/// Words of a slot.
pub(super) const WORDS: usize = 4;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// The sizes of tables that are taken whole at the start, in large pages where the system has them. Whoever has a smaller one
/// mostly uses little of it, and of small pages only those are there that have been touched. To take a larger one would hold
/// up the start.
#[cfg(target_os = "linux")]
const TAKEN_WHOLE: std::ops::RangeInclusive<usize> = 64 << 20..=1 << 30;

/// A piece of memory that is zero throughout, made once.
#[derive(Debug)]
pub(super) enum Piece {
    /// The system gives it as it is touched.
    Heap(Box<[u64]>),
    /// It is all there, so no decision ever waits for the system to find a page. To find its way to one of many small pages
    /// takes a processor longer than anything else that is done for a key, hence the large ones.
    #[cfg(target_os = "linux")]
    Mapped(memmap2::MmapMut),
}

impl Piece {
    /// Room for so many slots.
    pub(super) fn new(slots: usize) -> Self {
        let bytes = slots.saturating_mul(size_of::<[AtomicU64; WORDS]>()).saturating_add(LINE);
        #[cfg(target_os = "linux")]
        if TAKEN_WHOLE.contains(&bytes)
            && let Ok(map) = memmap2::MmapMut::map_anon(bytes)
        {
            // No more than hints: what a system does not know of, it leaves out.
            let _ = (map.advise(memmap2::Advice::HugePage), map.advise(memmap2::Advice::PopulateWrite));
            return Self::Mapped(map);
        }
        Self::Heap(vec![0; bytes.div_ceil(size_of::<u64>())].into_boxed_slice())
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

    /// A small piece, and on Linux one that is taken whole. Woken by leaving out `LINE` in `new`, and by a `start` of 0.
    #[test]
    fn slots_are_zero_and_never_lie_across_cache_lines() {
        for count in [2, 10, 4 << 20] {
            let mut piece = Piece::new(count);
            let slots = piece.slots(count);
            assert_eq!(slots.len(), count);
            assert_eq!(slots.as_ptr().addr() % LINE, 0);
            for slot in [slots.first(), slots.last()].into_iter().flatten() {
                assert_eq!(slot.each_ref().map(|word| word.swap(7, Relaxed)), [0; WORDS]);
            }
        }
    }
}
