//! A second store that behaves like one in another process: it keeps bytes under keys, commands and answers are sent as bytes, and
//! no future is ready at the first poll. It only loads and saves; core executes the commands.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use threshold_core::command::{
    AccountChange, AccountKey, Answer, Command, MovedRecord, Records, RequestRecord, SaveReason, execute,
};
use threshold_core::control::{ControlChange, ControlLog, ControlPage};
use threshold_core::lockout::{Account, Login};
use threshold_core::{
    Balance, BytesError, Digest, Format, Limit, Outcome, Plan, Reservation, Standing, Timestamp, TraceId,
};
use threshold_limiter::store::{Kind, Listed, Store, StoreError};
use tokio::task::yield_now;

/// The kind of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum RecordKind {
    Balances,
    Standings,
    Accounts,
    Reservations,
    Refunds,
    Control,
    Requests,
}

/// A map from keys to bytes.
#[derive(Debug, Default)]
pub(crate) struct KeyValueStore(Mutex<BTreeMap<(RecordKind, u128), Vec<u8>>>);

/// The locked store during one operation.
struct Open<'s>(MutexGuard<'s, BTreeMap<(RecordKind, u128), Vec<u8>>>);

impl Store for KeyValueStore {
    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        *outcome = *self.execute(plan.to_command(), now).await?.settled().ok_or(StoreError::Unavailable)?;
        Ok(())
    }

    async fn execute(&self, command: Command, now: Timestamp) -> Result<Answer, StoreError> {
        let sent = command.to_bytes(Format::PRESENT);
        yield_now().await;
        let command = Command::from_bytes(&sent).map_err(unreadable)?;
        let answered = execute(&command, &mut Open(self.0.lock().unwrap()), now)?.to_bytes(Format::PRESENT);
        yield_now().await;
        Answer::from_bytes(&answered).map_err(unreadable)
    }

    async fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> Result<Vec<Listed>, StoreError> {
        yield_now().await;
        let (records, first) = (self.0.lock().unwrap(), after.map_or(0, |after| after.to_u128().saturating_add(1)));
        let table = if kind == Kind::Accounts { RecordKind::Accounts } else { RecordKind::Standings };
        let listed = records.range((table, first)..=(table, u128::MAX)).filter_map(|((_, key), bytes)| {
            let key = Digest::from_u128(*key);
            if kind == Kind::Accounts {
                return Some(Listed::Account { key, account: Box::new(Account::from_bytes(bytes).ok()?) });
            }
            let until = Standing::from_bytes(bytes).ok()?.banned_until().filter(|until| *until > now)?;
            Some(Listed::Banned { key, until })
        });
        Ok(listed.take(limit).collect())
    }
}

type Parse<T> = fn(&[u8]) -> Result<T, BytesError>;

fn unreadable(_: BytesError) -> StoreError {
    StoreError::Unavailable
}

impl Open<'_> {
    fn read<T>(&self, table: RecordKind, key: u128, read: Parse<T>) -> Result<Option<T>, StoreError> {
        self.0.get(&(table, key)).map(|bytes| read(bytes)).transpose().map_err(unreadable)
    }

    fn save(&mut self, table: RecordKind, key: u128, bytes: Vec<u8>) -> Result<(), StoreError> {
        self.0.insert((table, key), bytes);
        Ok(())
    }
}

impl Records for Open<'_> {
    type Error = StoreError;

    fn balances<T>(
        &mut self,
        charges: &[(Digest, Limit)],
        _: Timestamp,
        change: impl FnOnce(&mut [Balance]) -> T,
    ) -> Result<T, StoreError> {
        let stored = charges.iter().map(|(key, _)| self.read(RecordKind::Balances, key.to_u128(), Balance::from_bytes));
        let mut balances = stored.map(|read| Ok(read?.unwrap_or_default())).collect::<Result<Vec<_>, StoreError>>()?;
        let changed = change(&mut balances);
        for ((key, _), balance) in charges.iter().zip(balances) {
            self.save(RecordKind::Balances, key.to_u128(), balance.to_bytes(Format::PRESENT))?;
        }
        Ok(changed)
    }

    fn forget_balance(&mut self, key: Digest) -> Result<(), StoreError> {
        self.0.remove(&(RecordKind::Balances, key.to_u128()));
        Ok(())
    }

    fn standing(&mut self, key: Digest) -> Result<Option<Standing>, StoreError> {
        self.read(RecordKind::Standings, key.to_u128(), Standing::from_bytes)
    }

    fn save_standing(&mut self, key: Digest, standing: Standing, _: Timestamp) -> Result<bool, StoreError> {
        self.save(RecordKind::Standings, key.to_u128(), standing.to_bytes(Format::PRESENT)).map(|()| true)
    }

    fn forget_standing(&mut self, key: Digest) -> Result<(), StoreError> {
        self.0.remove(&(RecordKind::Standings, key.to_u128()));
        Ok(())
    }

    fn reservation(&mut self, id: TraceId) -> Result<Option<Reservation>, StoreError> {
        self.read(RecordKind::Reservations, id.to_u128(), Reservation::from_bytes)
    }

    fn save_reservation(&mut self, reservation: Reservation, _: Timestamp) -> Result<(), StoreError> {
        self.save(RecordKind::Reservations, reservation.id().to_u128(), reservation.to_bytes(Format::PRESENT))
    }

    fn forget_reservation(&mut self, id: TraceId, _: Timestamp) -> Result<(), StoreError> {
        self.0.remove(&(RecordKind::Reservations, id.to_u128()));
        Ok(())
    }

    fn take_expired(&mut self, now: Timestamp) -> Result<Option<Reservation>, StoreError> {
        let all = self.0.iter().filter(|((table, _), _)| *table == RecordKind::Reservations);
        let expired =
            all.filter_map(|(_, bytes)| Reservation::from_bytes(bytes).ok()).filter(|own| own.expires() <= now);
        let first = expired.min_by_key(|own| (own.expires(), own.id()));
        self.0.retain(|key, _| first.as_ref().is_none_or(|own| *key != (RecordKind::Reservations, own.id().to_u128())));
        Ok(first)
    }

    fn remember_refund(&mut self, id: TraceId, _: Timestamp, _: Timestamp) -> Result<bool, StoreError> {
        Ok(self.0.insert((RecordKind::Refunds, id.to_u128()), Vec::new()).is_none())
    }

    fn account(&mut self, key: AccountKey) -> Result<Option<Account>, StoreError> {
        let (AccountKey::Own(key) | AccountKey::StandIn(key)) = key;
        self.read(RecordKind::Accounts, key.to_u128(), Account::from_bytes)
    }

    fn save_account(
        &mut self,
        key: AccountKey,
        account: Account,
        _: SaveReason,
        _: &Login,
        _: Timestamp,
    ) -> Result<bool, StoreError> {
        let (AccountKey::Own(key) | AccountKey::StandIn(key)) = key;
        self.save(RecordKind::Accounts, key.to_u128(), account.to_bytes(Format::PRESENT)).map(|()| true)
    }

    fn change_account(&mut self, account: Digest, change: AccountChange) -> Result<(), StoreError> {
        if let Some(mut known) = self.account(AccountKey::Own(account))? {
            change.apply(&mut known);
            self.save(RecordKind::Accounts, account.to_u128(), known.to_bytes(Format::PRESENT))?;
        }
        Ok(())
    }

    fn rename(&mut self, what: MovedRecord, old: Digest, new: Digest, _: Timestamp) -> Result<(), StoreError> {
        let table = if what == MovedRecord::Standing { RecordKind::Standings } else { RecordKind::Accounts };
        if let Some(bytes) = self.0.remove(&(table, old.to_u128())) {
            self.0.entry((table, new.to_u128())).or_insert(bytes);
        }
        Ok(())
    }

    fn save_control(&mut self, changes: &[ControlChange], now: Timestamp) -> Result<u64, StoreError> {
        let mut log = self.read(RecordKind::Control, 0, ControlLog::from_bytes)?.unwrap_or_default();
        let number = log.add_all(changes, now).map_err(|_| StoreError::Full)?;
        self.save(RecordKind::Control, 0, log.to_bytes(Format::PRESENT))?;
        Ok(number)
    }

    fn read_control(&mut self, after: u64, most: usize) -> Result<ControlPage, StoreError> {
        Ok(self.read(RecordKind::Control, 0, ControlLog::from_bytes)?.unwrap_or_default().after(after, most))
    }

    fn request(&mut self, id: Digest) -> Result<Option<RequestRecord>, StoreError> {
        self.read(RecordKind::Requests, id.to_u128(), RequestRecord::from_bytes)
    }

    fn save_request(&mut self, id: Digest, record: RequestRecord, _: Timestamp) -> Result<(), StoreError> {
        self.save(RecordKind::Requests, id.to_u128(), record.to_bytes(Format::PRESENT))
    }
}
