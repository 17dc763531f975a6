//! Tests the operators' API: bans, subjects, settings, permissions and the audit.

use std::net::TcpStream;
use std::path::Path;

use serde_json::{Value, json};

use super::client::{Answer, Client};
use super::process::{Scratch, Server, Start};

const POLICY: &str = r#"
[identity]
trusted_proxies = ["192.0.2.0/24"]
client_ip = "x-forwarded-for"

[lists]
allow = ["198.51.100.8/29", "user:friend"]

[login]

[[rule]]
name = "posts"
per = ["user"]
limit = "2/h"
ladder = "strict"
strike = "request"
on_missing = "skip"
"#;

fn start(folder: &Path, variables: &[(&str, &str)]) -> Server {
    let policy = folder.join("policy.toml");
    std::fs::write(&policy, POLICY).unwrap();
    let db = folder.join("threshold.db");
    Start { policy: Some(&policy), args: &["--db", db.to_str().unwrap()], variables, ..Start::default() }.server()
}

fn ban(client: &mut Client<TcpStream>, body: &Value) -> Answer {
    client.post("/v1/bans", &body.to_string()).unwrap()
}

fn check(client: &mut Client<TcpStream>, facts: &Value) -> Value {
    client.post("/v1/check", &facts.to_string()).unwrap().json()
}

/// The example of the specification: under "strict" the fifth request over the limit leads to a ban of a day, which is
/// listed, survives `kill -9`, and can be lifted.
#[test]
fn a_ladders_ban_is_listed_survives_a_kill_and_can_be_lifted() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    let eve = json!({"user": "eve"});
    for over in -1..=5 {
        let told = check(client, &eve);
        assert_eq!(told["allowed"], over <= 0, "{over}: {told}");
        assert_eq!(told["banned"], over == 5, "{over}: {told}");
    }
    // A strike waits for the disk for at most ten milliseconds; an operators' call waits until everything is on disk.
    assert_eq!(client.send("DELETE", "/v1/subjects/user/nobody", &[], "").unwrap().status, 200);
    server.signal("KILL");
    drop(server);
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    let told = check(client, &eve);
    assert_eq!((told["verdict"].as_str(), told["layer"].as_str()), (Some("ban"), Some("user")));
    assert!((86_000..=86_400).contains(&told["retryAfter"].as_u64().unwrap()), "{told}");
    let listed = client.send("GET", "/v1/bans", &[], "").unwrap().json();
    let [own] = listed.as_array().unwrap().as_slice() else { panic!("{listed}") };
    assert_eq!((&own["layer"], &own["key"], &own["by"]), (&json!("user"), &json!("eve"), &json!("ladder")));
    assert_eq!(own["reason"], "strike 5 under the rule posts");
    assert!(own["until"].as_u64().unwrap() - own["from"].as_u64().unwrap() >= 86_400);
    let subject = client.send("GET", "/v1/subjects/user/eve", &[], "").unwrap().json();
    assert_eq!((&subject["strikes"], &subject["bannedUntil"]), (&json!(5), &own["until"]));
    let path = format!("/v1/bans/{}", own["id"].as_str().unwrap());
    assert_eq!(client.send("DELETE", &path, &[], "").unwrap().status, 200);
    assert_eq!(client.send("DELETE", &path, &[], "").unwrap().status, 404);
    assert_eq!(check(client, &eve)["allowed"], true);
    server.signal("KILL");
    drop(server);
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    assert_eq!(client.send("GET", "/v1/bans", &[], "").unwrap().json(), json!([]));
    assert_eq!(client.send("GET", "/v1/subjects/user/eve", &[], "").unwrap().json()["strikes"], 0);
}

#[test]
fn operators_ban_addresses_tenants_and_users_and_narrower_allow_entries_win() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    let set =
        ban(client, &json!({"layer": "edge", "key": "198.51.100.0/24", "reason": "scrapers", "durationSec": 3_600}));
    assert_eq!(set.status, 200, "{}", set.body);
    assert_eq!((&set.json()["key"], &set.json()["by"]), (&json!("198.51.100.0/24"), &json!("local")));
    ban(client, &json!({"layer": "tenant", "key": "acme", "reason": "unpaid"}));
    ban(client, &json!({"layer": "user", "key": "mallory", "reason": "fraud"}));
    let denied = |client: &mut Client<TcpStream>, facts: &Value| check(client, facts)["banned"] == true;
    assert!(denied(client, &json!({"ip": "198.51.100.7"})));
    assert!(denied(client, &json!({"ip": "::ffff:198.51.100.7"})));
    assert!(denied(client, &json!({"tenant": "acme", "ip": "203.0.113.1"})));
    assert!(denied(client, &json!({"user": "mallory", "ip": "198.51.100.9"})));
    // Entries that are narrower than the ban: a part of the block, and a user.
    assert!(!denied(client, &json!({"ip": "198.51.100.9"})));
    assert!(!denied(client, &json!({"ip": "198.51.100.7", "user": "friend"})));
    assert!(!denied(client, &json!({"ip": "203.0.113.1", "user": "somebody"})));
    let told = check(client, &json!({"user": "mallory"}));
    assert_eq!((&told["retryAfter"], &told["layer"]), (&Value::Null, &json!("user")));
    assert!(!told.to_string().contains("fraud"), "the reason is for operators");
    // Banning the same subject again replaces the ban.
    let again = ban(client, &json!({"layer": "user", "key": "mallory", "reason": "fraud, again", "durationSec": 60}));
    assert!(again.json()["until"].is_u64());
    assert_eq!(client.send("GET", "/v1/bans", &[], "").unwrap().json().as_array().unwrap().len(), 3);
    let page = client.send("GET", "/v1/bans?limit=2", &[], "").unwrap().json();
    let last = page[1]["id"].as_str().unwrap();
    let rest = client.send("GET", &format!("/v1/bans?after={last}"), &[], "").unwrap().json();
    assert_eq!((page.as_array().unwrap().len(), rest.as_array().unwrap().len()), (2, 1));
}

/// A ban of an IPv6 address once applied to that address only, of the 2^64 that one client has.
#[test]
fn a_bare_ipv6_address_is_banned_with_its_prefix() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    let banned = |client: &mut Client<TcpStream>, ip: &str| check(client, &json!({"ip": ip}))["banned"] == true;
    let set = ban(client, &json!({"layer": "edge", "key": "2001:db8:1:2::7", "reason": "scrapes"})).json();
    assert_eq!(set["key"], "2001:db8:1:2::/64");
    assert!(banned(client, "2001:db8:1:2::7") && banned(client, "2001:db8:1:2:ffff::8"));
    assert!(!banned(client, "2001:db8:1:3::7"));
    let subject = client.send("GET", "/v1/subjects/edge/2001:db8:1:2::9", &[], "").unwrap().json();
    assert_eq!(subject["ban"]["id"], set["id"]);
    let one = ban(client, &json!({"layer": "edge", "key": "2001:db8:9::7/128", "reason": "scrapes"})).json();
    assert_eq!(one["key"], "2001:db8:9::7/128");
    assert!(banned(client, "2001:db8:9::7") && !banned(client, "2001:db8:9::8"));
    let subject = client.send("GET", "/v1/subjects/edge/2001:db8:9::7", &[], "").unwrap().json();
    assert_eq!(subject["ban"]["id"], one["id"]);
}

#[test]
fn a_proxy_this_machine_and_everyone_cannot_be_banned() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    let mut refused = |body: Value, field: &str| {
        let answer = ban(client, &body);
        assert_eq!((answer.status, answer.json()["field"].as_str()), (400, Some(field)), "{body}: {}", answer.body);
    };
    for key in
        ["192.0.2.1", "192.0.0.0/16", "127.0.0.1", "::1", "0.0.0.0/0", "::/0", "10.0.0.0/7", "2000::/12", "x", " "]
    {
        refused(json!({"layer": "edge", "key": key, "reason": "r"}), "key");
    }
    refused(json!({"layer": "endpoint", "key": "GET:/", "reason": "r"}), "key");
    refused(json!({"layer": "user", "key": "u", "reason": " "}), "reason");
    refused(json!({"layer": "user", "key": "u"}), "reason");
    refused(json!({"layer": "user", "key": "u", "reason": "r", "durationSec": 0}), "durationSec");
    refused(json!({"layer": "nobody", "key": "u", "reason": "r"}), "layer");
    refused(json!({"layer": "user", "key": "u", "reason": "r", "forever": true}), "forever");
    assert_eq!(client.send("GET", "/v1/bans", &[], "").unwrap().json(), json!([]));
    assert_eq!(client.send("DELETE", "/v1/bans/abc", &[], "").unwrap().status, 400);
    assert_eq!(client.send("GET", "/v1/subjects/nobody/x", &[], "").unwrap().status, 400);
    assert_eq!(client.send("GET", "/v1/bans?sort=up", &[], "").unwrap().status, 400);
}

/// Every mistake in an import is an error about its field, and nothing is imported.
#[test]
fn a_bad_import_is_refused_with_the_field_or_the_index() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    let mut put = |origin: &str, body: &Value| {
        let path = format!("/v1/bans/sets/{origin}");
        client.send("PUT", &path, &[("content-type", "application/json")], &body.to_string()).unwrap()
    };
    let one = json!([{"key": "203.0.113.7"}]);
    let cases = [
        ("x", json!({"bans": one}), "reason"),
        ("x", json!({"reason": " ", "bans": one}), "reason"),
        ("x", json!({"reason": "r"}), "bans"),
        ("x", json!({"reason": "r", "bans": one, "until": 7, "durationSec": 7}), "until"),
        ("x", json!({"reason": "r", "bans": one, "durationSec": 315_360_001}), "durationSec"),
        ("x", json!({"reason": "r", "bans": one, "until": 99_999_999_999_u64}), "until"),
        ("x", json!({"reason": "r", "bans": [{"key": "203.0.113.7", "durationSec": 315_360_001}]}), "bans"),
        ("x", json!({"reason": "r", "bans": [{"key": "203.0.113.7", "layer": "planet"}]}), "bans.layer"),
        ("x", json!({"reason": "r", "bans": [{"key": "203.0.113.7", "ends": 7}]}), "bans.ends"),
        ("x", json!({"reason": "r", "bans": [{"key": "203.0.113.7", "layer": "endpoint"}]}), "bans"),
        ("a%20b", json!({"reason": "r", "bans": one}), "origin"),
    ];
    for (origin, body, field) in cases {
        let answer = put(origin, &body);
        assert_eq!((answer.status, &answer.json()["field"]), (400, &json!(field)), "{body}: {}", answer.body);
    }
    let answer = put("x", &json!({"reason": "r", "bans": [{"key": "203.0.113.7"}, {"key": "nonsense"}]}));
    assert_eq!((answer.status, &answer.json()["index"]), (400, &json!(1)), "{}", answer.body);
    assert!(answer.json()["message"].as_str().unwrap().contains("bans[1]: "), "{}", answer.body);
    assert_eq!(put("x", &json!({"reason": "r", "bans": [{"key": "u1", "layer": "user"}]})).status, 200);
    assert_eq!(client.send("GET", "/v1/bans", &[], "").unwrap().json().as_array().unwrap().len(), 1);
    for path in ["/v1/audit?before=x", "/v1/audit?limit=0", "/v1/locks?after=x", "/v1/locks?limit=10001"] {
        assert_eq!(client.send("GET", path, &[], "").unwrap().status, 400, "{path}");
    }
    for path in ["/v1/bans", "/v1/bans?layer=user", "/v1/bans?layer=planet&key=x", "/v1/bans?layer=edge&key=x"] {
        assert_eq!(client.send("DELETE", path, &[], "").unwrap().status, 400, "{path}");
    }
}

#[test]
fn a_read_only_token_changes_nothing_and_guessed_tokens_are_limited() {
    let folder = Scratch::folder();
    let variables = [
        ("THRESHOLD_TOKEN", "caller-token-0123"),
        ("THRESHOLD_ADMIN_TOKEN", "boss-token-012345"),
        ("THRESHOLD_READ_TOKEN", "eye-token-0123456"),
    ];
    let server = start(folder.path(), &variables);
    let client = &mut server.connect();
    let mut send = |method: &str, path: &str, token: &str, body: &str| {
        let token = format!("Bearer {token}");
        let fields = [("authorization", token.as_str()), ("content-type", "application/json")];
        client.send(method, path, &fields, body).unwrap()
    };
    let body = json!({"layer": "user", "key": "mallory", "reason": "fraud"}).to_string();
    assert_eq!(send("GET", "/v1/bans", "eye-token-0123456", "").status, 200);
    assert_eq!(send("GET", "/v1/subjects/user/mallory", "eye-token-0123456", "").status, 200);
    assert_eq!(send("POST", "/v1/bans", "eye-token-0123456", &body).status, 403);
    assert_eq!(send("DELETE", "/v1/subjects/user/mallory", "eye-token-0123456", "").status, 403);
    // A read-only token is not a caller's token, and no guess of one.
    for _ in 0..12 {
        let refused = send("POST", "/v1/check", "eye-token-0123456", "{}");
        assert!(refused.status == 401 && refused.body.contains("THRESHOLD_READ_TOKEN"), "{}", refused.body);
    }
    assert_eq!(send("GET", "/v1/usage?user=mallory", "eye-token-0123456", "").status, 200);
    let set = send("POST", "/v1/bans", "boss-token-012345", &body);
    assert_eq!(set.status, 200, "{}", set.body);
    let by = set.json()["by"].as_str().unwrap().to_owned();
    assert!(by.starts_with("operator #") && !by.contains("boss"), "{by}");
    // A missing token is not a guess.
    let without: Vec<u16> =
        (0..12).map(|_| server.connect().send("GET", "/v1/bans", &[], "").unwrap().status).collect();
    assert_eq!(without, [401; 12]);
    // Neither is a valid caller's token in the wrong place: operators at the same address are not blocked.
    let callers: Vec<u16> = (0..12).map(|_| send("GET", "/v1/bans", "caller-token-0123", "").status).collect();
    assert_eq!(callers, [401; 12]);
    assert_eq!(send("GET", "/v1/bans", "boss-token-012345", "").status, 200);
    let statuses: Vec<u16> = (0..12).map(|_| send("GET", "/v1/bans", "caller-token-0124", "").status).collect();
    assert!(statuses.starts_with(&[401; 10]) && statuses.ends_with(&[429]), "{statuses:?}");
    // The right token is refused too, or guessing could go on.
    let unheard = send("GET", "/v1/bans", "boss-token-012345", "");
    assert_eq!((unheard.status, unheard.header("retry-after")), (429, Some("6")));
    server.wait_for_log("operators' calls refused: too many wrong tokens");
    assert_eq!(send("POST", "/v1/check", "caller-token-0123", "{}").status, 200);
}

#[test]
fn a_subject_is_forgiven_and_an_account_pardoned() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    for _ in 0..7 {
        check(client, &json!({"user": "eve"}));
    }
    assert_eq!(check(client, &json!({"user": "eve"}))["banned"], true);
    assert_eq!(client.send("DELETE", "/v1/subjects/user/eve?reason=sorry", &[], "").unwrap().status, 200);
    assert_eq!(check(client, &json!({"user": "eve"}))["remaining"], 1);
    // Nothing about the subject is left, not even its name.
    let journal = rusqlite::Connection::open(folder.path().join("threshold.db")).unwrap();
    let left: i64 = journal.query_row("SELECT count(*) FROM record", [], |row| row.get(0)).unwrap();
    assert_eq!(left, 0);
    drop(journal);
    for number in 0..3 {
        let body = json!({"account": "ada", "ip": format!("203.0.113.{number}")}).to_string();
        let attempt = client.post("/v1/login/attempt", &body).unwrap().json();
        let body = json!({"attempt": attempt["attempt"], "success": false}).to_string();
        client.post("/v1/login/result", &body).unwrap();
    }
    let account = client.send("GET", "/v1/subjects/account/Ada", &[], "").unwrap().json();
    assert_eq!((&account["failures"], &account["atCeiling"]), (&json!(3), &json!(false)));
    assert!(account["lockedUntil"].is_u64(), "{account}");
    assert_eq!(client.send("DELETE", "/v1/subjects/account/Ada", &[], "").unwrap().status, 200);
    let account = client.send("GET", "/v1/subjects/account/ada", &[], "").unwrap().json();
    assert_eq!((&account["failures"], &account["lockedUntil"]), (&json!(0), &Value::Null));
}

/// CSRF: a page of another site can neither set nor read bans.
#[test]
fn a_page_of_another_site_cannot_make_operators_calls() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    let body = json!({"layer": "user", "key": "mallory", "reason": "fraud"}).to_string();
    let origin = ("origin", "https://evil.example");
    // A page on another port of the same machine may call the API, but not as an operator.
    for origin in [origin, ("origin", "http://localhost:3000")] {
        let json = ("content-type", "application/json");
        assert_eq!(client.send("POST", "/v1/bans", &[origin, json], &body).unwrap().status, 403);
        for (method, path) in [("GET", "/v1/bans"), ("DELETE", "/v1/subjects/user/eve")] {
            assert_eq!(client.send(method, path, &[origin], "").unwrap().status, 403);
        }
    }
    // An image or a link of such a page has no Origin, and could open all streams of events.
    for site in ["cross-site", "same-site", "nonsense"] {
        for (method, path) in [("GET", "/v1/events"), ("GET", "/v1/bans"), ("DELETE", "/v1/subjects/user/eve")] {
            let fields = [("sec-fetch-site", site), ("accept", "text/event-stream")];
            assert_eq!(client.send(method, path, &fields, "").unwrap().status, 403, "{method} {path} {site}");
        }
    }
    for site in ["same-origin", "none"] {
        assert_eq!(client.send("GET", "/v1/bans", &[("sec-fetch-site", site)], "").unwrap().status, 200, "{site}");
    }
    let local = [("origin", "http://localhost:3000"), ("content-type", "text/plain")];
    assert_eq!(client.send("POST", "/v1/bans", &local, &body).unwrap().status, 415);
    assert_eq!(client.send("GET", "/v1/bans", &[], "").unwrap().json(), json!([]));
}

/// A setting such as "ten times until Friday" takes effect at once, survives a kill and a reload, and ends by itself.
#[test]
fn a_setting_is_in_force_until_it_ends() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let mut put = |path: &str, body: Value| {
        let answer = client.send("PUT", path, &[("content-type", "application/json")], &body.to_string()).unwrap();
        (answer.status, answer.json())
    };
    let (status, given) = put("/v1/users/u1", json!({"times": 10, "until": now + 3_600, "reason": "a launch"}));
    assert_eq!((status, &given["times"], &given["until"]), (200, &json!(10), &json!(now + 3_600)), "{given}");
    put("/v1/users/u2", json!({"times": 10, "until": now + 2}));
    for (body, field) in [
        (json!({"times": 0}), "times"),
        (json!({"until": 7, "times": 2}), "until"),
        (json!({"tier": "gold"}), "tier"),
        (json!({"limits": {"requests": "5/h"}}), "limits.requests"),
        (json!({"reason": ""}), "reason"),
        (json!({"factor": 2}), "factor"),
    ] {
        let (status, told) = put("/v1/users/u3", body);
        assert_eq!((status, told["field"].as_str()), (400, Some(field)), "{told}");
    }
    // Refused changes are not in the audit. A call that waits for the disk waits for all earlier changes too.
    assert_eq!(server.connect().send("DELETE", "/v1/subjects/user/u3", &[], "").unwrap().status, 200);
    let audit = rusqlite::Connection::open(folder.path().join("threshold.db")).unwrap();
    let lines: Vec<String> = {
        let mut select = audit.prepare("SELECT about FROM audit ORDER BY id").unwrap();
        select.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    };
    assert_eq!(lines, ["user u1", "user u2", "user u3"]);
    drop(audit);
    let limit = |client: &mut Client<TcpStream>, user: &str| {
        let facts = json!({"user": user}).to_string();
        client.post("/v1/peek", &facts).unwrap().json()["limit"].as_u64().unwrap()
    };
    assert_eq!((limit(client, "u1"), limit(client, "u3")), (20, 2));
    server.signal("KILL");
    drop(server);
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    assert_eq!(limit(client, "u1"), 20);
    assert_eq!(client.send("GET", "/v1/users/u1", &[], "").unwrap().json()["reason"], "a launch");
    // The setting ends after two seconds: poll until it has.
    while limit(client, "u2") != 2 {}
    std::fs::write(folder.path().join("policy.toml"), POLICY.replace("2/h", "3/h")).unwrap();
    server.signal("HUP");
    server.wait_for_log("policy reloaded");
    assert_eq!((limit(client, "u1"), limit(client, "u2")), (30, 3));
    let fields = [("content-type", "application/json")];
    assert_eq!(client.send("PUT", "/v1/users/u1", &fields, "{}").unwrap().status, 200);
    assert_eq!(limit(client, "u1"), 3);
}

/// Each kind of change once, with its audit record: the action with the old and new state, the subject and the reason. `?`
/// stands for a time.
fn change_everything(client: &mut Client<TcpStream>) -> Vec<[&'static str; 3]> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let mut send = |method: &str, path: &str, body: Value| {
        let answer = client.send(method, path, &[("content-type", "application/json")], &body.to_string()).unwrap();
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        answer.json()
    };
    let first = json!({"layer": "edge", "key": "198.51.100.0/24", "reason": "scrapers", "durationSec": 60});
    send("POST", "/v1/bans", first.clone());
    let mut second = first;
    second["durationSec"] = Value::Null;
    let id = send("POST", "/v1/bans", second)["id"].as_str().unwrap().to_owned();
    send("DELETE", &format!("/v1/bans/{id}?reason=a+mistake"), Value::Null);
    send("PUT", "/v1/tenants/acme", json!({"tier": "oak", "limits": {"requests": "7/h"}, "reason": "a launch"}));
    send("PUT", "/v1/tenants/acme", json!({"tier": "oak", "times": 3, "until": now + 3_600}));
    send("PUT", "/v1/tenants/acme", json!({}));
    send("POST", "/v1/pause", json!({"layer": "user", "key": "eve", "seconds": 60}));
    let subject = send("GET", "/v1/subjects/user/eve", Value::Null);
    assert!((now + 60..now + 120).contains(&subject["pausedUntil"].as_u64().unwrap()), "{subject}");
    assert_eq!(send("POST", "/v1/pause", json!({"layer": "endpoint", "key": "x", "seconds": 60}))["ok"], false);
    send("DELETE", "/v1/subjects/user/eve?reason=sorry", Value::Null);
    assert_eq!(send("GET", "/v1/subjects/user/eve", Value::Null)["pausedUntil"], Value::Null);
    vec![
        ["ban: until ?", "edge 198.51.100.0/24", "scrapers"],
        ["ban: until ? -> for good", "edge 198.51.100.0/24", "scrapers"],
        ["lift: for good, by local: scrapers", "edge 198.51.100.0/24", "a mistake"],
        ["give: nothing -> tier oak, requests 7/h", "tenant acme", "a launch"],
        ["give: tier oak, requests 7/h -> tier oak, times 3, until ?", "tenant acme", ""],
        ["take-back: tier oak, times 3, until ? -> nothing", "tenant acme", ""],
        ["pause: 60 s, until ?", "user eve", ""],
        ["forgive: paused until ?", "user eve", "sorry"],
    ]
}

/// Replaces each time by `?`.
fn without_moments(text: &str) -> String {
    let is_moment =
        |word: &str| word.len() >= 20 && word.starts_with("20") && word.contains('T') && word.ends_with('Z');
    let words = text.split(' ').map(|word| {
        let bare = word.trim_end_matches(',');
        if is_moment(bare) { word.replace(bare, "?") } else { word.to_owned() }
    });
    words.collect::<Vec<_>>().join(" ")
}

const TIERS: &str = r#"
[identity]
default_tier = "seed"
[tiers.seed]
requests = "5/h"
[tiers.oak]
requests = "50/h"
[[rule]]
name = "tenant"
per = ["tenant"]
limit = "tier"
on_missing = "skip"
[[rule]]
name = "user"
per = ["user"]
limit = "100/h"
on_missing = "skip"
"#;

/// The audit once did not say what a setting was, and had no record of pauses.
#[test]
fn the_audit_has_the_old_and_the_new_state() {
    let folder = Scratch::folder();
    let (policy, db) = (folder.path().join("policy.toml"), folder.path().join("threshold.db"));
    std::fs::write(&policy, TIERS).unwrap();
    let server = Start { policy: Some(&policy), args: &["--db", db.to_str().unwrap()], ..Start::default() }.server();
    let expected = change_everything(&mut server.connect());
    let audit = rusqlite::Connection::open(&db).unwrap();
    let mut select = audit.prepare("SELECT who, action, about, why FROM audit ORDER BY id").unwrap();
    let read = |row: &rusqlite::Row<'_>| Ok([row.get::<_, String>(0)?, row.get(1)?, row.get(2)?, row.get(3)?]);
    let lines: Vec<[String; 4]> = select.query_map([], read).unwrap().map(Result::unwrap).collect();
    let told: Vec<[String; 3]> = lines
        .into_iter()
        .map(|[who, action, about, why]| {
            assert_eq!(who, "local");
            [without_moments(&action), about, why]
        })
        .collect();
    assert_eq!(told, expected);
}

/// Without a journal, the log has every change, with users and addresses redacted.
#[test]
fn without_a_journal_the_log_is_the_audit() {
    let policy = Scratch::file("policy.toml", TIERS);
    let server = Start { policy: Some(policy.path()), args: &["--log", "json"], ..Start::default() }.server();
    let expected = change_everything(&mut server.connect());
    server.signal("TERM");
    let (_, log) = server.wait();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let lines: Vec<Value> = lines.filter(|line| line["message"] == "operator change").collect();
    assert_eq!(lines.len(), expected.len(), "{log}");
    for (line, [action, about, why]) in lines.iter().zip(expected) {
        let field = |name: &str| line[name].as_str().unwrap().to_owned();
        assert_eq!((without_moments(&field("action")), field("why")), (action.to_owned(), why.to_owned()));
        let (layer, _) = about.split_once(' ').unwrap();
        let shown = field("about");
        let is_hidden = shown.starts_with(&format!("{layer} #")) && shown.len() == layer.len() + 18;
        assert_eq!((is_hidden, shown == about), (layer != "tenant", layer == "tenant"), "{line}");
    }
}

/// Every pause takes effect, but at most ten a second are recorded. The next record says how many were left out.
#[test]
fn pauses_do_not_fill_the_audit() {
    let policy = Scratch::file("policy.toml", TIERS);
    let server = Start { policy: Some(policy.path()), args: &["--log", "json"], ..Start::default() }.server();
    let mut client = server.connect();
    for number in 0..200 {
        let pause = json!({"layer": "user", "key": format!("u{number}"), "seconds": 60}).to_string();
        assert_eq!(client.post("/v1/pause", &pause).unwrap().json()["ok"], true);
    }
    let subject = client.send("GET", "/v1/subjects/user/u199", &[], "").unwrap().json();
    assert!(subject["pausedUntil"].is_u64(), "{subject}");
    server.signal("TERM");
    let (_, log) = server.wait();
    let written = log.lines().filter(|line| line.contains("pause: 60 s")).count();
    assert!((10..150).contains(&written), "{written}");
}

const SCOPED: &str = r#"
[identity]
user_scope = "tenant"
[login]
[[rule]]
name = "user"
per = ["user"]
limit = "2/h"
on_missing = "skip"
"#;

/// With `user_scope = "tenant"` every call names a user with its tenant. A bare name is refused with the expected form.
#[test]
fn users_of_tenants_are_named_with_their_tenant() {
    let folder = Scratch::folder();
    let (policy, db) = (folder.path().join("policy.toml"), folder.path().join("threshold.db"));
    std::fs::write(&policy, SCOPED).unwrap();
    let server = Start { policy: Some(&policy), args: &["--db", db.to_str().unwrap()], ..Start::default() }.server();
    let client = &mut server.connect();
    let mut call = |method: &str, path: &str, body: Value| {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        client.send(method, path, &[("Content-Type", "application/json")], &body).unwrap()
    };
    let calls = |name: &str, in_path: &str| {
        [
            ("POST", "/v1/bans".to_owned(), json!({"layer": "user", "key": name, "reason": "r"}), "key"),
            ("POST", "/v1/pause".to_owned(), json!({"layer": "user", "key": name, "seconds": 60}), "key"),
            ("GET", format!("/v1/subjects/user/{in_path}"), Value::Null, "key"),
            ("DELETE", format!("/v1/subjects/user/{in_path}"), Value::Null, "key"),
            ("GET", format!("/v1/subjects/account/{in_path}"), Value::Null, "key"),
            ("DELETE", format!("/v1/subjects/account/{in_path}"), Value::Null, "key"),
            ("GET", format!("/v1/users/{in_path}"), Value::Null, "id"),
            ("PUT", format!("/v1/users/{in_path}"), json!({"times": 2}), "id"),
        ]
    };
    for (method, path, body, field) in calls("u1", "u1") {
        let told = call(method, &path, body);
        assert_eq!((told.status, &told.json()["field"]), (400, &json!(field)), "{method} {path}");
        let message = told.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains("\"TENANT/u1\""), "{method} {path}: {message}");
    }
    // Every spelling of a name is accepted, and normalised in the answer.
    for (method, path, body, _) in calls("%61cme/u%31", "%2561cme%2Fu1") {
        let told = call(method, &path, body);
        assert_eq!(told.status, 200, "{method} {path}: {}", told.json());
    }
    let banned = call("GET", "/v1/bans", Value::Null).json();
    assert_eq!((&banned[0]["key"], &banned[1]), (&json!("acme/u1"), &Value::Null));
    let mut allowed = |tenant: &str| {
        let facts = json!({"tenant": tenant, "user": "u1"});
        call("POST", "/v1/check", facts).json()["allowed"].clone()
    };
    assert_eq!((allowed("acme"), allowed("beta")), (json!(false), json!(true)));
    let audit = rusqlite::Connection::open(&db).unwrap();
    let others: u32 = audit
        .query_row("SELECT count(*) FROM audit WHERE about NOT IN ('user acme/u1', 'account acme/u1')", [], |row| {
            row.get(0)
        })
        .unwrap();
    assert_eq!(others, 0);
}
