//! A store that has lost its last changes, or has records that cannot be read.

use std::sync::Arc;
use std::time::Duration;

use threshold_core::command::ReservationEnd;
use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, ListEntry};
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{Answer, Command, DigestKey, Outcome, Span, Timestamp, TraceId};
use threshold_limiter::store::Store as _;
use threshold_limiter::{Facts, Limiter, ManualClock, Policy};
use threshold_redis::RedisStore;

use crate::process::RedisServer;

const KEY: DigestKey = DigestKey::new([7; 16]);

async fn node(server: &RedisServer, policy: &str) -> Limiter<RedisStore, Arc<ManualClock>> {
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
    let policy = Policy::parse(policy, &|_| None).unwrap();
    Limiter::builder(policy).store(server.open().await).clock(clock).digest_key(KEY).build().unwrap()
}

fn ban(user: &str) -> ControlChange {
    let whom = ListEntry::User(user.into());
    let ban = Ban { whom, reason: "test".into(), by: "ops".into(), from: Timestamp::EPOCH, until: Timestamp::MAX };
    ControlChange::Ban { id: ban.id(KEY), ban: Some(Arc::new(ban)) }
}

/// Removes the last changes from the log, as a restart from an older copy does.
const FORGET: &str = "for _, member in ipairs(redis.call('ZRANGE', KEYS[2], -tonumber(ARGV[1]), -1)) do \
    redis.call('ZREM', KEYS[2], member) redis.call('HDEL', KEYS[3], member) redis.call('ZREM', KEYS[4], member) \
    redis.call('HINCRBY', KEYS[1], 'last', -1) end";

/// Redis was restored from a copy without the last two bans. They were never written back, and the next two bans were acknowledged
/// and in force nowhere: the log gave them numbers that the nodes had already read.
#[tokio::test(flavor = "multi_thread")]
async fn bans_that_the_log_has_lost_are_written_back_and_new_ones_hold() {
    let server = RedisServer::start();
    let policy = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '100/min'";
    let nodes = [node(&server, policy).await, node(&server, policy).await];
    for user in ["a", "b", "c"] {
        nodes[0].change_control(ban(user)).await.unwrap();
    }
    nodes[1].follow_control().await.unwrap();
    let keys = ["meta", "order", "changes", "bans"].map(|part| format!("th:{{control}}{part}"));
    let mut forget = vec!["EVAL", FORGET, "4"];
    forget.extend(keys.iter().map(String::as_str));
    forget.push("2");
    server.cli(&forget);
    assert_eq!(server.cli(&["ZCARD", "th:{control}bans"]).trim(), "1");
    // Before any node has noticed.
    nodes[0].change_control(ban("d")).await.unwrap();
    nodes[1].follow_control().await.unwrap();
    nodes[1].change_control(ban("e")).await.unwrap();
    for node in nodes.iter().chain(&nodes) {
        node.follow_control().await.unwrap();
    }
    for (number, node) in nodes.iter().enumerate() {
        for user in ["a", "b", "c", "d", "e"] {
            let facts = Facts { user: Some(user), ..Facts::default() };
            assert!(!node.check_async(&facts).await.unwrap().allowed(), "{user} on {number}");
        }
    }
    assert_eq!(server.cli(&["ZCARD", "th:{control}bans"]).trim(), "5", "all of them are in the log");
}

/// Redis came back without the last 80 bans. Before a node looked, others were set and one user was banned and pardoned again and
/// again, so that the log was longer than before and had nothing under the numbers that the node remembered. It missed the new bans,
/// and the lost ones were in force on it alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_has_lost_many_changes_and_was_written_since_is_read_again() {
    let server = RedisServer::start();
    let policy = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '100/min'";
    let (first, late) = (node(&server, policy).await, node(&server, policy).await);
    // There is no log yet. The one that the first change begins is not taken for a loss.
    late.follow_control().await.unwrap();
    let old: Vec<String> = (0..100).map(|user| format!("old {user}")).collect();
    let bans = || old.iter().map(|user| ban(user)).collect();
    first.change_control_all(bans).await.unwrap();
    late.follow_control().await.unwrap();
    assert_eq!(late.control_losses(), 0);
    drop(first);
    let keys = ["meta", "order", "changes", "bans"].map(|part| format!("th:{{control}}{part}"));
    let mut forget = vec!["EVAL", FORGET, "4"];
    forget.extend(keys.iter().map(String::as_str));
    forget.push("80");
    server.cli(&forget);
    let next = node(&server, policy).await;
    next.follow_control().await.unwrap();
    next.change_control(ban("new")).await.unwrap();
    for _ in 0..50 {
        next.change_control(ban("often")).await.unwrap();
        let id = match ban("often") {
            ControlChange::Ban { id, .. } => Some(id),
            ControlChange::Setting { .. } => None,
        };
        let id = id.unwrap();
        next.change_control(ControlChange::Ban { id, ban: None }).await.unwrap();
    }
    late.follow_control().await.unwrap();
    late.follow_control().await.unwrap();
    assert_eq!(late.control_losses(), 1, "a loss is counted once");
    next.follow_control().await.unwrap();
    for node in [&late, &next] {
        for user in old.iter().map(String::as_str).chain(["new"]) {
            let facts = Facts { user: Some(user), ..Facts::default() };
            assert!(!node.check_async(&facts).await.unwrap().allowed(), "{user}");
        }
    }
    assert_eq!(server.cli(&["ZCARD", "th:{control}bans"]).trim(), "101", "all of them are in the log");
}

/// One reservation had a record that could not be read, and no other one was released any more.
#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_reservation_keeps_no_other_one() {
    let server = RedisServer::start_with_clock();
    let start = Timestamp::from_secs(1_767_225_600);
    server.set_time(start);
    let node = node(&server, "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '10/day'").await;
    let facts = |user| Facts { user: Some(user), cost: Some(6), ..Facts::default() };
    let ttl = Duration::from_secs(1);
    node.reserve_async(&facts("ada"), ttl, OnExpire::Release).await.unwrap();
    let record = server.cli(&["KEYS", "th:*v:*"]);
    assert_eq!(server.cli(&["SET", record.trim(), "junk", "KEEPTTL"]), "OK\n");
    for user in ["bob", "eve"] {
        node.reserve_async(&facts(user), ttl, OnExpire::Release).await.unwrap();
    }
    server.set_time(start.plus(Span::from_secs(5)));
    assert!(node.store().release_expired().await.is_err());
    for user in ["bob", "eve"] {
        assert!(node.check_async(&facts(user)).await.unwrap().allowed(), "{user}");
    }
    assert!(!node.check_async(&facts("ada")).await.unwrap().allowed());
}

/// A released reservation had given its charges back. When its record had expired, the receipt was refunded too, and took the place of
/// another request's charge.
#[tokio::test(flavor = "multi_thread")]
async fn the_receipt_of_an_ended_reservation_is_not_refunded_after_its_expiry() {
    let start = Timestamp::from_secs(1_767_225_600);
    let rule = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '9/day'\nalgorithm = 'fixed-window'";
    let policy = Policy::parse(rule, &|_| None).unwrap();
    for end in
        [ReservationEnd::Release, ReservationEnd::Commit(ActualCost { cost: Some(1), ..ActualCost::default() }.owned())]
    {
        let server = RedisServer::start_with_clock();
        server.set_time(start);
        let store = server.open().await;
        let execute = async |command| store.execute(command, Timestamp::EPOCH).await.unwrap();
        let mut plan = policy.plan(&Facts { user: Some("ada"), cost: Some(4), ..Facts::default() }).unwrap();
        plan.identify(|| TraceId::from_u128(7));
        let (mut outcome, terms) = (Outcome::default(), plan.hold_terms(Span::MINUTE, OnExpire::Charge));
        store.reserve(&plan, &terms, Timestamp::EPOCH, &mut outcome).await.unwrap();
        let receipt = Box::new(plan.holding(&outcome));
        execute(match end {
            ReservationEnd::Commit(cost) => Command::Commit { id: receipt.id(), cost },
            _ => Command::Release { id: receipt.id() },
        })
        .await;
        server.set_time(start.plus(Span::from_secs(120)));
        assert_eq!(
            server.cli(&["EXISTS", server.cli(&["KEYS", "th:*v:*"]).trim()]).trim(),
            "0",
            "its record has expired"
        );
        assert_eq!(execute(Command::Refund(receipt)).await, Answer::Refunded { first: false });
    }
}
