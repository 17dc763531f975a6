//! Rotation of the secret after a ban, and commands that name no record.

use std::time::Duration;

use threshold_limiter::store::{Kind, Store as _};
use threshold_limiter::{Attempted, Facts, Layer, LoginError, LoginRequest, PauseError};

use super::node::{self, Node, Opening};
use crate::process::{Cluster, PATIENCE, RedisServer};

const POLICY: &str = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '10/month'\nalgorithm = 'fixed-window'\n\
                      on_store_error = 'closed'\n[login]\naccount = '100/day'\nlocks = { 3 = '24h' }\n";
/// A deadline that no busy machine misses: these histories are about answers.
const LONG: Duration = Duration::from_secs(20);

async fn open(server: &RedisServer, secret: u8, old: Option<u8>) -> Node {
    node::open(&Opening { url: server.url(), policy: POLICY.to_owned(), secret, old, deadline: LONG }).await
}

/// Sends so many requests of a user. Returns how many the store has admitted, and how many it has not answered.
async fn check(node: &Node, user: &str, requests: usize) -> (usize, usize) {
    let (mut admitted, mut degraded) = (0, 0);
    for _ in 0..requests {
        let decision = node.check_async(&Facts { user: Some(user), ..Facts::default() }).await.unwrap();
        degraded += usize::from(decision.degraded.is_some());
        admitted += usize::from(decision.allowed() && decision.degraded.is_none());
    }
    (admitted, degraded)
}

/// Attempts to log in. Returns whether the account is open; an error if the store has not answered.
async fn attempt(node: &Node, account: &str) -> Result<bool, LoginError> {
    let request = LoginRequest { account: Some(account), ip: "192.0.2.1".parse().ok(), ..LoginRequest::default() };
    let attempted = node.login_attempt_async(&request).await?;
    if let Attempted::Allowed(token) = &attempted {
        let _ = node.login_result_async(token, false).await?;
    }
    Ok(matches!(attempted, Attempted::Allowed(_)))
}

/// An operator had banned somebody, at some time. Then the secret was replaced as the page says: every check with a record to move was
/// `store_error` and every login a 503, and after the end of the rotation the used-up limit and the locked account were open again.
#[tokio::test(flavor = "multi_thread")]
async fn a_rotation_after_a_ban_loses_nothing() {
    let server = RedisServer::start();
    let old = open(&server, 1, None).await;
    assert_eq!(check(&old, "u0", 12).await, (10, 0));
    assert_eq!(check(&old, "u1", 4).await, (4, 0));
    for _ in 0..3 {
        assert!(attempt(&old, "ada").await.unwrap());
    }
    assert!(!attempt(&old, "ada").await.unwrap());
    node::ban(&old, "eve").await.unwrap();
    drop(old);

    let both = open(&server, 2, Some(1)).await;
    both.follow_control().await.unwrap();
    // The whole story, so that one run shows every figure.
    let mut wrong = Vec::new();
    let mut expect = |what: &str, found: String, right: &str| {
        if found != right {
            wrong.push(format!("{what}: {found} and not {right}"));
        }
    };
    expect("u0, admitted and unanswered of 5", format!("{:?}", check(&both, "u0", 5).await), "(0, 0)");
    expect("u1, admitted and unanswered of 3", format!("{:?}", check(&both, "u1", 3).await), "(3, 0)");
    expect("a login of ada", format!("{:?}", attempt(&both, "ada").await), "Ok(false)");
    expect("a login of bob", format!("{:?}", attempt(&both, "bob").await), "Ok(true)");
    expect("the banned one", format!("{:?}", check(&both, "eve", 2).await), "(0, 0)");
    drop(both);

    let after = open(&server, 2, None).await;
    after.follow_control().await.unwrap();
    expect("u0 after the end, of 12", format!("{:?}", check(&after, "u0", 12).await), "(0, 0)");
    expect("u1 after the end, of 12", format!("{:?}", check(&after, "u1", 12).await), "(3, 0)");
    expect("a login of ada after the end", format!("{:?}", attempt(&after, "ada").await), "Ok(false)");
    expect("a login of bob after the end", format!("{:?}", attempt(&after, "bob").await), "Ok(true)");
    expect("the banned one after the end", format!("{:?}", check(&after, "eve", 2).await), "(0, 0)");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// After the first ban, `/v1/pause` and `DELETE /v1/subjects/tenant/x` were a 503 for every key that no rule counts.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_ban_a_key_that_no_rule_counts_is_paused_and_forgiven() {
    let server = RedisServer::start();
    let node = open(&server, 1, None).await;
    let nothing = Err(PauseError::NoSubject);
    assert_eq!(node.pause_async(Layer::Tenant, "x", Duration::from_secs(60)).await, nothing);
    node.forgive_async(Layer::Tenant, "x").await.unwrap();
    node::ban(&node, "eve").await.unwrap();
    let paused = node.pause_async(Layer::Tenant, "x", Duration::from_secs(60)).await;
    let forgiven = node.forgive_async(Layer::Tenant, "x").await;
    assert_eq!((paused, forgiven), (nothing, Ok(())));
    assert_eq!(check(&node, "ada", 2).await, (2, 0));
}

const STRICT: &str = "[ladders.hard]\nrungs = ['ban 24h']\n[[rule]]\nname = 'user'\nper = ['user']\nlimit = '1/month'\n\
                      algorithm = 'fixed-window'\nladder = 'hard'\n[login]\nlocks = { 1 = '24h' }\n";

/// Bans of ladders and locks moved to the digests of the new secret, held, and were in no list any more: an export of bans let a banned
/// address in again.
async fn what_has_moved_is_listed(url: String) {
    let open = async |secret: u8, old: Option<u8>| {
        let policy = STRICT.to_owned();
        node::open(&Opening { url: url.clone(), policy, secret, old, deadline: LONG }).await
    };
    let old = open(1, None).await;
    assert_eq!(check(&old, "zed", 2).await, (1, 0));
    assert!(attempt(&old, "ada").await.unwrap());
    drop(old);
    let both = open(2, Some(1)).await;
    assert_eq!(check(&both, "zed", 1).await, (0, 0));
    assert!(!attempt(&both, "ada").await.unwrap());
    for kind in [Kind::Banned, Kind::Accounts] {
        let begun = std::time::Instant::now();
        while both.store().list(kind, None, 9, std::time::SystemTime::now().into()).await.unwrap().len() != 1 {
            assert!(begun.elapsed() < PATIENCE, "{kind:?} has lost what was moved");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Woken by: a move without `listed::add`.
#[tokio::test(flavor = "multi_thread")]
async fn what_has_moved_on_one_server_is_listed() {
    let server = RedisServer::start();
    what_has_moved_is_listed(server.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_moved_on_a_cluster_is_listed() {
    let cluster = Cluster::start();
    what_has_moved_is_listed(cluster.url()).await;
}

/// While the nodes were restarted one after the other, each request to a node with both secrets took away what a node with the old one had
/// counted: that node let every guess at a password through.
async fn a_node_with_the_old_secret_counts_on(url: String) {
    let open = async |secret: u8, old: Option<u8>| {
        let policy = POLICY.to_owned();
        node::open(&Opening { url: url.clone(), policy, secret, old, deadline: LONG }).await
    };
    let (old, both) = (open(1, None).await, open(2, Some(1)).await);
    let (mut admitted, mut guesses) = (0, 0);
    for _ in 0..30 {
        for node in [&old, &both] {
            admitted += check(node, "u0", 1).await.0;
            guesses += usize::from(attempt(node, "ada").await.unwrap());
        }
    }
    assert!(admitted <= 20, "{admitted} of 10 by each secret");
    assert!(guesses <= 6, "{guesses} of 3 by each secret");
}

/// Woken by: a move that deletes the old record where there is a new one.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_the_old_secret_counts_on_with_one_server() {
    let server = RedisServer::start();
    a_node_with_the_old_secret_counts_on(server.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_the_old_secret_counts_on_with_a_cluster() {
    let cluster = Cluster::start();
    a_node_with_the_old_secret_counts_on(cluster.url()).await;
}
