//! The secrets whose digests a store holds: a node with another secret would count everything under other keys.

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
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
/// first. In a Cluster the primary of the control partition answers.
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
    let stored = match connection.send_packed_command(&call).await.and_then(Value::extract_error) {
        Ok(Value::Array(stored)) => stored,
        Ok(_) => return Ok(None),
        // Another primary of the Cluster has the control partition, and is asked when it is connected.
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::Moved) => return Ok(None),
        Err(error) => return Err(error),
    };
    let texts = stored.into_iter().filter_map(|id| match id {
        Value::BulkString(id) => Some(String::from_utf8_lossy(&id).into_owned()),
        _ => None,
    });
    Ok(Some(texts.collect::<Vec<_>>()).filter(|stored| !stored.is_empty()))
}
