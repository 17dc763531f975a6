//! Observers hear of every decision, whichever verb asks for it and through whichever door.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use threshold_core::{Decision, Facts, Policy, Timestamp};
use threshold_limiter::Observer;

use super::serving::{Serving, client::Answer};

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

/// Whose request, what became of it, and by which id.
type Heard = (String, &'static str, String);

#[derive(Default)]
struct Ear(Mutex<Vec<Heard>>);

impl Observer for Ear {
    fn decided(&self, facts: &Facts<'_>, decision: &Decision, policy: &Policy) {
        assert_eq!((decision.generation, decision.trace), (policy.generation(), facts.trace));
        let user = facts.user.unwrap_or_default().to_owned();
        self.0.lock().unwrap().push((user, decision.verdict.name(), decision.trace.to_string()));
    }
}

struct Listened {
    serving: Serving,
    ear: Arc<Ear>,
}

impl Listened {
    fn new() -> Self {
        let ear = Arc::new(Ear::default());
        let mut serving = Serving::observed_by(Arc::clone(&ear) as _);
        serving.clock.set(Timestamp::from_secs(1_767_225_600));
        serving.load(POLICY, &BTreeMap::new(), true).unwrap();
        Self { serving, ear }
    }

    /// Posts a body, and holds what the observer heard against what the caller reads: the verdicts that are expected, each
    /// under the id that the answer tells.
    #[track_caller]
    fn post(&mut self, path: &str, body: &str, expect: &[&'static str]) -> Value {
        let answer = self.serving.client().post(path, body).unwrap();
        let json = answer.json();
        let decisions = json.as_array().cloned().unwrap_or_else(|| vec![json.clone()]);
        let told = |decision: &Value| (decision["verdict"].clone(), decision["traceId"].clone());
        let heard: Vec<_> =
            self.heard().into_iter().map(|(_, verdict, id)| (Value::from(verdict), Value::from(id))).collect();
        assert_eq!(heard.iter().map(|(verdict, _)| verdict).collect::<Vec<_>>(), expect, "{path} {body}");
        if !expect.is_empty() {
            assert_eq!(heard, decisions.iter().map(told).collect::<Vec<_>>(), "{path} {body}");
        }
        json
    }

    fn auth(&mut self, user: &str) -> Answer {
        let fields = [("x-original-method", "GET"), ("x-original-uri", "/"), ("x-user", user)];
        self.serving.client().send("GET", "/auth", &fields, "").unwrap()
    }

    fn heard(&self) -> Vec<Heard> {
        std::mem::take(&mut self.ear.0.lock().unwrap())
    }
}

/// Woken by: leaving out `self.tell` in `Limiter::decide`, in `wait_with_receipt`, or putting it into `explain_under`.
#[test]
fn an_observer_hears_of_every_verb() {
    let mut listened = Listened::new();
    for path in ["/v1/peek", "/v1/check", "/v1/check?waitMs=1"] {
        listened.post(path, r#"{"user": "a"}"#, &["allow"]);
    }
    for path in ["/v1/peek", "/v1/check", "/v1/check?waitMs=1", "/v1/reserve"] {
        listened.post(path, r#"{"user": "a"}"#, &["deny"]);
    }
    listened.post("/v1/record", r#"{"user": "a"}"#, &["allow"]);
    let list = r#"[{"user": "b"}, {"user": "b"}, {"user": "b"}]"#;
    listened.post("/v1/check", list, &["allow", "allow", "deny"]);
    listened.post("/v1/peek", list, &["deny", "deny", "deny"]);
    listened.post("/v1/record", list, &["allow", "allow", "allow"]);
}

#[test]
fn an_observer_hears_of_decisions_alone_and_of_each_once() {
    let mut listened = Listened::new();
    let reserved = listened.post("/v1/reserve", r#"{"user": "c"}"#, &["allow"]);
    let end = format!(r#"{{"reservation": {}, "cost": 2}}"#, reserved["reservation"]);
    listened.post("/v1/commit", &end, &[]);
    listened.post("/v1/release", &end.replace(r#", "cost": 2"#, ""), &[]);
    // Asking why is not asking to cross.
    listened.post("/v1/explain", r#"{"user": "c"}"#, &[]);
    // The same answer again is no other decision.
    listened.post("/v1/check", r#"{"user": "d", "requestId": "one"}"#, &["allow"]);
    listened.post("/v1/check", r#"{"user": "d", "requestId": "one"}"#, &[]);
    // What cannot be decided was not decided, and neither was the list it is in.
    listened.post("/v1/check", r#"[{"user": "d"}, {"user": "d", "cost": 3}]"#, &[]);
}

#[test]
fn an_observer_hears_what_proxies_are_told() {
    let mut listened = Listened::new();
    for (status, verdict) in [(200, "allow"), (200, "allow"), (429, "deny")] {
        let answer = listened.auth("e");
        assert_eq!(answer.status, status);
        let heard = listened.heard();
        let [(user, told, id)] = heard.as_slice() else { panic!("{heard:?}") };
        assert_eq!((user.as_str(), *told), ("e", verdict));
        if status == 429 {
            assert_eq!(answer.json()["traceId"], Value::from(id.as_str()));
        }
    }
}
