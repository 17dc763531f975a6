//! What a store in memory hands to its sink, and takes back after a restart.

use std::ops::ControlFlow;
use std::sync::Arc;

use threshold_core::lockout::{Account, Login};
use threshold_core::{Balance, Digest, Limit, Standing, Timestamp, TraceId};

use super::accounts::Accounts;
use super::bounded_map::{BoundedMap, Put};
use super::standings::standing_worth;
use super::{MemoryStore, lock};
use crate::bans::beyond;
use crate::store::{ChangeSink, Listed, StoreError};

impl MemoryStore {
    /// The same store, which tells this sink what must outlive the process. What was restored before is not told again.
    #[must_use]
    pub fn with_change_sink(mut self, sink: Arc<dyn ChangeSink>) -> Self {
        self.sink = Some(sink);
        self
    }

    /// Takes back how it stood with a subject. SlotWords whether there was room.
    pub fn restore_standing(&self, key: Digest, standing: Standing, now: Timestamp) -> bool {
        let Some(map) = self.standings.get(self.standing_shard(key)) else { return false };
        self.put_standing(&mut lock(map), key, standing, now)
    }

    /// Takes back what was known of an account. SlotWords whether there was room; nothing that is here goes for it.
    pub fn restore_account(&self, key: Digest, account: Account) -> bool {
        lock(&self.accounts).restore(key, account)
    }

    /// Takes back what was used.
    pub fn restore_balance(&self, key: Digest, limit: &Limit, balance: Balance, now: Timestamp) {
        if let Some(shard) = self.shard(key) {
            let mut shard = shard.open();
            if balance.silent_from() > now && shard.make_room(key, now) {
                shard.restore(key, limit, balance);
            }
        }
    }

    /// Shows every balance that says anything, shard by shard: requests go on meanwhile.
    pub fn each_balance(&self, now: Timestamp, mut show: impl FnMut(Digest, &Limit, &Balance)) {
        self.expire_reservations(now);
        for shard in self.table.shards() {
            shard.open().each(now, &mut show);
        }
    }

    /// Shows every receipt that was refunded and would still give something back.
    pub fn each_refund(&self, now: Timestamp, mut show: impl FnMut(TraceId, Timestamp)) {
        lock(&self.refunds).refunded(now).for_each(|(id, void_from)| show(id, void_from));
    }

    /// Takes back that a receipt was refunded. SlotWords whether there was room.
    pub fn restore_refund(&self, id: TraceId, void_from: Timestamp, now: Timestamp) -> bool {
        lock(&self.refunds).refund(id, void_from, now).is_ok()
    }

    /// Shows how it stands with every subject, shard by shard.
    pub fn each_standing(&self, mut show: impl FnMut(Digest, &Standing)) {
        for map in &self.standings {
            lock(map).entries().iter().for_each(|(key, standing)| show(*key, standing));
        }
    }

    /// Shows every account. Logins wait meanwhile.
    pub fn each_account(&self, mut show: impl FnMut(Digest, &Account)) {
        lock(&self.accounts).entries().iter().for_each(|(key, account)| show(*key, account));
    }

    /// How it stands with a subject.
    pub fn standing(&self, key: Digest) -> Option<Standing> {
        lock(self.standings.get(self.standing_shard(key))?).get(key).cloned()
    }

    /// What is known of an account.
    pub fn account(&self, key: Digest) -> Option<Account> {
        lock(&self.accounts).get(key).cloned()
    }

    /// Shows whom ladders have banned and until when, in the order of their subjects, from the first after `after`, until
    /// `show` stops: a page costs no more than what it shows.
    pub fn walk_banned(
        &self,
        after: Option<Digest>,
        now: Timestamp,
        mut show: impl FnMut(Digest, Timestamp) -> ControlFlow<()>,
    ) {
        let mut banned = lock(&self.banned);
        let mut over = Vec::new();
        for (key, until) in banned.range(beyond(after)) {
            if *until <= now {
                over.push(*key);
            } else if show(*key, *until).is_break() {
                break;
            }
        }
        // So that the next walk does not meet them again.
        for key in over {
            banned.remove(&key);
        }
    }

    /// As [`Store::list`](crate::store::Store::list), of those whom ladders have banned.
    pub(super) fn list_banned(&self, after: Option<Digest>, limit: usize, now: Timestamp) -> Vec<Listed> {
        let mut listed = Vec::new();
        if limit > 0 {
            self.walk_banned(after, now, |key, until| {
                listed.push(Listed::Banned { key, until });
                if listed.len() < limit { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
        }
        listed
    }

    /// Notes until when a subject is banned, if it is. Its shard of the standings is held.
    pub(super) fn note_ban(&self, key: Digest, standing: Option<&Standing>) {
        let mut banned = lock(&self.banned);
        match standing.and_then(Standing::banned_until) {
            Some(until) => drop(banned.insert(key, until)),
            None => drop(banned.remove(&key)),
        }
    }

    /// Forgets how it stands with a subject. SlotWords whether anything was known.
    pub fn forget_standing(&self, key: Digest) -> bool {
        let Some(map) = self.standings.get(self.standing_shard(key)) else { return false };
        let mut map = lock(map);
        let known = map.get(key).is_some();
        map.remove(key);
        self.note_ban(key, None);
        if let Some(sink) = &self.sink {
            sink.standing(key, None);
        }
        known
    }

    /// Keeps how it stands with a subject under another key, unless something is known there. It is there before it is gone
    /// here, so that nobody slips through in between.
    pub(super) fn rename_standing(&self, old: Digest, new: Digest, now: Timestamp) {
        let Some(standing) = self.standing(old) else { return };
        let Some(map) = self.standings.get(self.standing_shard(new)) else { return };
        let mut map = lock(map);
        let kept = map.get(new).is_some() || self.put_standing(&mut map, new, standing, now);
        drop(map);
        if kept {
            self.forget_standing(old);
        }
    }

    pub(super) fn put_standing(
        &self,
        map: &mut BoundedMap<Digest, Standing>,
        key: Digest,
        standing: Standing,
        now: Timestamp,
    ) -> bool {
        let banned = |map: &BoundedMap<Digest, Standing>| map.get(key).and_then(Standing::banned_until);
        let before = banned(map);
        let put = map.put_if_worthier(key, standing, |other| standing_worth(other, now));
        if banned(map) != before {
            self.note_ban(key, map.get(key));
        }
        if let Put::InPlaceOf(gone) = put {
            self.note_ban(gone, None);
        }
        if let Some(sink) = &self.sink {
            if put != Put::NoRoom {
                sink.standing(key, map.get(key));
            }
            if let Put::InPlaceOf(gone) = put {
                sink.standing(gone, None);
            }
        }
        put != Put::NoRoom
    }

    /// Keeps an account that was tried. Tries that change nothing, as on one that is locked, are neither kept nor told to
    /// the sink: whoever makes them would make the disk work.
    ///
    /// # Errors
    /// Where there is no room.
    pub(super) fn put_account(
        &self,
        accounts: &mut Accounts,
        key: Digest,
        account: Account,
        login: &Login,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let changed = match accounts.get(key) {
            Some(known) => *known != account,
            None => account != Account::default(),
        };
        if changed {
            let gone = accounts.put(key, account, login, now)?;
            self.keep_account(accounts, key);
            self.keep_gone(gone);
        }
        Ok(())
    }

    pub(super) fn keep_gone(&self, gone: Option<Digest>) {
        if let (Some(sink), Some(gone)) = (&self.sink, gone) {
            sink.account(gone, None);
        }
    }

    pub(super) fn keep_account(&self, accounts: &Accounts, key: Digest) {
        if let Some(sink) = &self.sink {
            sink.account(key, accounts.get(key));
        }
    }
}

#[cfg(test)]
mod tests {
    use threshold_core::policy::Layer;
    use threshold_core::{Facts, Span};

    use super::*;
    use crate::{Limiter, ManualClock, Policy};

    const POLICY: &str = "
        [memory]
        max_keys = 1000
        [ladders.l]
        rungs = ['ban 1h', 'ban 2h']
        [[rule]]
        name = 'r'
        per = ['user']
        limit = '1/h'
        ladder = 'l'
        strike = 'request'
    ";

    /// Whom a walk in steps of `step` meets.
    fn walked(store: &MemoryStore, now: Timestamp, step: usize) -> Vec<(Digest, Timestamp)> {
        let mut all: Vec<(Digest, Timestamp)> = Vec::new();
        for _ in 0..10_000 {
            let (before, end) = (all.len(), all.len().saturating_add(step));
            store.walk_banned(all.last().map(|(key, _)| *key), now, |key, until| {
                all.push((key, until));
                if all.len() < end { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            assert!(all.len() <= end, "a walk goes on after it was stopped");
            if all.len() == before {
                return all;
            }
        }
        panic!("a walk meets somebody twice");
    }

    /// Woken by: leaving out any `note_ban`; and `*until <= now` in `walk_banned`.
    #[test]
    fn those_who_are_banned_are_in_order_as_their_standings_say() {
        let clock = Arc::new(ManualClock::default());
        clock.set(Timestamp::from_secs(1_767_225_600));
        let limiter = Limiter::builder(Policy::parse(POLICY, &|_| None).unwrap()).clock(Arc::clone(&clock)).build();
        let store = limiter.store();
        let agree = |expect: usize| {
            let now = limiter.now();
            let mut scanned = Vec::new();
            store.each_standing(|key, standing| scanned.extend(standing.banned_until().map(|until| (key, until))));
            scanned.retain(|(_, until)| *until > now);
            scanned.sort_unstable();
            assert_eq!((walked(store, now, 7), scanned.len()), (scanned, expect));
        };
        let strike = |user: &str| {
            for _ in 0..2 {
                let _ = limiter.check(&Facts { user: Some(user), ..Facts::default() }).unwrap();
            }
        };
        agree(0);
        for number in 0..100 {
            strike(&number.to_string());
        }
        agree(100);
        limiter.forgive(Layer::User, "7").unwrap();
        let keys = limiter.policy().keys_of(Layer::User, "8");
        let standing = keys.standings.iter().next().copied().unwrap();
        let kept = store.standing(standing).unwrap();
        assert!(store.forget_standing(standing));
        agree(98);
        assert!(store.restore_standing(standing, kept, limiter.now()));
        agree(99);
        clock.advance(Span::HOUR);
        agree(0);
        // A second ban is a longer one, and those who were banned once go when there is no room.
        strike("9");
        agree(1);
        for number in 0..2_000 {
            strike(&format!("new {number}"));
        }
        let now = limiter.now();
        agree(walked(store, now, 1_000_000).len());
        let indexed = lock(&store.banned).len();
        assert!(indexed <= store.usage().subjects, "{indexed} are remembered for nothing");
    }
}
