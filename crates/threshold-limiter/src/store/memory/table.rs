//! One shard of the table: fixed slots found by a digest, and a slab for balances that outgrow them.
//!
//! Slots are 32 bytes: the digest and two words. They are made once, zeroed, so that pages nobody touched cost nothing
//! and nothing ever stops to grow. Keys are found by linear probing; one that must go is taken out by shifting back the
//! few that follow it.

use threshold_core::balance::Small;
use threshold_core::limit::{Look, Mark};
use threshold_core::{Balance, Digest, Limit, Timestamp, TraceId};

use super::slab::{Large, Slab};

/// Digest (two words), a large figure, and a word with the kind, the limit's number and a smaller figure.
type Slot = [u64; 4];

const EMPTY: Slot = [0; 4];
/// Slots for each three keys: at three quarters full a probe looks at two or three of them.
const SLOTS_FOR_THREE: usize = 4;
/// How many slots are looked at for one that may go.
const SEARCH: usize = 64;
/// Bytes of large balances for each key a shard is made for.
const LARGE_BYTES: usize = 256;

/// The kinds of balances, in the lowest bits of the last word. 0 is an empty slot.
const KIND_BITS: u32 = 3;
const RATE: u64 = 1;
const WINDOW: u64 = 2;
const ESTIMATE: u64 = 3;
const LARGE: u64 = 4;
/// The bits of a limit's number, above the kind.
const LIMIT_BITS: u32 = 13;
/// What is left of the word for a figure.
const FIGURE_BITS: u32 = u64::BITS - KIND_BITS - LIMIT_BITS;

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

/// One shard.
#[derive(Debug)]
pub(super) struct Shard {
    slots: Vec<Slot>,
    used: usize,
    most: usize,
    /// Every limit that a small balance here is under, by its number.
    limits: Vec<Limit>,
    large: Slab,
    /// Where the search for one that may go went on last.
    hand: usize,
    pub(super) counts: Counts,
}

impl Shard {
    /// A shard for `most` keys.
    pub(super) fn new(most: usize) -> Self {
        let most = most.max(8);
        let slots = most.saturating_mul(SLOTS_FOR_THREE).div_ceil(3).saturating_add(1);
        Self {
            slots: vec![EMPTY; slots],
            used: 0,
            most,
            limits: Vec::new(),
            large: Slab::default(),
            hand: 0,
            counts: Counts::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.used
    }

    pub(super) fn bytes(&self) -> usize {
        let slots = self.slots.capacity().saturating_mul(size_of::<Slot>());
        slots
            .saturating_add(self.large.bytes())
            .saturating_add(self.limits.capacity().saturating_mul(size_of::<Limit>()))
    }

    /// The balance under a key; a fresh one if there is none. A large one is lent, not copied: [`put_back`](Self::put_back)
    /// must follow.
    pub(super) fn take(&mut self, key: Digest) -> Balance {
        let Some(slot) = self.find(key).ok().and_then(|at| self.slots.get(at)).copied() else {
            return Balance::default();
        };
        match parts(slot[3]) {
            (LARGE, _, number) => self.large.lend(u32::try_from(number).unwrap_or(u32::MAX)),
            _ => self.unpack(&slot),
        }
    }

    /// Puts back what was taken. What has not changed and was not lent is where it was.
    pub(super) fn put_back(&mut self, key: Digest, limit: &Limit, balance: Balance, changed: bool, now: Timestamp) {
        if changed {
            return self.keep(key, limit, balance, now);
        }
        if let Some((LARGE, _, number)) =
            self.find(key).ok().and_then(|at| self.slots.get(at)).map(|slot| parts(slot[3]))
        {
            self.large.replace(u32::try_from(number).unwrap_or(u32::MAX), *limit, balance);
        }
    }

    /// Decides one cost on one key. A small balance is found once, and changed where it lies.
    pub(super) fn check(
        &mut self,
        key: Digest,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        id: TraceId,
    ) -> (Look, Option<Mark>) {
        match self.find(key) {
            Ok(at) => self.check_known(at, key, limit, cost, now, id),
            Err(at) => {
                let mut balance = Balance::default();
                let (look, mark) = balance.check(limit, cost, now, id);
                if mark.is_none() {
                    return (look, mark);
                }
                let full = self.is_full();
                if full && !self.free_one(key, now) {
                    return (Look { fits: false, ..look }, None);
                }
                // Whatever went may have moved the end of the probe.
                let at = if full { self.find(key).unwrap_or_else(|at| at) } else { at };
                self.insert(at, key, limit, balance);
                (look, mark)
            }
        }
    }

    fn check_known(
        &mut self,
        at: usize,
        key: Digest,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        id: TraceId,
    ) -> (Look, Option<Mark>) {
        let Some(slot) = self.slots.get(at).copied() else { return Balance::default().check(limit, cost, now, id) };
        let mut balance = match parts(slot[3]) {
            (LARGE, _, number) => self.large.lend(u32::try_from(number).unwrap_or(u32::MAX)),
            _ => self.unpack(&slot),
        };
        let (look, mark) = balance.check(limit, cost, now, id);
        // A denial leaves a small balance as it was, unless its terms or its clock have changed.
        let (kind, number, _) = parts(slot[3]);
        if mark.is_some() || kind == LARGE || self.limit(number) != Some(limit) {
            self.overwrite(at, key, limit, balance);
        }
        (look, mark)
    }

    fn is_full(&self) -> bool {
        self.used >= self.most || self.large.bytes() > self.most.saturating_mul(LARGE_BYTES)
    }

    /// Whether the key of a prefix may be added beyond the bound: into half of the slots that are left over.
    pub(super) fn has_spare_slots(&self) -> bool {
        let over = self.slots.len().saturating_sub(self.most);
        self.used < self.most.saturating_add(over.checked_div(2).unwrap_or(0))
    }

    /// Whether the key of a whole rule may be added beyond the bound; there are few of them. One slot always stays empty,
    /// for that is where a probe ends.
    pub(super) fn has_a_spare_slot(&self) -> bool {
        self.used.saturating_add(1) < self.slots.len()
    }

    fn insert(&mut self, at: usize, key: Digest, limit: &Limit, balance: Balance) {
        if !self.has_a_spare_slot() {
            return;
        }
        let slot = self.pack_new(key, limit, balance);
        if let Some(free) = self.slots.get_mut(at)
            && slot != EMPTY
        {
            *free = slot;
            self.used = self.used.saturating_add(1);
        }
    }

    /// Whether a key is here, or room can be made for it. What had to go for it is gone afterwards.
    pub(super) fn make_room(&mut self, key: Digest, now: Timestamp) -> bool {
        if self.find(key).is_ok() {
            return true;
        }
        !self.is_full() || self.free_one(key, now)
    }

    /// Keeps a balance. One that says nothing is dropped instead.
    fn keep(&mut self, key: Digest, limit: &Limit, balance: Balance, now: Timestamp) {
        if balance.silent_from() <= now {
            return self.remove(key);
        }
        match self.find(key) {
            Ok(at) => self.overwrite(at, key, limit, balance),
            Err(at) => self.insert(at, key, limit, balance),
        }
    }

    pub(super) fn remove(&mut self, key: Digest) {
        if let Ok(at) = self.find(key) {
            self.take_out(at);
        }
    }

    fn home(&self, key: Digest) -> usize {
        let low = u128::from(word(key.to_u128()));
        let at = low.saturating_mul(self.slots.len() as u128) >> 64;
        usize::try_from(at).unwrap_or(0)
    }

    /// The slot a key is in, or the empty one where its probe ends. There always is one: slots outnumber keys.
    fn find(&self, key: Digest) -> Result<usize, usize> {
        let [high, low] = words(key);
        let mut at = self.home(key);
        loop {
            match self.slots.get(at) {
                Some([own_high, own_low, _, last]) => {
                    if *last == 0 {
                        return Err(at);
                    }
                    if (*own_high, *own_low) == (high, low) {
                        return Ok(at);
                    }
                    at = at.saturating_add(1);
                }
                None => at = 0,
            }
        }
    }

    /// Takes a slot out, shifting back those behind it that would not be found across the gap.
    fn take_out(&mut self, at: usize) {
        if let Some((LARGE, _, number)) = self.slots.get(at).map(|slot| parts(slot[3])) {
            self.large.remove(u32::try_from(number).unwrap_or(u32::MAX));
        }
        let mut gap = at;
        let mut moved: u64 = 0;
        let mut next = self.after(gap);
        while let Some(slot) = self.slots.get(next).copied().filter(|slot| slot[3] != 0) {
            let home = self.home(digest(&slot));
            // Whether the gap lies between this key's home and where it is, going round.
            let wanders = if gap <= next { home <= gap || home > next } else { home <= gap && home > next };
            if wanders {
                if let Some(free) = self.slots.get_mut(gap) {
                    *free = slot;
                }
                moved = moved.saturating_add(1);
                gap = next;
            }
            next = self.after(next);
        }
        if let Some(slot) = self.slots.get_mut(gap) {
            *slot = EMPTY;
        }
        self.used = self.used.saturating_sub(1);
        self.counts.most_moved = self.counts.most_moved.max(moved);
    }

    fn after(&self, at: usize) -> usize {
        let next = at.saturating_add(1);
        if next < self.slots.len() { next } else { 0 }
    }

    /// Makes one key go: one that says nothing, else the least used of those looked at, never a protected one.
    fn free_one(&mut self, near: Digest, now: Timestamp) -> bool {
        let mut least: Option<(u64, usize)> = None;
        for start in [self.home(near), self.hand] {
            let mut at = start;
            for _ in 0..SEARCH.min(self.slots.len()) {
                match self.worth(at, now) {
                    Worth::Nothing => {
                        self.take_out(at);
                        self.counts.dropped = self.counts.dropped.saturating_add(1);
                        return true;
                    }
                    Worth::Share(used) if least.is_none_or(|(known, _)| used < known) => least = Some((used, at)),
                    Worth::Share(_) | Worth::Protected | Worth::Empty => {}
                }
                at = self.after(at);
            }
            self.hand = at;
        }
        let Some((_, at)) = least else { return false };
        self.take_out(at);
        self.counts.evicted = self.counts.evicted.saturating_add(1);
        true
    }

    fn worth(&self, at: usize, now: Timestamp) -> Worth {
        let Some(slot) = self.slots.get(at).filter(|slot| slot[3] != 0) else { return Worth::Empty };
        let (kind, number, figure) = parts(slot[3]);
        let small;
        let (limit, balance) = if kind == LARGE {
            match self.large.get(u32::try_from(figure).unwrap_or(u32::MAX)) {
                Some(Large { limit, balance }) => (limit, balance),
                None => return Worth::Nothing,
            }
        } else {
            let Some(limit) = self.limit(number) else { return Worth::Nothing };
            small = self.unpack(slot);
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

    fn limit(&self, number: u64) -> Option<&Limit> {
        self.limits.get(usize::try_from(number).ok()?)
    }

    /// The number of a limit, given to it now if it has none; `None` once there are too many.
    fn number(&mut self, limit: &Limit) -> Option<u64> {
        if let Some(number) = self.limits.iter().position(|own| own == limit) {
            return u64::try_from(number).ok();
        }
        let number = u64::try_from(self.limits.len()).ok().filter(|number| number >> LIMIT_BITS == 0)?;
        self.limits.push(*limit);
        Some(number)
    }

    fn overwrite(&mut self, at: usize, key: Digest, limit: &Limit, balance: Balance) {
        let Some((kind, _, figure)) = self.slots.get(at).map(|slot| parts(slot[3])) else { return };
        let number = u32::try_from(figure).unwrap_or(u32::MAX);
        match self.pack_small(key, limit, &balance) {
            Some(slot) => {
                if kind == LARGE {
                    self.large.remove(number);
                }
                if let Some(own) = self.slots.get_mut(at) {
                    *own = slot;
                }
            }
            None if kind == LARGE => self.large.replace(number, *limit, balance),
            None => {
                let slot = self.pack_large(key, limit, balance);
                if let Some(own) = self.slots.get_mut(at).filter(|_| slot != EMPTY) {
                    *own = slot;
                }
            }
        }
    }

    fn pack_new(&mut self, key: Digest, limit: &Limit, balance: Balance) -> Slot {
        match self.pack_small(key, limit, &balance) {
            Some(slot) => slot,
            None => self.pack_large(key, limit, balance),
        }
    }

    fn pack_large(&mut self, key: Digest, limit: &Limit, balance: Balance) -> Slot {
        let [high, low] = words(key);
        match self.large.insert(*limit, balance) {
            Some(number) => [high, low, 0, joined(LARGE, 0, u64::from(number))],
            None => EMPTY,
        }
    }

    /// A balance in two words, if it fits.
    fn pack_small(&mut self, key: Digest, limit: &Limit, balance: &Balance) -> Option<Slot> {
        let small = balance.to_small(limit)?;
        let (kind, large, figure) = match small {
            Small::Rate { full_at, part } => (RATE, full_at.micros(), part),
            Small::Window { start, used } => (WINDOW, start.micros(), used),
            Small::Estimate { start, current, previous } => {
                let counts = u32::try_from(current).ok().zip(u32::try_from(previous).ok())?;
                let window = start.micros().checked_div(limit.period().micros())?;
                (ESTIMATE, u64::from(counts.0) << 32 | u64::from(counts.1), window)
            }
        };
        if figure >> FIGURE_BITS != 0 {
            return None;
        }
        let number = self.number(limit)?;
        let [high, low] = words(key);
        Some([high, low, large, joined(kind, number, figure)])
    }

    fn unpack(&self, slot: &Slot) -> Balance {
        let (kind, number, figure) = parts(slot[3]);
        if kind == LARGE {
            let large = self.large.get(u32::try_from(figure).unwrap_or(u32::MAX));
            return large.map(|large| large.balance.clone()).unwrap_or_default();
        }
        let Some(limit) = self.limit(number) else { return Balance::default() };
        let large = slot[2];
        let small = match kind {
            RATE => Small::Rate { full_at: Timestamp::from_micros(large), part: figure },
            WINDOW => Small::Window { start: Timestamp::from_micros(large), used: figure },
            _ => Small::Estimate {
                start: Timestamp::from_micros(figure.saturating_mul(limit.period().micros())),
                current: large >> 32,
                previous: large & u64::from(u32::MAX),
            },
        };
        Balance::from_small(small, limit)
    }
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

/// The lower half of a digest. (The upper one chooses the shard.)
fn word(digest: u128) -> u64 {
    u64::try_from(digest & u128::from(u64::MAX)).unwrap_or(0)
}

fn words(key: Digest) -> [u64; 2] {
    [word(key.to_u128() >> 64), word(key.to_u128())]
}

fn digest(slot: &Slot) -> Digest {
    Digest::from_u128(u128::from(slot[0]) << 64 | u128::from(slot[1]))
}

fn joined(kind: u64, number: u64, figure: u64) -> u64 {
    figure << (KIND_BITS + LIMIT_BITS) | number << KIND_BITS | kind
}

/// Kind, number of the limit, figure.
fn parts(last: u64) -> (u64, u64, u64) {
    let kind = last & ((1 << KIND_BITS) - 1);
    let number = (last >> KIND_BITS) & ((1 << LIMIT_BITS) - 1);
    (kind, number, last >> (KIND_BITS + LIMIT_BITS))
}
