//! Tests the server while the wall clock is changed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::process::{Scratch, Server, Start, compiled};

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
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
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
