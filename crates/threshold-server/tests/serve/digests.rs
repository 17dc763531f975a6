//! Tests that operators can act on the digests that events, alerts and logs show in place of names.

use std::net::TcpStream;
use std::process::Command;

use serde_json::{Value, json};

use super::client::{Answer, Client};
use super::process::{Scratch, Server, Start};

const POLICY: &str = r#"
[[rule]]
name = "posts"
layer = "user"
per = ["user"]
limit = "1/h"
algorithm = "fixed-window"
anchor = "first"
log = "each"
"#;

fn start(folder: &Scratch, policy: &str) -> Server {
    let file = folder.path().join("policy.toml");
    std::fs::write(&file, policy).unwrap();
    let db = folder.path().join("threshold.db");
    Start { policy: Some(&file), args: &["--db", db.to_str().unwrap()], ..Start::default() }.server()
}

/// Denies a caller, and returns its event.
fn denied(client: &mut Client<TcpStream>, user: &str, ip: &str) -> Value {
    let body = json!({"user": user, "ip": ip}).to_string();
    client.post("/v1/check", &body).unwrap();
    let answer = client.post("/v1/check", &body).unwrap().json();
    assert_eq!(answer["allowed"], false);
    let trace = answer["traceId"].as_str().unwrap();
    let found = client.send("GET", &format!("/v1/events?traceId={trace}"), &[], "").unwrap().json();
    found["events"][0].clone()
}

/// Returns a field of an event as it is written into a path or a query.
fn shown(event: &Value, field: &str) -> String {
    let digest = event[field].as_str().unwrap();
    assert!(digest.starts_with('#') && digest.len() == 17, "{event}");
    digest.replace('#', "%23")
}

fn call(client: &mut Client<TcpStream>, method: &str, path: &str, body: &Value) -> Answer {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    client.send(method, path, &[("content-type", "application/json")], &body).unwrap()
}

fn run(server: &Server, args: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
    let output = command.args(args).args(["--server", &server.place]).env_clear().output().unwrap();
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

/// An operator who was told of `#9b1e44c07d2a6f35` could neither look it up nor ban it: no name was known anywhere.
///
/// Woken by leaving out `named` in any of the calls.
#[test]
fn a_digest_of_an_event_can_be_looked_up_banned_forgiven_and_given_a_limit() {
    let folder = Scratch::folder();
    let server = start(&folder, POLICY);
    let client = &mut server.connect();
    let event = denied(client, "eve", "203.0.113.7");
    let (user, ip) = (shown(&event, "userId"), shown(&event, "ip"));
    // The digest of the log is the same.
    let line = server.wait_for_log("denied");
    assert!(line.contains(event["userId"].as_str().unwrap()) && line.contains(event["ip"].as_str().unwrap()), "{line}");
    let subject = call(client, "GET", &format!("/v1/subjects/user/{user}"), &Value::Null).json();
    assert_eq!((&subject["key"], &subject["digest"]), (&json!("eve"), &event["userId"]));
    assert_eq!(subject["budgets"][0]["used"], 1, "{subject}");
    let forgiven = call(client, "DELETE", &format!("/v1/subjects/user/{user}"), &Value::Null);
    assert_eq!(forgiven.status, 200, "{}", forgiven.body);
    let check = |client: &mut Client<TcpStream>| client.post("/v1/check", r#"{"user":"eve"}"#).unwrap().json();
    assert_eq!(check(client)["allowed"], true, "forgiven");
    let setting = call(client, "PUT", &format!("/v1/users/{user}"), &json!({"times": 3})).json();
    assert_eq!((&setting["id"], &setting["times"]), (&json!("eve"), &json!(3)));
    assert_eq!(call(client, "GET", "/v1/users/eve", &Value::Null).json(), setting);
    assert_eq!(call(client, "GET", &format!("/v1/users/{user}"), &Value::Null).json(), setting);
    let new = json!({"layer": "user", "key": event["userId"], "reason": "scrapes"});
    let ban = call(client, "POST", "/v1/bans", &new).json();
    assert_eq!((&ban["layer"], &ban["key"]), (&json!("user"), &json!("eve")));
    assert_eq!(check(client)["banned"], true);
    assert_eq!(call(client, "DELETE", &format!("/v1/bans?layer=user&key={user}"), &Value::Null).json()["lifted"], 1);
    assert_eq!(check(client)["banned"], false);
    // The address of the same request, by the commands.
    let digest = event["ip"].as_str().unwrap();
    let (code, text) = run(&server, &["subject", "edge", digest]);
    assert!(code == Some(0) && text.starts_with(&format!("edge 203.0.113.7\ndigest {digest} ")), "{text}");
    let (code, text) = run(&server, &["bans", "add", "ip", digest, "--reason", "scrapes"]);
    assert!(code == Some(0) && text.contains("203.0.113.7"), "{text}");
    assert_eq!(run(&server, &["bans", "lift", "ip", digest]), (Some(0), "lifted\n".to_owned()));
    // Not with the wrong kind, and not if nobody has it.
    for (layer, key) in [("edge", user.as_str()), ("user", &ip), ("tenant", &user), ("user", "%230123456789abcdef")] {
        let unknown = call(client, "GET", &format!("/v1/subjects/{layer}/{key}"), &Value::Null);
        assert_eq!((unknown.status, &unknown.json()["error"]), (404, &json!("unknown_digest")), "{layer} {key}");
        assert!(unknown.body.contains("for an hour after the last time"), "{}", unknown.body);
    }
    let audit = call(client, "GET", "/v1/audit", &Value::Null).json();
    assert!(audit.as_array().unwrap().iter().any(|line| line["about"] == "user eve"), "{audit}");
}

/// The list of locks has digests only, and an account could be unlocked only by somebody who knew its name.
///
/// Woken by looking for a name in `account_with_digest`, and by leaving out the names of refused logins.
#[test]
fn a_locked_account_is_unlocked_by_its_digest() {
    let folder = Scratch::folder();
    let server = start(&folder, &format!("[login]\n{POLICY}"));
    let client = &mut server.connect();
    let attempt = |client: &mut Client<TcpStream>| {
        let body = json!({"account": "ada", "ip": "203.0.113.7"}).to_string();
        client.post("/v1/login/attempt", &body).unwrap().json()["attempt"].clone()
    };
    while let Value::String(attempt) = attempt(client) {
        client.post("/v1/login/result", &json!({"attempt": attempt, "success": false}).to_string()).unwrap();
    }
    let locks = call(client, "GET", "/v1/locks", &Value::Null).json();
    let digest = locks[0]["digest"].as_str().unwrap();
    let path = format!("/v1/subjects/account/{}", digest.replace('#', "%23"));
    let subject = call(client, "GET", &path, &Value::Null).json();
    assert_eq!((&subject["key"], &subject["digest"]), (&json!(digest), &json!(digest)));
    assert_eq!((&subject["lockedUntil"], &subject["failures"]), (&locks[0]["lockedUntil"], &locks[0]["failures"]));
    // The event of a refused login shows the account as a user, whose digest is another one.
    let events = call(client, "GET", "/v1/events?limit=1", &Value::Null).json();
    let (user, ip) = (shown(&events["events"][0], "userId"), shown(&events["events"][0], "ip"));
    let same = call(client, "GET", &format!("/v1/subjects/account/{user}"), &Value::Null).json();
    assert_eq!(same["digest"], json!(digest));
    assert_eq!(same["lockedUntil"], subject["lockedUntil"]);
    assert_eq!(call(client, "GET", &format!("/v1/subjects/edge/{ip}"), &Value::Null).json()["key"], "203.0.113.7");
    assert_eq!(call(client, "DELETE", &path, &Value::Null).status, 200);
    assert_eq!(call(client, "GET", "/v1/locks", &Value::Null).json(), json!([]));
    let unknown = call(client, "DELETE", "/v1/subjects/account/%230123456789abcdef", &Value::Null);
    assert_eq!((unknown.status, &unknown.json()["error"]), (404, &json!("unknown_digest")));
    let audit = call(client, "GET", "/v1/audit", &Value::Null).json();
    assert_eq!((audit[0]["about"].clone(), audit.as_array().unwrap().len()), (json!(format!("account {digest}")), 1));
    // The log showed the account by its name's digest as a user, which `locks list` does not know.
    assert_eq!(call(client, "DELETE", "/v1/subjects/account/ada", &Value::Null).status, 200);
    assert!(server.wait_for_log(&format!("about=\"account {digest}\"")).contains("operator change"));
}

/// Woken by leaving out `see_reported`.
#[test]
fn an_address_that_the_edge_has_reported_can_be_banned_by_its_digest() {
    let folder = Scratch::folder();
    let server = start(&folder, POLICY);
    let client = &mut server.connect();
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let line = json!({"Action": "block", "Datetime": seconds, "ClientIP": "2001:db8::7"}).to_string();
    assert_eq!(client.post("/v1/events", &line).unwrap().json()["accepted"], 1);
    let events = client.send("GET", "/v1/events", &[], "").unwrap().json();
    let new = json!({"layer": "edge", "key": events["events"][0]["ip"], "reason": "scrapes"});
    let ban = call(client, "POST", "/v1/bans", &new).json();
    assert_eq!(ban["key"], "2001:db8::/64", "{ban}");
}

/// Woken by leaving out `forget_names`.
#[test]
fn an_erased_name_is_found_no_longer_and_is_in_no_file() {
    let folder = Scratch::folder();
    let server = start(&folder, POLICY);
    let client = &mut server.connect();
    let (event, other) = (denied(client, "canary-user", "203.0.113.7"), denied(client, "other", "203.0.113.8"));
    let look = |client: &mut Client<TcpStream>, event: &Value| {
        call(client, "GET", &format!("/v1/subjects/user/{}", shown(event, "userId")), &Value::Null).status
    };
    assert_eq!((look(client, &event), look(client, &other)), (200, 200));
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        assert!(!String::from_utf8_lossy(&bytes).contains("canary-user"));
    }
    let path = format!("/v1/events?userId={}", shown(&event, "userId"));
    assert_eq!(call(client, "DELETE", &path, &Value::Null).json()["erased"], 1);
    assert_eq!((look(client, &event), look(client, &other)), (404, 200));
}

/// Erasing a tenant left its users in the statistics, and erasing a user in the form of operators erased nothing.
///
/// Woken by leaving out `forget_names_of_tenant`, `scoped`, or the users in `Signals::erase`.
#[test]
fn users_of_tenants_are_erased_by_either_name() {
    let folder = Scratch::folder();
    let policy = "[identity]\nuser_scope = 'tenant'\nlog_identifiers = true\n[login]\n\
                  [[rule]]\nname = 'user'\nlayer = 'user'\nper = ['user']\nlimit = '1/h'\n";
    let server = start(&folder, policy);
    let client = &mut server.connect();
    for (tenant, user) in [("acme", "u1"), ("acme", "u2"), ("globex", "u1"), ("initech", "peter")] {
        for _ in 0..2 {
            call(client, "POST", "/v1/check", &json!({"tenant": tenant, "user": user, "ip": "203.0.113.7"}));
        }
        let attempt = json!({"account": user, "tenant": tenant, "ip": "203.0.113.7"});
        let attempt = call(client, "POST", "/v1/login/attempt", &attempt).json();
        let result = json!({"attempt": attempt["attempt"], "success": false});
        assert_eq!(call(client, "POST", "/v1/login/result", &result).status, 200);
    }
    let listed = |client: &mut Client<TcpStream>| {
        let stats = call(client, "GET", "/v1/stats?period=h", &Value::Null).json();
        let names = |list: &str, name: &str| {
            let mut names: Vec<String> =
                stats[list].as_array().unwrap().iter().map(|one| one[name].as_str().unwrap().to_owned()).collect();
            names.sort();
            names
        };
        (names("topBlockedUsers", "user"), names("topFailedLoginAccounts", "account"))
    };
    let all = ["acme/u1", "acme/u2", "globex/u1", "initech/peter"].map(str::to_owned).to_vec();
    assert_eq!(listed(client), (all.clone(), all));
    let erase = |client: &mut Client<TcpStream>, query: &str| {
        call(client, "DELETE", &format!("/v1/events?{query}"), &Value::Null).json()["erased"].clone()
    };
    assert_eq!(erase(client, "userId=acme/u1"), 1);
    let left = ["acme/u2", "globex/u1", "initech/peter"].map(str::to_owned).to_vec();
    assert_eq!(listed(client), (left.clone(), left));
    assert_eq!(erase(client, "tenant=initech"), 1);
    let left = ["acme/u2", "globex/u1"].map(str::to_owned).to_vec();
    assert_eq!(listed(client), (left.clone(), left));
    assert_eq!(erase(client, "userId=u2"), 1);
    let left = vec!["globex/u1".to_owned()];
    assert_eq!(listed(client), (left.clone(), left));
}

/// The name of a secret identity is an API key or a session. No answer shows it.
///
/// Woken by answering with the name in place of `shown_name`.
#[test]
fn a_secret_name_is_acted_on_and_never_shown() {
    let folder = Scratch::folder();
    let server = start(&folder, &format!("identity = {{ secret = ['user'], log_identifiers = true }}\n{POLICY}"));
    let client = &mut server.connect();
    let secret = "sk_live_0123456789";
    let event = denied(client, secret, "203.0.113.7");
    let user = shown(&event, "userId");
    let new = json!({"layer": "user", "key": event["userId"], "reason": "leaked"});
    let answers = [
        call(client, "GET", &format!("/v1/subjects/user/{user}"), &Value::Null),
        call(client, "PUT", &format!("/v1/users/{user}"), &json!({"times": 3})),
        call(client, "POST", "/v1/bans", &new),
        call(client, "GET", "/v1/bans", &Value::Null),
        call(client, "GET", "/v1/audit", &Value::Null),
    ];
    for answer in answers {
        assert!(answer.status == 200 && !answer.body.contains(secret), "{}", answer.body);
        assert!(answer.body.contains(event["userId"].as_str().unwrap()), "{}", answer.body);
    }
    let body = json!({"user": secret}).to_string();
    assert_eq!(client.post("/v1/check", &body).unwrap().json()["banned"], true);
    assert_eq!(call(client, "DELETE", &format!("/v1/bans?layer=user&key={user}"), &Value::Null).status, 200);
}

/// A ban on `" acme"` was one on `"acme"`, and a user with the digest of another one as its name was found in place of it.
///
/// Woken by trimming a key anywhere on the way, and by taking one `#` for a name.
#[test]
fn operators_act_on_exactly_the_name_that_they_write() {
    let folder = Scratch::folder();
    let server = start(&folder, &format!("identity = {{ log_identifiers = true }}\n{POLICY}"));
    let client = &mut server.connect();
    let is_banned = |client: &mut Client<TcpStream>, user: &str| {
        client.post("/v1/peek", &json!({"user": user, "ip": "203.0.113.9"}).to_string()).unwrap().json()["banned"]
            .clone()
    };
    let victim = call(client, "GET", "/v1/subjects/user/eve", &Value::Null).json();
    let digest = victim["digest"].as_str().unwrap();
    for (name, written, other) in [(" eve", " eve", "eve"), ("-x", "-x", "x"), (digest, &format!("#{digest}"), "eve")] {
        let (code, text) = run_with(&server, &["bans", "add", "user", "--reason", "r", "--"], written);
        assert!(code == Some(0) && text.contains(written), "{text}");
        assert_eq!((is_banned(client, name), is_banned(client, other)), (json!(true), json!(false)), "{name}");
        let bans = call(client, "GET", "/v1/bans", &Value::Null).json();
        assert_eq!((bans.as_array().unwrap().len(), &bans[0]["key"]), (1, &json!(written)), "{bans}");
        let (_, text) = run_with(&server, &["subject", "user", "--"], written);
        assert!(text.starts_with(&format!("user {written}\n")) && text.contains("Stopped by"), "{text}");
        let event = denied(client, name, "203.0.113.7");
        assert_eq!(event["userId"], written);
        let query: String = written.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let erased = call(client, "DELETE", &format!("/v1/events?userId={query}"), &Value::Null).json();
        assert_eq!(erased["erased"], 2, "{erased}");
        assert_eq!(
            call(client, "DELETE", &format!("/v1/bans?layer=user&key={query}"), &Value::Null).json()["lifted"],
            1
        );
        assert_eq!(is_banned(client, name), false);
        let audit = call(client, "GET", "/v1/audit?limit=1", &Value::Null).json();
        assert_eq!(audit[0]["about"], format!("user {written}"));
    }
    let set = json!({"reason": "r", "bans": [{"layer": "user", "key": digest}]});
    let refused = call(client, "PUT", "/v1/bans/sets/x", &set);
    assert!(refused.status == 400 && refused.body.contains("is a digest"), "{}", refused.body);
}

fn run_with(server: &Server, args: &[&str], last: &str) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
    let output = command.args(args).arg(last).env_clear().env("THRESHOLD_SERVER", &server.place).output().unwrap();
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}
