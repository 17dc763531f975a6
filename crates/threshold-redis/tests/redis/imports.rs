//! Imports of bans through several nodes: one after the other, in bounded pieces.

use std::collections::BTreeSet;
use std::sync::Arc;

use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, ListEntry};
use threshold_core::{Digest, DigestKey, Timestamp};
use threshold_limiter::{Limiter, Policy};
use threshold_redis::RedisStore;

use crate::process::RedisServer;

const KEY: DigestKey = DigestKey::new([7; 16]);

type Node = Limiter<RedisStore>;

async fn node(server: &RedisServer) -> Arc<Node> {
    let policy = Policy::parse("[[rule]]\nname = 'ip'\nper = ['ip']\nlimit = '100/min'", &|_| None).unwrap();
    let builder = Limiter::builder(policy).store(server.open().await).digest_key(KEY);
    Arc::new(builder.build().unwrap())
}

/// Replaces the bans of an origin, as the program does.
async fn import(node: &Node, origin: &str, users: &[String]) {
    let new: Vec<(Digest, Arc<Ban>)> = users.iter().map(|user| ban(origin, user)).collect();
    let ids: BTreeSet<Digest> = new.iter().map(|(id, _)| *id).collect();
    let replace = || {
        let before = node.bans().of_origin(origin);
        let known: BTreeSet<Digest> = before.iter().map(|(id, _)| *id).collect();
        let added = new.iter().filter(|(id, _)| !known.contains(id));
        let added = added.map(|(id, ban)| ControlChange::Ban { id: *id, ban: Some(Arc::clone(ban)) });
        let gone = known.iter().filter(|id| !ids.contains(id)).map(|id| ControlChange::Ban { id: *id, ban: None });
        added.chain(gone).collect()
    };
    node.change_control_all(replace).await.unwrap();
}

fn ban(origin: &str, user: &str) -> (Digest, Arc<Ban>) {
    let (whom, by) = (ListEntry::User(user.into()), Ban::by_origin(origin));
    let ban = Ban { whom, reason: "list".into(), by, from: Timestamp::EPOCH, until: Timestamp::MAX };
    (ban.id(KEY), Arc::new(ban))
}

fn users(of: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{of} {number}")).collect()
}

fn names(node: &Node) -> BTreeSet<String> {
    node.bans().all(Timestamp::from(node.now())).iter().map(|(_, ban)| ban.whom.key()).collect()
}

/// A feed was imported by a timer on two nodes, and afterwards the bans of both versions, or of none, were in force.
///
/// Fails if `control_add.lua` does not compare the last number, or lets a second import begin before the first one has ended.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_imports_of_one_list_one_wins_as_a_whole() {
    let server = RedisServer::start();
    let nodes = [node(&server).await, node(&server).await];
    for round in 0..4 {
        let lists = [users(&format!("a{round}"), 2_500), users(&format!("b{round}"), 2_500)];
        let single = ListEntry::User(format!("single {round}").into());
        let id = single.ban_id(KEY);
        let by_hand =
            Ban { whom: single, reason: "r".into(), by: "ops".into(), from: Timestamp::EPOCH, until: Timestamp::MAX };
        let change = ControlChange::Ban { id, ban: Some(Arc::new(by_hand)) };
        // A single ban does not wait for the imports, and none of them loses it.
        let (.., banned) = tokio::join!(
            import(&nodes[0], "feed", &lists[0]),
            import(&nodes[1], "feed", &lists[1]),
            nodes[0].change_control(change),
        );
        banned.unwrap();
        for node in &nodes {
            node.follow_control().await.unwrap();
            let mut found = names(node);
            assert!(found.remove(&format!("single {round}")), "{} bans", found.len());
            let whole = |list: &Vec<String>| found == list.iter().cloned().collect();
            assert!(lists.iter().any(whole), "{} bans, such as {:?}", found.len(), found.iter().next());
            assert_eq!(names(node), names(&nodes[0]), "both nodes have the same");
        }
        nodes[0].change_control(ControlChange::Ban { id, ban: None }).await.unwrap();
    }
    assert_eq!(server.cli(&["EXISTS", "th:{control}import"]).trim(), "0", "no import is under way");
}

/// 300,000 bans were one call, and Redis answered nobody for 4.5 seconds.
#[tokio::test(flavor = "multi_thread")]
async fn many_bans_are_written_in_pieces() {
    let server = RedisServer::start();
    let node = node(&server).await;
    import(&node, "feed", &users("warm", 1)).await;
    let calls = || {
        let stats = server.cli(&["INFO", "commandstats"]);
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap_or("calls=0,").to_owned();
        line.split_once("calls=").and_then(|(_, rest)| rest.split(',').next()?.parse::<u32>().ok()).unwrap()
    };
    let before = calls();
    import(&node, "feed", &users("u", 5_500)).await;
    assert!(calls() >= before + 6, "{} calls for 5,501 changes", calls() - before);
    assert_eq!(names(&node).len(), 5_500);
}
