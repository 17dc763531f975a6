//! The default store: a bounded table in this process, exact under threads.
//!
//! Balances are in shards, each behind its own lock. A plan locks all shards that it needs, checks all of its limits, then
//! writes all or none. Standings and accounts have tables of their own, so that a flood of keys cannot evict a ban, a strike
//! or a lock.
//!
//! Locks are taken in this order, so that there is no deadlock: reservations; accounts; the shards of balances (see `locked`);
//! the shards of standings in ascending order; `banned`; the sink's own lock. Refunds, bans and settings, and requests are
//! locked for one operation each, and no other lock is taken meanwhile.

mod accounts;
mod bounded_map;
mod limits;
mod locked;
mod persistence;
mod records;
mod refunds;
mod requests;
mod reservations;
mod slab;
mod slot_memory;
mod slots;
mod standings;
mod table;

use std::collections::BTreeMap;
use std::future::{Future, ready};
use std::sync::{Arc, PoisonError};

use arrayvec::ArrayVec;
use threshold_core::bill::Charge;
use threshold_core::command::{Answer, Command, execute, expire};
use threshold_core::control::{ControlChange, ControlLog};
use threshold_core::ladder::Standing;
use threshold_core::plan::{MAX_CHARGES, Verb};
use threshold_core::{
    Balance, Balances as _, Bill, Digest, Limit, Outcome, Plan, Receipt, Timestamp, TraceId, settle_into,
};

use super::{
    ChangeSink, Durability, HoldTerms, ImmediateStore, KeyUsage, Kind, Listed, Store, StoreError, StoreNumbers,
};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};
use accounts::Accounts;
use bounded_map::BoundedMap;
use locked::{Locked, LockedEntry, shard_of};
use records::OpenRecords;
use refunds::Refunds;
use requests::Requests;
use reservations::Reservations;
use standings::OpenStandings;
use table::{Shard, Table};

pub use table::Counts;
pub use threshold_core::balance::Checked;
pub use threshold_core::policy::{Memory, WhenFull};

/// The number of shards of a table: enough that threads seldom contend, few enough that a small table is not mostly slack.
const SHARDS: std::ops::RangeInclusive<usize> = 16..=256;
/// Keys for each shard, between these bounds.
const KEYS_A_SHARD: usize = 4_096;
/// The number of shards of the table of standings.
const STANDING_SHARDS: usize = 64;
/// The tables of subjects, accounts, reservations and refunds have room for one entry for this many keys.
const KEYS_A_RECORD: u64 = 8;
/// The bytes for answers to requests with an id, for each entry of such a table.
const ANSWER_BYTES: usize = 1_024;
/// The room of a shard beyond its even share of keys, in standard deviations of a random spread.
const SPREAD: usize = 4;

/// A bounded table in this process.
#[derive(Debug)]
pub struct MemoryStore {
    table: Table,
    standings: Box<[Mutex<BoundedMap<Digest, Standing>>]>,
    /// The subjects that ladders have banned, and until when, in order. Locked while a shard of `standings` is locked, never
    /// before one.
    banned: Mutex<BTreeMap<Digest, Timestamp>>,
    accounts: Mutex<Box<Accounts>>,
    reservations: Mutex<Reservations>,
    /// When the next reservation expires, in microseconds; readable without the lock on `reservations`.
    next_expiry: AtomicU64,
    refunds: Mutex<Refunds>,
    /// Bans and settings. The entries are shared with the limiter's list of bans.
    control: Mutex<Box<ControlLog>>,
    requests: Mutex<Requests>,
    when_full: WhenFull,
    max_keys: usize,
    /// The number of open reservations that have expired.
    expired: AtomicU64,
    /// The sink for changes that must outlive the process.
    sink: Option<Arc<dyn ChangeSink>>,
}

/// The usage of a store, and what it did to stay within its bounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// The number of keys with a balance.
    pub keys: usize,
    /// The number of subjects with a standing.
    pub subjects: usize,
    /// The number of login accounts.
    pub accounts: usize,
    /// The bytes of the table and its large balances.
    pub bytes: usize,
    /// The counts of evictions.
    pub counts: Counts,
}

/// The key that stands in for a charge's own key when there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StandsIn {
    None,
    Prefix,
    Rule,
}

impl MemoryStore {
    /// Creates a store that is sized by a policy's `[memory]`.
    #[must_use]
    pub fn new(memory: Memory) -> Self {
        let keys = usize::try_from(memory.max_keys).unwrap_or(usize::MAX);
        // A power of two, because bits of the digest choose the shard.
        let shards =
            keys.checked_div(KEYS_A_SHARD).unwrap_or(0).next_power_of_two().clamp(*SHARDS.start(), *SHARDS.end());
        let share = keys.div_ceil(shards);
        // Keys are spread at random, so the deviation from an even share is about its square root.
        let max = share.saturating_add(share.isqrt().saturating_mul(SPREAD));
        let records =
            usize::try_from(memory.max_keys.checked_div(KEYS_A_RECORD).unwrap_or(0)).unwrap_or(usize::MAX).max(1_024);
        Self {
            table: Table::of(shards, max),
            standings: (0..STANDING_SHARDS)
                .map(|_| Mutex::new(BoundedMap::new(records.div_ceil(STANDING_SHARDS))))
                .collect(),
            banned: Mutex::default(),
            accounts: Mutex::new(Box::new(Accounts::new(records, memory.when_full))),
            reservations: Mutex::new(Reservations::new(records)),
            next_expiry: AtomicU64::new(u64::MAX),
            refunds: Mutex::new(Refunds::new(records)),
            control: Mutex::default(),
            requests: Mutex::new(Requests::new(records.saturating_mul(ANSWER_BYTES))),
            when_full: memory.when_full,
            max_keys: keys,
            expired: AtomicU64::new(0),
            sink: None,
        }
    }

    /// Decides one cost on one key under one limit. When the table is full, new keys are denied.
    #[inline]
    pub fn check_one(&self, key: Digest, limit: &Limit, cost: u64, now: Timestamp, id: TraceId) -> Checked {
        let Some(shard) = self.shard(key) else { return Balance::default().check(limit, cost, now, id) };
        shard.open().check(key, limit, cost, now, id)
    }

    /// Does what [`check_one`](Self::check_one) does for limits that callers choose. Their figures are stored with the balance,
    /// so that any number of different limits takes nothing from the policy's.
    pub fn check_any(&self, key: Digest, limit: &Limit, cost: u64, now: Timestamp, id: TraceId) -> Checked {
        let Some(shard) = self.shard(key) else { return Balance::default().check(limit, cost, now, id) };
        shard.open().check_carried(key, limit, cost, now, id)
    }

    /// Restores a ban or a setting. Returns whether there was room.
    pub fn restore_control(&self, change: ControlChange, now: Timestamp) -> bool {
        lock(&self.control).add(change, now).is_ok()
    }

    /// Calls `show` for every ban and setting, in the order in which they were set, under the lock.
    pub fn each_control(&self, show: impl FnMut(&ControlChange)) {
        lock(&self.control).set().for_each(show);
    }

    /// Returns the usage. Locks one shard after the other.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let shards = self.table.shards();
        // All shards share the numbered limits, so their bytes count once.
        let mut usage = Usage { bytes: shards.first().map_or(0, |shard| shard.limits().bytes()), ..Usage::default() };
        for shard in shards {
            let shard = shard.open();
            usage.keys = usage.keys.saturating_add(shard.len());
            usage.bytes = usage.bytes.saturating_add(shard.bytes());
            let counts = &mut usage.counts;
            counts.dropped = counts.dropped.saturating_add(shard.inside.counts.dropped);
            counts.evicted = counts.evicted.saturating_add(shard.inside.counts.evicted);
            counts.folded = counts.folded.saturating_add(shard.inside.counts.folded);
            counts.most_moved = counts.most_moved.max(shard.inside.counts.most_moved);
        }
        usage.subjects = self.standings.iter().map(|map| lock(map).len()).sum();
        let accounts = lock(&self.accounts);
        usage.accounts = accounts.len();
        usage.counts.folded = usage.counts.folded.saturating_add(accounts.folds());
        usage
    }

    /// Returns the shard of a key.
    #[inline]
    fn shard(&self, key: Digest) -> Option<&Shard<'_>> {
        let shards = self.table.shards();
        shards.get(usize::from(shard_of(key, shards.len())))
    }

    /// Makes room for the keys of a bill that the table does not have yet; a peek only checks whether there would be room. If a
    /// shard is full, another key stands in: that of the caller's address prefix or, without room for that either, one key
    /// for the whole rule. Only a plan knows those keys.
    #[cold]
    fn make_room(
        &self,
        bill: &Bill<'_>,
        plan: Option<&Plan<'_>>,
        locked: &mut Locked<'_>,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let mut stands_in = [StandsIn::None; MAX_CHARGES];
        // Each round replaces the keys without room by keys that more callers share, so there are at most three rounds.
        loop {
            let mut crowded: ArrayVec<usize, MAX_CHARGES> = ArrayVec::new();
            for (index, stands_in) in stands_in.iter().enumerate().take(bill.charges().len()) {
                let Some(key) = locked.entries.get(index).filter(|entry| entry.is_new()).map(|entry| entry.key) else {
                    continue;
                };
                let others = locked.new_before(index);
                let Some(shard) = locked.shard(index) else { continue };
                // A peek charges nothing, so it must not evict what another caller has used.
                let looks = bill.verb() == Verb::Peek;
                let has_room = if looks { shard.has_room(key, now) } else { shard.make_room(key, now) }
                    || match stands_in {
                        StandsIn::None => false,
                        StandsIn::Prefix => shard.has_spare_slots(others),
                        StandsIn::Rule => shard.has_a_spare_slot(others),
                    };
                if !has_room {
                    shard.inside.counts.folded = shard.inside.counts.folded.saturating_add(1);
                    let _ = crowded.try_push(index);
                }
            }
            if crowded.is_empty() {
                // Evictions may have moved other keys of this bill.
                locked.find();
                return Ok(());
            }
            for index in crowded {
                let (Some(entry), Some(stands_in)) = (locked.entries.get_mut(index), stands_in.get_mut(index)) else {
                    continue;
                };
                let (key, next) = match (self.when_full, *stands_in) {
                    (WhenFull::Deny, _) | (_, StandsIn::Rule) => return Err(StoreError::Full),
                    (WhenFull::Fold, StandsIn::None) => {
                        (plan.and_then(|plan| plan.folded_key(index)), StandsIn::Prefix)
                    }
                    (WhenFull::Shared, _) | (WhenFull::Fold, StandsIn::Prefix) => {
                        (plan.and_then(|plan| plan.shared_key(index)), StandsIn::Rule)
                    }
                };
                // A bill that comes as a command has no plan, and so no key that stands in.
                (entry.key, *stands_in) = (key.ok_or(StoreError::Full)?, next);
            }
            // This releases the locks, because the new keys may be in lower shards. Other threads may take the room
            // that was found so far, so the next round checks every key again.
            locked.renew();
        }
    }

    /// Changes the balances of these keys together, under their locks.
    fn with_balances<T>(
        &self,
        charges: &[(Digest, Limit)],
        now: Timestamp,
        change: impl FnOnce(&mut [Balance]) -> T,
    ) -> T {
        let mut locked = Locked::new(self.table.shards(), now);
        locked.take(charges.iter().map(|(key, _)| *key));
        let mut balances: ArrayVec<Balance, MAX_CHARGES> =
            (0..charges.len()).map(|index| locked.copied(index)).collect();
        let result = change(&mut balances);
        for (index, ((key, limit), balance)) in charges.iter().zip(balances).enumerate() {
            if let Some(shard) = locked.shard(index) {
                // By its key: a removal before this one may have moved its slot.
                shard.keep(*key, limit, balance, now);
            }
        }
        result
    }

    /// Ends the reservations that have expired. Every operation on balances does this first, so that none sees a balance with
    /// an overdue release. Costs one atomic load while none has expired.
    #[inline]
    fn expire_reservations(&self, now: Timestamp) {
        if self.next_expiry.load(Ordering::Acquire) <= now.micros() {
            self.expire_due(now);
        }
    }

    #[cold]
    fn expire_due(&self, now: Timestamp) {
        // Records in memory can always be read and changed.
        let _ = expire(&mut OpenRecords::new(self), now);
    }

    /// Returns the shard of a standing. It uses other bits than the shard of a balance: the keys of one subject share those.
    fn standing_shard(&self, key: Digest) -> usize {
        // 63 is one less than `STANDING_SHARDS`.
        usize::try_from(key.to_u128() & 63).unwrap_or(0)
    }
}

impl Store for MemoryStore {
    #[inline]
    fn prefetch(&self, key: Digest) {
        if let Some(shard) = self.shard(key) {
            shard.prefetch(key);
        }
    }

    #[inline]
    fn settle(
        &self,
        plan: &Plan<'_>,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        ready(self.settle_now(plan.bill(), Some(plan), now, outcome))
    }

    fn reserve(
        &self,
        plan: &Plan<'_>,
        terms: &HoldTerms,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        ready(self.reserve_now((plan.bill(), Some(plan)), terms, now, outcome))
    }

    fn execute(&self, command: Command, now: Timestamp) -> impl Future<Output = Result<Answer, StoreError>> + Send {
        ready(match command {
            // Other commands lock records one by one. The balances and standings of a bill must be locked together.
            Command::Settle(bill) => {
                let mut outcome = Box::new(Outcome::default());
                self.settle_now(&bill.as_bill(), None, now, &mut outcome).map(|()| Answer::Settled(outcome))
            }
            Command::Reserve { bill, terms } => {
                let mut outcome = Box::new(Outcome::default());
                let reserved = self.reserve_now((&bill.as_bill(), None), &terms, now, &mut outcome);
                reserved.map(|()| Answer::Settled(outcome))
            }
            command => execute(&command, &mut OpenRecords::new(self), now),
        })
    }

    fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> impl Future<Output = Result<Vec<Listed>, StoreError>> + Send {
        ready(Ok(match kind {
            Kind::Banned => self.list_banned(after, limit, now),
            Kind::Accounts => self.list_accounts(after, limit),
        }))
    }

    fn numbers(&self) -> StoreNumbers {
        let mut keys = KeyUsage { max: self.max_keys, ..KeyUsage::default() };
        // A shard keeps its number of keys, and its lock is held for no longer than to read it.
        for shard in self.table.shards() {
            let shard = shard.open();
            keys.used = keys.used.saturating_add(shard.len());
            keys.evicted = keys.evicted.saturating_add(shard.inside.counts.evicted);
            keys.folded = keys.folded.saturating_add(shard.inside.counts.folded);
        }
        StoreNumbers { keys: Some(keys), expired_reservations: self.expired.load(Ordering::Relaxed) }
    }

    fn answers_at_once(&self) -> bool {
        true
    }

    fn durability(&self) -> Option<Durability> {
        self.sink.as_ref().map(|sink| sink.durability())
    }
}

impl ImmediateStore for MemoryStore {}

impl MemoryStore {
    /// Settles a bill, and saves a reservation of its charges. Without room for that it gives them back.
    fn reserve_now(
        &self,
        (bill, plan): (&Bill<'_>, Option<&Plan<'_>>),
        terms: &HoldTerms,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> Result<(), StoreError> {
        self.settle_now(bill, plan, now, outcome)?;
        if bill.is_denied(outcome) {
            return Ok(());
        }
        let holding = Receipt::holding(bill, terms, outcome);
        let saved = execute(&terms.saving(holding.clone()), &mut OpenRecords::new(self), now);
        if saved.is_err() {
            let give_back = Command::GiveBack { receipt: Box::new(holding), credit: None };
            execute(&give_back, &mut OpenRecords::new(self), now)?;
        }
        saved.map(drop)
    }

    /// Settles a bill. `plan` has the keys that stand in for its own where there is no room.
    #[inline(always)]
    pub(crate) fn settle_now(
        &self,
        bill: &Bill<'_>,
        plan: Option<&Plan<'_>>,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> Result<(), StoreError> {
        // Before a shard is locked: the reservations come first in the order of locks.
        self.expire_reservations(now);
        let mut balances = Locked::new(self.table.shards(), now);
        balances.take(bill.charges().iter().map(Charge::key));
        let new = balances.entries.iter().any(LockedEntry::is_new);
        if new {
            self.make_room(bill, plan, &mut balances, now)?;
        }
        if bill.subjects().is_empty() {
            let none: &mut [Standing] = &mut [];
            settle_into(bill, &mut balances, none, now, outcome);
        } else {
            // After the balances, as the order of locks demands.
            let mut standings = OpenStandings::new(self, bill, now);
            settle_into(bill, &mut balances, &mut standings, now, outcome);
            standings.save(outcome);
        }
        // Another key can stand in only for a new one.
        if new {
            for (charge, entry) in bill.charges().iter().zip(&balances.entries) {
                if entry.key != charge.key() {
                    outcome.stands_in(charge.key(), entry.key);
                }
            }
        }
        Ok(())
    }
}

/// Locks a mutex.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock is safe to use: what it guards is changed by assignments, which cannot panic half way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
