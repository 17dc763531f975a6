//! Faults of a single server: lost scripts, delays, lost replies, full memory, restarts and clocks that are wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use threshold_core::case::decision_json;
use threshold_core::limit::Algorithm;
use threshold_core::receipt::OnExpire;
use threshold_core::{Secrets, Span, Timestamp, TraceId};
use threshold_limiter::store::Store as _;
use threshold_limiter::{Attempted, Decision, Facts, Limiter, LoginRequest, ManualClock, Policy};
use threshold_redis::{RedisOptions, RedisStore};
use tokio::task::JoinSet;

use crate::process::{PATIENCE, RedisServer, secret};
use crate::proxy::{Mode, Proxy};

type Node = Arc<Limiter<RedisStore>>;

/// A limit of 50 of one user, in the form in which nothing comes back while a test runs. Nothing is admitted without the store.
const FIFTY: &str = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '50/day'\nalgorithm = 'fixed-window'\n\
                     on_store_error = 'closed'\n";

/// A deadline that no busy machine misses, for tests that are not about deadlines.
const LONG: Duration = Duration::from_secs(20);

async fn store(url: String, deadline: Duration) -> RedisStore {
    RedisStore::open(RedisOptions::new(url.parse().unwrap(), secret(9)).deadline(deadline)).await.unwrap()
}

async fn node(url: String, deadline: Duration, policy: &str) -> Node {
    let policy = Policy::parse(policy, &|_| None).unwrap();
    Arc::new(Limiter::builder(policy).store(store(url, deadline).await).build().unwrap())
}

async fn nodes(server: &RedisServer, count: usize, policy: &str) -> Vec<Node> {
    let mut nodes = Vec::new();
    for _ in 0..count {
        nodes.push(node(server.url(), LONG, policy).await);
    }
    nodes
}

fn user(name: &str) -> Facts<'_> {
    Facts { user: Some(name), ..Facts::default() }
}

async fn check(node: &Node, name: &str) -> Decision {
    node.check_async(&user(name)).await.unwrap()
}

/// Sends so many requests of one user one after another, and returns how many of them the store has admitted.
async fn admitted(node: &Node, name: &str, requests: usize) -> usize {
    let mut admitted = 0;
    for _ in 0..requests {
        let decision = check(node, name).await;
        assert!(decision.degraded.is_none(), "{:?}", node.store().last_error());
        admitted += usize::from(decision.allowed());
    }
    admitted
}

/// Waits until the store decides again.
async fn wait_until_exact(node: &Node) {
    let begun = Instant::now();
    // A user of its own, so that no budget of the test is touched.
    while node.peek_async(&user("somebody else")).await.unwrap().degraded.is_some() {
        assert!(begun.elapsed() < PATIENCE, "{:?}", node.store().last_error());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// An administrator, or a proxy in front of Redis, flushes the scripts again and again. Nobody notices, and no request is
/// counted twice.
///
/// Also as fast as the server can: a script may be gone again right after it was loaded.
///
/// Woken by: `SCRIPT LOAD` and a second `EVALSHA` in place of `EVAL`.
#[tokio::test(flavor = "multi_thread")]
async fn flushed_scripts_cost_no_error_and_no_count() {
    for (pause, limit) in [("0.1", 400), ("0", 400)] {
        let server = RedisServer::start();
        let policy = format!("{}[login]\n", FIFTY.replace("50/day", &format!("{limit}/day")));
        let nodes = nodes(&server, 4, &policy).await;
        let mut flusher = server.cli_command(&["-r", "-1", "-i", pause, "SCRIPT", "FLUSH"]);
        let mut flusher = flusher.stdout(std::process::Stdio::null()).spawn().unwrap();
        let mut tasks = JoinSet::new();
        for task in 0..32 {
            let node = Arc::clone(&nodes[task % nodes.len()]);
            tasks.spawn(async move {
                let (mut admitted, name) = (0, format!("account {task}"));
                for _ in 0..25 {
                    let decision = check(&node, "ada").await;
                    assert!(decision.degraded.is_none(), "{:?}", node.store().last_error());
                    admitted += usize::from(decision.allowed());
                    // These load and swap.
                    let request =
                        LoginRequest { account: Some(&name), ip: "192.0.2.1".parse().ok(), ..LoginRequest::default() };
                    let _ = node.login_attempt_async(&request).await.expect("an answer");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                admitted
            });
        }
        let admitted: usize = tasks.join_all().await.into_iter().sum();
        flusher.kill().unwrap();
        flusher.wait().unwrap();
        assert_eq!(admitted, limit, "with a pause of {pause} s");
    }
}

/// Redis answers after 800 ms, later than a busy node waits. Decisions end at their deadline by `on_store_error`, soon without a call, and the limit is exact
/// again afterwards.
///
/// Woken by: a breaker that lets every call through.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_server_is_left_alone_and_used_again() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let slow = node(proxy.url(), Duration::from_millis(20), FIFTY).await;
    wait_until_exact(&slow).await;
    let before = server.script_calls();
    proxy.set_delay(Duration::from_millis(400));
    let (end, mut tasks) = (Instant::now() + Duration::from_secs(3), JoinSet::new());
    for _ in 0..8 {
        let slow = Arc::clone(&slow);
        tasks.spawn(async move {
            let mut decisions = 0_u64;
            while Instant::now() < end {
                let decision = check(&slow, "ada").await;
                assert!(decision.degraded.is_some() && !decision.allowed(), "it cannot have answered in time");
                decisions += 1;
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            decisions
        });
    }
    let decisions: u64 = tasks.join_all().await.into_iter().sum();
    proxy.set_delay(Duration::ZERO);
    wait_until_exact(&slow).await;
    let calls = server.script_calls() - before;
    println!("{decisions} decisions made {calls} calls of a slow server");
    // Five failures, those that were under way at that moment, and a probe now and then.
    assert!(calls * 4 < decisions, "{calls} calls for {decisions} decisions");
    let exact = node(server.url(), LONG, FIFTY).await;
    assert!(admitted(&exact, "ada", 60).await <= 50);
    assert_eq!(admitted(&exact, "bob", 60).await, 50);
}

/// The connection breaks after Redis has counted a request and before its answer has arrived. The request is refused and may
/// stay counted, but it is never sent a second time.
///
/// Woken by: a call that is sent again after its connection broke.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_is_never_sent_again() {
    const LOST: usize = 5;
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let node = node(proxy.url(), LONG, FIFTY).await;
    assert_eq!(admitted(&node, "ada", 10).await, 10);
    let mut lost = 0;
    for _ in 0..LOST {
        proxy.set(Mode::CutOneReply);
        let decision = check(&node, "ada").await;
        assert!(decision.degraded.is_some() && !decision.allowed());
        lost += 1;
        wait_until_exact(&node).await;
    }
    let rest = admitted(&node, "ada", 60).await;
    assert!((40 - lost..=40).contains(&rest), "{rest} of 40 are left after {lost} lost replies");
}

/// Answers never arrive, and the connection stays open, as behind a firewall that drops packets.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_swallows_replies_is_replaced() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let node = node(proxy.url(), Duration::from_millis(200), FIFTY).await;
    wait_until_exact(&node).await;
    proxy.set(Mode::SwallowReplies);
    for _ in 0..3 {
        let decision = check(&node, "ada").await;
        assert!(decision.degraded.is_some() && !decision.allowed());
    }
    proxy.set(Mode::Refuse);
    assert!(check(&node, "ada").await.degraded.is_some());
    proxy.set(Mode::Forward);
    wait_until_exact(&node).await;
    let exact = self::node(server.url(), LONG, FIFTY).await;
    let rest = admitted(&exact, "ada", 60).await;
    assert!((46..=50).contains(&rest), "{rest} of 50 are left after 4 requests without an answer");
}

/// The memory of Redis is full, and it refuses writes. No request is admitted as if it were counted: it is marked as degraded,
/// and `on_store_error` decides.
///
/// Woken by: `allow-oom` in `settle.lua`.
#[tokio::test(flavor = "multi_thread")]
async fn full_memory_of_the_server_is_a_failure_of_the_store() {
    let server = RedisServer::start();
    let closed = node(server.url(), LONG, &format!("{FIFTY}[login]\n")).await;
    let open = node(server.url(), LONG, &FIFTY.replace("'closed'", "'open'")).await;
    assert_eq!(admitted(&closed, "ada", 10).await, 10);
    assert_eq!(server.cli(&["CONFIG", "SET", "maxmemory", "1"]), "OK\n");
    for name in ["ada", "a new user"] {
        let decision = check(&closed, name).await;
        assert!(decision.degraded.is_some() && !decision.allowed());
        let decision = check(&open, name).await;
        assert!(decision.degraded.is_some() && decision.allowed());
    }
    let request = LoginRequest { account: Some("ada"), ip: "192.0.2.1".parse().ok(), ..LoginRequest::default() };
    let attempted = closed.login_attempt_async(&request).await;
    assert!(!matches!(attempted, Ok(Attempted::Allowed(_))), "an attempt that is not counted must not be allowed");
    assert_eq!(server.cli(&["CONFIG", "SET", "maxmemory", "0"]), "OK\n");
    wait_until_exact(&closed).await;
    assert!(admitted(&closed, "ada", 60).await <= 40);
    assert_eq!(admitted(&closed, "bob", 60).await, 50);
}

/// Redis is killed under load and comes back, with its data or without. With its data nothing is admitted twice; without, at most
/// one more limit is.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_stop_and_return_under_load() {
    for keeps_data in [true, false] {
        let mut server = if keeps_data { RedisServer::start_with_data(1_000_000) } else { RedisServer::start() };
        let nodes = nodes(&server, 4, &FIFTY.replace("50/day", "2000/day")).await;
        let allowed = Arc::new(AtomicUsize::new(0));
        let end = Instant::now() + Duration::from_secs(3);
        let mut tasks = JoinSet::new();
        for task in 0..16 {
            let (node, allowed) = (Arc::clone(&nodes[task % nodes.len()]), Arc::clone(&allowed));
            tasks.spawn(async move {
                while Instant::now() < end {
                    let decision = check(&node, "ada").await;
                    assert!(decision.degraded.is_none() || !decision.allowed());
                    allowed.fetch_add(usize::from(decision.allowed()), Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
        }
        for pause in [400, 300, 400, 300] {
            tokio::time::sleep(Duration::from_millis(pause)).await;
            if pause == 400 { server.kill() } else { server.restart() }
        }
        tasks.join_all().await;
        wait_until_exact(&nodes[0]).await;
        let under_load = allowed.load(Ordering::Relaxed);
        let total = under_load + admitted(&nodes[0], "ada", 2_100).await;
        println!("{under_load} of 2000 admitted under load, {total} in all; data kept: {keeps_data}");
        if keeps_data {
            // Requests whose answers were lost stay counted.
            assert!((1_900..=2_000).contains(&total), "{total}");
        } else {
            assert!((1_900..=6_000).contains(&total), "{total}: more than one limit for each loss");
        }
    }
}

/// Redis is restarted and reads a large file. It answers `LOADING` for a while, and what it has counted before counts again
/// afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_loading_is_waited_for() {
    let mut server = RedisServer::start_with_data(2_000);
    let node = node(server.url(), LONG, FIFTY).await;
    assert_eq!(admitted(&node, "ada", 10).await, 10);
    let fill = "for i = 1, 4000 do redis.call('SET', 'other program:' .. i, i, 'PX', 3600000) end";
    server.cli(&["EVAL", fill, "0"]);
    server.kill();
    server.restart();
    let mut saw_loading = false;
    let begun = Instant::now();
    loop {
        let decision = check(&node, "bob").await;
        if decision.degraded.is_none() {
            break;
        }
        assert!(!decision.allowed());
        saw_loading |= node.store().last_error().is_some_and(|error| error.to_lowercase().contains("loading"));
        assert!(begun.elapsed() < PATIENCE, "{:?}", node.store().last_error());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(saw_loading, "the test has not met LOADING");
    assert_eq!(admitted(&node, "ada", 60).await, 40, "what was counted before");
}

/// An operator makes the server a replica. Writes are refused until it is a primary again, and nothing is admitted as if it were
/// counted.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_became_a_replica_is_used_when_it_is_a_primary_again() {
    let server = RedisServer::start();
    let node = node(server.url(), LONG, FIFTY).await;
    assert_eq!(admitted(&node, "ada", 10).await, 10);
    // Nothing listens on port 1, so its data stays.
    assert_eq!(server.cli(&["REPLICAOF", "127.0.0.1", "1"]), "OK\n");
    for _ in 0..10 {
        let decision = check(&node, "ada").await;
        assert!(decision.degraded.is_some() && !decision.allowed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(server.cli(&["REPLICAOF", "NO", "ONE"]), "OK\n");
    // A replica answers reads, so only a decision that writes shows that the server is a primary again.
    let begun = Instant::now();
    while check(&node, "bob").await.degraded.is_some() {
        assert!(begun.elapsed() < PATIENCE, "{:?}", node.store().last_error());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(admitted(&node, "ada", 60).await, 40);
}

/// The clocks of the nodes are wrong by half a second and by an hour, in both directions. Every answer is that of a node whose
/// clock is right.
#[tokio::test(flavor = "multi_thread")]
async fn clocks_of_nodes_change_no_answer() {
    let start = Timestamp::from_secs(1_767_225_600);
    let hour = Span::from_secs(3_600);
    let half = Span::from_micros(500_000);
    let clocks: [fn(Timestamp, Span) -> Timestamp; 2] = [Timestamp::plus, Timestamp::minus];
    for algorithm in Algorithm::NAMES.into_iter().filter(|name| *name != "concurrency") {
        let policy = format!(
            "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/min'\nalgorithm = '{algorithm}'\nladder = 'graduated'\n"
        );
        let mut answers = Vec::new();
        for (skew, apply) in
            [(Span::ZERO, clocks[0]), (half, clocks[0]), (half, clocks[1]), (hour, clocks[0]), (hour, clocks[1])]
        {
            let server = RedisServer::start_with_clock();
            let (right, wrong) = (Arc::new(ManualClock::new(start)), Arc::new(ManualClock::new(apply(start, skew))));
            let mut limiters = Vec::new();
            for clock in [&right, &wrong] {
                let parsed = Policy::parse(&policy, &|_| None).unwrap();
                let store = server.open().await;
                limiters.push(Limiter::builder(parsed).store(store).clock(Arc::clone(clock)).build().unwrap());
            }
            let mut told = Vec::new();
            let mut now = start;
            for step in 0..60_u128 {
                now = now.plus(Span::from_micros([0, 300_000, 7_000_000][step as usize % 3]));
                server.set_time(now);
                right.set(now);
                wrong.set(apply(now, skew));
                let facts = Facts { trace: TraceId::from_u128(step + 1), ..user("ada") };
                let limiter = &limiters[step as usize % 2];
                let decision = limiter.check_async(&facts).await.unwrap();
                told.push(decision_json(&decision, &limiter.policy(), None));
            }
            answers.push(told);
        }
        let right = answers.remove(0);
        for wrong in answers {
            assert_eq!(wrong, right, "{algorithm}");
        }
    }
}

/// The clock of the Redis server jumps an hour ahead and is set back, several times. A jump ahead ends windows, as an hour does;
/// setting it back admits nothing and locks nobody out for longer than one period.
///
/// Woken by: a fixed window that keeps a beginning in the future.
#[tokio::test(flavor = "multi_thread")]
async fn the_servers_clock_jumps_ahead_and_back() {
    const PERIOD: u64 = 60;
    let server = RedisServer::start_with_clock();
    for algorithm in Algorithm::NAMES {
        let limit = if algorithm == "concurrency" { "limit = '5'\nttl = '1min'" } else { "limit = '5/min'" };
        let policy = format!(
            "[[rule]]\nname = '{algorithm}'\nper = ['user']\n{limit}\nalgorithm = '{algorithm}'\non_store_error = 'closed'\n"
        );
        // On the boundary of a window, where an algorithm forgets most.
        let mut now = Timestamp::from_secs(1_767_225_600);
        server.cli(&["FLUSHALL"]);
        server.set_time(now);
        let node = node(server.url(), LONG, &policy).await;
        // A peek always asks the server. By its answer the node notices that the clock was set, and repeats no denial of before.
        let set_time = async |now: Timestamp| {
            server.set_time(now);
            let _ = node.peek_async(&user("ada")).await.unwrap();
        };
        assert_eq!(admitted(&node, "ada", 10).await, 5, "{algorithm}");
        for _ in 0..3 {
            set_time(now.plus(Span::from_secs(3_600))).await;
            assert!(admitted(&node, "ada", 10).await <= 5, "{algorithm}: one limit for an hour");
            set_time(now).await;
            assert_eq!(
                admitted(&node, "ada", 10).await,
                0,
                "{algorithm}: the clock was set back, and nothing has ended"
            );
            now = now.plus(Span::from_secs(1));
            set_time(now).await;
        }
        // Three periods: a window that was dated ahead becomes the next one, and an estimate then slides out of the one after.
        set_time(now.plus(Span::from_secs(3 * PERIOD))).await;
        let again = admitted(&node, "ada", 10).await;
        assert!((1..=5).contains(&again), "{algorithm}: {again} admitted three periods after the clock was set back");
    }
    assert_eq!(server.endless_keys(), [""; 0]);
}

/// The secret is replaced while four nodes count under it. All four are started again with both secrets and move the same records
/// at the same time. The limit stays exact, and a receipt of before is refunded once.
///
/// Woken by: requests that do not move the records of the old secret.
#[tokio::test(flavor = "multi_thread")]
async fn a_rotated_secret_loses_and_doubles_no_count() {
    let server = RedisServer::start();
    let open = async |secrets: Secrets| {
        let options = RedisOptions::new(server.url().parse().unwrap(), secrets).deadline(LONG);
        let policy = Policy::parse(FIFTY, &|_| None).unwrap();
        let store = RedisStore::open(options).await.unwrap();
        Arc::new(Limiter::builder(policy).store(store).build().unwrap())
    };
    let mut before = Vec::new();
    for _ in 0..4 {
        before.push(open(Secrets::new(secret(1))).await);
    }
    for node in &before {
        assert_eq!(admitted(node, "ada", 5).await, 5);
    }
    let (_, receipt) = before[0].check_with_receipt_async(&user("ada")).await.unwrap();
    let receipt = before[0].sign(&receipt.unwrap());
    drop(before);
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let node = open(Secrets::new(secret(2)).with_old(secret(1)).unwrap()).await;
        tasks.spawn(async move { (admitted(&node, "ada", 30).await, node) });
    }
    let (counts, nodes): (Vec<usize>, Vec<Node>) = tasks.join_all().await.into_iter().unzip();
    // 50, less four times 5, less that with a receipt.
    assert_eq!(counts.iter().sum::<usize>(), 29, "{counts:?}");
    let receipt = nodes[0].read_receipt(&receipt).unwrap();
    assert!(nodes[0].refund_async(&receipt).await.unwrap());
    assert!(!nodes[1].refund_async(&receipt).await.unwrap(), "it is refunded once");
    // Longer than this node repeats its denial.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    assert_eq!(admitted(&nodes[2], "ada", 5).await, 1);
}

/// During an upgrade a node of the next release writes records in a version that this one does not know. This node neither takes
/// them for empty nor overwrites them, and decides about everybody else as before.
///
/// Woken by: `settle.lua` without its comparison of the version.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_the_next_version_are_neither_empty_nor_overwritten() {
    let server = RedisServer::start();
    let policy = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/day'\nalgorithm = 'fixed-window'\nladder = 'strict'\n\
                  on_store_error = 'closed'\n[login]\n";
    let node = node(server.url(), LONG, policy).await;
    // A balance, a standing, an account and a reservation of ada.
    assert_eq!(admitted(&node, "ada", 7).await, 5);
    let request = LoginRequest { account: Some("ada"), ip: "192.0.2.1".parse().ok(), ..LoginRequest::default() };
    assert!(matches!(node.login_attempt_async(&request).await, Ok(Attempted::Allowed(_))));
    let hold = Duration::from_secs(60);
    let reserved = node.reserve_async(&user("eve"), hold, OnExpire::Release).await.unwrap().reservation.unwrap();
    let keys = server.cli(&["KEYS", "th:{*}?:*"]);
    let keys: Vec<&str> = keys.lines().collect();
    for kind in ["b:", "s:", "a:", "v:"] {
        assert!(keys.iter().any(|key| key.contains(&format!("}}{kind}"))), "{kind} is not among {keys:?}");
    }
    for key in &keys {
        server.cli(&["EVAL", "redis.call('SETRANGE', KEYS[1], 0, '\\2')", "1", key]);
    }
    let bytes = || keys.iter().map(|key| server.cli(&["--no-raw", "GET", key])).collect::<Vec<_>>();
    let before = bytes();
    for name in ["ada", "eve"] {
        let decision = check(&node, name).await;
        assert!(decision.degraded.is_some() && !decision.allowed(), "{name}");
    }
    assert!(node.login_attempt_async(&request).await.is_err());
    assert!(node.commit_async(reserved, &Default::default()).await.is_err());
    assert_eq!(bytes(), before, "a record that this node cannot read was changed");
    assert_eq!(admitted(&node, "bob", 7).await, 5);
    // The node of the next release was told to write the version before.
    for key in &keys {
        // What a script holds has a byte of its own in this place.
        let version = if key.contains("}v:") { "\\255" } else { "\\1" };
        server.cli(&["EVAL", &format!("redis.call('SETRANGE', KEYS[1], 0, '{version}')"), "1", key]);
    }
    assert_eq!(admitted(&node, "ada", 3).await, 0, "what was counted before");
    node.commit_async(reserved, &Default::default()).await.unwrap();
    assert_eq!(admitted(&node, "eve", 7).await, 4);
}
