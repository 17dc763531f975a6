//! Tests the server while the wall clock is changed.

use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use threshold_core::Timestamp;

use super::process::{PATIENCE, Scratch, Server, Start, compiled};
use super::redis::SECRET;
use super::redis_process::RedisServer;

const POLICY: &str = r#"
[ladders.l]
decay = "24h"
rungs = ["ban 24h"]

[[rule]]
name = "posts"
per = ["user"]
limit = "5/day"
algorithm = "fixed-window"
anchor = "first"
ladder = "l"
strike = "request"
"#;

fn check(server: &Server, user: &str) -> Value {
    server.connect().post("/v1/check", &json!({"user": user}).to_string()).unwrap().json()
}

/// A clock that jumps two days ahead for a second once ended a ban of 24 hours, reset a window of a day, and the server stayed
/// ahead for weeks.
#[test]
fn a_wall_clock_that_jumps_ahead_for_a_moment_has_no_effect() {
    let (folder, policy) = (Scratch::folder(), Scratch::file("policy.toml", POLICY));
    let (library, offset) = (compiled("clock/realtime.c", folder.path()), folder.path().join("offset"));
    let set = |seconds: i64| {
        let next = folder.path().join("offset.next");
        std::fs::write(&next, seconds.to_string()).unwrap();
        std::fs::rename(next, &offset).unwrap();
    };
    // Checks that the preloaded library works: the clock of this server is two days off from its start.
    set(-2 * 86_400);
    let variables = [("LD_PRELOAD", library.as_str()), ("THRESHOLD_CLOCK", offset.to_str().unwrap())];
    let server = Start { policy: Some(policy.path()), variables: &variables, ..Start::default() }.server();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let told = check(&server, "ada");
    assert!(told["resetAt"].as_u64().unwrap() < now - 80_000, "{told}");
    for _ in 0..4 {
        assert_eq!(check(&server, "ada")["allowed"], true);
    }
    for _ in 0..6 {
        check(&server, "eve");
    }
    assert_eq!(check(&server, "eve")["banned"], true);
    let asked = |length: Duration| {
        let begun = Instant::now();
        while begun.elapsed() < length {
            assert_eq!(check(&server, "eve")["banned"], true);
        }
    };
    // Long enough for the server to compare its clocks several times.
    set(0);
    asked(Duration::from_millis(700));
    set(-2 * 86_400);
    asked(Duration::from_millis(300));
    // Later requests are not decided at the later time, and the window of earlier ones has not ended.
    let told = check(&server, "ada");
    assert_eq!(told["allowed"], false, "{told}");
    assert!(told["resetAt"].as_u64().unwrap() < now - 80_000, "{told}");
}

/// Woken by comparing the clock of the store with itself (`app.desk.now()`), and by leaving `clock` out of what is said of the store.
#[test]
fn the_doctor_compares_the_clock_of_redis_with_that_of_the_machine() {
    let redis = RedisServer::start_with_clock();
    let (url, variables) = (redis.url(), [("THRESHOLD_SECRET", SECRET)]);
    let server = Start { args: &["--store", &url], variables: &variables, ..Start::default() }.server();
    let examine = || {
        let output = Command::new(env!("CARGO_BIN_EXE_threshold")).args(["doctor", "--server", &server.place]).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    let text = examine();
    let line = text.lines().find(|line| line.contains("its clock and the clock of this machine are")).unwrap_or(&text);
    assert!(line.starts_with("  error    store     ") && line.contains("s apart. Synchronise both by NTP"), "{text}");
    assert!(text.contains("  ok       clock\n"), "that of the server is right: {text}");
    let begun = Instant::now();
    loop {
        // It stands still, so a busy machine may need another try.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        redis.set_time(Timestamp::from_micros(now.as_micros().try_into().unwrap()));
        let text = examine();
        if !text.contains("its clock and the clock") {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{text}");
    }
}
