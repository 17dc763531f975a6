//! Nodes that are killed between any two calls leave no charge that nobody can give back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::node::{self, Ask, Opening, Request, Told};
use super::random::Random;
use super::remote::RemoteNode;
use crate::process::{PATIENCE, RedisServer};
use crate::proxy::Proxy;

const POLICY: &str = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '100000/month'\nalgorithm = 'fixed-window'\n\
                      on_store_error = 'closed'\n";
const LIMIT: u64 = 100_000;
/// How often a node is killed, and how many reservations are under way then.
const KILLS: u64 = 12;
const AT_ONCE: usize = 24;
const TTL: Duration = Duration::from_secs(1);

fn request(cost: u64) -> Request {
    Request { user: "ada".to_owned(), tenant: "acme".to_owned(), category: "any".to_owned(), cost }
}

/// What a reservation charges, and what is committed of it.
const RESERVED: u64 = 5;
const COMMITTED: u64 = 2;

/// Reserves and commits on a node until it is killed. Returns how much was committed for certain, and how much perhaps.
async fn reserve(node: Arc<RemoteNode>) -> (u64, u64) {
    let (mut certain, mut perhaps) = (0, 0);
    loop {
        let reserve = Ask::Reserve { request: request(RESERVED), ttl: TTL, releases: true };
        let id = match node.ask(reserve).await {
            Told::Reserved { id } => id,
            Told::Lost => return (certain, perhaps),
            _ => continue,
        };
        match node.ask(Ask::Commit { id, cost: COMMITTED }).await {
            Told::Done => certain += COMMITTED,
            Told::Lost => return (certain, perhaps + COMMITTED),
            // It expired meanwhile.
            Told::Unknown => {}
            _ => perhaps += COMMITTED,
        }
    }
}

/// A node was killed between charging and saving the reservation that would have given the charge back: with `onExpire = "release"`
/// it was never freed. Here each node is a millisecond away from Redis, so that many reservations are between their two calls.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_while_it_reserves_leaves_no_charge() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    proxy.set_delay(Duration::from_millis(1));
    let deadline = Duration::from_secs(5);
    let opening = |url| Opening { url, policy: POLICY.to_owned(), secret: 1, old: None, deadline };
    let (witness, mut random) = (node::open(&opening(server.url())).await, Random::new(6));
    let (mut certain, mut perhaps) = (0, 0);
    for _ in 0..KILLS {
        let node = Arc::new(RemoteNode::start(&opening(proxy.url())).await);
        let tasks: JoinSet<_> = (0..AT_ONCE).map(|_| reserve(Arc::clone(&node))).collect();
        tokio::time::sleep(Duration::from_millis(100 + random.below(100))).await;
        node.kill();
        for (more_certain, more_perhaps) in tasks.join_all().await {
            (certain, perhaps) = (certain + more_certain, perhaps + more_perhaps);
        }
    }
    let (begun, mut used) = (Instant::now(), u64::MAX);
    // Every reservation expires, and the witness gives it back.
    while begun.elapsed() < TTL + Duration::from_secs(6) && !(certain..=certain + perhaps).contains(&used) {
        tokio::time::sleep(Duration::from_millis(200)).await;
        if let Told::Left { remaining, .. } = node::ask(&witness, Ask::Peek(request(0))).await {
            used = LIMIT - remaining[0];
        }
    }
    println!("{KILLS} kills: {certain} committed for certain and {perhaps} perhaps, {used} used");
    assert!(begun.elapsed() < PATIENCE);
    let right = certain..=certain + perhaps;
    assert!(right.contains(&used), "{used} are used, and {certain} to {} were committed", right.end());
}
