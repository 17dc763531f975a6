//! Answers that come after their deadline: what they have charged for a caller that was refused is withdrawn.

use std::sync::Arc;
use std::time::Duration;

use threshold_core::Timestamp;
use threshold_core::limit::LimitOptions;
use threshold_core::receipt::OnExpire;
use threshold_limiter::store::{AnyStore, EndError, Store, StoreError};
use threshold_limiter::{Attempted, Facts, Limiter, LoginError, LoginRequest, Policy};
use threshold_redis::{RedisOptions, RedisStore};

use crate::process::{Cluster, RedisServer, secret};
use crate::proxy::Proxy;

type Node = Limiter<RedisStore>;

const DEADLINE: Duration = Duration::from_millis(180);

async fn node(url: String, deadline: Duration, policy: &str) -> Node {
    let options = RedisOptions::new(url.parse().unwrap(), secret(9)).deadline(deadline);
    let policy = Policy::parse(policy, &|_| None).unwrap();
    let builder = Limiter::builder(policy).store(RedisStore::open(options).await.unwrap());
    builder.build().unwrap()
}

/// Lets a node follow the log, as a server does twice a second, until something is true.
async fn follow_until(node: &Node, what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    for _ in 0..500 {
        if node.follow_control().await.is_ok() && is_true().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never true: {what}; {:?}", node.store().last_error());
}

/// Answers that came after their deadline locked accounts: every user who had been answered 503 had a failed attempt afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_login_attempt_that_is_counted_too_late_is_withdrawn() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let node = node(proxy.url(), DEADLINE, LOGIN).await;
    let ada = attempt();
    let failures =
        async || Ok::<_, StoreError>(node.account_named("ada").await?.map(|known| known.failures(Timestamp::MAX)));
    let mut tries = 0;
    loop {
        // Three round trips: the address, and the account twice. The last reply takes longer than a login waits. On a busy machine that
        // may be another one.
        proxy.set_delay(Duration::from_millis(100));
        let (attempted, ()) = tokio::join!(node.login_attempt_async(&ada), async {
            tokio::time::sleep(Duration::from_millis(450)).await;
            proxy.set_delay(Duration::from_millis(900));
        });
        proxy.set_delay(Duration::ZERO);
        if let Ok(Attempted::Allowed(attempt)) = attempted {
            let _ = node.login_result_async(&attempt, true).await;
        }
        let mut counted = failures().await;
        while counted.is_err() {
            counted = failures().await;
        }
        if counted == Ok(Some(1)) {
            break;
        }
        follow_until(&node, "nothing is counted", async || {
            failures().await.is_ok_and(|failures| failures.unwrap_or(0) == 0)
        })
        .await;
        tries += 1;
        assert!(tries < 20, "the attempt was not counted: {:?}", node.store().last_error());
    }
    // An account about which there is nothing to remember has no record.
    follow_until(&node, "the attempt is withdrawn", async || {
        failures().await.is_ok_and(|failures| failures.unwrap_or(0) == 0)
    })
    .await;
    node.store().returned().await;
    has_three_attempts(&node).await;
}

const LOGIN: &str = "[login]\nip = '3/h'\n";

fn attempt() -> LoginRequest<'static> {
    LoginRequest { account: Some("ada"), ip: "192.0.2.1".parse().ok(), ..LoginRequest::default() }
}

/// The account has its three attempts before the lock, and the address its three.
async fn has_three_attempts<S: Store>(node: &Limiter<S>) {
    let ada = attempt();
    for nth in 1..=3 {
        let attempted = node.login_attempt_async(&ada).await.unwrap();
        assert!(matches!(attempted, Attempted::Allowed(_)), "attempt {nth}: {attempted:?}");
    }
    assert!(matches!(node.login_attempt_async(&ada).await.unwrap(), Attempted::Refused(_)));
}

/// A Redis that stood still carries out everything that has waited for it, long after the callers were answered. It counts nothing of
/// that.
async fn nothing_counts_too_late(url: String, pause: impl Fn()) {
    let policy =
        format!("{LOGIN}[[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/day'\non_store_error = 'closed'\n");
    let options = RedisOptions::new(url.parse().unwrap(), secret(9)).deadline(DEADLINE);
    // As a server has it.
    let store = AnyStore::other(Arc::new(RedisStore::open(options).await.unwrap()));
    let builder = Limiter::builder(Policy::parse(&policy, &|_| None).unwrap()).store(store);
    let node = builder.build().unwrap();
    let ada = attempt();
    let user = Facts { user: Some("ada"), ..Facts::default() };
    let left = async || {
        let decision = Box::pin(node.peek_async(&user)).await.unwrap();
        decision.degraded.is_none().then(|| decision.readings[0].remaining)
    };
    assert_eq!(left().await, Some(4));
    pause();
    let attempts = [(); 2].map(|()| node.login_attempt_async(&ada));
    let hold = Duration::from_secs(3600);
    let (attempted, checked, reserved) = tokio::join!(
        futures_util::future::join_all(attempts),
        node.check_async(&user),
        node.reserve_async(&user, hold, OnExpire::Charge),
    );
    assert!(attempted.iter().all(|attempted| matches!(attempted, Err(LoginError::Store(_)))), "{attempted:?}");
    assert!(checked.unwrap().unavailable() && reserved.unwrap().decision.unavailable());
    let mut seen = left().await;
    while seen.is_none() {
        tokio::time::sleep(Duration::from_millis(20)).await;
        seen = left().await;
    }
    // Nobody has followed the log, so nothing was withdrawn.
    assert_eq!(seen, Some(4));
    has_three_attempts(&node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_counts_that_a_server_carries_out_too_late() {
    let server = RedisServer::start();
    nothing_counts_too_late(server.url(), || {
        assert_eq!(server.cli(&["CLIENT", "PAUSE", "1500", "ALL"]), "OK\n");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_counts_that_a_primary_carries_out_too_late() {
    let cluster = Cluster::start();
    nothing_counts_too_late(cluster.url(), || {
        for primary in cluster.primaries() {
            assert_eq!(cluster.node(primary).cli(&["CLIENT", "PAUSE", "1500", "ALL"]), "OK\n");
        }
    })
    .await;
}

/// A program counted by `/v1/limit`, was answered 503 for a moment, and had used up its limit afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_charge_of_one_limit_that_comes_too_late_is_given_back() {
    let server = RedisServer::start();
    let node = node(server.url(), DEADLINE, "").await;
    let limit = LimitOptions::new().limit(5, Duration::from_secs(3600)).unwrap();
    assert_eq!(node.check_limit("a key", &limit, 1).await.unwrap().remaining, 4);
    assert_eq!(server.cli(&["CLIENT", "PAUSE", "400", "ALL"]), "OK\n");
    assert_eq!(node.check_limit("a key", &limit, 3).await.unwrap_err(), StoreError::Timeout);
    // Executed after the one that was late, on the same connection.
    let remaining = async || node.check_limit("a key", &limit, 0).await.ok().map(|decision| decision.remaining);
    follow_until(&node, "the late charge is given back", async || remaining().await == Some(4)).await;
    assert_eq!(remaining().await, Some(4));
}

/// A reservation was saved a moment after its caller had been refused. Nobody had its id, and its charge stayed for an hour.
#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_that_is_saved_too_late_is_released() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let policy = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '10/day'\nalgorithm = 'fixed-window'\n\
                  on_store_error = 'closed'\n";
    let node = node(proxy.url(), DEADLINE, policy).await;
    let (ada, ttl) = (Facts { user: Some("ada"), ..Facts::default() }, Duration::from_secs(3600));
    node.reserve_async(&Facts { user: Some("bob"), ..ada }, ttl, OnExpire::Charge).await.unwrap();
    // It is made in time, and its answer is late.
    proxy.set_delay(DEADLINE * 2 / 3);
    let mut tries = 0;
    loop {
        let reserved = node.reserve_async(&ada, ttl, OnExpire::Charge).await.unwrap();
        match reserved.reservation {
            // A busy machine waits for longer than the deadline. A release without an answer is repeated, as callers do.
            Some(id) => {
                proxy.set_delay(Duration::ZERO);
                while let Err(EndError::Store(_)) = node.release_async(id).await {}
                proxy.set_delay(DEADLINE * 2 / 3);
            }
            None => {
                assert!(reserved.decision.unavailable(), "{:?}", reserved.decision);
                break;
            }
        }
        tries += 1;
        assert!(tries < 50, "every reservation was in time");
    }
    proxy.set_delay(Duration::ZERO);
    follow_until(&node, "everything is given back", async || {
        let peeked = node.peek_async(&ada).await.unwrap();
        // A peek shows what would be left after one more request.
        peeked.degraded.is_none() && peeked.readings[0].remaining == 9
    })
    .await;
    assert!(server.cli(&["KEYS", "th:*v:*"]).lines().count() >= 2, "the reservation was saved");
}
