//! Errors are counted by kind, and what the store handles by itself is none.

use std::time::Duration;

use threshold_core::DigestKey;
use threshold_limiter::metrics::Metrics;
use threshold_limiter::store::{Store as _, StoreErrorKind};
use threshold_limiter::{Facts, Limiter, Policy};
use threshold_redis::{RedisOptions, RedisStore};

use crate::process::{RedisServer, secret};

/// The first rule is decided by a script alone. A ladder needs copies of the records.
const RULES: [&str; 2] = ["", "ladder = 'strict'"];

fn node(store: RedisStore, more: &str) -> Limiter<RedisStore> {
    let policy = format!("[[rule]]\nname = 'user'\nper = ['user']\nlimit = '2/day'\non_store_error = 'closed'\n{more}");
    let builder = Limiter::builder(Policy::parse(&policy, &|_| None).unwrap()).store(store);
    builder.digest_key(DigestKey::new([7; 16])).build().unwrap()
}

fn ada() -> Facts<'static> {
    Facts { user: Some("ada"), ..Facts::default() }
}

/// Returns the counts, each by its name.
fn counts(node: &Limiter<RedisStore>) -> Vec<(&'static str, u64)> {
    node.store().errors().iter().map(|error| (error.kind.name(), error.count)).collect()
}

/// Another program, or a newer release, wrote under the key of a balance or a standing. The check was decided without the
/// store, and nothing named the record.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_cannot_be_read_is_counted_and_named() {
    let server = RedisServer::start();
    for more in RULES {
        for pattern in ["th:*b:*", "th:*s:*"] {
            server.cli(&["FLUSHALL"]);
            let node = node(server.open().await, more);
            // The last one strikes.
            for expected in [true, true, false] {
                assert_eq!(node.check_async(&ada()).await.unwrap().allowed(), expected);
            }
            assert_eq!(counts(&node), []);
            let key = server.cli(&["KEYS", pattern]);
            let key = key.trim();
            if key.is_empty() {
                assert_eq!((pattern, more), ("th:*s:*", ""), "only a ladder has standings");
                continue;
            }
            server.cli(&["SET", key, "theirs"]);
            // Longer than a node repeats the denial.
            tokio::time::sleep(Duration::from_millis(1_100)).await;
            assert!(node.check_async(&ada()).await.unwrap().degraded.is_some());
            let errors = node.store().errors();
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert_eq!(errors[0].kind, StoreErrorKind::UnreadableRecord, "{errors:?}");
            assert!(errors[0].last.contains(key) && errors[0].is_recent(), "{errors:?}");
            let problem = node.store().present_problem().unwrap();
            assert!(problem.contains("unreadable_record") && problem.contains(key), "{problem}");
        }
    }
}

/// `doctor` ended lines with a word that belongs to the client's library: `not connected - Client`.
#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_says_why_there_is_no_connection() {
    let mut server = RedisServer::start();
    let store = server.open().await;
    server.kill();
    while store.is_connected() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let found = store.examine(threshold_core::Timestamp::EPOCH).await;
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("socket: ") && !found[0].contains("Client"), "{found:?}");
    assert!(!found[0].ends_with("not connected"), "{found:?}");
}

/// Woken by counting what a call has met on its way.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_store_handles_by_itself_is_no_error() {
    let server = RedisServer::start();
    let node = node(server.open().await, RULES[1]);
    for _ in 0..3 {
        // The scripts are gone: each is sent again with its text.
        server.cli(&["SCRIPT", "FLUSH"]);
        assert!(node.check_async(&ada()).await.unwrap().degraded.is_none());
    }
    assert_eq!((counts(&node), node.store().present_problem()), (vec![], None));
}

/// Redis was stopped in the middle of a call, and killed later. The call counts as a timeout, and later ones as failures to connect.
#[tokio::test(flavor = "multi_thread")]
async fn a_missed_deadline_is_a_timeout_and_a_killed_server_none() {
    let mut server = RedisServer::start();
    let options = RedisOptions::new(server.url().parse().unwrap(), secret(9));
    let node = node(RedisStore::open(options.deadline(Duration::from_millis(200))).await.unwrap(), "");
    let metrics = Metrics::new();
    let node = std::sync::Arc::new(node);
    metrics.watch(&node);
    let shown = |line: &str| metrics.text().lines().any(|own| own == line);
    assert!(shown("threshold_store_call_errors_total{kind=\"timeout\"} 0"));
    server.cli(&["CLIENT", "PAUSE", "60000", "ALL"]);
    assert!(node.check_async(&ada()).await.unwrap().degraded.is_some());
    assert!(!shown("threshold_store_call_errors_total{kind=\"timeout\"} 0"), "{:?}", counts(&node));
    assert!(!counts(&node).iter().any(|(kind, _)| *kind == "other"), "{:?}", counts(&node));
    server.kill();
    for _ in 0..500 {
        assert!(node.check_async(&ada()).await.unwrap().degraded.is_some());
        if counts(&node).iter().any(|(kind, _)| *kind == "connection") {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{:?}", counts(&node));
}
