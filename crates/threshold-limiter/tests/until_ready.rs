//! `KeyLimiter::until_ready`: callers wait for a key in order, within bounds, and can give up at any time.
//!
//! Time is tokio's paused time, and the limiter's clock follows it, so that every run is the same and takes no time.

#![cfg(feature = "wait")]
#![expect(
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    reason = "a test that overflows or unwraps nothing should fail loudly, on the line where it does"
)]

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use threshold_limiter::{Algorithm, Clock, KeyLimiter, Limit, LimitOptions, Timestamp};
use tokio::task::JoinSet;
use tokio::time::Instant;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

/// A clock that follows tokio's.
#[derive(Debug, Clone, Copy)]
struct TokioClock(Instant);

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        let since = u64::try_from(self.0.elapsed().as_micros()).unwrap();
        Timestamp::from_micros(Timestamp::from_secs(1_767_225_600).micros() + since)
    }
}

/// A limit of one in ten seconds.
fn one_in_ten_seconds() -> Limit {
    Limit::token_bucket(1, 10 * SECOND).unwrap()
}

fn limiter(limit: Limit) -> KeyLimiter<TokioClock> {
    KeyLimiter::builder(limit).max_keys(1_000).clock(TokioClock(Instant::now())).build()
}

/// A developer with 20 tasks and a provider's limit of one call in ten seconds wrote a loop of `check` and `sleep`: all woke at
/// once, one got through, and which one was chance.
#[tokio::test(start_paused = true)]
async fn callers_are_served_in_the_order_of_their_arrival_and_on_time() {
    for limit in [one_in_ten_seconds(), LimitOptions::new().algorithm(Algorithm::SlidingLog).parse("1/10s").unwrap()] {
        let (limiter, served) = (Arc::new(limiter(limit)), Arc::new(Mutex::new(Vec::new())));
        let (began, mut tasks) = (Instant::now(), JoinSet::new());
        for number in 0..20_u64 {
            let (limiter, served) = (Arc::clone(&limiter), Arc::clone(&served));
            tasks.spawn(async move {
                assert!(limiter.until_ready("provider", HOUR).await.allowed);
                served.lock().unwrap().push((number, began.elapsed().as_secs()));
            });
            tokio::task::yield_now().await;
        }
        tasks.join_all().await;
        let expect: Vec<_> = (0..20).map(|number| (number, number * 10)).collect();
        assert_eq!(*served.lock().unwrap(), expect, "{limit}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cost_that_cannot_fit_in_time_is_denied_at_once() {
    let limiter = limiter(one_in_ten_seconds());
    let began = Instant::now();
    assert!(limiter.until_ready("a", Duration::ZERO).await.allowed);
    let denied = limiter.until_ready("a", 9 * SECOND).await;
    assert_eq!((denied.allowed, denied.retry_after()), (false, Some(10 * SECOND)));
    assert!(!limiter.until_ready_cost("b", 2, HOUR).await.allowed, "a cost of 2 never fits");
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert!(limiter.until_ready("b", Duration::ZERO).await.allowed, "another key is free");
    assert!(limiter.until_ready("a", 10 * SECOND).await.allowed, "it may wait exactly as long as it must");
    assert_eq!(began.elapsed().as_secs(), 10);
}

/// A caller behind others is denied when its time is up, though it never was the first.
#[tokio::test(start_paused = true)]
async fn a_caller_behind_others_waits_no_longer_than_it_said() {
    let limiter = Arc::new(limiter(one_in_ten_seconds()));
    assert!(limiter.check("a").allowed);
    let first = tokio::spawn({
        let limiter = Arc::clone(&limiter);
        async move { limiter.until_ready("a", HOUR).await.allowed }
    });
    tokio::task::yield_now().await;
    let began = Instant::now();
    let denied = limiter.until_ready("a", 5 * SECOND).await;
    assert_eq!((denied.allowed, denied.retry_after()), (false, Some(SECOND)));
    assert_eq!(began.elapsed().as_secs(), 5);
    assert!(first.await.unwrap());
}

/// A future that is dropped has charged nothing, and the next caller moves up.
#[tokio::test(start_paused = true)]
async fn a_caller_who_gives_up_charges_nothing_and_lets_the_next_one_through() {
    let limiter = limiter(one_in_ten_seconds());
    assert!(limiter.check("a").allowed);
    let began = Instant::now();
    let mut second = pin!(limiter.until_ready("a", HOUR));
    {
        let mut first = Box::pin(limiter.until_ready("a", HOUR));
        assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(second.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert!(second.await.allowed);
    assert_eq!(began.elapsed().as_secs(), 10);
    assert!(!limiter.check("a").allowed, "the second was charged");
}

#[tokio::test(start_paused = true)]
async fn beyond_the_number_of_waiters_a_caller_is_denied_at_once() {
    let builder = KeyLimiter::builder(one_in_ten_seconds()).max_keys(1_000).clock(TokioClock(Instant::now()));
    let limiter = builder.max_waiters(2).max_waiters_per_key(1).build();
    let (began, mut waiting) = (Instant::now(), Vec::new());
    for key in ["a", "b", "c"] {
        assert!(limiter.check(key).allowed);
    }
    for key in ["a", "b"] {
        let mut caller = Box::pin(limiter.until_ready(key, HOUR));
        assert!(caller.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        waiting.push(caller);
    }
    assert!(!limiter.until_ready("a", HOUR).await.allowed, "one waits for this key");
    assert!(!limiter.until_ready("c", HOUR).await.allowed, "two wait in all");
    assert_eq!(began.elapsed(), Duration::ZERO);
    waiting.clear();
    assert!(limiter.until_ready("c", HOUR).await.allowed, "there is room again");
}
