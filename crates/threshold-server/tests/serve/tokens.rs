//! Tests tokens: which requests need one, and how guesses are limited.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::json;

use super::client::Client;
use super::origin::connect_from;
use super::process::{Scratch, Server, Start};

fn refused(args: &[&str], variables: &[(&str, &str)]) -> String {
    let output = Start { args, variables, ..Start::default() }.command().output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn without_a_token_only_loopback_addresses_are_served() {
    let error = refused(&["--http", "0.0.0.0:0"], &[]);
    assert!(error.contains("0.0.0.0:0") && error.contains("THRESHOLD_TOKEN"), "{error}");
    // An operators' token does not replace that of callers.
    let error = refused(&["--http", "0.0.0.0:0"], &[("THRESHOLD_ADMIN_TOKEN", "boss-token-012345")]);
    assert!(error.contains("THRESHOLD_TOKEN"), "{error}");
    let variables = &[("THRESHOLD_TOKEN", "s3cret-token-0123")];
    let server = Start { args: &["--http", "0.0.0.0:0"], variables, ..Start::default() }.server();
    assert!(server.place.starts_with("http://0.0.0.0:"), "{}", server.place);
}

/// With `THRESHOLD_TOKEN=", ,"` or an empty variable, a server once started and required no token.
#[test]
fn a_token_variable_without_a_token_is_an_error() {
    for name in ["THRESHOLD_TOKEN", "THRESHOLD_ADMIN_TOKEN", "THRESHOLD_READ_TOKEN"] {
        for empty in ["", " ", ", ,"] {
            let error = refused(&[], &[(name, empty)]);
            assert!(error.contains(name) && error.contains("no token"), "{name}={empty:?}: {error}");
        }
    }
}

/// With `--no-db` a secret of any length was once accepted.
#[test]
fn a_short_secret_is_refused_with_and_without_a_journal() {
    let folder = Scratch::folder();
    let journal = folder.path().join("t.db");
    for args in [&[][..], &["--db", journal.to_str().unwrap()]] {
        let error = refused(args, &[("THRESHOLD_SECRET", "hunter2-hunter2")]);
        assert!(error.contains("THRESHOLD_SECRET") && error.contains("16") && !error.contains("hunter"), "{error}");
    }
    let variables = &[("THRESHOLD_SECRET", "hunter2-hunter2-")];
    Start { variables, ..Start::default() }.server();
}

/// Every route of the OpenAPI document requires a token, except for health and what a browser needs to sign in.
#[test]
fn every_route_but_health_and_the_page_requires_a_token() {
    let variables =
        &[("THRESHOLD_TOKEN", "first-token-0123, second-token-012"), ("THRESHOLD_ADMIN_TOKEN", "boss-token-012345")];
    let server = Start { variables, ..Start::default() }.server();
    let client = &mut server.connect();
    let bearer = [("authorization", "Bearer second-token-012")];
    let document = client.send("GET", "/openapi.json", &bearer, "").unwrap();
    assert_eq!(document.status, 200);
    let document = document.json();
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() >= 13);
    let calls = paths.iter().flat_map(|(path, item)| item.as_object().unwrap().iter().map(move |call| (path, call)));
    for (number, (path, (method, call))) in (0u8..).zip(calls) {
        // Each from an address of its own, because answers are delayed after ten wrong tokens.
        let (_, address) = server.place.split_once("://").unwrap();
        let client = &mut Client::new(connect_from([127, 0, 1, number], address.parse().unwrap()));
        let is_open = call["security"].as_array().is_some_and(Vec::is_empty);
        let is_for_operators = call["security"].to_string().contains("operator");
        let method = &method.to_uppercase();
        for wrong in [
            None,
            Some("Bearer first-token-012"),
            Some("Bearer first-token-0123, second-token-012"),
            Some("Basic first-token-0123"),
        ] {
            let fields: Vec<(&str, &str)> = wrong.map(|wrong| ("authorization", wrong)).into_iter().collect();
            let answer = client.send(method, path, &fields, "{}").unwrap();
            // After many wrong tokens, operators' calls are refused.
            if is_for_operators && answer.status == 429 {
                continue;
            }
            let is_pages = path == "/" || path.starts_with("/page/") || path == "/v1/session";
            let is_health = path == "/healthz" || path == "/readyz";
            assert_eq!(is_open, is_pages || is_health, "{path}");
            assert_eq!(answer.status == 401, !is_open, "{path} {wrong:?}");
            if !is_open {
                assert_eq!(answer.json()["error"], "unauthorized");
                assert_eq!(answer.header("www-authenticate"), Some("Bearer realm=\"threshold\""));
            }
        }
    }
    assert_eq!(client.send("GET", "/openapi.json", &[], "").unwrap().status, 401);
    let json_type = ("content-type", "application/json");
    for token in ["first-token-0123", "second-token-012", "boss-token-012345"] {
        let fields = [json_type, ("authorization", &format!("Bearer {token}"))];
        let body = json!({"ip": "203.0.113.7"}).to_string();
        assert_eq!(client.send("POST", "/v1/check", &fields, &body).unwrap().status, 200, "{token}");
    }
}

/// A token that could be guessed is refused at the start. The error names only the variable.
#[test]
fn short_tokens_are_refused_at_the_start() {
    for name in ["THRESHOLD_TOKEN", "THRESHOLD_ADMIN_TOKEN", "THRESHOLD_READ_TOKEN"] {
        for short in ["0123456789abcde", "0123456789abcdef,0123456789abcde"] {
            let error = refused(&[], &[(name, short)]);
            assert!(error.contains(name) && error.contains("16") && !error.contains("01234"), "{error}");
        }
    }
}

/// Returns the status of a call with this token.
fn show(mut client: Client<TcpStream>, path: &str, token: &str) -> u16 {
    let bearer = format!("Bearer {token}");
    let (method, body) = if path.starts_with("/v1") { ("POST", r#"{"ip": "203.0.113.7"}"#) } else { ("GET", "") };
    let name = if path == "/auth" { "x-threshold-token" } else { "authorization" };
    let value = if path == "/auth" { token } else { &bearer };
    client.send(method, path, &[(name, value), ("content-type", "application/json")], body).unwrap().status
}

/// Wrong tokens are counted on every path, and answered with a delay. The right one is always accepted, because many callers
/// share a proxy's address, and operators at that address are not affected.
#[test]
fn wrong_tokens_are_counted_on_every_path_and_right_ones_are_accepted() {
    for path in ["/v1/check", "/v1/refund", "/openapi.json", "/auth", "/readyz"] {
        let variables = [("THRESHOLD_TOKEN", "caller-token-0123"), ("THRESHOLD_ADMIN_TOKEN", "boss-token-012345")];
        let server = Start { variables: &variables, ..Start::default() }.server();
        let wrong = if path == "/readyz" { 200 } else { 401 };
        std::thread::scope(|scope| {
            for number in 0..20 {
                let client = server.connect();
                scope.spawn(move || assert_eq!(show(client, path, &format!("guess-{number:012}")), wrong, "{path}"));
            }
        });
        let line = server.wait_for_log("answers delayed");
        assert!(!line.contains("guess-") && !line.contains("127.0.0.1"), "{line}");
        for path in ["/openapi.json", "/auth", "/v1/check"] {
            for token in ["caller-token-0123", "boss-token-012345"] {
                let status = show(server.connect(), path, token);
                assert!(matches!(status, 200 | 400), "{path} {token}: {status}");
            }
        }
        let boss = [("authorization", "Bearer boss-token-012345")];
        assert_eq!(server.connect().send("GET", "/v1/bans", &boss, "").unwrap().status, 200);
    }
}

/// Denials are sampled in the log, and no line has an identity or a token.
#[test]
fn logs_do_not_disclose_identities() {
    let variables = &[("THRESHOLD_TOKEN", "s3cret-token-0123")];
    let server = Start { variables, args: &["--log", "json"], ..Start::default() }.server();
    let client = &mut server.connect();
    let fields = [("content-type", "application/json"), ("authorization", "Bearer s3cret-token-0123")];
    let body = json!({"ip": "203.0.113.7", "user": "ada@example.com"}).to_string();
    for _ in 0..130 {
        client.send("POST", "/v1/check", &fields, &body).unwrap();
    }
    server.signal("TERM");
    let (_, log) = server.wait();
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let denials: Vec<_> = lines.iter().filter(|line| line["message"] == "denied").collect();
    assert!((1..=30).contains(&denials.len()), "{} denials in the log", denials.len());
    assert_eq!(denials[0]["rule"], "user");
    let ip = denials[0]["ip"].as_str().unwrap();
    assert!(ip.len() == 17 && ip.starts_with('#'), "{ip}");
    for hidden in ["203.0.113.7", "ada@", "s3cret"] {
        assert!(!log.contains(hidden), "{hidden} is in the log");
    }
}

/// Sends the heads of bodies of 1 MiB that never come, and waits until the server waits for each.
fn hold_bodies(server: &Server, token: &str, count: usize) -> Vec<TcpStream> {
    let held = (0..count).map(|_| {
        let mut stream = server.stream();
        let head = format!("authorization: Bearer {token}\r\nhost: localhost\r\nexpect: 100-continue");
        write!(stream, "POST /v1/explain HTTP/1.1\r\n{head}\r\ncontent-length: 1048576\r\n\r\n").unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        assert_eq!(status, *b"HTTP/1.1 100");
        stream
    });
    held.collect()
}

/// A read-only token that used up the memory for its bodies kept operators from checking a draft and callers from asking why, because
/// the memory was chosen by the call and not by who makes it.
///
/// Woken by one memory for any two kinds of tokens in `body_memory_of`.
#[test]
fn bodies_of_one_kind_of_token_keep_no_other_kind_waiting() {
    const TOKENS: [(&str, &str); 3] = [
        ("THRESHOLD_TOKEN", "caller-token-0123"),
        ("THRESHOLD_ADMIN_TOKEN", "boss-token-012345"),
        ("THRESHOLD_READ_TOKEN", "eyes-token-012345"),
    ];
    let (facts, draft, ban) = (json!({"ip": "203.0.113.7"}), json!({"text": ""}), json!({}));
    let calls = [
        ("/v1/explain", &facts, [200, 200, 200]),
        ("/v1/check", &facts, [200, 200, 401]),
        ("/v1/policy/lint", &draft, [401, 200, 200]),
        ("/v1/bans", &ban, [401, 400, 403]),
    ];
    for (kind, count) in [(0, 32), (1, 8), (2, 8)] {
        let server = Start { args: &["--client-timeout", "10min"], variables: &TOKENS, ..Start::default() }.server();
        let held = hold_bodies(&server, TOKENS[kind].1, count);
        for (other, (_, token)) in TOKENS.into_iter().enumerate().filter(|(other, _)| *other != kind) {
            for (path, body, statuses) in calls {
                let bearer = format!("Bearer {token}");
                let answer = server.connect().send("POST", path, &[("authorization", &bearer)], &body.to_string());
                assert_eq!(answer.unwrap().status, statuses[other], "{path} of {other} beside {kind}");
            }
        }
        // It was all that there is for this kind.
        let (bearer, large) = (format!("Bearer {}", TOKENS[kind].1), " ".repeat(20_000));
        let answer = server.connect().send("POST", "/v1/explain", &[("authorization", &bearer)], &large).unwrap();
        assert_eq!((answer.status, &answer.json()["error"]), (503, &json!("busy")), "{kind}");
        drop(held);
    }
}
