//! One shard of the table: fixed slots found by a digest, and a slab for balances that outgrow them.
//!
//! Slots are 32 bytes: the digest and two words. They are made once, zeroed, so that nothing ever stops to grow. Keys are
//! found by linear probing; one that must go is taken out by shifting back the few that follow it.

use std::fmt;
use std::sync::{Arc, TryLockError};

use self_cell::{MutBorrow, self_cell};
use threshold_core::balance::{Checked, Small};
use threshold_core::limit::{Look, Mark};
use threshold_core::{Balance, Digest, Limit, Timestamp, TraceId};

use super::limits::{Limits, NUMBER_BITS};
use super::lock;
use super::slab::{Large, Slab};
use super::slot_memory::SlotMemory;
use super::slots::{EMPTY, SLOTS_A_LINE, Slot, SlotWords, Slots};
use crate::sync::{Mutex, MutexGuard};

/// Slots for each three keys. A probe looks at one or two of them then, and few leave the lines that were asked for ahead.
const SLOTS_FOR_THREE: usize = 5;
/// The share of its keys by which a full shard may be overrun by the keys of prefixes, as a divisor.
const PREFIX_SHARE: usize = 6;
/// How many slots are looked at for one that may go.
const SEARCH: usize = 64;
/// Bytes of large balances for each key a shard is made for.
const LARGE_BYTES: usize = 256;

/// Where a balance is, in the lowest bits of the last word: in the slot itself, or in the slab. 0 is an empty slot.
const KIND_BITS: u32 = 2;
const SMALL: u64 = 1;
const LARGE: u64 = 2;
/// What is left of the word for a figure, above the kind and the number of a limit.
const FIGURE_BITS: u32 = u64::BITS - KIND_BITS - NUMBER_BITS;

/// What a shard has done to stay within its bounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Balances that said nothing any more, dropped for free.
    pub dropped: u64,
    /// Live balances that were at most half used, and had to go.
    pub evicted: u64,
    /// Keys that were counted by their prefix because everything left was protected.
    pub folded: u64,
    /// The most slots that one change moved.
    pub most_moved: u64,
}

self_cell! {
    /// All shards of a table, and the memory in which their slots lie.
    pub(super) struct Table {
        owner: MutBorrow<SlotMemory>,
        #[covariant]
        dependent: Shards,
    }
}

/// The shards of a table.
pub(super) type Shards<'p> = Box<[Shard<'p>]>;

/// One shard. Its slots lie outside of its lock, so that they can be asked for without it; only whoever has
/// [opened](Self::open) it reads or changes them.
// What every decision reads of it is in one cache line, and in none of another's.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Shard<'p> {
    inside: Mutex<Inside>,
    slots: Slots<'p>,
    limits: Arc<Limits>,
}

/// What is inside of a shard's lock.
#[derive(Debug)]
pub(super) struct Inside {
    used: usize,
    most: usize,
    large: Slab,
    /// Where the search for one that may go went on last.
    hand: usize,
    pub(super) counts: Counts,
}

/// A small balance as it was found in a slot, and the number of its limit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    number: u64,
    small: Small,
}

impl Seen {
    /// The balance in a slot, if it is small and under this limit, as nearly all are.
    #[inline(always)]
    pub(super) fn at(slot: SlotWords<'_>, limit: &Limit, limits: &Limits) -> Option<Self> {
        let [large, last] = slot.get();
        let (kind, number, figure) = parts(last);
        let own = kind == SMALL && limits.get(number) == Some(limit);
        own.then_some(Self { number, small: Small { large, figure } })
    }

    /// What a look finds, and what to write for a charge, where that is quickly said: see [`Small::glance`].
    #[inline(always)]
    pub(super) fn glance(self, limit: &Limit, cost: u64, now: Timestamp) -> Option<(Look, Charged)> {
        let (look, charged, mark) = self.small.glance(limit, cost, now)?;
        Some((look, Charged { words: packed(charged, self.number)?, mark }))
    }

    /// The same for all others, unless a look changes them. The charge is none if it would outgrow the slot.
    pub(super) fn look(self, limit: &Limit, cost: u64, now: Timestamp) -> Option<(Look, Option<Charged>)> {
        let look = self.small.look(limit, cost, now)?;
        let charged = self.small.charge(limit, cost, now);
        Some((look, charged.and_then(|(small, mark)| Some(Charged { words: packed(small, self.number)?, mark }))))
    }
}

/// What a slot says once a cost is charged, and what that wrote.
#[derive(Debug, Clone, Copy)]
pub(super) struct Charged {
    pub(super) words: [u64; 2],
    pub(super) mark: Mark,
}

/// A shard that is one's own for as long as this lives.
#[derive(Debug)]
pub(super) struct Open<'s> {
    slots: Slots<'s>,
    limits: &'s Limits,
    pub(super) inside: MutexGuard<'s, Inside>,
}

impl Table {
    /// So many shards for `most` keys each.
    pub(super) fn of(shards: usize, most: usize) -> Self {
        let most = most.max(8);
        // Each begins with a cache line.
        let slots = most.saturating_mul(SLOTS_FOR_THREE).div_ceil(3).saturating_add(1).next_multiple_of(SLOTS_A_LINE);
        let all = slots.saturating_mul(shards);
        Self::new(MutBorrow::new(SlotMemory::new(all)), |piece| {
            let limits = Arc::<Limits>::default();
            let shard = |slots| {
                let (large, counts) = (Slab::default(), Counts::default());
                let inside = Mutex::new(Inside { used: 0, most, large, hand: 0, counts });
                Shard { inside, slots: Slots::new(slots), limits: Arc::clone(&limits) }
            };
            piece.borrow_mut().slots(all).chunks_exact(slots).map(shard).collect()
        })
    }

    /// Its shards.
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
    /// Every limit that a small balance here is under, or in any other shard.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Waits until nobody else has it.
    #[inline]
    pub(super) fn open(&self) -> Open<'_> {
        Open { slots: self.slots, limits: &self.limits, inside: lock(&self.inside) }
    }

    /// As [`open`](Self::open), unless somebody else has it.
    #[inline]
    pub(super) fn open_unless_held(&self) -> Option<Open<'_>> {
        let inside = match self.inside.try_lock() {
            Ok(inside) => inside,
            Err(TryLockError::Poisoned(inside)) => inside.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Open { slots: self.slots, limits: &self.limits, inside })
    }

    /// Asks for the memory of a key and waits for nothing: what several keys need is then on its way together.
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

    /// The slot a key is in and what that says, or the empty one where looking for it ends. Good until a key goes: those
    /// behind it then move.
    #[inline]
    pub(super) fn probe(&self, key: Digest) -> (usize, Option<SlotWords<'s>>) {
        self.slots.probe(key)
    }

    /// Whether a key is here.
    pub(super) fn has(&self, key: Digest) -> bool {
        self.slots.find(key).is_ok()
    }

    /// Whether the balance in a slot is denied at `now`, whatever fits. A small one never is.
    pub(super) fn is_blocked(&self, place: usize, now: Timestamp) -> bool {
        self.large(place).is_some_and(|large| large.balance.is_blocked(now))
    }

    /// A balance in a slot, by itself.
    pub(super) fn copied(&self, place: usize) -> Balance {
        match self.large(place) {
            Some(large) => large.balance.clone(),
            None => self.slots.get(place).map(|slot| self.unpack(&slot)).unwrap_or_default(),
        }
    }

    /// Changes the balance in a slot as a whole, under this limit from now on.
    pub(super) fn with_whole<T>(&mut self, place: usize, limit: &Limit, change: impl FnOnce(&mut Balance) -> T) -> T {
        self.with_whole_as(place, (limit, Figures::Numbered), change)
    }

    fn with_whole_as<T>(
        &mut self,
        place: usize,
        (limit, figures): (&Limit, Figures),
        change: impl FnOnce(&mut Balance) -> T,
    ) -> T {
        let slot = self.slots.get(place).unwrap_or(EMPTY);
        let (kind, _, number) = parts(slot[3]);
        if kind != LARGE {
            let mut balance = self.unpack(&slot);
            let changed = change(&mut balance);
            if let Some(words) = self.pack(limit, figures, balance) {
                self.slots.set_words(place, words);
            }
            return changed;
        }
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        let (changed, small) = self.inside.large.change(number, limit, change);
        // What shrinks to a slot's size, as a pause that is over does, goes back into its slot.
        if let Some(words) = small.and_then(|small| packed(small, self.number(limit, figures)?)) {
            self.inside.large.remove(number);
            self.slots.set_words(place, words);
        }
        changed
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
            let glance = seen.glance(limit, cost, now).map(|(look, charged)| (look, Some(charged)));
            glance.or_else(|| seen.look(limit, cost, now))
        });
        match found {
            Some((look, _)) if !look.allowed || cost == 0 => return Checked { look, mark: None, changed: false },
            Some((look, Some(Charged { words, mark }))) => {
                slot.set(words);
                return Checked { look, mark: Some(mark), changed: true };
            }
            Some((_, None)) | None => {}
        }
        self.with_whole(place, limit, |balance| balance.check(limit, cost, now, id))
    }

    /// As [`check`](Self::check), with the figures of the limit beside the balance: whoever chooses another limit for each
    /// key takes no numbers from others.
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
            Ok(place) => self.with_whole_as(place, carried, |balance| balance.check(limit, cost, now, id)),
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
        if !checked.changed {
            return checked;
        }
        if self.is_full() && !self.free_one(key, now) {
            let look = Look { allowed: false, ..checked.look };
            return Checked { look, mark: None, changed: false };
        }
        self.add_as(key, (limit, figures), balance);
        checked
    }

    fn is_full(&self) -> bool {
        self.inside.used >= self.inside.most || self.inside.large.bytes() > self.inside.most.saturating_mul(LARGE_BYTES)
    }

    /// Whether the key of a prefix may be added beyond the bound, after so many others that are to come: by a share of it.
    pub(super) fn has_spare_slots(&self, others: usize) -> bool {
        let most = self.inside.most;
        self.inside.used.saturating_add(others) < most.saturating_add(most.checked_div(PREFIX_SHARE).unwrap_or(0))
    }

    /// Whether the key of a whole rule may be added beyond the bound; there are few of them. One slot always stays empty,
    /// for that is where a probe ends.
    pub(super) fn has_a_spare_slot(&self, others: usize) -> bool {
        self.inside.used.saturating_add(others).saturating_add(1) < self.slots.len()
    }

    /// Adds a key that is not here. The caller has made room.
    pub(super) fn add(&mut self, key: Digest, limit: &Limit, balance: Balance) {
        self.add_as(key, (limit, Figures::Numbered), balance);
    }

    /// Keeps what was used before a restart; the caller has made room. The limit may be nobody's any more.
    pub(super) fn restore(&mut self, key: Digest, limit: &Limit, balance: Balance) {
        match self.slots.find(key) {
            Ok(place) => self.with_whole_as(place, (limit, Figures::Restored), |own| *own = balance),
            Err(_) => self.add_as(key, (limit, Figures::Restored), balance),
        }
    }

    fn add_as(&mut self, key: Digest, (limit, figures): (&Limit, Figures), balance: Balance) {
        let Err(free) = self.slots.find(key) else { return };
        if !self.has_a_spare_slot(0) {
            return;
        }
        if let Some([large, last]) = self.pack(limit, figures, balance) {
            let [high, low] = key.halves();
            self.slots.set(free, [high, low, large, last]);
            self.inside.used = self.inside.used.saturating_add(1);
        }
    }

    /// Whether room could be made for a key that is not here. Nothing goes yet.
    pub(super) fn has_room(&self, key: Digest, now: Timestamp) -> bool {
        !self.is_full() || self.dispensable(key, now).0.is_some()
    }

    /// Makes room for a key that is not here. What had to go for it is gone afterwards, and others may have moved.
    pub(super) fn make_room(&mut self, key: Digest, now: Timestamp) -> bool {
        !self.is_full() || self.free_one(key, now)
    }

    /// Keeps a balance. One that says nothing is dropped instead.
    pub(super) fn keep(&mut self, key: Digest, limit: &Limit, balance: Balance, now: Timestamp) {
        match self.slots.find(key) {
            Ok(place) if balance.silent_from() <= now => self.take_out(place),
            Ok(place) => self.with_whole(place, limit, |own| *own = balance),
            Err(_) if balance.silent_from() <= now => {}
            Err(_) => self.add(key, limit, balance),
        }
    }

    /// Shows every balance that says anything.
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
            self.take_out(place);
        }
    }

    /// Takes a slot out, shifting back those behind it that would not be found across the gap.
    fn take_out(&mut self, place: usize) {
        if let Some((LARGE, _, number)) = self.slots.get(place).map(|slot| parts(slot[3])) {
            self.inside.large.remove(u32::try_from(number).unwrap_or(u32::MAX));
        }
        let moved = self.slots.close(place);
        self.inside.used = self.inside.used.saturating_sub(1);
        self.inside.counts.most_moved = self.inside.counts.most_moved.max(moved);
    }

    /// Makes one key go.
    fn free_one(&mut self, near: Digest, now: Timestamp) -> bool {
        let (found, hand) = self.dispensable(near, now);
        self.inside.hand = hand;
        let Some((place, used)) = found else { return false };
        self.take_out(place);
        let counted = if used.is_some() { &mut self.inside.counts.evicted } else { &mut self.inside.counts.dropped };
        *counted = counted.saturating_add(1);
        true
    }

    /// A key that may go, and how much it has used: one that says nothing, else the least used of those looked at, never a
    /// protected one. Also where the search ended.
    fn dispensable(&self, near: Digest, now: Timestamp) -> (Option<(usize, Option<u64>)>, usize) {
        let mut least: Option<(u64, usize)> = None;
        let mut at = self.inside.hand;
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

/// A balance under the limit of this number in two words, if it fits.
#[inline]
fn packed(small: Small, number: u64) -> Option<[u64; 2]> {
    (small.figure >> FIGURE_BITS == 0).then(|| [small.large, joined(SMALL, number, small.figure)])
}

/// Where the figures of a balance's limit are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Figures {
    /// Among the numbered limits, if the balance is small and there is a number.
    Numbered,
    /// Likewise, for a limit that may be nobody's any more.
    Restored,
    /// Beside the balance.
    Carried,
}

/// What a slot is worth keeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Worth {
    Empty,
    /// It says nothing any more.
    Nothing,
    /// So many millionths of its limit are used, at most half of them.
    Share(u64),
    Protected,
}

#[inline]
fn joined(kind: u64, number: u64, figure: u64) -> u64 {
    figure << (KIND_BITS + NUMBER_BITS) | number << KIND_BITS | kind
}

/// Kind, number of the limit, figure.
#[inline]
fn parts(last: u64) -> (u64, u64, u64) {
    let kind = last & ((1 << KIND_BITS) - 1);
    let number = (last >> KIND_BITS) & ((1 << NUMBER_BITS) - 1);
    (kind, number, last >> (KIND_BITS + NUMBER_BITS))
}
