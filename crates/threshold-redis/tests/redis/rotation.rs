//! The rotation of the secret on a shared store: which nodes may use it, and when the old secret ends.

use std::collections::BTreeSet;
use std::time::Duration;

use threshold_core::{Secrets, Timestamp};
use threshold_limiter::store::Store as _;
use threshold_redis::{RedisOpenError, RedisOptions, RedisStore};

use crate::process::{Cluster, RedisServer, secret};

const A: u8 = 10;
const B: u8 = 11;

/// How a node is started: its name, its secret and the old one.
type Settings = (&'static str, u8, Option<u8>);

async fn open(url: &str, (name, present, old): Settings) -> Result<RedisStore, RedisOpenError> {
    let secrets = Secrets::new(secret(present));
    let secrets = old.into_iter().fold(secrets, |secrets, old| secrets.with_old(secret(old)).unwrap());
    RedisStore::open(RedisOptions::new(url.parse().unwrap(), secrets).node(name)).await
}

async fn started(server: &RedisServer, settings: Settings) -> RedisStore {
    open(&server.url(), settings).await.unwrap()
}

async fn refused(server: &RedisServer, settings: Settings) -> RedisOpenError {
    open(&server.url(), settings).await.unwrap_err()
}

fn in_force(server: &RedisServer) -> BTreeSet<String> {
    server.cli(&["SMEMBERS", "th:{control}secrets"]).lines().map(str::to_owned).collect()
}

/// Returns the key ids of these secrets.
fn ids<const N: usize>(secrets: [u8; N]) -> BTreeSet<String> {
    secrets.into_iter().map(id).collect()
}

fn id(of: u8) -> String {
    secret(of).key_id().to_string()
}

async fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    for _ in 0..1_000 {
        if is_true() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never true: {what}");
}

/// Forgets the nodes that have ended, as ten seconds do.
fn forget_nodes(server: &RedisServer) {
    server.cli(&["DEL", "th:{control}nodes", "th:{control}members"]);
}

/// A secret was rotated away because somebody else knew it. A machine that had been off for a month came back with it, was `ok`, and
/// admitted a whole limit beside the others.
///
/// Woken by: a script that retires nothing, and by one that forgets what was retired.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_a_retired_secret_does_not_start() {
    let server = RedisServer::start();
    drop(started(&server, ("n", A, None)).await);
    drop(started(&server, ("n", B, Some(A))).await);
    assert_eq!(in_force(&server), ids([A, B]), "both are in force during the rotation");
    drop(started(&server, ("n", A, None)).await);
    forget_nodes(&server);
    let node = started(&server, ("n", B, None)).await;
    assert_eq!(in_force(&server), ids([B]));
    let error = refused(&server, ("old", A, None)).await;
    assert!(matches!(error, RedisOpenError::RetiredSecret { .. }), "{error}");
    let said = error.to_string();
    assert!(said.starts_with(&format!("the secret {} was retired on 20", id(A))), "{said}");
    assert!(said.contains(&format!("UTC by a node with {}: set THRESHOLD_SECRET to the present one", id(B))), "{said}");
    assert_eq!(node.node_problems(), [""; 0]);
    let unknown = refused(&server, ("other", 12, None)).await;
    assert!(matches!(unknown, RedisOpenError::OtherSecret { .. }), "{unknown}");
}

/// A node was cut off while the secret was rotated and retired. It reconnected and counted on under the old one.
///
/// Woken by: a check at the start alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_secret_was_retired_meanwhile_is_refused_when_it_reconnects() {
    let server = RedisServer::start();
    let cut_off = started(&server, ("cut off", A, None)).await;
    let rotating = started(&server, ("n", B, Some(A))).await;
    // As if its heartbeats did not arrive.
    let begun = std::time::Instant::now();
    while open(&server.url(), ("n", B, None)).await.is_err() {
        forget_nodes(&server);
        assert!(begun.elapsed() < Duration::from_secs(20), "the node is never forgotten");
    }
    server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    until("it is refused", || cut_off.present_problem().is_some_and(|said| said.contains("was retired on"))).await;
    until("the other goes on", || rotating.is_connected()).await;
    until("the leftover is named", || rotating.retired_secret().is_some()).await;
    let said = rotating.retired_secret().unwrap();
    assert!(said.contains(&format!("the old secret {} was retired on 20", id(A))), "{said}");
    assert!(said.ends_with(&format!("UTC by a node with {}: THRESHOLD_SECRET_OLD can go", id(B))), "{said}");
}

/// Somebody started the first node without the old secret while two others had only that one. Both would have been cut off.
///
/// Woken by: a script that does not look at the nodes, and by one whose rotation is ended by any node that has one secret.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_ends_a_rotation_too_early_is_refused() {
    let server = RedisServer::start();
    let late = started(&server, ("late", A, None)).await;
    let first = started(&server, ("first", B, Some(A))).await;
    let error = refused(&server, ("second", B, None)).await;
    assert!(matches!(error, RedisOpenError::MixedSecrets { .. }), "{error}");
    let said = error.to_string();
    assert!(
        said.starts_with(&format!("node late had only the old secret {} in the last 10 seconds: restart it", id(A))),
        "{said}"
    );
    let advice = format!("the new one ({}) as THRESHOLD_SECRET and the old one as THRESHOLD_SECRET_OLD", id(B));
    assert!(said.contains(&advice), "{said}");
    assert_eq!(in_force(&server), ids([A, B]));
    until("the nodes know of each other", || !first.node_problems().is_empty()).await;
    assert!(
        first.node_problems()[0].starts_with(&format!("node late has only the secret {}", id(A))),
        "{:?}",
        first.node_problems()
    );
    until("the other too", || !late.node_problems().is_empty()).await;
    assert!(late.node_problems()[0].contains("the rotation is not complete"), "{:?}", late.node_problems());
    // All were stopped, and the one with the settings from before is started first. It does not retire the new secret.
    drop((late, first));
    forget_nodes(&server);
    drop(started(&server, ("late", A, None)).await);
    assert_eq!(in_force(&server), ids([A, B]));
    forget_nodes(&server);
    let _late = started(&server, ("late", B, Some(A))).await;
    started(&server, ("second", B, None)).await;
    assert_eq!(in_force(&server), ids([B]));
}

/// A secret was stolen. The nodes were restarted with both secrets and at once with the new one alone, as the page says, and were refused
/// for ten seconds because of themselves: `node … still has only the old secret`.
#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_node_takes_the_place_of_its_predecessor_in_a_rotation() {
    let server = RedisServer::start();
    let old = [started(&server, ("one", A, None)).await, started(&server, ("two", A, None)).await];
    drop(old);
    let one = started(&server, ("one", B, Some(A))).await;
    let error = refused(&server, ("one", B, None)).await;
    assert!(error.to_string().starts_with("node two had only the old secret"), "{error}");
    drop((one, started(&server, ("two", B, Some(A))).await));
    let _one = started(&server, ("one", B, None)).await;
    assert_eq!(in_force(&server), ids([B]));
    assert!(matches!(refused(&server, ("one", A, None)).await, RedisOpenError::RetiredSecret { .. }));
}

/// At night the new secret turned out to be wrong for some clients, and the old one was retired already.
///
/// Woken by: a script that refuses a retired secret whatever the old one is.
#[tokio::test(flavor = "multi_thread")]
async fn going_back_is_a_rotation_to_the_retired_secret() {
    let server = RedisServer::start();
    drop(started(&server, ("n", A, None)).await);
    drop(started(&server, ("n", B, Some(A))).await);
    forget_nodes(&server);
    let other = started(&server, ("other", B, None)).await;
    assert_eq!(in_force(&server), ids([B]));
    let back = started(&server, ("n", A, Some(B))).await;
    assert_eq!(in_force(&server), ids([A, B]));
    assert_eq!(
        back.node_problems(),
        [format!(
            "node other has only the secret {}, and this node {}: both admit the same requests. Restart all nodes with the same \
             THRESHOLD_SECRET, and the one before as THRESHOLD_SECRET_OLD",
            id(B),
            id(A)
        )]
    );
    // Restarted by a supervisor, with the settings of before.
    drop(other);
    let other = started(&server, ("other", B, None)).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(in_force(&server), ids([A, B]), "the rotation goes to A");
    drop((other, back));
    forget_nodes(&server);
    started(&server, ("n", A, None)).await;
    assert_eq!(in_force(&server), ids([A]));
    let error = refused(&server, ("other", B, None)).await;
    assert!(matches!(error, RedisOpenError::RetiredSecret { .. }), "{error}");
}

/// The store was written by a version that knew no retired secrets: a set of key ids, and nodes that say nothing of their secrets.
///
/// Woken by: a node without a text that counts as none.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_the_version_before_is_read() {
    let server = RedisServer::start();
    server.cli(&["SADD", "th:{control}secrets", &id(A), &id(B)]);
    let now = server.cli(&["TIME"]);
    let seconds: u64 = now.lines().next().unwrap().parse().unwrap();
    server.cli(&["ZADD", "th:{control}nodes", &format!("{seconds}000"), "00000000000000000000000000000001"]);
    drop(started(&server, ("n", B, None)).await);
    assert_eq!(in_force(&server), ids([A, B]), "a node of that version may have A");
    forget_nodes(&server);
    started(&server, ("n", B, None)).await;
    assert_eq!(in_force(&server), ids([B]));
}

/// Redis lost its data in the middle of a rotation, and the nodes with the old secret alone were cut off.
///
/// Woken by: a first node that records its present secret alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_emptied_during_a_rotation_takes_both_secrets() {
    let server = RedisServer::start();
    let _late = started(&server, ("late", A, None)).await;
    drop(started(&server, ("first", B, Some(A))).await);
    server.cli(&["DEL", "th:{control}secrets", "th:{control}rotations"]);
    let _first = started(&server, ("first", B, Some(A))).await;
    until("both are in force", || in_force(&server) == ids([A, B])).await;
}

/// The key ids are in one slot, whose primary alone answers. A node is refused also if its first connection is to another one.
///
/// Woken by: a check whose redirect is an error, and by a start that asks any primary.
#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_retired_on_a_cluster() {
    let cluster = Cluster::start();
    let url = cluster.url();
    drop(open(&url, ("late", A, None)).await.unwrap());
    drop(open(&url, ("n", B, Some(A))).await.unwrap());
    let early = open(&url, ("other", B, None)).await;
    assert!(matches!(early, Err(RedisOpenError::MixedSecrets { .. })), "{early:?}");
    let holder = cluster.node(cluster.holder("th:{control}secrets"));
    forget_nodes(holder);
    let node = open(&url, ("n", B, None)).await.unwrap();
    assert_eq!(in_force(holder), ids([B]));
    assert!(node.now().is_some_and(|now| now > Timestamp::EPOCH));
    let late = open(&url, ("other", A, None)).await;
    assert!(matches!(late, Err(RedisOpenError::RetiredSecret { .. })), "{late:?}");
}
