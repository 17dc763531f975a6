//! Moving records from the keys of an old secret to those of the current one, on a Cluster, where both are in different slots.
//!
//! A record is copied first and deleted then. If a node dies in between, the original stays and counts nowhere but on nodes that have
//! only the old secret.

use ::redis::{Cmd, Value};
use threshold_core::command::KeyMoves;
use threshold_core::{Answer, Digest};

use super::keys::{RecordKey, RecordKind};
use super::servers::Servers;
use super::{listed, reply};
use threshold_limiter::store::StoreError;

/// Moves each record to its new key, unless there is a record under the new key already: that one is more recent.
pub(super) async fn rekey(servers: &Servers, moves: &KeyMoves) -> Result<Answer, StoreError> {
    let balances = moves.balances.iter().map(|(old, new, _)| (RecordKind::Balance, *old, *new));
    let standings = moves.standings.iter().map(|(old, new)| (RecordKind::Standing, *old, *new));
    let accounts = moves.accounts.iter().map(|(old, new)| (RecordKind::Account, *old, *new));
    for (kind, old, new) in balances.chain(standings).chain(accounts) {
        move_record(servers, kind, old, new).await?;
    }
    Ok(Answer::Done)
}

async fn move_record(servers: &Servers, kind: RecordKind, old: Digest, new: Digest) -> Result<(), StoreError> {
    let record = RecordKey::of_digest(kind, new);
    let (old, new) = (RecordKey::of_digest(kind, old).name(), record.name());
    let Some(bytes) = servers.read_all(std::slice::from_ref(&old)).await?.pop().flatten() else { return Ok(()) };
    let mut expiry = Cmd::new();
    expiry.arg("PEXPIRETIME").arg(&old);
    let mut copy = Cmd::new();
    copy.arg("SET").arg(&new).arg(&bytes).arg("NX");
    match servers.send(&old, &expiry).await? {
        // Without an end, as the reset of an account.
        Value::Int(-1) => {}
        time @ Value::Int(1..) => {
            copy.arg("PXAT").arg(reply::number(Some(time))?);
        }
        // It has expired in between.
        _ => return Ok(()),
    }
    // Nothing is set where there is a record. Then the old one is that of a node with the old secret alone, and stays in force there.
    if servers.send(&new, &copy).await? == Value::Nil {
        return Ok(());
    }
    if kind != RecordKind::Balance {
        // What has no ban or lock is left out when the list is read.
        listed::add(servers, vec![record]);
    }
    let mut delete = Cmd::new();
    delete.arg("DEL").arg(&old);
    servers.send(&old, &delete).await?;
    Ok(())
}
