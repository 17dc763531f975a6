//! What a store in memory hands to its keeper, and takes back after a restart.

use std::sync::Arc;

use threshold_core::lockout::Account;
use threshold_core::{Balance, Digest, Limit, Standing, Timestamp};

use super::side::{Put, Side, Worth};
use super::{MemoryStore, lock, standing_worth};
use crate::store::Keep;

impl MemoryStore {
    /// The same store, which tells this keeper what must outlive the process. What was restored before is not told again.
    #[must_use]
    pub fn kept_by(mut self, keeper: Arc<dyn Keep>) -> Self {
        self.keeper = Some(keeper);
        self
    }

    /// Takes back how it stood with a subject. Says whether there was room.
    pub fn restore_standing(&self, key: Digest, standing: Standing, now: Timestamp) -> bool {
        let Some(side) = self.standings.get(self.standing_shard(key)) else { return false };
        self.put_standing(&mut lock(side), key, standing, now)
    }

    /// Takes back what was known of an account. Says whether there was room; nothing that is here goes for it.
    pub fn restore_account(&self, key: Digest, account: Account) -> bool {
        self.put_account(&mut lock(&self.accounts), key, account, |_| Worth::Protected)
    }

    /// Takes back what was used.
    pub fn restore_balance(&self, key: Digest, limit: &Limit, balance: Balance, now: Timestamp) {
        if let Some(shard) = self.shard(key) {
            let mut shard = shard.open();
            if shard.make_room(key, now) {
                shard.keep(key, limit, balance, now);
            }
        }
    }

    /// Shows every balance that says anything, shard by shard: requests go on meanwhile.
    pub fn each_balance(&self, now: Timestamp, mut show: impl FnMut(Digest, &Limit, &Balance)) {
        for shard in self.table.shards() {
            shard.open().each(now, &mut show);
        }
    }

    /// Shows how it stands with every subject, shard by shard.
    pub fn each_standing(&self, mut show: impl FnMut(Digest, &Standing)) {
        for side in &self.standings {
            lock(side).entries().iter().for_each(|(key, standing)| show(*key, standing));
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

    /// Everyone whom a ladder has banned, and until when.
    #[must_use]
    pub fn banned(&self, now: Timestamp) -> Vec<(Digest, Timestamp)> {
        let mut banned = Vec::new();
        for side in &self.standings {
            let side = lock(side);
            let own = side.entries().iter().filter_map(|(key, standing)| Some((*key, standing.banned_until()?)));
            banned.extend(own.filter(|(_, until)| *until > now));
        }
        banned
    }

    /// Forgets how it stands with a subject. Says whether anything was known.
    pub fn forget_standing(&self, key: Digest) -> bool {
        let Some(side) = self.standings.get(self.standing_shard(key)) else { return false };
        let mut side = lock(side);
        let known = side.get(key).is_some();
        side.remove(key);
        if let Some(keeper) = &self.keeper {
            keeper.standing(key, None);
        }
        known
    }

    pub(super) fn put_standing(
        &self,
        side: &mut Side<Digest, Standing>,
        key: Digest,
        standing: Standing,
        now: Timestamp,
    ) -> bool {
        let put = side.put(key, standing, |other| standing_worth(other, now));
        if let Some(keeper) = &self.keeper {
            if put != Put::NoRoom {
                keeper.standing(key, side.get(key));
            }
            if let Put::InPlaceOf(gone) = put {
                keeper.standing(gone, None);
            }
        }
        put != Put::NoRoom
    }

    /// Keeps an account. Tries that change nothing, as on one that is locked, are not told to the keeper: whoever makes
    /// them would make the disk work.
    pub(super) fn put_account(
        &self,
        accounts: &mut Side<Digest, Account>,
        key: Digest,
        account: Account,
        worth: impl Fn(&Account) -> Worth,
    ) -> bool {
        let changed = match accounts.get(key) {
            Some(known) => *known != account,
            None => account != Account::default(),
        };
        let put = accounts.put(key, account, worth);
        if let (Some(keeper), true) = (&self.keeper, changed) {
            if put != Put::NoRoom {
                keeper.account(key, accounts.get(key));
            }
            if let Put::InPlaceOf(gone) = put {
                keeper.account(gone, None);
            }
        }
        put != Put::NoRoom
    }

    pub(super) fn keep_account(&self, accounts: &Side<Digest, Account>, key: Digest) {
        if let Some(keeper) = &self.keeper {
            keeper.account(key, accounts.get(key));
        }
    }
}
