//! The nodes of a store: who has a share of the limits, from the first heartbeat to the restart under a name.
//!
//! Every wait is for real heartbeats, which come each second and count for ten.

use std::time::{Duration, Instant};

use threshold_limiter::store::{Share, Store};
use threshold_redis::{RedisOptions, RedisStore};

use crate::process::{RedisServer, secret};

/// How long a heartbeat counts.
const LIFE: Duration = Duration::from_secs(10);
/// Without a remainder by 2 and 3.
const LIMIT: u64 = 1_003;

async fn named(server: &RedisServer, name: &str) -> RedisStore {
    let options = RedisOptions::new(server.url().parse().unwrap(), secret(9)).node(name);
    RedisStore::open(options).await.unwrap()
}

fn part_of(share: Share) -> u64 {
    LIMIT / share.nodes + u64::from(share.place < LIMIT % share.nodes)
}

/// Returns what all nodes together may admit without the store.
fn all_parts<'s>(nodes: impl IntoIterator<Item = &'s RedisStore>) -> u64 {
    nodes.into_iter().filter_map(Store::share).map(part_of).sum()
}

/// Waits until all nodes together have so many shares, for at most 30 seconds. All shares together are never more than the limit
/// meanwhile.
async fn until_shares(nodes: &[&RedisStore], count: usize) -> Duration {
    let begun = Instant::now();
    loop {
        assert!(all_parts(nodes.iter().copied()) <= LIMIT, "{:?}", nodes.map_shares());
        let shares = nodes.map_shares();
        if shares.iter().flatten().count() == count && all_parts(nodes.iter().copied()) == LIMIT {
            return begun.elapsed();
        }
        assert!(begun.elapsed() < 3 * LIFE, "never {count} shares: {shares:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

trait Shares {
    fn map_shares(&self) -> Vec<Option<Share>>;
}

impl Shares for [&RedisStore] {
    fn map_shares(&self) -> Vec<Option<Share>> {
        self.iter().map(|node| node.share()).collect()
    }
}

/// Three nodes that were started one after another on an emptied server took two whole limits: each was the first in an empty set.
///
/// Woken by: a share before `since` is a life ago.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_on_an_empty_store_have_no_share_until_all_of_them_are_known() {
    let server = RedisServer::start();
    let begun = Instant::now();
    let mut nodes = Vec::new();
    for name in ["a", "b", "c"] {
        nodes.push(named(&server, name).await);
        assert!(nodes.iter().all(|node| node.share().is_none()));
        server.cli(&["FLUSHALL"]);
    }
    until_shares(&nodes.iter().collect::<Vec<_>>(), 3).await;
    assert!(begun.elapsed() >= LIFE, "{:?}", begun.elapsed());
}

/// After FLUSHALL a new node found nobody, and took the whole limit beside those that had it.
///
/// Woken by: as above, and by nodes that leave when they are missing in the set.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_starts_on_an_emptied_store_waits_for_the_others() {
    let server = RedisServer::start();
    let (a, b) = (named(&server, "a").await, named(&server, "b").await);
    until_shares(&[&a, &b], 2).await;
    server.cli(&["FLUSHALL"]);
    let c = named(&server, "c").await;
    assert_eq!(c.share(), None);
    assert_eq!([&a, &b].map_shares().iter().flatten().count(), 2, "those that were there keep their shares");
    let waited = until_shares(&[&a, &b, &c], 3).await;
    assert!(waited > LIFE / 2, "{waited:?}");
}

/// A node that was restarted had no share for ten seconds: the others' heartbeats had come since, but never that of its predecessor.
///
/// Woken by: names that are not sent, and by a predecessor that must send a heartbeat too.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_restarted_has_its_share_within_seconds() {
    let server = RedisServer::start();
    let (a, b) = (named(&server, "a").await, named(&server, "b").await);
    until_shares(&[&a, &b], 2).await;
    let place = b.share();
    drop(b);
    let b = named(&server, "b").await;
    assert_eq!(b.share(), None, "its predecessor may be alive");
    let waited = until_shares(&[&a, &b], 2).await;
    assert!(waited < LIFE * 7 / 10, "{waited:?}");
    assert_eq!(b.share(), place);
    assert_eq!(b.node_problems(), [""; 0]);
}

/// A copied configuration gave two machines one name. Both had the same share, and nothing said so.
///
/// Woken by: `has_rival` that is never true, and `has_namesake` that is never shown.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_nodes_of_one_name_the_second_has_no_share_and_both_say_so() {
    let server = RedisServer::start();
    let (a, first) = (named(&server, "a").await, named(&server, "same").await);
    until_shares(&[&a, &first], 2).await;
    let second = named(&server, "same").await;
    let begun = Instant::now();
    while begun.elapsed() < LIFE / 2 {
        assert_eq!(second.share(), None);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(all_parts([&a, &first]), LIMIT);
    let said = "two nodes are named same, and one of them has no share while the store is away: give each a name of its own (--node)";
    assert_eq!(second.node_problems(), [said]);
    assert_eq!(first.node_problems(), [said]);
    assert_eq!(a.node_problems(), [""; 0]);
    drop(first);
    until_shares(&[&a, &second], 2).await;
    assert_eq!(second.node_problems(), [""; 0]);
}
