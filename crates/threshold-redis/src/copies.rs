//! Copies of records, on which core executes commands. What has changed is written back by one compare-and-set, beside additions to
//! balances, which are made whatever these are by then.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use threshold_core::command::{AccountChange, AccountKey, MovedRecord, Records, RequestRecord, SaveReason};
use threshold_core::control::{ControlChange, ControlPage};
use threshold_core::key::Partition;
use threshold_core::lockout::{Account, Login};
use threshold_core::receipt::{Adjustment, block_to_script, credit_to_script};
use threshold_core::time::Span;
use threshold_core::{Balance, BytesError, Digest, Format, Limit, Reservation, Standing, Timestamp, TraceId};

use super::errors::Errors;
use super::keys::{RecordKey, RecordKind};
use super::reply::Head;
use threshold_limiter::store::StoreError;

/// How much longer a store remembers what was given back than its charges count. A successor of the server may have another time.
const CLOCK_MARGIN: Span = Span::MINUTE;

/// The bytes of the record that remembers a refund. Its key says everything.
const REFUNDED: &[u8] = &[1];

/// Copies of the records of a batch of commands.
#[derive(Debug)]
pub(super) struct Copies {
    /// The partition whose records these are.
    place: Partition,
    /// What the partition knows of itself.
    head: Head,
    /// Whether balances are added to, without a copy. A script that cannot tell how one changes leaves it to core.
    adds: bool,
    /// Whether the command under way is about the whole of a reservation, and not about the part that is held here.
    is_whole: bool,
    /// The bytes that the server had; `None` where it had no record.
    loaded: HashMap<RecordKey, Option<Vec<u8>>>,
    /// The changes of the commands that were executed.
    changes: BTreeMap<RecordKey, Change>,
    /// What the commands that were executed add to balances, and which records they delete whatever these are.
    added: BTreeMap<RecordKey, Addition>,
    /// The changes of the command under way, which are dropped if it fails.
    pending: BTreeMap<RecordKey, Change>,
    pending_added: Vec<(RecordKey, Addition)>,
    /// The records that the commands which were executed have read.
    read: BTreeSet<RecordKey>,
    pending_read: BTreeSet<RecordKey>,
    /// The records that a command asked for and that are not loaded.
    missing: BTreeSet<RecordKey>,
    /// The reservations that a command has read. A refund is right only as long as there is no reservation of its receipt.
    reservations_read: BTreeSet<RecordKey>,
    /// Where records that cannot be read are counted.
    errors: Errors,
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

/// A change of a record that does not depend on what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Addition {
    /// What `adjust.lua` does to a balance.
    Changes(Vec<u8>),
    Delete,
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
    /// A record depends on an earlier command of the batch in a way that only the server can tell. The command is executed in a later
    /// batch.
    Later,
    /// The command failed.
    Store(StoreError),
}

impl Copies {
    /// Creates copies of records of one partition.
    pub(super) fn new(place: Partition, errors: Errors) -> Self {
        Self {
            errors,
            place,
            head: Head::default(),
            adds: true,
            is_whole: false,
            loaded: HashMap::new(),
            changes: BTreeMap::new(),
            added: BTreeMap::new(),
            pending: BTreeMap::new(),
            pending_added: Vec::new(),
            read: BTreeSet::new(),
            pending_read: BTreeSet::new(),
            missing: BTreeSet::new(),
            reservations_read: BTreeSet::new(),
        }
    }

    /// Stores what the server had under these keys.
    pub(super) fn load(&mut self, records: impl IntoIterator<Item = (RecordKey, Option<Vec<u8>>)>) {
        self.loaded.extend(records);
    }

    /// Stores what the partition knows of itself.
    pub(super) fn load_head(&mut self, head: Head) {
        self.head = head;
    }

    pub(super) fn head(&self) -> Head {
        self.head
    }

    /// Returns the keys that commands asked for and that are not loaded.
    pub(super) fn take_missing(&mut self) -> Vec<RecordKey> {
        std::mem::take(&mut self.missing).into_iter().collect()
    }

    /// Returns the keys among these that are not loaded.
    pub(super) fn not_loaded(&self, keys: impl IntoIterator<Item = RecordKey>) -> BTreeSet<RecordKey> {
        keys.into_iter().filter(|key| !self.loaded.contains_key(key)).collect()
    }

    /// Forgets every copy: what the server has may be another thing by now.
    pub(super) fn forget_all(&mut self) {
        self.loaded.clear();
    }

    /// Lets core change balances from now on, on copies.
    pub(super) fn add_nothing(&mut self) {
        self.adds = false;
    }

    /// Returns whether nothing is left that the server has to carry out by itself.
    pub(super) fn adds(&self) -> bool {
        self.adds
    }

    /// Drops all changes, to execute the commands again.
    pub(super) fn restart(&mut self) {
        // What was loaded stays. Only records that have changed on the server are loaded again.
        self.changes.clear();
        self.added.clear();
        self.read.clear();
        self.drop_pending();
        self.reservations_read.clear();
    }

    fn drop_pending(&mut self) {
        self.pending.clear();
        self.pending_added.clear();
        self.pending_read.clear();
    }

    /// Executes one command, on the `whole` of a reservation or on what this partition holds. Its changes count only if it succeeds.
    pub(super) fn execute<T>(
        &mut self,
        is_whole: bool,
        command: impl FnOnce(&mut Self) -> Result<T, CopyError>,
    ) -> Result<T, CopyError> {
        self.is_whole = is_whole;
        let executed = command(self);
        if executed.is_ok() {
            self.changes.append(&mut self.pending);
            self.read.append(&mut self.pending_read);
            for (key, addition) in std::mem::take(&mut self.pending_added) {
                match (self.added.get_mut(&key), addition) {
                    (Some(Addition::Changes(known)), Addition::Changes(changes)) => known.extend(changes),
                    (_, addition) => {
                        self.added.insert(key, addition);
                    }
                }
            }
        }
        self.drop_pending();
        executed
    }

    /// Replaces the changes of a balance by an addition: a charge that fits does not depend on what others charge at the same time.
    pub(super) fn add_in_place_of(&mut self, key: RecordKey, changes: Vec<u8>) {
        if self.changes.remove(&key).is_some() {
            self.added.insert(key, Addition::Changes(changes));
        }
    }

    /// Returns the changed records with the bytes that the server had. A change that ends at these bytes is left out.
    pub(super) fn changes(&self) -> Vec<(RecordKey, Option<&[u8]>, &Change)> {
        let changed = self.changes.iter().map(|(key, change)| (*key, self.loaded(*key), change));
        changed.filter(|(_, before, change)| *before != change.bytes.as_deref()).collect()
    }

    /// Returns whether a command has changed this record, or added to it.
    pub(super) fn is_changed(&self, key: RecordKey) -> bool {
        self.changes.contains_key(&key) || self.added.contains_key(&key)
    }

    pub(super) fn place(&self) -> Partition {
        self.place
    }

    /// Returns what is done to records whatever they are.
    pub(super) fn added(&self) -> &BTreeMap<RecordKey, Addition> {
        &self.added
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
        let adds = |(own, addition): &(RecordKey, Addition)| *own == key && *addition != Addition::Delete;
        match self.added.get(&key) {
            Some(Addition::Delete) => return Ok(None),
            Some(Addition::Changes(_)) => return Err(CopyError::Later),
            None if self.pending_added.iter().any(adds) => return Err(CopyError::Later),
            None => {}
        }
        self.pending_read.insert(key);
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

    /// Changes a balance whatever it is by then. Fails if an earlier command of the batch has decided on a copy of it.
    fn add(&mut self, key: RecordKey, addition: Addition) -> Result<(), CopyError> {
        let is_deleted = self.added.get(&key) == Some(&Addition::Delete) && addition != Addition::Delete;
        if self.read.contains(&key) || self.pending_read.contains(&key) || is_deleted {
            return Err(CopyError::Later);
        }
        self.pending_added.push((key, addition));
        Ok(())
    }

    /// The record of a reservation, as the command under way means it.
    fn reservation_key(&self, id: TraceId) -> RecordKey {
        let kind = if self.is_whole { RecordKind::Whole } else { RecordKind::Reservation };
        RecordKey::of_id(kind, self.place, id)
    }

    fn read<T>(&mut self, key: RecordKey, parse: fn(&[u8]) -> Result<T, BytesError>) -> Result<Option<T>, CopyError> {
        let read = self.bytes(key)?.map(parse).transpose();
        // A record that cannot be read is never taken for an empty one.
        read.map_err(|error| CopyError::Store(self.errors.unreadable(key, error)))
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

    fn adjust(&mut self, adjustment: &Adjustment, now: Timestamp) -> Result<(), CopyError> {
        if self.adds
            && let Some(changes) = adjustment.to_script()
        {
            for (key, changes) in changes {
                self.add(RecordKey::balance(key), Addition::Changes(changes))?;
            }
            return Ok(());
        }
        // What the store has lost is not given back to what came after it.
        let history = self.head.history;
        let adjustment = adjustment.in_history(|_| history);
        let charges: Vec<(Digest, Limit)> = adjustment.charges().collect();
        self.balances(&charges, now, |balances| adjustment.apply(balances, now))
    }

    fn credit(&mut self, budget: (Digest, Limit), amount: u64, now: Timestamp) -> Result<(), CopyError> {
        let (key, limit) = budget;
        if self.adds
            && let Some(changes) = credit_to_script(&limit, amount)
        {
            return self.add(RecordKey::balance(key), Addition::Changes(changes));
        }
        self.balances(&[budget], now, |balances| balances.iter_mut().for_each(|own| own.credit(&limit, amount, now)))
    }

    fn block(&mut self, budget: (Digest, Limit), until: Timestamp, now: Timestamp) -> Result<(), CopyError> {
        if self.adds
            && let Some(changes) = block_to_script(until)
        {
            return self.add(RecordKey::balance(budget.0), Addition::Changes(changes));
        }
        self.balances(&[budget], now, |balances| balances.iter_mut().for_each(|balance| balance.block(until)))
    }

    fn forget_balance(&mut self, key: Digest) -> Result<(), CopyError> {
        self.add(RecordKey::balance(key), Addition::Delete)
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
        self.add(RecordKey::of_digest(RecordKind::Standing, key), Addition::Delete)
    }

    fn reservation(&mut self, id: TraceId) -> Result<Option<Reservation>, CopyError> {
        self.read(self.reservation_key(id), Reservation::from_script)
    }

    fn save_reservation(&mut self, reservation: Reservation, _: Timestamp) -> Result<(), CopyError> {
        let key = self.reservation_key(reservation.id());
        // Compared with what was there when it is written.
        if !self.pending.contains_key(&key) {
            self.bytes(key)?;
        }
        let ends = reservation.expires();
        // As long as there is something to give back: nobody may ask for the partition when it expires.
        let kept = ends.max(reservation.void_from());
        let expiry = Expiry::At(if waits_for_expiry(&reservation) { kept } else { ends });
        self.save(key, reservation.to_bytes(Format::PRESENT), expiry);
        // Redis drops the record of an ended reservation at its expiry. From then on this mark keeps its receipt from being refunded.
        if !reservation.is_open() && reservation.void_from() > ends {
            let mark = RecordKey::of_id(RecordKind::Refund, self.place, reservation.id());
            if !self.is_whole && self.bytes(mark)?.is_none() {
                self.save(mark, REFUNDED.to_vec(), Expiry::At(reservation.void_from().plus(CLOCK_MARGIN)));
            }
        }
        Ok(())
    }

    fn forget_reservation(&mut self, id: TraceId, _: Timestamp) -> Result<(), CopyError> {
        let key = self.reservation_key(id);
        self.pending.remove(&key);
        Ok(())
    }

    fn take_expired(&mut self, _: Timestamp) -> Result<Option<Reservation>, CopyError> {
        // Commands end no reservations here, because they would have to search for them. The sweep does.
        Ok(None)
    }

    fn remember_refund(&mut self, id: TraceId, void_from: Timestamp, _: Timestamp) -> Result<bool, CopyError> {
        let key = RecordKey::of_id(RecordKind::Refund, self.place, id);
        let first = self.bytes(key)?.is_none();
        if first {
            self.save(key, REFUNDED.to_vec(), Expiry::At(void_from.plus(CLOCK_MARGIN)));
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
        // What a node with the old secret alone has counted since the move stays in force there. Without that it would start again from nothing at each
        // request that is sent to another node.
        if self.bytes(new)?.is_some() {
            return Ok(());
        }
        self.save(new, bytes, Expiry::As(old));
        // What has no ban or lock is left out when the list is read.
        self.list(new, true);
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
