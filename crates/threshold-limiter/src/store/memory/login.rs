//! Logins in memory: where an attempt is counted, also when there is no room for its account or its address.

use threshold_core::lockout::{Account, Attempt, AttemptOutcome, Login, ResultOutcome, Try, UnknownAttempt, Wider};
use threshold_core::{Balance, Digest, Limit, Timestamp, TraceId};

use super::accounts::{Accounts, Place};
use super::{MemoryStore, WhenFull, lock};
use crate::store::StoreError;

impl MemoryStore {
    pub(super) fn begin_login(&self, login: &Login, tried: &Try, now: Timestamp) -> Result<AttemptOutcome, StoreError> {
        let mut accounts = lock(&self.accounts);
        let place = tried.account.map(|key| accounts.place(key, &tried.wider, login, now)).transpose()?;
        let found = tried.account.zip(place);
        let mut account = found.map(|(key, place)| accounts.at(key, place));
        let is_known = |account: &Account| tried.device.is_some_and(|device| account.knows(&device, now));
        // A known device is not counted by its address, so there need be no room for that.
        let counted = tried.address.filter(|_| !account.as_ref().is_some_and(is_known));
        let address = counted.map(|address| self.address_key(address, &tried.wider, now)).transpose()?;
        let tried = Try { address, ..*tried };
        let (folded, own_login) = match place {
            Some(Place::Folded(stand_in)) => (Some(stand_in), Some(login.without_ceiling())),
            _ => (None, None),
        };
        let rules = own_login.as_ref().unwrap_or(login);
        let mut outcome =
            self.with_address(login, address, now, |address| rules.attempt(&tried, account.as_mut(), address, now));
        if let AttemptOutcome::Allowed(attempt) = &mut outcome {
            attempt.folded = folded;
        }
        match (found, account) {
            (Some((_, Place::Folded(stand_in))), Some(account)) => accounts.put_folded(stand_in, account, rules, now),
            (Some((key, Place::Own)), Some(account)) => self.put_account(&mut accounts, key, account, login, now)?,
            _ => {}
        }
        Ok(outcome)
    }

    pub(super) fn end_login(
        &self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        nonce: TraceId,
        now: Timestamp,
    ) -> Result<ResultOutcome, UnknownAttempt> {
        let mut accounts = lock(&self.accounts);
        if let (Some(stand_in), Some(key)) = (attempt.folded, attempt.account) {
            let rules = login.without_ceiling();
            let account = accounts.folded_mut(stand_in);
            let mut outcome = self.with_address(login, attempt.address, now, |address| {
                rules.result(attempt, success, account, address, nonce, now)
            })?;
            if success {
                let mut own = accounts.get(key).cloned().unwrap_or_default();
                let device = own.welcome(attempt, nonce, now);
                outcome.device = device.filter(|_| self.put_owned(&mut accounts, key, own, login, now));
            }
            return Ok(outcome);
        }
        let mut account = attempt.account.and_then(|key| accounts.get(key).cloned());
        let outcome = self.with_address(login, attempt.address, now, |address| {
            login.result(attempt, success, account.as_mut(), address, nonce, now)
        })?;
        if let (Some(key), Some(account)) = (attempt.account, account) {
            if success {
                self.put_owned(&mut accounts, key, account, login, now);
            } else {
                accounts.change(key, |known| *known = account);
                self.keep_account(&accounts, key);
            }
        }
        Ok(outcome)
    }

    /// Keeps an account that was logged in to. Says whether there was room.
    fn put_owned(&self, accounts: &mut Accounts, key: Digest, account: Account, login: &Login, now: Timestamp) -> bool {
        let Ok(gone) = accounts.put_owned(key, account, login, now) else { return false };
        self.keep_account(accounts, key);
        self.keep_gone(gone);
        true
    }

    /// The key that an address is counted by: its own, and where there is no room for it, that of its prefix, then that of
    /// everyone. What had to go for it is gone afterwards.
    fn address_key(&self, address: Digest, wider: &Wider, now: Timestamp) -> Result<Digest, StoreError> {
        let shard = |key| self.shard(key).map(|shard| shard.open()).ok_or(StoreError::Full);
        let mut own = shard(address)?;
        if own.has(address) || own.make_room(address, now) {
            return Ok(address);
        }
        drop(own);
        if self.when_full == WhenFull::Deny {
            return Err(StoreError::Full);
        }
        if let Some(prefix) = wider.prefix.filter(|_| self.when_full == WhenFull::Fold) {
            let mut own = shard(prefix)?;
            if own.has(prefix) || own.make_room(prefix, now) || own.has_spare_slots(0) {
                return Ok(prefix);
            }
        }
        let mut own = shard(wider.all)?;
        let has_room = own.has(wider.all) || own.make_room(wider.all, now) || own.has_a_spare_slot(0);
        if has_room { Ok(wider.all) } else { Err(StoreError::Full) }
    }

    fn with_address<T>(
        &self,
        login: &Login,
        address: Option<Digest>,
        now: Timestamp,
        change: impl FnOnce(&mut Balance) -> T,
    ) -> T {
        let Some(key) = address else { return change(&mut Balance::default()) };
        let limit = Limit::Log(login.ip);
        self.with_balances(&[(key, limit)], now, |balances| match balances {
            [balance, ..] => change(balance),
            [] => change(&mut Balance::default()),
        })
    }
}
