//! Tests that observers are called for every decision, whatever the verb and the door.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use threshold_core::{Timestamp, TraceId};
use threshold_limiter::{ObservedDecision, Observer};

use super::test_server::{TestServer, client::Answer};

const POLICY: &str = r#"
    [identity]
    trusted_proxies = ["127.0.0.1/32"]
    user = "header:x-user"
    [[rule]]
    name = "posts"
    per = ["user"]
    limit = "2/h"
    algorithm = "fixed-window"
"#;

/// The user, the verdict and the trace id of a decision.
type Heard = (String, &'static str, String);

#[derive(Default)]
struct RecordingObserver(Mutex<Vec<Heard>>);

impl Observer for RecordingObserver {
    fn decided(&self, &ObservedDecision { facts, decision, policy, .. }: &ObservedDecision<'_>) {
        assert_eq!(decision.generation, policy.generation());
        assert_ne!(decision.trace, TraceId::default());
        let user = facts.user.unwrap_or_default().to_owned();
        self.0.lock().unwrap().push((user, decision.verdict.name(), decision.trace.to_string()));
    }
}

struct ObservedServer {
    server: TestServer,
    observer: Arc<RecordingObserver>,
}

impl ObservedServer {
    fn new() -> Self {
        let observer = Arc::new(RecordingObserver::default());
        let mut server = TestServer::observed_by(Arc::clone(&observer) as _);
        server.clock.set(Timestamp::from_secs(1_767_225_600));
        server.load(POLICY, &BTreeMap::new(), true).unwrap();
        Self { server, observer }
    }

    /// Posts a body, and checks that the observer saw the expected verdicts, with the trace ids of the answer.
    #[track_caller]
    fn post(&mut self, path: &str, body: &str, expect: &[&'static str]) -> Value {
        let answer = self.server.client().post(path, body).unwrap();
        let json = answer.json();
        let decisions = json.as_array().cloned().unwrap_or_else(|| vec![json.clone()]);
        let answered = |decision: &Value| (decision["verdict"].clone(), decision["traceId"].clone());
        let observed: Vec<_> =
            self.observed().into_iter().map(|(_, verdict, id)| (Value::from(verdict), Value::from(id))).collect();
        assert_eq!(observed.iter().map(|(verdict, _)| verdict).collect::<Vec<_>>(), expect, "{path} {body}");
        if !expect.is_empty() {
            assert_eq!(observed, decisions.iter().map(answered).collect::<Vec<_>>(), "{path} {body}");
        }
        json
    }

    fn auth(&mut self, user: &str) -> Answer {
        let fields = [("x-original-method", "GET"), ("x-original-uri", "/"), ("x-user", user)];
        self.server.client().send("GET", "/auth", &fields, "").unwrap()
    }

    fn observed(&self) -> Vec<Heard> {
        std::mem::take(&mut self.observer.0.lock().unwrap())
    }
}

/// Woken by: leaving out `self.tell` in `Limiter::decide`, in `wait_with_receipt`, or putting it into `explain_under`.
#[test]
fn an_observer_is_called_for_every_verb() {
    let mut server = ObservedServer::new();
    for path in ["/v1/peek", "/v1/check", "/v1/check?waitMs=1"] {
        server.post(path, r#"{"user": "a"}"#, &["allow"]);
    }
    for path in ["/v1/peek", "/v1/check", "/v1/check?waitMs=1", "/v1/reserve"] {
        server.post(path, r#"{"user": "a"}"#, &["deny"]);
    }
    server.post("/v1/record", r#"{"user": "a"}"#, &["allow"]);
    let list = r#"[{"user": "b"}, {"user": "b"}, {"user": "b"}]"#;
    server.post("/v1/check", list, &["allow", "allow", "deny"]);
    server.post("/v1/peek", list, &["deny", "deny", "deny"]);
    server.post("/v1/record", list, &["allow", "allow", "allow"]);
}

#[test]
fn an_observer_is_called_once_for_each_decision_and_for_nothing_else() {
    let mut server = ObservedServer::new();
    let reserved = server.post("/v1/reserve", r#"{"user": "c"}"#, &["allow"]);
    let end = format!(r#"{{"reservation": {}, "cost": 2}}"#, reserved["reservation"]);
    server.post("/v1/commit", &end, &[]);
    server.post("/v1/release", &end.replace(r#", "cost": 2"#, ""), &[]);
    // An explanation is not a decision.
    server.post("/v1/explain", r#"{"user": "c"}"#, &[]);
    // A repeated answer is not another decision.
    server.post("/v1/check", r#"{"user": "d", "requestId": "one"}"#, &["allow"]);
    server.post("/v1/check", r#"{"user": "d", "requestId": "one"}"#, &[]);
    // A list with an invalid request is not decided at all.
    server.post("/v1/check", r#"[{"user": "d"}, {"user": "d", "cost": 3}]"#, &[]);
}

#[test]
fn an_observer_is_called_for_decisions_of_forward_auth() {
    let mut server = ObservedServer::new();
    for (status, verdict) in [(200, "allow"), (200, "allow"), (429, "deny")] {
        let answer = server.auth("e");
        assert_eq!(answer.status, status);
        let observed = server.observed();
        let [(user, seen, id)] = observed.as_slice() else { panic!("{observed:?}") };
        assert_eq!((user.as_str(), *seen), ("e", verdict));
        if status == 429 {
            assert_eq!(answer.json()["traceId"], Value::from(id.as_str()));
        }
    }
}
