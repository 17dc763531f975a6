//! Tests JWTs at forward auth: the user they name, the metrics of those that do not verify, and changed keys.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::client::Answer;
use super::process::{Scratch, Server, Start};

#[path = "../../../threshold-wire/tests/jwt/sign.rs"]
pub(crate) mod sign;

use sign::{SECRET, hmac_of, jwk, of_texts, signed, stranger, token};

/// A policy that counts by the claim `sub`, or by the address of a request without one.
fn policy(jwt: &str) -> String {
    format!(
        r#"
[identity]
trusted_proxies = ["127.0.0.1/32"]
client_ip = "x-forwarded-for"
user = "claim:sub"

[identity.jwt]
{jwt}

[[rule]]
name = "user"
per = ["user"]
limit = "1000/h"
algorithm = "sliding-window"
ladder = "graduated"

[[rule]]
name = "anybody"
per = ["ip"]
limit = "100000/h"
algorithm = "sliding-window"
"#
    )
}

fn shared() -> String {
    policy("alg = \"HS256\"\nkey = \"${JWT_KEY}\"\niss = \"https://id\"\naud = \"api\"")
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// Asks as a proxy does, with these headers.
fn ask(server: &Server, fields: &[(&str, &str)]) -> Answer {
    let mut all = vec![("x-original-method", "GET"), ("x-original-uri", "/x"), ("x-forwarded-for", "203.0.113.7")];
    all.extend_from_slice(fields);
    let answer = server.connect().send("GET", "/auth", &all, "").unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer
}

/// Whether a request is counted by its user: then the rest of that budget decreases with each.
fn remaining(server: &Server, bearer: &str) -> u64 {
    let answer = ask(server, &[("authorization", bearer)]);
    answer.header("x-ratelimit-remaining").unwrap().parse().unwrap()
}

fn metrics(server: &Server) -> String {
    server.connect().send("GET", "/metrics", &[], "").unwrap().body
}

fn counted(server: &Server, reason: &str) -> u64 {
    let text = metrics(server);
    let series = format!("threshold_tokens_refused_total{{reason=\"{reason}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&series)).map_or(0, |count| count.parse().unwrap())
}

fn claims() -> Value {
    json!({ "sub": "u1", "iss": "https://id", "aud": "api", "exp": now() + 300 })
}

#[test]
fn a_token_that_does_not_verify_is_ignored_and_counted_in_the_metrics() {
    let file = Scratch::file("policy.toml", &shared());
    let variables = &[("JWT_KEY", SECRET)];
    let server = Start { policy: Some(file.path()), variables, ..Start::default() }.server();
    let bearer = |token: &str| format!("Bearer {token}");
    let with = |name: &str, value: Value| {
        let mut claims = claims();
        claims[name] = value;
        bearer(&token("HS256", &claims))
    };
    let good = bearer(&token("HS256", &claims()));
    assert_eq!(remaining(&server, &good), 999);
    assert_eq!(remaining(&server, &good), 998);
    // Each user has a budget of its own. A number is a valid user.
    assert_eq!(remaining(&server, &with("sub", json!(7))), 999);
    assert_eq!(remaining(&server, &with("sub", json!("7"))), 998);
    let unsigned = of_texts(r#"{"alg":"none"}"#, &claims().to_string(), |_| Vec::new());
    let foreign = of_texts(r#"{"alg":"HS256"}"#, &claims().to_string(), |message| {
        hmac_of(ring::hmac::HMAC_SHA256, &[b'x'; 32], message)
    });
    let refused = [
        ("algorithm", bearer(&unsigned)),
        ("malformed", "Bearer opaque".to_owned()),
        ("signature", bearer(&foreign)),
        ("algorithm", bearer(&token("HS384", &claims()))),
        ("algorithm", bearer(&token("RS256", &claims()))),
        ("signature", bearer(&signed(&json!({ "alg": "HS256" }), &claims(), "RS256"))),
        ("expired", with("exp", json!(now() - 3_600))),
        ("not_yet_valid", with("nbf", json!(now() + 3_600))),
        ("issuer", with("iss", json!("https://evil"))),
        ("audience", with("aud", json!("web"))),
        ("too_long", with("fill", "x".repeat(8 << 10).into())),
    ];
    // Such requests share the budget of their address, and do not charge the user's.
    for (number, (reason, field)) in refused.iter().enumerate() {
        let before = counted(&server, reason);
        assert_eq!(remaining(&server, field), 999 - number as u64, "{reason}");
        assert_eq!(counted(&server, reason), before + 1, "{reason}");
    }
    let twice = ask(&server, &[("authorization", &good), ("authorization", &good)]);
    assert_eq!(twice.header("x-ratelimit-remaining"), Some("988"));
    assert_eq!(counted(&server, "repeated"), 1);
    // Other credentials are not tokens.
    let before = metrics(&server).lines().filter(|line| line.contains("tokens_refused")).count();
    ask(&server, &[("authorization", "Basic dTpw")]);
    ask(&server, &[]);
    assert_eq!(metrics(&server).lines().filter(|line| line.contains("tokens_refused")).count(), before);
    assert_eq!(remaining(&server, &good), 997);
    let told = server.wait_for_log("JWT not accepted");
    assert!(!told.contains(SECRET) && !told.contains("u1") && !told.contains("eyJ"), "{told}");
}

/// The HTTP API trusts its body: a caller has a token of this server, or is on this machine.
#[test]
fn callers_of_the_api_name_the_user_in_the_body() {
    let file = Scratch::file("policy.toml", &shared());
    let server = Start { policy: Some(file.path()), variables: &[("JWT_KEY", SECRET)], ..Start::default() }.server();
    let answer = server.connect().post("/v1/check", r#"{"user": "u1", "ip": "203.0.113.7"}"#).unwrap().json();
    assert_eq!(answer["remaining"], 999);
    assert_eq!(remaining(&server, &format!("Bearer {}", token("HS256", &claims()))), 998);
}

#[test]
fn changed_keys_are_loaded_and_invalid_ones_are_not() {
    let set = |keys: &[Value]| json!({ "keys": keys }).to_string();
    let claims = json!({ "sub": "u1", "exp": now() + 300 });
    let named = |kid: &str| format!("Bearer {}", signed(&json!({ "alg": "ES256", "kid": kid }), &claims, "ES256"));
    let (next, renewed) = stranger("next", &claims);
    let renewed = format!("Bearer {renewed}");
    let keys = Scratch::file("keys.json", &set(&[jwk("ES256", "now")]));
    let text = policy(&format!("alg = \"ES256\"\nkey_file = \"{}\"", keys.path().display()));
    let (server, file) = Server::with(&text);
    assert_eq!(remaining(&server, &named("now")), 999);
    assert_eq!((remaining(&server, &renewed), counted(&server, "key")), (999, 1));
    assert_eq!((remaining(&server, &named("other")), counted(&server, "key")), (998, 2));
    // The change is detected without a signal.
    keys.replace(&set(&[jwk("ES256", "now"), next.clone()]));
    server.wait_for_log("JWT keys reloaded");
    assert_eq!(remaining(&server, &renewed), 998);
    assert_eq!(remaining(&server, &named("now")), 997);
    // Two keys with one kid are ambiguous, and neither is used.
    let mut twin = next.clone();
    twin["kid"] = "now".into();
    keys.replace(&set(&[jwk("ES256", "now"), twin]));
    server.signal("HUP");
    server.wait_for_log("JWKS has several keys with this kid");
    server.wait_for_log("policy reloaded");
    assert_eq!((remaining(&server, &named("now")), counted(&server, "key")), (997, 3));
    keys.replace(&set(&[next]));
    server.signal("HUP");
    // A file that cannot be used is reported, and the old keys stay.
    while counted(&server, "signature") == 0 {
        remaining(&server, &named("next"));
    }
    keys.replace("{\"keys\": []}");
    let line = server.wait_for_log("JWT keys not reloaded");
    assert!(line.contains("no key for ES256"), "{line}");
    let stands = server.connect().send("GET", "/readyz", &[], "").unwrap().json();
    assert_eq!(stands["status"], "degraded");
    let reason = stands["reason"].as_str().unwrap();
    assert!(reason.contains("no key for ES256") && !reason.contains("keys.json"), "{reason}");
    assert_eq!(remaining(&server, &renewed), 996);
    // Another policy has a key file of its own, which is watched from then on.
    file.replace(&policy(&format!("alg = \"HS256\"\nkey = \"{SECRET}\"")));
    server.signal("HUP");
    server.wait_for_log("policy reloaded");
    assert_eq!(server.connect().send("GET", "/readyz", &[], "").unwrap().json()["status"], "ok");
    assert_eq!(remaining(&server, &format!("Bearer {}", token("HS256", &claims))), 995);
    assert!(remaining(&server, &renewed) < 999);
    // A policy whose key cannot be read is not loaded.
    file.replace(&policy("alg = \"ES256\"\nkey_file = \"/nonexistent/keys.json\""));
    server.signal("HUP");
    let line = server.wait_for_log("policy not reloaded");
    assert!(line.contains("key_file: the file cannot be read") && !line.contains("/nonexistent"), "{line}");
    let stands = server.connect().send("GET", "/readyz", &[], "").unwrap().json();
    assert_eq!(stands["reason"], "the policy could not be reloaded: the JWT key cannot be used");
    assert_eq!(remaining(&server, &format!("Bearer {}", token("HS256", &claims))), 994);
}

#[test]
fn a_key_that_cannot_be_used_is_an_error_at_the_start_and_in_lint() {
    let public = include_str!("../../../threshold-wire/tests/jwt/pem/rsa_public.pem");
    let check = |jwt: &str, key: &str, says: &str, lint: (i32, &str)| {
        let held = Scratch::file("held.key", key);
        let file = Scratch::file("policy.toml", &policy(&jwt.replace("HELD", held.path().to_str().unwrap())));
        let variables = &[("JWT_KEY", key)];
        let run = Start { policy: Some(file.path()), variables, ..Start::default() }.command().output().unwrap();
        let told = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(!run.status.success() && told.contains(says), "{jwt}: {told}");
        assert!(key.is_empty() || !told.contains(key.trim()), "{told}");
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_threshold"));
        let run = command.arg("lint").arg(file.path()).env("JWT_KEY", key).output().unwrap();
        let told = String::from_utf8_lossy(&run.stdout).into_owned();
        assert_eq!(run.status.code(), Some(lint.0), "{told}");
        // It points at the setting; errors about keys were once all at the first character of the file.
        assert!(!told.contains(":1:1: "), "{told}");
        assert!(told.contains(lint.1) && (key.is_empty() || !told.contains(key.trim())), "{told}");
    };
    let bad = (2, "error[bad-key]");
    let unread = "key_file: the file cannot be read";
    check("alg = \"HS256\"\nkey_file = \"/nonexistent/key\"", "", unread, (0, "warning[no-key-file]"));
    // A key that was mistakenly given as the name of its file is not printed.
    check("alg = \"HS256\"\nkey_file = \"${JWT_KEY}\"", "hunter2 swordfish", unread, (0, "warning[no-key-file]"));
    check("alg = \"HS256\"\nkey_file = \"HELD\"", "hunter2 swordfish", "too short", bad);
    check("alg = \"HS256\"\nkey = \"${JWT_KEY}\"", "hunter2 swordfish", "a key that its algorithm cannot use", bad);
    check("alg = \"HS256\"\nkey_file = \"HELD\"", public, "shared secret", bad);
    check("alg = \"HS256\"\nkey = \"${JWT_KEY}\"", public, "a key that its algorithm cannot use", bad);
    check("alg = \"ES256\"\nkey_file = \"HELD\"", public, "another kind", bad);
    check("alg = \"ES256\"\nkey = \"${JWT_KEY}\"", public, "another kind", bad);
    check("alg = \"RS256\"\nkey_file = \"HELD\"", SECRET, "neither a public key in PEM nor a JWKS", bad);
    check("alg = \"PS256\"\nkey_file = \"HELD\"", public, "unknown algorithm", (2, "error[bad-value]"));
    check("alg = \"none\"\nkey_file = \"HELD\"", public, "unknown algorithm", (2, "error[bad-value]"));
}
