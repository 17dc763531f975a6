//! Bans and settings of operators, as a log that every node follows. The same as core's `ControlLog`, in structures of Redis, so
//! that a poll by a node that has read everything costs the same for one ban and for half a million.

use std::sync::LazyLock;
use std::time::Duration;

use threshold_core::control::{
    ControlChange, ControlKey, ControlPage, MAX_BANS, MAX_REMOVALS, MAX_SETTINGS, REMOVAL_KEPT,
};
use threshold_core::policy::Owner;
use threshold_core::{Answer, Format, Timestamp};

use super::keys;
use super::reply::{array, number};
use super::server::{ServerScript, jittered};
use super::servers::Servers;
use threshold_limiter::host::random_id;
use threshold_limiter::store::{StoreError, StoreErrorKind};

static ADD: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("control_add.lua")));
static READ: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("control_read.lua")));

/// The largest number of changes in one call. The server answers nobody else meanwhile, and takes some 15 microseconds for each.
const PIECE: usize = 1_000;
/// How long many changes may be under way without another piece, in milliseconds. After that their node counts as dead, and another
/// one may begin.
const LEASE: u64 = 10_000;
/// The pause before another node's changes are looked at again, and how often that is done.
const BUSY_PAUSE: Duration = Duration::from_millis(100);
const MAX_BUSY: usize = 300;
/// What is said of a change that another node's changes have kept out.
const BUSY: &str = "another node changes many bans or settings at the moment";

/// One call of `control_add.lua`.
#[derive(Debug, Default)]
struct Piece<'c> {
    changes: &'c [ControlChange],
    /// The number of removals that follow in later pieces: until then the log may hold so many more.
    to_remove: usize,
    /// The latest number that the caller has read, if the log must have no later one.
    after: Option<u64>,
    /// The id of the changes, if there are several pieces or `after` is checked.
    id: &'c str,
    is_first: bool,
    is_last: bool,
}

/// The reply of `control_add.lua`.
#[derive(Debug, Clone, Copy)]
enum Added {
    Number(u64),
    Full,
    Outdated,
    /// Changes in several pieces are under way on another node.
    Busy,
    /// This node took so long between two pieces that another one has begun.
    Expired,
}

/// Adds changes to the log, all or none.
pub(super) async fn add(servers: &Servers, changes: &[ControlChange]) -> Result<Answer, StoreError> {
    match add_piece(servers, &Piece { changes, ..Piece::default() }).await? {
        Added::Number(number) => Ok(Answer::Controlled { number }),
        Added::Full => Err(full(servers)),
        Added::Outdated | Added::Busy | Added::Expired => {
            servers.errors().count(StoreErrorKind::Conflict, BUSY);
            Err(StoreError::Unavailable)
        }
    }
}

/// Adds many changes to the log, a thousand at a time, unless there are changes after the number that the caller has read.
pub(super) async fn add_all(
    servers: &Servers,
    changes: &[ControlChange],
    after: Option<u64>,
) -> Result<Answer, StoreError> {
    let id = format!("{:032x}", random_id().to_u128());
    let is_removal = |change: &&ControlChange| change.until().is_none();
    let (mut busy, mut last, mut rest) = (0_usize, None, changes);
    while !rest.is_empty() || last.is_none() {
        let (changes, later) = rest.split_at(PIECE.min(rest.len()));
        let to_remove = later.iter().filter(is_removal).count();
        let (is_first, is_last) = (last.is_none(), later.is_empty());
        let piece = Piece { changes, to_remove, after: after.filter(|_| is_first), id: &id, is_first, is_last };
        match add_piece(servers, &piece).await? {
            Added::Number(number) => (last, rest) = (Some(number), later),
            Added::Full => return Err(full(servers)),
            Added::Outdated => return Ok(Answer::Outdated),
            Added::Busy if busy < MAX_BUSY => {
                busy = busy.saturating_add(1);
                tokio::time::sleep(jittered(BUSY_PAUSE)).await;
            }
            Added::Busy | Added::Expired => {
                servers.errors().count(StoreErrorKind::Conflict, BUSY);
                return Err(StoreError::Timeout);
            }
        }
    }
    Ok(Answer::Controlled { number: last.unwrap_or(0) })
}

fn full(servers: &Servers) -> StoreError {
    servers.errors().count(StoreErrorKind::Full, "there are as many bans or settings as a store holds");
    StoreError::Full
}

async fn add_piece(servers: &Servers, piece: &Piece<'_>) -> Result<Added, StoreError> {
    let names = ["meta", "order", "changes", "removals", "bans", "settings", "import"].map(keys::control);
    let kept = REMOVAL_KEPT.micros().div_ceil(1_000);
    let bans = MAX_BANS.saturating_add(piece.to_remove) as u64;
    let bounds = [bans, MAX_SETTINGS as u64, kept, MAX_REMOVALS as u64, LEASE];
    let mut args: Vec<Vec<u8>> = bounds.map(|bound| bound.to_string().into_bytes()).into();
    let place = if piece.is_first { "first" } else { "later" };
    let end = if piece.is_last { "last" } else { "more" };
    let after = piece.after.map_or_else(String::new, |after| after.to_string());
    args.extend([after.as_str(), piece.id, place, end].map(|text| text.as_bytes().to_vec()));
    for change in piece.changes {
        let until = change.until().map_or_else(String::new, end_of);
        args.extend([key_bytes(&change.key()), change.to_bytes(Format::PRESENT), until.into_bytes()]);
    }
    match servers.run(&ADD, &names, &args).await? {
        // A script that returns false, as this one does for a full log, answers with nil.
        ::redis::Value::Nil => Ok(Added::Full),
        ::redis::Value::BulkString(word) if word == b"outdated" => Ok(Added::Outdated),
        ::redis::Value::BulkString(word) if word == b"busy" => Ok(Added::Busy),
        ::redis::Value::BulkString(word) if word == b"expired" => Ok(Added::Expired),
        value => Ok(Added::Number(number(Some(value))?)),
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
        let change = ControlChange::from_bytes(&bytes).map_err(|error| {
            let text = format_args!("change {number} of bans and settings: {error}");
            servers.errors().count(StoreErrorKind::UnreadableRecord, text);
            StoreError::Unavailable
        })?;
        page.changes.push((number, change));
    }
    Ok(Answer::Control(Box::new(page)))
}

/// Returns when a change ends, as the score of a sorted set.
fn end_of(until: Timestamp) -> String {
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
