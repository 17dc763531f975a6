//! The balances of several keys: their shards locked at once and in one order, changed where they lie.

use std::hint::black_box;

use arrayvec::ArrayVec;
use threshold_core::limit::{Look, Mark};
use threshold_core::plan::{Charge, MAX_CHARGES};
use threshold_core::{Balance, Balances, Digest, Limit, Timestamp, TraceId};

use super::table::{Open, Seen, Shard};

/// Keys with their shards locked.
#[derive(Debug)]
pub(super) struct Locked<'s> {
    shards: &'s [Shard],
    open: ArrayVec<Open<'s>, MAX_CHARGES>,
    pub(super) seats: ArrayVec<Seat, MAX_CHARGES>,
    now: Timestamp,
}

/// One key, and where its balance is.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) key: Digest,
    /// Which of the open shards is its own.
    shard: u8,
    /// Where in the shard the key is, or else where looking for it begins.
    at: usize,
    /// Whether it is there.
    pub(super) known: bool,
    /// What a look found there, if it could look in place.
    seen: Option<Seen>,
}

impl<'s> Locked<'s> {
    /// Nothing locked yet: this is more than a kilobyte, and moving it would cost as much as locking.
    #[inline]
    pub(super) fn new(shards: &'s [Shard], now: Timestamp) -> Self {
        Self { shards, open: ArrayVec::new(), seats: ArrayVec::new(), now }
    }

    /// Locks the shards of these keys and finds the keys there.
    #[inline]
    pub(super) fn take(&mut self, keys: impl Iterator<Item = Digest>) {
        for key in keys {
            let _ = self.seats.try_push(Seat { key, shard: 0, at: 0, known: false, seen: None });
        }
        self.renew();
    }

    /// Does so again for keys that are others now. Whatever was locked before is unlocked first.
    pub(super) fn renew(&mut self) {
        self.lock();
        self.find();
    }

    /// Locks each shard once, in ascending order: two plans never wait for each other in a circle.
    fn lock(&mut self) {
        self.open.clear();
        // A shard and, below it, which key: sorted by the one, they still tell the other.
        let mut order: ArrayVec<u16, MAX_CHARGES> = ArrayVec::new();
        for (seat, index) in self.seats.iter().zip(0u16..) {
            let _ = order.try_push(u16::from(shard_of(seat.key, self.shards.len())) << 8 | index);
        }
        order.sort_unstable();
        let mut last = None;
        for [shard, index] in order.iter().map(|place| place.to_be_bytes()) {
            if last != Some(shard)
                && let Some(own) = self.shards.get(usize::from(shard))
            {
                let _ = self.open.try_push(own.open());
                last = Some(shard);
            }
            if let Some(seat) = self.seats.get_mut(usize::from(index)) {
                seat.shard = u8::try_from(self.open.len().saturating_sub(1)).unwrap_or(u8::MAX);
            }
        }
    }

    /// Finds the keys. The memory of all of them is asked for before any is waited for.
    pub(super) fn find(&mut self) {
        let mut touched = 0;
        for seat in &mut self.seats {
            if let Some(shard) = self.open.get(usize::from(seat.shard)) {
                seat.at = shard.home(seat.key);
                touched ^= shard.touch(seat.at);
            }
        }
        black_box(touched);
        for seat in &mut self.seats {
            if let Some(shard) = self.open.get(usize::from(seat.shard)) {
                let found = shard.find_from(seat.at, seat.key);
                seat.known = found.is_ok();
                seat.at = found.unwrap_or_else(|free| free);
            }
        }
    }

    /// How many keys before the `index`th are new to the same shard.
    pub(super) fn new_before(&self, index: usize) -> usize {
        let Some(own) = self.seats.get(index) else { return 0 };
        self.seats.iter().take(index).filter(|seat| !seat.known && seat.shard == own.shard).count()
    }

    /// The shard of the `index`th key.
    #[inline]
    pub(super) fn shard(&mut self, index: usize) -> Option<&mut Open<'s>> {
        self.open.get_mut(usize::from(self.seats.get(index)?.shard))
    }

    /// The `index`th key, if it is there, and its shard.
    #[inline]
    fn known(&mut self, index: usize) -> Option<(&mut Open<'s>, &mut Seat)> {
        let seat = self.seats.get_mut(index).filter(|seat| seat.known)?;
        Some((self.open.get_mut(usize::from(seat.shard))?, seat))
    }

    #[inline(never)]
    fn look_whole(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> (Look, bool) {
        let (limit, cost) = (charge.limit(), charge.cost());
        match self.known(index) {
            Some((shard, seat)) => shard.with_whole(seat.at, limit, |balance| balance.look(limit, cost, now)),
            None => Balance::default().look(limit, cost, now),
        }
    }

    #[inline(never)]
    fn charge_whole(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp, id: TraceId) -> Mark {
        let (limit, cost) = (charge.limit(), charge.cost());
        match self.known(index) {
            Some((shard, seat)) => shard.with_whole(seat.at, limit, |balance| balance.charge(limit, cost, now, id)),
            None => self.begin(index, limit, |balance| balance.charge(limit, cost, now, id)),
        }
    }

    /// What becomes of a key that was not here.
    fn begin<T>(&mut self, index: usize, limit: &Limit, change: impl FnOnce(&mut Balance) -> T) -> T {
        let mut balance = Balance::default();
        let changed = change(&mut balance);
        let now = self.now;
        if let Some(key) = self.seats.get(index).map(|seat| seat.key)
            && let Some(shard) = self.shard(index)
        {
            shard.keep(key, limit, balance, now);
        }
        changed
    }
}

impl Balances for Locked<'_> {
    #[inline]
    fn look(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> (Look, bool) {
        let (limit, cost) = (charge.limit(), charge.cost());
        if let Some((shard, seat)) = self.known(index)
            && let Some((seen, look)) = shard.look_in_place(seat.at, limit, cost, now)
        {
            seat.seen = Some(seen);
            return (look, false);
        }
        self.look_whole(index, charge, now)
    }

    #[inline]
    fn charge(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp, id: TraceId) -> Mark {
        let (limit, cost) = (charge.limit(), charge.cost());
        if let Some((shard, seat)) = self.known(index)
            && let Some(seen) = seat.seen
            && let Some(mark) = shard.charge_in_place(seat.at, seen, limit, cost, now)
        {
            return mark;
        }
        self.charge_whole(index, charge, now, id)
    }

    fn is_blocked(&self, index: usize, now: Timestamp) -> bool {
        let Some(seat) = self.seats.get(index).filter(|seat| seat.known) else { return false };
        self.open.get(usize::from(seat.shard)).is_some_and(|shard| shard.is_blocked(seat.at, now))
    }

    fn block(&mut self, index: usize, charge: &Charge<'_>, until: Timestamp) {
        match self.known(index) {
            Some((shard, seat)) => shard.with_whole(seat.at, charge.limit(), |balance| balance.block(until)),
            None => self.begin(index, charge.limit(), |balance| balance.block(until)),
        }
    }

    fn copied(&self, index: usize) -> Balance {
        let Some(seat) = self.seats.get(index).filter(|seat| seat.known) else { return Balance::default() };
        self.open.get(usize::from(seat.shard)).map(|shard| shard.copied(seat.at)).unwrap_or_default()
    }
}

/// The shard of a key, by its highest bits; its lowest ones find its slot.
pub(super) fn shard_of(key: Digest, shards: usize) -> u8 {
    // There are a power of two of them, at most 256.
    let last = u8::try_from(shards.saturating_sub(1)).unwrap_or(u8::MAX);
    u8::try_from(key.to_u128() >> 120).unwrap_or(0) & last
}
