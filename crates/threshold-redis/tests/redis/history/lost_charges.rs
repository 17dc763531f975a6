//! Charges that a store may have lost: what is given back for them takes nothing off others, and is no first refund.

use std::time::{Duration, Instant};

use threshold_core::{Answer, Command, Digest, Limit, Outcome, Receipt, Span, Timestamp, TraceId};
use threshold_limiter::store::{Store as _, StoreErrorKind};
use threshold_limiter::{Facts, Policy};
use threshold_redis::RedisStore;

use super::node::{self, Opening};
use crate::process::{Cluster, PATIENCE, PRIMARIES, RedisServer, SlotMove};

const LIMIT: u64 = 200;

fn policy() -> Policy {
    let rule = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '200/month'\nalgorithm = 'fixed-window'";
    Policy::parse(rule, &|_| None).unwrap()
}

/// Charges a user. Returns the receipt, and how much is left; `None` while the store does not answer.
async fn try_charge(store: &RedisStore, id: u128, cost: u64) -> Option<(Option<Receipt>, u64)> {
    let policy = policy();
    let mut plan = policy.plan(&Facts { user: Some("ada"), cost: Some(cost), ..Facts::default() }).unwrap();
    plan.identify(|| TraceId::from_u128(id));
    let mut outcome = Outcome::default();
    store.settle(&plan, Timestamp::EPOCH, &mut outcome).await.ok()?;
    Some((plan.receipt(&outcome), plan.decide(&outcome).readings[0].remaining))
}

async fn charge(store: &RedisStore, id: u128, cost: u64) -> Receipt {
    eventually(async || try_charge(store, id, cost).await).await.0.unwrap()
}

/// Returns how much of the user's limit is used.
async fn used(store: &RedisStore) -> u64 {
    LIMIT - eventually(async || try_charge(store, 99, 0).await).await.1
}

/// Asks until there is an answer.
async fn eventually<T>(mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(begun.elapsed() < PATIENCE, "no answer");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn execute(store: &RedisStore, command: Command) -> Answer {
    eventually(async || store.execute(command.clone(), Timestamp::EPOCH).await.ok()).await
}

/// Gives charges back as a node does for a request that it has refused.
async fn withdraw(store: &RedisStore, receipt: Receipt) {
    let credit = Some(receipt.id());
    let withdrawn = execute(store, Command::GiveBack { receipt: Box::new(receipt), credit }).await;
    assert_eq!(withdrawn, Answer::Done);
    store.returned().await;
}

async fn refund(store: &RedisStore, receipt: &Receipt) -> Answer {
    execute(store, Command::Refund(Box::new(receipt.clone()))).await
}

fn slot_of(cluster: &Cluster, receipt: &Receipt) -> u16 {
    let place = receipt.keys().next().unwrap().partition().to_u16();
    cluster.slot(&format!("th:{{{place:04x}}}head"))
}

/// Twelve late charges of refused requests were withdrawn from a server that had been restored from an older snapshot, which knew none of
/// them: 60 of the 100 that others had been admitted came free.
#[tokio::test(flavor = "multi_thread")]
async fn a_charge_whose_connection_broke_is_not_withdrawn_from_a_restored_server() {
    let mut server = RedisServer::start();
    let store = server.open().await;
    charge(&store, 1, 100).await;
    assert_eq!(server.cli(&["SAVE"]), "OK\n");
    let refused = charge(&store, 2, 60).await;
    server.kill();
    server.restart();
    assert_eq!(used(&store).await, 100, "the snapshot");
    withdraw(&store, refused).await;
    assert_eq!(used(&store).await, 100);
    let counted = |store: &RedisStore| {
        let stayed = |error: &str| error.contains("the connection broke before a charge was given back");
        store.errors().iter().any(|error| error.kind == StoreErrorKind::Connection && stayed(&error.last))
    };
    assert!(counted(&store), "{:?}", store.errors());
    // While the connection lasts, it is given back.
    let refused = charge(&store, 3, 60).await;
    withdraw(&store, refused).await;
    assert_eq!(used(&store).await, 100);
}

/// On a Cluster the record of a tenant was credited on a promoted replica, which had never heard of the charge: 224 of 200 admitted.
#[tokio::test(flavor = "multi_thread")]
async fn a_charge_of_another_primary_is_not_withdrawn_from_its_replica() {
    let cluster = Cluster::start();
    let store = cluster.open().await;
    let refused = charge(&store, 2, 60).await;
    let slot = slot_of(&cluster, &refused);
    cluster.hand_over(PRIMARIES.iter().position(|(first, last)| (*first..=*last).contains(&slot)).unwrap());
    withdraw(&store, refused).await;
    // This replica has it, but nobody can tell that from one which has not.
    assert_eq!(used(&store).await, 60);
}

/// The late charges of `/v1/limit` had no history: after the store had lost everything, they were taken off what came after.
#[tokio::test(flavor = "multi_thread")]
async fn a_charge_of_one_limit_is_not_withdrawn_from_an_emptied_store() {
    let period = Duration::from_secs(864_000);
    let limits =
        [Limit::fixed(LIMIT, period), Limit::sliding_estimate(LIMIT, period), Limit::token_bucket(LIMIT, period)];
    for limit in limits.map(Result::unwrap) {
        let server = RedisServer::start();
        let store = server.open().await;
        let key = Digest::from_u128(7);
        let ask = async |id: u128, cost| {
            let id = TraceId::from_u128(id);
            match execute(&store, Command::Limit { key, limit, cost, id }).await {
                Answer::Limited { checked, at } => (checked, at),
                other => panic!("{other:?}"),
            }
        };
        let (late, at) = ask(1, 60).await;
        server.cli(&["FLUSHALL"]);
        ask(2, 100).await;
        let mark = (late.mark.unwrap(), late.history);
        withdraw(&store, Receipt::of_charge(TraceId::from_u128(1), key, &limit, mark, at)).await;
        assert_eq!(ask(3, 0).await.0.look.available, 100, "{limit:?}");
    }
}

/// A charge that was made while its slot moved said nothing of its history. After the store had lost it, its refund took 60 off others.
#[tokio::test(flavor = "multi_thread")]
async fn a_charge_that_was_made_while_its_slot_moved_is_refunded_in_its_own_history() {
    let cluster = Cluster::start();
    let store = cluster.open().await;
    let first = charge(&store, 1, 5).await;
    let slot = slot_of(&cluster, &first);
    let from = PRIMARIES.iter().position(|(first, last)| (*first..=*last).contains(&slot)).unwrap();
    let there = SlotMove { slot, from, to: (from + 1) % PRIMARIES.len() };
    cluster.begin_move(there);
    // One of two keys is there: a call with both is refused.
    assert_eq!(cluster.move_keys(there, 1), 1);
    let (kept, lost) = (charge(&store, 2, 60).await, charge(&store, 3, 60).await);
    while cluster.move_keys(there, 100) > 0 {}
    cluster.end_move(there);
    assert_eq!(used(&store).await, 125);
    assert_eq!(refund(&store, &kept).await, Answer::Refunded { first: true });
    assert_eq!(used(&store).await, 65);
    cluster.flush();
    charge(&store, 4, 70).await;
    assert_eq!(refund(&store, &lost).await, Answer::Refunded { first: false });
    assert_eq!(used(&store).await, 70);
}

/// A refund of what the store had lost was `first`, and so was each repeated refund of a window that had ended: the store had forgotten
/// the one before.
#[tokio::test(flavor = "multi_thread")]
async fn a_refund_without_effect_is_no_first_refund() {
    let server = RedisServer::start_with_clock();
    let start = Timestamp::from_secs(1_767_225_600);
    server.set_time(start);
    let store = server.open().await;
    let [refunded, old, lost] = [charge(&store, 1, 10).await, charge(&store, 2, 20).await, charge(&store, 3, 30).await];
    let answers = async |receipt| [refund(&store, receipt).await, refund(&store, receipt).await];
    let [first, again] = [true, false].map(|first| Answer::Refunded { first });
    assert_eq!(answers(&refunded).await, [first, again.clone()]);
    server.cli(&["FLUSHALL"]);
    charge(&store, 4, 50).await;
    assert_eq!(answers(&lost).await, [again.clone(), again.clone()]);
    assert_eq!(used(&store).await, 50);
    server.set_time(start.plus(Span::from_secs(70 * 86_400)));
    assert_eq!(answers(&old).await, [again.clone(), again]);
}

/// On a Cluster a moved budget lies in another partition than the one that has charged. A refund there gave nothing back and was `first`.
#[tokio::test(flavor = "multi_thread")]
async fn a_refund_of_what_has_moved_to_another_partition_says_that_it_gave_nothing_back() {
    let cluster = Cluster::start();
    let rule = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '9/month'\nalgorithm = 'fixed-window'";
    let open = async |secret, old| {
        let (policy, deadline) = (rule.to_owned(), Duration::from_secs(20));
        node::open(&Opening { url: cluster.url(), policy, secret, old, deadline }).await
    };
    let facts = Facts { user: Some("ada"), ..Facts::default() };
    let before = open(1, None).await;
    let receipt = before.check_with_receipt_async(&facts).await.unwrap().1.unwrap();
    drop(before);
    let node = open(2, Some(1)).await;
    assert_eq!(node.check_async(&facts).await.unwrap().readings[0].remaining, 7, "it has moved");
    assert_eq!(node.refund_async(&receipt).await, Ok(false));
    assert_eq!(node.check_async(&facts).await.unwrap().readings[0].remaining, 6);
}
