//! Many token buckets under one limit, each in a slot of 16 bytes: exact under threads, and without a lock for whoever is
//! already there.
//!
//! A slot is a tag, which says whose it is, and a state: when its bucket is full again, and in the lowest bits how often
//! the slot has changed hands. Slots are found by the tag, used where they are, and never moved.
//!
//! **A decision** reads the state, then the tag. If the tag is the key's own, it computes, and exchanges the state for the
//! next one if it is still the one it read; if nothing changes, it reads the state once more instead, and writes nothing.
//!
//! **A slot changes hands** when its bucket says nothing any more, or when a new key finds nothing but live ones: then the
//! least used of them goes, unless more than half of it is used. The state is exchanged for `LOCKED`, the tag is written,
//! then the new state. So whoever reads a state and then a tag that belongs to another owner finds another state when they
//! come to exchange it. They would find the same one only if states came back, and they do not: a bucket that says nothing
//! leaves an earlier moment than any that follows; and after one that was live, the lowest bits have been counted on. Those
//! are few, and come round. Somebody would have to stand between two instructions while one slot changes hands hundreds
//! of times, and then meet the same moment to a microsecond or less. Even so no limit would be passed: their charge would
//! count as made before their key had to go, and the stranger in its place would be charged once too often.
//!
//! **A key is in one slot only**, because whoever adds it holds a lock that is chosen by the key, and has looked again
//! while holding it. Nobody holds two locks, and nobody waits while a slot is `LOCKED` by them. A slot that was used once
//! is never unused again, and no key is added beyond a line with unused slots; so a search that comes to one is over.

use std::sync::PoisonError;

use threshold_core::Timestamp;
use threshold_core::limit::{Look, PackedRate, Ticks};

use super::hash::Hashed;
use super::lines::{Line, Lines, Slot, find, slots};
use crate::prefetch::prefetch;
use crate::store::memory::{Counts, Usage};
use crate::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::sync::{Mutex, MutexGuard, yield_now};

/// The state of a slot that is changing hands. No state is that late.
const LOCKED: u64 = u64::MAX;
/// Bits that count how often a slot has changed hands, at least and at most.
const GENERATION_BITS: std::ops::RangeInclusive<u32> = 1..=16;
/// Locks for those who add keys. Threads that do seldom meet, and a small table is not all locks.
const LOCKS: usize = 64;

/// Buckets under one limit, by key.
#[derive(Debug)]
pub(super) struct PackedTable {
    rate: PackedRate,
    generation_bits: u32,
    lines: Lines,
    /// What was done to stay within bounds, behind the lock of those who do it.
    locks: Box<[Mutex<Counts>]>,
}

/// What a decision was made on.
#[derive(Debug, Clone, Copy)]
struct Met {
    /// What was there before.
    state: Ticks,
    /// Whether there was no room for a new key.
    full: bool,
}

/// A slot that a new key may have.
#[derive(Debug, Clone, Copy)]
struct Room<'t> {
    slot: Slot<'t>,
    /// Its state and generation, as they must still be when it is taken.
    word: u64,
}

impl PackedTable {
    /// A table with room for so many keys; `None` if a state of this rate leaves no bits to count generations.
    pub(super) fn new(rate: PackedRate, keys: u64) -> Option<Self> {
        let Ticks(last) = rate.last();
        // One more, so that no state is `LOCKED`.
        let generation_bits = last.checked_add(1)?.leading_zeros().min(*GENERATION_BITS.end());
        let locks = (0..LOCKS).map(|_| Mutex::new(Counts::default())).collect();
        (generation_bits >= *GENERATION_BITS.start()).then(|| Self {
            rate,
            generation_bits,
            lines: Lines::new(keys),
            locks,
        })
    }

    /// Whether `cost` fits under this key now; if it does, it is charged.
    #[inline(always)]
    pub(super) fn check(&self, key: Hashed, cost: u64, now: Timestamp) -> Look {
        let met = match self.find(key).and_then(|slot| self.decide(slot, key.tag, cost, now)) {
            Some(state) => Met { state, full: false },
            None => self.check_new(key, cost, now),
        };
        // Only here, where whoever asks for `fits` alone can do without the rest.
        let look = self.rate.look(met.state, cost, now);
        Look { allowed: look.allowed && !met.full, ..look }
    }

    /// Asks for the memory where a key's probe begins.
    #[inline]
    pub(super) fn prefetch(&self, key: Hashed) {
        if let Some(line) = self.lines.home(key.place) {
            prefetch(line);
        }
    }

    /// What is held. Goes through the whole table.
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

    /// Decides, and says on what; `None` if the slot is no longer this key's.
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

    /// The same for a key that was not found, or has just lost its slot.
    #[cold]
    #[inline(never)]
    fn check_new(&self, key: Hashed, cost: u64, now: Timestamp) -> Met {
        let fresh = Ticks::default();
        let next = self.rate.next(fresh, cost, now);
        let mut counts = self.lock(key);
        loop {
            if let Some(slot) = self.find(key) {
                match self.decide(slot, key.tag, cost, now) {
                    Some(state) => return Met { state, full: false },
                    // Another key has just taken its slot.
                    None => continue,
                }
            }
            if next == fresh {
                return Met { state: fresh, full: false };
            }
            let Some(room) = self.room(key, now) else { return Met { state: fresh, full: true } };
            if self.take(room, key.tag, next) {
                if !self.rate.is_silent(self.state(room.word), now) {
                    counts.evicted = counts.evicted.saturating_add(1);
                } else if room.word != 0 {
                    counts.dropped = counts.dropped.saturating_add(1);
                }
                return Met { state: fresh, full: false };
            }
        }
    }

    /// A slot in the first line that has one that is unused, or else says nothing any more; failing that, the least used of
    /// all lines, never a protected one.
    fn room(&self, key: Hashed, now: Timestamp) -> Option<Room<'_>> {
        let mut least: Option<Room<'_>> = None;
        for line in self.lines.probe(key.place) {
            let mut silent = None;
            for slot in slots(line) {
                match settled(slot) {
                    word @ 0 => return Some(Room { slot, word }),
                    word if self.rate.is_silent(self.state(word), now) => silent = Some(Room { slot, word }),
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

    /// Makes a slot this key's, if it is still as it was found.
    fn take(&self, room: Room<'_>, tag: u64, state: Ticks) -> bool {
        let Room { slot, word } = room;
        if slot.state.compare_exchange(word, LOCKED, Acquire, Relaxed).is_err() {
            return false;
        }
        slot.tag.store(tag, Release);
        slot.state.store(self.word(state, word.wrapping_add(1)), Release);
        true
    }

    /// The lock for adding this key.
    fn lock(&self, key: Hashed) -> MutexGuard<'_, Counts> {
        let at = key.tag.checked_rem(LOCKS as u64).and_then(|at| usize::try_from(at).ok());
        let lock = at.and_then(|at| self.locks.get(at));
        lock.expect("there are as many locks").lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn state(&self, word: u64) -> Ticks {
        Ticks(word >> self.generation_bits)
    }

    /// A state with the generation of another word.
    #[inline]
    fn word(&self, Ticks(state): Ticks, generation: u64) -> u64 {
        let lowest = !(u64::MAX << self.generation_bits);
        state << self.generation_bits | generation & lowest
    }
}

/// The state of a slot, once it is not changing hands.
#[inline(always)]
fn settled(slot: Slot<'_>) -> u64 {
    loop {
        let word = slot.state.load(Acquire);
        if word != LOCKED {
            return word;
        }
        // Whoever has it needs two stores more, and no lock.
        yield_now();
    }
}
