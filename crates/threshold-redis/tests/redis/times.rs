//! The time is the server's: nodes whose clocks are wrong answer as the others do.

use std::time::{Duration, SystemTime};

use threshold_core::{DigestKey, Span, Timestamp};
use threshold_limiter::{Attempted, Layer, Limit, Limiter, LoginRequest, ManualClock, Policy};
use threshold_redis::RedisStore;

use crate::process::RedisServer;

/// The time of a server with a clock of its own.
const START: Timestamp = Timestamp::from_secs(1_767_225_600);

type Node = Limiter<RedisStore, ManualClock>;

/// Starts a node whose clock shows this time.
async fn node(server: &RedisServer, now: Timestamp) -> Node {
    let policy = "[login]\n[[rule]]\nname = 'user'\nper = ['user']\nlimit = '100/min'";
    Limiter::builder(Policy::parse(policy, &|_| None).unwrap())
        .store(server.open().await)
        .clock(ManualClock::new(now))
        .digest_key(DigestKey::new([7; 16]))
        .build()
        .unwrap()
}

/// Two nodes an hour apart shared a Redis. Pauses through one of them lasted an hour longer, and it told locked-out users to wait
/// for an hour.
///
/// Fails if a pause, `/v1/limit` or a login counts from the node's clock.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_an_hour_apart_answer_the_same() {
    let server = RedisServer::start_with_clock();
    server.set_time(START);
    let hour = Span::HOUR.micros();
    let nodes = [
        node(&server, Timestamp::from_micros(START.micros() - hour)).await,
        node(&server, START.plus(Span::HOUR)).await,
    ];
    let after = |seconds| SystemTime::from(START.plus(Span::from_secs(seconds)));
    let limit: Limit = "1/min".parse().unwrap();
    let ada = LoginRequest { account: Some("ada"), ..LoginRequest::default() };
    for failure in 0..3 {
        let attempted = nodes[failure % 2].login_attempt_async(&ada).await.unwrap();
        let ended = nodes[(failure + 1) % 2].login_result_async(attempted.token().unwrap(), false).await.unwrap();
        assert_eq!(ended.lockout_remaining, (failure == 2).then_some(Duration::from_secs(60)));
    }
    for (number, one) in nodes.iter().enumerate() {
        let name = format!("user {number}");
        one.pause_async(Layer::User, &name, Duration::from_secs(60)).await.unwrap();
        assert!(one.check_limit(&name, &limit, 1).await.unwrap().allowed);
        for other in &nodes {
            let keys = other.policy().keys_of(Layer::User, &name);
            assert_eq!(other.blocked_until(keys).await.unwrap(), Some(after(60)));
            let denied = other.check_limit(&name, &limit, 1).await.unwrap();
            assert_eq!((denied.reset_at, denied.retry_after), (Some(after(60)), Some(Duration::from_secs(60))));
        }
        let Attempted::Refused(refusal) = one.login_attempt_async(&ada).await.unwrap() else { panic!("it is locked") };
        assert_eq!(refusal.retry_after, Some(Duration::from_secs(60)));
    }
}

/// An operator banned for ten minutes through a node whose clock was an hour behind, and nobody was banned.
///
/// Fails if `Limiter::now` is the node's clock, or if a reply does not correct the estimate.
#[tokio::test(flavor = "multi_thread")]
async fn the_time_of_a_node_is_that_of_the_server() {
    let server = RedisServer::start_with_clock();
    server.set_time(START);
    let node = node(&server, Timestamp::from_secs(1)).await;
    let passes_from = |start: Timestamp| {
        let passed = Timestamp::from(node.now()).micros().checked_sub(start.micros());
        // The server's clock stands still, and the node's estimate goes on between two replies.
        assert!(passed.is_some_and(|passed| passed < 60_000_000), "{passed:?}");
    };
    passes_from(START);
    // A replica takes over whose clock is an hour behind, and then one whose clock is ahead.
    for start in [Timestamp::from_micros(START.micros() - Span::HOUR.micros()), START.plus(Span::HOUR)] {
        server.set_time(start);
        assert!(node.check_limit("any", &Limit::per_minute(100), 1).await.unwrap().allowed);
        passes_from(start);
    }
}
