//! Redis goes away and comes back: each node has its share of a limit meanwhile, and all of them together admit no more than one
//! limit beyond it.

use std::time::Duration;

use threshold_core::decision::Verdict;
use threshold_core::{Decision, DigestKey};
use threshold_limiter::store::{Share, Store as _};
use threshold_limiter::{Attempted, Facts, Limiter, LoginError, LoginRequest, Policy};
use threshold_redis::{RedisOptions, RedisStore};

use crate::process::{RedisServer, secret};

type Node = Limiter<RedisStore>;

fn node_on(store: RedisStore, policy: &str) -> Node {
    let policy = Policy::parse(policy, &|_| None).unwrap();
    let builder = Limiter::builder(policy).store(store).digest_key(DigestKey::new([7; 16]));
    builder.build().unwrap()
}

async fn node(server: &RedisServer, policy: &str) -> Node {
    node_on(server.open().await, policy)
}

/// Starts nodes and waits until each has counted all of them.
async fn nodes(server: &RedisServer, count: u64, policy: &str) -> Vec<Node> {
    let mut nodes = Vec::new();
    for _ in 0..count {
        nodes.push(node(server, policy).await);
    }
    let knows_all = |node: &Node| node.store().share().is_some_and(|share| share.nodes == count);
    until("every node counts all nodes", || nodes.iter().all(knows_all)).await;
    nodes
}

/// Waits until something is true, for at most 20 seconds.
async fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    for _ in 0..1_000 {
        if is_true() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never true: {what}");
}

async fn check(node: &Node, user: &str) -> Decision {
    node.check_async(&Facts { user: Some(user), ..Facts::default() }).await.unwrap()
}

/// Sends requests through all nodes by turns, and returns how many were admitted. All of them are decided without the store.
async fn admitted_blind(nodes: &[Node], user: &str, requests: usize) -> usize {
    let mut admitted = 0;
    for request in 0..requests {
        let decision = check(&nodes[request % nodes.len()], user).await;
        assert!(decision.degraded.is_some(), "every decision without the store is marked");
        admitted += usize::from(decision.allowed());
    }
    admitted
}

/// Waits until a node decides with the store again.
async fn reconnected(node: &Node) {
    let mut tries = 0;
    while node.follow_control().await.is_err() || check(node, "a probe").await.degraded.is_some() {
        tries += 1;
        assert!(tries < 1_000, "{:?}", node.store().last_error());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

const TEN_A_DAY: &str = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '10/day'\nalgorithm = 'fixed-window'\n";

/// Three nodes each took the whole limit while Redis was away, and a Redis that came and went gave them a fresh one each time.
#[tokio::test(flavor = "multi_thread")]
async fn all_nodes_together_admit_one_limit_while_the_store_comes_and_goes() {
    let mut server = RedisServer::start();
    let nodes = nodes(&server, 3, TEN_A_DAY).await;
    let mut shares: Vec<u64> = nodes.iter().filter_map(|node| node.store().share()).map(|share| share.place).collect();
    shares.sort_unstable();
    assert_eq!(shares, [0, 1, 2]);
    let mut admitted = 0;
    for outage in 0..3 {
        server.kill();
        admitted += admitted_blind(&nodes, "ada", 60).await;
        assert_eq!(admitted, 10, "in outage {outage}");
        server.restart();
        for node in &nodes {
            reconnected(node).await;
        }
    }
}

/// A node that was started during a rollout took a share that the others had not left to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_the_others_have_not_counted_is_closed_without_the_store() {
    let mut server = RedisServer::start();
    let first = nodes(&server, 1, TEN_A_DAY).await.remove(0);
    assert_eq!(first.store().share(), Some(Share::ALL));
    let second = node(&server, TEN_A_DAY).await;
    server.kill();
    assert_eq!(admitted_blind(std::slice::from_ref(&second), "ada", 3).await, 0);
    assert!(check(&second, "ada").await.unavailable());
    assert_eq!(admitted_blind(std::slice::from_ref(&first), "ada", 30).await, 10);
}

/// Returns what is left of a user's limit in the store.
async fn remaining(node: &Node, user: &str) -> u64 {
    let peeked = node.peek_async(&Facts { user: Some(user), ..Facts::default() }).await.unwrap();
    assert!(peeked.degraded.is_none(), "{:?}", node.store().last_error());
    // A peek shows what would be left after one more request.
    peeked.readings[0].remaining + 1
}

/// Requests that were admitted while Redis was away were admitted a second time after its return.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_admitted_without_the_store_is_recorded_when_it_returns() {
    for mode in ["local", "open"] {
        let mut server = RedisServer::start();
        let node = nodes(&server, 1, &format!("{TEN_A_DAY}on_store_error = '{mode}'\n")).await.remove(0);
        server.kill();
        // The outcome of a call that was under way when the connection broke is not known, and such a call is not recorded.
        while node.store().is_connected() {
            let _ = check(&node, "a probe").await;
        }
        assert_eq!(admitted_blind(std::slice::from_ref(&node), "ada", 4).await, 4);
        // Its data is lost, so that only what is recorded now counts.
        server.restart();
        reconnected(&node).await;
        node.follow_control().await.unwrap();
        assert_eq!(remaining(&node, "ada").await, 6, "{mode}");
        node.follow_control().await.unwrap();
        assert_eq!((remaining(&node, "ada").await, node.lost_charges()), (6, 0), "{mode}");
    }
}

/// A user who was cooling down or banned was let through as soon as Redis was away.
#[tokio::test(flavor = "multi_thread")]
async fn penalties_that_a_node_has_seen_hold_without_the_store() {
    for (rung, is_ban) in [("cooldown 1h", false), ("ban 1h", true)] {
        let mut server = RedisServer::start();
        let ladder = format!("[ladders.own]\nrungs = ['{rung}']\n");
        let node = node(&server, &format!("{ladder}{TEN_A_DAY}ladder = 'own'\non_store_error = 'open'\n")).await;
        for _ in 0..11 {
            let _ = check(&node, "ada").await;
        }
        let punished = check(&node, "ada").await;
        assert!(punished.penalty.is_some() && !punished.allowed());
        // Longer than a denial is repeated.
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        server.kill();
        let denied = check(&node, "ada").await;
        assert!(!denied.allowed() && denied.degraded.is_some() && !denied.unavailable());
        assert_eq!(denied.banned(), is_ban);
        assert!(denied.ready_at <= punished.ready_at);
        assert!(check(&node, "bob").await.allowed());
    }
}

/// Waits until a node has noticed that its server is gone.
async fn unreachable_for(node: &Node) {
    while node.store().is_connected() {
        let _ =
            node.check_async(&Facts { user: Some("a probe"), ip: "192.0.2.9".parse().ok(), ..Facts::default() }).await;
    }
}

/// A user who was slowed down noticed that Redis was away: the answers came at once.
#[tokio::test(flavor = "multi_thread")]
async fn shadow_bans_that_a_node_has_seen_hold_without_the_store() {
    for mode in ["open", "local"] {
        let mut server = RedisServer::start();
        let rule = |category: &str, limit: &str| {
            format!(
                "[[rule]]\nname = '{category}'\nper = ['user']\nlimit = '{limit}'\nladder = 'own'\n\
                 match = {{ category = '{category}' }}\non_store_error = '{mode}'\n"
            )
        };
        let policy = format!("[ladders.own]\nrungs = ['shadow']\n{}{}", rule("post", "1/day"), rule("read", "99/day"));
        let nodes = nodes(&server, 2, &policy).await;
        let post = Facts { user: Some("ada"), category: Some("post"), ..Facts::default() };
        for _ in 0..2 {
            let _ = nodes[0].check_async(&post).await.unwrap();
        }
        let read = async |node: &Node, user| {
            node.check_async(&Facts { user: Some(user), category: Some("read"), ..Facts::default() }).await.unwrap()
        };
        // This node has not seen the strike, only its consequence.
        assert_eq!(read(&nodes[1], "ada").await.verdict, Verdict::Slow);
        server.kill();
        for node in &nodes {
            unreachable_for(node).await;
            let slowed = read(node, "ada").await;
            assert!(slowed.degraded.is_some() && slowed.allowed(), "{mode}: {slowed:?}");
            assert_eq!(slowed.verdict, Verdict::Slow, "{mode}");
            assert!(slowed.delay() >= Duration::from_secs(1), "{mode}");
            assert_eq!(read(node, "bob").await.verdict, Verdict::Allow, "{mode}");
        }
    }
}

fn login(account: &str) -> LoginRequest<'_> {
    LoginRequest { account: Some(account), ip: "192.0.2.1".parse().ok(), ..LoginRequest::default() }
}

/// With `on_store_error = "open"` a locked account could be guessed at as soon as Redis was away.
#[tokio::test(flavor = "multi_thread")]
async fn locks_that_a_node_has_seen_hold_without_the_store() {
    for mode in ["open", "local", "closed"] {
        let mut server = RedisServer::start();
        let policy = format!("{TEN_A_DAY}[login]\non_store_error = '{mode}'\n");
        let nodes = nodes(&server, 2, &policy).await;
        for _ in 0..3 {
            let Attempted::Allowed(attempt) = nodes[0].login_attempt_async(&login("ada")).await.unwrap() else {
                panic!("three attempts are allowed");
            };
            assert!(!nodes[0].login_result_async(&attempt, false).await.unwrap().success);
        }
        // One node has seen the failure that locked, the other one the refusal of an attempt.
        assert!(matches!(nodes[1].login_attempt_async(&login("ada")).await.unwrap(), Attempted::Refused(_)));
        server.kill();
        for node in &nodes {
            unreachable_for(node).await;
            // An operator cannot lift it without the store, and a failed try must not open it.
            assert!(node.pardon_account_async("ada").await.is_err());
            let Attempted::Refused(refusal) = node.login_attempt_async(&login("ada")).await.unwrap() else {
                panic!("{mode}: the account is locked");
            };
            assert_eq!(refusal.code(), "account_locked", "{mode}");
            assert!(
                refusal.retry_after_secs().is_some_and(|seconds| (1..=60).contains(&seconds)),
                "{mode}: {refusal:?}"
            );
            match node.login_attempt_async(&login("bob")).await {
                Ok(Attempted::Allowed(_)) => assert_ne!(mode, "closed"),
                Err(LoginError::Store(_)) => assert_eq!(mode, "closed"),
                other => panic!("{mode}: {other:?}"),
            }
        }
    }
}

/// An address that a ladder had banned could try passwords while Redis was away.
#[tokio::test(flavor = "multi_thread")]
async fn penalties_that_a_node_has_seen_refuse_logins_without_the_store() {
    let mut server = RedisServer::start();
    let policy = "[ladders.own]\nrungs = ['ban 1h']\n[login]\non_store_error = 'open'\n\
        [[rule]]\nname = 'address'\nper = ['ip']\nlimit = '1/day'\nladder = 'own'\nban_shared = true\non_store_error = 'open'\n";
    let node = node(&server, policy).await;
    let facts = Facts { ip: login("ada").ip, ..Facts::default() };
    for _ in 0..2 {
        let _ = node.check_async(&facts).await.unwrap();
    }
    server.kill();
    unreachable_for(&node).await;
    let Attempted::Refused(refusal) = node.login_attempt_async(&login("ada")).await.unwrap() else {
        panic!("the address is banned");
    };
    assert_eq!(refusal.code(), "banned");
    let other = LoginRequest { ip: "192.0.2.2".parse().ok(), ..login("ada") };
    assert!(matches!(node.login_attempt_async(&other).await.unwrap(), Attempted::Allowed(_)));
}

/// A server that was slow for a moment charged requests that had been refused by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_charge_that_comes_too_late_is_withdrawn_if_its_request_was_refused() {
    for (mode, is_admitted) in [("closed", false), ("open", true), ("local", true)] {
        let server = RedisServer::start();
        let options = RedisOptions::new(server.url().parse().unwrap(), secret(9)).deadline(Duration::from_millis(200));
        let store = RedisStore::open(options).await.unwrap();
        let node = node_on(store, &format!("{TEN_A_DAY}on_store_error = '{mode}'\n"));
        reconnected(&node).await;
        until("the node has its share", || node.store().share().is_some()).await;
        assert_eq!(server.cli(&["CLIENT", "PAUSE", "1000", "ALL"]), "OK\n");
        let decision = check(&node, "ada").await;
        assert_eq!((decision.allowed(), decision.degraded.is_some()), (is_admitted, true), "{mode}");
        reconnected(&node).await;
        // The call that was late has been executed before this one, on the same connection.
        node.follow_control().await.unwrap();
        let left = if is_admitted { 9 } else { 10 };
        until_left(&node, left).await;
        node.follow_control().await.unwrap();
        until_left(&node, left).await;
    }
}

/// Waits until so much is left in the store of what "ada" may do. A loaded machine may miss the deadline meanwhile.
async fn until_left(node: &Node, left: u64) {
    let mut found = None;
    for _ in 0..200 {
        let peeked = node.peek_async(&Facts { user: Some("ada"), ..Facts::default() }).await.unwrap();
        found = peeked.degraded.is_none().then(|| peeked.readings[0].remaining + 1);
        if found == Some(left) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        let _ = node.follow_control().await;
    }
    panic!("{left} should be left, and not {found:?}");
}
