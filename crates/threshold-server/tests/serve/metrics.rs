//! Tests `/metrics` of a running server.

use serde_json::json;

use super::process::{Scratch, Server, Start};

const POLICY: &str = r#"
    [ladders.l]
    rungs = ["warn", "deny"]
    [[rule]]
    name = "posts"
    per = ["user"]
    limit = "2/h"
    ladder = "l"
    strike = "request"
"#;

/// Of four requests of one user, two are allowed, one is warned and one is denied. More users add no series.
#[test]
fn decisions_are_counted_by_rule_and_verdict() {
    let (server, _policy) = Server::with(POLICY);
    let client = &mut server.connect();
    for _ in 0..4 {
        assert_eq!(client.post("/v1/check", &json!({"user": "u1"}).to_string()).unwrap().status, 200);
    }
    let text = client.send("GET", "/metrics", &[], "").unwrap().body;
    for line in [
        r#"threshold_decisions_total{layer="user",rule="posts",verdict="allow"} 2"#,
        r#"threshold_decisions_total{layer="user",rule="posts",verdict="warn"} 1"#,
        r#"threshold_decisions_total{layer="user",rule="posts",verdict="deny"} 1"#,
        r#"threshold_blocks_total{layer="user"} 1"#,
        "threshold_warnings_total 1",
        "threshold_refused_total 0",
    ] {
        assert!(text.lines().any(|own| own == line), "{line}\n{text}");
    }
    for number in 0..100 {
        client
            .post("/v1/check", &json!({"user": format!("u{number}"), "path": format!("/{number}")}).to_string())
            .unwrap();
    }
    let after = client.send("GET", "/metrics", &[], "").unwrap().body;
    assert_eq!(after.lines().count(), text.lines().count(), "{after}");
}

/// A scraper that does not ask for OpenMetrics may not read it: `info` is an unknown type to it.
///
/// Woken by either format for both.
#[test]
fn the_format_of_metrics_is_negotiated() {
    let server = Start::default().server();
    let client = &mut server.connect();
    let openmetrics =
        [("accept", "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1")];
    let answer = client.send("GET", "/metrics", &openmetrics, "").unwrap();
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)));
    assert!(
        answer.body.ends_with("# EOF\n") && answer.body.contains("# TYPE threshold_build info\n"),
        "{}",
        answer.body
    );
    for headers in [&[][..], &[("accept", "text/plain")]] {
        let answer = client.send("GET", "/metrics", headers, "").unwrap();
        let kind = "text/plain; version=0.0.4; charset=utf-8";
        assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)), "{headers:?}");
        assert!(answer.body.contains("# TYPE threshold_build_info gauge\n"), "{}", answer.body);
        assert!(!answer.body.contains("# EOF"), "{}", answer.body);
    }
}

#[test]
fn metrics_accept_any_token_of_the_server() {
    let variables = &[
        ("THRESHOLD_TOKEN", "a-caller-s-token-01"),
        ("THRESHOLD_ADMIN_TOKEN", "an-operator-s-token"),
        ("THRESHOLD_READ_TOKEN", "a-reader-s-token-01"),
    ];
    let server = Start { variables, ..Start::default() }.server();
    let client = &mut server.connect();
    let mut scrape = |token: &str| client.send("GET", "/metrics", &[("authorization", token)], "").unwrap().status;
    for (_, token) in variables {
        assert_eq!(scrape(&format!("Bearer {token}")), 200);
    }
    assert_eq!(scrape("Bearer another-token-0123"), 401);
    assert_eq!(client.send("GET", "/metrics", &[], "").unwrap().status, 401);
}

/// Returns the value of a series.
fn value(text: &str, series: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

/// Woken by leaving out `set_policy_loaded` at the start or on a reload, or `update` of the health in `metrics_text`.
#[test]
fn a_reload_changes_the_time_of_the_policy_and_a_failed_one_is_a_gauge() {
    const FAILED: &str = r#"threshold_reload_failed{file="policy"}"#;
    const LOADED: &str = "threshold_policy_loaded_timestamp_seconds";
    let policy = Scratch::file("policy.toml", POLICY);
    let server = Start { policy: Some(policy.path()), ..Start::default() }.server();
    let client = &mut server.connect();
    let mut scrape = || client.send("GET", "/metrics", &[], "").unwrap().body;
    let text = scrape();
    let begun = value(&text, LOADED).unwrap();
    assert!(begun > 1_700_000_000.0 && value(&text, FAILED) == Some(0.0), "{text}");
    for file in ["tenants", "keys", "certificate"] {
        assert_eq!(value(&text, &format!("threshold_reload_failed{{file=\"{file}\"}}")), Some(0.0));
    }
    assert!(!text.contains("threshold_certificate"), "there is none");
    policy.replace("[[rule]]");
    server.signal("HUP");
    server.wait_for_log("policy not reloaded");
    let text = scrape();
    assert_eq!((value(&text, FAILED), value(&text, LOADED)), (Some(1.0), Some(begun)));
    policy.replace(POLICY);
    server.signal("HUP");
    server.wait_for_log("policy reloaded");
    let text = scrape();
    assert_eq!(value(&text, FAILED), Some(0.0));
    assert!(value(&text, LOADED).unwrap() > begun, "{text}");
}

/// A limit can be tried before it is enforced: what it would deny is counted.
#[test]
fn what_an_observing_rule_would_deny_is_counted() {
    let tried = "[[rule]]\nname = 'posts'\nper = ['user']\nlimit = '2/h'\nmode = 'observe'";
    let (server, _policy) = Server::with(tried);
    let client = &mut server.connect();
    for _ in 0..5 {
        let answer = client.post("/v1/check", &json!({"user": "u1"}).to_string()).unwrap().json();
        assert_eq!(answer["allowed"], true);
    }
    let text = client.send("GET", "/metrics", &[], "").unwrap().body;
    assert_eq!(value(&text, r#"threshold_observed_total{layer="user",rule="posts"}"#), Some(3.0), "{text}");
}
