//! Tests that `threshold why` says what stopped a request, from the event that a real server has recorded.

use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::Client;
use super::process::{PATIENCE, Scratch, Server, Start};
use super::redis_process::RedisServer;

const POLICY: &str = r#"
[identity]
log_identifiers = true

[lists]
deny = ["user:mallory"]

[login]
locks = { 2 = "1h" }
ip = "3/5min"

[[rule]]
name = "posts"
layer = "user"
per = ["user"]
match = { method = "POST", path = "/api/posts/*" }
limit = "1/h"
algorithm = "fixed-window"
anchor = "first"

[[rule]]
name = "watched"
layer = "tenant"
mode = "observe"
per = ["tenant"]
limit = "1000/h"
on_missing = "skip"

[[rule]]
name = "struck"
layer = "user"
per = ["user"]
match = { path = "/struck" }
limit = "1/h"
ladder = "quick"
strike = "request"

[ladders.quick]
rungs = ["warn", "cooldown 24h"]
decay = "2h"

[[rule]]
name = "harsh"
layer = "edge"
per = ["ip"]
match = { path = "/harsh" }
limit = "1/h"
ladder = "harsh"
ban_shared = true
strike = "request"

[ladders.harsh]
rungs = ["ban 24h"]

[[rule]]
name = "closed"
layer = "user"
per = ["user"]
match = { path = "/closed" }
deny = true
"#;

fn why(server: &Server, trace: &str) -> String {
    let (code, text) = why_with(server, &[trace]);
    assert_eq!(code, 0, "{text}");
    text
}

fn why_with(server: &Server, args: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_threshold"))
        .args(["why", "--server", &server.place])
        .args(args)
        .env_clear()
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

fn check(client: &mut Client<TcpStream>, body: &Value) -> Value {
    client.post("/v1/check", &body.to_string()).unwrap().json()
}

/// Sends a request that must be denied, and returns its trace id.
#[track_caller]
fn denied(client: &mut Client<TcpStream>, body: &Value) -> String {
    let told = check(client, body);
    assert_eq!(told["allowed"], false, "{told}");
    told["traceId"].as_str().unwrap().to_owned()
}

#[track_caller]
fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

/// Returns the only event with a trace id.
fn event(client: &mut Client<TcpStream>, trace: &str) -> Value {
    let found = client.send("GET", &format!("/v1/events?traceId={trace}"), &[], "").unwrap().json();
    let found = found["events"].as_array().unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

/// A gateway sent no tier, or `Pro` for `pro`: every request was admitted, 50 of 50 at 3 a minute, and nothing said so.
///
/// Woken by: `NoLimit::Unlimited` for an unknown tier in `TiersInForce::limit`.
#[test]
fn a_request_without_a_tier_of_the_policy_is_denied_counted_recorded_and_explained() {
    let (server, _file) =
        Server::with("[tiers.pro]\nrequests = '3/min'\n[[rule]]\nname = 'plan'\nper = ['tenant']\nlimit = 'tier'\n");
    let client = &mut server.connect();
    for tier in [Value::Null, json!("Pro"), json!("mahogany")] {
        let request = json!({"tenant": "acme", "tier": tier});
        let trace = denied(client, &request);
        let recorded = event(client, &trace);
        let (cause, limits) = (&recorded["cause"], recorded["limits"].as_array().unwrap().len());
        assert_eq!((cause, &recorded["rule"], limits), (&json!("missing"), &json!("plan"), 1), "{recorded}");
        has(&why(&server, &trace), &["It was denied by the rule plan (layer tenant): it lacks", "default_tier"]);
        let explained = client.post("/v1/explain", &request.to_string()).unwrap().json();
        let rule = &explained["rules"][0];
        assert_eq!(
            (&rule["matched"], &rule["binding"], &rule["limit"]),
            (&json!(true), &json!(true), &json!(0)),
            "{rule}"
        );
        assert_eq!(rule["why"], "no tier of the policy is given, and the rule denies such requests");
    }
    let metrics = client.send("GET", "/metrics", &[], "").unwrap().body;
    has(
        &metrics,
        &[
            r#"threshold_decisions_total{layer="tenant",rule="plan",verdict="deny"} 3"#,
            r#"threshold_blocks_total{layer="tenant"} 3"#,
        ],
    );
    let set = client.send("PUT", "/v1/tenants/acme", &[], r#"{"tier": "Pro"}"#).unwrap();
    assert_eq!((set.status, &set.json()["field"]), (400, &json!("tier")), "{}", set.body);
    assert_eq!(client.send("PUT", "/v1/tenants/acme", &[], r#"{"tier": "pro"}"#).unwrap().status, 200);
    assert_eq!(check(client, &json!({"tenant": "acme"}))["remaining"], 2);
}

/// `why` said "0 per 0 µs", and that the cost was more than the limit.
///
/// Woken by: leaving out `denies_all` in either place.
#[test]
fn a_rule_that_denies_has_no_figures() {
    let (server, _file) = Server::with(POLICY);
    let trace = denied(&mut server.connect(), &json!({"user": "u1", "path": "/closed"}));
    let text = why(&server, &trace);
    has(&text, &["It was denied by the rule closed (layer user).", "The rule denies every request that it matches"]);
    let row = text.lines().find(|line| line.starts_with("closed")).unwrap();
    assert!(row.ends_with("denies all") && !text.contains("µs") && !text.contains("forgive"), "{text}");
}

#[test]
fn why_explains_a_past_denial_by_its_trace_id() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let post = json!({"user": "u1", "tenant": "acme", "ip": "203.0.113.7", "method": "POST", "path": "/api/posts/17"});
    assert_eq!(check(client, &post)["allowed"], true);
    let told = check(client, &post);
    let trace = told["traceId"].as_str().unwrap();
    let text = why(&server, trace);
    let reset = jiff::Timestamp::from_second(told["resetAt"].as_i64().unwrap()).unwrap();
    let wait = told["retryAfter"].as_u64().unwrap();
    has(
        &text,
        &[
            "POST:/api/posts/*, user u1, tenant acme, address 203.0.113.7\n",
            &format!(", trace {trace}\n"),
            "It was denied by the rule posts (layer user).\n",
            // It is still to come.
            &format!(
                "Unless more was charged or a penalty began since, the same request fits after {wait} s, at {reset}.\n"
            ),
            "threshold subject user u1\n",
        ],
    );
    let row =
        |rule: &str| text.lines().find(|line| line.starts_with(rule)).unwrap().split_whitespace().collect::<Vec<_>>();
    let reset = reset.to_string();
    assert_eq!(row("posts"), ["posts", "user", "enforce", "no", "0", "1", reset.as_str(), "1", "per", "1", "h"]);
    assert_eq!(row("watched")[..5], ["watched", "tenant", "observe", "yes", "999"]);
    let (code, told) = why_with(&server, &["--json", trace]);
    assert_eq!((code, &serde_json::from_str::<Value>(&told).unwrap()[0]["cause"]), (0, &json!("limit")));
    let (code, told) = why_with(&server, &["00000000000000000000000000000000"]);
    assert!(code == 1 && told.starts_with("no event has this trace id\n") && told.contains("shadow banned"), "{told}");
    let (code, told) = why_with(&server, &["nothing"]);
    assert!(code != 0 && told.contains("32 hexadecimal digits"), "{told}");
}

/// A customer complains of slow answers: the trace id leads to the shadow ban, of which no answer says anything.
///
/// Woken by leaving the verdict `slow` out of either sentence.
#[test]
fn a_delayed_request_is_told_with_the_shadow_ban_behind_it() {
    let policy = "[ladders.quiet]\nrungs = ['shadow']\n[[rule]]\nname = 'posts'\nper = ['user']\nlimit = '1/h'\nladder = 'quiet'\n\
                  match = { path = '/posts' }\n[[rule]]\nname = 'all'\nper = ['user']\nlimit = '1000/h'\n\
                  [identity]\nlog_identifiers = true";
    let file = Scratch::file("policy.toml", policy);
    let args = ["--events-sample", "1"];
    let server = Start { policy: Some(file.path()), args: &args, ..Start::default() }.server();
    let client = &mut server.connect();
    for _ in 0..2 {
        check(client, &json!({"user": "ada", "path": "/posts"}));
    }
    let told = check(client, &json!({"user": "ada", "path": "/"}));
    assert_eq!((&told["allowed"], &told["verdict"]), (&json!(true), &json!("slow")), "{told}");
    let text = why(&server, told["traceId"].as_str().unwrap());
    has(
        &text,
        &["It was allowed and delayed, because its caller was shadow banned.\n", "threshold subject user ada\n"],
    );
}

/// A rule of the layer `endpoint` may count users, and one of `global` counts nobody by name.
///
/// Woken by looking up the address of every layer but `user` and `tenant`, as it was.
#[test]
fn the_subject_to_look_up_is_the_one_that_may_be_counted() {
    let (server, _file) = Server::with(
        "[identity]\nlog_identifiers = true\n\
         [[rule]]\nname = 'export'\nlayer = 'endpoint'\nper = ['user']\nlimit = '1/h'\nmatch = { path = '/export' }\n\
         [[rule]]\nname = 'total'\nlayer = 'global'\nper = []\nlimit = '1/h'\nmatch = { path = '/total' }",
    );
    let client = &mut server.connect();
    let mut second = |path: &str| {
        let body = json!({"user": "ada", "ip": "203.0.113.7", "path": path});
        check(client, &body);
        why(&server, &denied(client, &body))
    };
    has(
        &second("/export"),
        &["threshold subject user ada\nthreshold subject edge 203.0.113.7\n    shows its state now"],
    );
    let told = second("/total");
    has(&told, &["All callers share the budget of this rule.\n"]);
    assert!(!told.contains("threshold subject"), "{told}");
}

/// What is over is told as past. The event is a report, so that it can be of last year.
#[test]
fn what_is_over_is_told_as_past() {
    let file = Scratch::file("policy.toml", POLICY);
    // Events that are older than the default are deleted, once a minute.
    let args = ["--events-keep", "3650day"];
    let server = Start { policy: Some(file.path()), args: &args, ..Start::default() }.server();
    let client = &mut server.connect();
    let mut report = |trace: &str, more: &Value| {
        let mut event = json!({"id": format!("{}-0000-4000-8000-000000000000", &trace[..8]), "at": 1_767_225_600_000_u64,
            "blocked": true, "layer": "user", "userId": "u1", "traceId": trace});
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let told = client.post("/v1/events", &json!([event]).to_string()).unwrap();
        assert_eq!(told.json()["accepted"], 1, "{}", told.body);
        why(&server, trace)
    };
    let until = 1_767_229_200_000_u64;
    let limit = json!({"rule": "posts", "layer": "user", "mode": "enforce", "allowed": false, "limit": 1, "periodMs": 3_600_000,
        "remaining": 0, "cost": 1, "resetAt": 1_767_229_200, "retryAfter": 3_600});
    let told = report(&"1".repeat(32), &json!({"cause": "limit", "rule": "posts", "limits": [limit]}));
    has(&told, &["the same request fitted after 3600 s, at 2026-01-01T01:00:00Z.\n"]);
    let told = report(&"2".repeat(32), &json!({"cause": "ban", "until": until}));
    has(&told, &["denied by an operator's ban (layer user), which ended at 2026-01-01T01:00:00Z.\n"]);
    let told =
        report(&"3".repeat(32), &json!({"subject": "user=u1", "strikes": 5, "bannedUntil": until, "rule": "posts"}));
    has(&told, &["It was banned until 2026-01-01T01:00:00Z."]);
    // An event of another system that says little.
    has(&report(&"4".repeat(32), &json!({})), &["It was denied. Its event does not say by what.\n"]);
    // A name that only looks like a digest is one that can be looked up.
    has(&report(&"5".repeat(32), &json!({"cause": "ban", "userId": "#ada"})), &["threshold subject user '#ada'\n"]);
    let digest = "#0123456789abcdef";
    let told = report(&"6".repeat(32), &json!({"cause": "login", "userId": digest}));
    has(&told, &["threshold subject account '#0123456789abcdef'\n"]);
    // A name that begins with a dash would be an option. Woken by leaving out `--`.
    let told = report(&"7".repeat(32), &json!({"cause": "ban", "userId": "-rf /", "tenant": "--json"}));
    has(&told, &["threshold subject user -- '-rf /'\n"]);
    let told = report(&"8".repeat(32), &json!({"cause": "ban", "layer": "tenant", "tenant": "--json"}));
    has(&told, &["threshold subject tenant -- --json\n"]);
    let told = report(&"9".repeat(32), &json!({"cause": "login", "userId": "-h"}));
    has(&told, &["threshold subject account -- -h\n"]);
}

/// Names with `%` or `/` were written as they are, and read as another user: `ada%40example.com` as `ada@example.com`.
///
/// Woken by joining the names of an event without encoding them.
#[test]
fn the_command_of_why_names_the_user_of_a_tenant_exactly() {
    let policy = "[identity]\nlog_identifiers = true\nuser_scope = 'tenant'\n[[rule]]\nname = 'all'\nper = ['user']\nlimit = '1/h'";
    let (server, _file) = Server::with(policy);
    let client = &mut server.connect();
    let mut told = |tenant: Value, user: &str| {
        let body = json!({"tenant": tenant, "user": user, "ip": "203.0.113.7"});
        check(client, &body);
        why(&server, &denied(client, &body))
    };
    has(&told(json!("acme"), "u1"), &["threshold subject user acme/u1\n"]);
    has(&told(json!("acme"), "ada%40example.com"), &["threshold subject user acme/ada%2540example.com\n"]);
    has(&told(json!("a/b c"), "d%2Fe/f"), &["threshold subject user a%2Fb%20c/d%252Fe%2Ff\n"]);
    has(&told(json!(null), "#0123456789abcdef"), &["threshold subject user '/##0123456789abcdef'\n"]);
}

/// They were one sentence: "a ban, a pause or a cool-down".
#[test]
fn bans_pauses_and_lists_are_told_apart() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    // An operator's ban, with an end and without.
    let ban = |key: &str, length: Option<u64>| {
        let body = json!({"layer": "user", "key": key, "reason": "stolen cards", "durationSec": length}).to_string();
        server.connect().post("/v1/bans", &body).unwrap().json()
    };
    let set = ban("banned", Some(3_600));
    let trace = denied(client, &json!({"user": "banned"}));
    let recorded = event(client, &trace);
    assert_eq!((&recorded["cause"], &recorded["layer"]), (&json!("ban"), &json!("user")), "{recorded}");
    let end = recorded["until"].as_u64().unwrap();
    assert_eq!(json!(end.div_ceil(1_000)), set["until"], "{recorded}");
    let text = why(&server, &trace);
    has(
        &text,
        &[
            "It was denied by an operator's ban (layer user), until 20",
            "threshold subject user banned\n    shows the ban's id",
        ],
    );
    ban("gone", None);
    let trace = denied(client, &json!({"user": "gone"}));
    has(&why(&server, &trace), &["by an operator's ban (layer user), without an end.\n"]);
    // A pause.
    let pause = json!({"layer": "user", "key": "paused", "seconds": 600}).to_string();
    assert_eq!(client.post("/v1/pause", &pause).unwrap().json()["ok"], true);
    let trace = denied(client, &json!({"user": "paused", "method": "POST", "path": "/api/posts/1"}));
    assert_eq!(event(client, &trace)["cause"], "pause");
    has(
        &why(&server, &trace),
        &[
            "It was denied by a pause of the layer user, under the rule ",
            "shows its bans and penalties, and how to lift them.",
        ],
    );
    // A list of the policy.
    let trace = denied(client, &json!({"user": "mallory", "ip": "203.0.113.7"}));
    let recorded = event(client, &trace);
    assert_eq!((&recorded["cause"], &recorded["layer"]), (&json!("list"), &Value::Null));
    has(
        &why(&server, &trace),
        &[
            "by a deny list of the policy.\n",
            "threshold subject user mallory\nthreshold subject edge 203.0.113.7\n    shows",
        ],
    );
    // Found by their cause, and counted for the layer only where the caller is to blame.
    let found = client.send("GET", "/v1/events?cause=ban", &[], "").unwrap().json();
    assert_eq!(found["events"].as_array().unwrap().len(), 2, "{found}");
    counted(client, [0, 0, 4]);
}

/// Checks the blocks of the layers `user` and `edge`, and those of none, in statistics and metrics.
#[track_caller]
fn counted(client: &mut Client<TcpStream>, [user, edge, other]: [u64; 3]) {
    let stats = client.send("GET", "/v1/stats", &[], "").unwrap().json();
    let blocks = ["userBlocks", "edgeBlocks", "otherBlocks"].map(|name| stats[name].as_u64().unwrap());
    assert_eq!(blocks, [user, edge, other], "{stats}");
    let metrics = client.send("GET", "/metrics", &[], "").unwrap().body;
    for (layer, blocks) in [("user", user), ("edge", edge), ("none", other)] {
        has(&metrics, &[&format!("threshold_blocks_total{{layer=\"{layer}\"}} {blocks}\n")]);
    }
}

#[test]
fn a_penalty_of_a_ladder_is_told_apart_from_the_strike_that_brought_it() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let struck = json!({"user": "u2", "path": "/struck"});
    assert_eq!(check(client, &struck)["verdict"], "allow");
    let warned = check(client, &struck)["traceId"].as_str().unwrap().to_owned();
    has(&why(&server, &warned), &["let through with a warning by the rule struck", "Strike 1 of user=u2."]);
    assert_eq!(event(client, &warned)["cause"], Value::Null);
    let trace = denied(client, &struck);
    assert_eq!(event(client, &trace)["cause"], "limit");
    has(&why(&server, &trace), &["It was denied by the rule struck (layer user).", "Strike 2 of user=u2."]);
    let trace = denied(client, &json!({"user": "u2", "path": "/elsewhere"}));
    assert_eq!(event(client, &trace)["cause"], "ladder");
    has(&why(&server, &trace), &["by a ladder's cool-down (layer user), which earlier strikes had brought, until 20"]);
    let harsh = json!({"ip": "203.0.113.9", "path": "/harsh"});
    assert_eq!(check(client, &harsh)["verdict"], "allow");
    has(&why(&server, &denied(client, &harsh)), &["its subject banned, by the rule harsh", "It is banned until 20"]);
    has(
        &why(&server, &denied(client, &harsh)),
        &["by a ladder's ban (layer edge), which earlier strikes had brought, until 20"],
    );
    counted(client, [2, 2, 0]);
}

/// Refused logins were neither recorded nor, at a locked account, logged.
#[test]
fn a_refused_login_is_recorded_counted_and_explained() {
    let policy = Scratch::file("policy.toml", POLICY);
    let server = Start { policy: Some(policy.path()), args: &["--log", "json"], ..Start::default() }.server();
    let client = &mut server.connect();
    let attempt = |account: &str, ip: &str| {
        let body = json!({"account": account, "ip": ip}).to_string();
        server.connect().post("/v1/login/attempt", &body).unwrap()
    };
    for nth in 1..=2 {
        let token = attempt("Ada", &format!("203.0.113.{nth}")).json()["attempt"].clone();
        let body = json!({"attempt": token, "success": false}).to_string();
        assert_eq!(client.post("/v1/login/result", &body).unwrap().status, 200);
    }
    let refused = attempt("ADA", "203.0.113.3");
    let locked = refused.header("x-trace-id").unwrap().to_owned();
    let recorded = event(client, &locked);
    for (field, value) in [
        ("cause", json!("login")),
        ("layer", json!("user")),
        ("userId", json!("ada")),
        ("ip", json!("203.0.113.3")),
        ("verdict", json!("deny")),
        ("rule", Value::Null),
        ("endpoint", json!("login")),
    ] {
        assert_eq!(recorded[field], value, "{field} of {recorded}");
    }
    let wait = recorded["until"].as_u64().unwrap() - recorded["at"].as_u64().unwrap();
    assert!((3_500_000..=3_600_000).contains(&wait), "{recorded}");
    has(
        &why(&server, &locked),
        &[
            "user ada, address 203.0.113.3\n",
            "refused: its account was locked, until 20",
            "threshold subject account ada\n",
        ],
    );
    for nth in 0..4 {
        attempt(&format!("user{nth}"), "198.51.100.7");
    }
    let trace = attempt("user9", "198.51.100.7").header("x-trace-id").unwrap().to_owned();
    assert_eq!(event(client, &trace)["layer"], "edge");
    has(&why(&server, &trace), &["The login was refused: its address had made too many attempts, until 20"]);
    // A banned client is known already.
    let ban = json!({"layer": "edge", "key": "192.0.2.1", "reason": "guesses"}).to_string();
    client.post("/v1/bans", &ban).unwrap();
    let trace = attempt("ada", "192.0.2.1").header("x-trace-id").unwrap().to_owned();
    assert_eq!((&event(client, &trace)["cause"], &event(client, &trace)["layer"]), (&json!("ban"), &json!("edge")));
    let stats = client.send("GET", "/v1/stats", &[], "").unwrap().json();
    assert_eq!(
        (&stats["userBlocks"], &stats["edgeBlocks"], &stats["otherBlocks"]),
        (&json!(1), &json!(2), &json!(1)),
        "{stats}"
    );
    assert_eq!(stats["topBlockedIps"][0], json!({"ip": "198.51.100.7", "blocks": 2, "error": 0}));
    // An erasure of "Ada" finds the refusals of her account too.
    let erased = client.send("DELETE", "/v1/events?userId=Ada", &[], "").unwrap().json();
    assert_eq!(erased["erased"], 2, "{erased}");
    server.signal("TERM");
    let (_, log) = server.wait();
    let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let refused: Vec<&Value> = lines.iter().filter(|line| line["message"] == "login refused").collect();
    let [lock, ban] = refused.as_slice() else { panic!("{log}") };
    assert_eq!(
        (&lock["reason"], &lock["user"], &lock["trace_id"]),
        (&json!("account_locked"), &json!("ada"), &json!(locked))
    );
    assert_eq!((&ban["cause"], &ban["trace_id"]), (&json!("ban"), &json!(trace)));
    assert_eq!(lines.iter().filter(|line| line["event"] == "auth_ip_rate_limit").count(), 2, "{log}");
}

/// Woken by leaving out `names.see` in `login_attempt`, or the names in `account_with_digest`.
#[test]
fn the_digests_of_a_refused_login_can_be_looked_up() {
    let (server, _file) = Server::with("[login]\nlocks = { 1 = '1h' }\n");
    let client = &mut server.connect();
    let attempt = json!({"account": "Ada", "ip": "203.0.113.1"}).to_string();
    let token = client.post("/v1/login/attempt", &attempt).unwrap().json()["attempt"].clone();
    client.post("/v1/login/result", &json!({"attempt": token, "success": false}).to_string()).unwrap();
    let refused = client.post("/v1/login/attempt", &attempt).unwrap();
    let trace = refused.header("x-trace-id").unwrap().to_owned();
    let user = event(client, &trace)["userId"].as_str().unwrap().to_owned();
    has(&why(&server, &trace), &[&format!("threshold subject account '{user}'\n")]);
    let path = format!("/v1/subjects/account/{}", user.replace('#', "%23"));
    let account = client.send("GET", &path, &[], "").unwrap().json();
    assert_eq!(account["failures"], 1, "{account}");
    assert_eq!(client.send("DELETE", &path, &[], "").unwrap().status, 200);
    assert_eq!(client.post("/v1/login/attempt", &attempt).unwrap().status, 200);
    let path = "/v1/subjects/account/%230123456789abcdef";
    assert_eq!(client.send("GET", path, &[], "").unwrap().status, 404);
}

/// A caller that an outage denies did nothing wrong, and an operator must see that.
#[test]
fn an_outage_is_told_with_the_rule_that_denies_in_it() {
    let policy = "
        [identity]
        log_identifiers = true
        [[rule]]
        name = 'open'
        layer = 'user'
        per = ['user']
        limit = '100/h'
        on_store_error = 'open'
        [[rule]]
        name = 'strict'
        layer = 'user'
        per = ['user']
        match = { path = '/strict' }
        limit = '100/h'
        on_store_error = 'closed'
        [[rule]]
        name = 'shared'
        layer = 'user'
        per = ['user']
        match = { path = '/shared' }
        limit = '1/h'
        on_store_error = 'local'
    ";
    let (mut redis, policy) = (RedisServer::start(), Scratch::file("policy.toml", policy));
    let url = redis.url();
    let variables = [("THRESHOLD_SECRET", "the secret of all of these nodes")];
    let args = ["--store", &url];
    let server = Start { args: &args, variables: &variables, policy: Some(policy.path()), ..Start::default() }.server();
    let client = &mut server.connect();
    let strict = json!({"user": "u1", "path": "/strict"});
    assert_eq!(check(client, &strict)["allowed"], true);
    server.wait_for_share();
    redis.kill();
    let begun = Instant::now();
    let trace = loop {
        let told = check(client, &strict);
        if told["allowed"] == false {
            break told["traceId"].as_str().unwrap().to_owned();
        }
        assert!(begun.elapsed() < PATIENCE, "{told}");
        std::thread::sleep(Duration::from_millis(10));
    };
    let recorded = event(client, &trace);
    assert_eq!((&recorded["cause"], &recorded["rule"]), (&json!("outage"), &json!("strict")), "{recorded}");
    assert!(recorded["degraded"].is_string(), "{recorded}");
    let told = why(&server, &trace);
    has(
        &told,
        &[
            ", and the rule strict denies then (on_store_error). The caller did nothing wrong.\n",
            "threshold health --ready\n",
        ],
    );
    // It counts for no layer.
    let stats = client.send("GET", "/v1/stats", &[], "").unwrap().json();
    assert_eq!(stats["userBlocks"], 0, "{stats}");
    // The node's share of one request: the second is denied by figures.
    let shared = json!({"user": "u2", "path": "/shared"});
    check(client, &shared);
    let trace = denied(client, &shared);
    let recorded = event(client, &trace);
    assert_eq!((&recorded["cause"], &recorded["rule"]), (&json!("limit"), &json!("shared")), "{recorded}");
    has(
        &why(&server, &trace),
        &["It was denied by the rule shared", "this node decided by its own share of each limit."],
    );
}
