//! Tests that the server continues when standard error is a full pipe.

use std::io::{BufRead as _, BufReader};
use std::time::Instant;

use serde_json::{Value, json};

use super::process::{PATIENCE, Scratch, Server, Start};

/// A policy that logs every denial.
const EACH: &str = r#"
[[rule]]
name = "each"
per = ["user"]
limit = "1/h"
log = "each"
"#;

/// More denials than the lines of the pipe and of the queue in front of it.
const DENIALS: usize = 8_000;

fn deny(server: &Server) {
    let client = &mut server.connect();
    let list = json!(vec![json!({"user": "u1"}); 1_000]).to_string();
    let mut denied = 0;
    while denied < DENIALS {
        let answer = client.post("/v1/check", &list).unwrap();
        denied += answer.json().as_array().unwrap().iter().filter(|told| told["allowed"] == false).count();
    }
}

/// After 305 denials, the server once stopped answering and ignored SIGTERM.
///
/// Broken once by: writing to `io::stderr` in place of the queue.
#[test]
fn a_log_that_is_not_read_blocks_no_request() {
    let policy = Scratch::file("policy.toml", EACH);
    let (mut server, _unread) = Start { policy: Some(policy.path()), ..Start::default() }.unread();
    deny(&server);
    assert_eq!(server.connect().send("GET", "/healthz", &[], "").unwrap().status, 200);
    assert_eq!(server.connect().post("/v1/check", r#"{"user": "u2"}"#).unwrap().json()["allowed"], true);
    server.signal("TERM");
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = server.ended() {
            break status;
        }
        assert!(begun.elapsed() < PATIENCE, "it does not end");
        std::thread::yield_now();
    };
    assert!(status.success(), "{status}");
}

/// Lines that did not fit are counted, and their number is logged once the pipe is read again.
///
/// Broken once by: not counting in `Queue::push`.
#[test]
fn dropped_lines_are_counted_and_reported() {
    let policy = Scratch::file("policy.toml", EACH);
    let (server, unread) = Start { policy: Some(policy.path()), args: &["--log", "json"], ..Start::default() }.unread();
    deny(&server);
    let reader = std::thread::spawn(move || BufReader::new(unread).lines().map(Result::unwrap).collect::<Vec<_>>());
    server.signal("TERM");
    assert!(server.wait().0.success());
    let lines: Vec<Value> = reader.join().unwrap().iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let denials = lines.iter().filter(|line| line["message"] == "denied").count();
    let dropped: u64 = lines.iter().filter_map(|line| line["dropped"].as_u64()).sum();
    assert!(dropped > 0, "everything was written: {denials} lines");
    assert!(lines.iter().any(|line| line["message"].as_str().unwrap().starts_with("log lines dropped")));
    assert!(denials + usize::try_from(dropped).unwrap() >= DENIALS, "{denials} written, {dropped} dropped");
}
