//! Tests reloading a policy: no request is lost, and no answer mixes two policies.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::json;

use super::process::{POLICY, Scratch, Server, Start};

/// A policy with two rules that have its number in their names and limits.
fn numbered(number: u64) -> String {
    let rule = |name: &str, per: &str| {
        let limit = FIRST_LIMIT + number;
        format!("[[rule]]\nname = \"{name}{number}\"\nper = [\"{per}\"]\nlimit = \"{limit}/s\"\n")
    };
    rule("a", "ip") + &rule("b", "user")
}

/// The limit of policy 0: more than any test uses.
const FIRST_LIMIT: u64 = 1_000_000;

/// Returns the number of the policy and the generation of an answer or a list of answers.
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

/// Stops the clients, also if the test fails.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The first question after an alert is what was changed. The line compares with the policy in force, not with a file that was refused.
///
/// Woken by leaving out the text that is kept for the next comparison, and by keeping that of a refused file.
#[test]
fn a_reload_logs_what_has_changed() {
    let rule =
        |name: &str, limit: &str| format!("[[rule]]\nname = \"{name}\"\nper = [\"user\"]\nlimit = \"{limit}\"\n");
    let (server, file) = Server::with(&rule("plan", "600/h"));
    for (text, line) in [
        (rule("plan", "60/h") + &rule("posts", "9/h"), "changes=\"rule plan: limit 600/h -> 60/h; rule posts added\""),
        (rule("plan", "many"), "policy not reloaded"),
        (rule("plan", "70/h"), "changes=\"rule plan: limit 60/h -> 70/h; rule posts removed\""),
    ] {
        file.replace(&text);
        server.signal("HUP");
        server.wait_for_log(line);
    }
    server.signal("HUP");
    server.wait_for_log("changes=\"none\"");
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
                        // If the signal arrives late, the changed file is loaded twice.
                        let is_next = said.0 >= last.0 && (said.1 > last.1 || said == last);
                        assert!(is_next, "{last:?}, then {said:?}");
                        last = said;
                        newest.fetch_max(said.0, Ordering::Relaxed);
                        answered += 1;
                    }
                    answered
                })
            })
            .collect();
        let ending = Ending(&stop);
        for number in 1..=1_000 {
            file.replace(&numbered(number));
            server.signal("HUP");
            while newest.load(Ordering::Relaxed) < number {
                assert!(clients.iter().all(|client| !client.is_finished()), "a client has stopped");
                std::thread::yield_now();
            }
        }
        drop(ending);
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
    let line = server.wait_for_log("policy not reloaded");
    // Every event is one line.
    assert!(line.contains("ERROR") && line.contains("policy.toml:4:13: error[bad-limit]"), "{line}");
    let stands = ready(&server);
    assert_eq!(stands["status"], "degraded");
    assert_eq!(stands["reason"], "the policy could not be reloaded: bad-limit in line 4");
    assert_eq!(check(), (1, 1));
    // A valid file clears the problem.
    file.replace(&numbered(3));
    server.signal("HUP");
    server.wait_for_log("policy reloaded");
    assert_eq!(ready(&server), json!({"status": "ok"}));
    assert_eq!(check(), (3, 2));
}

/// A file that was emptied or truncated is a policy without rules: the old one stays in force.
///
/// Broken once by: leaving out the check in `usable`.
#[test]
fn an_emptied_file_does_not_replace_the_policy() {
    let (server, file) = Server::with(&numbered(1));
    let check = || named(&server.connect().post("/v1/check", r#"{"ip": "203.0.113.7", "user": "u1"}"#).unwrap());
    let cut = numbered(2);
    let cut = cut.split("[[rule]]").next().unwrap();
    for empty in ["", "# [[rule]]\n", cut, "[lists]\ndeny = [\"203.0.113.9\"]\n", "[login]\n"] {
        file.replace(empty);
        server.signal("HUP");
        let line = server.wait_for_log("policy not reloaded");
        assert!(line.contains("no-rules") && line.contains("--allow-empty"), "{line}");
        let stands = ready(&server);
        assert_eq!(stands["status"], "degraded");
        assert!(stands["reason"].as_str().unwrap().contains("no-rules"), "{stands}");
        assert_eq!(check(), (1, 1));
    }
    file.replace(&numbered(2));
    server.signal("HUP");
    server.wait_for_log("policy reloaded");
    assert_eq!(ready(&server), json!({"status": "ok"}));
    assert_eq!(check(), (2, 2));
}

#[test]
fn an_empty_policy_needs_allow_empty() {
    for empty in ["", "# [[rule]]\n", "[identity]\nuser = \"header:x-user\"\n"] {
        let file = Scratch::file("policy.toml", empty);
        let output = Start { policy: Some(file.path()), ..Start::default() }.command().output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains("--allow-empty"), "{error}");
        let server = Start { policy: Some(file.path()), args: &["--allow-empty"], ..Start::default() }.server();
        assert_eq!(server.connect().post("/v1/check", "{}").unwrap().json()["allowed"], true);
        file.replace(&numbered(1));
        server.signal("HUP");
        server.wait_for_log("policy reloaded");
        file.replace(empty);
        server.signal("HUP");
        server.wait_for_log("policy reloaded");
        assert_eq!(ready(&server), json!({"status": "ok"}));
    }
    // A policy with `[login]` only is not empty.
    let (server, file) = Server::with("[login]\n");
    file.replace("[login]\naccount = \"3/15min\"\n");
    server.signal("HUP");
    server.wait_for_log("policy reloaded");
    file.replace("");
    server.signal("HUP");
    server.wait_for_log("policy not reloaded");
}

/// Without a token, `/readyz` shows the code and line of an error, but no text of the file, its path or the environment.
///
/// Broken once by: showing `details` to everyone in `ready`.
#[test]
fn readyz_discloses_no_details_without_a_token() {
    let tokens = [
        ("THRESHOLD_TOKEN", "caller-token-0123"),
        ("THRESHOLD_ADMIN_TOKEN", "boss-token-012345"),
        ("THRESHOLD_READ_TOKEN", "eye-token-0123456"),
        ("SECRET", "hunter2 swordfish"),
    ];
    let file = Scratch::file("policy.toml", &numbered(1));
    let server = Start { policy: Some(file.path()), variables: &tokens, ..Start::default() }.server();
    let reason = |token: Option<&str>| {
        let bearer = token.map(|token| format!("Bearer {token}"));
        let fields: Vec<(&str, &str)> = bearer.iter().map(|bearer| ("authorization", bearer.as_str())).collect();
        let answer = server.connect().send("GET", "/readyz", &fields, "").unwrap();
        assert_eq!(answer.status, 200);
        answer.json()["reason"].as_str().unwrap().to_owned()
    };
    let folder = file.path().parent().unwrap().display().to_string();
    let jwt = "[identity.jwt]\nalg = \"HS256\"\nkey = \"hunter2\n";
    for (broken, open, full) in [
        (jwt, "syntax in line 3", "policy.toml:3:"),
        ("[identity]\ntrusted_proxies = [\"${SECRET}\"]\n", "bad-value in line 2", "\"${SECRET}\""),
        ("[memory]\nmax_keys = \"${SECRET}\"\n", "syntax in line 2", "${SECRET}"),
        ("swordfish = 1\n", "unknown-key in line 1", "swordfish"),
        ("a = 1\n\n[x]\n\n[y]\n[z]\n[z]\n", "syntax in line 7", "error[syntax]"),
    ] {
        file.replace(broken);
        server.signal("HUP");
        server.wait_for_log("policy not reloaded");
        for anonymous in [None, Some("no-token-of-this-server")] {
            assert_eq!(reason(anonymous), format!("the policy could not be reloaded: {open}"));
        }
        for (_, token) in &tokens[..3] {
            let told = reason(Some(token));
            assert!(told.contains(full) && told.contains(&folder), "{told}");
            assert!(!told.contains("hunter2"), "{told}");
        }
    }
    std::fs::remove_file(file.path()).unwrap();
    server.signal("HUP");
    server.wait_for_log("policy not reloaded");
    let (open, full) = (reason(None), reason(Some("eye-token-0123456")));
    assert!(open.contains("cannot read the file") && !open.contains(&folder), "{open}");
    assert!(full.contains(&folder), "{full}");
    server.signal("TERM");
    assert!(!server.wait().1.contains("hunter2"));
}

#[test]
fn a_changed_file_needs_no_signal() {
    let (server, file) = Server::with(&numbered(1));
    // Written in place, as by some editors and scripts.
    std::fs::write(file.path(), numbered(2)).unwrap();
    server.wait_for_log("policy reloaded");
    // A symbolic link that is replaced, as of a mounted ConfigMap.
    std::fs::remove_file(file.path()).unwrap();
    server.wait_for_log("policy not reloaded");
    let elsewhere = Scratch::file("other.toml", &numbered(3));
    std::os::unix::fs::symlink(elsewhere.path(), file.path()).unwrap();
    server.wait_for_log("policy reloaded");
    let answer = server.connect().post("/v1/check", r#"{"ip": "203.0.113.7", "user": "u1"}"#).unwrap();
    assert_eq!(named(&answer).0, 3);
}

#[test]
fn a_reload_keeps_what_was_used() {
    let policy = |limit: u64| format!("[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"{limit}/h\"\n");
    let (server, file) = Server::with(&policy(5));
    let remaining = || server.connect().post("/v1/check", r#"{"user": "u1"}"#).unwrap().json()["remaining"].clone();
    assert_eq!((remaining(), remaining()), (json!(4), json!(3)));
    file.replace(&policy(10));
    server.signal("HUP");
    server.wait_for_log("policy reloaded");
    assert_eq!(remaining(), json!(7));
}

#[test]
fn an_invalid_policy_is_an_error_at_the_start() {
    let file = Scratch::file("policy.toml", "[[rule]]\nname = 5\n");
    let output = Start { policy: Some(file.path()), ..Start::default() }.command().output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("policy.toml:2:8: error"), "{error}");
    let output = Start { args: &["/no/such/policy.toml"], ..Start::default() }.command().output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("/no/such/policy.toml"));
}

/// A reserved consistency is refused at the start, and on a reload the old policy stays.
#[test]
fn a_policy_with_leased_rules_is_refused() {
    let leased = POLICY.replacen("limit = ", "consistency = \"leased\"\nlimit = ", 1);
    let file = Scratch::file("p.toml", &leased);
    let output = Start { policy: Some(file.path()), ..Start::default() }.command().output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(
        error.contains("p.toml:") && error.contains("unknown value \"leased\"") && error.contains("strong"),
        "{error}"
    );
    let (server, file) = Server::with(POLICY);
    std::fs::write(file.path(), leased).unwrap();
    assert!(server.wait_for_log("policy not reloaded").contains("leased"));
    let ready = server.connect().send("GET", "/readyz", &[], "").unwrap().json();
    assert_eq!(ready["status"], "degraded", "{ready}");
}
