//! What a server has admitted without its shared store is recorded when it ends, or the log says how much was lost.

use std::process::Command;

use serde_json::{Value, json};

use super::process::{Scratch, Server};
use super::redis::Redis;

const OPEN: &str =
    "[[rule]]\nname = 'open'\nper = ['user']\nlimit = '9/day'\nalgorithm = 'fixed-window'\non_store_error = 'open'\n";

fn check(node: &Server) -> Value {
    node.connect().post("/v1/check", &json!({"user": "ada"}).to_string()).unwrap().json()
}

/// Sends requests until so many of them were admitted without the store.
fn admitted(node: &Server, most: usize) {
    let mut admitted = 0;
    while admitted < most {
        admitted += usize::from(check(node)["degraded"] == true);
    }
}

fn signal(redis: &Redis, name: &str) {
    let pid = redis.child.id().to_string();
    assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
}

fn metric(node: &Server, name: &str) -> u64 {
    let text = node.connect().send("GET", "/metrics", &[], "").unwrap().body;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name}: {text}")).parse().unwrap()
}

/// A node was stopped while Redis was away. It gave up at once, and what it had admitted was lost without a line in the log.
#[test]
fn a_node_that_ends_without_its_store_says_how_many_charges_are_lost() {
    let (mut redis, policy) = (Redis::start(), Scratch::file("policy.toml", OPEN));
    let node = redis.node(&policy);
    redis.kill();
    node.wait_for_log("store unavailable");
    admitted(&node, 3);
    node.signal("TERM");
    let (status, log) = node.wait();
    assert!(status.success());
    let line = log.lines().find(|line| line.contains("admitted without the store not recorded"));
    assert!(line.is_some_and(|line| line.contains(" lost=3")), "{log}");
}

/// Redis had just been started again when a node was stopped, and the node had no connection yet.
#[test]
fn a_node_that_ends_waits_a_moment_for_its_store() {
    let (mut redis, policy) = (Redis::start(), Scratch::file("policy.toml", OPEN));
    let node = redis.node(&policy);
    redis.kill();
    node.wait_for_log("store unavailable");
    admitted(&node, 3);
    redis.restart();
    node.signal("TERM");
    let (_, log) = node.wait();
    assert!(!log.contains("not recorded"), "{log}");
    let balances = redis.cli(&["KEYS", "th:*b:*"]);
    assert_eq!(balances.lines().count(), 1, "{balances}");
    assert_eq!(check(&redis.node(&policy))["remaining"], 5);
}

/// A refund was answered `nothing was refunded: the store did not answer in time`, and was made when Redis went on.
#[test]
fn what_was_not_answered_in_time_may_have_been_done() {
    let (redis, policy) = (Redis::start(), Scratch::file("policy.toml", OPEN));
    let node = redis.node(&policy);
    let receipt = check(&node)["receipt"].clone();
    let reserve = json!({"user": "ada", "ttlSec": 600}).to_string();
    let reserved = node.connect().post("/v1/reserve", &reserve).unwrap().json()["reservation"].clone();
    for (path, body) in [
        ("/v1/refund", json!({"receipt": receipt})),
        ("/v1/release", json!({"reservation": reserved})),
        ("/v1/pause", json!({"layer": "user", "key": "ada", "seconds": 9})),
        ("/v1/bans", json!({"layer": "user", "key": "eve", "reason": "x"})),
    ] {
        signal(&redis, "-STOP");
        let answer = node.connect().post(path, &body.to_string()).unwrap();
        let message = answer.json()["message"].as_str().unwrap_or_default().to_owned();
        assert_eq!(
            (answer.status, message.contains("may have been made all the same")),
            (503, true),
            "{path}: {message}"
        );
        signal(&redis, "-CONT");
        while check(&node)["degraded"] == true {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// Redis stood still for some seconds. Charges were lost, and the metrics said that none were.
#[test]
fn charges_that_a_store_has_not_answered_are_counted() {
    let (redis, policy) = (Redis::start(), Scratch::file("policy.toml", OPEN));
    let node = redis.node(&policy);
    signal(&redis, "-STOP");
    admitted(&node, 6);
    // The connection is given up after two seconds.
    node.wait_for_log("store unavailable");
    while metric(&node, "threshold_store_call_errors_total{kind=\"connection\"}") == 0 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    signal(&redis, "-CONT");
    node.wait_for_log("store available again");
    let begun = std::time::Instant::now();
    loop {
        let (lost, unanswered) =
            (metric(&node, "threshold_charges_lost_total"), metric(&node, "threshold_charges_unanswered_total"));
        let peeked = node.connect().post("/v1/peek", &json!({"user": "ada"}).to_string()).unwrap().json();
        let recorded = 8 - peeked["remaining"].as_u64().unwrap();
        // What was not answered may have been recorded.
        if peeked["degraded"] == false && recorded + unanswered >= 6 {
            assert_eq!(lost, 0);
            assert!(unanswered > 0);
            break;
        }
        assert!(
            begun.elapsed() < super::process::PATIENCE,
            "{lost} lost, {unanswered} unanswered, {recorded} recorded"
        );
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
