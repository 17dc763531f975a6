//! Tests login protection over HTTP, and its state after a restart.

use std::path::Path;

use serde_json::json;

use super::client::Answer;
use super::process::{Scratch, Server, Start};

const POLICY: &str = "[login]\naccount = \"1000/15min\"\nip = \"30/5min\"\nlocks = { 3 = \"1h\" }\nceiling = 5\n";

fn start(folder: &Path) -> Server {
    let policy = folder.join("policy.toml");
    std::fs::write(&policy, POLICY).unwrap();
    let db = folder.join("threshold.db");
    Start { policy: Some(&policy), args: &["--db", db.to_str().unwrap()], ..Start::default() }.server()
}

fn attempt(server: &Server, account: &str, ip: &str, device: Option<&str>) -> Answer {
    let body = json!({"account": account, "ip": ip, "device": device}).to_string();
    server.connect().post("/v1/login/attempt", &body).unwrap()
}

fn result(server: &Server, attempt: &Answer, success: bool) -> Answer {
    let body = json!({"attempt": attempt.json()["attempt"], "success": success}).to_string();
    server.connect().post("/v1/login/result", &body).unwrap()
}

#[test]
fn locks_and_devices_survive_a_kill() {
    let folder = Scratch::folder();
    let mut server = start(folder.path());
    let first = attempt(&server, "Ada", "203.0.113.1", None);
    assert_eq!((first.status, first.json()["allowed"].as_bool()), (200, Some(true)));
    let welcome = result(&server, &first, true);
    assert_eq!((&welcome.json()["success"], &welcome.json()["mayRetry"]), (&json!(true), &json!(true)));
    let device = welcome.json()["device"].as_str().unwrap().to_owned();
    assert_eq!(result(&server, &first, true).status, 404);
    for failures in 1..=3 {
        let tried = attempt(&server, " ADA ", "203.0.113.2", None);
        let told = result(&server, &tried, false).json();
        // `allowed` was true after a wrong password, and a caller could take it for "logged in".
        assert_eq!((&told["success"], told.get("allowed")), (&json!(false), None), "{told}");
        assert_eq!(told["mayRetry"], failures < 3, "{told}");
        assert_eq!(told["lockoutRemaining"].is_u64(), failures == 3, "{told}");
    }
    for _ in 0..2 {
        let locked = attempt(&server, "ada", "203.0.113.3", None);
        assert_eq!(locked.status, 429);
        let told = locked.json();
        assert_eq!(told["allowed"], false);
        assert_eq!(told["error"], "account_locked");
        assert_eq!(told["message"], "Too many failed attempts. Account temporarily locked.");
        let wait = told["lockoutRemaining"].as_u64().unwrap();
        assert!((3_000..=3_600).contains(&wait), "{wait}");
        let header: u64 = locked.header("retry-after").unwrap().parse().unwrap();
        assert!(header.abs_diff(wait) <= 1);
        // A known device is not locked out.
        let known = attempt(&server, "ada", "203.0.113.3", Some(&device));
        assert_eq!(known.status, 200, "{}", known.body);
        assert_eq!(attempt(&server, "somebody", "203.0.113.4", None).status, 200);
        server.signal("KILL");
        drop(server);
        server = start(folder.path());
    }
}

#[test]
fn an_address_with_too_many_attempts_is_refused_also_after_a_restart() {
    let folder = Scratch::folder();
    let server = start(folder.path());
    for number in 0..30 {
        assert_eq!(attempt(&server, &format!("user{number}"), "203.0.113.9", None).status, 200);
    }
    let check = |server: &Server| {
        let refused = attempt(server, "fresh", "203.0.113.9", None);
        assert_eq!(refused.status, 429);
        assert_eq!(refused.json()["error"], "too_many_requests");
        assert_eq!(refused.json()["message"], "Too many authentication attempts. Please try again later.");
        assert!(refused.header("retry-after").is_some());
    };
    check(&server);
    server.signal("TERM");
    assert!(server.wait().0.success());
    check(&start(folder.path()));
}

/// Attempts in progress count as failures: the third is the last that reaches the verifier.
#[test]
fn a_thousand_parallel_guesses_reach_the_verifier_three_times() {
    let folder = Scratch::folder();
    let server = start(folder.path());
    let reached: usize = std::thread::scope(|scope| {
        let guessers: Vec<_> = (0..20)
            .map(|guesser| {
                let mut client = server.connect();
                scope.spawn(move || {
                    let guess = |number: i32| {
                        let ip = format!("10.0.{guesser}.{number}");
                        let body = json!({"account": "ada", "ip": ip}).to_string();
                        client.post("/v1/login/attempt", &body).unwrap().status == 200
                    };
                    (0..50).map(guess).filter(|allowed| *allowed).count()
                })
            })
            .collect();
        guessers.into_iter().map(|guesser| guesser.join().unwrap()).sum()
    });
    assert!((1..=3).contains(&reached), "{reached} guesses reached the verifier");
}

/// The attempts of a banned client neither reach the verifier nor lock the account.
#[test]
fn a_banned_client_cannot_attempt_a_login_and_locks_no_account() {
    let folder = Scratch::folder();
    let server = start(folder.path());
    let ban = |layer: &str, key: &str, length: Option<u64>| {
        let body = json!({"layer": layer, "key": key, "reason": "guesses", "durationSec": length}).to_string();
        server.connect().post("/v1/bans", &body).unwrap().json()["id"].as_str().unwrap().to_owned()
    };
    let address = ban("edge", "203.0.113.0/24", Some(3_600));
    for _ in 0..40 {
        let refused = attempt(&server, "ada", "203.0.113.7", None);
        assert_eq!((refused.status, refused.json()["error"].as_str()), (429, Some("banned")), "{}", refused.body);
        assert_eq!((refused.json()["allowed"].as_bool(), refused.json().get("attempt")), (Some(false), None));
        let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
        assert!((3_500..=3_600).contains(&wait), "{wait}");
        assert!(!refused.body.contains("guesses"), "the reason is for operators");
    }
    let account = server.connect().send("GET", "/v1/subjects/account/ada", &[], "").unwrap().json();
    assert_eq!((&account["failures"], &account["lockedUntil"]), (&json!(0), &json!(null)));
    let elsewhere = attempt(&server, "ada", "198.51.100.7", None);
    assert_eq!(elsewhere.status, 200);
    let user = ban("user", "ada", None);
    let refused = attempt(&server, " ADA ", "198.51.100.7", None);
    assert_eq!((refused.json()["error"].as_str(), refused.header("retry-after")), (Some("banned"), None));
    // An attempt in progress still gets its result.
    let device = result(&server, &elsewhere, true).json()["device"].as_str().unwrap().to_owned();
    assert_eq!(attempt(&server, "ada", "198.51.100.7", Some(&device)).json()["error"], "banned");
    ban("tenant", "closed", None);
    let body = json!({"account": "bob", "ip": "198.51.100.7", "tenant": "closed"}).to_string();
    assert_eq!(server.connect().post("/v1/login/attempt", &body).unwrap().json()["error"], "banned");
    for id in [address, user] {
        assert_eq!(server.connect().send("DELETE", &format!("/v1/bans/{id}"), &[], "").unwrap().status, 200);
    }
    assert_eq!(attempt(&server, "ada", "203.0.113.7", None).status, 200);
}

/// A ban of a user applies at the login to every spelling of the account, whether set by an operator or a ladder. Elsewhere
/// names are compared exactly. Woken by: leaving `pages.bans`, or `pages.spellings`, out of `BanList::spellings`.
#[test]
fn a_ban_of_a_user_applies_to_every_spelling_of_the_account() {
    let folder = Scratch::folder();
    let policy = folder.path().join("policy.toml");
    let rule =
        "[[rule]]\nname = \"posts\"\nper = [\"user\"]\nlimit = \"1/h\"\nladder = \"strict\"\nstrike = \"request\"\n";
    std::fs::write(&policy, format!("{POLICY}{rule}")).unwrap();
    let server = Start { policy: Some(&policy), ..Start::default() }.server();
    let body = json!({"layer": "user", "key": "Eve", "reason": "stolen cards"}).to_string();
    let ban = server.connect().post("/v1/bans", &body).unwrap().json()["id"].as_str().unwrap().to_owned();
    let check = |user: &str| {
        server.connect().post("/v1/check", &json!({"user": user}).to_string()).unwrap().json()["verdict"].clone()
    };
    while check("Mallory") != "ban" {}
    for account in ["Eve", "eve", " EVE", "e\u{200b}ve", "Mallory", "mallory", "MALLORY"] {
        let refused = attempt(&server, account, "198.51.100.7", None);
        assert_eq!(refused.json()["error"], "banned", "{account:?}");
    }
    assert_eq!((check("Eve"), check("eve"), check("mallory")), (json!("ban"), json!("allow"), json!("allow")));
    assert_eq!(server.connect().send("DELETE", &format!("/v1/bans/{ban}"), &[], "").unwrap().status, 200);
    assert_eq!(server.connect().send("DELETE", "/v1/subjects/user/Mallory", &[], "").unwrap().status, 200);
    for account in ["EVE", "MALLORY"] {
        assert_eq!(attempt(&server, account, "198.51.100.7", None).status, 200);
    }
}

#[test]
fn invalid_login_requests_name_the_field() {
    let folder = Scratch::folder();
    let server = start(folder.path());
    let client = &mut server.connect();
    let mut check = |path: &str, body: &str, status: u16, field: Option<&str>| {
        let answer = client.post(path, body).unwrap();
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        assert_eq!(answer.json()["field"].as_str(), field, "{body}: {}", answer.body);
    };
    check("/v1/login/attempt", r#"{"account":"a"}"#, 400, Some("ip"));
    check("/v1/login/attempt", r#"{"account":"a","ip":"here"}"#, 400, Some("ip"));
    check("/v1/login/attempt", r#"{"account":" ","ip":"10.0.0.1"}"#, 400, Some("account"));
    check("/v1/login/attempt", r#"{"account":"\u200b\ufeff","ip":"10.0.0.1"}"#, 400, Some("account"));
    check("/v1/login/attempt", r#"{"account":"a","ip":"10.0.0.1","password":"x"}"#, 400, Some("password"));
    check("/v1/login/result", r#"{"attempt":"forged","success":true}"#, 400, Some("attempt"));
    check("/v1/login/result", r#"{"attempt":"x"}"#, 400, Some("success"));
    let (server, _policy) = Server::with(super::process::POLICY);
    let answer = server.connect().post("/v1/login/attempt", r#"{"account":"a","ip":"10.0.0.1"}"#).unwrap();
    assert_eq!((answer.status, answer.json()["error"].as_str()), (400, Some("bad_request")));
}
