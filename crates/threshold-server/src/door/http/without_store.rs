//! Tests the answers of the API while the store does not answer.

use std::sync::Arc;

use serde_json::{Value, json};
use threshold_core::{Policy, Timestamp};
use threshold_limiter::ManualClock;
use threshold_limiter::store::AnyStore;

use crate::desk::Desk;
use crate::door::test_server::TestServer;
use crate::door::test_server::dead_store::DeadStore;

/// Starts a server whose rule has this mode.
fn server(mode: &str) -> TestServer {
    let rule = "[[rule]]\nname = 'r'\nper = ['user']\nlimit = '1/h'\n";
    let policy = Policy::parse(&format!("{rule}on_store_error = '{mode}'\n[login]\n"), &|_| None).unwrap();
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
    TestServer::at(Desk::with_store(policy, AnyStore::other(DeadStore), clock))
}

/// A generated client had no case for 503 on these calls, and crashed in an outage of Redis.
#[test]
fn every_call_that_needs_the_store_describes_its_503() {
    let mut server = server("closed");
    let description = server.client().send("GET", "/openapi.json", &[], "").unwrap().json();
    let reservation = "0123456789abcdef0123456789abcdef";
    let calls = [
        ("/v1/check", json!({"user": "u"})),
        ("/v1/peek", json!({"user": "u"})),
        ("/v1/reserve", json!({"user": "u"})),
        ("/v1/limit", json!({"key": "k", "limit": 5, "windowSec": 60})),
        ("/v1/commit", json!({"reservation": reservation})),
        ("/v1/release", json!({"reservation": reservation})),
        ("/v1/pause", json!({"layer": "user", "key": "u", "seconds": 60})),
        ("/v1/login/attempt", json!({"account": "u", "ip": "203.0.113.7"})),
    ];
    for (path, body) in calls {
        let answer = server.client().send("POST", path, &[], &body.to_string()).unwrap();
        assert_eq!(answer.status, 503, "{path}: {}", answer.json());
        assert_eq!(answer.header("retry-after"), Some("1"), "{path}");
        assert!(description["paths"][path]["post"]["responses"]["503"].is_object(), "{path}");
    }
}

/// A program committed what it had not reserved: in an outage a reserve was allowed without a reservation, and nothing in the
/// answer was expected to tell. The answer is marked, and has no field `reservation` that could be sent on as null.
#[test]
fn a_reserve_that_is_allowed_without_the_store_is_marked_and_has_nothing_to_commit() {
    for (mode, statuses) in [("open", [200, 200]), ("local", [200, 200]), ("closed", [503, 503])] {
        let mut server = server(mode);
        for (nth, status) in statuses.into_iter().enumerate() {
            let answer = server.client().send("POST", "/v1/reserve", &[], r#"{"user": "u"}"#).unwrap();
            let body = answer.json();
            assert_eq!(answer.status, status, "{mode}: {body}");
            // The local limit is 1, so the second request is denied.
            let is_allowed = mode == "open" || mode == "local" && nth == 0;
            assert_eq!(body["allowed"], Value::from(is_allowed), "{mode}: {body}");
            assert_eq!(
                (&body["degraded"], &body["degradedReason"]),
                (&json!(true), &json!("store_error")),
                "{mode}: {body}"
            );
            assert_eq!(body.get("reservation"), None, "{mode}: {body}");
        }
    }
}
