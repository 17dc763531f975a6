//! Redis goes away and comes back: each node has its share of a limit meanwhile, and all of them together admit no more than one
//! limit beyond it.

use std::time::Duration;

use threshold_core::{Decision, DigestKey, KeyId};
use threshold_limiter::store::redis::{RedisOptions, RedisStore};
use threshold_limiter::store::{Share, Store as _};
use threshold_limiter::{Facts, Limiter, Policy, Secret};

use crate::process::RedisServer;

type Node = Limiter<RedisStore>;

fn node_on(store: RedisStore, policy: &str) -> Node {
    let policy = Policy::parse(policy, &|_| None).unwrap();
    let builder = Limiter::builder(policy).store(store).digest_key(DigestKey::new([7; 16]));
    builder.secrets(Secret::new(&[9; 32]).unwrap()).build()
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
    for _ in 0..20 {
        let mut server = RedisServer::start();
        let first = node(&server, TEN_A_DAY).await;
        assert_eq!(first.store().share(), Some(Share::ALL));
        let second = node(&server, TEN_A_DAY).await;
        server.kill();
        // The first node may have sent a heartbeat in between.
        if second.store().share().is_some() {
            continue;
        }
        assert_eq!(admitted_blind(std::slice::from_ref(&second), "ada", 3).await, 0);
        assert!(check(&second, "ada").await.unavailable());
        assert_eq!(admitted_blind(std::slice::from_ref(&first), "ada", 30).await, 10);
        return;
    }
    panic!("the first node was faster 20 times");
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
        let node = node(&server, &format!("{TEN_A_DAY}on_store_error = '{mode}'\n")).await;
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

/// A server that was slow for a moment charged requests that had been refused by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_charge_that_comes_too_late_is_withdrawn_if_its_request_was_refused() {
    for (mode, is_admitted) in [("closed", false), ("open", true), ("local", true)] {
        let server = RedisServer::start();
        let options =
            RedisOptions::new(server.url().parse().unwrap(), KeyId::from_u32(1)).deadline(Duration::from_millis(200));
        let store = RedisStore::open(options).await.unwrap();
        let node = node_on(store, &format!("{TEN_A_DAY}on_store_error = '{mode}'\n"));
        reconnected(&node).await;
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
