//! ACL users, and servers that refuse.

use std::collections::BTreeSet;
use std::time::Duration;

use threshold_core::receipt::OnExpire;
use threshold_core::{DigestKey, Timestamp};
use threshold_limiter::store::{Kind, Store as _};
use threshold_limiter::{Facts, Limiter, LoginRequest, Policy};
use threshold_redis::{RedisOpenError, RedisOptions, RedisStore};

use crate::process::{Cluster, RedisServer, secret};
use crate::tcp::TcpServer;

/// Returns the arguments of the `ACL SETUSER` line in docs/scale.md.
fn documented_user() -> Vec<String> {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/scale.md")).unwrap();
    let line = page.lines().find(|line| line.starts_with("ACL SETUSER threshold ")).expect("the page names the rules");
    line.replace(">PASSWORD", ">hunter2").split_whitespace().map(str::to_owned).collect()
}

fn options(server: &TcpServer, login: &str) -> RedisOptions {
    let url = format!("redis://{login}127.0.0.1:{}", server.port).parse().unwrap();
    RedisOptions::new(url, secret(9)).deadline(Duration::from_secs(20))
}

async fn refusal(options: RedisOptions) -> String {
    RedisStore::open(options).await.unwrap_err().to_string()
}

/// The rules in docs/scale.md suffice for everything that a node does, and allow no more than its own keys.
#[tokio::test(flavor = "multi_thread")]
async fn the_documented_acl_user_can_do_everything_a_node_does() {
    let server = TcpServer::start(&[]);
    let user = documented_user();
    assert_eq!(server.cli(&user.iter().map(String::as_str).collect::<Vec<_>>()), "OK\n");
    let policy = "[[rule]]\nname = 'strict'\nper = ['user']\nlimit = '2/min'\nladder = 'strict'\n[login]";
    let store = RedisStore::open(options(&server, "threshold:hunter2@")).await.unwrap();
    let builder = Limiter::builder(Policy::parse(policy, &|_| None).unwrap()).store(store);
    let node = builder.digest_key(DigestKey::new([7; 16])).build().unwrap();
    let facts = Facts { user: Some("ada"), ..Facts::default() };
    for _ in 0..4 {
        let (decision, receipt) = node.check_with_receipt_async(&facts).await.unwrap();
        assert!(decision.degraded.is_none(), "{:?}", node.store().last_error());
        if let Some(receipt) = receipt {
            node.refund_async(&receipt).await.unwrap();
        }
    }
    let bob = Facts { user: Some("bob"), ..Facts::default() };
    node.reserve_async(&bob, Duration::from_millis(1), OnExpire::Release).await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    node.store().release_expired().await.unwrap();
    let request = LoginRequest { account: Some("ada"), ip: "192.0.2.1".parse().ok(), ..LoginRequest::default() };
    let _ = node.login_attempt_async(&request).await.unwrap();
    node.follow_control().await.unwrap();
    for kind in [Kind::Banned, Kind::Accounts] {
        node.store().list(kind, None, 10, Timestamp::EPOCH).await.unwrap();
    }
    assert_eq!(server.cli(&["ACL", "LOG"]).trim(), "", "nothing was denied");
    let other = |arguments: &[&str]| server.cli(&[&["--user", "threshold", "--pass", "hunter2"], arguments].concat());
    assert!(other(&["SET", "theirs", "1"]).contains("NOPERM"), "keys of other programs are out of reach");
    assert!(other(&["FLUSHALL"]).contains("NOPERM"));
}

/// The same user suffices on a Cluster.
#[tokio::test(flavor = "multi_thread")]
async fn the_documented_acl_user_can_decide_on_a_cluster() {
    let cluster = Cluster::start();
    let user = documented_user();
    let user: Vec<&str> = user.iter().map(String::as_str).collect();
    let living: Vec<usize> = cluster.living().collect();
    for node in &living {
        assert_eq!(cluster.node(*node).cli(&user), "OK\n");
    }
    let url = cluster.url().replace("://", "://threshold:hunter2@").parse().unwrap();
    let options = RedisOptions::new(url, secret(9)).deadline(Duration::from_secs(20));
    let policy = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '2/min'\nladder = 'strict'";
    let store = RedisStore::open(options).await.unwrap();
    let node = Limiter::builder(Policy::parse(policy, &|_| None).unwrap()).store(store);
    let node = node.digest_key(DigestKey::new([7; 16])).build().unwrap();
    for request in 0..60 {
        let user = format!("user {}", request % 20);
        let decision = node.check_async(&Facts { user: Some(&user), ..Facts::default() }).await.unwrap();
        assert!(decision.degraded.is_none(), "{:?}", node.store().last_error());
    }
    node.follow_control().await.unwrap();
    for at in living {
        assert_eq!(cluster.node(at).cli(&["ACL", "LOG"]).trim(), "", "nothing was denied");
    }
}

/// Each refusal says what an operator has to change.
#[tokio::test(flavor = "multi_thread")]
async fn a_login_that_is_refused_says_why_and_not_the_password() {
    let server = TcpServer::start(&["--requirepass", "hunter2"]);
    let error = refusal(options(&server, "")).await;
    assert!(error.contains("needs a password"), "{error}");
    let error = refusal(options(&server, ":hunter3@")).await;
    assert!(error.contains("password is wrong") && !error.contains("hunter3"), "{error}");
    RedisStore::open(options(&server, ":hunter2@")).await.unwrap();
    server.cli(&["-a", "hunter2", "ACL", "SETUSER", "ann", "on", ">x", "~th:*", "+info"]);
    let error = refusal(options(&server, "ann:x@")).await;
    assert!(error.contains("docs/scale.md"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_is_refused_and_a_full_server_says_so() {
    let primary = TcpServer::start(&[]);
    let replica = TcpServer::start(&["--replicaof", "127.0.0.1", &primary.port.to_string()]);
    let refused = RedisStore::open(options(&replica, "")).await.unwrap_err();
    assert!(matches!(refused, RedisOpenError::Replica { .. }), "{refused}");

    let store = RedisStore::open(options(&primary, "")).await.unwrap();
    assert_eq!(primary.cli(&["CONFIG", "SET", "maxmemory", "1"]), "OK\n");
    let policy = Policy::parse("[[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/day'", &|_| None).unwrap();
    let node = Limiter::builder(policy).store(store).digest_key(DigestKey::new([7; 16])).build().unwrap();
    let facts = Facts { user: Some("ada"), ..Facts::default() };
    assert!(node.check_async(&facts).await.unwrap().degraded.is_some());
    let error = node.store().last_error().unwrap();
    assert!(error.contains("memory of the server is full"), "{error}");
    // Bans can still be read by a node that starts or reconnects now.
    RedisStore::open(options(&primary, "")).await.unwrap();
}

/// Redis came back empty, a node with another secret was the first to reach it, and the others went on counting beside it.
#[tokio::test(flavor = "multi_thread")]
async fn the_secret_is_checked_again_after_data_was_lost() {
    let mut server = RedisServer::start();
    let open = |key| RedisStore::open(RedisOptions::new(server.url().parse().unwrap(), secret(key)));
    let store = open(1).await.unwrap();
    server.kill();
    server.restart();
    let connected = || async {
        for _ in 0..500 {
            // A call notices that the connection is broken.
            let _ = store.list(Kind::Banned, None, 1, Timestamp::EPOCH).await;
            if store.is_connected() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        false
    };
    assert!(connected().await, "{:?}", store.last_error());
    assert_eq!(
        server.cli(&["SMEMBERS", "th:{control}secrets"]),
        format!("{}\n", secret(1).key_id()),
        "the new server has the key id again"
    );

    let other = secret(2).key_id().to_string();
    let swap = format!("redis.call('DEL', KEYS[1]) redis.call('SADD', KEYS[1], '{other}')");
    server.cli(&["EVAL", &swap, "1", "th:{control}secrets"]);
    server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    let _ = store.list(Kind::Banned, None, 1, Timestamp::EPOCH).await;
    for _ in 0..500 {
        if store.last_error().is_some_and(|error| error.contains(&format!("written with the secret {other}"))) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(store.last_error().unwrap().contains(&other), "{:?}", store.last_error());
    assert!(!store.is_connected());
    // The operator puts it right.
    server.cli(&["DEL", "th:{control}secrets"]);
    assert!(connected().await, "{:?}", store.last_error());
}

/// Another program wrote a list under the key of a balance. It was read as no balance, and overwritten: the user had the whole
/// limit again.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_of_another_type_is_an_error_and_stays_as_it_is() {
    let server = RedisServer::start();
    // The script decides the first rule alone. A ladder needs copies of the records.
    for more in ["", "ladder = 'strict'"] {
        server.cli(&["FLUSHALL"]);
        let policy =
            format!("[[rule]]\nname = 'user'\nper = ['user']\nlimit = '2/day'\non_store_error = 'closed'\n{more}");
        let store = server.open().await;
        let builder = Limiter::builder(Policy::parse(&policy, &|_| None).unwrap()).store(store);
        let node = builder.digest_key(DigestKey::new([7; 16])).build().unwrap();
        let facts = Facts { user: Some("ada"), ..Facts::default() };
        // The last one strikes.
        for expected in [true, true, false] {
            assert_eq!(node.check_async(&facts).await.unwrap().allowed(), expected);
        }
        for pattern in ["th:*b:*", "th:*s:*"] {
            let key = server.cli(&["KEYS", pattern]);
            let key = key.trim();
            if key.is_empty() {
                assert_eq!((pattern, more), ("th:*s:*", ""), "only a ladder has standings");
                continue;
            }
            server.cli(&["RENAME", key, "kept"]);
            server.cli(&["LPUSH", key, "theirs"]);
            // Longer than a node repeats the denial.
            tokio::time::sleep(Duration::from_millis(1_100)).await;
            let decision = node.check_async(&facts).await.unwrap();
            assert!(decision.degraded.is_some() && !decision.allowed(), "{pattern} {more}");
            assert!(node.store().last_error().unwrap().contains("another program"), "{:?}", node.store().last_error());
            assert_eq!(server.cli(&["LRANGE", key, "0", "-1"]), "theirs\n");
            server.cli(&["RENAME", "kept", key]);
        }
    }
}

/// Every command that a script calls.
fn script_commands() -> BTreeSet<String> {
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).unwrap();
    let paths =
        folder.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|end| end == "lua"));
    let texts: Vec<String> = paths.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let calls = texts.iter().flat_map(|text| text.split("call('").skip(1));
    calls.map(|call| call.split('\'').next().unwrap().to_owned()).collect()
}

/// A node started although its user lacked one command of a script, and wrote half of a step at its first reservation.
#[tokio::test(flavor = "multi_thread")]
async fn a_user_that_lacks_one_command_of_a_script_is_refused_and_told_which() {
    let server = TcpServer::start(&[]);
    let commands = script_commands();
    assert!(commands.len() > 20 && commands.contains("ZADD"), "{commands:?}");
    let mut told = 0;
    for command in commands {
        server.cli(&["ACL", "SETUSER", "default", "+@all", &format!("-{command}")]);
        let error = refusal(options(&server, "")).await;
        // Before that the key ids of the secrets are compared, by a script too.
        let named = error.contains(&format!("the ACL of the user lacks {command}: docs/scale.md"));
        assert!(named || error.contains("the ACL of the user does not suffice: docs/scale.md"), "{command}: {error}");
        told += usize::from(named);
    }
    assert!(told > 10, "{told} were named");
    server.cli(&["ACL", "SETUSER", "default", "+@all"]);
    let store = RedisStore::open(options(&server, "")).await.unwrap();
    server.cli(&["ACL", "SETUSER", "default", "-zadd", "-del"]);
    let found = store.examine(Timestamp::EPOCH).await;
    assert!(found.iter().any(|line| line.contains("lacks DEL, ZADD")), "{found:?}");
}

/// An operator took one command away from a running node. A reservation that failed stayed charged for good, and a refund that failed was
/// remembered and gave nothing back.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_is_taken_away_leaves_no_half_of_a_step() {
    let server = TcpServer::start(&[]);
    for denied in ["-set", "-del", "-zadd", "-zrem", "-pexpireat"] {
        server.cli(&["FLUSHALL"]);
        let store = RedisStore::open(options(&server, "")).await.unwrap();
        let rule = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '9/month'\nalgorithm = 'fixed-window'\n\
                    on_store_error = 'closed'";
        let node = Limiter::builder(Policy::parse(rule, &|_| None).unwrap()).store(store);
        let node = node.digest_key(DigestKey::new([7; 16])).build().unwrap();
        let facts = Facts { user: Some("ada"), cost: Some(4), ..Facts::default() };
        let receipt = node.check_with_receipt_async(&facts).await.unwrap().1.unwrap();
        let dump = || server.cli(&["EVAL", "local all = redis.call('KEYS', 'th:*') table.sort(all) return all", "0"]);
        let before = dump();
        server.cli(&["ACL", "SETUSER", "default", denied]);
        let minute = Duration::from_secs(60);
        let reserved = node.reserve_async(&facts, minute, OnExpire::Release).await.unwrap();
        let can_reserve = matches!(denied, "-del" | "-zrem");
        assert_eq!(reserved.decision.unavailable(), !can_reserve, "{denied}");
        assert!(node.refund_async(&receipt).await.is_err(), "{denied}");
        server.cli(&["ACL", "SETUSER", "default", "+@all"]);
        if !can_reserve {
            assert_eq!(dump(), before, "{denied}");
        }
        assert_eq!(node.refund_async(&receipt).await, Ok(true), "{denied}");
        let left = node.peek_async(&facts).await.unwrap().readings[0].remaining;
        assert_eq!(left, if can_reserve { 1 } else { 5 }, "{denied}");
    }
}
