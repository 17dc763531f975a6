//! The secrets whose digests a store holds: a node with another secret would count everything under other keys.

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, RedisError, Value};
use threshold_core::KeyId;

use super::keys;
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

/// Records the present secret of this node in the store, and returns the key ids that the store has in place of it.
///
/// Run on every new connection, because a server may have lost its data, and a node with another secret may have been there
/// first. In a Cluster the primary of the control partition answers.
pub(super) async fn check(
    connection: &mut MultiplexedConnection,
    ids: SecretIds,
) -> Result<Option<Vec<String>>, RedisError> {
    match connection.send_packed_command(&call(ids)).await.and_then(Value::extract_error) {
        Ok(reply) => Ok(others(reply)),
        // Another primary of the Cluster has the control partition, or is about to have it, and is asked when it is connected.
        Err(error) if error.redirect_node().is_some() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Does the same on a store that may have lost its data without breaking the connection.
pub(super) async fn repeat(servers: &Servers, ids: SecretIds) -> Result<Option<Vec<String>>, CallError> {
    servers.send(&keys::control("secrets"), &call(ids)).await.map(others)
}

fn call(ids: SecretIds) -> Cmd {
    let mut call = Cmd::new();
    // EVAL, because it is run seldom and the server may not have the script.
    call.arg("EVAL").arg(SCRIPT).arg(1).arg(keys::control("secrets")).arg(ids.present.to_string());
    if let Some(old) = ids.old {
        call.arg(old.to_string());
    }
    call
}

/// Returns the key ids of other secrets, if the store has those.
fn others(reply: Value) -> Option<Vec<String>> {
    let Value::Array(stored) = reply else { return None };
    let texts = stored.into_iter().filter_map(|id| match id {
        Value::BulkString(id) => Some(String::from_utf8_lossy(&id).into_owned()),
        _ => None,
    });
    Some(texts.collect::<Vec<_>>()).filter(|stored| !stored.is_empty())
}
