//! Nodes that are killed between any two calls leave no charge that nobody can give back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::node::{self, Ask, Opening, Request, Told};
use super::random::Random;
use super::remote::RemoteNode;
use crate::process::RedisServer;
use crate::proxy::Proxy;

const POLICY: &str = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '100000/month'\nalgorithm = 'fixed-window'\n\
                      on_store_error = 'closed'\n";
const LIMIT: u64 = 100_000;
/// How often a node is killed, and how many reservations are under way then.
const KILLS: u64 = 12;
const AT_ONCE: usize = 24;
const TTL: Duration = Duration::from_secs(1);

fn request(user: &str, cost: u64) -> Request {
    Request { user: user.to_owned(), tenant: "acme".to_owned(), category: "any".to_owned(), cost }
}

/// What a reservation charges, and what is committed of it.
const RESERVED: u64 = 5;
const COMMITTED: u64 = 2;

/// Of its reservations nothing is ever committed, so that everything must be free in the end.
const RESERVES: &str = "ada";
const COMMITS: &str = "bob";

/// Reserves, and commits for one of the users, on a node until it is killed. Returns how much was committed for certain, and how much
/// perhaps.
async fn reserve(node: Arc<RemoteNode>, user: &str) -> (u64, u64) {
    let (mut certain, mut perhaps) = (0, 0);
    loop {
        let reserve = Ask::Reserve { request: request(user, RESERVED), ttl: TTL, releases: true };
        let id = match node.ask(reserve).await {
            Told::Reserved { id } => id,
            Told::Lost => return (certain, perhaps),
            _ => continue,
        };
        if user == RESERVES {
            continue;
        }
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
        let users = [RESERVES, COMMITS].into_iter().cycle().take(AT_ONCE);
        let tasks: JoinSet<_> = users.map(|user| reserve(Arc::clone(&node), user)).collect();
        tokio::time::sleep(Duration::from_millis(100 + random.below(100))).await;
        node.kill();
        for (more_certain, more_perhaps) in tasks.join_all().await {
            (certain, perhaps) = (certain + more_certain, perhaps + more_perhaps);
        }
    }
    let right = [0..=0, certain..=certain + perhaps];
    let (begun, mut used) = (Instant::now(), [u64::MAX; 2]);
    let is_right = |used: &[u64; 2]| right.iter().zip(used).all(|(right, used)| right.contains(used));
    // Every reservation expires, and the witness gives it back.
    while begun.elapsed() < TTL + Duration::from_secs(6) && !is_right(&used) {
        tokio::time::sleep(Duration::from_millis(200)).await;
        for (used, user) in used.iter_mut().zip([RESERVES, COMMITS]) {
            if let Told::Left { remaining, .. } = node::ask(&witness, Ask::Peek(request(user, 0))).await {
                *used = LIMIT - remaining[0];
            }
        }
    }
    println!("{KILLS} kills: {certain} committed for certain and {perhaps} perhaps, and {used:?} are used");
    assert!(is_right(&used), "{used:?} are used and not {right:?}");
}
