//! The lists for operators: standings with a ban, and accounts with a lock.
//!
//! A record and the list of all of them are in different slots of a Cluster, so they cannot change in one step. The record decides;
//! the list is written after it and read with it. If a node dies in between, the ban is in force and missing from the list.

use ::redis::{Cmd, Value};
use threshold_core::lockout::Account;
use threshold_core::{Digest, Standing, Timestamp};

use super::keys::{self, RecordKey, RecordKind};
use super::reply::array;
use super::servers::Servers;
use threshold_limiter::store::{Kind, Listed, StoreError};

/// The number of members of a list that are looked at for each one that is added, so that records which are gone leave it.
const SAMPLE: usize = 2;

/// Adds records to their lists, in the background.
pub(super) fn add(servers: &Servers, records: Vec<RecordKey>) {
    if records.is_empty() {
        return;
    }
    let servers = servers.clone();
    tokio::spawn(async move {
        for record in records {
            let list = keys::list(record.kind, first_byte(record.digest()));
            let mut add = Cmd::new();
            // With equal scores Redis keeps the members in the order of their bytes.
            add.arg("ZADD").arg(&list).arg(0).arg(hex(record.digest()));
            if servers.send(&list, &add).await.is_ok() {
                drop_some(&servers, record.kind, &list).await;
            }
        }
    });
}

/// Removes some members of a list whose records are gone. Redis drops a record when it falls silent. One that is left may have
/// no ban or lock any more; it is skipped when the list is read.
async fn drop_some(servers: &Servers, kind: RecordKind, list: &str) {
    let mut sample = Cmd::new();
    sample.arg("ZRANDMEMBER").arg(list).arg(SAMPLE);
    let Ok(Value::Array(members)) = servers.send(list, &sample).await else { return };
    for key in members.into_iter().filter_map(digest) {
        let (name, mut exists) = (RecordKey::of_digest(kind, key).name(), Cmd::new());
        exists.arg("EXISTS").arg(&name);
        if let Ok(Value::Int(0)) = servers.send(&name, &exists).await {
            let mut remove = Cmd::new();
            remove.arg("ZREM").arg(list).arg(hex(key));
            let _ = servers.send(list, &remove).await;
        }
    }
}

/// Returns up to `limit` records after a key, in the order of their keys.
pub(super) async fn list(
    servers: &Servers,
    kind: Kind,
    after: Option<Digest>,
    limit: usize,
    now: Timestamp,
) -> Result<Vec<Listed>, StoreError> {
    let (mut listed, mut from) = (Vec::new(), after);
    for first in after.map_or(0, first_byte)..=u8::MAX {
        while listed.len() < limit {
            let page = page(servers, kind, first, from, limit).await?;
            // Every record of a page may be gone, so only an empty page is the end of a list.
            let Some(last) = page.last().copied() else { break };
            from = Some(last);
            let room = limit.saturating_sub(listed.len());
            listed.extend(read(servers, kind, page, now).await?.into_iter().take(room));
        }
        // Every key of the next list is larger than the last one of this list.
        from = None;
    }
    Ok(listed)
}

/// Returns up to `limit` members of the list of one first byte.
async fn page(
    servers: &Servers,
    kind: Kind,
    first: u8,
    after: Option<Digest>,
    limit: usize,
) -> Result<Vec<Digest>, StoreError> {
    let from = after.map_or_else(|| "-".to_owned(), |after| format!("({}", hex(after)));
    let (list, mut range) = (keys::list(record_kind(kind), first), Cmd::new());
    range.arg("ZRANGE").arg(&list).arg(from).arg("+").arg("BYLEX");
    range.arg("LIMIT").arg(0).arg(limit);
    let members = array(servers.send(&list, &range).await?)?;
    Ok(members.into_iter().filter_map(digest).collect())
}

/// Returns the records under these keys, as far as they are there and belong into the list.
async fn read(servers: &Servers, kind: Kind, keys: Vec<Digest>, now: Timestamp) -> Result<Vec<Listed>, StoreError> {
    let names: Vec<String> = keys.iter().map(|key| RecordKey::of_digest(record_kind(kind), *key).name()).collect();
    let values = servers.read_all(&names).await?;
    let records = keys.into_iter().zip(values).filter_map(|(key, value)| {
        let bytes = value?;
        let record = RecordKey::of_digest(record_kind(kind), key);
        // One that cannot be read keeps no other from the list.
        let read = match kind {
            Kind::Banned => Standing::from_bytes(&bytes).map(|standing| {
                let until = standing.banned_until().filter(|until| *until > now)?;
                Some(Listed::Banned { key, until })
            }),
            Kind::Accounts => {
                Account::from_bytes(&bytes).map(|account| Some(Listed::Account { key, account: Box::new(account) }))
            }
        };
        read.map_err(|error| servers.errors().unreadable(record, error)).ok().flatten()
    });
    Ok(records.collect())
}

fn record_kind(kind: Kind) -> RecordKind {
    match kind {
        Kind::Banned => RecordKind::Standing,
        Kind::Accounts => RecordKind::Account,
    }
}

fn hex(key: Digest) -> String {
    format!("{:032x}", key.to_u128())
}

fn digest(member: Value) -> Option<Digest> {
    let Value::BulkString(text) = member else { return None };
    u128::from_str_radix(std::str::from_utf8(&text).ok()?, 16).ok().map(Digest::from_u128)
}

fn first_byte(key: Digest) -> u8 {
    key.to_u128().to_be_bytes()[0]
}
