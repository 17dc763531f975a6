//! Accounts in memory, bounded: guessed names push out neither a lock, nor a login under way, nor a known device.

use threshold_core::lockout::{Account, Login, Wider};
use threshold_core::{Digest, Timestamp};

use super::WhenFull;
use super::bounded_map::{BoundedMap, Worth, worth_until};
use crate::store::StoreError;

/// Accounts by digest. When there is no room for a new name, it is counted together with others: see [`Place`].
#[derive(Debug)]
pub(super) struct Accounts {
    entries: BoundedMap<Digest, Account>,
    /// How many of them somebody has logged in to: those with a known device.
    owned: usize,
    /// How many of these there may be before the one goes that was logged in to longest ago, and likewise how many of the
    /// others. What is left is for either kind, so that neither is without any room.
    most_of_a_kind: usize,
    /// What stands in for accounts, by prefix.
    folded: BoundedMap<Digest, Account>,
    folds: u64,
    when_full: WhenFull,
}

/// Where attempts on an account are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Under the account itself.
    Own,
    /// Under what stands in for it and others: everything in the table must stay.
    Folded(Digest),
}

impl Accounts {
    pub(super) fn new(most: usize, when_full: WhenFull) -> Self {
        let quarter = most.checked_div(4).unwrap_or(0);
        let (entries, folded) = (BoundedMap::new(most), BoundedMap::new(quarter));
        Self { entries, owned: 0, most_of_a_kind: most.saturating_sub(quarter), folded, folds: 0, when_full }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// How many attempts were counted by what stands in for their account.
    pub(super) fn folds(&self) -> u64 {
        self.folds
    }

    pub(super) fn entries(&self) -> &[(Digest, Account)] {
        self.entries.entries()
    }

    pub(super) fn get(&self, key: Digest) -> Option<&Account> {
        self.entries.get(key)
    }

    /// Where an attempt on this account is to be counted. Nothing goes yet.
    ///
    /// # Errors
    /// Where there is no room and the policy says to deny.
    pub(super) fn place(&self, key: Digest, wider: &Wider, login: &Login, now: Timestamp) -> Result<Place, StoreError> {
        let has_room = self.has_room_to_try() || self.entries.could_free_one(|other| worth_to_try(other, login, now));
        if self.entries.get(key).is_some() || has_room {
            return Ok(Place::Own);
        }
        match self.when_full {
            WhenFull::Deny => Err(StoreError::Full),
            WhenFull::Shared => Ok(Place::Folded(wider.all)),
            // Without an address, the name itself has a place among what stands in.
            WhenFull::Fold => Ok(Place::Folded(self.stand_in(wider.prefix.unwrap_or(key), login, now))),
        }
    }

    /// Keeps an account that was tried. Returns who had to go for it.
    ///
    /// # Errors
    /// Where there is no room; [`place`](Self::place) says so before.
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

    /// Keeps an account that was logged in to just now. Returns who had to go for it.
    ///
    /// # Errors
    /// Where there is no room: then its device stays unknown.
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
        if is_new && self.owned >= self.most_of_a_kind {
            gone = self.free(older);
        }
        if self.entries.get(key).is_none() && self.entries.is_full() {
            let freed = self.free(|other| worth_to_try(other, login, now)).or_else(|| self.free(older));
            gone = Some(freed.ok_or(StoreError::Full)?);
        }
        self.insert(key, account);
        Ok(gone)
    }

    /// Changes an account where it is. `None` where there is none.
    pub(super) fn change<T>(&mut self, key: Digest, change: impl FnOnce(&mut Account) -> T) -> Option<T> {
        let account = self.entries.get_mut(key)?;
        let before = is_owned(account);
        let changed = change(account);
        let after = is_owned(account);
        self.count(before, after);
        Some(changed)
    }

    /// Takes away an account, and keeps it under another key unless there is one. SlotWords whether there was anything.
    pub(super) fn rename(&mut self, old: Digest, new: Digest) -> bool {
        let Some(account) = self.entries.remove(old) else { return false };
        self.count(is_owned(&account), false);
        if self.entries.get(new).is_none() {
            self.insert(new, account);
        }
        true
    }

    /// Keeps what stands in for accounts.
    pub(super) fn put_folded(&mut self, stand_in: Digest, account: Account, login: &Login, now: Timestamp) {
        self.folds = self.folds.saturating_add(1);
        self.folded.insert(stand_in, account, |other| worth_to_try(other, login, now));
    }

    /// The account that stands in for others.
    pub(super) fn folded(&self, stand_in: Digest) -> Option<&Account> {
        self.folded.get(stand_in)
    }

    /// Changes what stands in for others, where it is.
    pub(super) fn change_folded(&mut self, stand_in: Digest, account: Account) {
        if let Some(known) = self.folded.get_mut(stand_in) {
            *known = account;
        }
    }

    /// Takes back what was known. SlotWords whether there was room; nothing that is here goes for it.
    pub(super) fn restore(&mut self, key: Digest, account: Account) -> bool {
        let has_room = self.entries.get(key).is_some() || !self.entries.is_full();
        if has_room {
            self.insert(key, account);
        }
        has_room
    }

    /// What stands in by this key; where there is no room for it, one of those that are there, always the same one.
    fn stand_in(&self, key: Digest, login: &Login, now: Timestamp) -> Digest {
        let others = self.folded.entries();
        let may_go = |other: &Account| worth_to_try(other, login, now);
        if self.folded.get(key).is_some() || !self.folded.is_full() || self.folded.could_free_one(may_go) {
            return key;
        }
        let [high, low] = key.halves();
        let at = (high ^ low).checked_rem(others.len() as u64).and_then(|at| usize::try_from(at).ok()).unwrap_or(0);
        others.get(at).map_or(key, |(other, _)| *other)
    }

    /// Whether there is room for one more name that is tried.
    fn has_room_to_try(&self) -> bool {
        let tried = self.entries.len().saturating_sub(self.owned);
        !self.entries.is_full() && tried < self.most_of_a_kind
    }

    fn free(&mut self, worth: impl Fn(&Account) -> Worth) -> Option<Digest> {
        let (gone, account) = self.entries.free_one(worth)?;
        self.count(is_owned(&account), false);
        Some(gone)
    }

    /// Keeps an account; there is room.
    fn insert(&mut self, key: Digest, account: Account) {
        let before = self.entries.get(key).is_some_and(is_owned);
        self.count(before, is_owned(&account));
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

/// What an account is worth to a name that is tried: never more than a lock, a login under way, or a known device. Among
/// the rest, those with the fewest failures go first.
fn worth_to_try(account: &Account, login: &Login, now: Timestamp) -> Worth {
    let known = account.devices_known_until().is_some_and(|until| until > now);
    let otherwise = if known || must_stay(account, login, now) {
        Worth::Protected
    } else {
        Worth::Some(u64::from(account.failures(now)))
    };
    worth_until(account.silent_from(login), now, otherwise)
}

/// What an account is worth to one that was logged in to just now, and whose devices are known until then: of those that
/// were logged in to before, the one goes where that is longest ago.
fn worth_to_own(account: &Account, newest: Timestamp, login: &Login, now: Timestamp) -> Worth {
    match account.devices_known_until() {
        Some(until) if until < newest && !must_stay(account, login, now) => Worth::Some(until.micros()),
        _ => Worth::Protected,
    }
}
