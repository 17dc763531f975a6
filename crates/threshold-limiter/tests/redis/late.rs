//! Answers that come after their deadline: what they have charged for a caller that was refused is withdrawn.

use std::time::Duration;

use threshold_core::limit::LimitOptions;
use threshold_core::receipt::OnExpire;
use threshold_core::{KeyId, Timestamp};
use threshold_limiter::store::redis::{RedisOptions, RedisStore};
use threshold_limiter::store::{Store as _, StoreError};
use threshold_limiter::{Attempted, Facts, Limiter, LoginError, LoginRequest, Policy, Secret};

use crate::process::{Cluster, RedisServer};
use crate::proxy::Proxy;

type Node = Limiter<RedisStore>;

const DEADLINE: Duration = Duration::from_millis(180);

async fn node(url: String, deadline: Duration, policy: &str) -> Node {
    let options = RedisOptions::new(url.parse().unwrap(), KeyId::from_u32(1)).deadline(deadline);
    let policy = Policy::parse(policy, &|_| None).unwrap();
    let builder = Limiter::builder(policy).store(RedisStore::open(options).await.unwrap());
    builder.secrets(Secret::new(&[9; 32]).unwrap()).build()
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

/// A Redis that stood still for a second locked accounts: every user who had been answered 503 had a failed attempt afterwards.
async fn late_attempts_are_withdrawn(url: String, pause: impl Fn()) {
    // Shorter than the deadline of logins, which is a second. Only calls at the beginning of the pause count as failures of the
    // server, and these are too few to leave it alone.
    let node = node(url, Duration::from_millis(900), "[login]\nip = '3/h'\n").await;
    let request = LoginRequest { account: Some("ada"), ip: "192.0.2.1".parse().ok(), ..LoginRequest::default() };
    // At the end of time every attempt under way has failed.
    let counted = async || node.account_named("ada").await.ok()?.map(|account| account.failures(Timestamp::MAX));
    let mut tries = 0;
    while counted().await.is_none() {
        // On a busy machine the server may be left alone in the meantime, and then nothing is counted.
        if tries % 100 == 0 {
            pause();
            let attempts = [(); 3].map(|()| node.login_attempt_async(&request));
            for attempted in futures_util::future::join_all(attempts).await {
                assert!(matches!(attempted, Err(LoginError::Store(_))), "{attempted:?}");
            }
        }
        tries += 1;
        assert!(tries < 1_000, "the attempts were not counted: {:?}", node.store().last_error());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // An account about which there is nothing to remember has no record.
    follow_until(&node, "the three attempts are withdrawn", async || {
        let account = node.account_named("ada").await;
        account.is_ok_and(|account| account.is_none_or(|account| account.failures(Timestamp::MAX) == 0))
    })
    .await;
    node.store().returned().await;
    // The account has its three attempts before the lock, and the address its three.
    for nth in 1..=3 {
        let attempted = node.login_attempt_async(&request).await.unwrap();
        assert!(matches!(attempted, Attempted::Allowed(_)), "attempt {nth}: {attempted:?}");
    }
    assert!(matches!(node.login_attempt_async(&request).await.unwrap(), Attempted::Refused(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_attempt_that_is_counted_too_late_is_withdrawn() {
    let server = RedisServer::start();
    late_attempts_are_withdrawn(server.url(), || {
        assert_eq!(server.cli(&["CLIENT", "PAUSE", "1200", "ALL"]), "OK\n");
    })
    .await;
}

/// Account and address are on different primaries, and each is counted and withdrawn by a step of its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_login_attempt_that_is_counted_too_late_on_a_cluster_is_withdrawn() {
    let cluster = Cluster::start();
    late_attempts_are_withdrawn(cluster.url(), || {
        for primary in cluster.primaries() {
            assert_eq!(cluster.node(primary).cli(&["CLIENT", "PAUSE", "1200", "ALL"]), "OK\n");
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
    assert_eq!(server.cli(&["CLIENT", "PAUSE", "1000", "ALL"]), "OK\n");
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
    // A charge is one round trip, and a reservation two: the charge is in time and the reservation is late.
    proxy.set_delay(DEADLINE / 3);
    let mut tries = 0;
    loop {
        let reserved = node.reserve_async(&ada, ttl, OnExpire::Charge).await.unwrap();
        match reserved.reservation {
            // A busy machine waits for longer than the deadline.
            Some(id) => node.release_async(id).await.map_or((), |()| ()),
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
