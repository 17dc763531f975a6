//! Another policy while the server runs: no request is lost, and no answer mixes two policies.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::json;

use super::process::{Scratch, Server, Start};

/// Two rules that carry the number of their policy in their names and in their limits.
fn numbered(number: u64) -> String {
    let rule = |name: &str, per: &str| {
        let limit = FIRST_LIMIT + number;
        format!("[[rule]]\nname = \"{name}{number}\"\nper = [\"{per}\"]\nlimit = \"{limit}/s\"\n")
    };
    rule("a", "ip") + &rule("b", "user")
}

/// The limit of policy 0: more than any test asks for.
const FIRST_LIMIT: u64 = 1_000_000;

/// What one answer, or a list of them, says: the number of its policy, and its generation.
fn named(answer: &super::client::Answer) -> (u64, u64) {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let json = answer.json();
    let decisions = json.as_array().cloned().unwrap_or_else(|| vec![json.clone()]);
    let limits: Vec<_> = decisions.iter().flat_map(|decision| decision["limits"].as_array().unwrap()).collect();
    assert_eq!(limits.len(), 2 * decisions.len());
    let number = limits[0]["limit"].as_u64().unwrap() - FIRST_LIMIT;
    for limit in limits {
        let name = &limit["rule"].as_str().unwrap()[1..];
        let says = (name.parse().unwrap(), limit["limit"].as_u64().unwrap() - FIRST_LIMIT);
        assert_eq!(says, (number, number), "one answer, two policies: {json}");
    }
    (number, answer.header("x-threshold-generation").unwrap().parse().unwrap())
}

#[test]
fn a_thousand_policies_under_load_lose_no_request() {
    const ONE: &str = r#"{"ip": "203.0.113.7", "user": "u1"}"#;
    let many = format!("[{}]", [ONE; 50].join(","));
    let (server, file) = Server::with(&numbered(0));
    let (stop, newest) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let clients: Vec<_> = [ONE, ONE, &many, &many]
            .into_iter()
            .map(|body| {
                let mut client = server.connect();
                let (stop, newest) = (&stop, &newest);
                scope.spawn(move || {
                    let (mut last, mut answered) = ((0, 1), 0u64);
                    while !stop.load(Ordering::Relaxed) {
                        let said = named(&client.post("/v1/check", body).expect("a request was lost"));
                        assert!(
                            said.0 >= last.0 && (said.0 == last.0) == (said.1 == last.1),
                            "{last:?}, then {said:?}"
                        );
                        last = said;
                        newest.fetch_max(said.0, Ordering::Relaxed);
                        answered += 1;
                    }
                    answered
                })
            })
            .collect();
        for number in 1..=1_000 {
            file.replace(&numbered(number));
            server.signal("HUP");
            while newest.load(Ordering::Relaxed) < number {
                assert!(clients.iter().all(|client| !client.is_finished()), "a client has stopped");
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
        let answered: u64 = clients.into_iter().map(|client| client.join().unwrap()).sum();
        assert!(answered >= 1_000, "{answered}");
    });
}

fn ready(server: &Server) -> serde_json::Value {
    let answer = server.connect().send("GET", "/readyz", &[], "").unwrap();
    assert_eq!(answer.status, 200);
    answer.json()
}

#[test]
fn a_bad_file_is_reported_and_the_old_policy_stays() {
    let (server, file) = Server::with(&numbered(1));
    let check = || named(&server.connect().post("/v1/check", r#"{"ip": "203.0.113.7", "user": "u1"}"#).unwrap());
    file.replace(&numbered(2).replacen("1000002/s", "10 per fortnight", 1));
    server.signal("HUP");
    let line = server.wait_for_log("the old policy stays in force");
    assert!(line.contains("ERROR"), "{line}");
    let place = server.wait_for_log("error[bad-limit]");
    assert!(place.contains("policy.toml:4:13: error[bad-limit]"), "{place}");
    let stands = ready(&server);
    assert_eq!(stands["status"], "degraded");
    assert!(stands["reason"].as_str().unwrap().contains("policy.toml:4:13"), "{stands}");
    assert_eq!(check(), (1, 1));
    // A good one heals.
    file.replace(&numbered(3));
    server.signal("HUP");
    server.wait_for_log("a new policy is in force");
    assert_eq!(ready(&server), json!({"status": "ok"}));
    assert_eq!(check(), (3, 2));
}

#[test]
fn a_changed_file_needs_no_signal() {
    let (server, file) = Server::with(&numbered(1));
    // Written in place, as an editor or a script may.
    std::fs::write(file.path(), numbered(2)).unwrap();
    server.wait_for_log("a new policy is in force");
    // A link that is moved, as a mounted ConfigMap's is.
    std::fs::remove_file(file.path()).unwrap();
    server.wait_for_log("the old policy stays in force");
    let elsewhere = Scratch::file("other.toml", &numbered(3));
    std::os::unix::fs::symlink(elsewhere.path(), file.path()).unwrap();
    server.wait_for_log("a new policy is in force");
    let answer = server.connect().post("/v1/check", r#"{"ip": "203.0.113.7", "user": "u1"}"#).unwrap();
    assert_eq!(named(&answer).0, 3);
}

#[test]
fn what_was_used_stays_used() {
    let policy = |limit: u64| format!("[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"{limit}/h\"\n");
    let (server, file) = Server::with(&policy(5));
    let remaining = || server.connect().post("/v1/check", r#"{"user": "u1"}"#).unwrap().json()["remaining"].clone();
    assert_eq!((remaining(), remaining()), (json!(4), json!(3)));
    file.replace(&policy(10));
    server.signal("HUP");
    server.wait_for_log("a new policy is in force");
    assert_eq!(remaining(), json!(7));
}

#[test]
fn a_policy_that_cannot_be_used_is_told_at_the_start() {
    let file = Scratch::file("policy.toml", "[[rule]]\nname = 5\n");
    let output = Start { policy: Some(file.path()), ..Start::default() }.command().output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("policy.toml:2:8: error"), "{error}");
    let output = Start { args: &["/no/such/policy.toml"], ..Start::default() }.command().output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("/no/such/policy.toml"));
}
