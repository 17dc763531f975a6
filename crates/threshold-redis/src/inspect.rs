//! What a server says about itself: whether it can be used, and what an operator should change.

use std::sync::Arc;

use ::redis::{Cmd, Value};
use futures_util::future::join_all;
use threshold_core::Timestamp;

use super::RedisOpenError;
use super::connect;
use super::reply;
use super::server::Server;

/// Names the commands that the user needs and may not run.
const RIGHTS: &str = include_str!("rights.lua");
/// The oldest version whose scripts declare what they do, and which reads the time at which a key expires.
const OLDEST: u32 = 7;
/// Clocks that are further apart are reported.
const MOST_SECONDS_APART: u64 = 2;
/// Fewer keys on one primary say nothing about how they are spread.
const FEWEST_SKEWED: u64 = 10_000;

/// Checks the version, the role and the user's rights of a server. Returns warnings for operators.
///
/// `INFO` is asked and not `CONFIG`, which managed services often forbid.
pub(super) async fn inspect(server: &Arc<Server>, is_single: bool) -> Result<Vec<String>, RedisOpenError> {
    let place = place(server);
    let text = info(server).await.map_err(|error| RedisOpenError::Connect(format!("{place}: {error}")))?;
    let warnings = check(&text, is_single, place.clone())?;
    match lacking(server).await {
        Ok(None) => Ok(warnings),
        Ok(Some(error)) | Err(error) => Err(RedisOpenError::Connect(format!("{place}: {error}"))),
    }
}

/// Returns what an operator should change about servers that are in use.
pub(super) async fn examine(servers: &[Arc<Server>], is_single: bool, now: Timestamp) -> Vec<String> {
    let asked = servers.iter().map(|server| async move { (place(server), info(server).await, lacking(server).await) });
    let (mut found, mut keys) = (Vec::new(), Vec::new());
    for (server, (place, answer, lacking)) in servers.iter().zip(join_all(asked).await) {
        let checked = answer.and_then(|text| match check(&text, is_single, place.clone()) {
            Ok(warnings) => Ok((text, warnings)),
            Err(error) => Err(error.to_string()),
        });
        match checked {
            Ok((text, warnings)) => {
                let lacking = lacking.unwrap_or_else(Some);
                let present = [lacking, nearly_full(&text), clock(&text, now)].into_iter().flatten();
                found.extend(warnings.into_iter().chain(present).map(|warning| format!("{place}: {warning}")));
                keys.push((place, number_of_keys(&text)));
            }
            // Why there is no connection says more than that there is none.
            Err(error) => found.push(server.absence().unwrap_or_else(|| format!("{place}: {error}"))),
        }
    }
    found.extend(skewed(&keys));
    found
}

/// Returns the address of a server. That of a primary that Sentinels name changes.
fn place(server: &Server) -> String {
    server.address().map_or_else(|| "the primary".to_owned(), ToString::to_string)
}

async fn info(server: &Arc<Server>) -> Result<String, String> {
    let mut ask = Cmd::new();
    ask.arg("INFO");
    match server.send(&ask).await.map_err(|error| connect::explain(&error))? {
        Value::BulkString(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Value::VerbatimString { text, .. } => Ok(text),
        _ => Ok(String::new()),
    }
}

/// Returns which commands the user of this node lacks. Without one of them half of a step could be written.
async fn lacking(server: &Arc<Server>) -> Result<Option<String>, String> {
    let mut ask = Cmd::new();
    ask.arg("EVAL").arg(RIGHTS).arg(0);
    let refused = server.send(&ask).await.map_err(|error| connect::explain(&error))?;
    let refused = reply::array(refused).unwrap_or_default().into_iter().filter_map(|name| match name {
        Value::BulkString(name) => String::from_utf8(name).ok(),
        _ => None,
    });
    let refused: Vec<String> = refused.collect();
    let names = refused.join(", ");
    Ok((!refused.is_empty()).then(|| format!("the ACL of the user lacks {names}: docs/scale.md lists the rules")))
}

fn field<'i>(info: &'i str, name: &str) -> Option<&'i str> {
    let mut fields = info.lines().filter_map(|line| line.trim().split_once(':'));
    fields.find(|(own, _)| *own == name).map(|(_, value)| value)
}

fn number(info: &str, name: &str) -> Option<u64> {
    field(info, name)?.parse().ok()
}

/// Four fifths of the memory that the server may use.
fn nearly_full(info: &str) -> Option<String> {
    let (used, most) = (number(info, "used_memory")?, number(info, "maxmemory").filter(|most| *most > 0)?);
    let percent = used.saturating_mul(100).checked_div(most)?;
    (percent >= 80).then(|| format!("{percent} % of maxmemory is used. Raise it: a full server refuses every write"))
}

/// Decisions follow the server's clock, and everything else, such as tokens and logs, this machine's.
fn clock(info: &str, now: Timestamp) -> Option<String> {
    let seconds = number(info, "server_time_usec")?.abs_diff(now.micros()).checked_div(1_000_000)?;
    (seconds >= MOST_SECONDS_APART)
        .then(|| format!("its clock and the clock of this machine are {seconds} s apart. Synchronise both by NTP"))
}

fn number_of_keys(info: &str) -> u64 {
    let databases = info.lines().filter(|line| line.starts_with("db"));
    let keys = databases.filter_map(|line| line.split_once("keys=")?.1.split(',').next()?.parse::<u64>().ok());
    keys.sum()
}

/// A primary with more than twice the keys of an average one.
fn skewed(keys: &[(String, u64)]) -> Option<String> {
    let (place, most) = keys.iter().max_by_key(|(_, keys)| *keys)?;
    let all: u64 = keys.iter().map(|(_, keys)| *keys).sum();
    let average = all.checked_div(u64::try_from(keys.len()).ok()?)?;
    (keys.len() > 1 && *most >= FEWEST_SKEWED && *most > average.saturating_mul(2)).then(|| {
        format!(
            "{place} has {most} of {all} keys: partitions are skewed. All keys of one tenant or user are on one primary; move \
             slots away from it (redis-cli --cluster rebalance)"
        )
    })
}

fn check(info: &str, is_single: bool, server: String) -> Result<Vec<String>, RedisOpenError> {
    let field = |name: &str| field(info, name);
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

    /// Woken by swapping the two amounts, by a maximum of 0 as a full server, and by counting expiries as keys.
    #[test]
    fn what_is_nearly_full_late_or_skewed_is_found() {
        let text =
            |used: u64, most: u64| format!("used_memory:{used}\r\nmaxmemory:{most}\r\nserver_time_usec:10000000\r\n");
        assert_eq!(nearly_full(&text(79, 100)), None);
        assert!(nearly_full(&text(80, 100)).unwrap().starts_with("80 %"));
        assert_eq!(nearly_full(&text(80, 0)), None, "0 is no bound");
        let apart = |now| clock(&text(0, 0), Timestamp::from_micros(now));
        assert_eq!((apart(11_900_000), apart(8_100_000)), (None, None));
        assert!(apart(40_000_000).unwrap().contains("30 s"));
        assert!(apart(0).unwrap().contains("10 s"));
        assert_eq!(number_of_keys("# Keyspace\r\ndb0:keys=7,expires=5,avg_ttl=0\r\ndb3:keys=1,expires=1\r\n"), 8);
        let keys = |counts: &[u64]| skewed(&counts.iter().map(|keys| ("h:1".to_owned(), *keys)).collect::<Vec<_>>());
        assert_eq!(keys(&[1_000_000]), None, "one server has all keys");
        assert_eq!(keys(&[20_000, 10_000, 15_000]), None);
        assert_eq!(keys(&[9_000, 0, 0]), None, "too few to say");
        assert!(keys(&[90_000, 10_000, 10_000]).unwrap().contains("90000 of 110000"));
    }
}
