//! Slots of two words, four to a cache line, and the probe sequence of a key.

use crate::sync::atomic::AtomicU64;
use crate::sync::atomic::Ordering::Acquire;

/// The slots of a cache line.
pub(super) const SLOTS: usize = 4;
/// The words of a cache line.
const WORDS: usize = 2 * SLOTS;
/// Keys for each line. A table that is full of keys has half of its slots in use, and all but one key in 25 are in their first
/// line.
const KEYS_A_LINE: usize = 2;
/// Lines that a key may be in. In a full table one line in six has no slot left; the probability that none of 12 has one is
/// less than one in a billion.
const PROBE: usize = 12;
/// More lines than any memory holds.
const MAX_LINES: usize = 1 << 40;

/// A cache line: four tags, then the states of the same slots.
pub(super) type Line = [AtomicU64; WORDS];

/// One slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot<'t> {
    pub(super) tag: &'t AtomicU64,
    pub(super) state: &'t AtomicU64,
}

/// All lines of a table. They never grow, and slots are zero until they are used.
#[derive(Debug)]
pub(super) struct Lines {
    words: Box<[AtomicU64]>,
    /// The index of the first word that begins a cache line.
    start: usize,
    /// The number of lines: a prime, so that a probe visits all of them whatever its stride.
    count: usize,
}

impl Lines {
    /// Creates lines for this many keys.
    pub(super) fn new(keys: u64) -> Self {
        let keys = usize::try_from(keys).unwrap_or(usize::MAX);
        let count = prime_from(keys.div_ceil(KEYS_A_LINE).clamp(2, MAX_LINES));
        // One line more than needed, because the allocation may begin in the middle of a line.
        let words = zeroed(count.saturating_add(1).saturating_mul(WORDS));
        // `align_offset` may give up and return `usize::MAX`. The lines are then not aligned, but they are within the
        // memory.
        let start = words.as_ptr().align_offset(WORDS.saturating_mul(size_of::<u64>())).min(WORDS);
        Self { words, start, count }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// Returns all lines.
    pub(super) fn all(&self) -> impl Iterator<Item = &Line> {
        (0..self.count).filter_map(|at| self.line(at))
    }

    #[inline]
    fn line(&self, at: usize) -> Option<&Line> {
        self.words.get(self.start.wrapping_add(at.wrapping_mul(WORDS))..)?.first_chunk()
    }

    /// Returns the line where a probe begins.
    #[inline]
    pub(super) fn home(&self, place: u64) -> Option<&Line> {
        self.line(share(place, self.count))
    }

    /// Returns the lines that a key may be in, in order: first its home, then others at equal strides.
    pub(super) fn probe(&self, place: u64) -> impl Iterator<Item = &Line> {
        let home = share(place, self.count);
        // From the other half of `place`: keys that share a home seldom share the lines after it. Never 0, which would
        // stay at the home.
        let stride = share(place.rotate_left(32), self.count.saturating_sub(1)).saturating_add(1);
        let next = move |at: &usize| {
            let next = at.saturating_add(stride);
            // A stride is less than the count, so one subtraction brings it back into range.
            Some(if next < self.count { next } else { next.saturating_sub(self.count) })
        };
        std::iter::successors(Some(home), next).take(PROBE.min(self.count)).filter_map(|at| self.line(at))
    }
}

/// Returns the slots of a line.
pub(super) fn slots(line: &Line) -> impl Iterator<Item = Slot<'_>> {
    let (tags, states) = line.split_at(SLOTS);
    tags.iter().zip(states).map(|(tag, state)| Slot { tag, state })
}

/// Returns the slot of this line with this tag. It compares all four tags without a branch: which one matches is random, and a
/// branch would be mispredicted.
#[inline]
pub(super) fn find<'t>(line: &'t Line, tag: u64) -> Option<Slot<'t>> {
    let [a, b, c, d, ..] = line;
    let is = |own: &AtomicU64| u32::from(own.load(Acquire) == tag);
    let found = is(a) | is(b) << 1 | is(c) << 2 | is(d) << 3;
    // 32 if no tag matches, which `get` rejects.
    let at = usize::try_from(found.trailing_zeros()).unwrap_or(SLOTS);
    let (tags, states) = line.split_at(SLOTS);
    Some(Slot { tag: tags.get(at)?, state: states.get(at)? })
}

/// Maps a `place` in the range of `u64` to the range of `count`, in proportion.
#[inline]
fn share(place: u64, count: usize) -> usize {
    // A product of two 64-bit numbers never wraps.
    usize::try_from(u128::from(place).wrapping_mul(count as u128) >> 64).unwrap_or(0)
}

/// Returns the first prime number from `number` on.
fn prime_from(number: usize) -> usize {
    let is_prime = |number: &usize| (2..=number.isqrt()).all(|divisor| !number.is_multiple_of(divisor));
    (number..usize::MAX).find(is_prime).unwrap_or(number)
}

/// Allocates zeroed memory, which the system provides when it is first used.
#[cfg(not(shuttle))]
fn zeroed(len: usize) -> Box<[AtomicU64]> {
    <[AtomicU64] as zerocopy::FromZeros>::new_box_zeroed_with_elems(len).expect("memory for the table")
}

#[cfg(shuttle)]
fn zeroed(len: usize) -> Box<[AtomicU64]> {
    (0..len).map(|_| AtomicU64::new(0)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Woken by: a stride of `share` alone, which may be 0; and `number` as it is for `prime_from(number)`.
    #[test]
    fn a_probe_comes_to_each_line_once() {
        for keys in [1, 2, 6, 7, 40, 1_000] {
            let lines = Lines::new(keys);
            assert!(lines.count * SLOTS >= usize::try_from(keys).unwrap() * 2, "{keys} keys: {} lines", lines.count);
            for number in 0..500u64 {
                let place = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let visited: Vec<*const Line> = lines.probe(place).map(std::ptr::from_ref).collect();
                let distinct: HashSet<_> = visited.iter().collect();
                assert_eq!((visited.len(), distinct.len()), (PROBE.min(lines.count), visited.len()));
                assert_eq!(visited.first().copied(), lines.home(place).map(std::ptr::from_ref));
            }
        }
    }

    /// No slot lies across two cache lines.
    #[test]
    fn lines_are_cache_lines() {
        let lines = Lines::new(1_000);
        assert!(lines.all().all(|line| line.as_ptr().addr() % 64 == 0));
        assert_eq!(lines.all().count(), lines.count);
    }

    #[test]
    fn primes_are_found() {
        for (from, prime) in [(2, 2), (3, 3), (4, 5), (24, 29), (333_334, 333_337), (1 << 20, 1_048_583)] {
            assert_eq!(prime_from(from), prime);
        }
    }
}
