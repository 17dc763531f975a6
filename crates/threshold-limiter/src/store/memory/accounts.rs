//! Login accounts, bounded: guessed names cannot evict a lock, a login in flight or a known device.

use threshold_core::lockout::{Account, Login, StandInKeys};
use threshold_core::{Digest, Timestamp};

use super::WhenFull;
use super::bounded_map::{BoundedMap, Worth, worth_until};
use crate::store::StoreError;

/// The accounts by digest. When there is no room for a new name, it is counted together with others: see [`Place`].
#[derive(Debug)]
pub(super) struct Accounts {
    entries: BoundedMap<Digest, Account>,
    /// The number of accounts with a known device, which a login has proven.
    owned: usize,
    /// How many accounts with a known device there may be before the one with the oldest login is evicted, and likewise how
    /// many others. The rest of the table is for either kind, so that neither can take all of it.
    max_of_a_kind: usize,
    /// The accounts that stand in for others, by address prefix.
    folded: BoundedMap<Digest, Account>,
    folds: u64,
    when_full: WhenFull,
}

/// Where attempts on an account are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Under the account itself.
    Own,
    /// Under an account that stands in for it and others, because nothing in the table may be evicted.
    Folded(Digest),
}

impl Accounts {
    pub(super) fn new(max: usize, when_full: WhenFull) -> Self {
        let quarter = max.checked_div(4).unwrap_or(0);
        // Accounts that stand in have a table of their own, so that they take no room from names.
        let (entries, folded) = (BoundedMap::new(max), BoundedMap::new(quarter));
        Self { entries, owned: 0, max_of_a_kind: max.saturating_sub(quarter), folded, folds: 0, when_full }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns how many attempts were counted under an account that stands in for theirs.
    pub(super) fn folds(&self) -> u64 {
        self.folds
    }

    pub(super) fn entries(&self) -> &[(Digest, Account)] {
        self.entries.entries()
    }

    pub(super) fn get(&self, key: Digest) -> Option<&Account> {
        self.entries.get(key)
    }

    /// Returns where an attempt on this account is to be counted. Evicts nothing yet.
    ///
    /// # Errors
    /// Returns an error if there is no room and `when_full` is `deny`.
    pub(super) fn place(
        &self,
        key: Digest,
        stand_ins: &StandInKeys,
        login: &Login,
        now: Timestamp,
    ) -> Result<Place, StoreError> {
        let has_room = self.has_room_to_try() || self.entries.could_free_one(|other| worth_to_try(other, login, now));
        if self.entries.get(key).is_some() || has_room {
            return Ok(Place::Own);
        }
        match self.when_full {
            WhenFull::Deny => Err(StoreError::Full),
            WhenFull::Shared => Ok(Place::Folded(stand_ins.all)),
            // Without an address, the account's own digest is used among those that stand in.
            WhenFull::Fold => Ok(Place::Folded(self.stand_in(stand_ins.prefix.unwrap_or(key), login, now))),
        }
    }

    /// Saves an account after an attempt. Returns the one that was evicted for it.
    ///
    /// # Errors
    /// Returns an error if there is no room; [`place`](Self::place) has shown that before.
    pub(super) fn put(
        &mut self,
        key: Digest,
        account: Account,
        login: &Login,
        now: Timestamp,
    ) -> Result<Option<Digest>, StoreError> {
        let gone = match self.entries.get(key) {
            Some(_) => None,
            None if self.has_room_to_try() => None,
            None => Some(self.free(|other| worth_to_try(other, login, now)).ok_or(StoreError::Full)?),
        };
        self.insert(key, account);
        Ok(gone)
    }

    /// Saves an account after a login. Returns the one that was evicted for it.
    ///
    /// # Errors
    /// Returns an error if there is no room: then the device stays unknown.
    pub(super) fn put_owned(
        &mut self,
        key: Digest,
        account: Account,
        login: &Login,
        now: Timestamp,
    ) -> Result<Option<Digest>, StoreError> {
        let known_until = account.devices_known_until().unwrap_or_default();
        let is_new = self.entries.get(key).is_none_or(|known| !is_owned(known));
        let older = |other: &Account| worth_to_own(other, known_until, login, now);
        let mut gone = None;
        if is_new && self.owned >= self.max_of_a_kind {
            gone = self.free(older);
        }
        // Not full any more if one was evicted above, so at most one is.
        if self.entries.get(key).is_none() && self.entries.is_full() {
            // A name without a login goes before the known device of another account.
            let freed = self.free(|other| worth_to_try(other, login, now)).or_else(|| self.free(older));
            gone = Some(freed.ok_or(StoreError::Full)?);
        }
        self.insert(key, account);
        Ok(gone)
    }

    /// Changes an account in place; returns `None` if there is none.
    pub(super) fn change<T>(&mut self, key: Digest, change: impl FnOnce(&mut Account) -> T) -> Option<T> {
        let account = self.entries.get_mut(key)?;
        // The change may add the first known device or remove the last one, and `owned` counts by that.
        let before = is_owned(account);
        let changed = change(account);
        let after = is_owned(account);
        self.count(before, after);
        Some(changed)
    }

    /// Moves an account to another key, unless that has an account. Returns whether there was one to move.
    pub(super) fn rename(&mut self, old: Digest, new: Digest) -> bool {
        let Some(account) = self.entries.remove(old) else { return false };
        self.count(is_owned(&account), false);
        if self.entries.get(new).is_none() {
            // The removal has made room.
            self.insert(new, account);
        }
        true
    }

    /// Saves an account that stands in for others.
    pub(super) fn put_folded(&mut self, stand_in: Digest, account: Account, login: &Login, now: Timestamp) {
        self.folds = self.folds.saturating_add(1);
        self.folded.insert(stand_in, account, |other| worth_to_try(other, login, now));
    }

    /// Returns an account that stands in for others.
    pub(super) fn folded(&self, stand_in: Digest) -> Option<&Account> {
        self.folded.get(stand_in)
    }

    /// Changes an account that stands in for others, if it is still there.
    pub(super) fn change_folded(&mut self, stand_in: Digest, account: Account) {
        if let Some(known) = self.folded.get_mut(stand_in) {
            *known = account;
        }
    }

    /// Restores an account. Returns whether there was room; evicts nothing.
    pub(super) fn restore(&mut self, key: Digest, account: Account) -> bool {
        let has_room = self.entries.get(key).is_some() || !self.entries.is_full();
        if has_room {
            self.insert(key, account);
        }
        has_room
    }

    /// Returns the account that stands in under this key; without room for a new one, one of the existing ones, which the key
    /// chooses.
    fn stand_in(&self, key: Digest, login: &Login, now: Timestamp) -> Digest {
        let others = self.folded.entries();
        let may_go = |other: &Account| worth_to_try(other, login, now);
        if self.folded.get(key).is_some() || !self.folded.is_full() || self.folded.could_free_one(may_go) {
            return key;
        }
        let [high, low] = key.halves();
        // The key chooses, so that the attempts of one prefix are counted together.
        let at = (high ^ low).checked_rem(others.len() as u64).and_then(|at| usize::try_from(at).ok()).unwrap_or(0);
        others.get(at).map_or(key, |(other, _)| *other)
    }

    /// Returns whether there is room for one more account without a login.
    fn has_room_to_try(&self) -> bool {
        let tried = self.entries.len().saturating_sub(self.owned);
        !self.entries.is_full() && tried < self.max_of_a_kind
    }

    fn free(&mut self, worth: impl Fn(&Account) -> Worth) -> Option<Digest> {
        let (gone, account) = self.entries.free_one(worth)?;
        self.count(is_owned(&account), false);
        Some(gone)
    }

    /// Inserts an account; the caller has made room.
    fn insert(&mut self, key: Digest, account: Account) {
        let before = self.entries.get(key).is_some_and(is_owned);
        self.count(before, is_owned(&account));
        // The caller has made room by its own rules. Nothing may be evicted here.
        self.entries.insert(key, account, |_| Worth::Protected);
    }

    fn count(&mut self, before: bool, after: bool) {
        match (before, after) {
            (false, true) => self.owned = self.owned.saturating_add(1),
            (true, false) => self.owned = self.owned.saturating_sub(1),
            _ => {}
        }
    }
}

fn is_owned(account: &Account) -> bool {
    account.devices_known_until().is_some()
}

fn must_stay(account: &Account, login: &Login, now: Timestamp) -> bool {
    account.is_under_way(now) || account.locked_until(login, now).is_some()
}

/// Returns the worth of an account when a new name needs room: a lock, a login in flight or a known device is protected. Of the
/// others, those with the fewest failures are evicted first.
fn worth_to_try(account: &Account, login: &Login, now: Timestamp) -> Worth {
    // A device that is no longer known protects nothing.
    let known = account.devices_known_until().is_some_and(|until| until > now);
    let otherwise = if known || must_stay(account, login, now) {
        Worth::Protected
    } else {
        Worth::Some(u64::from(account.failures(now)))
    };
    worth_until(account.silent_from(login), now, otherwise)
}

/// Returns the worth of an account when one that was just logged in to needs room: of the accounts with a known device, the one
/// with the oldest login is evicted first.
fn worth_to_own(account: &Account, newest: Timestamp, login: &Login, now: Timestamp) -> Worth {
    match account.devices_known_until() {
        Some(until) if until < newest && !must_stay(account, login, now) => Worth::Some(until.micros()),
        _ => Worth::Protected,
    }
}
