//! Denials that a node repeats: a flood from one caller costs the server about one call a second, and no strike or refund is lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use threshold_core::limit::LimitOptions;
use threshold_core::policy::Layer;
use threshold_core::{Decision, DigestKey, Limit};
use threshold_limiter::{Facts, Limiter, Policy};
use threshold_redis::RedisStore;

use crate::process::RedisServer;

type Node = Limiter<RedisStore>;

async fn node(server: &RedisServer, policy: &str) -> Node {
    let policy = Policy::parse(policy, &|_| None).unwrap();
    let builder = Limiter::builder(policy).store(server.open().await).digest_key(DigestKey::new([7; 16]));
    builder.build().unwrap()
}

/// Returns how often records were read so far. Every decision that is made with the server reads its records once or twice;
/// heartbeats and searches for expired reservations read none this way.
fn reads(server: &RedisServer) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_mget:calls="));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

async fn check(node: &Node, user: &str) -> Decision {
    node.check_async(&Facts { user: Some(user), ..Facts::default() }).await.unwrap()
}

/// Sends denied requests for about two seconds, and asserts that the server was asked at most so often in each.
async fn flood<'f>(server: &RedisServer, node: &Node, calls: f64, facts: impl Fn(usize) -> Facts<'f>) {
    let (before, began) = (reads(server), Instant::now());
    let mut sent = 0;
    while began.elapsed() < Duration::from_secs(2) || sent < 2_000 {
        let decision = node.check_async(&facts(sent)).await.unwrap();
        assert!(!decision.allowed() && decision.degraded.is_none());
        sent += 1;
    }
    // One call when an entry is 950 ms old, and up to three reads for a call with a standing.
    let seconds = began.elapsed().as_secs_f64();
    let (asked, most) = (reads(server) - before, 3.0 * calls * (2.0 + seconds / 0.95));
    assert!(asked as f64 <= most, "{asked} reads for {sent} requests in {seconds} s");
}

const FIVE_A_DAY: &str = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/day'\nalgorithm = 'fixed-window'\n";

/// A client that ignored its denials cost Redis as much as one that was served. Now it does not, also as another tenant with each
/// request.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_over_the_limit_costs_one_call_a_second() {
    let server = RedisServer::start();
    let tenant = "[[rule]]\nname = 'tenant'\nper = ['tenant']\nlimit = '1000/day'\nalgorithm = 'fixed-window'\n";
    let node = node(&server, &format!("{FIVE_A_DAY}{tenant}")).await;
    let ada = Facts { user: Some("ada"), tenant: Some("acme"), ..Facts::default() };
    for _ in 0..5 {
        assert!(node.check_async(&ada).await.unwrap().allowed());
    }
    let first = node.check_async(&ada).await.unwrap();
    let again = node.check_async(&ada).await.unwrap();
    assert_eq!(again.readings, first.readings, "the figures of the store");
    assert!(again.retry_after() <= first.retry_after() && again.ready_at == first.ready_at);
    assert!(again.at >= first.at);
    flood(&server, &node, 1.0, |_| ada).await;
    let tenants: Vec<String> = (0..1_000).map(|tenant| tenant.to_string()).collect();
    // Sixteen of them ask for the figures of their tenants.
    let facts = |request: usize| Facts { tenant: Some(&tenants[request % tenants.len()]), ..ada };
    flood(&server, &node, 17.0, facts).await;
}

/// Any ladder of the same user on another path made each denial by a quota cost Redis a call: 880 to 1,215 of them a second.
#[tokio::test(flavor = "multi_thread")]
async fn a_ladder_on_another_path_does_not_make_denials_cost_a_call_each() {
    let server = RedisServer::start();
    let quota = FIVE_A_DAY.replace("per =", "match = { path = '/quota' }\nper =");
    let other =
        "[[rule]]\nname = 'other'\nmatch = { path = '/other' }\nper = ['user']\nlimit = '9/day'\nladder = 'own'\n";
    let node = node(&server, &format!("[ladders.own]\nrungs = ['deny', 'ban 1h']\n{quota}{other}")).await;
    let ada = Facts { user: Some("ada"), path: Some("/quota"), method: Some("GET"), ..Facts::default() };
    for _ in 0..5 {
        assert!(node.check_async(&ada).await.unwrap().allowed());
    }
    flood(&server, &node, 1.0, |_| ada).await;
}

/// Strikes must reach the store, or nobody would be banned. A ban that is in force costs no more than a full limit.
#[tokio::test(flavor = "multi_thread")]
async fn every_strike_reaches_the_store_and_a_ban_is_repeated() {
    let server = RedisServer::start();
    let ladder = "[ladders.own]\nrungs = ['deny', 'deny', 'ban 1h']\n";
    let node = node(&server, &format!("{ladder}{FIVE_A_DAY}ladder = 'own'\nstrike = 'request'\n")).await;
    for _ in 0..5 {
        assert!(check(&node, "ada").await.allowed());
    }
    let strikes: Vec<bool> = [check(&node, "ada").await, check(&node, "ada").await, check(&node, "ada").await]
        .map(|decision| decision.banned())
        .into();
    assert_eq!(strikes, [false, false, true]);
    flood(&server, &node, 1.0, |_| Facts { user: Some("ada"), ..Facts::default() }).await;
}

/// An operator forgave a caller who went on to be denied, and a refund made room that nobody could use.
#[tokio::test(flavor = "multi_thread")]
async fn a_refund_or_a_pardon_ends_a_denial_at_once_here_and_soon_elsewhere() {
    let server = RedisServer::start();
    let nodes = Arc::new([node(&server, FIVE_A_DAY).await, node(&server, FIVE_A_DAY).await]);
    let ada = Facts { user: Some("ada"), ..Facts::default() };
    let (_, receipt) = nodes[0].check_with_receipt_async(&ada).await.unwrap();
    for _ in 0..4 {
        assert!(check(&nodes[0], "ada").await.allowed());
    }
    for node in nodes.iter() {
        assert!(!check(node, "ada").await.allowed());
    }
    assert!(nodes[0].refund_async(&receipt.unwrap()).await.unwrap());
    assert!(check(&nodes[0], "ada").await.allowed(), "the place that was given back");
    assert!(!check(&nodes[0], "ada").await.allowed());
    nodes[0].forgive_async(Layer::User, "ada").await.unwrap();
    assert!(check(&nodes[0], "ada").await.allowed());
    let mut tries = 0;
    while !check(&nodes[1], "ada").await.allowed() {
        tries += 1;
        assert!(tries < 400, "the other node denies for ever");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    nodes[1].pause_async(Layer::User, "ada", Duration::from_secs(3600)).await.unwrap();
    let paused = check(&nodes[1], "ada").await;
    assert!(!paused.allowed());
    // A pause of two hours moves the end of a denial that is repeated.
    nodes[1].pause_async(Layer::User, "ada", Duration::from_secs(7200)).await.unwrap();
    assert!(check(&nodes[1], "ada").await.ready_at > paused.ready_at);
}

/// A program that counted by a limit of its own (`/v1/limit`) asked Redis for every denial.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_over_a_limit_without_a_policy_costs_one_call_a_second() {
    let server = RedisServer::start();
    let nodes = [node(&server, "").await, node(&server, "").await];
    let limit = LimitOptions::new().limit(5, Duration::from_secs(3600)).unwrap();
    for _ in 0..5 {
        assert!(nodes[0].check_limit("a key", &limit, 1).await.unwrap().allowed);
    }
    let (before, began) = (reads(&server), Instant::now());
    let first = nodes[0].check_limit("a key", &limit, 1).await.unwrap();
    for _ in 1..1_000 {
        let again = nodes[0].check_limit("a key", &limit, 1).await.unwrap();
        assert!(!again.allowed && again.remaining == 0);
        assert!(again.retry_after <= first.retry_after && again.retry_after >= Some(Duration::from_secs(1)));
    }
    // The first one, and one whenever the answer is 950 ms old.
    let (asked, most) = (reads(&server) - before, 1 + began.elapsed().as_millis() / 950);
    assert!(u128::from(asked) <= most, "{asked} reads in {:?}", began.elapsed());
    // Slots of a concurrency limit are free as soon as another node gives one back.
    let held = Limit::concurrent(1, Duration::from_secs(3600)).unwrap();
    assert!(nodes[1].check_limit("held", &held, 1).await.unwrap().allowed);
    let before = reads(&server);
    for _ in 0..10 {
        assert!(!nodes[0].check_limit("held", &held, 1).await.unwrap().allowed);
    }
    assert!(reads(&server) - before >= 10);
}
