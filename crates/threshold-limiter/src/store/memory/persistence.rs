//! What the store reports to its change sink, and what it restores after a restart.

use std::collections::BTreeMap;
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
    /// Reports every change that must outlive the process to this sink. What was restored before is not reported.
    #[must_use]
    pub fn with_change_sink(mut self, sink: Arc<dyn ChangeSink>) -> Self {
        self.sink = Some(sink);
        self
    }

    /// Restores the standing of a subject. Returns whether there was room.
    pub fn restore_standing(&self, key: Digest, standing: Standing, now: Timestamp) -> bool {
        let Some(map) = self.standings.get(self.standing_shard(key)) else { return false };
        self.put_standing(&mut lock(map), key, standing, now)
    }

    /// Restores an account. Returns whether there was room; evicts nothing.
    pub fn restore_account(&self, key: Digest, account: Account) -> bool {
        lock(&self.accounts).restore(key, account)
    }

    /// Restores a balance, if there is room.
    pub fn restore_balance(&self, key: Digest, limit: &Limit, balance: Balance, now: Timestamp) {
        if let Some(shard) = self.shard(key) {
            let mut shard = shard.open();
            // One that has expired would only take room from others.
            if balance.silent_from() > now && shard.make_room(key, now) {
                shard.restore(key, limit, balance);
            }
        }
    }

    /// Calls `show` for every balance that still has an effect, shard by shard. Requests on other shards go on meanwhile.
    pub fn each_balance(&self, now: Timestamp, mut show: impl FnMut(Digest, &Limit, &Balance)) {
        self.expire_reservations(now);
        for shard in self.table.shards() {
            shard.open().each(now, &mut show);
        }
    }

    /// Calls `show` for every refunded receipt whose refund would still have an effect.
    pub fn each_refund(&self, now: Timestamp, mut show: impl FnMut(TraceId, Timestamp)) {
        lock(&self.refunds).refunded(now).for_each(|(id, void_from)| show(id, void_from));
    }

    /// Restores the record that a receipt was refunded. Returns whether there was room.
    pub fn restore_refund(&self, id: TraceId, void_from: Timestamp, now: Timestamp) -> bool {
        lock(&self.refunds).refund(id, void_from, now).is_ok()
    }

    /// Calls `show` for the standing of every subject, shard by shard.
    pub fn each_standing(&self, mut show: impl FnMut(Digest, &Standing)) {
        for map in &self.standings {
            lock(map).entries().iter().for_each(|(key, standing)| show(*key, standing));
        }
    }

    /// Calls `show` for every account. Logins wait meanwhile.
    pub fn each_account(&self, mut show: impl FnMut(Digest, &Account)) {
        lock(&self.accounts).entries().iter().for_each(|(key, account)| show(*key, account));
    }

    /// Returns the standing of a subject.
    pub fn standing(&self, key: Digest) -> Option<Standing> {
        lock(self.standings.get(self.standing_shard(key))?).get(key).cloned()
    }

    /// Returns an account.
    pub fn account(&self, key: Digest) -> Option<Account> {
        lock(&self.accounts).get(key).cloned()
    }

    /// Calls `show` for the subjects that ladders have banned, in the order of their keys, from the first after `after`, until
    /// it breaks.
    pub fn walk_banned(
        &self,
        after: Option<Digest>,
        now: Timestamp,
        mut show: impl FnMut(Digest, Timestamp) -> ControlFlow<()>,
    ) {
        // `show` is called under this lock, so it must not lock a shard of standings: those come before it in the
        // order.
        let mut banned = lock(&self.banned);
        let mut over = Vec::new();
        for (key, until) in banned.range(beyond(after)) {
            if *until <= now {
                over.push(*key);
            } else if show(*key, *until).is_break() {
                break;
            }
        }
        // Removed here, so that the next walk does not visit them again.
        for key in over {
            banned.remove(&key);
        }
    }

    /// Lists the subjects that ladders have banned; see [`Store::list`](crate::store::Store::list).
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

    /// Lists accounts; see [`Store::list`](crate::store::Store::list). There is no index by key: an operator asks for this, and
    /// every account is visited.
    pub(super) fn list_accounts(&self, after: Option<Digest>, limit: usize) -> Vec<Listed> {
        // Never more than a page, so that a list needs little memory however many accounts there are.
        let mut first = BTreeMap::new();
        self.each_account(|key, account| {
            let is_later = after.is_none_or(|after| key > after);
            let is_wanted = first.len() < limit || first.last_key_value().is_some_and(|(last, _)| key < *last);
            if is_later && is_wanted {
                first.insert(key, Box::new(account.clone()));
                if first.len() > limit {
                    first.pop_last();
                }
            }
        });
        first.into_iter().map(|(key, account)| Listed::Account { key, account }).collect()
    }

    /// Updates the index of banned subjects. The caller has locked the shard of the standing, so that both agree.
    pub(super) fn note_ban(&self, key: Digest, standing: Option<&Standing>) {
        let mut banned = lock(&self.banned);
        match standing.and_then(Standing::banned_until) {
            Some(until) => drop(banned.insert(key, until)),
            None => drop(banned.remove(&key)),
        }
    }

    /// Removes the standing of a subject. Returns whether there was one.
    pub fn forget_standing(&self, key: Digest) -> bool {
        let Some(map) = self.standings.get(self.standing_shard(key)) else { return false };
        let mut map = lock(map);
        let known = map.get(key).is_some();
        map.remove(key);
        self.note_ban(key, None);
        // Under the lock of the shard, so that the sink gets the changes of one key in their order. Also if memory has
        // no such standing: the journal may have a row that found no room at the restart.
        if let Some(sink) = &self.sink {
            sink.standing(key, None);
        }
        known
    }

    /// Moves a standing to another key, unless that has one. It is stored there before it is removed here, so that no request
    /// gets through in between.
    pub(super) fn rename_standing(&self, old: Digest, new: Digest, now: Timestamp) {
        let Some(standing) = self.standing(old) else { return };
        let Some(map) = self.standings.get(self.standing_shard(new)) else { return };
        let mut map = lock(map);
        let kept = map.get(new).is_some() || self.put_standing(&mut map, new, standing, now);
        // Released first: the old key may be in the same shard, whose lock the next call takes.
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
        // All shards share this index. A strike that changes no ban does not lock it.
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

    /// Saves an account after an attempt. Attempts that change nothing, as on a locked account, are neither saved nor reported
    /// to the sink: an attacker could otherwise keep the disk busy.
    ///
    /// # Errors
    /// Returns an error if there is no room.
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
            self.report_account(accounts, key);
            self.report_evicted(gone);
        }
        Ok(())
    }

    pub(super) fn report_evicted(&self, gone: Option<Digest>) {
        if let (Some(sink), Some(gone)) = (&self.sink, gone) {
            sink.account(gone, None);
        }
    }

    pub(super) fn report_account(&self, accounts: &Accounts, key: Digest) {
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

    /// Walks over all banned subjects in steps of `step`.
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
        panic!("a walk visits a subject twice");
    }

    /// Woken by: leaving out any `note_ban`; and `*until <= now` in `walk_banned`.
    #[test]
    fn those_who_are_banned_are_in_order_as_their_standings_say() {
        let clock = Arc::new(ManualClock::default());
        clock.set(Timestamp::from_secs(1_767_225_600));
        let limiter = Limiter::builder(Policy::parse(POLICY, &|_| None).unwrap()).clock(Arc::clone(&clock)).build();
        let store = limiter.store();
        let agree = |expect: usize| {
            let now = Timestamp::from(limiter.now());
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
        assert!(store.restore_standing(standing, kept, Timestamp::from(limiter.now())));
        agree(99);
        clock.advance(Span::HOUR);
        agree(0);
        // A second ban is a longer one, and those who were banned once go when there is no room.
        strike("9");
        agree(1);
        for number in 0..2_000 {
            strike(&format!("new {number}"));
        }
        let now = Timestamp::from(limiter.now());
        agree(walked(store, now, 1_000_000).len());
        let indexed = lock(&store.banned).len();
        assert!(indexed <= store.usage().subjects, "{indexed} are remembered for nothing");
    }
}
