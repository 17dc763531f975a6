//! The records of one object, as commands see them, on the rows of its database.
//!
//! A command reads rows when it needs them and changes copies. Its changes are written after it has succeeded, all in one event
//! without an await, so that a command that fails halfway changes nothing.

use std::collections::BTreeMap;

use threshold_core::command::{AccountChange, AccountKey, MovedRecord, Records, RequestRecord, SaveReason};
use threshold_core::control::{ControlChange, ControlLog, ControlPage};
use threshold_core::lockout::{Account, Login};
use threshold_core::{Balance, BytesError, Digest, Format, Limit, Reservation, Standing, Timestamp, TraceId};

use super::packed::Packed;

/// The kinds of rows. The numbers are stored: never reuse one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// All small balances of the object, in one row.
    Packed = 1,
    /// A balance that is too large for the packed row.
    Balance = 2,
    /// The standing of a subject.
    Standing = 3,
    /// The login state of an account.
    Account = 4,
    /// A reservation.
    Reservation = 5,
    /// A receipt that was refunded, or whose reservation has ended.
    Refund = 6,
    /// A request with an id.
    Request = 7,
    /// The log of bans and settings.
    Control = 8,
    /// The alarm of another author, while one of Threshold is in its place.
    Alarm = 9,
}

/// The key of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowKey {
    /// The kind.
    pub kind: Kind,
    /// The digest or id; 0 where an object has one row of the kind.
    pub id: u128,
}

/// The new value of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The row is written.
    Write {
        /// The bytes.
        bytes: Vec<u8>,
        /// When it may be deleted.
        until: Timestamp,
    },
    /// The row is deleted.
    Delete,
}

/// The rows of an object's database.
pub trait Rows {
    /// Reads a row.
    ///
    /// # Errors
    /// Fails where the database does.
    fn read(&self, key: RowKey) -> Result<Option<Vec<u8>>, RowError>;

    /// Returns when a row may be deleted; `None` if there is none.
    ///
    /// # Errors
    /// Fails where the database does.
    fn until(&self, key: RowKey) -> Result<Option<Timestamp>, RowError>;

    /// Returns the reservation row whose time is over for longest, of those that are not in `except`.
    ///
    /// # Errors
    /// Fails where the database does.
    fn first_expired(&self, now: Timestamp, except: &[u128]) -> Result<Option<(u128, Vec<u8>)>, RowError>;
}

/// Why a command was not executed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RowError {
    /// The database failed.
    #[error("the database of the object failed: {0}")]
    Database(String),
    /// A row cannot be read, for example because a newer version has written it.
    #[error("a row cannot be read: {0}")]
    Unreadable(#[from] BytesError),
    /// There is no room for the record.
    #[error("the object is full")]
    Full,
}

impl From<RowError> for worker::Error {
    fn from(error: RowError) -> Self {
        Self::RustError(error.to_string())
    }
}

/// The records of an object during one command.
#[derive(Debug)]
pub struct ObjectRecords<'r, R> {
    rows: &'r R,
    packed: Option<Packed>,
    changes: BTreeMap<RowKey, Change>,
}

impl<'r, R: Rows> ObjectRecords<'r, R> {
    /// Opens the records of an object for one command.
    pub fn new(rows: &'r R) -> Self {
        Self { rows, packed: None, changes: BTreeMap::new() }
    }

    /// Returns the rows that the command has changed.
    #[must_use]
    pub fn into_changes(mut self) -> Vec<(RowKey, Change)> {
        if let Some(change) = self.packed.and_then(Packed::into_change) {
            self.changes.insert(PACKED, change);
        }
        self.changes.into_iter().collect()
    }

    fn read<T>(&self, key: RowKey, parse: impl FnOnce(&[u8]) -> Result<T, BytesError>) -> Result<Option<T>, RowError> {
        Ok(match self.changes.get(&key) {
            Some(Change::Write { bytes, .. }) => Some(parse(bytes)?),
            Some(Change::Delete) => None,
            None => self.rows.read(key)?.map(|bytes| parse(&bytes)).transpose()?,
        })
    }

    /// Returns a row and its end.
    pub(super) fn row(&self, key: RowKey) -> Result<Option<(Vec<u8>, Timestamp)>, RowError> {
        Ok(match self.changes.get(&key) {
            Some(Change::Write { bytes, until }) => Some((bytes.clone(), *until)),
            Some(Change::Delete) => None,
            None => self.rows.read(key)?.zip(self.rows.until(key)?),
        })
    }

    pub(super) fn remove(&mut self, kind: Kind, id: u128) -> Result<(), RowError> {
        if kind == Kind::Balance {
            self.packed()?.remove(Digest::from_u128(id));
        }
        self.delete(kind, id)
    }

    pub(super) fn write(&mut self, kind: Kind, id: u128, bytes: Vec<u8>, until: Timestamp) {
        self.changes.insert(RowKey { kind, id }, Change::Write { bytes, until });
    }

    fn delete(&mut self, kind: Kind, id: u128) -> Result<(), RowError> {
        let key = RowKey { kind, id };
        // A row that is not there is not deleted: Cloudflare bills each row that is written.
        if self.read(key, |_| Ok(()))?.is_some() {
            self.changes.insert(key, Change::Delete);
        }
        Ok(())
    }

    fn packed(&mut self) -> Result<&mut Packed, RowError> {
        let packed = match self.packed.take() {
            Some(packed) => packed,
            None => Packed::from_row(self.rows.read(PACKED)?)?,
        };
        Ok(self.packed.insert(packed))
    }

    pub(super) fn balance(&mut self, key: Digest) -> Result<Balance, RowError> {
        if let Some(bytes) = self.packed()?.get(key) {
            return Ok(Balance::from_bytes(bytes)?);
        }
        let own = RowKey { kind: Kind::Balance, id: key.to_u128() };
        Ok(self.read(own, Balance::from_bytes)?.unwrap_or_default())
    }

    pub(super) fn save_balance(&mut self, key: Digest, balance: &Balance, now: Timestamp) -> Result<(), RowError> {
        let (bytes, until) = (balance.to_bytes(Format::PRESENT), balance.silent_from());
        if until <= now {
            // It says the same as no balance.
            self.packed()?.remove(key);
            return self.delete(Kind::Balance, key.to_u128());
        }
        if self.packed()?.save(key, &bytes, until, now)? {
            return self.delete(Kind::Balance, key.to_u128());
        }
        self.write(Kind::Balance, key.to_u128(), bytes, until);
        Ok(())
    }
}

const PACKED: RowKey = RowKey { kind: Kind::Packed, id: 0 };

impl<R: Rows> Records for ObjectRecords<'_, R> {
    type Error = RowError;

    fn balances<T>(
        &mut self,
        charges: &[(Digest, Limit)],
        now: Timestamp,
        change: impl FnOnce(&mut [Balance]) -> T,
    ) -> Result<T, RowError> {
        let stored = charges.iter().map(|(key, _)| self.balance(*key)).collect::<Result<Vec<_>, _>>()?;
        let mut balances = stored.clone();
        let changed = change(&mut balances);
        for (((key, _), before), after) in charges.iter().zip(&stored).zip(&balances) {
            // A denial changes nothing, and a row that is not written is not billed.
            if before != after {
                self.save_balance(*key, after, now)?;
            }
        }
        Ok(changed)
    }

    fn forget_balance(&mut self, key: Digest) -> Result<(), RowError> {
        self.remove(Kind::Balance, key.to_u128())
    }

    fn standing(&mut self, key: Digest) -> Result<Option<Standing>, RowError> {
        self.read(RowKey { kind: Kind::Standing, id: key.to_u128() }, Standing::from_bytes)
    }

    fn save_standing(&mut self, key: Digest, standing: Standing, _: Timestamp) -> Result<bool, RowError> {
        let (bytes, until) = (standing.to_bytes(Format::PRESENT), standing.silent_from());
        self.write(Kind::Standing, key.to_u128(), bytes, until);
        Ok(true)
    }

    fn forget_standing(&mut self, key: Digest) -> Result<(), RowError> {
        self.delete(Kind::Standing, key.to_u128())
    }

    fn reservation(&mut self, id: TraceId) -> Result<Option<Reservation>, RowError> {
        self.read(RowKey { kind: Kind::Reservation, id: id.to_u128() }, Reservation::from_bytes)
    }

    fn save_reservation(&mut self, reservation: Reservation, _: Timestamp) -> Result<(), RowError> {
        let (bytes, until) = (reservation.to_bytes(Format::PRESENT), reservation.expires());
        self.write(Kind::Reservation, reservation.id().to_u128(), bytes, until);
        Ok(())
    }

    fn forget_reservation(&mut self, id: TraceId, _: Timestamp) -> Result<(), RowError> {
        self.changes.remove(&RowKey { kind: Kind::Reservation, id: id.to_u128() });
        Ok(())
    }

    fn take_expired(&mut self, now: Timestamp) -> Result<Option<Reservation>, RowError> {
        let changed = self.changes.keys().filter(|key| key.kind == Kind::Reservation).map(|key| key.id);
        let changed: Vec<u128> = changed.collect();
        let Some((id, bytes)) = self.rows.first_expired(now, &changed)? else { return Ok(None) };
        let reservation = Reservation::from_bytes(&bytes)?;
        self.changes.insert(RowKey { kind: Kind::Reservation, id }, Change::Delete);
        Ok(Some(reservation))
    }

    fn remember_refund(&mut self, id: TraceId, void_from: Timestamp, _: Timestamp) -> Result<bool, RowError> {
        let key = RowKey { kind: Kind::Refund, id: id.to_u128() };
        if self.read(key, |_| Ok(()))?.is_some() {
            return Ok(false);
        }
        self.write(Kind::Refund, id.to_u128(), Vec::new(), void_from);
        Ok(true)
    }

    fn account(&mut self, key: AccountKey) -> Result<Option<Account>, RowError> {
        let (AccountKey::Own(key) | AccountKey::StandIn(key)) = key;
        self.read(RowKey { kind: Kind::Account, id: key.to_u128() }, Account::from_bytes)
    }

    fn save_account(
        &mut self,
        key: AccountKey,
        account: Account,
        _: SaveReason,
        login: &Login,
        _: Timestamp,
    ) -> Result<bool, RowError> {
        let (AccountKey::Own(key) | AccountKey::StandIn(key)) = key;
        let (bytes, until) = (account.to_bytes(Format::PRESENT), account.silent_from(login));
        self.write(Kind::Account, key.to_u128(), bytes, until);
        Ok(true)
    }

    fn change_account(&mut self, account: Digest, change: AccountChange) -> Result<(), RowError> {
        if let Some(mut known) = self.account(AccountKey::Own(account))? {
            change.apply(&mut known);
            // Both changes forget all failures, so that no ceiling is reached, whatever the settings.
            let until = known.silent_from(&Login::default().without_ceiling());
            if until == Timestamp::EPOCH {
                return self.delete(Kind::Account, account.to_u128());
            }
            self.write(Kind::Account, account.to_u128(), known.to_bytes(Format::PRESENT), until);
        }
        Ok(())
    }

    fn rename(&mut self, what: MovedRecord, old: Digest, new: Digest, _: Timestamp) -> Result<(), RowError> {
        let kind = match what {
            MovedRecord::Standing => Kind::Standing,
            MovedRecord::Account => Kind::Account,
        };
        let (from, to) = (RowKey { kind, id: old.to_u128() }, RowKey { kind, id: new.to_u128() });
        let Some((bytes, until)) = self.row(from)? else { return Ok(()) };
        self.changes.insert(from, Change::Delete);
        if self.read(to, |_| Ok(()))?.is_none() {
            self.write(kind, new.to_u128(), bytes, until);
        }
        Ok(())
    }

    fn save_control(&mut self, changes: &[ControlChange], now: Timestamp) -> Result<u64, RowError> {
        let mut log = self.control()?;
        let number = log.add_all(changes, now).map_err(|_| RowError::Full)?;
        self.write(Kind::Control, 0, log.to_bytes(Format::PRESENT), Timestamp::MAX);
        Ok(number)
    }

    fn read_control(&mut self, after: u64, most: usize) -> Result<ControlPage, RowError> {
        Ok(self.control()?.after(after, most))
    }

    fn request(&mut self, id: Digest) -> Result<Option<RequestRecord>, RowError> {
        self.read(RowKey { kind: Kind::Request, id: id.to_u128() }, RequestRecord::from_bytes)
    }

    fn save_request(&mut self, id: Digest, record: RequestRecord, _: Timestamp) -> Result<(), RowError> {
        let (bytes, until) = (record.to_bytes(Format::PRESENT), record.until());
        self.write(Kind::Request, id.to_u128(), bytes, until);
        Ok(())
    }
}

impl<R: Rows> ObjectRecords<'_, R> {
    fn control(&self) -> Result<ControlLog, RowError> {
        let key = RowKey { kind: Kind::Control, id: 0 };
        Ok(self.read(key, ControlLog::from_bytes)?.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use threshold_core::command::{Answer, Command, KeyMoves, execute};
    use threshold_core::limit::{Algorithm, Anchor, LimitOptions};
    use threshold_core::lockout::{AttemptOutcome, LoginRequest};
    use threshold_core::{Facts, Policy, Secret, Secrets};

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    /// Rows in memory.
    #[derive(Default)]
    struct Map(BTreeMap<RowKey, (Vec<u8>, Timestamp)>);

    impl Map {
        fn run(&mut self, command: &Command) -> Answer {
            let mut records = ObjectRecords::new(&*self);
            let answer = execute(command, &mut records, NOW).unwrap();
            for (key, change) in records.into_changes() {
                match change {
                    Change::Write { bytes, until } => self.0.insert(key, (bytes, until)),
                    Change::Delete => self.0.remove(&key),
                };
            }
            answer
        }

        fn until(&self, kind: Kind) -> Option<Timestamp> {
            self.0.iter().find(|(key, _)| key.kind == kind).map(|(_, (_, until))| *until)
        }
    }

    impl Rows for Map {
        fn read(&self, key: RowKey) -> Result<Option<Vec<u8>>, RowError> {
            Ok(self.0.get(&key).map(|(bytes, _)| bytes.clone()))
        }

        fn until(&self, key: RowKey) -> Result<Option<Timestamp>, RowError> {
            Ok(self.0.get(&key).map(|(_, until)| *until))
        }

        fn first_expired(&self, _: Timestamp, _: &[u128]) -> Result<Option<(u128, Vec<u8>)>, RowError> {
            Ok(None)
        }
    }

    /// Fails an attempt on an account of this object, and returns the digest of the account.
    fn fail(rows: &mut Map, login: &Login) -> Digest {
        let policy = Policy::parse("[login]", &|_| None).unwrap();
        let secrets = Secrets::new(Secret::new(&[9; 32]).unwrap());
        let request = LoginRequest { account: Some("ada"), ..LoginRequest::default() };
        let keys = request.attempt_keys(&policy, &secrets, TraceId::from_u128(7));
        let begun = rows.run(&Command::BeginLogin { login: login.clone(), keys });
        let Answer::Attempted { outcome: AttemptOutcome::Allowed(attempt), .. } = begun else { panic!("{begun:?}") };
        let ended = Command::EndLogin { login: login.clone(), attempt, success: false, nonce: TraceId::default() };
        rows.run(&ended);
        keys.account.unwrap()
    }

    /// It stayed for ever: an object that has one such row is never empty.
    #[test]
    fn the_row_of_a_pardoned_account_ends() {
        let mut rows = Map::default();
        let account = fail(&mut rows, &Login::default());
        assert!(rows.until(Kind::Account).is_some_and(|until| until > NOW && until < Timestamp::MAX));
        rows.run(&Command::ChangeAccount { account, change: AccountChange::Lift });
        assert_eq!(rows.until(Kind::Account), None, "nothing is left to remember");
        // A reset is remembered: the tokens of devices from before it must stay unknown.
        fail(&mut rows, &Login::default());
        rows.run(&Command::ChangeAccount { account, change: AccountChange::Reset });
        assert_eq!(rows.until(Kind::Account), Some(Timestamp::MAX));
    }

    #[test]
    fn a_record_that_moves_to_another_key_keeps_its_end() {
        let mut rows = Map::default();
        let old = fail(&mut rows, &Login::default());
        let until = rows.until(Kind::Account);
        let new = Digest::from_u128(1);
        rows.run(&Command::Rekey(KeyMoves { accounts: vec![(old, new)], ..KeyMoves::default() }));
        assert_eq!((rows.until(Kind::Account), rows.0.len()), (until, 1));
        assert!(until.is_some_and(|until| until < Timestamp::MAX));
    }

    /// The page on Cloudflare states these sizes: a balance in the packed row, with its key.
    #[test]
    fn a_limit_takes_the_documented_bytes() {
        let size = |options: LimitOptions, text: &str| {
            let (limit, mut balance) = (options.parse(text).unwrap(), Balance::default());
            assert!(balance.check(&limit, 1, NOW, TraceId::from_u128(1)).look.allowed);
            let mut packed = Packed::from_row(None).unwrap();
            let bytes = balance.to_bytes(Format::PRESENT);
            assert!(packed.save(Digest::from_u128(1), &bytes, Timestamp::MAX, NOW).unwrap());
            let Some(Change::Write { bytes, .. }) = packed.into_change() else { panic!("nothing was written") };
            // Without the byte of the row's version.
            bytes.len() - 1
        };
        let of = |algorithm| LimitOptions::new().algorithm(algorithm);
        let sizes = [
            size(of(Algorithm::TokenBucket), "100/min"),
            size(of(Algorithm::FixedWindow).anchor(Anchor::First), "100/h"),
            size(of(Algorithm::SlidingEstimate), "100/h"),
        ];
        assert_eq!(sizes, [34, 34, 35]);
    }

    /// The page on Cloudflare states these figures for the policy `grove`: how many rows a request writes, and the bytes of a user's
    /// strikes.
    #[test]
    fn a_request_writes_the_documented_rows() {
        let policy = Policy::parse(include_str!("../../../../policies/grove.toml"), &|_| None).unwrap();
        let facts = Facts {
            ip: Some([203, 0, 113, 7].into()),
            tenant: Some("acme"),
            user: Some("u1"),
            method: Some("POST"),
            path: Some("/api/comments"),
            host: Some("acme.grove.place"),
            ..Facts::default()
        };
        let mut rows = Map::default();
        let mut strikes = 0;
        for _ in 0..2_000 {
            rows.run(&policy.plan(&facts).unwrap().to_command());
            let standings = rows.0.iter().filter(|(key, _)| key.kind == Kind::Standing);
            // A row has its kind, id and end beside the value.
            strikes = strikes.max(standings.map(|(_, (bytes, _))| bytes.len() + 1 + 16 + 8).sum());
        }
        assert_eq!(rows.0.keys().map(|key| key.kind).collect::<Vec<_>>(), [Kind::Packed, Kind::Standing]);
        assert_eq!(strikes, 60);
    }
}
