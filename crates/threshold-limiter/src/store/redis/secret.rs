//! The secrets whose digests a store holds: a node with another secret would count everything under other keys.

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, RedisError, Value};
use threshold_core::KeyId;

use super::keys;

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
/// first. In a Cluster it goes to the primary of the control partition.
pub(super) async fn check(
    connection: &mut MultiplexedConnection,
    ids: SecretIds,
) -> Result<Option<Vec<String>>, RedisError> {
    let mut call = Cmd::new();
    // EVAL, because it runs once per connection and the server may not have the script.
    call.arg("EVAL").arg(SCRIPT).arg(1).arg(keys::control("secrets")).arg(ids.present.to_string());
    if let Some(old) = ids.old {
        call.arg(old.to_string());
    }
    let Value::Array(stored) = connection.send_packed_command(&call).await.and_then(Value::extract_error)? else {
        return Ok(None);
    };
    let texts = stored.into_iter().filter_map(|id| match id {
        Value::BulkString(id) => Some(String::from_utf8_lossy(&id).into_owned()),
        _ => None,
    });
    Ok(Some(texts.collect::<Vec<_>>()).filter(|stored| !stored.is_empty()))
}
