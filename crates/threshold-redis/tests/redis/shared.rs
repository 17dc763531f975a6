//! Several nodes on one server: limits are exact, bans reach every node, and nothing is left behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, ListEntry};
use threshold_core::{DigestKey, Secrets, Timestamp};
use threshold_limiter::store::{AnyStore, Store as _};
use threshold_limiter::{Attempted, Facts, Limiter, LoginRequest, Policy};
use threshold_redis::{RedisOpenError, RedisOptions, RedisStore};
use tokio::task::JoinSet;

use crate::process::{RedisServer, secret};

type Node = Arc<Limiter<RedisStore>>;

/// Starts so many nodes with the same policy and secret.
async fn nodes(server: &RedisServer, count: usize, policy: &str) -> Vec<Node> {
    let mut nodes = Vec::new();
    for _ in 0..count {
        let policy = Policy::parse(policy, &|_| None).unwrap();
        let builder = Limiter::builder(policy).store(server.open().await).digest_key(DigestKey::new([7; 16]));
        nodes.push(Arc::new(builder.build().unwrap()));
    }
    nodes
}

/// Returns the limit of 50 in a form in which nothing comes back while the test runs.
pub(crate) fn rule_of(algorithm: &str) -> String {
    let limit = if algorithm == "concurrency" { "limit = '50'\nttl = '1h'" } else { "limit = '50/day'" };
    format!("[[rule]]\nname = 'shared'\nper = ['user']\n{limit}\nalgorithm = '{algorithm}'\n")
}

/// Eight nodes send 400 requests of one user at the same time. Exactly the limit gets through, whatever the algorithm.
///
/// Woken by: `swap.lua` without its comparison.
#[tokio::test(flavor = "multi_thread")]
async fn eight_nodes_admit_exactly_the_limit() {
    let server = RedisServer::start();
    for algorithm in threshold_core::limit::Algorithm::NAMES {
        server.cli(&["FLUSHALL"]);
        let nodes = nodes(&server, 8, &rule_of(algorithm)).await;
        let admitted = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        for request in 0..400 {
            let (node, admitted) = (Arc::clone(&nodes[request % nodes.len()]), Arc::clone(&admitted));
            tasks.spawn(async move {
                let facts = Facts { user: Some("ada"), ..Facts::default() };
                let decision = node.check_async(&facts).await.unwrap();
                assert!(decision.degraded.is_none(), "{:?}", node.store().last_error());
                admitted.fetch_add(usize::from(decision.allowed()), Ordering::Relaxed);
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
        assert_eq!(admitted.load(Ordering::Relaxed), 50, "{algorithm}");
    }
}

/// A request that one limit denies is not charged to the others, also under concurrency and across partitions.
#[tokio::test(flavor = "multi_thread")]
async fn a_denial_drains_no_other_limit() {
    let server = RedisServer::start();
    let policy = "[[rule]]\nname = 'tenant'\nper = ['tenant']\nlimit = '100/day'\nalgorithm = 'fixed-window'\n\
                  [[rule]]\nname = 'user'\nper = ['user']\nlimit = '10/day'\nalgorithm = 'fixed-window'\n";
    let nodes = nodes(&server, 4, policy).await;
    let mut tasks = JoinSet::new();
    for request in 0..200 {
        let node = Arc::clone(&nodes[request % nodes.len()]);
        tasks.spawn(async move {
            let facts = Facts { user: Some("ada"), tenant: Some("acme"), ..Facts::default() };
            node.check_async(&facts).await.unwrap().allowed()
        });
    }
    let allowed = tasks.join_all().await.into_iter().filter(|allowed| *allowed).count();
    assert_eq!(allowed, 10);
    let other = Facts { user: Some("bob"), tenant: Some("acme"), ..Facts::default() };
    let peeked = nodes[0].peek_async(&other).await.unwrap();
    // 100 less the 10 that were allowed, and less the one that is peeked at.
    assert_eq!(peeked.readings[0].remaining, 89, "the tenant paid for what was allowed and nothing else");
}

/// Sends 1,000 guesses at one account through all nodes at once, and returns how many may check the password.
pub(crate) async fn allowed_guesses(nodes: &[Arc<Limiter<RedisStore>>], addresses: u32) -> usize {
    let mut tasks = JoinSet::new();
    for guess in 0..1_000u32 {
        let node = Arc::clone(&nodes[guess as usize % nodes.len()]);
        tasks.spawn(async move {
            let ip = std::net::Ipv4Addr::from(0x0a00_0000 + guess % addresses);
            let request = LoginRequest { account: Some("ada"), ip: Some(ip.into()), ..LoginRequest::default() };
            matches!(node.login_attempt_async(&request).await.unwrap(), Attempted::Allowed(_))
        });
    }
    tasks.join_all().await.into_iter().filter(|allowed| *allowed).count()
}

/// An attacker sends 1,000 guesses at one account through eight nodes at once, from one address or from many. At most three
/// reach the check of the password, and none is answered by an error.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_parallel_guesses_reach_the_password_three_times() {
    for addresses in [1u32, 1_000] {
        let server = RedisServer::start();
        let nodes = nodes(&server, 8, "[login]").await;
        let allowed = allowed_guesses(&nodes, addresses).await;
        assert!((1..=3).contains(&allowed), "{allowed} guesses from {addresses} addresses");
    }
}

/// Every key that requests leave behind expires by itself. Only the log of bans and settings, and the ids of the secrets, stay.
#[tokio::test(flavor = "multi_thread")]
async fn every_key_but_the_named_ones_has_a_time_to_live() {
    let server = RedisServer::start();
    let policy = "[[rule]]\nname = 'strict'\nper = ['user']\nlimit = '1/min'\nladder = 'strict'\n[login]";
    let node = nodes(&server, 1, policy).await.remove(0);
    for user in 0..20 {
        let user = format!("user {user}");
        let facts = Facts { user: Some(&user), ..Facts::default() };
        for _ in 0..3 {
            let (_, receipt) = node.check_with_receipt_async(&facts).await.unwrap();
            if let Some(receipt) = receipt {
                node.refund_async(&receipt).await.unwrap();
            }
        }
        let request = LoginRequest { account: Some(&user), ip: "192.0.2.1".parse().ok(), ..LoginRequest::default() };
        let _ = node.login_attempt_async(&request).await.unwrap();
        let hold = Duration::from_secs(60);
        let other = format!("{user} reserves");
        let facts = Facts { user: Some(&other), ..Facts::default() };
        node.reserve_async(&facts, hold, threshold_core::receipt::OnExpire::Release).await.unwrap();
    }
    let keys = server.cli(&["KEYS", "*"]);
    assert!(keys.lines().count() > 60, "{keys}");
    assert_eq!(server.endless_keys(), [""; 0]);
}

/// A ban on one node holds on the others as soon as they read the log.
#[tokio::test(flavor = "multi_thread")]
async fn a_ban_on_one_node_holds_on_all() {
    let server = RedisServer::start();
    let nodes = nodes(&server, 2, "[[rule]]\nname = 'ip'\nper = ['ip']\nlimit = '100/min'").await;
    let facts = Facts { ip: "203.0.113.7".parse().ok(), ..Facts::default() };
    assert!(nodes[1].check_async(&facts).await.unwrap().allowed());
    let whom = ListEntry::parse("203.0.113.0/24").unwrap();
    let id = whom.ban_id(DigestKey::new([7; 16]));
    let ban = Ban { whom, reason: "scraping".into(), by: "ops".into(), from: Timestamp::EPOCH, until: Timestamp::MAX };
    let change = ControlChange::Ban { id, ban: Some(Arc::new(ban)) };
    nodes[0].change_control(change).await.unwrap();
    nodes[1].follow_control().await.unwrap();
    assert!(!nodes[1].check_async(&facts).await.unwrap().allowed());
    let lift = ControlChange::Ban { id, ban: None };
    nodes[0].change_control(lift).await.unwrap();
    nodes[1].follow_control().await.unwrap();
    assert!(nodes[1].check_async(&facts).await.unwrap().allowed());
}

/// Digests under another secret mean nothing, so a node with another secret must not start to count beside the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_another_secret_does_not_start() {
    let server = RedisServer::start();
    let open = |secrets: Secrets| RedisStore::open(RedisOptions::new(server.url().parse().unwrap(), secrets));
    open(secret(1).into()).await.unwrap();
    open(secret(1).into()).await.unwrap();
    let refused = open(secret(2).into()).await.unwrap_err();
    assert!(matches!(refused, RedisOpenError::OtherSecret { .. }), "{refused}");
    assert!(refused.to_string().contains(&secret(1).key_id().to_string()), "{refused}");
    // What `main` prints of it. It had one key id in hexadecimal and the other in decimal.
    assert_eq!(format!("{refused:?}"), refused.to_string());
    // A rotation: the old secret is known, and the new one is from now on.
    open(Secrets::new(secret(2)).with_old(secret(1)).unwrap()).await.unwrap();
    // The nodes with the old secret alone have ended more than ten seconds ago.
    server.cli(&["DEL", "th:{control}nodes", "th:{control}members"]);
    open(secret(2).into()).await.unwrap();
}

/// A new user gave the secret to the store and not to the limiter, which drew another one: each of two processes admitted the whole
/// limit, refused the other's receipts, and nothing was said.
#[tokio::test(flavor = "multi_thread")]
async fn limiters_without_secrets_of_their_own_share_the_limits_of_the_store() {
    let server = RedisServer::start();
    let open = async || {
        let policy = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/day'\nalgorithm = 'fixed-window'\non_store_error = 'closed'";
        let store = AnyStore::other(Arc::new(server.open().await));
        Limiter::builder(Policy::parse(policy, &|_| None).unwrap()).store(store).build().unwrap()
    };
    let (one, other) = (open().await, open().await);
    let ada = Facts { user: Some("ada"), ..Facts::default() };
    let (_, receipt) = one.check_with_receipt_async(&ada).await.unwrap();
    let mut admitted = 1;
    for node in [&one, &other].into_iter().cycle().take(10) {
        admitted += usize::from(node.check_async(&ada).await.unwrap().allowed());
    }
    assert_eq!(admitted, 5);
    assert_eq!(one.key_id(), secret(9).key_id());
    let receipt = other.read_receipt(&one.sign(&receipt.unwrap())).unwrap();
    assert!(other.refund_async(&receipt).await.unwrap());
}

/// The secret of the limiter was another one than that of its store, and the nodes shared nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_limiter_with_other_secrets_than_its_store_is_not_built() {
    let server = RedisServer::start();
    let rotated = |present, old| Secrets::new(secret(present)).with_old(secret(old)).unwrap();
    let build = async |secrets: Secrets| {
        let builder = Limiter::builder(Policy::parse("", &|_| None).unwrap()).store(Arc::new(server.open().await));
        builder.secrets(secrets).build().map(|limiter| limiter.key_id())
    };
    assert_eq!(build(secret(9).into()).await, Ok(secret(9).key_id()));
    let [right, wrong] = [9, 8].map(|byte| secret(byte).key_id());
    let refused = build(secret(8).into()).await.unwrap_err();
    assert_eq!(format!("{refused:?}"), refused.to_string(), "what `main` prints");
    assert_eq!(
        refused.to_string(),
        format!(
            "the limiter was given the secret {wrong}, and its store was opened with the secret {right}: give the secrets to the store \
             alone"
        )
    );
    // Otherwise the limiter would look for records under the old secret, and its store would not know that one.
    let refused = build(rotated(9, 8)).await.unwrap_err().to_string();
    assert!(refused.contains(&format!("given the secret {right} and the old secret {wrong}")), "{refused}");
}

/// The server is killed and comes back on the same socket. Requests are decided by `on_store_error` in between and marked, and
/// are counted by the store again afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_and_returns_is_used_again() {
    let mut server = RedisServer::start();
    let policy = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/day'\nalgorithm = 'fixed-window'\non_store_error = 'closed'";
    let node = nodes(&server, 1, policy).await.remove(0);
    let facts = Facts { user: Some("ada"), ..Facts::default() };
    assert!(node.check_async(&facts).await.unwrap().allowed());
    server.kill();
    let without = node.check_async(&facts).await.unwrap();
    assert!(without.degraded.is_some() && !without.allowed());
    server.restart();
    let mut tries = 0;
    let decision = loop {
        let decision = node.check_async(&facts).await.unwrap();
        if decision.degraded.is_none() {
            break decision;
        }
        tries += 1;
        assert!(tries < 500, "{:?}", node.store().last_error());
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(decision.allowed());
}

/// Somebody wrote junk under the key of one user. That user's requests failed, and the breaker that counted them cut all other users
/// off as well.
///
/// Fails if the breaker counts every failure.
#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_record_concerns_its_own_user_only() {
    let server = RedisServer::start();
    let policy = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/day'\non_store_error = 'closed'";
    let node = nodes(&server, 1, policy).await.remove(0);
    let ada = Facts { user: Some("ada"), ..Facts::default() };
    assert!(node.check_async(&ada).await.unwrap().allowed());
    let keys = server.cli(&["KEYS", "th:*b:*"]);
    assert_eq!(server.cli(&["SET", keys.trim(), "junk"]), "OK\n");
    for _ in 0..20 {
        assert!(node.check_async(&ada).await.unwrap().degraded.is_some());
    }
    let bob = Facts { user: Some("bob"), ..Facts::default() };
    let decision = node.check_async(&bob).await.unwrap();
    assert!(decision.allowed() && decision.degraded.is_none());
}

/// Redis was restarted without persistence, and the bans of operators were lifted on all nodes by that.
#[tokio::test(flavor = "multi_thread")]
async fn bans_outlive_a_restart_of_the_server() {
    let mut server = RedisServer::start();
    let nodes = nodes(&server, 2, "[[rule]]\nname = 'ip'\nper = ['ip']\nlimit = '100/min'").await;
    let whom = ListEntry::parse("203.0.113.0/24").unwrap();
    let id = whom.ban_id(DigestKey::new([7; 16]));
    let ban = Ban { whom, reason: "scraping".into(), by: "ops".into(), from: Timestamp::EPOCH, until: Timestamp::MAX };
    nodes[0].change_control(ControlChange::Ban { id, ban: Some(Arc::new(ban)) }).await.unwrap();
    nodes[1].follow_control().await.unwrap();
    server.kill();
    server.restart();
    for node in nodes.iter().chain(&nodes) {
        let mut tries = 0;
        while node.follow_control().await.is_err() {
            tries += 1;
            assert!(tries < 500, "{:?}", node.store().last_error());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let facts = Facts { ip: "203.0.113.7".parse().ok(), ..Facts::default() };
    for node in &nodes {
        assert!(!node.check_async(&facts).await.unwrap().allowed());
    }
    assert_eq!(server.cli(&["ZCARD", "th:{control}bans"]).trim(), "1", "it is in the new log");
}
