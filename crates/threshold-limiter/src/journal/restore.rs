//! After a restart: what a journal held goes back into memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use threshold_core::control::ControlChange;
use threshold_core::lockout::{Account, Factor};
use threshold_core::policy::{Ban, ListEntry, Owner, Setting};
use threshold_core::{Digest, DigestKey, KeyId, Policy, Secret, Secrets, Span, Standing, Timestamp};

use super::rows::{Kind, Row};
use super::{FORMAT, Journal, Kept};
use crate::bans::BanList;
use crate::store::ChangeSink as _;
use crate::store::memory::MemoryStore;

/// How long somebody is kept out of whom the journal only knows that there was something: as long as the longest lock of a
/// login, and long enough for an operator to look.
const UNREADABLE_FOR: Span = Span::HOUR;

/// How long a start waits for the disk after a rotation. A disk that takes longer is in trouble, which is told elsewhere.
const REKEYED_WAIT: Duration = Duration::from_secs(30);

/// What went back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Restored {
    /// Subjects with strikes or penalties.
    pub subjects: usize,
    /// Accounts.
    pub accounts: usize,
    /// Bans that operators have set.
    pub bans: usize,
    /// Tenants and users with settings. They are in force once [`Limiter::follow_control`](crate::Limiter::follow_control)
    /// has read them from the store.
    pub settings: usize,
    /// Rows that say something else than was written. Whoever they are about is kept out for an hour, where that is known.
    pub unreadable: usize,
    /// Rows that memory had no room for.
    pub no_room: usize,
    /// Rows under an old secret that are under the present one now: bans, and penalties of those whose names are known.
    pub rekeyed: usize,
    /// Rows under an old secret that is not given, which nobody can be recognised by any more.
    pub forgotten: usize,
}

/// Puts back what was kept, and takes out of the journal what says nothing any more. What was moved to the present secret is
/// on disk when this returns.
///
/// `store` and `bans` do not tell the journal of changes yet: what comes from it need not go back.
pub fn restore(
    journal: &Journal,
    kept: &Kept,
    (store, bans): (&MemoryStore, &BanList),
    (policy, secrets): (&Policy, &Secrets),
    now: Timestamp,
) -> Restored {
    let mut restored = Restored::default();
    // All or nothing: between a row under the old secret and the same under the present one there is no moment without it.
    let held = journal.begin_change();
    let login = policy.login().cloned().unwrap_or_default();
    let rotation = secrets.old().map(|old| Rotation::new(policy, old, &kept.rows));
    for row in &kept.rows {
        let Some(mut key) = row.digest() else {
            restore_setting(journal, row, store, &mut restored, now);
            continue;
        };
        if let Some(id) = row.old_key_id() {
            match rotation.as_ref().filter(|rotation| rotation.key_id == id) {
                Some(rotation) => {
                    if let Some(new) = rotation.new_key(row, key, policy.key()) {
                        journal.note(row.kind, &row.key, None);
                        journal.note(row.kind, &new.to_u128().to_be_bytes(), row.value.clone());
                        restored.rekeyed = restored.rekeyed.saturating_add(1);
                        key = new;
                    }
                }
                None => {
                    journal.note(row.kind, &row.key, None);
                    restored.forgotten = restored.forgotten.saturating_add(1);
                    continue;
                }
            }
        }
        let known = row.value.as_deref().and_then(|bytes| read(row.kind, bytes, now));
        let has_room = match known {
            Some(Known::Standing(standing)) if standing.silent_from() > now => {
                restored.subjects = restored.subjects.saturating_add(1);
                store.restore_standing(key, standing, now)
            }
            Some(Known::Account(account)) if account.silent_from(&login) > now => {
                restored.accounts = restored.accounts.saturating_add(1);
                store.restore_account(key, *account)
            }
            Some(Known::Ban(ban)) if ban.until > now && row.kind == Kind::Ban => {
                restored.bans = restored.bans.saturating_add(1);
                let ban = Arc::new(ban);
                let change = ControlChange::Ban { id: key, ban: Some(Arc::clone(&ban)) };
                bans.set(key, ban, now).is_ok() && store.restore_control(change, now)
            }
            Some(Known::Ban(ban)) if ban.until > now => {
                bans.name(key, ban, now);
                true
            }
            Some(_) => {
                journal.note(row.kind, &key.to_u128().to_be_bytes(), None);
                true
            }
            None => {
                restored.unreadable = restored.unreadable.saturating_add(1);
                keep_out(journal, row, key, store, now)
            }
        };
        restored.no_room = restored.no_room.saturating_add(usize::from(!has_room));
    }
    drop(held);
    if restored.rekeyed > 0 {
        // Who sees this return may drop the old secret.
        journal.wait_until_saved(REKEYED_WAIT);
    }
    restored
}

/// A setting goes back into the store. One that is over, or cannot be read, is taken out of the journal.
fn restore_setting(journal: &Journal, row: &Row, store: &MemoryStore, restored: &mut Restored, now: Timestamp) {
    let owner = match row.kind {
        Kind::Tenant => Owner::Tenant,
        Kind::User => Owner::User,
        Kind::Standing | Kind::Account | Kind::Ban | Kind::Named => return,
    };
    let setting = row.value.as_deref().and_then(|bytes| Setting::from_bytes(bytes).ok());
    let name = std::str::from_utf8(&row.key).ok();
    let Some((setting, name)) = setting.filter(|setting| setting.until > now).zip(name) else {
        journal.note(row.kind, &row.key, None);
        return;
    };
    let change = ControlChange::Setting { owner, name: name.into(), setting: Some(Arc::new(setting)) };
    restored.settings = restored.settings.saturating_add(1);
    restored.no_room = restored.no_room.saturating_add(usize::from(!store.restore_control(change, now)));
}

/// Everything that a store and its bans hold, as rows: what a journal would have to hold had it been written anew. Requests
/// go on meanwhile; what they change is noted, and written after it.
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

/// What a rotation of the secret means for rows under the old one.
struct Rotation {
    key_id: KeyId,
    /// Subjects whose names are known: the old digest, and the present one.
    named: HashMap<Digest, Digest>,
}

impl Rotation {
    fn new(policy: &Policy, old: &Secret, rows: &[Row]) -> Self {
        let key_id = old.key_id();
        let before = policy.clone().with_key(old.digest_key());
        let own = rows.iter().filter(|row| row.kind == Kind::Named && row.old_key_id() == Some(key_id));
        let named = own.filter_map(|row| {
            let (subject, ban) = (row.digest()?, Ban::from_bytes(row.value.as_deref()?).ok()?);
            // A block of addresses is one subject, whichever of its addresses is asked for.
            let key = match &ban.whom {
                ListEntry::Address(net) => net.addr().to_string(),
                ListEntry::User(name) | ListEntry::Tenant(name) => name.to_string(),
            };
            let rekeyed = policy.rekeyed_standings(&before, ban.whom.layer(), &key);
            // A name that is hidden leads nowhere.
            rekeyed.into_iter().find(|(old, _)| *old == subject)
        });
        Self { key_id, named: named.collect() }
    }

    /// The digest of the same thing under the present secret, where its name is known. Accounts, and subjects that were
    /// never banned, have none: they move when they come back.
    fn new_key(&self, row: &Row, old: Digest, key: DigestKey) -> Option<Digest> {
        match row.kind {
            Kind::Ban => Ban::from_bytes(row.value.as_deref()?).ok().map(|ban| ban.whom.ban_id(key)),
            Kind::Standing | Kind::Named => self.named.get(&old).copied(),
            Kind::Account | Kind::Tenant | Kind::User => None,
        }
    }
}

enum Known {
    Standing(Standing),
    Account(Box<Account>),
    Ban(Ban),
}

fn read(kind: Kind, bytes: &[u8], now: Timestamp) -> Option<Known> {
    match kind {
        Kind::Standing => Standing::from_bytes(bytes).ok().map(Known::Standing),
        Kind::Account => Account::from_bytes(bytes).ok().map(Box::new).map(Known::Account),
        Kind::Ban | Kind::Named => Ban::from_bytes(bytes).ok().map(|ban| Known::Ban(ban.brought_back(now))),
        Kind::Tenant | Kind::User => None,
    }
}

/// Whoever a row was about that cannot be read is kept out for a while: what it said may have been a ban or a lock.
fn keep_out(journal: &Journal, row: &Row, key: Digest, store: &MemoryStore, now: Timestamp) -> bool {
    let until = now.plus(UNREADABLE_FOR);
    match row.kind {
        Kind::Standing => {
            let standing = Standing::banned(until);
            journal.standing(key, Some(&standing));
            store.restore_standing(key, standing, now)
        }
        Kind::Account => {
            let account = Account::locked(Factor::named(None), until);
            journal.account(key, Some(&account));
            store.restore_account(key, account)
        }
        // Nobody knows whom it was on; that it is gone is said where the damage is.
        Kind::Ban | Kind::Named | Kind::Tenant | Kind::User => {
            journal.note(row.kind, &row.key, None);
            true
        }
    }
}
