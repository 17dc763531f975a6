//! Tests what operators see of decisions: the security events in the log, statistics, and the usage of a caller.

use serde_json::{Value, json};

use super::process::{Scratch, Server, Start};

const POLICY: &str = "
    [identity]
    log_identifiers = true
    [login]
    locks = { 2 = '1min' }
    ip = '4/5min'
    [ladders.l]
    decay = '2h'
    rungs = ['warn', 'shadow + deny', 'ban 1h']
    [[rule]]
    name = 'posts'
    layer = 'user'
    per = ['user']
    limit = '2/h'
    ladder = 'l'
    strike = 'request'
";

fn start(policy: &str) -> (Server, Scratch) {
    let policy = Scratch::file("policy.toml", policy);
    (Start { policy: Some(policy.path()), args: &["--log", "json"], ..Start::default() }.server(), policy)
}

/// Stops the server, and returns its log with the lines of this event.
fn lines(server: Server, event: &str) -> (String, Vec<Value>) {
    server.signal("TERM");
    let (_, log) = server.wait();
    let read = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let own = read.filter(|line| line["event"] == event).collect();
    (log, own)
}

fn fail_login(server: &Server, account: &str, ip: &str) -> u16 {
    let mut client = server.connect();
    let attempt = client.post("/v1/login/attempt", &json!({"account": account, "ip": ip}).to_string()).unwrap();
    if let Some(token) = attempt.json()["attempt"].as_str() {
        let result = json!({"attempt": token, "success": false}).to_string();
        assert_eq!(client.post("/v1/login/result", &result).unwrap().status, 200);
    }
    attempt.status
}

fn is_iso(line: &Value) -> bool {
    let text = line["timestamp"].as_str().unwrap();
    text.len() >= 20 && &text[10..11] == "T" && text.ends_with('Z')
}

/// Strikes were logged nowhere.
#[test]
fn each_strike_is_logged_with_its_consequences() {
    let (server, _policy) = start(POLICY);
    let mut client = server.connect();
    for _ in 0..5 {
        client.post("/v1/check", r#"{"user": "u1"}"#).unwrap();
    }
    let subject = client.send("GET", "/v1/subjects/user/u1", &[], "").unwrap().json();
    let (log, strikes) = lines(server, "abuse_escalation");
    assert_eq!(strikes.len(), 3, "{log}");
    for (nth, line) in strikes.iter().enumerate() {
        assert_eq!((&line["userId"], &line["warnings"]), (&json!("u1"), &json!(nth + 1)), "{line}");
        assert_eq!(line["shadowBanned"], nth > 0, "{line}");
        assert_eq!(line["bannedUntil"].is_u64(), nth == 2, "{line}");
        assert_eq!((&line["rule"], &line["layer"]), (&json!("posts"), &json!("user")), "{line}");
        assert_eq!((&line["digest"], &line["message"]), (&subject["digest"], &json!("abuse_escalation")), "{line}");
        assert!(is_iso(line) && line["trace_id"].as_str().unwrap().len() == 32, "{line}");
    }
    assert_eq!(strikes[2]["bannedUntil"], subject["bannedUntil"]);
}

#[test]
fn a_locked_account_and_a_refused_address_are_logged_with_their_names() {
    let (server, _policy) = start(POLICY);
    assert_eq!([fail_login(&server, "Ada", "203.0.113.7"), fail_login(&server, "ada", "203.0.113.8")], [200, 200]);
    let mut client = server.connect();
    let digest = client.send("GET", "/v1/subjects/account/ada", &[], "").unwrap().json()["digest"].clone();
    // A username that would write lines of its own, clear a terminal or turn text around.
    let hostile = "eve\n{\"event\":\"forged\"}\u{1b}[2J\u{202e}\u{85}";
    assert_eq!([fail_login(&server, hostile, "203.0.113.9"), fail_login(&server, hostile, "203.0.113.9")], [200, 200]);
    // Four attempts in five minutes, of which two are left.
    let statuses: Vec<u16> = (0..5).map(|nth| fail_login(&server, &format!("u{nth}"), "203.0.113.9")).collect();
    assert_eq!(statuses, [200, 200, 429, 429, 429]);
    let (log, locked) = lines(server, "auth_user_lockout");
    let ada = &locked[0];
    assert_eq!((&ada["username"], &ada["ip"], &ada["digest"]), (&json!("ada"), &json!("203.0.113.8"), &digest));
    assert!(is_iso(ada), "{ada}");
    assert_eq!(locked[1]["username"], hostile);
    assert!(!log.contains(['\u{1b}', '\u{202e}', '\u{85}']) && !log.contains("\n{\"event\":\"forged\""), "{log}");
    assert_eq!(locked.len(), 2, "{log}");
    let refused = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let refused: Vec<Value> = refused.filter(|line| line["event"] == "auth_ip_rate_limit").collect();
    assert_eq!(refused.len(), 3, "{log}");
    assert!(refused.iter().all(|line| line["ip"] == "203.0.113.9" && is_iso(line)), "{log}");
}

/// Woken by one sampler for both events.
#[test]
fn each_event_is_sampled_by_itself_and_names_are_hidden() {
    let policy = "[login]\naccount = '1000/min'\nip = '1/h'\nlocks = { 1 = '1min' }\n";
    let (server, _policy) = start(policy);
    for _ in 0..40 {
        fail_login(&server, "secret-name", "203.0.113.7");
    }
    // After a burst of refused addresses, the first lock is logged all the same.
    for nth in 0..3 {
        fail_login(&server, "secret-name-2", &format!("203.0.113.{}", 10 + nth));
    }
    let mut client = server.connect();
    let account = |client: &mut super::client::Client<_>, name: &str| {
        client.send("GET", &format!("/v1/subjects/account/{name}"), &[], "").unwrap().json()["digest"].clone()
    };
    let digests = [account(&mut client, "secret-name"), account(&mut client, "secret-name-2")];
    server.signal("TERM");
    let (_, log) = server.wait();
    let all: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let of = |event: &str| all.iter().filter(|line| line["event"] == event).collect::<Vec<_>>();
    let locks: Vec<&Value> = of("auth_user_lockout").into_iter().map(|line| &line["username"]).collect();
    assert_eq!(locks, digests.iter().collect::<Vec<_>>(), "{log}");
    let refused = of("auth_ip_rate_limit");
    let logged = refused.iter().filter(|line| line["message"] == "auth_ip_rate_limit").count() as u64;
    let left_out: u64 = refused.iter().map(|line| line["left_out"].as_u64().unwrap()).sum();
    assert_eq!(logged + left_out, 39, "{log}");
    assert!(!log.contains("secret-name") && !log.contains("203.0.113."), "{log}");
}

#[test]
fn statistics_and_usage_follow_the_traffic() {
    let (server, _policy) = start(POLICY);
    let mut client = server.connect();
    let mut get = |path: &str| client.send("GET", path, &[], "").unwrap().json();
    let before = get("/v1/usage?user=u1")["limits"][0].clone();
    assert_eq!((&before["rule"], &before["limit"], &before["remaining"]), (&json!("posts"), &json!(2), &json!(2)));
    let mut other = server.connect();
    other.post("/v1/check", r#"{"user": "u1", "ip": "203.0.113.7", "tenant": "acme"}"#).unwrap();
    assert_eq!(get("/v1/usage?user=u1")["limits"][0]["remaining"], 1);
    for _ in 0..5 {
        other.post("/v1/check", r#"{"user": "u1", "ip": "203.0.113.7", "tenant": "acme"}"#).unwrap();
    }
    assert_eq!(get("/v1/usage?user=u1")["limits"][0]["remaining"], 0);
    for period in ["min", "h", "day"] {
        let stats = get(&format!("/v1/stats?period={period}"));
        assert_eq!((&stats["userBlocks"], &stats["warningsIssued"]), (&json!(3), &json!(1)), "{stats}");
        assert_eq!((&stats["bansActive"], &stats["shadowBansActive"]), (&json!(1), &json!(1)), "{stats}");
        assert_eq!(stats["topBlockedTenants"], json!([{"tenant": "acme", "blocks": 3, "error": 0}]));
        assert_eq!(stats["topBlockedIps"], json!([{"ip": "203.0.113.7", "blocks": 3, "error": 0}]));
        assert_eq!(stats["topBlockedUsers"], json!([{"user": "u1", "blocks": 3, "error": 0}]));
    }
}

/// Callers may read usage and no statistics; a token that reads may read both.
#[test]
fn usage_is_for_callers_and_statistics_are_for_operators() {
    let policy = Scratch::file("policy.toml", POLICY);
    let (caller, reader) = ("caller-token-0123456789", "reader-token-0123456789");
    let variables = [("THRESHOLD_TOKEN", caller), ("THRESHOLD_READ_TOKEN", reader)];
    let server = Start { policy: Some(policy.path()), variables: &variables, ..Start::default() }.server();
    let mut client = server.connect();
    let mut status = |path: &str, token: &str| {
        let token = format!("Bearer {token}");
        client.send("GET", path, &[("authorization", &token)], "").unwrap().status
    };
    assert_eq!([status("/v1/usage?user=u1", caller), status("/v1/stats", reader)], [200, 200]);
    assert_eq!(status("/v1/usage?user=u1", reader), 200);
    assert_eq!(status("/v1/stats", caller), 401);
    let mut stranger = server.connect();
    assert_eq!(stranger.send("GET", "/v1/usage?user=u1", &[], "").unwrap().status, 401);
}
