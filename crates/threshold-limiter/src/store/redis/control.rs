//! Bans and settings of operators, as a log that every node follows. The same as core's `ControlLog`, in structures of Redis, so
//! that a poll by a node that has read everything costs the same for one ban and for half a million.

use std::sync::LazyLock;

use threshold_core::control::{
    ControlChange, ControlKey, ControlPage, MAX_BANS, MAX_REMOVALS, MAX_SETTINGS, REMOVAL_KEPT,
};
use threshold_core::policy::Owner;
use threshold_core::{Answer, Format, Timestamp};

use super::keys;
use super::reply::{array, number};
use super::server::ServerScript;
use super::servers::Servers;
use crate::store::StoreError;

static ADD: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("control_add.lua")));
static READ: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("control_read.lua")));

/// Adds changes to the log, all or none.
pub(super) async fn add(servers: &Servers, changes: &[ControlChange]) -> Result<Answer, StoreError> {
    let names = ["meta", "order", "changes", "removals", "bans", "settings"].map(keys::control);
    let kept = REMOVAL_KEPT.micros().div_ceil(1_000);
    let bounds = [MAX_BANS as u64, MAX_SETTINGS as u64, kept, MAX_REMOVALS as u64];
    let mut args: Vec<Vec<u8>> = bounds.map(|bound| bound.to_string().into_bytes()).into();
    for change in changes {
        let until = change.until().map_or_else(String::new, end);
        args.extend([key_bytes(&change.key()), change.to_bytes(Format::PRESENT), until.into_bytes()]);
    }
    match servers.run(&ADD, &names, &args).await? {
        // A script that returns false, as this one does for a full log, answers with nil.
        ::redis::Value::Nil => Err(StoreError::Full),
        value => Ok(Answer::Controlled { number: number(Some(value))? }),
    }
}

/// Reads the changes after a number.
pub(super) async fn read(servers: &Servers, after: u64, most: usize) -> Result<Answer, StoreError> {
    let names = ["meta", "order", "changes"].map(keys::control);
    let args = [after.to_string(), most.to_string()].map(String::into_bytes);
    let mut parts = array(servers.run(&READ, &names, &args).await?)?.into_iter();
    let (last, forgotten) = (number(parts.next())?, number(parts.next())?);
    let began = Timestamp::from_micros(number(parts.next())?);
    let mut page = ControlPage { last, forgotten, began, changes: Vec::new() };
    while let Some(number_of_change) = parts.next() {
        let number = number(Some(number_of_change))?;
        let Some(::redis::Value::BulkString(bytes)) = parts.next() else { return Err(StoreError::Unavailable) };
        // A change that this release cannot read must not be skipped: it may be a ban.
        let change = ControlChange::from_bytes(&bytes).map_err(|_| StoreError::Unavailable)?;
        page.changes.push((number, change));
    }
    Ok(Answer::Control(Box::new(page)))
}

/// Returns when a change ends, as the score of a sorted set.
fn end(until: Timestamp) -> String {
    if until == Timestamp::MAX { "+inf".to_owned() } else { until.micros().div_ceil(1_000).to_string() }
}

/// Returns the member under which a change is stored. No two keys have the same.
fn key_bytes(key: &ControlKey) -> Vec<u8> {
    match key {
        ControlKey::Ban(id) => format!("b{:032x}", id.to_u128()).into_bytes(),
        ControlKey::Setting(owner, name) => {
            let kind = if *owner == Owner::User { 'u' } else { 't' };
            format!("{kind}{name}").into_bytes()
        }
    }
}
