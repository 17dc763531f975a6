//! The restore after a restart: puts the rows of a journal back into memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use threshold_core::control::ControlChange;
use threshold_core::lockout::{Account, Factor};
use threshold_core::policy::{Ban, ListEntry, Owner, Setting};
use threshold_core::{Digest, DigestKey, KeyId, Policy, Secret, Secrets, Span, Standing, Timestamp};

use super::rows::{Kind, Row};
use super::{Contents, Counters, CountersError, FORMAT, Journal, load_counters};
use crate::bans::BanList;
use crate::store::ChangeSink as _;
use crate::store::memory::MemoryStore;

/// How long the subject of an unreadable row is blocked: as long as the longest lock of a login, and long enough for an
/// operator to look.
const UNREADABLE_BLOCK: Span = Span::HOUR;

/// How long a start waits for the disk after a rotation. A disk that takes longer is failing, which an event reports.
const REKEY_TIMEOUT: Duration = Duration::from_secs(30);

/// The result of a restore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Restored {
    /// The number of subjects with strikes or penalties.
    pub subjects: usize,
    /// The number of accounts.
    pub accounts: usize,
    /// The number of bans set by operators.
    pub bans: usize,
    /// The number of tenants and users with settings. They are in force once
    /// [`Limiter::follow_control`](crate::Limiter::follow_control) has read them from the store.
    pub settings: usize,
    /// The number of unreadable rows. Their subjects and accounts are blocked for an hour, as far as the key is known.
    pub unreadable: usize,
    /// The number of rows that memory had no room for.
    pub no_room: usize,
    /// The number of rows that were moved from the old secret to the present one: bans, and penalties of subjects whose names
    /// are known.
    pub rekeyed: usize,
    /// The number of rows under a secret that is no longer given. No request can match them any more.
    pub forgotten: usize,
}

/// A store in memory that was restored from a journal.
#[derive(Debug)]
pub struct RestoredMemory {
    /// The store. It reports its changes to the journal.
    pub store: MemoryStore,
    /// What was restored from the journal.
    pub restored: Restored,
    /// What was restored of the counters that [`save_counters`](super::save_counters) wrote.
    pub counters: Result<Counters, CountersError>,
}

/// Makes a store in memory, restores it and `bans` from the journal, and has both report their changes to it. A list that
/// reports to another journal already keeps doing so.
pub fn restore_memory(
    journal: &Arc<Journal>,
    contents: &Contents,
    bans: &BanList,
    (policy, secrets): (&Policy, &Secrets),
    now: Timestamp,
) -> RestoredMemory {
    let store = MemoryStore::new(policy.memory());
    // Before the journal hears of changes: what it holds need not be written to it again.
    let restored = restore(journal, contents, (&store, bans), (policy, secrets), now);
    let counters = load_counters(&store, journal.path(), secrets, now);
    bans.report_to(Arc::<Journal>::clone(journal));
    let store = store.with_change_sink(Arc::<Journal>::clone(journal));
    RestoredMemory { store, restored, counters }
}

/// Puts the rows of a journal back into memory, and deletes expired rows from it.
///
/// Rows that were moved to the present secret are on disk when this returns. Attach the journal to `store` and `bans` only
/// afterwards: rows that come from it need not go back to it.
pub fn restore(
    journal: &Journal,
    contents: &Contents,
    (store, bans): (&MemoryStore, &BanList),
    (policy, secrets): (&Policy, &Secrets),
    now: Timestamp,
) -> Restored {
    let mut restored = Restored::default();
    // One transaction: a crash must not find a row under neither of two secrets.
    let transaction = journal.begin_change();
    let login = policy.login().cloned().unwrap_or_default();
    let rotation = secrets.old().map(|old| Rotation::new(policy, old, &contents.rows));
    for row in &contents.rows {
        // A setting is found by its name, so its row has no digest.
        let Some(mut key) = row.digest() else {
            restore_setting(journal, row, store, &mut restored, now);
            continue;
        };
        if let Some(id) = row.old_key_id() {
            match rotation.as_ref().filter(|rotation| rotation.key_id == id) {
                Some(rotation) => {
                    // Without a known name the row stays under its old key, until a request of its subject moves it.
                    if let Some(new) = rotation.new_key(row, key, policy.key()) {
                        journal.put(row.kind, &row.key, None);
                        journal.put(row.kind, &new.to_u128().to_be_bytes(), row.value.clone());
                        restored.rekeyed = restored.rekeyed.saturating_add(1);
                        key = new;
                    }
                }
                None => {
                    journal.put(row.kind, &row.key, None);
                    restored.forgotten = restored.forgotten.saturating_add(1);
                    continue;
                }
            }
        }
        let decoded = row.value.as_deref().and_then(|bytes| decode(row.kind, bytes, now));
        let has_room = match decoded {
            Some(Decoded::Standing(standing)) if standing.silent_from() > now => {
                restored.subjects = restored.subjects.saturating_add(1);
                store.restore_standing(key, standing, now)
            }
            Some(Decoded::Account(account)) if account.silent_from(&login) > now => {
                restored.accounts = restored.accounts.saturating_add(1);
                store.restore_account(key, *account)
            }
            Some(Decoded::Ban(ban)) if ban.until > now && row.kind == Kind::Ban => {
                restored.bans = restored.bans.saturating_add(1);
                let ban = Arc::new(ban);
                let change = ControlChange::Ban { id: key, ban: Some(Arc::clone(&ban)) };
                // Requests ask the list, and `follow_control` reads the log of the store, so the ban must be in both.
                bans.set(key, ban, now).is_ok() && store.restore_control(change, now)
            }
            Some(Decoded::Ban(ban)) if ban.until > now => {
                bans.name(key, ban, now);
                true
            }
            Some(_) => {
                // It has expired since it was written.
                journal.put(row.kind, &key.to_u128().to_be_bytes(), None);
                true
            }
            None => {
                restored.unreadable = restored.unreadable.saturating_add(1);
                block_unreadable(journal, row, key, store, now)
            }
        };
        restored.no_room = restored.no_room.saturating_add(usize::from(!has_room));
    }
    drop(transaction);
    if restored.rekeyed > 0 {
        // The operator may drop the old secret once this returns.
        journal.wait_until_saved(REKEY_TIMEOUT);
    }
    restored
}

/// Puts a setting back into the store. An expired or unreadable one is deleted from the journal.
fn restore_setting(journal: &Journal, row: &Row, store: &MemoryStore, restored: &mut Restored, now: Timestamp) {
    let owner = match row.kind {
        Kind::Tenant => Owner::Tenant,
        Kind::User => Owner::User,
        Kind::Standing | Kind::Account | Kind::Ban | Kind::Named => return,
    };
    let setting = row.value.as_deref().and_then(|bytes| Setting::from_bytes(bytes).ok());
    let name = std::str::from_utf8(&row.key).ok();
    let Some((setting, name)) = setting.filter(|setting| setting.until > now).zip(name) else {
        journal.put(row.kind, &row.key, None);
        return;
    };
    let change = ControlChange::Setting { owner, name: name.into(), setting: Some(Arc::new(setting)) };
    restored.settings = restored.settings.saturating_add(1);
    restored.no_room = restored.no_room.saturating_add(usize::from(!store.restore_control(change, now)));
}

/// Returns everything that a store and its bans hold as rows, for the rebuild of a journal.
///
/// Requests go on meanwhile. Their changes are queued, and written after these rows.
#[must_use]
pub fn rows_in_memory(store: &MemoryStore, bans: &BanList) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut add = |kind, key: Digest, value| {
        rows.push(Row { kind, key: key.to_u128().to_be_bytes().to_vec(), value: Some(value) });
    };
    store.each_standing(|key, standing| add(Kind::Standing, key, standing.to_bytes(FORMAT)));
    store.each_account(|key, account| add(Kind::Account, key, account.to_bytes(FORMAT)));
    bans.each(|key, ban| add(Kind::Ban, key, ban.to_bytes(FORMAT)));
    bans.each_named(|key, ban| add(Kind::Named, key, ban.to_bytes(FORMAT)));
    store.each_control(|change| {
        if let ControlChange::Setting { owner, name, setting: Some(setting) } = change {
            let kind = if *owner == Owner::User { Kind::User } else { Kind::Tenant };
            rows.push(Row { kind, key: name.as_bytes().to_vec(), value: Some(setting.to_bytes(FORMAT)) });
        }
    });
    rows
}

/// A rotation of the secret, for rows under the old one.
struct Rotation {
    key_id: KeyId,
    /// The digests under the present secret, by those under the old one, of subjects whose names are known.
    named: HashMap<Digest, Digest>,
}

impl Rotation {
    fn new(policy: &Policy, old: &Secret, rows: &[Row]) -> Self {
        let key_id = old.key_id();
        let before = policy.clone().with_key(old.digest_key());
        let own = rows.iter().filter(|row| row.kind == Kind::Named && row.old_key_id() == Some(key_id));
        let named = own.filter_map(|row| {
            let (subject, ban) = (row.digest()?, Ban::from_bytes(row.value.as_deref()?).ok()?);
            // Every address of a block is the same subject.
            let key = match &ban.whom {
                ListEntry::Address(net) => net.addr().to_string(),
                ListEntry::User(name) | ListEntry::Tenant(name) => name.to_string(),
            };
            let rekeyed = policy.rekeyed_standings(&before, ban.whom.layer(), &key);
            // The digest of a redacted name does not match.
            rekeyed.into_iter().find(|(old, _)| *old == subject)
        });
        Self { key_id, named: named.collect() }
    }

    /// Returns the digest of the same record under the present secret, if its name is known. Accounts, and subjects that were
    /// never banned, have no name in the journal: they move with their next request.
    fn new_key(&self, row: &Row, old: Digest, key: DigestKey) -> Option<Digest> {
        match row.kind {
            Kind::Ban => Ban::from_bytes(row.value.as_deref()?).ok().map(|ban| ban.id(key)),
            Kind::Standing | Kind::Named => self.named.get(&old).copied(),
            Kind::Account | Kind::Tenant | Kind::User => None,
        }
    }
}

/// The record in a row.
enum Decoded {
    Standing(Standing),
    Account(Box<Account>),
    Ban(Ban),
}

fn decode(kind: Kind, bytes: &[u8], now: Timestamp) -> Option<Decoded> {
    match kind {
        Kind::Standing => Standing::from_bytes(bytes).ok().map(Decoded::Standing),
        Kind::Account => Account::from_bytes(bytes).ok().map(Box::new).map(Decoded::Account),
        Kind::Ban | Kind::Named => Ban::from_bytes(bytes).ok().map(|ban| Decoded::Ban(ban.brought_back(now))),
        Kind::Tenant | Kind::User => None,
    }
}

/// Blocks the subject or account of an unreadable row for a while: it may have been banned or locked.
fn block_unreadable(journal: &Journal, row: &Row, key: Digest, store: &MemoryStore, now: Timestamp) -> bool {
    let until = now.plus(UNREADABLE_BLOCK);
    match row.kind {
        Kind::Standing => {
            let standing = Standing::banned(until);
            // The store does not report to the journal yet, so this does.
            journal.standing(key, Some(&standing));
            store.restore_standing(key, standing, now)
        }
        Kind::Account => {
            let account = Account::locked(Factor::named(None), until);
            journal.account(key, Some(&account));
            store.restore_account(key, account)
        }
        // The key does not say who was banned. The report of the damage counts the row as lost.
        Kind::Ban | Kind::Named | Kind::Tenant | Kind::User => {
            journal.put(row.kind, &row.key, None);
            true
        }
    }
}
