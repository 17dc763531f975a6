//! What a server says about itself: whether it can be used, and what an operator should change.

use std::sync::Arc;

use ::redis::{Cmd, Value};

use super::RedisOpenError;
use super::connect;
use super::server::Server;

/// The oldest version whose scripts declare what they do, and which reads the time at which a key expires.
const OLDEST: u32 = 7;

/// Checks the version and the role of a server. Returns warnings for operators.
///
/// `INFO` is asked and not `CONFIG`, which managed services often forbid.
pub(super) async fn inspect(server: &Arc<Server>, is_single: bool) -> Result<Vec<String>, RedisOpenError> {
    let mut ask = Cmd::new();
    ask.arg("INFO");
    // The address of a primary that Sentinels name changes.
    let place = server.address().map_or_else(|| "the primary".to_owned(), ToString::to_string);
    let reply = server.send(&ask).await;
    let reply = reply.map_err(|error| RedisOpenError::Connect(format!("{place}: {}", connect::explain(&error))))?;
    let text = match reply {
        Value::BulkString(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Value::VerbatimString { text, .. } => text,
        _ => String::new(),
    };
    check(&text, is_single, place)
}

fn check(info: &str, is_single: bool, server: String) -> Result<Vec<String>, RedisOpenError> {
    let field = |name: &str| {
        let mut fields = info.lines().filter_map(|line| line.trim().split_once(':'));
        fields.find(|(own, _)| *own == name).map(|(_, value)| value)
    };
    let version = field("redis_version").unwrap_or("unknown");
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    // A server that does not state its version is used all the same.
    if major.is_some_and(|major| major < OLDEST) {
        return Err(RedisOpenError::Version { server, version: version.to_owned() });
    }
    if field("role") == Some("slave") {
        return Err(RedisOpenError::Replica { server });
    }
    // It would refuse two thirds of all keys.
    if is_single && field("cluster_enabled") == Some("1") {
        return Err(RedisOpenError::ClusterNode { server });
    }
    let evicts = field("maxmemory_policy").filter(|policy| *policy != "noeviction");
    let warning = |policy: &str| {
        format!(
            "maxmemory-policy is {policy}: when memory is full, Redis drops keys that still count, and their limits begin \
             again. Set it to noeviction"
        )
    };
    Ok(evicts.map(warning).into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_too_old_or_a_replica_is_refused_and_eviction_is_warned_about() {
        let info = |version, role, policy| {
            let text = format!("# Server\r\nredis_version:{version}\r\nrole:{role}\r\nmaxmemory_policy:{policy}\r\n");
            check(&text, true, "h:1".to_owned())
        };
        assert_eq!(info("7.0.15", "master", "noeviction").unwrap(), [""; 0]);
        assert!(info("7.0.15", "master", "allkeys-lru").unwrap()[0].contains("allkeys-lru"));
        assert!(info("8.2.1", "master", "volatile-ttl").unwrap()[0].contains("volatile-ttl"));
        let refusal = |version, role| info(version, role, "noeviction").unwrap_err().to_string();
        assert_eq!(refusal("6.2.14", "master"), "h:1 has Redis 6.2.14, which is too old: 7 or newer is needed");
        assert_eq!(refusal("7.2.0", "slave"), "h:1 is a replica: give the address of the primary");
    }
}
