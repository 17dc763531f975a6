//! Tests what the dashboard calls: sessions, series, the policy and its drafts. `tests/page` drives the page itself in a browser.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::Answer;
use super::process::{Scratch, Server, Start};

const OPERATOR: &str = "boss-token-012345";
const READER: &str = "eyes-token-012345";
const POLICY: &str = "
[identity]
log_identifiers = true

[[rule]]
name = 'posts'
layer = 'user'
per = ['user']
limit = '2/h'
";

fn guarded(args: &[&str]) -> Server {
    let variables = &[("THRESHOLD_ADMIN_TOKEN", OPERATOR), ("THRESHOLD_READ_TOKEN", READER)];
    Start { args, variables, ..Start::default() }.server()
}

/// Signs in, and returns the cookie.
fn sign_in(server: &Server, token: &str) -> (Answer, String) {
    let body = json!({ "token": token }).to_string();
    let host = server.place.trim_start_matches("http://");
    let fields = [("host", host), ("content-type", "application/json")];
    let answer = send(server, "POST", "/v1/session", &fields, &body);
    let cookie = answer.header("set-cookie").map(|value| value.split(';').next().unwrap().to_owned());
    (answer, cookie.unwrap_or_default())
}

fn send(server: &Server, method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> Answer {
    server.connect().send(method, path, fields, body).unwrap()
}

/// Woken by leaving out the check of `Origin` in `authorize`, or `HttpOnly`.
#[test]
fn a_session_is_an_operators_token_that_only_pages_of_the_server_can_use() {
    let server = guarded(&[]);
    let before = send(&server, "GET", "/v1/session", &[], "").json();
    assert_eq!((&before["role"], &before["signIn"], &before["node"]), (&json!("none"), &json!(true), &json!("")));
    assert_eq!(send(&server, "GET", "/v1/stats", &[], "").status, 401);
    let (answer, cookie) = sign_in(&server, OPERATOR);
    assert_eq!((answer.status, &answer.json()["role"]), (200, &json!("operator")));
    let set = answer.header("set-cookie").unwrap();
    assert!(set.contains("HttpOnly") && set.contains("SameSite=Strict") && !set.contains(OPERATOR), "{set}");
    assert!(!set.contains("Secure"), "a browser would discard it: {set}");
    let body = json!({ "token": READER }).to_string();
    let host = server.place.trim_start_matches("http://").to_owned();
    let (host, origin) = (("host", host.as_str()), format!("https://{host}"));
    let fields = [host, ("origin", origin.as_str()), ("content-type", "application/json")];
    let proxied = send(&server, "POST", "/v1/session", &fields, &body);
    assert!(proxied.header("set-cookie").is_some_and(|set| set.ends_with("; Secure")), "{proxied:?}");
    let own = ("origin", server.place.as_str());
    let host = server.place.trim_start_matches("http://").to_owned();
    let signed = [("cookie", cookie.as_str()), ("host", host.as_str()), ("content-type", "application/json")];
    let with = |more: &[(&str, &str)], method: &str, path: &str, body: &str| {
        let fields: Vec<(&str, &str)> = signed.iter().chain(more).copied().collect();
        send(&server, method, path, &fields, body).status
    };
    let ban = json!({"layer": "edge", "key": "192.0.2.1", "reason": "test"}).to_string();
    assert_eq!(with(&[], "GET", "/v1/stats", ""), 200);
    // Eight cookies of the same name, which a page of another port had set, once hid it.
    let bogus = format!("{}=bogus; ", cookie.split('=').next().unwrap()).repeat(40);
    let among = bogus + &cookie;
    let hidden = [("cookie", among.as_str()), ("host", host.as_str())];
    assert_eq!(send(&server, "GET", "/v1/stats", &hidden, "").status, 200);
    assert_eq!(with(&[("sec-fetch-site", "cross-site")], "GET", "/v1/stats", ""), 403);
    assert_eq!(with(&[("sec-fetch-site", "same-site")], "GET", "/v1/events", ""), 403);
    assert_eq!(with(&[], "POST", "/v1/bans", &ban), 401, "a change without Origin does not come from a page");
    assert_eq!(with(&[("origin", "https://evil.example")], "POST", "/v1/bans", &ban), 403);
    assert_eq!(with(&[("origin", "null")], "POST", "/v1/bans", &ban), 403);
    assert_eq!(with(&[own], "POST", "/v1/bans", &ban), 200);
    let plain = [("cookie", cookie.as_str()), ("host", host.as_str()), ("content-type", "text/plain"), own];
    assert_eq!(send(&server, "POST", "/v1/bans", &plain, &ban).status, 415);
    assert_eq!(send(&server, "POST", "/v1/session", &[("content-type", "text/plain")], "{}").status, 415);
    assert_eq!(with(&[own], "DELETE", "/v1/session", ""), 200);
    assert_eq!(with(&[], "GET", "/v1/stats", ""), 401, "the session has ended");
    // A reader looks, and changes nothing.
    let (answer, cookie) = sign_in(&server, READER);
    assert_eq!(answer.json()["role"], "reader");
    let reader = [("cookie", cookie.as_str()), ("host", host.as_str()), ("content-type", "application/json"), own];
    assert_eq!(send(&server, "GET", "/v1/stats", &reader, "").status, 200);
    assert_eq!(send(&server, "POST", "/v1/bans", &reader, &ban).status, 403);
}

#[test]
fn tokens_cannot_be_guessed_by_signing_in() {
    let server = guarded(&[]);
    let statuses: Vec<u16> = (0..15).map(|_| sign_in(&server, "a-wrong-token-0123").0.status).collect();
    assert_eq!(statuses.first(), Some(&401));
    assert_eq!(statuses.last(), Some(&429), "{statuses:?}");
    assert_eq!(sign_in(&server, OPERATOR).0.status, 429, "also with the right one, for a while");
}

#[test]
fn a_server_without_tokens_needs_no_session() {
    let server = Start::default().server();
    let session = send(&server, "GET", "/v1/session", &[], "").json();
    assert_eq!(
        (&session["role"], &session["signIn"], &session["demo"]),
        (&json!("operator"), &json!(false), &json!(false))
    );
    let (answer, cookie) = sign_in(&server, "whatever-it-is-0123");
    assert_eq!((answer.status, cookie.as_str()), (200, ""));
}

/// The subject of a shadow ban was read from its text: a user named `victim,x` led to `victim`, and that of a tenant was not encoded.
///
/// Woken by leaving out `is_own`, or the encoding.
#[test]
fn a_shadow_ban_leads_to_its_own_subject() {
    let rule = "[[rule]]\nname = 'r'\nlimit = '1/h'\nladder = 'quiet'\nstrike = 'request'\n[ladders.quiet]\nrungs = ['shadow']\n";
    let check = |identity: &str, per: &str, tenant: &str, user: &str| {
        let identity = format!("[identity]\nlog_identifiers = true\n{identity}\n");
        let policy = Scratch::file(
            "policy.toml",
            &format!("{identity}{}", rule.replace("limit", &format!("per = {per}\nlimit"))),
        );
        let server = Start { policy: Some(policy.path()), ..Start::default() }.server();
        let body = json!({"ip": "203.0.113.7", "tenant": tenant, "user": user}).to_string();
        (0..2).for_each(|_| assert_eq!(server.connect().post("/v1/check", &body).unwrap().status, 200));
        let bans = send(&server, "GET", "/v1/shadow-bans", &[], "").json();
        assert_eq!(bans.as_array().map(Vec::len), Some(1), "{bans}");
        bans[0]["key"].clone()
    };
    let scoped = "user_scope = 'tenant'";
    assert_eq!(check("", "['user']", "acme", "victim,x"), "victim,x");
    assert_eq!(check("", "['user']", "acme", "victim,user=b"), "victim,user=b");
    assert_eq!(check("", "['tenant']", "acme,user=victim", "u"), "acme,user=victim");
    assert_eq!(check("", "['tenant', 'user']", "acme", "u"), Value::Null, "two names together are no user");
    assert_eq!(check(scoped, "['tenant', 'user']", "a/b", "c%40d,user=e"), "a%2Fb/c%2540d,user=e");
    assert_eq!(check(scoped, "['tenant']", "acme,user=victim", "u"), "acme,user=victim");
}

/// Woken by leaving out the content security policy.
#[test]
fn the_page_is_served_with_a_strict_policy_and_without_data() {
    let server = guarded(&[]);
    let page = send(&server, "GET", "/", &[], "");
    assert_eq!(page.status, 200);
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self'"), "{policy}");
    assert!(policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    let script = send(&server, "GET", "/page/main.js", &[], "");
    assert_eq!((script.status, script.header("content-type")), (200, Some("text/javascript; charset=utf-8")));
    for missing in ["/page/none.js", "/page/..%2fmain.rs", "/page/", "/page/%00"] {
        assert_eq!(send(&server, "GET", missing, &[], "").status, 404, "{missing}");
    }
}

/// Woken by leaving out `add_to_series`, or by sending totals in place of a second's decisions.
#[test]
fn decisions_appear_in_the_series_and_in_its_stream() {
    let (server, _policy) = Server::with(POLICY);
    let stream = server.stream();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    std::io::Write::write_all(
        &mut &stream,
        b"GET /v1/series HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n",
    )
    .unwrap();
    let mut client = server.connect();
    let until = Instant::now() + Duration::from_secs(20);
    let (mut allowed, mut denied) = (0, 0);
    let mut sent = 0_u64;
    while (allowed, denied) != (2, 2) {
        assert!(Instant::now() < until, "{allowed} allowed, {denied} denied");
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some(sample) = line.strip_prefix("data: ") else { continue };
        let sample: Value = serde_json::from_str(sample).unwrap();
        allowed += sample["decisions"]["allow"].as_u64().unwrap();
        denied += sample["decisions"]["deny"].as_u64().unwrap();
        // After the first second, of which all others are the difference.
        while sent < 4 {
            client.post("/v1/check", r#"{"user":"u1"}"#).unwrap();
            sent += 1;
        }
    }
    let series = send(&server, "GET", "/v1/series?period=h", &[], "").json();
    let sum = |values: &Value| values.as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).sum::<u64>();
    assert_eq!((sum(&series["decisions"]["allow"]), sum(&series["blocks"]["user"])), (2, 2), "{series}");
    assert_eq!(series["stepSec"], 10);
    assert_eq!(send(&server, "GET", "/v1/series?period=week", &[], "").status, 400);
}

/// Woken by leaving out `usable`, the comparison with `basedOn`, or the audit.
#[test]
fn a_draft_is_checked_rehearsed_and_saved() {
    let file = Scratch::file("policy.toml", POLICY);
    let folder = Scratch::folder();
    let db = folder.path().join("t.db");
    let args = [file.path().to_str().unwrap(), "--db", db.to_str().unwrap(), "--allow-edit"];
    let server = Start { args: &args, ..Start::default() }.server();
    let mut client = server.connect();
    for _ in 0..4 {
        client.post("/v1/check", r#"{"user":"u1"}"#).unwrap();
    }
    let policy = client.send("GET", "/v1/policy", &[], "").unwrap().json();
    assert_eq!((&policy["text"], &policy["editable"], &policy["recorded"]), (&json!(POLICY), &json!(true), &json!(4)));
    let rule = json!({"name": "posts", "layer": "user", "mode": "enforce", "limit": "2/h", "per": "user", "line": 6,
        "hits": 4, "near": 3, "blocked": 2, "observed": 0});
    assert_eq!(policy["rules"], json!([rule]));
    let wider = POLICY.replace("2/h", "3/h");
    let broken = POLICY.replace("2/h", "2/fortnight");
    let findings = client.post("/v1/policy/lint", &json!({"text": broken}).to_string()).unwrap().json();
    assert_eq!((&findings["findings"][0]["level"], &findings["findings"][0]["line"]), (&json!("error"), &json!(9)));
    let rehearsal = client.post("/v1/policy/rehearse", &json!({"text": wider}).to_string()).unwrap().json();
    assert_eq!(
        (&rehearsal["requests"], &rehearsal["newlyAllowed"], &rehearsal["newlyDenied"]),
        (&json!(4), &json!(1), &json!(0))
    );
    assert_eq!(rehearsal["rules"], json!([{"name": "posts", "deniedNow": 2, "deniedByDraft": 1}]));
    let save = |client: &mut super::client::Client<_>, text: &str, based_on: &str| {
        let body = json!({"text": text, "basedOn": based_on, "reason": "customers complain"}).to_string();
        client.send("PUT", "/v1/policy", &[("content-type", "application/json")], &body).unwrap().status
    };
    assert_eq!(save(&mut client, &broken, POLICY), 422);
    assert_eq!(save(&mut client, &wider, "something else"), 409);
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), POLICY);
    // What a reload would refuse, and the next start with it.
    assert_eq!(save(&mut client, "", POLICY), 422);
    assert_eq!(
        save(&mut client, &format!("[identity.jwt]\nkey_file = '/nonexistent'\nalg = 'HS256'\n{POLICY}"), POLICY),
        422
    );
    // A draft could name a rule after a secret, and show it.
    let variable = POLICY.replace("'posts'", "\"${PATH:-x}\"");
    assert_eq!(save(&mut client, &variable, POLICY), 422);
    let rehearsed = client.post("/v1/policy/rehearse", &json!({"text": variable}).to_string()).unwrap();
    assert_eq!(rehearsed.status, 422, "{rehearsed:?}");
    assert_eq!(client.send("GET", "/v1/audit", &[], "").unwrap().json(), json!([]), "nothing was saved");
    assert_eq!(save(&mut client, &wider, POLICY), 200);
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), wider);
    server.wait_for_log("policy reloaded");
    let audit = client.send("GET", "/v1/audit", &[], "").unwrap().json();
    assert_eq!(
        (&audit[0]["action"], &audit[0]["why"]),
        (&json!("save the policy: rule posts: limit 2/h -> 3/h"), &json!("customers complain"))
    );
    assert_eq!(client.post("/v1/check", r#"{"user":"u1"}"#).unwrap().json()["allowed"], true, "it is in force");
}

#[test]
fn without_allow_edit_nothing_is_saved() {
    let (server, file) = Server::with(POLICY);
    let body = json!({"text": POLICY.replace("2/h", "9/h"), "basedOn": POLICY, "reason": "r"}).to_string();
    let answer = send(&server, "PUT", "/v1/policy", &[("content-type", "application/json")], &body);
    assert_eq!((answer.status, &answer.json()["error"]), (404, &json!("not_editable")));
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), POLICY);
}

/// Woken by leaving the subject out of `ActivePenalties::strike`, or by leaving out `forgive`.
#[test]
fn a_shadow_ban_is_listed_until_it_is_forgiven() {
    let policy = "[identity]\nlog_identifiers = true\n[ladders.l]\nrungs = ['shadow']\n[[rule]]\nname = 'posts'\nlayer = 'user'\nper = \
                  ['user']\nlimit = '1/h'\nladder = 'l'\n";
    let (server, _policy) = Server::with(policy);
    let mut client = server.connect();
    for _ in 0..2 {
        client.post("/v1/check", r#"{"user":"u1"}"#).unwrap();
    }
    let listed = client.send("GET", "/v1/shadow-bans", &[], "").unwrap().json();
    assert_eq!(
        (&listed[0]["subject"], &listed[0]["layer"], &listed[0]["key"]),
        (&json!("user=u1"), &json!("user"), &json!("u1"))
    );
    client.send("DELETE", "/v1/subjects/user/u1", &[], "").unwrap();
    assert_eq!(client.send("GET", "/v1/shadow-bans", &[], "").unwrap().json(), json!([]));
}

/// The demo blocks its scraper within a minute, and says that it is a demo. It opens nothing but its page: a server may
/// already run on the default addresses.
///
/// Woken by: leaving out `--no-grpc` or `--no-resp`, whether or not their addresses are in use.
#[test]
fn the_demo_shows_blocked_traffic_within_a_minute() {
    let folder = Scratch::folder();
    let log = folder.path().join("log");
    let mut demo = Command::new(env!("CARGO_BIN_EXE_threshold"))
        .args(["demo", "--http", "127.0.0.1:0"])
        .env_clear()
        .env("THRESHOLD_LOG", "warn")
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let lines = BufReader::new(demo.stdout.take().unwrap()).lines().map_while(Result::ok);
    let banner: Vec<String> = lines.take_while(|line| !line.contains("tokens ")).collect();
    let at = |name: &str| banner.iter().find_map(|line| line.trim().strip_prefix(name)).map(str::trim);
    assert_eq!((at("grpc "), at("resp ")), (None, None));
    let place = at("http ").unwrap().strip_prefix("http://").unwrap();
    let mut client = super::client::Client::new(TcpStream::connect(place).unwrap());
    assert_eq!(client.send("GET", "/v1/session", &[], "").unwrap().json()["demo"], true);
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let stats = client.send("GET", "/v1/stats", &[], "").unwrap().json();
        let blocked = ["edgeBlocks", "tenantBlocks", "otherBlocks"].map(|name| stats[name].as_u64().unwrap());
        if blocked.iter().all(|count| *count > 0) {
            break;
        }
        assert!(Instant::now() < until, "{stats}");
        std::thread::sleep(Duration::from_millis(500));
    }
    demo.kill().unwrap();
    demo.wait().unwrap();
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(!log.contains("--grpc") && !log.contains("--resp"), "{log}");
}

/// Woken by leaving out a field of the line, or the filter.
#[test]
fn tail_prints_events_as_they_come() {
    let (server, _policy) = Server::with(POLICY);
    let mut tail = Command::new(env!("CARGO_BIN_EXE_threshold"))
        .args(["tail", "userId=u1", "--server", &server.place])
        .env_clear()
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(tail.stdout.take().unwrap()).lines().map_while(Result::ok);
    let (sender, stopped) = std::sync::mpsc::channel::<()>();
    let place = server.stream().peer_addr().unwrap();
    // Until the first line: the stream may begin after the first events.
    let asking = std::thread::spawn(move || {
        let mut client = super::client::Client::new(TcpStream::connect(place).unwrap());
        while stopped.recv_timeout(Duration::from_millis(100)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            for user in ["u1", "u2"] {
                client.post("/v1/check", &json!({ "user": user }).to_string()).unwrap();
            }
        }
    });
    let line = lines.next().unwrap();
    drop(sender);
    asking.join().unwrap();
    tail.kill().unwrap();
    tail.wait().unwrap();
    assert!(
        line.contains("deny") && line.contains("posts") && line.contains("user u1") && line.contains("trace "),
        "{line}"
    );
}

/// Woken by leaving out any of these checks.
#[test]
fn the_doctor_names_what_should_be_changed() {
    let policy = Scratch::file(
        "policy.toml",
        "[identity]\nclient_ip = 'x-forwarded-for'\ntrusted_proxies = ['192.0.2.1/32']\n\
         [memory]\nmax_keys = 1000\n[[rule]]\nname = 'address'\nlayer = 'edge'\nper = ['ip']\nlimit = '100/min'\n",
    );
    let server = Start { policy: Some(policy.path()), ..Start::default() }.server();
    let examine = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
        command.args(["doctor", "--server", &server.place]).args(more);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, text) = examine(&[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("warning  disk      there is no journal"), "{text}");
    for check in ["clock", "secret", "versions", "health", "proxies", "store", "tables", "signals", "routes"] {
        assert!(text.contains(&format!("  ok       {check}\n")), "{check}\n{text}");
    }
    // A proxy that is missing in trusted_proxies, a table that is nearly full, and a path that only the limit by address covers.
    send(&server, "GET", "/auth", &[("x-forwarded-for", "203.0.113.7")], "");
    for number in 0..900 {
        let ip = format!("10.0.{}.{}", number / 256, number % 256);
        let request = json!({"ip": ip, "method": "GET", "path": "/reports/2026/all"}).to_string();
        server.connect().post("/v1/check", &request).unwrap();
    }
    let (_, text) = examine(&[]);
    for found in [
        "error    proxies   127.0.0.1 asks /auth and is not in trusted_proxies",
        "add \"127.0.0.1/32\" to trusted_proxies",
        "warning  tables    ",
        "warning  routes    900 requests to GET:/reports/… in the last hour met no rule but those of their address",
    ] {
        assert!(text.contains(found), "{found}\n{text}");
    }
    // Another server with another policy.
    let other = Start::default().server();
    let (_, text) = examine(&[&other.place, "--json"]);
    let answer: Value = serde_json::from_str(&text).unwrap();
    let findings = answer[1]["diagnosis"]["findings"].as_array().unwrap();
    assert!(findings.iter().any(|one| one["check"] == "versions"), "{text}");
    assert_eq!(answer[0]["server"], json!(server.place));
}

/// Woken by comparing the file outside of the turn: several drafts of one text were saved, and all but one lost.
#[test]
fn of_two_drafts_of_one_text_only_one_is_saved() {
    let file = Scratch::file("policy.toml", POLICY);
    let folder = Scratch::folder();
    let journal = folder.path().join("t.db");
    let args = ["--allow-edit", "--db", journal.to_str().unwrap()];
    let server = Start { policy: Some(file.path()), args: &args, ..Start::default() }.server();
    let saved: Vec<u16> = std::thread::scope(|scope| {
        let savers: Vec<_> = (3..11)
            .map(|limit| {
                let body =
                    json!({"text": POLICY.replace("2/h", &format!("{limit}/h")), "basedOn": POLICY, "reason": "race"});
                let mut client = server.connect();
                scope.spawn(move || {
                    let fields = [("content-type", "application/json")];
                    client.send("PUT", "/v1/policy", &fields, &body.to_string()).unwrap().status
                })
            })
            .collect();
        savers.into_iter().map(|saver| saver.join().unwrap()).collect()
    });
    assert_eq!(saved.iter().filter(|status| **status == 200).count(), 1, "{saved:?}");
    assert!(saved.iter().all(|status| matches!(status, 200 | 409)), "{saved:?}");
    let audit = send(&server, "GET", "/v1/audit", &[], "").json();
    assert_eq!(audit.as_array().unwrap().len(), 1, "{audit}");
}

/// Returns the bytes of memory that a server has.
fn resident(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// With a read-only token, 165 drafts read the token of a reset from a recorded path, and then the address of its client.
///
/// Woken by letting readers rehearse.
#[test]
fn a_read_only_token_checks_drafts_and_rehearses_none() {
    let server = guarded(&[]);
    let body = json!({ "text": POLICY }).to_string();
    let status = |token: &str, path: &str| {
        let bearer = format!("Bearer {token}");
        let fields = [("authorization", bearer.as_str()), ("content-type", "application/json")];
        send(&server, "POST", path, &fields, &body).status
    };
    assert_eq!((status(READER, "/v1/policy/lint"), status(READER, "/v1/policy/rehearse")), (200, 403));
    assert_eq!((status(OPERATOR, "/v1/policy/lint"), status(OPERATOR, "/v1/policy/rehearse")), (200, 200));
}

/// Checking a draft of 22 KB took 98 s, any number of them waited, and nobody saw or saved the policy meanwhile.
///
/// Woken by leaving out the places of `Turns`, by one queue for all, or by a review without a bound.
#[test]
fn drafts_of_a_reader_take_bounded_work_and_memory_and_keep_no_operator_waiting() {
    let file = Scratch::file("policy.toml", POLICY);
    let variables = &[("THRESHOLD_ADMIN_TOKEN", OPERATOR), ("THRESHOLD_READ_TOKEN", READER)];
    let server = Start { policy: Some(file.path()), args: &["--allow-edit"], variables, ..Start::default() }.server();
    let rule = |number: usize| {
        let path = format!("/{}{number}", "**a*b".repeat(30));
        format!("[[rule]]\nname='r{number}'\nper=['ip']\nlimit='{}/h'\nmatch={{path='{path}'}}\n", number + 5)
    };
    let heavy: String = (0..900).map(rule).collect();
    assert!(heavy.len() < 256 << 10, "{}", heavy.len());
    let heavy = json!({ "text": heavy }).to_string();
    let (reader, operator) = (format!("Bearer {READER}"), format!("Bearer {OPERATOR}"));
    let reader = [("authorization", reader.as_str()), ("content-type", "application/json")];
    let operator = [("authorization", operator.as_str()), ("content-type", "application/json")];
    assert_eq!(send(&server, "GET", "/v1/policy", &operator, "").status, 200);
    let before = resident(&server);
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let asking = (0..40).map(|_| {
            let mut client = server.connect();
            let (reader, heavy) = (&reader, &heavy);
            scope.spawn(move || client.send("POST", "/v1/policy/lint", reader, heavy).unwrap())
        });
        let asking: Vec<_> = asking.collect();
        // Meanwhile an operator sees the policy, checks a draft and saves it.
        let shown = send(&server, "GET", "/v1/policy", &operator, "").json();
        let draft = json!({ "text": POLICY }).to_string();
        assert_eq!(send(&server, "POST", "/v1/policy/lint", &operator, &draft).status, 200);
        let new =
            json!({ "text": POLICY.replace("2/h", "3/h"), "basedOn": shown["text"], "reason": "test" }).to_string();
        assert_eq!(send(&server, "PUT", "/v1/policy", &operator, &new).status, 200);
        asking.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let grown = resident(&server).saturating_sub(before);
    assert!(grown < 100 << 20, "{grown} bytes");
    let (done, refused): (Vec<&Answer>, Vec<&Answer>) = answers.iter().partition(|answer| answer.status == 200);
    assert!(done.len() >= 8 && !refused.is_empty(), "{} and {}", done.len(), refused.len());
    for answer in done {
        assert!(answer.body.contains("review-incomplete"), "{}", answer.body);
    }
    for answer in refused {
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{}", answer.body);
    }
    let large = json!({ "text": "#".repeat((256 << 10) + 1) }).to_string();
    assert_eq!(send(&server, "POST", "/v1/policy/lint", &reader, &large).status, 413);
}

/// Woken by running the check on a thread that serves requests, or by answering with every finding.
#[test]
fn a_draft_of_errors_takes_bounded_memory() {
    let server = Start::default().server();
    let text = "= \n".repeat(2_000);
    let answer = server.connect().post("/v1/policy/lint", &json!({ "text": text }).to_string()).unwrap();
    let findings = answer.json()["findings"].as_array().unwrap().len();
    assert_eq!((answer.status, findings), (200, 100));
}

/// Woken by leaving out `session::lasts`.
#[test]
fn signing_out_ends_the_streams_of_a_session() {
    let server = guarded(&[]);
    let (_, cookie) = sign_in(&server, OPERATOR);
    let host = server.place.trim_start_matches("http://").to_owned();
    let signed = [("cookie", cookie.as_str()), ("host", host.as_str())];
    let mut stream = TcpStream::connect(&host).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let head =
        format!("GET /v1/series HTTP/1.1\r\nhost: {host}\r\ncookie: {cookie}\r\naccept: text/event-stream\r\n\r\n");
    std::io::Write::write_all(&mut stream, head.as_bytes()).unwrap();
    let mut lines = BufReader::new(stream).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("data: ")));
    let fields: Vec<(&str, &str)> = signed
        .iter()
        .copied()
        .chain([("origin", server.place.as_str()), ("content-type", "application/json")])
        .collect();
    assert_eq!(send(&server, "DELETE", "/v1/session", &fields, "").status, 200);
    // The last chunk of the body.
    assert!(lines.any(|line| line.unwrap() == "0"));
}

/// Opens a stream with a token. Returns the status line, and the connection, which keeps the stream open.
fn open_stream(server: &Server, path: &str, token: &str) -> (String, TcpStream) {
    let mut stream = server.stream();
    let head = format!(
        "GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\naccept: text/event-stream\r\n\r\n"
    );
    std::io::Write::write_all(&mut stream, head.as_bytes()).unwrap();
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    (line, stream)
}

/// A reader could once take all places, so that an operator's page showed nothing in an attack.
///
/// Woken by taking no place of `free_for_readers`, and by a reader's place that stays taken.
#[test]
fn readers_leave_half_of_the_streams_to_operators() {
    let server = guarded(&[]);
    for (path, most) in [("/v1/events", 16), ("/v1/series", 32)] {
        let open = |token| {
            let (line, stream) = open_stream(&server, path, token);
            line.starts_with("HTTP/1.1 200").then_some(stream)
        };
        let mut streams: Vec<_> = (0..most).map_while(|_| open(READER)).collect();
        assert_eq!(streams.len(), most / 2, "{path}");
        streams.extend((0..most).map_while(|_| open(OPERATOR)));
        assert_eq!(streams.len(), most, "{path}");
        // The server notices that the client has left, and there is room again.
        drop(streams.remove(0));
        while open(READER).is_none() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
