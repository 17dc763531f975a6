//! A request that waits for room is woken at once when room is given back early.
//!
//! Waiting uses tokio's paused time. The limiter's clock stands still, so nothing expires.

#![cfg(all(feature = "tower", feature = "wait"))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::tower::{RequestBody, ThresholdLayer};
use threshold_limiter::{ActualCost, Facts, Limiter, ManualClock, OnExpire, Policy, Timestamp};
use tokio::time::{Instant, sleep};
use tower::{Layer as _, ServiceExt as _, service_fn};

type One = Arc<Limiter<MemoryStore, ManualClock>>;

/// Not a whole number of seconds: a waiting request also looks by itself once a second.
const ENDS_AFTER: Duration = Duration::from_millis(10_300);

/// Returns a limiter that allows one request at a time, for at most an hour.
fn one_at_once() -> One {
    let rule = "[[rule]]\nname = \"r\"\nlayer = \"global\"\nper = []\nlimit = \"1\"\nalgorithm = \"concurrency\"\nttl = \"1h\"\n";
    let clock = ManualClock::new(Timestamp::from_secs(1_767_225_600));
    Arc::new(Limiter::builder(Policy::parse(rule, &|_| None).unwrap()).clock(clock).build())
}

/// Waits for the only slot, which `ends` gives back after a while, and checks that the waiting request gets it at once.
async fn wakes_at_once(limiter: &One, ends: impl Future<Output = ()>) {
    let start = Instant::now();
    let ends = async {
        sleep(ENDS_AFTER).await;
        ends.await;
    };
    let facts = Facts::default();
    let (decision, ()) = tokio::join!(limiter.wait(&facts, Duration::from_secs(60)), ends);
    assert!(decision.unwrap().allowed());
    assert!(start.elapsed() < ENDS_AFTER.saturating_add(Duration::from_millis(2)), "after {:?}", start.elapsed());
}

fn reserved(limiter: &One) -> threshold_limiter::TraceId {
    limiter.reserve(&Facts::default(), Duration::from_secs(3_600), OnExpire::Charge).unwrap().reservation.unwrap()
}

/// Seen to fail after: leaving out `made_room` in `Limiter::{commit, release, commit_async, release_async}`, each.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_reservation_wakes_a_waiting_request() {
    let actual = ActualCost::default();
    let one = one_at_once();
    let id = reserved(&one);
    wakes_at_once(&one, async { one.commit(id, &actual).unwrap() }).await;
    let one = one_at_once();
    let id = reserved(&one);
    wakes_at_once(&one, async { one.release(id).unwrap() }).await;
    let one = one_at_once();
    let id = reserved(&one);
    wakes_at_once(&one, async { one.commit_async(id, &actual).await.unwrap() }).await;
    let one = one_at_once();
    let id = reserved(&one);
    wakes_at_once(&one, async { one.release_async(id).await.unwrap() }).await;
}

/// Seen to fail after: leaving out `made_room` in the layer's `give_back`.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_request_behind_the_layer_wakes_a_waiting_request() {
    let one = one_at_once();
    let inner = service_fn(async |_: Request<RequestBody<Body>>| Ok::<_, Infallible>(Response::new(Body::empty())));
    let service = ThresholdLayer::new(Arc::clone(&one)).unwrap().layer(inner);
    let response = service.oneshot(Request::new(Body::empty())).await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(!one.peek(&Facts::default()).unwrap().allowed(), "its body has not ended");
    wakes_at_once(&one, async { drop(response) }).await;
}
