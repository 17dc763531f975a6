//! Copies of records, on which core executes commands. What has changed is written back by one compare-and-set.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use threshold_core::command::{AccountChange, AccountKey, MovedRecord, Records, RequestRecord, SaveReason};
use threshold_core::control::{ControlChange, ControlPage};
use threshold_core::lockout::{Account, Login};
use threshold_core::time::Span;
use threshold_core::{Balance, BytesError, Digest, Format, Limit, Reservation, Standing, Timestamp, TraceId};

use super::keys::{RecordKey, RecordKind};
use crate::store::StoreError;

/// How long a reservation that gives back its charges is kept after its expiry, so that they are given back also after all nodes
/// were away for as long.
const EXPIRY_KEPT: Span = Span::DAY;

/// The bytes of the record that remembers a refund. Its key says everything.
const REFUNDED: &[u8] = &[1];

/// Copies of the records of a batch of commands.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// The bytes that the server had; `None` where it had no record.
    loaded: HashMap<RecordKey, Option<Vec<u8>>>,
    /// The changes of the commands that were executed.
    changes: BTreeMap<RecordKey, Change>,
    /// The changes of the command under way, which are dropped if it fails.
    pending: BTreeMap<RecordKey, Change>,
    /// The records that a command asked for and that are not loaded.
    missing: BTreeSet<RecordKey>,
    /// The reservations that a command has read. A refund is right only as long as there is no reservation of its receipt.
    reservations_read: BTreeSet<RecordKey>,
}

/// A new value of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Change {
    /// The bytes; `None` deletes the record.
    pub(super) bytes: Option<Vec<u8>>,
    pub(super) expiry: Expiry,
    /// Whether the record belongs into a list for operators.
    pub(super) is_listed: bool,
}

/// When a record is dropped by the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expiry {
    At(Timestamp),
    /// When it was to be dropped before the change.
    Unchanged,
    /// When that record was to be dropped.
    As(RecordKey),
}

/// Why a command was not executed.
#[derive(Debug)]
pub(super) enum CopyError {
    /// A record is not loaded. It is in [`Copies::take_missing`], and the command is executed again after it was loaded.
    Missing,
    /// The command failed.
    Store(StoreError),
}

impl From<BytesError> for CopyError {
    /// A record that cannot be read is never taken for an empty one.
    fn from(_: BytesError) -> Self {
        Self::Store(StoreError::Unavailable)
    }
}

impl Copies {
    /// Stores what the server had under these keys.
    pub(super) fn load(&mut self, records: impl IntoIterator<Item = (RecordKey, Option<Vec<u8>>)>) {
        self.loaded.extend(records);
    }

    /// Returns the keys that commands asked for and that are not loaded.
    pub(super) fn take_missing(&mut self) -> Vec<RecordKey> {
        std::mem::take(&mut self.missing).into_iter().collect()
    }

    /// Returns the keys among these that are not loaded.
    pub(super) fn not_loaded(&self, keys: impl IntoIterator<Item = RecordKey>) -> BTreeSet<RecordKey> {
        keys.into_iter().filter(|key| !self.loaded.contains_key(key)).collect()
    }

    /// Drops all changes, to execute the commands again.
    pub(super) fn restart(&mut self) {
        // What was loaded stays. Only records that have changed on the server are loaded again.
        self.changes.clear();
        self.pending.clear();
        self.reservations_read.clear();
    }

    /// Executes one command. Its changes count only if it succeeds.
    pub(super) fn execute<T>(
        &mut self,
        command: impl FnOnce(&mut Self) -> Result<T, CopyError>,
    ) -> Result<T, CopyError> {
        let executed = command(self);
        let changes = std::mem::take(&mut self.pending);
        if executed.is_ok() {
            self.changes.extend(changes);
        }
        executed
    }

    /// Returns the changed records with the bytes that the server had. A change that ends at these bytes is left out.
    pub(super) fn changes(&self) -> Vec<(RecordKey, Option<&[u8]>, &Change)> {
        let changed = self.changes.iter().map(|(key, change)| (*key, self.loaded(*key), change));
        changed.filter(|(_, before, change)| *before != change.bytes.as_deref()).collect()
    }

    /// Returns the reservations that were read and not changed, with the bytes that the server had.
    pub(super) fn reservations_read(&self) -> Vec<(RecordKey, Option<&[u8]>)> {
        let unchanged = self.reservations_read.iter().filter(|key| !self.changes.contains_key(key));
        unchanged.map(|key| (*key, self.loaded(*key))).collect()
    }

    /// Returns the bytes that the server had.
    pub(super) fn loaded(&self, key: RecordKey) -> Option<&[u8]> {
        self.loaded.get(&key).and_then(Option::as_deref)
    }

    fn bytes(&mut self, key: RecordKey) -> Result<Option<&[u8]>, CopyError> {
        if key.kind == RecordKind::Reservation {
            self.reservations_read.insert(key);
        }
        if let Some(change) = self.pending.get(&key).or_else(|| self.changes.get(&key)) {
            return Ok(change.bytes.as_deref());
        }
        let Some(loaded) = self.loaded.get(&key) else {
            self.missing.insert(key);
            return Err(CopyError::Missing);
        };
        Ok(loaded.as_deref())
    }

    fn read<T>(&mut self, key: RecordKey, parse: fn(&[u8]) -> Result<T, BytesError>) -> Result<Option<T>, CopyError> {
        Ok(self.bytes(key)?.map(parse).transpose()?)
    }

    fn save(&mut self, key: RecordKey, bytes: Vec<u8>, expiry: Expiry) {
        // An earlier command of the batch may have set a time, which is the one to leave unchanged.
        let before = self.pending.get(&key).or_else(|| self.changes.get(&key)).map(|change| change.expiry);
        let expiry = match (expiry, before) {
            (Expiry::Unchanged, Some(before)) => before,
            _ => expiry,
        };
        self.pending.insert(key, Change { bytes: Some(bytes), expiry, is_listed: false });
    }

    /// Marks a record that was just saved as one for a list.
    fn list(&mut self, key: RecordKey, is_listed: bool) {
        if let Some(change) = self.pending.get_mut(&key) {
            change.is_listed = is_listed;
        }
    }

    fn delete(&mut self, key: RecordKey) {
        self.pending.insert(key, Change { bytes: None, expiry: Expiry::Unchanged, is_listed: false });
    }
}

impl Records for Copies {
    type Error = CopyError;

    fn balances<T>(
        &mut self,
        charges: &[(Digest, Limit)],
        now: Timestamp,
        change: impl FnOnce(&mut [Balance]) -> T,
    ) -> Result<T, CopyError> {
        let keys: Vec<RecordKey> = charges.iter().map(|(key, _)| RecordKey::balance(*key)).collect();
        // All of them are asked for before the command fails, so that one more round trip loads them together.
        let read: Vec<_> = keys.iter().map(|key| self.read(*key, Balance::from_script)).collect();
        let read: Vec<Option<Balance>> = read.into_iter().collect::<Result<_, _>>()?;
        let mut balances: Vec<Balance> = read.iter().map(|balance| balance.clone().unwrap_or_default()).collect();
        let result = change(&mut balances);
        for ((key, before), balance) in keys.into_iter().zip(read).zip(balances) {
            // A record that is not written is not compared either, so that requests which only read it do not conflict.
            if before.unwrap_or_default() == balance {
                continue;
            }
            let silent_from = balance.silent_from();
            if silent_from <= now {
                // Charges that were given back often leave nothing. Such a record would take memory until its window ends.
                self.delete(key);
            } else {
                self.save(key, balance.to_script(Format::PRESENT), Expiry::At(silent_from));
            }
        }
        Ok(result)
    }

    fn forget_balance(&mut self, key: Digest) -> Result<(), CopyError> {
        self.forget(RecordKey::balance(key))
    }

    fn standing(&mut self, key: Digest) -> Result<Option<Standing>, CopyError> {
        self.read(RecordKey::of_digest(RecordKind::Standing, key), Standing::from_bytes)
    }

    fn save_standing(&mut self, key: Digest, standing: Standing, now: Timestamp) -> Result<bool, CopyError> {
        let expiry = Expiry::At(standing.silent_from());
        let key = RecordKey::of_digest(RecordKind::Standing, key);
        self.save(key, standing.to_bytes(Format::PRESENT), expiry);
        self.list(key, standing.banned_until().is_some_and(|until| until > now));
        Ok(true)
    }

    fn forget_standing(&mut self, key: Digest) -> Result<(), CopyError> {
        self.forget(RecordKey::of_digest(RecordKind::Standing, key))
    }

    fn reservation(&mut self, id: TraceId) -> Result<Option<Reservation>, CopyError> {
        self.read(RecordKey::of_id(RecordKind::Reservation, id), Reservation::from_bytes)
    }

    fn save_reservation(&mut self, reservation: Reservation, _: Timestamp) -> Result<(), CopyError> {
        let key = RecordKey::of_id(RecordKind::Reservation, reservation.id());
        let ends = reservation.expires();
        let expiry = Expiry::At(if waits_for_expiry(&reservation) { ends.plus(EXPIRY_KEPT) } else { ends });
        self.save(key, reservation.to_bytes(Format::PRESENT), expiry);
        // Redis drops the record of an ended reservation at its expiry. From then on this mark keeps its receipt from being refunded.
        if !reservation.is_open() && reservation.void_from() > ends {
            let mark = RecordKey::of_id(RecordKind::Refund, reservation.id());
            self.save(mark, REFUNDED.to_vec(), Expiry::At(reservation.void_from()));
        }
        Ok(())
    }

    fn take_expired(&mut self, _: Timestamp) -> Result<Option<Reservation>, CopyError> {
        // Commands end no reservations here, because they would have to search for them. The sweep does.
        Ok(None)
    }

    fn remember_refund(&mut self, id: TraceId, void_from: Timestamp, _: Timestamp) -> Result<bool, CopyError> {
        let key = RecordKey::of_id(RecordKind::Refund, id);
        let first = self.bytes(key)?.is_none();
        if first {
            self.save(key, REFUNDED.to_vec(), Expiry::At(void_from));
        }
        Ok(first)
    }

    fn account(&mut self, key: AccountKey) -> Result<Option<Account>, CopyError> {
        self.read(account_record(key), Account::from_bytes)
    }

    fn save_account(
        &mut self,
        key: AccountKey,
        account: Account,
        _: SaveReason,
        login: &Login,
        now: Timestamp,
    ) -> Result<bool, CopyError> {
        // The number of accounts has no bound here, so the reason makes no difference.
        let (expiry, record) = (Expiry::At(account.silent_from(login)), account_record(key));
        self.save(record, account.to_bytes(Format::PRESENT), expiry);
        self.list(record, account.locked_until(login, now).is_some());
        Ok(true)
    }

    fn change_account(&mut self, account: Digest, change: AccountChange) -> Result<(), CopyError> {
        let key = account_record(AccountKey::Own(account));
        if let Some(mut known) = self.read(key, Account::from_bytes)? {
            change.apply(&mut known);
            // A reset is never forgotten: without it the device tokens of the old secret would be accepted again.
            let expiry = if change == AccountChange::Reset { Expiry::At(Timestamp::MAX) } else { Expiry::Unchanged };
            self.save(key, known.to_bytes(Format::PRESENT), expiry);
        }
        Ok(())
    }

    fn rename(&mut self, what: MovedRecord, old: Digest, new: Digest, _: Timestamp) -> Result<(), CopyError> {
        let kind = if what == MovedRecord::Standing { RecordKind::Standing } else { RecordKind::Account };
        let (old, new) = (RecordKey::of_digest(kind, old), RecordKey::of_digest(kind, new));
        let Some(bytes) = self.bytes(old)?.map(<[u8]>::to_vec) else { return Ok(()) };
        if self.bytes(new)?.is_none() {
            self.save(new, bytes, Expiry::As(old));
        }
        self.delete(old);
        Ok(())
    }

    fn save_control(&mut self, _: &[ControlChange], _: Timestamp) -> Result<u64, CopyError> {
        // Bans and settings have structures and scripts of their own; see `control.rs`.
        Err(CopyError::Store(StoreError::Unavailable))
    }

    fn read_control(&mut self, _: u64, _: usize) -> Result<ControlPage, CopyError> {
        Err(CopyError::Store(StoreError::Unavailable))
    }

    fn request(&mut self, id: Digest) -> Result<Option<RequestRecord>, CopyError> {
        self.read(RecordKey::of_digest(RecordKind::Request, id), RequestRecord::from_bytes)
    }

    fn save_request(&mut self, id: Digest, record: RequestRecord, now: Timestamp) -> Result<(), CopyError> {
        let key = RecordKey::of_digest(RecordKind::Request, id);
        if record.until() <= now {
            return self.forget(key);
        }
        let expiry = Expiry::At(record.until());
        self.save(key, record.to_bytes(Format::PRESENT), expiry);
        Ok(())
    }
}

impl Copies {
    /// Deletes a record. It has to be loaded, because a change is compared with what was there.
    fn forget(&mut self, key: RecordKey) -> Result<(), CopyError> {
        self.bytes(key)?;
        self.delete(key);
        Ok(())
    }
}

/// Returns whether the expiry of a reservation has to give back its charges.
pub(super) fn waits_for_expiry(reservation: &Reservation) -> bool {
    reservation.is_open() && reservation.gives_back()
}

fn account_record(key: AccountKey) -> RecordKey {
    let (AccountKey::Own(key) | AccountKey::StandIn(key)) = key;
    RecordKey::of_digest(RecordKind::Account, key)
}
