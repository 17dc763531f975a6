//! A credit counts once, however often and from wherever it is sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use threshold_core::TraceId;
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_limiter::store::{EndError, StoreError};
use threshold_limiter::{Facts, Receipt};
use tokio::task::JoinSet;

use super::node::{self, Node, Opening};
use crate::process::{Cluster, PATIENCE, RedisServer};
use crate::proxy::{Mode, Proxy};

const ALGORITHMS: [&str; 6] = threshold_core::limit::Algorithm::NAMES;
const LIMIT: u64 = 1_000;
const TTL: Duration = Duration::from_secs(3_000);

fn policy(algorithm: &str) -> String {
    let limit = if algorithm == "concurrency" { format!("'{LIMIT}'\nttl = '1h'") } else { format!("'{LIMIT}/month'") };
    let rule = |per: &str| {
        format!(
            "[[rule]]\nname = '{per}'\nper = ['{per}']\nlimit = {limit}\nalgorithm = '{algorithm}'\non_store_error = 'closed'\n"
        )
    };
    rule("user") + &rule("tenant")
}

async fn open(url: String, algorithm: &str) -> Node {
    let (policy, deadline) = (policy(algorithm), Duration::from_secs(20));
    node::open(&Opening { url, policy, secret: 1, old: None, deadline }).await
}

fn ada(cost: u64) -> Facts<'static> {
    Facts { user: Some("ada"), tenant: Some("acme"), cost: Some(cost), ..Facts::default() }
}

/// Charges, and returns the receipt.
async fn charge(node: &Node, cost: u64) -> Receipt {
    let (decision, receipt) = node.check_with_receipt_async(&ada(cost)).await.unwrap();
    assert!(decision.allowed() && decision.degraded.is_none());
    receipt.unwrap()
}

async fn reserve(node: &Node, cost: u64, on_expire: OnExpire) -> TraceId {
    node.reserve_async(&ada(cost), TTL, on_expire).await.unwrap().reservation.unwrap()
}

/// Returns what the user and the tenant have used.
async fn used(node: &Node) -> Vec<u64> {
    let begun = Instant::now();
    loop {
        let decision = node.peek_async(&ada(0)).await.unwrap();
        if decision.degraded.is_none() {
            return decision.readings.iter().map(|reading| LIMIT - reading.remaining).collect();
        }
        assert!(begun.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Redis was emptied between charges and their refunds. The refunds took the charges of other requests away.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_charged_to_a_lost_history_is_not_credited_to_the_next() {
    let mut wrong = Vec::new();
    for algorithm in ALGORITHMS {
        let server = RedisServer::start();
        let node = open(server.url(), algorithm).await;
        let mut receipts = Vec::new();
        for _ in 0..10 {
            receipts.push(charge(&node, 1).await);
        }
        let held = reserve(&node, 5, OnExpire::Release).await;
        server.cli(&["FLUSHALL"]);
        for _ in 0..10 {
            charge(&node, 1).await;
        }
        for receipt in &receipts {
            let _ = node.refund_async(receipt).await;
        }
        let _ = node.release_async(held).await;
        let used = used(&node).await;
        if used != [10, 10] {
            wrong.push(format!("{algorithm}: {used:?} are used and not 10"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Sends something so many times at once through all nodes. Returns the answers.
async fn at_once<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
    nodes: &[Node],
    times: usize,
    send: impl Fn(Node) -> F,
) -> Vec<T> {
    let sent: JoinSet<T> = (0..times).map(|time| send(Arc::clone(&nodes[time % nodes.len()]))).collect();
    sent.join_all().await
}

/// Sends refunds, commits and releases eight times each, and returns what is used of each limit in the end: four times 1, and four
/// times 2 for each of two commits.
async fn everything_eight_times(nodes: &[Node]) -> Vec<u64> {
    for _ in 0..4 {
        let receipt = Arc::new(charge(&nodes[0], 3).await);
        let refund = |node: Node| {
            let receipt = Arc::clone(&receipt);
            async move { node.refund_async(&receipt).await }
        };
        let first = at_once(nodes, 8, refund).await;
        assert!(first.iter().all(Result::is_ok), "{first:?}");
        assert_eq!(first.into_iter().filter(|first| *first == Ok(true)).count(), 1, "the first one is told so");
        for on_expire in [OnExpire::Release, OnExpire::Charge] {
            let id = reserve(&nodes[0], 7, on_expire).await;
            let cost = ActualCost { cost: Some(2), ..ActualCost::default() };
            let ended = at_once(nodes, 8, move |node| async move { node.commit_async(id, &cost).await }).await;
            assert!(ended.iter().all(Result::is_ok), "a commit with the same cost may be repeated: {ended:?}");
            let id = reserve(&nodes[0], 7, on_expire).await;
            let ended = at_once(nodes, 8, move |node| async move { node.release_async(id).await }).await;
            assert!(ended.iter().any(Result::is_ok), "{ended:?}");
        }
        charge(&nodes[0], 1).await;
    }
    used(&nodes[0]).await
}

/// The same refund, commit and release come many times from several nodes at once, as from clients and proxies that repeat what was not
/// answered in time.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_sent_many_times_at_once_counts_once() {
    let mut wrong = Vec::new();
    let cluster = Cluster::start();
    for algorithm in ALGORITHMS {
        let server = RedisServer::start();
        cluster.flush();
        for url in [server.url(), cluster.url()] {
            let mut nodes = Vec::new();
            for _ in 0..3 {
                nodes.push(open(url.clone(), algorithm).await);
            }
            let used = everything_eight_times(&nodes).await;
            // A commit ends the use of a limit on what is in flight.
            let right = if algorithm == "concurrency" { 4 } else { 20 };
            if used != [right, right] {
                wrong.push(format!("{algorithm}: {used:?} are used and not {right}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Repeats a call whose answers are lost until it is answered. Returns how often it was sent.
async fn until_answered<T>(proxy: &Proxy, cuts: usize, send: impl AsyncFn() -> Result<T, EndError>) -> usize {
    let (begun, mut sent) = (Instant::now(), 0);
    loop {
        sent += 1;
        if sent <= cuts {
            proxy.set(Mode::CutOneReply);
        }
        match send().await {
            Ok(_) | Err(EndError::Unknown | EndError::OtherCost) => return sent,
            Err(EndError::Store(_)) => assert!(begun.elapsed() < PATIENCE),
            Err(error) => panic!("{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The connection was cut after each of three sendings, and the caller repeated it until it was answered. What is given back is given
/// back, and once.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_repeated_after_its_answer_was_lost_counts_once() {
    let mut wrong = Vec::new();
    for algorithm in ALGORITHMS {
        let server = RedisServer::start();
        let proxy = Proxy::start(&server).await;
        let (node, direct) = (open(proxy.url(), algorithm).await, open(server.url(), algorithm).await);
        let end = |error: StoreError| EndError::Store(error);
        let mut sent = 0;
        for _ in 0..3 {
            let receipt = charge(&direct, 3).await;
            sent += until_answered(&proxy, 3, async || node.refund_async(&receipt).await.map_err(end)).await;
            let id = reserve(&direct, 7, OnExpire::Release).await;
            let cost = ActualCost { cost: Some(2), ..ActualCost::default() };
            sent += until_answered(&proxy, 3, async || node.commit_async(id, &cost).await).await;
            let id = reserve(&direct, 7, OnExpire::Charge).await;
            sent += until_answered(&proxy, 3, async || node.release_async(id).await).await;
            charge(&direct, 1).await;
        }
        let used = used(&direct).await;
        println!("{algorithm}: {sent} calls for 9 ends");
        let right = if algorithm == "concurrency" { 3 } else { 9 };
        if used != [right, right] {
            wrong.push(format!("{algorithm}: {used:?} are used and not {right}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
