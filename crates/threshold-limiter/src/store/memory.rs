//! The default store: a bounded table in this process, exact under threads.
//!
//! Balances live in shards, each behind its own lock. A plan locks the shards it touches in one order, checks all of its
//! limits, then writes all or none. Standings and accounts have tables of their own, so that no flood of keys pushes a
//! ban, a strike or a lock out.

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
use threshold_core::{Balance, Balances as _, Bill, Digest, Limit, Outcome, Plan, Timestamp, TraceId, settle_into};

use super::{ChangeSink, Durability, ImmediateStore, Kind, Listed, Store, StoreError};
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

/// How many shards a table has: enough that threads seldom meet, few enough that a small one is not all slack.
const SHARDS: std::ops::RangeInclusive<usize> = 16..=256;
/// Keys for which a shard of its own is worth while.
const KEYS_A_SHARD: usize = 4_096;
/// How many shards the table of standings has.
const SIDE_SHARDS: usize = 64;
/// A key in so many is expected to be a subject, an account or a reservation; each of those tables is that much smaller.
const SIDE_TABLE: u64 = 8;
/// The bytes of answers that are remembered by the ids of their requests, for each place in such a table.
const ANSWER_BYTES: usize = 1_024;
/// Keys for which a shard has room beyond its even share, in standard deviations of a fair spread.
const SPREAD: usize = 4;

/// A bounded table in this process.
#[derive(Debug)]
pub struct MemoryStore {
    table: Table,
    standings: Box<[Mutex<BoundedMap<Digest, Standing>>]>,
    /// Whom ladders have banned, and until when, in order. Taken while a shard of `standings` is held, never before.
    banned: Mutex<BTreeMap<Digest, Timestamp>>,
    accounts: Mutex<Box<Accounts>>,
    reservations: Mutex<Reservations>,
    /// When the next reservation expires, in microseconds.
    next_expiry: AtomicU64,
    refunds: Mutex<Refunds>,
    /// Bans and settings. It shares them with those who decide by them.
    control: Mutex<Box<ControlLog>>,
    requests: Mutex<Requests>,
    when_full: WhenFull,
    /// Who writes down what must outlive the process, if anybody does.
    sink: Option<Arc<dyn ChangeSink>>,
}

/// What a store holds, and what it did to stay within its bounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Keys with a balance.
    pub keys: usize,
    /// Subjects with a standing.
    pub subjects: usize,
    /// Accounts with anything to remember.
    pub accounts: usize,
    /// Bytes of the table and its large balances.
    pub bytes: usize,
    /// What had to go, or fold.
    pub counts: Counts,
}

/// Whose budget a charge falls to when there is no room for its own key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StandsIn {
    Nobody,
    Prefix,
    Rule,
}

impl MemoryStore {
    /// A store as the policy's `[memory]` sizes it.
    #[must_use]
    pub fn new(memory: Memory) -> Self {
        let keys = usize::try_from(memory.max_keys).unwrap_or(usize::MAX);
        let shards =
            keys.checked_div(KEYS_A_SHARD).unwrap_or(0).next_power_of_two().clamp(*SHARDS.start(), *SHARDS.end());
        let share = keys.div_ceil(shards);
        let most = share.saturating_add(share.isqrt().saturating_mul(SPREAD));
        let map =
            usize::try_from(memory.max_keys.checked_div(SIDE_TABLE).unwrap_or(0)).unwrap_or(usize::MAX).max(1_024);
        Self {
            table: Table::of(shards, most),
            standings: (0..SIDE_SHARDS).map(|_| Mutex::new(BoundedMap::new(map.div_ceil(SIDE_SHARDS)))).collect(),
            banned: Mutex::default(),
            accounts: Mutex::new(Box::new(Accounts::new(map, memory.when_full))),
            reservations: Mutex::new(Reservations::new(map)),
            next_expiry: AtomicU64::new(u64::MAX),
            refunds: Mutex::new(Refunds::new(map)),
            control: Mutex::default(),
            requests: Mutex::new(Requests::new(map.saturating_mul(ANSWER_BYTES))),
            when_full: memory.when_full,
            sink: None,
        }
    }

    /// Decides one cost on one key under one limit alone. Full, it denies what is new.
    #[inline]
    pub fn check_one(&self, key: Digest, limit: &Limit, cost: u64, now: Timestamp, id: TraceId) -> Checked {
        let Some(shard) = self.shard(key) else { return Balance::default().check(limit, cost, now, id) };
        shard.open().check(key, limit, cost, now, id)
    }

    /// As [`check_one`](Self::check_one), for limits that callers choose: however many there are, each costs the same, and
    /// nobody else anything.
    pub fn check_any(&self, key: Digest, limit: &Limit, cost: u64, now: Timestamp, id: TraceId) -> Checked {
        let Some(shard) = self.shard(key) else { return Balance::default().check(limit, cost, now, id) };
        shard.open().check_carried(key, limit, cost, now, id)
    }

    /// Puts back a ban or a setting from before. SlotWords whether there was room.
    pub fn restore_control(&self, change: ControlChange, now: Timestamp) -> bool {
        lock(&self.control).add(change, now).is_ok()
    }

    /// Shows every ban and setting, in the order in which they were set. None is changed meanwhile.
    pub fn each_control(&self, show: impl FnMut(&ControlChange)) {
        lock(&self.control).set().for_each(show);
    }

    /// What is held.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let shards = self.table.shards();
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

    /// The shard of one key.
    #[inline]
    fn shard(&self, key: Digest) -> Option<&Shard<'_>> {
        let shards = self.table.shards();
        shards.get(usize::from(shard_of(key, shards.len())))
    }

    /// Makes room for those keys of a bill that are not here yet; a peek only asks whether there would be any. Where a
    /// shard has room for no more, another key stands in: that of the caller's prefix, and where there is no room for
    /// that either, the one key of the rule. Only a plan knows those keys.
    #[cold]
    fn make_room(
        &self,
        bill: &Bill<'_>,
        plan: Option<&Plan<'_>>,
        locked: &mut Locked<'_>,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let mut stands_in = [StandsIn::Nobody; MAX_CHARGES];
        loop {
            let mut crowded: ArrayVec<usize, MAX_CHARGES> = ArrayVec::new();
            for (index, stands_in) in stands_in.iter().enumerate().take(bill.charges().len()) {
                let Some(key) = locked.entries.get(index).filter(|entry| entry.is_new()).map(|entry| entry.key) else {
                    continue;
                };
                let others = locked.new_before(index);
                let Some(shard) = locked.shard(index) else { continue };
                let looks = bill.verb() == Verb::Peek;
                let has_room = if looks { shard.has_room(key, now) } else { shard.make_room(key, now) }
                    || match stands_in {
                        StandsIn::Nobody => false,
                        StandsIn::Prefix => shard.has_spare_slots(others),
                        StandsIn::Rule => shard.has_a_spare_slot(others),
                    };
                if !has_room {
                    shard.inside.counts.folded = shard.inside.counts.folded.saturating_add(1);
                    let _ = crowded.try_push(index);
                }
            }
            if crowded.is_empty() {
                // What had to go may have moved others.
                locked.find();
                return Ok(());
            }
            for index in crowded {
                let (Some(entry), Some(stands_in)) = (locked.entries.get_mut(index), stands_in.get_mut(index)) else {
                    continue;
                };
                let (key, next) = match (self.when_full, *stands_in) {
                    (WhenFull::Deny, _) | (_, StandsIn::Rule) => return Err(StoreError::Full),
                    (WhenFull::Fold, StandsIn::Nobody) => {
                        (plan.and_then(|plan| plan.folded_key(index)), StandsIn::Prefix)
                    }
                    (WhenFull::Shared, _) | (WhenFull::Fold, StandsIn::Prefix) => {
                        (plan.and_then(|plan| plan.shared_key(index)), StandsIn::Rule)
                    }
                };
                (entry.key, *stands_in) = (key.ok_or(StoreError::Full)?, next);
            }
            locked.renew();
        }
    }

    /// Changes the balances under these keys, all at once.
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
                shard.keep(*key, limit, balance, now);
            }
        }
        result
    }

    /// Ends the reservations whose time has come. Whatever looks at a balance or changes one does this first, so that nobody
    /// sees a balance in which a release is overdue. Costs one load while there are none.
    #[inline]
    fn expire_reservations(&self, now: Timestamp) {
        if self.next_expiry.load(Ordering::Acquire) <= now.micros() {
            self.expire_due(now);
        }
    }

    #[cold]
    fn expire_due(&self, now: Timestamp) {
        // What is in memory can always be read and changed.
        let _ = expire(&mut OpenRecords::new(self), now);
    }

    /// Not by the bits that choose the shard of a balance: a subject's keys share them.
    fn standing_shard(&self, key: Digest) -> usize {
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

    fn execute(&self, command: Command, now: Timestamp) -> impl Future<Output = Result<Answer, StoreError>> + Send {
        ready(match command {
            // A command locks what it needs as it goes; a bill's balances and standings are locked together.
            Command::Settle(bill) => {
                let mut outcome = Box::new(Outcome::default());
                self.settle_now(&bill.as_bill(), None, now, &mut outcome).map(|()| Answer::Settled(outcome))
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
        }))
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
    #[inline(always)]
    fn settle_now(
        &self,
        bill: &Bill<'_>,
        plan: Option<&Plan<'_>>,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> Result<(), StoreError> {
        self.expire_reservations(now);
        let mut balances = Locked::new(self.table.shards(), now);
        balances.take(bill.charges().iter().map(Charge::key));
        let new = balances.entries.iter().any(LockedEntry::is_new);
        if new {
            self.make_room(bill, plan, &mut balances, now)?;
        }
        if bill.subjects().is_empty() {
            let nobody: &mut [Standing] = &mut [];
            settle_into(bill, &mut balances, nobody, now, outcome);
        } else {
            let mut standings = OpenStandings::new(self, bill, now);
            settle_into(bill, &mut balances, &mut standings, now, outcome);
            standings.save(outcome);
        }
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

/// A poisoned lock is taken all the same: what it guards is changed by assignments that cannot stop half way.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
