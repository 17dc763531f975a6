//! Tests request ids on a store that two nodes share.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use threshold_core::command::{Answer as Done, Command};
use threshold_core::{Outcome, Plan, Policy};
use threshold_limiter::store::{AnyStore, Kind, Listed, Store};
use threshold_limiter::{Clock as _, ManualClock};
use tokio::time::{sleep, timeout};

use super::*;
use crate::door::test_server::{Client, KeyValueStore, TestServer};

const POLICY: &str = r#"
    [identity]
    trusted_proxies = ["127.0.0.1/32"]
    user = "header:x-user"
    [[rule]]
    name = "r"
    per = ["user"]
    limit = "5/min"
    algorithm = "fixed-window"
"#;
const START: Timestamp = Timestamp::from_secs(1_767_225_600);

/// How the store answers commands about request ids.
#[derive(Debug, Default)]
struct Mode(AtomicU8);

const FULL: u8 = 1;
const DOWN: u8 = 2;

/// A store that several nodes share.
#[derive(Debug, Clone, Default)]
struct OneStore(Arc<KeyValueStore>, Arc<Mode>);

impl Store for OneStore {
    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        self.0.settle(plan, now, outcome).await
    }

    async fn execute(&self, command: Command, now: Timestamp) -> Result<Done, StoreError> {
        match (self.1.0.load(Ordering::Relaxed), &command) {
            (FULL, Command::BeginRequest { .. }) => Err(StoreError::Full),
            // Only ids fail. The decisions themselves still reach the store, so that charges can be counted.
            (DOWN, Command::BeginRequest { .. } | Command::EndRequest { .. }) => Err(StoreError::Timeout),
            _ => self.0.execute(command, now).await,
        }
    }

    async fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> Result<Vec<Listed>, StoreError> {
        self.0.list(kind, after, limit, now).await
    }
}

/// Two nodes on one store.
struct Nodes {
    clock: Arc<ManualClock>,
    store: OneStore,
}

impl Nodes {
    fn new() -> Self {
        Self { clock: Arc::new(ManualClock::new(START)), store: OneStore::default() }
    }

    fn desk(&self, policy: &str) -> Desk {
        let policy = Policy::parse(policy, &|_| None).unwrap();
        // The same digest key on both nodes. With keys of their own, neither would find the other's ids.
        Desk::sharing(policy, AnyStore::other(self.store.clone()), Arc::clone(&self.clock) as _, [9; 16])
    }

    fn servers(&self, policy: &str) -> [TestServer; 2] {
        [(); 2].map(|()| TestServer::at(self.desk(policy)))
    }

    fn ids(&self) -> [RequestIds; 2] {
        [(); 2].map(|()| RequestIds::of(&self.desk(POLICY), 1 << 20))
    }

    fn set(&self, second: u64) {
        self.clock.set(START.plus(Span::from_secs(second)));
    }

    fn mode(&self, mode: u8) {
        self.store.1.0.store(mode, Ordering::Relaxed);
    }

    /// Runs a request on one node that decides with this text.
    async fn run(&self, ids: &RequestIds, key: RequestKey, text: &'static str) -> Result<Bytes, RequestIdError> {
        let answer = EncodedAnswer { body: text.into(), charged: true, closed: false, generation: 1 };
        ids.run::<RequestIdError>(key, || self.clock.now(), None, async { Ok(answer) }).await.map(|answer| answer.body)
    }
}

fn key_of(ids: &RequestIds, id: &str) -> RequestKey {
    RequestKey { id: ids.digest(&("check", id)), content: ids.digest(&"the same") }
}

fn post(server: &mut TestServer, path: &str, body: &str) -> (u16, String) {
    let answer = server.client().post(path, body).unwrap();
    (answer.status, answer.body)
}

/// Returns what is left of a user's limit.
fn remaining(server: &mut TestServer, user: &str) -> u64 {
    let (status, body) = post(server, "/v1/peek", &format!(r#"{{"user": "{user}", "cost": 0}}"#));
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).unwrap();
    answer["limits"][0]["remaining"].as_u64().unwrap()
}

fn error(body: &str) -> (String, Value) {
    let body: Value = serde_json::from_str(body).unwrap();
    (body["error"].as_str().unwrap().to_owned(), body["index"].clone())
}

/// Woken by: leaving out `begin` in `nodes::start`, `end` in `run`, and a different digest key on each node.
#[test]
fn a_repeat_on_another_node_gets_the_first_answer_and_is_charged_once() {
    let nodes = Nodes::new();
    let [mut a, mut b] = nodes.servers(POLICY);
    let asked = r#"{"user": "u", "requestId": "r"}"#;
    let first = post(&mut a, "/v1/check", asked);
    assert_eq!((first.0, remaining(&mut b, "u")), (200, 4));
    // The last second of the minute in which the answer is remembered.
    nodes.set(59);
    for _ in 0..2 {
        assert_eq!(post(&mut b, "/v1/check", asked), first);
        assert_eq!(post(&mut a, "/v1/check", asked), first);
    }
    assert_eq!(remaining(&mut a, "u"), 4);
    // Another verb has ids of its own, and a request without an id is always decided.
    assert_ne!(post(&mut b, "/v1/record", asked), first);
    assert_ne!(post(&mut b, "/v1/check", r#"{"user": "u"}"#), first);
    assert_eq!(remaining(&mut a, "u"), 2);
    // After a minute it is a new request on both nodes.
    nodes.set(60);
    let second = post(&mut b, "/v1/check", asked);
    assert_ne!(second, first);
    assert_eq!((post(&mut a, "/v1/check", asked), remaining(&mut a, "u")), (second, 4));
}

#[test]
fn a_list_on_another_node_gets_the_first_answers() {
    let nodes = Nodes::new();
    let [mut a, mut b] = nodes.servers(POLICY);
    let one = r#"{"user": "u", "requestId": "1"}"#;
    let first = post(&mut a, "/v1/check", one);
    let list = format!(r#"[{one}, {{"user": "u", "requestId": "2"}}, {one}, {{"user": "u", "requestId": "2"}}]"#);
    let listed = post(&mut b, "/v1/check", &list);
    assert_eq!((listed.0, listed.1.starts_with(&format!("[{},", first.1))), (200, true), "{}", listed.1);
    assert_eq!(post(&mut a, "/v1/check", &list), listed);
    assert_eq!(remaining(&mut a, "u"), 3);
}

/// Woken by: taking `Reused` for `UnderWay` in `begin_list`, and by leaving out `drop` of the requests that a list has begun.
#[test]
fn an_id_that_another_node_used_for_a_different_request_is_refused() {
    let nodes = Nodes::new();
    let [mut a, mut b] = nodes.servers(POLICY);
    post(&mut a, "/v1/check", r#"{"user": "u", "requestId": "r"}"#);
    let other = r#"{"user": "v", "requestId": "r"}"#;
    let (status, body) = post(&mut b, "/v1/check", other);
    assert_eq!((status, error(&body)), (422, ("request_id_reused".to_owned(), Value::Null)));
    let fresh = r#"{"user": "v", "requestId": "new"}"#;
    let (status, body) = post(&mut b, "/v1/check", &format!("[{fresh}, {other}]"));
    assert_eq!((status, error(&body)), (422, ("request_id_reused".to_owned(), Value::from(1))));
    assert_eq!(remaining(&mut b, "v"), 5);
    // The refused list has ended the requests that it had begun.
    assert_eq!((post(&mut a, "/v1/check", fresh).0, remaining(&mut b, "v")), (200, 4));
}

#[test]
fn a_denial_is_decided_again_on_another_node() {
    let nodes = Nodes::new();
    let [mut a, mut b] = nodes.servers(POLICY);
    let asked = r#"{"user": "u", "cost": 5, "requestId": "r"}"#;
    let (_, body) = post(&mut a, "/v1/check", r#"{"user": "u"}"#);
    let charged: Value = serde_json::from_str(&body).unwrap();
    let denied = post(&mut a, "/v1/check", asked);
    assert!(denied.1.contains(r#""allowed":false"#), "{}", denied.1);
    assert_eq!(post(&mut a, "/v1/refund", &format!(r#"{{"receipt": {}}}"#, charged["receipt"])).0, 200);
    assert!(post(&mut b, "/v1/check", asked).1.contains(r#""allowed":true"#));
}

const ONE_A_MINUTE: &str = "[[rule]]\nname = 'r'\nper = ['user']\nlimit = '1/min'\nalgorithm = 'fixed-window'\n";
const WAITING: &str = r#"{"user": "u", "requestId": "r"}"#;

/// Sends a check that waits because the limit is used up. Returns the refund that lets it go on.
fn start_waiting_check(server: &mut TestServer) -> (Client<TcpStream>, String) {
    let (_, body) = post(server, "/v1/check", r#"{"user": "u"}"#);
    let receipt: Value = serde_json::from_str(&body).unwrap();
    let mut first = Client::new(server.connect());
    let (length, path) = (WAITING.len(), "/v1/check?waitMs=60000");
    first
        .write(&format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{WAITING}"))
        .unwrap();
    let app = server.app();
    // The server runs on threads of its own, so the test has to wait until it has read the request.
    let waits = (0..10_000).any(|_| {
        thread::sleep(Duration::from_millis(1));
        app.desk.waiting() == 1
    });
    assert!(waits);
    (first, format!(r#"{{"receipt": {}}}"#, receipt["receipt"]))
}

/// Woken by: taking `UnderWay` for `BegunRequest`.
#[test]
fn a_repeat_waits_for_the_first_on_another_node() {
    let nodes = Nodes::new();
    let [mut a, mut b] = nodes.servers(ONE_A_MINUTE);
    let (mut first, receipt) = start_waiting_check(&mut a);
    // If the repeat were decided, it would be denied.
    let repeat = thread::spawn(move || post(&mut b, "/v1/check", WAITING));
    assert_eq!(post(&mut a, "/v1/refund", &receipt).0, 200);
    let first = first.read().unwrap();
    assert!(first.body.contains(r#""allowed":true"#), "{}", first.body);
    assert_eq!(repeat.join().unwrap(), (200, first.body));
}

/// Woken by: leaving out what `drop` of `BegunRequest` does. The clock stands still, so that the lease does not expire.
#[test]
fn after_the_first_client_disconnects_another_node_can_begin() {
    let nodes = Nodes::new();
    let [mut a, mut b] = nodes.servers(ONE_A_MINUTE);
    let (first, receipt) = start_waiting_check(&mut a);
    drop(first);
    let (status, body) = post(&mut b, "/v1/check", WAITING);
    assert_eq!((status, body.contains(r#""allowed":false"#)), (200, true), "{body}");
    assert_eq!(post(&mut b, "/v1/refund", &receipt).0, 200);
    assert!(post(&mut b, "/v1/check", WAITING).1.contains(r#""allowed":true"#));
}

/// A node that was suspended while a request waited charged it when it woke, after another node had taken the request over and
/// charged it.
///
/// Woken by: polling `work` before `needs_renewal` is asked in `while_renewing`.
#[tokio::test(start_paused = true)]
async fn a_node_that_was_suspended_asks_whose_the_request_is_before_it_charges() {
    let nodes = Nodes::new();
    let [a, b] = nodes.ids();
    let r = key_of(&a, "r");
    let (fits, charged) = (tokio::sync::Notify::new(), AtomicU8::new(0));
    let waits = async {
        fits.notified().await;
        charged.fetch_add(1, Ordering::Relaxed);
        Ok(EncodedAnswer { body: "a".into(), charged: true, closed: false, generation: 1 })
    };
    let mut first = Box::pin(a.run::<RequestIdError>(r, || nodes.clock.now(), None, waits));
    assert!(timeout(Duration::from_secs(1), first.as_mut()).await.is_err());
    nodes.set(11);
    tokio::time::advance(Duration::from_secs(11)).await;
    assert_eq!(nodes.run(&b, r, "b").await.unwrap(), "b");
    fits.notify_one();
    assert_eq!(first.await.unwrap().body, "b");
    assert_eq!(charged.into_inner(), 0);
}

/// Woken by: leaving out the lease in core.
#[tokio::test(start_paused = true)]
async fn a_node_that_dies_holds_its_ids_for_ten_seconds() {
    let nodes = Nodes::new();
    let [a, b] = nodes.ids();
    let r = key_of(&a, "r");
    // Leaked with the future below, which borrows it.
    let a = Box::leak(Box::new(a));
    let now = || START;
    let mut first = Box::pin(a.run::<RequestIdError>(r, now, None, std::future::pending()));
    assert!(timeout(Duration::from_secs(1), first.as_mut()).await.is_err());
    // It is never polled again and never dropped, as on a node that died.
    std::mem::forget(first);
    nodes.set(9);
    assert!(timeout(Duration::from_secs(60), nodes.run(&b, r, "b")).await.is_err());
    nodes.set(10);
    assert_eq!(nodes.run(&b, r, "b").await.unwrap(), "b");
}

/// Woken by: leaving out the renewal in `while_renewing`.
#[tokio::test(start_paused = true)]
async fn a_request_that_takes_long_keeps_its_id() {
    let nodes = Nodes::new();
    let [a, b] = nodes.ids();
    let r = key_of(&a, "r");
    let mut first = Box::pin(a.run::<RequestIdError>(r, || START, None, std::future::pending()));
    // Four leases long. Without renewals the id would be free after ten seconds.
    for second in 0..40 {
        nodes.set(second);
        assert!(timeout(Duration::from_secs(1), first.as_mut()).await.is_err());
    }
    assert!(timeout(Duration::from_millis(1_500), nodes.run(&b, r, "b")).await.is_err());
    drop(first);
    assert_eq!(nodes.run(&b, r, "b").await.unwrap(), "b");
}

/// The list has begun the id in the store, which a single request on the same node waits for; and the list waits for that
/// request, which holds the id on this node.
///
/// Woken by: leaving out `end` where `run` finds its id in progress.
#[tokio::test(start_paused = true)]
async fn a_list_and_a_request_on_one_node_do_not_deadlock() {
    let nodes = Nodes::new();
    let [a, _] = nodes.ids();
    let [x, y] = ["x", "y"].map(|id| key_of(&a, id));
    let mut room = a.begin_list(&[x, y], || START).await.unwrap();
    assert_eq!(room.begun.len(), 2);
    let mut single = Box::pin(nodes.run(&a, y, "single"));
    assert!(timeout(Duration::from_secs(1), single.as_mut()).await.is_err());
    let decide = async { Err(RequestIdError::Full) };
    let listed = a.run::<RequestIdError>(y, || START, Some(&mut room), decide);
    let (single, listed) = timeout(Duration::from_secs(9), async { tokio::join!(single, listed) }).await.unwrap();
    assert_eq!((single.unwrap(), listed.unwrap().body), (Bytes::from("single"), Bytes::from("single")));
}

/// Woken by: leaving out `needs_renewal`.
#[tokio::test(start_paused = true)]
async fn a_list_whose_lease_may_have_expired_asks_the_store_before_it_charges() {
    let nodes = Nodes::new();
    let [a, b] = nodes.ids();
    let x = key_of(&a, "x");
    let mut room = a.begin_list(&[x], || START).await.unwrap();
    // Both clocks go on: tokio's, by which the node judges its lease, and the store's.
    sleep(Duration::from_secs(10)).await;
    nodes.set(10);
    assert_eq!(nodes.run(&b, x, "b").await.unwrap(), "b");
    let decide = async { Err(RequestIdError::Full) };
    let listed = a.run::<RequestIdError>(x, || START, Some(&mut room), decide).await;
    assert_eq!(listed.unwrap().body, "b");
}

#[test]
fn if_the_store_is_full_of_ids_the_request_is_refused_and_charges_nothing() {
    let nodes = Nodes::new();
    let [mut a, _] = nodes.servers(POLICY);
    nodes.mode(FULL);
    let asked = r#"{"user": "u", "requestId": "r"}"#;
    for body in [asked.to_owned(), format!(r#"[{{"user": "u"}}, {asked}]"#)] {
        let (status, body) = post(&mut a, "/v1/check", &body);
        assert_eq!((status, error(&body)), (503, ("too_many_request_ids".to_owned(), Value::Null)));
    }
    assert_eq!(remaining(&mut a, "u"), 5);
    nodes.mode(0);
    assert_eq!((post(&mut a, "/v1/check", asked).0, remaining(&mut a, "u")), (200, 4));
}

/// The policy's `on_store_error` says how such a request is decided, with an id as without.
#[test]
fn if_the_store_does_not_answer_about_ids_the_node_remembers_them_alone() {
    let nodes = Nodes::new();
    let [mut a, _] = nodes.servers(POLICY);
    nodes.mode(DOWN);
    let asked = r#"{"user": "u", "requestId": "r"}"#;
    let first = post(&mut a, "/v1/check", asked);
    assert_eq!((first.0, post(&mut a, "/v1/check", asked)), (200, first));
    let listed = post(&mut a, "/v1/check", r#"[{"user": "u", "requestId": "1"}, {"user": "u", "requestId": "2"}]"#);
    assert_eq!((listed.0, remaining(&mut a, "u")), (200, 2));
}

#[tokio::test]
async fn an_answer_in_an_unknown_version_is_an_error_and_charges_nothing() {
    let nodes = Nodes::new();
    let [a, _] = nodes.ids();
    let r = key_of(&a, "r");
    let Ok(BeginOutcome::Begun(begun)) = a.shared().unwrap().begin((r.id, r.content), None).await else {
        panic!("it is the first");
    };
    // The first byte is the version.
    begun.end(Some([255].into())).await;
    assert_eq!(nodes.run(&a, r, "a").await, Err(RequestIdError::Unreadable));
    assert_eq!(ApiError::from(RequestIdError::Unreadable).status, 503);
}

/// The bound of ten repeats counts over all nodes.
///
/// Woken by: leaving out `repeats` in core.
#[test]
fn a_proxy_that_repeats_its_question_to_another_node_gets_the_first_answer() {
    let nodes = Nodes::new();
    let [mut a, mut b] = nodes.servers(POLICY);
    let ask = |server: &mut TestServer, id: &str| {
        let fields = [("x-original-method", "GET"), ("x-original-uri", "/"), ("x-user", "u")];
        let named = [("x-threshold-request-id", id)];
        let answer = server.client().send("GET", "/auth", &[&fields[..], &named[..]].concat(), "").unwrap();
        let left = answer.headers.iter().find(|(name, _)| name == "ratelimit");
        (answer.status, left.cloned())
    };
    let first = ask(&mut a, "r");
    assert_eq!((first.0, first.1.is_some(), remaining(&mut b, "u")), (200, true, 4));
    for _ in 0..5 {
        assert_eq!((ask(&mut b, "r"), ask(&mut a, "r")), (first.clone(), first.clone()));
    }
    assert_eq!(remaining(&mut b, "u"), 4);
    let again = ask(&mut b, "r");
    assert_eq!((again.0, again != first, remaining(&mut a, "u")), (200, true, 3));
    assert_eq!(ask(&mut a, "r"), again);
    // Denials are not remembered.
    for _ in 0..3 {
        assert_eq!(ask(&mut a, &remaining(&mut b, "u").to_string()).0, 200);
    }
    assert_eq!((ask(&mut a, "d").0, ask(&mut b, "d").0), (429, 429));
    nodes.set(60);
    assert_eq!(ask(&mut b, "d").0, 200);
}
