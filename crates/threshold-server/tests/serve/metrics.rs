//! Tests `/metrics` of a running server.

use serde_json::json;

use super::process::{Server, Start};

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
    let answer = client.send("GET", "/metrics", &[], "").unwrap();
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)));
    let text = answer.body;
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
    assert!(text.ends_with("# EOF\n"), "{text}");
    for number in 0..100 {
        client
            .post("/v1/check", &json!({"user": format!("u{number}"), "path": format!("/{number}")}).to_string())
            .unwrap();
    }
    let after = client.send("GET", "/metrics", &[], "").unwrap().body;
    assert_eq!(after.lines().count(), text.lines().count(), "{after}");
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
