//! The layer on a store that is never ready at the first poll: what goes on after its request has left.

#![cfg(feature = "tower")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::{any, get, post};
use http::{Request, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt as _;
use threshold_core::{DigestKey, Span, Timestamp};
use threshold_limiter::store::{Answer, Command, Digest, Kind, Listed, Outcome, Plan, Store, StoreError};
use threshold_limiter::tower::{PeerAddr, ThresholdLayer};
use threshold_limiter::{Facts, Limiter, ManualClock, ObservedDecision, Observer, Policy, Secret};
use tokio::time::Instant;
use tower::ServiceExt as _;

use key_value::KeyValueStore;

#[path = "stores/key_value.rs"]
mod key_value;

const START: Timestamp = Timestamp::from_secs(1_767_225_600);
const CLIENT: ([u8; 4], u16) = ([203, 0, 113, 7], 4711);

/// A store that answers, or fails to give anything back.
#[derive(Default)]
struct Fallible {
    inner: KeyValueStore,
    fails: bool,
}

impl Store for Fallible {
    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        self.inner.settle(plan, now, outcome).await
    }

    async fn execute(&self, command: Command, now: Timestamp) -> Result<Answer, StoreError> {
        if self.fails && matches!(command, Command::GiveBack { .. }) {
            return Err(StoreError::Unavailable);
        }
        self.inner.execute(command, now).await
    }

    async fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        most: usize,
        now: Timestamp,
    ) -> Result<Vec<Listed>, StoreError> {
        self.inner.list(kind, after, most, now).await
    }
}

/// Counts what it is told.
#[derive(Default)]
struct Counts {
    decided: AtomicU32,
    lost: AtomicU32,
}

impl Observer for Counts {
    fn decided(&self, _: &ObservedDecision<'_>) {
        self.decided.fetch_add(1, Ordering::Relaxed);
    }

    fn return_lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }
}

struct World {
    clock: Arc<ManualClock>,
    limiter: Arc<Limiter<Fallible, Arc<ManualClock>>>,
    counts: Arc<Counts>,
}

impl World {
    fn new(policy: &str) -> Self {
        Self::on(policy, Fallible::default())
    }

    fn on(policy: &str, store: Fallible) -> Self {
        let (clock, counts) = (Arc::new(ManualClock::new(START)), Arc::<Counts>::default());
        let policy = Policy::parse(policy, &|_| None).unwrap();
        let secret = Secret::new(&[9; 32]).unwrap();
        let limiter = Limiter::builder(policy)
            .store(store)
            .clock(Arc::clone(&clock))
            .digest_key(DigestKey::new([7; 16]))
            .secrets(secret)
            .observer(Arc::clone(&counts) as Arc<dyn Observer>);
        let limiter = Arc::new(limiter.build().unwrap());
        Self { clock, limiter, counts }
    }

    fn layer(&self) -> ThresholdLayer {
        ThresholdLayer::new(Arc::clone(&self.limiter)).unwrap()
    }

    fn hello(&self) -> Router {
        Router::new().route("/x", any(|| async { "hello" })).layer(self.layer())
    }

    fn hangs(&self) -> Router {
        Router::new().route("/x", get(std::future::pending::<&str>)).layer(self.layer())
    }

    async fn remaining(&self) -> u64 {
        let facts = Facts { ip: Some(CLIENT.0.into()), cost: Some(0), ..Facts::default() };
        self.limiter.peek_async(&facts).await.unwrap().bound_by().unwrap().remaining
    }

    /// Waits until so much remains: what goes on in the background has no other end to wait for.
    async fn settles_at(&self, remaining: u64) {
        for _ in 0..1_000 {
            if self.remaining().await == remaining {
                return;
            }
            tokio::task::yield_now().await;
        }
        assert_eq!(self.remaining().await, remaining);
    }
}

fn request() -> Request<Body> {
    let peer = SocketAddr::from(CLIENT);
    Request::builder().uri("/x").extension(PeerAddr(peer)).body(Body::empty()).unwrap()
}

async fn status(app: &Router) -> u16 {
    app.clone().oneshot(request()).await.unwrap().status().as_u16()
}

/// Polls once, and leaves.
fn begin<F: Future + Unpin>(future: &mut F) {
    let polled = Pin::new(future).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(polled, Poll::Pending));
}

const ONE_AT_ONCE: &str = "[[rule]]\nname = 'one'\nper = ['ip']\nlimit = '1'\nalgorithm = 'concurrency'\n";
const FAILURES: &str = "[[rule]]\nname = 'failures'\nper = ['ip']\nlimit = '2/h'\ncount = 'status:401,403'\n";

#[tokio::test]
async fn what_is_held_is_given_back_when_the_body_ends_or_is_dropped() {
    let world = World::new(ONE_AT_ONCE);
    let app = world.hello();
    let first = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(status(&app).await, 429);
    first.into_body().collect().await.unwrap();
    world.settles_at(1).await;
    drop(app.clone().oneshot(request()).await.unwrap());
    world.settles_at(1).await;
    assert_eq!(world.counts.lost.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn what_is_held_is_given_back_when_the_client_leaves_before_the_answer() {
    let world = World::new(ONE_AT_ONCE);
    let future = world.hangs().oneshot(request());
    assert!(tokio::time::timeout(Duration::from_millis(50), future).await.is_err());
    world.settles_at(1).await;
}

/// Woken by: polling the decision in place of starting it in the background.
#[tokio::test]
async fn a_client_that_leaves_while_the_store_is_asked_holds_nothing() {
    for policy in [ONE_AT_ONCE, FAILURES] {
        let world = World::new(policy);
        let all = world.remaining().await;
        let mut future = Box::pin(world.hello().oneshot(request()));
        begin(&mut future);
        drop(future);
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
        assert_eq!(world.counts.decided.load(Ordering::Relaxed), 2, "it was decided, and so was the look before it");
        world.settles_at(all).await;
    }
}

#[tokio::test]
async fn rules_count_by_outcome() {
    let world = World::new(FAILURES);
    let ok = world.hello();
    assert_eq!(status(&ok).await, 200);
    world.settles_at(2).await;
    let denies = Router::new().route("/x", any(|| async { StatusCode::FORBIDDEN })).layer(world.layer());
    assert_eq!((status(&denies).await, status(&denies).await), (403, 403));
    assert_eq!(world.remaining().await, 0);
    assert_eq!(status(&ok).await, 429);
}

#[tokio::test]
async fn bytes_that_streamed_are_recorded() {
    let world = World::new("[[rule]]\nname = 'upload'\nper = ['ip']\nlimit = '1000B/h'\n");
    let app = Router::new().route("/x", post(|body: Bytes| async move { body.len().to_string() })).layer(world.layer());
    let body = Body::new(Chunks(3));
    let mut request = request().map(|_| body);
    *request.method_mut() = http::Method::POST;
    assert_eq!(app.oneshot(request).await.unwrap().status(), StatusCode::OK);
    world.settles_at(700).await;
}

/// A body of so many chunks of 100 bytes whose length nobody knows.
struct Chunks(usize);

impl http_body::Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let left = self.0.checked_sub(1);
        self.0 = left.unwrap_or(0);
        Poll::Ready(left.map(|_| Ok(Frame::data(Bytes::from_static(&[0; 100])))))
    }
}

#[tokio::test(start_paused = true)]
async fn a_shadow_ban_is_waited_out() {
    let world = World::new(
        "[ladders.quiet]\nrungs = ['shadow', 'deny']\n[[rule]]\nname = 'r'\nper = ['ip']\nlimit = '2/h'\n\
         algorithm = 'fixed-window'\nladder = 'quiet'\n",
    );
    let app = world.hello();
    for _ in 0..3 {
        assert_eq!(status(&app).await, 200);
    }
    world.clock.advance(Span::HOUR);
    let before = Instant::now();
    assert_eq!(status(&app).await, 200);
    assert!(before.elapsed() >= Duration::from_secs(1), "{:?}", before.elapsed());
    world.settles_at(1).await;
}

#[tokio::test]
async fn observers_hear_of_what_could_not_be_given_back() {
    let world = World::on(ONE_AT_ONCE, Fallible { fails: true, ..Fallible::default() });
    drop(world.hello().oneshot(request()).await.unwrap());
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.counts.lost.load(Ordering::Relaxed), 1);
    assert_eq!(world.remaining().await, 0, "it is held to the end of its time");
}
