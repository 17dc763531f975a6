//! Several nodes on a Cluster of three primaries and three replicas, which are killed, promoted and given other slots.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use threshold_core::receipt::OnExpire;
use threshold_core::{Answer, Command, Outcome, Span, Timestamp, TraceId};
use threshold_limiter::store::Store as _;
use threshold_limiter::{Facts, Limiter, Policy};
use threshold_redis::RedisStore;
use tokio::task::JoinSet;

use crate::process::{Cluster, PATIENCE, PRIMARIES, SlotMove};
use crate::shared::{allowed_guesses, rule_of};

type Node = Arc<Limiter<RedisStore>>;

async fn nodes(cluster: &Cluster, count: usize, policy: &str) -> Vec<Node> {
    let mut nodes = Vec::new();
    for _ in 0..count {
        let policy = Policy::parse(policy, &|_| None).unwrap();
        let builder = Limiter::builder(policy).store(cluster.open().await);
        nodes.push(Arc::new(builder.build().unwrap()));
    }
    nodes
}

/// Returns whether the store has admitted a request of this user; `None` without the store.
async fn decide(node: &Node, user: &str) -> Option<bool> {
    let decision = node.check_async(&Facts { user: Some(user), ..Facts::default() }).await.unwrap();
    assert!(decision.degraded.is_none() || !decision.allowed(), "the policy is closed without the store");
    decision.degraded.is_none().then(|| decision.allowed())
}

/// Returns the keys without a time to live, except those that docs/formats.md names.
fn endless_keys(cluster: &Cluster) -> Vec<String> {
    cluster.primaries().into_iter().flat_map(|node| cluster.node(node).endless_keys()).collect()
}

/// Eight nodes send 400 requests of one user at the same time. Exactly the limit gets through, whatever the algorithm.
#[tokio::test(flavor = "multi_thread")]
async fn eight_nodes_admit_exactly_the_limit_on_a_cluster() {
    let cluster = Cluster::start();
    for algorithm in threshold_core::limit::Algorithm::NAMES {
        cluster.flush();
        let nodes = nodes(&cluster, 8, &rule_of(algorithm)).await;
        let mut tasks = JoinSet::new();
        for request in 0..400 {
            let node = Arc::clone(&nodes[request % nodes.len()]);
            tasks.spawn(async move {
                let facts = Facts { user: Some("ada"), ..Facts::default() };
                let decision = node.check_async(&facts).await.unwrap();
                assert!(decision.degraded.is_none(), "{:?}", node.store().last_error());
                decision.allowed()
            });
        }
        let admitted = tasks.join_all().await.into_iter().filter(|allowed| *allowed).count();
        assert_eq!(admitted, 50, "{algorithm}");
    }
    assert_eq!(endless_keys(&cluster), [""; 0]);
}

/// A request is counted by limits on different primaries. What one of them charged before another one denied is given back, and
/// neither limit is ever exceeded.
#[tokio::test(flavor = "multi_thread")]
async fn a_denial_drains_no_limit_on_another_primary() {
    let cluster = Cluster::start();
    let policy = "[[rule]]\nname = 'tenant'\nper = ['tenant']\nlimit = '100/day'\nalgorithm = 'fixed-window'\n\
                  [[rule]]\nname = 'user'\nper = ['user']\nlimit = '10/day'\nalgorithm = 'fixed-window'\n";
    let nodes = nodes(&cluster, 4, policy).await;
    let mut tasks = JoinSet::new();
    for request in 0..400 {
        let (node, user) = (Arc::clone(&nodes[request % nodes.len()]), format!("user {}", request % 5));
        tasks.spawn(async move {
            let facts = Facts { user: Some(&user), tenant: Some("acme"), ..Facts::default() };
            let decision = node.check_async(&facts).await.unwrap();
            assert!(decision.degraded.is_none(), "{:?}", node.store().last_error());
            usize::from(decision.allowed())
        });
    }
    // While charges are given back, others may be denied, so there may be fewer than 10 of each user.
    let mut allowed: usize = tasks.join_all().await.into_iter().sum();
    assert!(allowed <= 50, "{allowed}");
    let begun = Instant::now();
    while allowed < 50 {
        assert!(begun.elapsed() < PATIENCE, "{allowed} of 50: a charge was not given back");
        for user in 0..5 {
            let user = format!("user {user}");
            let facts = Facts { user: Some(&user), tenant: Some("acme"), ..Facts::default() };
            allowed += usize::from(nodes[0].check_async(&facts).await.unwrap().allowed());
        }
    }
    assert_eq!(allowed, 50);
    let other = Facts { user: Some("another"), tenant: Some("acme"), ..Facts::default() };
    // 100 less the 50 that were allowed, and less the one that is peeked at.
    while nodes[1].peek_async(&other).await.unwrap().readings[0].remaining != 49 {
        assert!(begun.elapsed() < PATIENCE, "{:?}", nodes[1].peek_async(&other).await.unwrap().readings);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(endless_keys(&cluster), [""; 0]);
}

/// Waiting requests of one user try again and again, and each attempt that their own limit denies had been charged to the tenant on
/// another primary. Only the first attempt of each request was given back: 10 were admitted, and the tenant was charged 60 times.
///
/// Seen to fail after: leaving out `plan.retry_as` in `Limiter::wait`.
#[tokio::test(flavor = "multi_thread")]
async fn attempts_of_waiting_requests_are_each_given_back() {
    let cluster = Cluster::start();
    let policy = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '600/min'\nburst = 1\nalgorithm = 'token-bucket'\n\
                  [[rule]]\nname = 'tenant'\nper = ['tenant']\nlimit = '500/day'\nalgorithm = 'sliding-log'\n";
    let nodes = nodes(&cluster, 3, policy).await;
    let mut tasks = JoinSet::new();
    for request in 0..36 {
        let node = Arc::clone(&nodes[request % nodes.len()]);
        tasks.spawn(async move {
            let facts = Facts { user: Some("ada"), tenant: Some("acme"), ..Facts::default() };
            let waited = node.wait_with_receipt(&facts, Duration::from_millis(2_500)).await.unwrap();
            assert!(waited.decision.degraded.is_none(), "{:?}", node.store().last_error());
            waited.receipt
        });
    }
    let receipts: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    for node in &nodes {
        node.store().returned().await;
    }
    let admitted = receipts.len();
    assert!(admitted > 0);
    let other = Facts { user: Some("another"), tenant: Some("acme"), cost: Some(0), ..Facts::default() };
    let used = async || 500 - nodes[0].peek_async(&other).await.unwrap().readings[0].remaining;
    assert_eq!(used().await, admitted as u64);
    for receipt in &receipts {
        assert_eq!(nodes[0].refund_async(receipt).await, Ok(true));
    }
    assert_eq!(used().await, 0);
}

/// An attacker sends 1,000 guesses at one account through eight nodes at once, from one address or from many. At most three
/// reach the check of the password, and none is answered by an error.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_parallel_guesses_reach_the_password_three_times_on_a_cluster() {
    let cluster = Cluster::start();
    for addresses in [1u32, 1_000] {
        cluster.flush();
        let nodes = nodes(&cluster, 8, "[login]").await;
        let allowed = allowed_guesses(&nodes, addresses).await;
        assert!((1..=3).contains(&allowed), "{allowed} guesses from {addresses} addresses");
    }
    assert_eq!(endless_keys(&cluster), [""; 0]);
}

/// How often a primary is killed: `./test long` sets it to 1,000.
fn kills() -> usize {
    std::env::var("THRESHOLD_REDIS_KILLS").ok().map_or(20, |text| text.parse().expect("a number"))
}

/// Users of the load of one kill, whose keys lie on all primaries.
const USERS: usize = 6;
/// The limit of each of them.
const LIMIT: usize = 300;

/// A primary is killed under load, again and again. Its replica takes over, and what had not been replicated is admitted a second
/// time: at most one limit of each key.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_primary_admits_at_most_one_limit_again() {
    let mut cluster = Cluster::start_with_failover();
    let policy = format!(
        "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '{LIMIT}/day'\nalgorithm = 'fixed-window'\non_store_error = 'closed'\n"
    );
    let nodes = nodes(&cluster, 4, &policy).await;
    let mut histogram = BTreeMap::<usize, usize>::new();
    for kill in 0..kills() {
        let users: Arc<[String]> = (0..USERS).map(|user| format!("user {user} of kill {kill}")).collect();
        let primaries = cluster.primaries();
        let victim = primaries[kill % primaries.len()];
        let (stop, mut tasks) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
        for task in 0..USERS {
            tasks.spawn(load(Arc::clone(&nodes[task % nodes.len()]), Arc::clone(&users), Arc::clone(&stop)));
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        cluster = tokio::task::spawn_blocking(move || {
            cluster.kill(victim);
            cluster.wait_for_failover(victim);
            cluster.restart(victim);
            cluster.wait_until_ready();
            cluster
        })
        .await
        .unwrap();
        stop.store(true, Ordering::Relaxed);
        let mut counts = [Count::default(); USERS];
        for told in tasks.join_all().await {
            for (count, more) in counts.iter_mut().zip(told) {
                count.admitted += more.admitted;
                count.unanswered += more.unanswered;
            }
        }
        for (user, count) in users.iter().zip(&mut counts) {
            count.admitted += rest(&nodes, user).await;
            let Count { admitted, unanswered } = *count;
            assert!(admitted <= 2 * LIMIT, "{user}: {admitted} admitted, more than one limit again");
            // Each request without an answer may have been counted, and nothing else is.
            assert!(admitted + unanswered >= LIMIT, "{user}: {admitted} admitted, {unanswered} without an answer");
            *histogram.entry(admitted.saturating_sub(LIMIT)).or_default() += 1;
        }
    }
    println!("over-admission of {LIMIT} after {} kills, and the number of keys: {histogram:?}", kills());
    assert_eq!(endless_keys(&cluster), [""; 0]);
}

#[derive(Debug, Default, Clone, Copy)]
struct Count {
    admitted: usize,
    unanswered: usize,
}

/// Sends requests of all users in turn until it is stopped.
async fn load(node: Node, users: Arc<[String]>, stop: Arc<AtomicBool>) -> [Count; USERS] {
    let mut counts = [Count::default(); USERS];
    while !stop.load(Ordering::Relaxed) {
        for (user, count) in users.iter().zip(&mut counts) {
            match decide(&node, user).await {
                Some(allowed) => count.admitted += usize::from(allowed),
                None => count.unanswered += 1,
            }
            tokio::time::sleep(Duration::from_millis(8)).await;
        }
    }
    counts
}

/// Uses up what is left of a user's limit, through all nodes at once, and returns how much it was.
async fn rest(nodes: &[Node], user: &str) -> usize {
    let mut tasks = JoinSet::new();
    for task in 0..16 {
        let (node, user) = (Arc::clone(&nodes[task % nodes.len()]), user.to_owned());
        tasks.spawn(async move {
            let (mut admitted, begun) = (0, Instant::now());
            loop {
                match decide(&node, &user).await {
                    Some(true) => admitted += 1,
                    Some(false) => return admitted,
                    None => {
                        assert!(begun.elapsed() < PATIENCE, "{:?}", node.store().last_error());
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
            }
        });
    }
    tasks.join_all().await.into_iter().sum()
}

/// A slot is moved to another primary and back while its tenant sends requests, each of a new user whose key does not exist on
/// either side. No client notices, and the tenant's limit stays exact.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_moves_under_load_without_an_error() {
    let cluster = Arc::new(Cluster::start());
    let policy = "[identity]\nuser_scope = 'tenant'\n\
                  [[rule]]\nname = 'tenant'\nper = ['tenant']\nlimit = '5000/day'\nalgorithm = 'fixed-window'\n\
                  [[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/day'\nalgorithm = 'fixed-window'\n";
    let nodes = nodes(&cluster, 4, policy).await;
    let ask = async |node: &Node, user: &str| {
        let facts = Facts { user: Some(user), tenant: Some("acme"), ..Facts::default() };
        let decision = node.check_async(&facts).await.unwrap();
        assert!(decision.degraded.is_none(), "{:?}", node.store().last_error());
        usize::from(decision.allowed())
    };
    let mut admitted = ask(&nodes[0], "the first").await;
    let key = cluster.keys("th:{*}b:*").swap_remove(0);
    let (slot, from) = (cluster.slot(&key), cluster.holder(&key));
    let to = cluster.primaries().into_iter().find(|node| *node != from).unwrap();
    let (stop, number) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for task in 0..8 {
        let (node, stop, number) = (Arc::clone(&nodes[task % nodes.len()]), Arc::clone(&stop), Arc::clone(&number));
        tasks.spawn(async move {
            let mut admitted = 0;
            while !stop.load(Ordering::Relaxed) {
                let user = format!("user {}", number.fetch_add(1, Ordering::Relaxed));
                admitted += ask(&node, &user).await;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            admitted
        });
    }
    for there in [SlotMove { slot, from, to }, SlotMove { slot, from: to, to: from }] {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let cluster = Arc::clone(&cluster);
        let moved = tokio::task::spawn_blocking(move || {
            cluster.begin_move(there);
            std::thread::sleep(Duration::from_millis(200));
            while cluster.move_keys(there, 200) > 0 {}
            std::thread::sleep(Duration::from_millis(200));
            cluster.end_move(there);
        });
        moved.await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    stop.store(true, Ordering::Relaxed);
    admitted += tasks.join_all().await.into_iter().sum::<usize>();
    println!("{admitted} admitted while slot {slot} moved there and back");
    for node in &nodes {
        assert_eq!(node.store().errors(), [], "redirects that are followed are no errors");
    }
    // The rest, after charges that were given back have arrived.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let mut tasks = JoinSet::new();
    for task in 0..16 {
        let node = Arc::clone(&nodes[task % nodes.len()]);
        tasks.spawn(async move {
            let mut admitted = 0;
            while ask(&node, &format!("user {} of {task}", admitted / 4)).await == 1 {
                admitted += 1;
            }
            admitted
        });
    }
    admitted += tasks.join_all().await.into_iter().sum::<usize>();
    assert_eq!(admitted, 5_000);
    assert_eq!(endless_keys(&cluster), [""; 0]);
}

/// A replica takes over whose clock is an hour ahead of its primary's, or an hour behind. Neither opens the limit of a day again,
/// and neither locks anybody out of a limit of seconds for an hour.
#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_replica_with_a_wrong_clock_neither_admits_nor_locks_out() {
    for offset in [3_600, -3_600] {
        let mut cluster = Cluster::start_with_offsets([0, 0, 0, offset, offset, offset]);
        for algorithm in ["sliding-log", "token-bucket"] {
            let policy = format!(
                "[[rule]]\nname = 'day'\nper = ['user']\nlimit = '20/day'\nalgorithm = '{algorithm}'\n\
                 match = {{ category = 'day' }}\non_store_error = 'closed'\n\
                 [[rule]]\nname = 'short'\nper = ['user']\nlimit = '5/3s'\nalgorithm = '{algorithm}'\n\
                 match = {{ category = 'short' }}\non_store_error = 'closed'\n"
            );
            let node = nodes(&cluster, 1, &policy).await.remove(0);
            let user = format!("{algorithm} {offset}");
            let ask = async |category: &str| {
                let facts = Facts { user: Some(&user), category: Some(category), ..Facts::default() };
                let decision = node.check_async(&facts).await.unwrap();
                decision.degraded.is_none().then(|| decision.allowed())
            };
            let mut admitted = 0;
            for _ in 0..25 {
                admitted += usize::from(ask("day").await.unwrap());
            }
            assert_eq!(admitted, 20);
            let key = cluster.keys("th:{*}b:*").swap_remove(0);
            for _ in 0..5 {
                let _ = ask("short").await;
            }
            // Wait for replication: this test is about clocks, not about losses.
            let (victim, before) = (cluster.holder(&key), cluster.primaries());
            assert_eq!(cluster.node(victim).cli(&["WAIT", "1", "5000"]).trim(), "1");
            cluster.kill(victim);
            cluster.wait_for_failover(victim);
            let begun = Instant::now();
            let again = loop {
                match ask("short").await {
                    Some(true) => break true,
                    _ if begun.elapsed() > PATIENCE => break false,
                    _ => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            };
            assert!(again, "{algorithm}, {offset} s: locked out of a limit of three seconds");
            let mut more = 0;
            for _ in 0..25 {
                more += usize::from(ask("day").await.unwrap());
            }
            // A bucket of 20 a day refills less than one in an hour.
            assert!(more <= 1, "{algorithm}, {offset} s: {more} admitted again");
            cluster.restart(victim);
            cluster.wait_until_ready();
            assert_eq!(endless_keys(&cluster), [""; 0]);
            cluster.flush();
            // Back to the primaries of the beginning, for the next algorithm.
            let (begun, mut asked) = (Instant::now(), None::<Instant>);
            while cluster.primaries() != before {
                assert!(begun.elapsed() < PATIENCE, "the primary did not take over again");
                // More than once: no primary votes twice about the same slots within a second, and an attempt ends after five.
                if asked.is_none_or(|asked| asked.elapsed() > Duration::from_secs(6)) {
                    asked = Some(Instant::now());
                    assert_eq!(cluster.node(victim).cli(&["CLUSTER", "FAILOVER"]), "OK\n");
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            cluster.wait_until_ready();
        }
    }
}

/// A flood of requests that a tenant's limit denied left a balance of zero for each of its users until the window ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_charge_that_is_given_back_leaves_no_key() {
    let cluster = Cluster::start();
    for algorithm in ["fixed-window", "sliding-estimate", "sliding-window", "sliding-log", "token-bucket"] {
        cluster.flush();
        let policy = format!(
            "[[rule]]\nname = 'tenant'\nper = ['tenant']\nlimit = '1/day'\nalgorithm = '{algorithm}'\n\
             [[rule]]\nname = 'user'\nper = ['user']\nlimit = '9/day'\nalgorithm = '{algorithm}'\n"
        );
        let node = nodes(&cluster, 1, &policy).await.remove(0);
        let mut allowed = 0;
        for user in 0..20 {
            let user = format!("user {user}");
            let facts = Facts { user: Some(&user), tenant: Some("acme"), ..Facts::default() };
            let decision = node.check_async(&facts).await.unwrap();
            assert!(decision.degraded.is_none(), "{:?}", node.store().last_error());
            allowed += usize::from(decision.allowed());
        }
        node.store().returned().await;
        let keys = cluster.keys("th:{*}b:*");
        assert_eq!((allowed, keys.len()), (1, 2), "{algorithm}: one tenant and one user are charged, and not {keys:?}");
    }
}

/// A primary died while no request needed it. Its node said that all was well for half a minute, until a request failed.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_requests_notices_that_any_primary_is_away() {
    let mut cluster = Cluster::start();
    let node = cluster.open().await;
    assert!(node.is_connected());
    let control = cluster.slot("th:{control}nodes");
    let holds_control = |(first, last): &(u16, u16)| (*first..=*last).contains(&control);
    let place = PRIMARIES.iter().position(|range| !holds_control(range)).unwrap();
    cluster.kill(place);
    let begun = Instant::now();
    while node.is_connected() || node.present_problem().is_none() {
        assert!(begun.elapsed() < PATIENCE, "{:?}", node.last_error());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The receipt of a reservation was refunded while its slot was moved, and its charges could be given back twice.
#[tokio::test(flavor = "multi_thread")]
async fn the_receipt_of_a_reservation_is_not_refunded_while_its_slot_moves() {
    let cluster = Cluster::start();
    let policy = Policy::parse("[[rule]]\nname = 'user'\nper = ['user']\nlimit = '9/day'", &|_| None).unwrap();
    let mut plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
    plan.identify(|| TraceId::from_u128(7));
    let stores = [Arc::new(cluster.open().await), Arc::new(cluster.open().await)];
    let (mut outcome, terms) = (Outcome::default(), plan.hold_terms(Span::MINUTE, OnExpire::Charge));
    stores[0].reserve(&plan, &terms, Timestamp::EPOCH, &mut outcome).await.unwrap();
    let receipt = plan.holding(&outcome);
    let place = plan.bill().partitions()[0].to_u16();
    let (slot, primaries) = (cluster.slot(&format!("th:{{{place:04x}}}v:")), cluster.primaries());
    let from = PRIMARIES.iter().position(|(first, last)| (*first..=*last).contains(&slot)).unwrap();
    let to = primaries.iter().copied().find(|node| *node != from).unwrap();
    let there = SlotMove { slot, from, to };
    cluster.begin_move(there);
    assert_eq!(cluster.move_keys(there, 1), 1);
    let refund = |at: usize| {
        let (store, receipt) = (Arc::clone(&stores[at]), Box::new(receipt.clone()));
        tokio::spawn(async move { store.execute(Command::Refund(receipt), Timestamp::EPOCH).await })
    };
    let refunds = [refund(0), refund(1)];
    tokio::time::sleep(Duration::from_millis(100)).await;
    while cluster.move_keys(there, 100) > 0 {}
    cluster.end_move(there);
    for refunded in refunds {
        assert_eq!(refunded.await.unwrap(), Ok(Answer::Refunded { first: false }));
    }
    let released = stores[1].execute(Command::Release { id: receipt.id() }, Timestamp::EPOCH).await;
    assert!(matches!(released, Ok(Answer::Ended(Ok(_)))), "{released:?}");
}
