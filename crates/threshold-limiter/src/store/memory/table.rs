//! The sharded table of balances: fixed slots, and a slab for balances that do not fit into one.
//!
//! A slot has 32 bytes: the digest and two words. Slots are allocated once, zeroed, so that no request waits while a table
//! grows. Keys are found by linear probing, and removed by shifting back the few that follow.

use std::fmt;
use std::sync::{Arc, TryLockError};

use self_cell::{MutBorrow, self_cell};
use threshold_core::balance::{Checked, Small};
use threshold_core::bill::Charge;
use threshold_core::limit::{Look, Mark};
use threshold_core::receipt::History;
use threshold_core::{Balance, Digest, Limit, Timestamp, TraceId};

use super::limits::{Limits, NUMBER_BITS};
use super::lock;
use super::slab::{Large, Slab};
use super::slot_memory::SlotMemory;
use super::slots::{EMPTY, SLOTS_A_LINE, Slot, SlotWords, Slots};
use crate::sync::{Mutex, MutexGuard};

/// The slots for three keys. A probe then looks at one or two, and few leave the prefetched lines.
const SLOTS_FOR_THREE: usize = 5;
/// The share of its keys by which the keys of prefixes may exceed a full shard, as a divisor.
const PREFIX_SHARE: usize = 6;
/// How many slots are searched for one to evict.
const SEARCH: usize = 64;
/// The bytes for large balances, for each key of a shard.
const LARGE_BYTES: usize = 256;

/// Where a balance is, in the lowest bits of the last word: in the slot (`SMALL`) or in the slab (`LARGE`). 0 is an empty slot.
const KIND_BITS: u32 = 2;
const SMALL: u64 = 1;
const LARGE: u64 = 2;
/// The bits of the last word above the kind and the number of the limit.
const FIGURE_BITS: u32 = u64::BITS - KIND_BITS - NUMBER_BITS;

/// The counts of what a store did to stay within its bounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Balances that had no effect any more and were dropped.
    pub dropped: u64,
    /// Live balances, at most half used, that were evicted.
    pub evicted: u64,
    /// Keys that were counted by a key that stands in, because nothing could be evicted.
    pub folded: u64,
    /// The largest number of slots that one removal moved.
    pub most_moved: u64,
}

self_cell! {
    /// All shards of a table, with the memory of their slots.
    pub(super) struct Table {
        owner: MutBorrow<SlotMemory>,
        #[covariant]
        dependent: Shards,
    }
}

/// The shards of a table.
pub(super) type Shards<'p> = Box<[Shard<'p>]>;

/// One shard. Its slots are outside of the lock, so that they can be prefetched without it; only a thread that has
/// [locked](Self::open) the shard reads or writes them.
// Aligned to a cache line, so that threads on different shards do not share one.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Shard<'p> {
    inside: Mutex<Inside>,
    slots: Slots<'p>,
    limits: Arc<Limits>,
}

/// The state of a shard that its lock guards, beside the slots.
#[derive(Debug)]
pub(super) struct Inside {
    used: usize,
    /// The number of keys beyond which others are evicted.
    max: usize,
    large: Slab,
    /// Where the next search for a key to evict begins.
    hand: usize,
    pub(super) counts: Counts,
}

/// A small balance that was read from a slot, with the number of its limit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    number: u64,
    small: Small,
}

impl Seen {
    /// Reads the balance of a slot, if it is small and under this limit, as nearly all are.
    #[inline(always)]
    pub(super) fn at(slot: SlotWords<'_>, limit: &Limit, limits: &Limits) -> Option<Self> {
        let [large, last] = slot.get();
        let (kind, number, figure) = parts(last);
        // A balance that was stored under other figures, as after a change of the policy, must be converted first. Only
        // the slow path does that.
        let own = kind == SMALL && limits.get(number) == Some(limit);
        own.then_some(Self { number, small: Small { large, figure } })
    }

    /// Looks at the balance on a fast path, and returns what to write for a charge; see [`Small::glance`].
    #[inline(always)]
    pub(super) fn glance(self, limit: &Limit, cost: u64, now: Timestamp) -> Option<(Look, Charged)> {
        let (look, charged, mark) = self.small.glance(limit, cost, now)?;
        // A charge whose figure has too many bits is left to `look`, which can still answer a denial from the slot.
        Some((look, Charged { words: packed(charged, self.number)?, mark }))
    }

    /// Looks at the balance in all other cases, unless the look changes it. The charge is `None` if its state would not fit into
    /// the slot.
    pub(super) fn look(self, limit: &Limit, cost: u64, now: Timestamp) -> Option<(Look, Option<Charged>)> {
        let look = self.small.look(limit, cost, now)?;
        let charged = self.small.charge(limit, cost, now);
        Some((look, charged.and_then(|(small, mark)| Some(Charged { words: packed(small, self.number)?, mark }))))
    }
}

/// The words of a slot after a charge, and the mark of the charge.
#[derive(Debug, Clone, Copy)]
pub(super) struct Charged {
    pub(super) words: [u64; 2],
    pub(super) mark: Mark,
}

/// A locked shard.
#[derive(Debug)]
pub(super) struct Open<'s> {
    slots: Slots<'s>,
    limits: &'s Limits,
    pub(super) inside: MutexGuard<'s, Inside>,
}

impl Table {
    /// Creates a table of this many shards, for `max` keys each.
    pub(super) fn of(shards: usize, max: usize) -> Self {
        let max = max.max(8);
        // A multiple of the slots of a line, so that each shard begins a cache line.
        let slots = max.saturating_mul(SLOTS_FOR_THREE).div_ceil(3).saturating_add(1).next_multiple_of(SLOTS_A_LINE);
        let all = slots.saturating_mul(shards);
        Self::new(MutBorrow::new(SlotMemory::new(all)), |memory| {
            // One numbering for all shards: a plan that has locked several of them reads all of its slots by the same
            // limits.
            let limits = Arc::<Limits>::default();
            let shard = |slots| {
                let (large, counts) = (Slab::default(), Counts::default());
                let inside = Mutex::new(Inside { used: 0, max, large, hand: 0, counts });
                Shard { inside, slots: Slots::new(slots), limits: Arc::clone(&limits) }
            };
            memory.borrow_mut().slots(all).chunks_exact(slots).map(shard).collect()
        })
    }

    /// Returns the shards.
    #[inline]
    pub(super) fn shards(&self) -> &[Shard<'_>] {
        self.borrow_dependent()
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("shards", &self.shards().len()).finish_non_exhaustive()
    }
}

impl Shard<'_> {
    /// Returns the limits of all small balances of the table.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Locks the shard.
    #[inline]
    pub(super) fn open(&self) -> Open<'_> {
        Open { slots: self.slots, limits: &self.limits, inside: lock(&self.inside) }
    }

    /// Locks the shard unless another thread has locked it.
    #[inline]
    pub(super) fn try_open(&self) -> Option<Open<'_>> {
        let inside = match self.inside.try_lock() {
            Ok(inside) => inside,
            // Safe for the same reason as in `lock`.
            Err(TryLockError::Poisoned(inside)) => inside.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Open { slots: self.slots, limits: &self.limits, inside })
    }

    /// Prefetches the slots of a key. It needs no lock, so the memory of several keys can be on its way at once.
    #[inline]
    pub(super) fn prefetch(&self, key: Digest) {
        self.slots.prefetch(key);
    }
}

impl<'s> Open<'s> {
    pub(super) fn len(&self) -> usize {
        self.inside.used
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.bytes().saturating_add(self.inside.large.bytes())
    }

    /// Returns the slot of a key and its words, or the empty slot where the probe ends. Valid until a key is removed, which
    /// moves others.
    #[inline]
    pub(super) fn probe(&self, key: Digest) -> (usize, Option<SlotWords<'s>>) {
        self.slots.probe(key)
    }

    /// Returns whether the shard has this key.
    pub(super) fn has(&self, key: Digest) -> bool {
        self.slots.find(key).is_ok()
    }

    /// Returns whether the balance in a slot is blocked at `now`. A small one never is.
    pub(super) fn is_blocked(&self, place: usize, now: Timestamp) -> bool {
        self.large(place).is_some_and(|large| large.balance.is_blocked(now))
    }

    /// Returns a copy of the balance in a slot.
    pub(super) fn copied(&self, place: usize) -> Balance {
        match self.large(place) {
            Some(large) => large.balance.clone(),
            None => self.slots.get(place).map(|slot| self.unpack(&slot)).unwrap_or_default(),
        }
    }

    /// Changes the balance in a slot, which is under `limit` from now on.
    pub(super) fn with_whole<T>(&mut self, place: usize, limit: &Limit, change: impl FnOnce(&mut Balance) -> T) -> T {
        self.with_whole_as(place, (limit, Figures::Numbered), |balance| (change(balance), true))
    }

    /// Looks at the balance in a slot, and saves it only if that changed it.
    pub(super) fn look(&mut self, place: usize, charge: &Charge<'_>, now: Timestamp) -> (Look, bool) {
        self.with_whole_as(place, (charge.limit(), Figures::Numbered), |balance| {
            let (look, changed) = charge.look(balance, now);
            ((look, changed), changed)
        })
    }

    /// Calls `change` with the balance in a slot, and saves it under this limit if that returns `true` too.
    fn with_whole_as<T>(
        &mut self,
        place: usize,
        (limit, figures): (&Limit, Figures),
        change: impl FnOnce(&mut Balance) -> (T, bool),
    ) -> T {
        // The place must be that of a key. In an empty slot the words would be written without a digest, and no probe
        // would find them.
        let slot = self.slots.get(place).unwrap_or(EMPTY);
        let (kind, _, number) = parts(slot[3]);
        if kind != LARGE {
            let mut balance = self.unpack(&slot);
            let (answer, changed) = change(&mut balance);
            // `None` only if the slab has no number left. The balance then stays as it was.
            if changed && let Some(words) = self.pack(limit, figures, balance) {
                self.slots.set_words(place, words);
            }
            return answer;
        }
        // The figure of a large balance is its number in the slab.
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        let (answer, small) = self.inside.large.change(number, limit, change);
        // A balance that has become small, for instance because its block is over, moves back into its slot.
        if let Some(words) = small.and_then(|small| packed(small, self.number(limit, figures)?)) {
            self.inside.large.remove(number);
            self.slots.set_words(place, words);
        }
        answer
    }

    fn large(&self, place: usize) -> Option<&Large> {
        let (kind, _, number) = parts(self.slots.get(place)?[3]);
        if kind == LARGE { self.inside.large.get(u32::try_from(number).ok()?) } else { None }
    }

    /// Decides one cost on one key.
    #[inline]
    pub(super) fn check(&mut self, key: Digest, limit: &Limit, cost: u64, now: Timestamp, id: TraceId) -> Checked {
        let (place, Some(slot)) = self.slots.probe(key) else {
            return self.check_new(key, (limit, Figures::Numbered), cost, now, id);
        };
        let found = Seen::at(slot, limit, self.limits).and_then(|seen| {
            // The glance serves most buckets. `look` serves the rest of them, and windows and estimates.
            let glance = seen.glance(limit, cost, now).map(|(look, charged)| (look, Some(charged)));
            glance.or_else(|| seen.look(limit, cost, now))
        });
        match found {
            // Neither a denial nor a cost of 0 changes the balance, so nothing is written.
            Some((look, _)) if !look.allowed || cost == 0 => {
                return Checked { look, mark: None, changed: false, history: History::default() };
            }
            Some((look, Some(Charged { words, mark }))) => {
                slot.set(words);
                return Checked { look, mark: Some(mark), changed: true, history: History::default() };
            }
            // The charge does not fit into the slot, or the look itself changes the balance.
            Some((_, None)) | None => {}
        }
        self.with_whole_as(place, (limit, Figures::Numbered), |balance| {
            // The key has one limit, so what lies in the future is from before the clock stepped back.
            let brought = balance.bring(limit, now);
            let checked = balance.check(limit, cost, now, id);
            (checked, brought || checked.changed)
        })
    }

    /// Decides as [`check`](Self::check) does, and stores the figures of the limit with the balance: a caller who chooses another
    /// limit for each key must not use up the numbers of limits.
    pub(super) fn check_carried(
        &mut self,
        key: Digest,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        id: TraceId,
    ) -> Checked {
        let carried = (limit, Figures::Carried);
        match self.slots.find(key) {
            Ok(place) => self.with_whole_as(place, carried, checked(limit, cost, now, id)),
            Err(_) => self.check_new(key, carried, cost, now, id),
        }
    }

    #[cold]
    fn check_new(
        &mut self,
        key: Digest,
        (limit, figures): (&Limit, Figures),
        cost: u64,
        now: Timestamp,
        id: TraceId,
    ) -> Checked {
        let mut balance = Balance::default();
        let checked = balance.check(limit, cost, now, id);
        // A key without a charge takes no slot, so that requests which are denied cannot fill the table.
        if !checked.changed {
            return checked;
        }
        if self.is_full() && !self.free_one(key, now) {
            // Everything in reach is protected. Allowed without a record, the key could be charged any number of times.
            let look = Look { allowed: false, ..checked.look };
            return Checked { look, mark: None, changed: false, history: History::default() };
        }
        self.add_as(key, (limit, figures), balance);
        checked
    }

    fn is_full(&self) -> bool {
        // Logs and holds grow with the requests of a key, so the number of keys alone does not bound the memory.
        self.inside.used >= self.inside.max || self.inside.large.bytes() > self.inside.max.saturating_mul(LARGE_BYTES)
    }

    /// Returns whether the key of a prefix may be added to a full shard, after `others`: up to a share of its keys.
    pub(super) fn has_spare_slots(&self, others: usize) -> bool {
        let max = self.inside.max;
        self.inside.used.saturating_add(others) < max.saturating_add(max.checked_div(PREFIX_SHARE).unwrap_or(0))
    }

    /// Returns whether the key of a whole rule may be added to a full shard; there are few of them. One slot always stays empty,
    /// because a probe ends at an empty slot.
    pub(super) fn has_a_spare_slot(&self, others: usize) -> bool {
        self.inside.used.saturating_add(others).saturating_add(1) < self.slots.len()
    }

    /// Adds a new key. The caller has made room.
    pub(super) fn add(&mut self, key: Digest, limit: &Limit, balance: Balance) {
        self.add_as(key, (limit, Figures::Numbered), balance);
    }

    /// Restores a balance from before a restart. The caller has made room. The policy may no longer have the limit.
    pub(super) fn restore(&mut self, key: Digest, limit: &Limit, balance: Balance) {
        match self.slots.find(key) {
            Ok(place) => self.with_whole_as(place, (limit, Figures::Restored), |own| (*own = balance, true)),
            Err(_) => self.add_as(key, (limit, Figures::Restored), balance),
        }
    }

    fn add_as(&mut self, key: Digest, (limit, figures): (&Limit, Figures), balance: Balance) {
        let Err(free) = self.slots.find(key) else { return };
        // Checked again, whatever the caller has made sure of: without an empty slot, a probe for an absent key never
        // ends.
        if !self.has_a_spare_slot(0) {
            return;
        }
        if let Some([large, last]) = self.pack(limit, figures, balance) {
            let [high, low] = key.halves();
            self.slots.set(free, [high, low, large, last]);
            self.inside.used = self.inside.used.saturating_add(1);
        }
    }

    /// Returns whether room could be made for a new key. Evicts nothing.
    pub(super) fn has_room(&self, key: Digest, now: Timestamp) -> bool {
        !self.is_full() || self.find_evictable(key, now).0.is_some()
    }

    /// Makes room for a new key; an eviction may move other keys. Returns whether there is room.
    pub(super) fn make_room(&mut self, key: Digest, now: Timestamp) -> bool {
        !self.is_full() || self.free_one(key, now)
    }

    /// Saves a balance, or removes the key if the balance has no effect any more.
    pub(super) fn keep(&mut self, key: Digest, limit: &Limit, balance: Balance, now: Timestamp) {
        match self.slots.find(key) {
            Ok(place) if balance.silent_from() <= now => self.remove_at(place),
            Ok(place) => self.with_whole(place, limit, |own| *own = balance),
            Err(_) if balance.silent_from() <= now => {}
            // This may exceed `max`, because commands make no room before they change balances. `add` still leaves one
            // slot empty.
            Err(_) => self.add(key, limit, balance),
        }
    }

    /// Calls `show` for every balance that still has an effect.
    pub(super) fn each(&self, now: Timestamp, show: &mut impl FnMut(Digest, &Limit, &Balance)) {
        for at in 0..self.slots.len() {
            let Some(slot) = self.slots.get(at).filter(|slot| slot[3] != 0) else { continue };
            let key = Digest::from_u128(u128::from(slot[0]) << 64 | u128::from(slot[1]));
            let (kind, number, figure) = parts(slot[3]);
            if kind == LARGE {
                if let Some(Large { limit, balance }) = self.inside.large.get(u32::try_from(figure).unwrap_or(u32::MAX))
                    && balance.silent_from() > now
                {
                    show(key, limit, balance);
                }
            } else if let Some(limit) = self.limits.get(number) {
                let balance = self.unpack(&slot);
                if balance.silent_from() > now {
                    show(key, limit, &balance);
                }
            }
        }
    }

    pub(super) fn remove(&mut self, key: Digest) {
        if let Ok(place) = self.slots.find(key) {
            self.remove_at(place);
        }
    }

    /// Removes the key in a slot, and shifts back the following ones.
    fn remove_at(&mut self, place: usize) {
        // The slot has the only reference to its entry in the slab.
        if let Some((LARGE, _, number)) = self.slots.get(place).map(|slot| parts(slot[3])) {
            self.inside.large.remove(u32::try_from(number).unwrap_or(u32::MAX));
        }
        let moved = self.slots.close(place);
        self.inside.used = self.inside.used.saturating_sub(1);
        self.inside.counts.most_moved = self.inside.counts.most_moved.max(moved);
    }

    /// Evicts one key. Returns whether one could be evicted.
    fn free_one(&mut self, near: Digest, now: Timestamp) -> bool {
        let (found, hand) = self.find_evictable(near, now);
        // Moved also after a search in vain, so that the next search sees other slots.
        self.inside.hand = hand;
        let Some((place, used)) = found else { return false };
        self.remove_at(place);
        let counted = if used.is_some() { &mut self.inside.counts.evicted } else { &mut self.inside.counts.dropped };
        *counted = counted.saturating_add(1);
        true
    }

    /// Returns the slot to evict and how much of its limit is used (`None` if it has no effect any more): the first without
    /// effect, otherwise the least used of those searched, never a protected one. Also returns where the search ended.
    fn find_evictable(&self, near: Digest, now: Timestamp) -> (Option<(usize, Option<u64>)>, usize) {
        let mut least: Option<(u64, usize)> = None;
        let mut at = self.inside.hand;
        // First the slots around the home of the new key, which its probe has just loaded. Then those at the hand,
        // which passes over the whole shard from search to search.
        for start in [self.slots.home(near), self.inside.hand] {
            at = start;
            for _ in 0..SEARCH.min(self.slots.len()) {
                match self.worth(at, now) {
                    Worth::Nothing => return (Some((at, None)), self.inside.hand),
                    Worth::Share(used) if least.is_none_or(|(known, _)| used < known) => least = Some((used, at)),
                    Worth::Share(_) | Worth::Protected | Worth::Empty => {}
                }
                at = self.slots.after(at);
            }
        }
        (least.map(|(used, place)| (place, Some(used))), at)
    }

    fn worth(&self, at: usize, now: Timestamp) -> Worth {
        let Some(slot) = self.slots.get(at).filter(|slot| slot[3] != 0) else { return Worth::Empty };
        let (kind, number, figure) = parts(slot[3]);
        let small;
        let (limit, balance) = if kind == LARGE {
            match self.inside.large.get(u32::try_from(figure).unwrap_or(u32::MAX)) {
                Some(Large { limit, balance }) => (limit, balance),
                None => return Worth::Nothing,
            }
        } else {
            let Some(limit) = self.limits.get(number) else { return Worth::Nothing };
            small = self.unpack(&slot);
            (limit, &small)
        };
        // Before the protection: a balance without effect protects nothing.
        if balance.silent_from() <= now {
            Worth::Nothing
        } else if balance.is_protected(limit, now) {
            Worth::Protected
        } else {
            Worth::Share(balance.used_share(limit, now))
        }
    }

    fn number(&self, limit: &Limit, figures: Figures) -> Option<u64> {
        match figures {
            Figures::Numbered => self.limits.number(limit),
            Figures::Restored => self.limits.number_if_few(limit),
            Figures::Carried => None,
        }
    }

    fn pack(&mut self, limit: &Limit, figures: Figures, balance: Balance) -> Option<[u64; 2]> {
        // A small balance goes into the slab as well if its limit has no number, because the slab stores the limit with
        // it.
        let small = balance.to_small(limit).and_then(|small| packed(small, self.number(limit, figures)?));
        small.or_else(|| {
            let number = self.inside.large.insert(*limit, balance)?;
            Some([0, joined(LARGE, 0, u64::from(number))])
        })
    }

    #[inline]
    fn unpack(&self, slot: &Slot) -> Balance {
        let (_, number, figure) = parts(slot[3]);
        let Some(limit) = self.limits.get(number) else { return Balance::default() };
        Balance::from_small(Small { large: slot[2], figure }, limit)
    }
}

/// Checks a balance, and says whether it must be saved.
fn checked(limit: &Limit, cost: u64, now: Timestamp, id: TraceId) -> impl FnOnce(&mut Balance) -> (Checked, bool) {
    move |balance| {
        let checked = balance.check(limit, cost, now, id);
        (checked, checked.changed)
    }
}

/// Packs a balance under the limit of this number into two words, if it fits.
#[inline]
fn packed(small: Small, number: u64) -> Option<[u64; 2]> {
    (small.figure >> FIGURE_BITS == 0).then(|| [small.large, joined(SMALL, number, small.figure)])
}

/// Where the figures of a balance's limit are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Figures {
    /// Among the numbered limits, if the balance is small and a number is free.
    Numbered,
    /// Likewise, for a limit that the policy may no longer have.
    Restored,
    /// With the balance, in the slab.
    Carried,
}

/// The worth of a slot: what would be lost by its eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Worth {
    Empty,
    /// Its balance has no effect any more.
    Nothing,
    /// This many millionths of its limit are used, at most half of them.
    Share(u64),
    Protected,
}

#[inline]
fn joined(kind: u64, number: u64, figure: u64) -> u64 {
    figure << (KIND_BITS + NUMBER_BITS) | number << KIND_BITS | kind
}

/// Splits the last word into kind, number of the limit, and figure.
#[inline]
fn parts(last: u64) -> (u64, u64, u64) {
    let kind = last & ((1 << KIND_BITS) - 1);
    let number = (last >> KIND_BITS) & ((1 << NUMBER_BITS) - 1);
    (kind, number, last >> (KIND_BITS + NUMBER_BITS))
}
