//! A table of token buckets under one limit, each in a slot of 16 bytes: exact under threads, and without a lock for keys that
//! it already has.
//!
//! A slot has a tag, which identifies its key, and a state: the time at which its bucket is full again and, in the lowest
//! bits, a generation that counts how often the slot was given to another key. Slots are never moved.
//!
//! **A decision** reads the state, then the tag. If the tag is the key's own, it computes the next state and writes it by
//! compare-and-swap, which fails if the state has changed since. A denial changes nothing: it reads the state once more
//! instead, and writes nothing.
//!
//! **Reusing a slot.** A new key takes a slot whose bucket is full again. If there is none, it takes the least used one,
//! unless more than half of that is used. The state is exchanged for `LOCKED`, the tag is written, then the new state. So a
//! thread that has read the old state and then another key's tag, or the other way round, fails in its compare-and-swap:
//! a state never returns. After a bucket that is full again, the new state is a later time; after a live one, the generation
//! is another. Generations are few and wrap around. A thread would have to stop between two instructions while one slot is
//! reused hundreds of times, and then meet the same time to a microsecond or less. Even then no limit would be exceeded: its
//! charge would count as made before its key was evicted, and the other key would be charged once too often.
//!
//! **A key is in one slot only**: a thread that adds a key holds a lock that the key chooses, and searches again while it
//! holds it. No thread holds two locks, and none waits while it has a slot `LOCKED`, so there is no deadlock. A used slot never
//! becomes unused again, and no key is added beyond a line with unused slots, so a search ends at an unused slot.

use std::sync::PoisonError;

use threshold_core::Timestamp;
use threshold_core::limit::{Look, PackedRate, Ticks};

use super::hash::Hashed;
use super::lines::{Line, Lines, Slot, find, slots};
use crate::prefetch::prefetch;
use crate::store::memory::{Counts, Usage};
use crate::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::sync::{Mutex, MutexGuard, yield_now};

/// The state of a slot that is being given to another key. No time is that late.
const LOCKED: u64 = u64::MAX;
/// The number of generation bits, at least and at most.
const GENERATION_BITS: std::ops::RangeInclusive<u32> = 1..=16;
/// The locks for adding keys: enough that threads seldom contend, few enough that a small table is not mostly locks.
const LOCKS: usize = 64;

/// The buckets of one limit, by key.
#[derive(Debug)]
pub(super) struct PackedTable {
    rate: PackedRate,
    generation_bits: u32,
    lines: Lines,
    /// The locks for adding keys, each with the counts of what was done under it.
    locks: Box<[Mutex<Counts>]>,
}

/// The state that a decision was made on.
#[derive(Debug, Clone, Copy)]
struct Found {
    /// The state before the charge.
    state: Ticks,
    /// Whether there was no room for a new key.
    full: bool,
}

/// A slot that a new key may take.
#[derive(Debug, Clone, Copy)]
struct Room<'t> {
    slot: Slot<'t>,
    /// Its state and generation, which must be unchanged when it is taken.
    word: u64,
}

impl PackedTable {
    /// Creates a table with room for this many keys; `None` if the times of this rate leave no bits for generations.
    pub(super) fn new(rate: PackedRate, keys: u64) -> Option<Self> {
        let Ticks(last) = rate.last();
        // Room for one more than the last time, so that no state equals `LOCKED`.
        let generation_bits = last.checked_add(1)?.leading_zeros().min(*GENERATION_BITS.end());
        let locks = (0..LOCKS).map(|_| Mutex::new(Counts::default())).collect();
        (generation_bits >= *GENERATION_BITS.start()).then(|| Self {
            rate,
            generation_bits,
            lines: Lines::new(keys),
            locks,
        })
    }

    /// Decides whether `cost` fits under this key now, and charges it if so.
    #[inline(always)]
    pub(super) fn check(&self, key: Hashed, cost: u64, now: Timestamp) -> Look {
        let found = match self.find(key).and_then(|slot| self.decide(slot, key.tag, cost, now)) {
            Some(state) => Found { state, full: false },
            None => self.check_new(key, cost, now),
        };
        // Computed here, in line: a caller who reads `allowed` alone does not pay for the other figures.
        let look = self.rate.look(found.state, cost, now);
        Look { allowed: look.allowed && !found.full, ..look }
    }

    /// Prefetches the line where a key's probe begins.
    #[inline]
    pub(super) fn prefetch(&self, key: Hashed) {
        if let Some(line) = self.lines.home(key.place) {
            prefetch(line);
        }
    }

    /// Returns what is in use. Scans the whole table.
    pub(super) fn usage(&self) -> Usage {
        let mut usage = Usage { bytes: self.lines.bytes(), ..Usage::default() };
        let is_used = |slot: &Slot<'_>| slot.state.load(Relaxed) != 0;
        usage.keys = self.lines.all().map(|line| slots(line).filter(is_used).count()).sum();
        for lock in &self.locks {
            let counts = lock.lock().unwrap_or_else(PoisonError::into_inner);
            usage.counts.dropped = usage.counts.dropped.saturating_add(counts.dropped);
            usage.counts.evicted = usage.counts.evicted.saturating_add(counts.evicted);
        }
        usage
    }

    #[inline(always)]
    fn find(&self, key: Hashed) -> Option<Slot<'_>> {
        let home = self.lines.home(key.place)?;
        find(home, key.tag).or_else(|| self.find_further(home, key))
    }

    #[inline(never)]
    fn find_further(&self, home: &Line, key: Hashed) -> Option<Slot<'_>> {
        let mut before = home;
        for line in self.lines.probe(key.place).skip(1) {
            // No key is put behind a line with an unused slot.
            if slots(before).any(|slot| slot.state.load(Acquire) == 0) {
                return None;
            }
            if let Some(slot) = find(line, key.tag) {
                return Some(slot);
            }
            before = line;
        }
        None
    }

    /// Decides, and returns the state that it decided on; `None` if the slot is no longer this key's.
    #[inline(always)]
    fn decide(&self, slot: Slot<'_>, tag: u64, cost: u64, now: Timestamp) -> Option<Ticks> {
        loop {
            let word = settled(slot);
            if slot.tag.load(Acquire) != tag {
                return None;
            }
            let state = self.state(word);
            let next = self.rate.next(state, cost, now);
            let holds = if next == state {
                // `Relaxed` is enough: the acquiring load of the tag keeps this load behind it.
                slot.state.load(Relaxed) == word
            } else {
                let next = self.word(next, word);
                slot.state.compare_exchange(word, next, AcqRel, Relaxed).is_ok()
            };
            if holds {
                return Some(state);
            }
        }
    }

    /// Decides for a key that was not found, or has just lost its slot.
    #[cold]
    #[inline(never)]
    fn check_new(&self, key: Hashed, cost: u64, now: Timestamp) -> Found {
        // A key without a slot has a full bucket.
        let fresh = Ticks::default();
        let next = self.rate.next(fresh, cost, now);
        let mut counts = self.lock(key);
        loop {
            // Another thread may have added the key before this one got the lock.
            if let Some(slot) = self.find(key) {
                match self.decide(slot, key.tag, cost, now) {
                    Some(state) => return Found { state, full: false },
                    // Another key has taken its slot since: search again.
                    None => continue,
                }
            }
            // Nothing is charged, so there is nothing to remember and no slot to take.
            if next == fresh {
                return Found { state: fresh, full: false };
            }
            let Some(room) = self.room(key, now) else { return Found { state: fresh, full: true } };
            if self.take(room, key.tag, next) {
                // A live bucket was evicted. One that was full again was only dropped, and an unused slot held none.
                if !self.rate.is_silent(self.state(room.word), now) {
                    counts.evicted = counts.evicted.saturating_add(1);
                } else if room.word != 0 {
                    counts.dropped = counts.dropped.saturating_add(1);
                }
                return Found { state: fresh, full: false };
            }
        }
    }

    /// Returns a slot in the first line that has an unused one or one whose bucket is full again; otherwise the least used of
    /// all lines, unless more than half of it is used.
    fn room(&self, key: Hashed, now: Timestamp) -> Option<Room<'_>> {
        let mut least: Option<Room<'_>> = None;
        for line in self.lines.probe(key.place) {
            let mut silent = None;
            for slot in slots(line) {
                match settled(slot) {
                    // A search ends at a line with an unused slot, so a key that is put behind it would not be found.
                    word @ 0 => return Some(Room { slot, word }),
                    word if self.rate.is_silent(self.state(word), now) => silent = Some(Room { slot, word }),
                    // The state is in the upper bits, and the bucket that is full first is the least used.
                    word if least.is_none_or(|least| word < least.word) => least = Some(Room { slot, word }),
                    _ => {}
                }
            }
            if silent.is_some() {
                return silent;
            }
        }
        least.filter(|least| !self.rate.is_protected(self.state(least.word), now))
    }

    /// Gives a slot to this key, if it is still as it was found.
    fn take(&self, room: Room<'_>, tag: u64, state: Ticks) -> bool {
        let Room { slot, word } = room;
        if slot.state.compare_exchange(word, LOCKED, Acquire, Relaxed).is_err() {
            return false;
        }
        // Until the last store other threads spin in `settled`, so nothing here may wait or panic.
        slot.tag.store(tag, Release);
        slot.state.store(self.word(state, word.wrapping_add(1)), Release);
        true
    }

    /// Locks the table for adding this key.
    fn lock(&self, key: Hashed) -> MutexGuard<'_, Counts> {
        let at = key.tag.checked_rem(LOCKS as u64).and_then(|at| usize::try_from(at).ok());
        let lock = at.and_then(|at| self.locks.get(at));
        lock.expect("there are as many locks").lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn state(&self, word: u64) -> Ticks {
        Ticks(word >> self.generation_bits)
    }

    /// Returns a word of this state, with the generation of another word.
    #[inline]
    fn word(&self, Ticks(state): Ticks, generation: u64) -> u64 {
        let lowest = !(u64::MAX << self.generation_bits);
        state << self.generation_bits | generation & lowest
    }
}

/// Returns the word of a slot, once it is not `LOCKED`.
#[inline(always)]
fn settled(slot: Slot<'_>) -> u64 {
    loop {
        let word = slot.state.load(Acquire);
        if word != LOCKED {
            return word;
        }
        // The thread that has locked it only needs two more stores, and no lock.
        yield_now();
    }
}
