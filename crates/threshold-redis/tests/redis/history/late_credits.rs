//! Charges of refused requests that are executed late, on a Cluster whose primaries are suspended and killed: what is given back
//! for them is given back once, in every partition.

use std::sync::Arc;
use std::time::{Duration, Instant};

use threshold_limiter::{Facts, Layer};
use tokio::task::JoinSet;

use super::node::{self, Node, Opening};
use crate::process::{Cluster, PATIENCE, PRIMARIES};

/// The limit of each tenant, which must not be exceeded.
const LIMIT: usize = 100;

fn policy() -> String {
    format!(
        "[[rule]]\nname = 'tenant'\nper = ['tenant']\nlimit = '{LIMIT}/month'\nalgorithm = 'fixed-window'\non_store_error = 'closed'\n\
         [[rule]]\nname = 'user'\nper = ['user']\nlimit = '10000/month'\nalgorithm = 'fixed-window'\non_store_error = 'closed'\n"
    )
}

async fn start(cluster: &Cluster) -> Node {
    let deadline = Duration::from_millis(100);
    node::open(&Opening { url: cluster.url(), policy: policy(), secret: 1, old: None, deadline }).await
}

/// Returns names of subjects whose records are on this primary.
fn names_on(cluster: &Cluster, node: &Node, layer: Layer, primary: usize, count: usize) -> Vec<String> {
    let on = |name: &String| {
        let key = *node.policy().keys_of(layer, name).balances.keys().next().unwrap();
        let slot = cluster.slot(&format!("th:{{{:04x}}}b:", key.partition().to_u16()));
        let (first, last) = PRIMARIES[primary];
        (first..=last).contains(&slot)
    };
    (0..).map(|number| format!("{layer:?}-{number}")).filter(on).take(count).collect()
}

/// Returns whether the store has admitted a request; `None` if it has not answered.
async fn check(node: &Node, user: &str, tenant: &str) -> Option<bool> {
    let facts = Facts { user: Some(user), tenant: Some(tenant), ..Facts::default() };
    let decision = node.check_async(&facts).await.unwrap();
    assert!(decision.degraded.is_none() || !decision.allowed(), "the policy is closed without the store");
    decision.degraded.is_none().then(|| decision.allowed())
}

/// Sends so many requests at once. Returns how many were admitted, and how many were not answered.
async fn send(node: &Node, user: &str, tenant: &str, requests: usize) -> (usize, usize) {
    let mut tasks = JoinSet::new();
    for _ in 0..requests {
        let (node, user, tenant) = (Arc::clone(node), user.to_owned(), tenant.to_owned());
        tasks.spawn(async move { check(&node, &user, &tenant).await });
    }
    let answers = tasks.join_all().await;
    let admitted = answers.iter().filter(|answer| **answer == Some(true)).count();
    (admitted, answers.iter().filter(|answer| answer.is_none()).count())
}

/// The primary of a user stood still and was then killed, with charges under way that the node wanted to withdraw. As long as the
/// primary was away, the tenant's record on another one was credited again every half second: 1,719 of 1,000 were admitted in 40 s.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_charge_is_withdrawn_once_although_its_other_primary_is_gone() {
    let mut cluster = Cluster::start();
    let node = start(&cluster).await;
    let user = names_on(&cluster, &node, Layer::User, 0, 1).remove(0);
    let tenant = names_on(&cluster, &node, Layer::Tenant, 1, 1).remove(0);
    let others = names_on(&cluster, &node, Layer::User, 1, 20);
    let (mut admitted, mut unanswered) = (send(&node, &others[0], &tenant, 20).await.0, 0);
    // The first request of a connection may take longer than the deadline.
    admitted += send(&node, &user, &tenant, 1).await.0;
    cluster.node(0).suspend();
    let late = send(&node, &user, &tenant, 12).await;
    (admitted, unanswered) = (admitted + late.0, unanswered + late.1);
    cluster.node(0).go_on();
    tokio::time::sleep(Duration::from_millis(30)).await;
    cluster.kill(0);
    let (begun, mut asked) = (Instant::now(), 0);
    while begun.elapsed() < Duration::from_secs(6) {
        let (more, without) = send(&node, &others[asked % others.len()], &tenant, 4).await;
        (admitted, unanswered, asked) = (admitted + more, unanswered + without, asked + 1);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!("{admitted} of {LIMIT} admitted in 6 s; {unanswered} were not answered");
    assert!(admitted <= LIMIT, "{admitted} of {LIMIT} admitted");
}

/// The same without a kill: a primary stands still six times. Each late charge was given back twice, by the node that had denied it and
/// by the one that withdrew it: 17 keys were over their limits, 224 of 220.
#[tokio::test(flavor = "multi_thread")]
async fn pauses_of_a_primary_bring_no_key_over_its_limit() {
    const PAIRS: usize = 12;
    let cluster = Cluster::start();
    let node = start(&cluster).await;
    let users = names_on(&cluster, &node, Layer::User, 0, PAIRS);
    let tenants = names_on(&cluster, &node, Layer::Tenant, 1, PAIRS);
    let mut admitted = [0; PAIRS];
    for (pair, admitted) in admitted.iter_mut().enumerate() {
        *admitted += send(&node, &users[pair], &tenants[pair], 20).await.0;
    }
    for _ in 0..6 {
        cluster.node(0).suspend();
        let end = Instant::now() + Duration::from_millis(700);
        // Before the primary is left alone, so that all of them are executed late.
        let bursts = users.iter().zip(&tenants).map(|(user, tenant)| send(&node, user, tenant, 9));
        let told = futures_util::future::join_all(bursts).await;
        admitted.iter_mut().zip(told).for_each(|(all, (more, _))| *all += more);
        while Instant::now() < end {
            admitted[0] += send(&node, &users[0], &tenants[0], 1).await.0;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        cluster.node(0).go_on();
        // The late answers have come, and the primary is still left alone for a moment: the node looks at the log just then.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let _ = node.follow_control().await;
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    // Everything is answered, and withdrawn.
    for _ in 0..4 {
        let _ = node.follow_control().await;
        node.store().returned().await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let begun = Instant::now();
    for (pair, admitted) in admitted.iter_mut().enumerate() {
        loop {
            match check(&node, &users[pair], &tenants[pair]).await {
                Some(true) => *admitted += 1,
                Some(false) => break,
                None => assert!(begun.elapsed() < PATIENCE),
            }
        }
    }
    println!("admitted of {LIMIT} after six pauses: {admitted:?}");
    let over = admitted.iter().filter(|admitted| **admitted > LIMIT).count();
    let under = admitted.iter().filter(|admitted| **admitted < LIMIT).count();
    assert_eq!((over, under), (0, 0), "keys over and under {LIMIT}: {admitted:?}");
}
