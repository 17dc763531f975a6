//! Errors of the shared store have names: in `/metrics`, in `/readyz` and in `threshold doctor`.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;

use super::process::{PATIENCE, POLICY, Scratch, Server};
use super::redis::Redis;

fn check(node: &Server, user: &str) {
    let body = json!({"user": user, "ip": "192.0.2.1"}).to_string();
    assert_eq!(node.connect().post("/v1/check", &body).unwrap().status, 200);
}

fn body(node: &Server, path: &str) -> String {
    node.connect().send("GET", path, &[], "").unwrap().body
}

fn doctor(node: &Server) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
    String::from_utf8(command.args(["doctor", "--server", &node.place]).output().unwrap().stdout).unwrap()
}

fn signal(redis: &Redis, name: &str) {
    let pid = redis.child.id().to_string();
    assert!(Command::new("kill").args([format!("-{name}"), pid]).status().unwrap().success());
}

/// Returns the key of a balance.
fn balance(redis: &Redis) -> String {
    redis.cli(&["KEYS", "th:*b:*"]).lines().next().unwrap().to_owned()
}

/// Sends requests until an error of this kind is counted. Then it must be everywhere.
fn shows(node: &Server, kind: &str, text: &str) {
    let begun = Instant::now();
    let nothing = format!("threshold_store_call_errors_total{{kind=\"{kind}\"}} 0");
    let count = |metrics: &str| metrics.contains("threshold_store_call_errors_total") && !metrics.contains(&nothing);
    loop {
        check(node, "ada");
        let (metrics, ready) = (body(node, "/metrics"), body(node, "/readyz"));
        if count(&metrics) && ready.contains("\"degraded\"") && ready.contains(kind) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{kind}\n{metrics}\n{ready}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let told = doctor(node);
    let line = told.lines().find(|line| line.contains("  store  ") && line.contains(&format!(" failed with {kind}, ")));
    assert!(line.is_some_and(|line| line.contains(text)), "{kind}: {text}\n{told}");
    // Most are logged already, and the others with the next look at the store.
    node.wait_for_log(&format!("kind=\"{kind}\""));
}

/// A list under the key of a balance: every check of that user was decided without the store, while `/readyz` said ok and the doctor
/// had no finding. Nor was there a name for what Redis refuses otherwise.
#[test]
fn each_error_of_the_store_shows_by_its_name() {
    let (mut redis, policy) = (Redis::start(), Scratch::file("policy.toml", POLICY));
    let node = redis.node(&policy);
    // Requests are answered with 200 as long as they are counted, here or in the store.
    node.wait_for_share();
    let metrics = body(&node, "/metrics");
    for kind in ["wrong_type", "unreadable_record", "out_of_memory", "read_only", "no_permission", "connection"] {
        assert!(metrics.contains(&format!("threshold_store_call_errors_total{{kind=\"{kind}\"}} 0")), "{metrics}");
    }
    check(&node, "ada");
    let key = &*balance(&redis);
    redis.cli(&["DEL", key]);
    redis.cli(&["LPUSH", key, "theirs"]);
    shows(&node, "wrong_type", "WRONGTYPE");
    redis.cli(&["DEL", key]);
    redis.cli(&["SET", key, "theirs"]);
    shows(&node, "unreadable_record", key);
    redis.cli(&["DEL", key]);
    redis.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    shows(&node, "out_of_memory", "OOM");
    redis.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    redis.cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    shows(&node, "not_enough_replicas", "NOREPLICAS");
    redis.cli(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    redis.cli(&["ACL", "SETUSER", "default", "-@scripting"]);
    shows(&node, "no_permission", "the ACL of the user does not suffice");
    redis.cli(&["ACL", "SETUSER", "default", "+@scripting"]);
    redis.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    shows(&node, "read_only", "the server is a replica");
    redis.cli(&["REPLICAOF", "NO", "ONE"]);
    signal(&redis, "STOP");
    shows(&node, "timeout", "no answer");
    signal(&redis, "CONT");
    redis.child.kill().unwrap();
    redis.child.wait().unwrap();
    shows(&node, "connection", "");
}

/// Woken by an unhealthy answer for an error that is over.
#[test]
fn an_error_that_is_over_is_not_shown_as_present() {
    let (redis, policy) = (Redis::start(), Scratch::file("policy.toml", POLICY));
    let node = redis.node(&policy);
    node.wait_for_share();
    check(&node, "ada");
    let key = &*balance(&redis);
    redis.cli(&["DEL", key]);
    redis.cli(&["LPUSH", key, "theirs"]);
    shows(&node, "wrong_type", "WRONGTYPE");
    redis.cli(&["DEL", key]);
    node.wait_for_log("store available again");
    assert_eq!(body(&node, "/readyz"), "{\"status\":\"ok\"}");
    let told = doctor(&node);
    assert!(told.contains("  warning  store     ") && told.contains(" failed with wrong_type"), "{told}");
}
