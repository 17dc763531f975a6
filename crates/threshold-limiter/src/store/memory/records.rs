//! The records of the store as commands see them: each table is locked when a command first needs it, until the command ends.

use threshold_core::balance::Checked;
use threshold_core::command::{AccountChange, AccountKey, MovedRecord, Records, RequestRecord, SaveReason};
use threshold_core::control::{ControlChange, ControlFull, ControlPage};
use threshold_core::lockout::{Account, Login, StandInKeys};
use threshold_core::{Balance, Digest, Limit, Reservation, Standing, Timestamp, TraceId};

use super::accounts::{Accounts, Place};
use super::requests::Requests;
use super::reservations::{AllOpen, Reservations};
use super::table::Shard;
use super::{MemoryStore, WhenFull, lock};
use crate::store::StoreError;
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;

/// The store while one command is executed. Tables are locked in the order of the methods below. No command of core needs an
/// earlier table after a later one, so there is no deadlock.
pub(super) struct OpenRecords<'s> {
    store: &'s MemoryStore,
    reservations: Option<MutexGuard<'s, Reservations>>,
    accounts: Option<MutexGuard<'s, Box<Accounts>>>,
    requests: Option<MutexGuard<'s, Requests>>,
}

impl<'s> OpenRecords<'s> {
    pub(super) fn new(store: &'s MemoryStore) -> Self {
        Self { store, reservations: None, accounts: None, requests: None }
    }

    fn reservations(&mut self) -> &mut Reservations {
        self.reservations.get_or_insert_with(|| lock(&self.store.reservations))
    }

    fn accounts(&mut self) -> &mut Accounts {
        self.accounts.get_or_insert_with(|| lock(&self.store.accounts))
    }

    fn requests(&mut self) -> &mut Requests {
        self.requests.get_or_insert_with(|| lock(&self.store.requests))
    }
}

impl Records for OpenRecords<'_> {
    type Error = StoreError;

    fn reservation(&mut self, id: TraceId) -> Result<Option<Reservation>, StoreError> {
        Ok(self.reservations().get(id).cloned())
    }

    fn save_reservation(&mut self, reservation: Reservation, now: Timestamp) -> Result<(), StoreError> {
        let store = self.store;
        let reservations = self.reservations();
        if reservations.get(reservation.id()).is_some() {
            // An update leaves the expiry as it is, so `next_expiry` stays right.
            reservations.update(reservation);
            return Ok(());
        }
        reservations.bring_back(now);
        let gone = reservations.insert(reservation).map_err(|AllOpen| StoreError::Full)?;
        // Under the lock of the reservations: an older value must not overwrite a newer one, or an expiry would be
        // missed.
        store.next_expiry.store(reservations.next_expiry().micros(), Ordering::Release);
        // Its record no longer shows that it has ended. Without this its receipt could be refunded as well.
        if let Some(gone) = gone {
            self.remember_end(gone.id(), gone.void_from(), now)?;
        }
        Ok(())
    }

    fn forget_reservation(&mut self, id: TraceId, _: Timestamp) -> Result<(), StoreError> {
        let store = self.store;
        let reservations = self.reservations();
        reservations.remove(id);
        store.next_expiry.store(reservations.next_expiry().micros(), Ordering::Release);
        Ok(())
    }

    fn take_expired(&mut self, now: Timestamp) -> Result<Option<Reservation>, StoreError> {
        let store = self.store;
        // Before the lock is taken, because every command on balances asks this.
        if store.next_expiry.load(Ordering::Acquire) > now.micros() {
            return Ok(None);
        }
        let reservations = self.reservations();
        let expired = reservations.take_expired(now);
        if expired.as_ref().is_some_and(Reservation::is_open) {
            store.expired.fetch_add(1, Ordering::Relaxed);
        }
        store.next_expiry.store(reservations.next_expiry().micros(), Ordering::Release);
        Ok(expired)
    }

    fn remember_refund(&mut self, id: TraceId, void_from: Timestamp, now: Timestamp) -> Result<bool, StoreError> {
        lock(&self.store.refunds).refund(id, void_from, now)
    }

    fn remember_end(&mut self, id: TraceId, void_from: Timestamp, now: Timestamp) -> Result<(), StoreError> {
        lock(&self.store.refunds).end(id, void_from, now);
        Ok(())
    }

    fn account_key(
        &mut self,
        account: Digest,
        stand_ins: &StandInKeys,
        login: &Login,
        now: Timestamp,
    ) -> Result<AccountKey, StoreError> {
        Ok(match self.accounts().place(account, stand_ins, login, now)? {
            Place::Own => AccountKey::Own(account),
            Place::Folded(stand_in) => AccountKey::StandIn(stand_in),
        })
    }

    fn account(&mut self, key: AccountKey) -> Result<Option<Account>, StoreError> {
        let accounts = self.accounts();
        Ok(match key {
            AccountKey::Own(key) => accounts.get(key).cloned(),
            AccountKey::StandIn(key) => accounts.folded(key).cloned(),
        })
    }

    fn save_account(
        &mut self,
        key: AccountKey,
        account: Account,
        reason: SaveReason,
        login: &Login,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let store = self.store;
        let accounts = self.accounts();
        match (key, reason) {
            (AccountKey::StandIn(key), SaveReason::Attempted) => accounts.put_folded(key, account, login, now),
            // Only an attempt begins an account that stands in. Its result changes the account if it was not evicted
            // since.
            (AccountKey::StandIn(key), _) => accounts.change_folded(key, account),
            (AccountKey::Own(key), SaveReason::Attempted) => store.put_account(accounts, key, account, login, now)?,
            (AccountKey::Own(key), SaveReason::LoggedIn) => {
                // The login is right all the same. Only its device stays unknown.
                let Ok(gone) = accounts.put_owned(key, account, login, now) else { return Ok(false) };
                store.report_account(accounts, key);
                store.report_evicted(gone);
            }
            (AccountKey::Own(key), SaveReason::Changed) => {
                accounts.change(key, |known| *known = account);
                store.report_account(accounts, key);
            }
        }
        Ok(true)
    }

    fn change_account(&mut self, account: Digest, change: AccountChange) -> Result<(), StoreError> {
        let store = self.store;
        let accounts = self.accounts();
        if accounts.change(account, |known| change.apply(known)).is_some() {
            store.report_account(accounts, account);
        }
        Ok(())
    }

    fn address_key(&mut self, address: Digest, stand_ins: &StandInKeys, now: Timestamp) -> Result<Digest, StoreError> {
        let store = self.store;
        let shard = |key| store.shard(key).map(|shard| shard.open()).ok_or(StoreError::Full);
        let mut own = shard(address)?;
        if own.has(address) || own.make_room(address, now) {
            return Ok(address);
        }
        // One shard at a time: two that are locked in any order could deadlock.
        drop(own);
        if store.when_full == WhenFull::Deny {
            return Err(StoreError::Full);
        }
        if let Some(prefix) = stand_ins.prefix.filter(|_| store.when_full == WhenFull::Fold) {
            let mut own = shard(prefix)?;
            if own.has(prefix) || own.make_room(prefix, now) || own.has_spare_slots(0) {
                return Ok(prefix);
            }
        }
        let mut own = shard(stand_ins.all)?;
        let has_room = own.has(stand_ins.all) || own.make_room(stand_ins.all, now) || own.has_a_spare_slot(0);
        if has_room { Ok(stand_ins.all) } else { Err(StoreError::Full) }
    }

    fn balances<T>(
        &mut self,
        charges: &[(Digest, Limit)],
        now: Timestamp,
        change: impl FnOnce(&mut [Balance]) -> T,
    ) -> Result<T, StoreError> {
        Ok(self.store.with_balances(charges, now, change))
    }

    fn check(
        &mut self,
        key: Digest,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        id: TraceId,
    ) -> Result<Checked, StoreError> {
        Ok(self.store.check_any(key, limit, cost, now, id))
    }

    /// Reads in place, so that the balance is not rewritten under another limit.
    fn blocked_until(&mut self, key: Digest, _: &Limit, _: Timestamp) -> Result<Timestamp, StoreError> {
        let read = |shard: &Shard<'_>| {
            let shard = shard.open();
            let (place, found) = shard.probe(key);
            found.map(|_| shard.copied(place).blocked_until())
        };
        Ok(self.store.shard(key).and_then(read).unwrap_or(Timestamp::EPOCH))
    }

    fn forget_balance(&mut self, key: Digest) -> Result<(), StoreError> {
        if let Some(shard) = self.store.shard(key) {
            shard.open().remove(key);
        }
        Ok(())
    }

    fn standing(&mut self, key: Digest) -> Result<Option<Standing>, StoreError> {
        Ok(self.store.standing(key))
    }

    fn save_standing(&mut self, key: Digest, standing: Standing, now: Timestamp) -> Result<bool, StoreError> {
        Ok(self.store.restore_standing(key, standing, now))
    }

    fn forget_standing(&mut self, key: Digest) -> Result<(), StoreError> {
        self.store.forget_standing(key);
        Ok(())
    }

    fn rename(&mut self, what: MovedRecord, old: Digest, new: Digest, now: Timestamp) -> Result<(), StoreError> {
        let store = self.store;
        match what {
            MovedRecord::Standing => store.rename_standing(old, new, now),
            MovedRecord::Account => {
                let accounts = self.accounts();
                if accounts.rename(old, new) {
                    // The new row first: if the writer takes the queue in between, the account is in the journal twice
                    // rather than not at all.
                    store.report_account(accounts, new);
                    store.report_evicted(Some(old));
                }
            }
        }
        Ok(())
    }

    fn save_control(&mut self, changes: &[ControlChange], now: Timestamp) -> Result<u64, StoreError> {
        lock(&self.store.control).add_all(changes, now).map_err(|ControlFull| StoreError::Full)
    }

    fn read_control(&mut self, after: u64, most: usize) -> Result<ControlPage, StoreError> {
        Ok(lock(&self.store.control).after(after, most))
    }

    fn request(&mut self, id: Digest) -> Result<Option<RequestRecord>, StoreError> {
        Ok(self.requests().get(id).cloned())
    }

    fn save_request(&mut self, id: Digest, record: RequestRecord, now: Timestamp) -> Result<(), StoreError> {
        self.requests().save(id, record, now)
    }
}
