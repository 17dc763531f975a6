//! The layer plays the test vectors in `conformance/` over real connections, and clients must read the answers that core gives.

#![cfg(feature = "tower")]
#![expect(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpStream};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::any;
use http::request::Parts;
use http_body::Frame;
use serde_json::{Map, Value, json};
use threshold_core::address::parse_address;
use threshold_core::case::ClientDoor;
use threshold_core::{DigestKey, Timestamp};
use threshold_limiter::store::Store;
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::tower::{Identified, ThresholdLayer};
use threshold_limiter::{Limiter, ManualClock, Policy, Secret};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../../threshold-server/tests/serve/client.rs"]
mod client;
#[path = "stores/key_value.rs"]
mod key_value;
#[path = "../../threshold-core/tests/support/vectors.rs"]
mod vectors;
use client::Client;
use key_value::KeyValueStore;

/// The reasons why a case is left out here.
const LEFT_OUT: [&str; 4] = [
    "calls that are not a client's",
    "a path that no request line carries",
    "a method that no request line carries",
    "an address that is none",
];

/// The layer in front of an application whose answers never end, with connections to it.
struct TowerDoor<S> {
    store: fn(&Policy) -> S,
    runtime: Runtime,
    clock: Arc<ManualClock>,
    serving: Option<Serving<S>>,
}

struct Serving<S> {
    limiter: Arc<Limiter<S, Arc<ManualClock>>>,
    address: SocketAddr,
    /// The answers to allowed requests, which hold their concurrency slots until the case ends.
    crossed: Vec<Client<TcpStream>>,
    server: JoinHandle<()>,
}

impl<S> Drop for Serving<S> {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// The body of an answer that never ends.
struct Endless;

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

/// Returns the facts that an application would know from elsewhere. The test sends them in a header.
fn facts(parts: &Parts) -> Map<String, Value> {
    let line = parts.headers.get("x-case").unwrap();
    serde_json::from_slice(line.as_bytes()).unwrap()
}

fn text(facts: &Map<String, Value>, name: &str) -> Option<String> {
    facts.get(name).and_then(Value::as_str).map(str::to_owned)
}

fn identified(parts: &Parts) -> Identified {
    let facts = facts(parts);
    let pairs = |name: &str| facts.get(name).and_then(Value::as_object).cloned().unwrap_or_default().into_iter();
    Identified {
        tenant: text(&facts, "tenant"),
        user: text(&facts, "user"),
        tier: text(&facts, "tier"),
        category: text(&facts, "category"),
        endpoint: text(&facts, "endpoint"),
        facts: pairs("facts").map(|(name, value)| (name, value.as_str().unwrap().to_owned())).collect(),
        cost: facts.get("cost").and_then(Value::as_u64),
        costs: pairs("costs").map(|(name, value)| (name, value.as_u64().unwrap())).collect(),
    }
}

fn peer(parts: &Parts) -> Option<SocketAddr> {
    let facts = facts(parts);
    // A case with raw header lines has the real peer, on loopback.
    let ip = text(&facts, "ip").or_else(|| facts.get("lines").map(|_| "127.0.0.1".to_owned()))?;
    parse_address(&ip).map(|ip| SocketAddr::from((ip, 4711)))
}

impl<S: Store + 'static> TowerDoor<S> {
    fn start(&self, policy: Policy) -> Serving<S> {
        let (store, clock) = ((self.store)(&policy), Arc::clone(&self.clock));
        let secret = Secret::new(&[9; 32]).unwrap();
        let limiter = Arc::new(
            Limiter::builder(policy)
                .store(store)
                .clock(clock)
                .digest_key(DigestKey::new([7; 16]))
                .secrets(secret)
                .build()
                .unwrap(),
        );
        let layer = ThresholdLayer::new(Arc::clone(&limiter)).unwrap().peer(peer).identify(identified);
        let app = Router::new().fallback(any(|| async { Body::new(Endless) })).layer(layer);
        let listener = self.runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let server = self.runtime.spawn(async move { axum::serve(listener, app).await.unwrap() });
        Serving { limiter, address, crossed: Vec::new(), server }
    }
}

impl<S: Store + 'static> ClientDoor for TowerDoor<S> {
    fn express(&self, facts: &Map<String, Value>) -> Result<Map<String, Value>, &'static str> {
        let mut facts = facts.clone();
        let line = |value: &Value| value.as_str().is_some_and(|text| text.bytes().all(|byte| byte.is_ascii_graphic()));
        let path = facts.entry("path").or_insert(json!("/"));
        if !path.as_str().is_some_and(|path| path.starts_with('/') && path.parse::<http::Uri>().is_ok()) {
            return Err(LEFT_OUT[1]);
        }
        if !line(facts.entry("method").or_insert(json!("GET"))) {
            return Err(LEFT_OUT[2]);
        }
        match text(&facts, "ip").map(|ip| parse_address(&ip)) {
            Some(None) => Err(LEFT_OUT[3]),
            _ => Ok(facts),
        }
    }

    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        let policy = Policy::parse(policy, &|name| env.get(name).cloned()).map_err(|error| error.to_string())?;
        match &self.serving {
            Some(serving) if !fresh => {
                serving.limiter.swap(policy);
            }
            _ => self.serving = Some(self.start(policy)),
        }
        Ok(())
    }

    fn ask(&mut self, facts: &Map<String, Value>, now: Timestamp) -> Result<Value, String> {
        self.clock.set(now);
        let case = Value::Object(facts.clone()).to_string();
        let mut fields = vec![("x-case".to_owned(), case)];
        fields.extend(text(facts, "host").map(|host| ("host".to_owned(), host)));
        fields.extend(text(facts, "accept").map(|accept| ("accept".to_owned(), accept)));
        for (name, value) in facts.get("headers").and_then(Value::as_object).into_iter().flatten() {
            fields.push((name.clone(), value.as_str().unwrap().to_owned()));
        }
        // The body is announced and never sent: a request that is refused for its size is refused before it is read.
        let length = facts.get("bytes").and_then(Value::as_u64).unwrap_or(0);
        fields.push(("content-length".to_owned(), length.to_string()));
        let (method, path) = (text(facts, "method").unwrap(), text(facts, "path").unwrap());
        let fields = fields.into_iter().map(|(name, value)| (name, value.into_bytes()));
        let fields: Vec<_> = fields.chain(vectors::lines(facts)).collect();
        let serving = self.serving.as_mut().ok_or("no policy is loaded")?;
        let mut client = Client::new(TcpStream::connect(serving.address).unwrap());
        let answer = client.ask_bytes(&method, &path, &fields).map_err(|error| error.to_string())?;
        if answer.status == 200 {
            serving.crossed.push(client);
        }
        Ok(vectors::answer(answer.status, &answer.headers, &answer.body))
    }
}

#[test]
fn the_layer_gives_the_answer_of_every_vector_that_a_client_can_send() {
    play_on(|policy| MemoryStore::new(policy.memory()));
}

#[test]
fn the_layer_gives_the_same_answers_on_a_slow_store() {
    play_on(|_| KeyValueStore::default());
}

fn play_on<S: Store + 'static>(store: fn(&Policy) -> S) {
    let door = || TowerDoor { store, runtime: Runtime::new().unwrap(), clock: Arc::default(), serving: None };
    vectors::play_all(door, &LEFT_OUT, 231);
}
