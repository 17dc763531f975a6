//! The secrets whose digests a store holds: a node with another secret would count everything under other keys.
//!
//! A rotation begins with the first node that has a new secret and the stored one as its old secret. It ends when a node has the new
//! one alone: `secret.lua` retires the others then, unless a living node still has one of them as its present secret. A node that
//! has only a retired secret is refused.

use std::fmt;

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, RedisError, Value};
use threshold_core::KeyId;

use super::RedisOpenError;
use super::keys;
use super::nodes::{LIFE, Member};
use super::server::CallError;
use super::servers::Servers;

const SCRIPT: &str = include_str!("secret.lua");

/// The key ids of a node's secrets.
#[derive(Debug, Clone, Copy)]
pub(super) struct SecretIds {
    pub(super) present: KeyId,
    /// The secret before, while it is rotated.
    pub(super) old: Option<KeyId>,
}

/// What the store says of a node's secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Checked {
    /// They are in force, but for the old one if it is retired.
    Known { retired_old: Option<Retired> },
    /// The node must not count here.
    Refused(SecretRefusal),
}

impl Checked {
    pub(super) fn is_refused(&self) -> bool {
        matches!(self, Self::Refused(_))
    }
}

/// Why a node must not use a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SecretRefusal {
    /// The store has the key ids of others.
    Other { stored: String },
    /// The node's secret was retired.
    Retired(Retired),
    /// Another node still has only the old secret.
    Mixed { node: String, old: String },
}

impl SecretRefusal {
    pub(super) fn of(self, own: KeyId) -> RedisOpenError {
        match self {
            Self::Other { stored } => RedisOpenError::OtherSecret { stored, own },
            Self::Retired(Retired { at, by }) => RedisOpenError::RetiredSecret { own, at: Date(at).to_string(), by },
            Self::Mixed { node, old } => RedisOpenError::MixedSecrets { node, old, own },
        }
    }
}

/// The end of a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Retired {
    /// When, in Unix milliseconds.
    at: u64,
    /// The key id of the secret that has replaced it.
    by: String,
}

impl Retired {
    fn parse(text: &str) -> Option<Self> {
        let (at, by) = text.split_once(' ')?;
        Some(Self { at: at.parse().ok()?, by: by.to_owned() })
    }
}

/// Checks the secrets of a node on a new connection, and records them.
///
/// Run on every new connection, because a server may have lost its data, and a node with another secret may have been there
/// first. In a Cluster the primary of the control partition answers.
pub(super) async fn check(connection: &mut MultiplexedConnection, ids: SecretIds) -> Result<Checked, RedisError> {
    match connection.send_packed_command(&call(ids, Occasion::Connect)).await.and_then(Value::extract_error) {
        Ok(reply) => Ok(checked(reply)),
        // Another primary of the Cluster has the control partition, or is about to have it, and is asked when it is connected.
        Err(error) if error.redirect_node().is_some() => Ok(Checked::Known { retired_old: None }),
        Err(error) => Err(error),
    }
}

/// Checks the secrets of a node that starts: it may begin or end a rotation, or has to wait with the end.
pub(super) async fn start(servers: &Servers, ids: SecretIds) -> Result<Checked, CallError> {
    servers.send(&keys::control("secrets"), &call(ids, Occasion::Start)).await.map(checked)
}

/// Checks them on a store that may have lost its data without breaking the connection.
pub(super) async fn repeat(servers: &Servers, ids: SecretIds) -> Result<Checked, CallError> {
    servers.send(&keys::control("secrets"), &call(ids, Occasion::Connect)).await.map(checked)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Occasion {
    Start,
    Connect,
}

fn call(ids: SecretIds, occasion: Occasion) -> Cmd {
    let mut call = Cmd::new();
    // EVAL, because it is run seldom and the server may not have the script.
    call.arg("EVAL").arg(SCRIPT).arg(4);
    for part in ["secrets", "rotations", "nodes", "members"] {
        call.arg(keys::control(part));
    }
    call.arg(ids.present.to_string()).arg(ids.old.map_or_else(|| "-".to_owned(), |old| old.to_string()));
    // One argument for both: before the login a server takes no more than ten, and would not say that the login is missing.
    let occasion = if occasion == Occasion::Start { "start" } else { "connect" };
    call.arg(format!("{} {occasion}", LIFE.as_millis()));
    call
}

fn checked(reply: Value) -> Checked {
    let Value::Array(parts) = reply else { return Checked::Known { retired_old: None } };
    let texts: Vec<String> = parts
        .into_iter()
        .filter_map(|part| match part {
            Value::BulkString(text) => Some(String::from_utf8_lossy(&text).into_owned()),
            _ => None,
        })
        .collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let refusal = match texts.as_slice() {
        ["other", stored @ ..] => SecretRefusal::Other { stored: stored.join(", ") },
        ["retired", retired] => {
            let unknown = || Retired { at: 0, by: (*retired).to_owned() };
            SecretRefusal::Retired(Retired::parse(retired).unwrap_or_else(unknown))
        }
        ["mixed", node, old] => SecretRefusal::Mixed { node: (*node).to_owned(), old: (*old).to_owned() },
        ["ok", retired] => return Checked::Known { retired_old: Retired::parse(retired) },
        _ => return Checked::Known { retired_old: None },
    };
    Checked::Refused(refusal)
}

/// A node is no longer said to have another secret when it has sent no heartbeat for so long, in milliseconds.
const SILENT: u64 = 3_000;

/// Returns what an operator should change about the secrets of these nodes.
pub(super) fn problems(own: SecretIds, checked: &Checked, members: &[Member]) -> Vec<String> {
    let (present, mut found) = (own.present.to_string(), Vec::new());
    if let Checked::Refused(refusal) = checked {
        // What it says is to be done first. The others are right, and advice about them would contradict it.
        found.push(refusal.clone().of(own.present).to_string());
        return found;
    }
    // One that was stopped a moment ago is still in the set.
    let newest = members.iter().map(|member| member.beat).max().unwrap_or_default();
    let is_live = |member: &&Member| member.beat.saturating_add(SILENT) > newest;
    for Member { name, secrets, .. } in members.iter().filter(is_live) {
        let Some((theirs, old)) = secrets.as_ref().filter(|(theirs, _)| *theirs != present) else { continue };
        found.push(if old.as_ref() == Some(&present) {
            format!(
                "node {name} has the secret {theirs}, and this node still has {present}: the rotation is not complete. Restart this node \
                 with {theirs} as THRESHOLD_SECRET and {present} as THRESHOLD_SECRET_OLD"
            )
        } else {
            format!(
                "node {name} has only the secret {theirs}, and this node {present}: both admit the same requests. Restart all nodes \
                 with the same THRESHOLD_SECRET, and the one before as THRESHOLD_SECRET_OLD"
            )
        });
    }
    found
}

/// Returns that the old secret of a node is not needed any more.
pub(super) fn retired(own: SecretIds, checked: &Checked) -> Option<String> {
    let (Checked::Known { retired_old: Some(Retired { at, by }) }, Some(old)) = (checked, own.old) else { return None };
    Some(format!("the old secret {old} was retired on {} by a node with {by}: THRESHOLD_SECRET_OLD can go", Date(*at)))
}

/// Unix milliseconds, shown as a date and a time of day in UTC.
struct Date(u64);

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = i64::try_from(self.0).ok().and_then(|millis| jiff::Timestamp::from_millisecond(millis).ok());
        match time {
            Some(time) => write!(f, "{}", time.strftime("%Y-%m-%d %H:%M UTC")),
            None => f.write_str("an unknown day"),
        }
    }
}
