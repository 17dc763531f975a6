//! Tests the status, the error code and the field of every invalid input.

use serde_json::{Value, json};

use super::process::{POLICY, Server, Start};

/// An invalid body, and the field that the error is about. The status is 400 by default.
#[track_caller]
fn check(cases: &[(&str, &str, &str, Option<&str>)]) {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    for (path, body, error, field) in cases {
        let answer = client.post(path, body).unwrap();
        assert_eq!(answer.status, 400, "{path} {body}: {}", answer.body);
        let told = answer.json();
        assert_eq!(told["error"], *error, "{path} {body}: {told}");
        assert_eq!(told["field"], json!(field), "{path} {body}: {told}");
        assert!(told["message"].as_str().is_some_and(|text| text.len() > 5), "{told}");
    }
    let left = client.post("/v1/peek", r#"{"ip": "203.0.113.7"}"#).unwrap().json();
    assert_eq!(left["remaining"], 999, "nothing was charged");
}

#[test]
fn facts() {
    let bad = |body, field| ("/v1/check", body, "bad_request", Some(field));
    let long = format!(r#"{{"ip": "203.0.113.7", "path": "/{}"}}"#, "x".repeat(9_000));
    let many: Vec<String> = (0..65).map(|number| format!(r#""f{number}": "x""#)).collect();
    let many = format!(r#"{{"ip": "203.0.113.7", "facts": {{{}}}}}"#, many.join(","));
    check(&[
        bad(r#"{"ip": 7}"#, "ip"),
        bad(r#"{"ip": "203.0.113"}"#, "ip"),
        bad(r#"{"ip": ""}"#, "ip"),
        bad(r#"{"user": "u1"}"#, "ip"),
        bad("{}", "ip"),
        bad(r#"{"ip": "203.0.113.7", "user": 7}"#, "user"),
        bad(r#"{"ip": "203.0.113.7", "path": ["/"]}"#, "path"),
        bad(r#"{"ip": "203.0.113.7", "method": 7}"#, "method"),
        bad(r#"{"ip": "203.0.113.7", "method": " "}"#, "method"),
        bad(r#"{"ip": "203.0.113.7", "method": "GET /"}"#, "method"),
        bad(r#"{"ip": "203.0.113.7", "method": "POST\r\nx: y"}"#, "method"),
        bad(r#"{"ip": "203.0.113.7", "method": "GET\u202e"}"#, "method"),
        ("/v1/reserve", r#"{"ip": "203.0.113.7", "method": "a,b"}"#, "bad_request", Some("method")),
        ("/v1/explain", r#"{"ip": "203.0.113.7", "method": "a:b"}"#, "bad_request", Some("method")),
        bad(r#"{"ip": "203.0.113.7", "IP": "203.0.113.7"}"#, "IP"),
        bad(r#"{"ip": "203.0.113.7", "ip": "203.0.113.8"}"#, "ip"),
        bad(r#"{"ip": "203.0.113.7", "traceId": "x"}"#, "traceId"),
        bad(r#"{"ip": "203.0.113.7", "cost": -1}"#, "cost"),
        bad(r#"{"ip": "203.0.113.7", "cost": 1.5}"#, "cost"),
        bad(r#"{"ip": "203.0.113.7", "cost": "1"}"#, "cost"),
        bad(r#"{"ip": "203.0.113.7", "cost": 9007199254740992}"#, "cost"),
        bad(r#"{"ip": "203.0.113.7", "cost": 18446744073709551616}"#, "cost"),
        bad(r#"{"ip": "203.0.113.7", "bytes": -1}"#, "bytes"),
        bad(r#"{"ip": "203.0.113.7", "bytes": 1e300}"#, "bytes"),
        bad(r#"{"ip": "203.0.113.7", "costs": {"tokens": -1}}"#, "costs.tokens"),
        bad(r#"{"ip": "203.0.113.7", "costs": {"tokens": 1, "tokens": 1}}"#, "costs.tokens"),
        bad(r#"{"ip": "203.0.113.7", "costs": [1]}"#, "costs"),
        bad(r#"{"ip": "203.0.113.7", "facts": {"inbox": 7}}"#, "facts.inbox"),
        bad(r#"{"ip": "203.0.113.7", "headers": {"x-key": null}}"#, "headers.x-key"),
        bad(r#"{"ip": "203.0.113.7", "requestId": ""}"#, "requestId"),
        bad(r#"{"ip": "203.0.113.7", "requestId": 5}"#, "requestId"),
        bad(r#"{"ip": "203.0.113.7", "ttlSec": 5}"#, "ttlSec"),
        bad(r#"{"ip": "203.0.113.7", "onExpire": "charge"}"#, "onExpire"),
        bad(&long, "path"),
        bad(&many, "facts"),
        ("/v1/check", r#"{"ip": "203.0.113.7", "cost": 1001}"#, "cost_exceeds_limit", Some("cost")),
        ("/v1/check", r#"{"ip": "203.0.113.7", "cost": 1e400}"#, "bad_request", Some("cost")),
        ("/v1/check", r#"{"ip": "203.0.113.7", "costs": {"tokens": -1e999}}"#, "bad_request", Some("costs.tokens")),
        ("/v1/peek", r#"{"ip": "203.0.113.7", "cost": 1001}"#, "cost_exceeds_limit", Some("cost")),
        (
            "/v1/reserve",
            r#"{"ip": "203.0.113.7", "user": "u1", "costs": {"tokens": 1001}}"#,
            "cost_exceeds_limit",
            Some("costs.tokens"),
        ),
    ]);
}

#[test]
fn bodies_that_are_not_json_or_not_an_object() {
    let bad = |body| ("/v1/check", body, "bad_request", None);
    check(&[
        bad(""),
        bad("nonsense"),
        bad(r#"{"ip": "203.0.113.7""#),
        bad(r#"{"ip": "203.0.113.7"} {}"#),
        bad("\"text\""),
        bad("null"),
        bad("7"),
        bad(&"[".repeat(10_000)),
        ("/v1/explain", "[]", "bad_request", None),
        ("/v1/reserve", r#"["203.0.113.7"]"#, "bad_request", None),
        ("/v1/refund", r#"["receipt"]"#, "bad_request", None),
    ]);
}

#[test]
fn a_syntax_error_has_its_line_and_column() {
    let (server, _file) = Server::with(POLICY);
    let answer = server.connect().post("/v1/check", "{\n  \"ip\": }").unwrap().json();
    assert!(answer["message"].as_str().unwrap().contains("line 2 column 9"), "{answer}");
}

#[test]
fn items_of_a_list() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let good = r#"{"ip": "203.0.113.7"}"#;
    let too_many = format!("[{}]", vec![good; 1_001].join(","));
    let cases: [(&str, Option<u64>, Option<&str>); 7] = [
        (r#"[{"ip": "203.0.113.7"}, {"ip": "nobody"}]"#, Some(1), Some("ip")),
        (r#"[{"ip": "203.0.113.7", "cost": -1}]"#, Some(0), Some("cost")),
        (r#"[{"ip": "203.0.113.7"}, {"nonsense": 1}]"#, Some(1), Some("nonsense")),
        (r#"[{"ip": "203.0.113.7"}, {"ip": "203.0.113.7"}, {"user": "u1"}]"#, Some(2), Some("ip")),
        (r#"[{"ip": "203.0.113.7"}, ["203.0.113.7"]]"#, Some(1), None),
        (r#"[{"ip": "203.0.113.7", "ttlSec": 5}]"#, Some(0), Some("ttlSec")),
        (&too_many, None, None),
    ];
    for (body, index, field) in cases {
        let answer = client.post("/v1/check", body).unwrap();
        let told: Value = answer.json();
        assert_eq!((answer.status, &told["field"]), (400, &json!(field)), "{told}");
        assert_eq!(told["index"].as_u64().filter(|_| index.is_some()), index, "{told}");
    }
    assert_eq!(client.post("/v1/peek", good).unwrap().json()["remaining"], 999, "nothing was charged");
}

#[test]
fn the_other_bodies() {
    let bad = |path, body, field| (path, body, "bad_request", Some(field));
    check(&[
        bad("/v1/reserve", r#"{"ip": "203.0.113.7", "ttlSec": 0}"#, "ttlSec"),
        bad("/v1/reserve", r#"{"ip": "203.0.113.7", "ttlSec": 3601}"#, "ttlSec"),
        bad("/v1/reserve", r#"{"ip": "203.0.113.7", "ttlSec": "60"}"#, "ttlSec"),
        bad("/v1/reserve", r#"{"ip": "203.0.113.7", "onExpire": "keep"}"#, "onExpire"),
        bad("/v1/commit", "{}", "reservation"),
        bad("/v1/commit", r#"{"reservation": 5}"#, "reservation"),
        bad("/v1/commit", r#"{"reservation": "x", "cost": -1}"#, "cost"),
        bad("/v1/commit", r#"{"reservation": "x", "costs": {"tokens": 0.5}}"#, "costs.tokens"),
        bad("/v1/release", "{}", "reservation"),
        bad("/v1/release", r#"{"reservation": "x", "cost": 1}"#, "cost"),
        bad("/v1/refund", "{}", "receipt"),
        bad("/v1/refund", r#"{"receipt": "forged"}"#, "receipt"),
        bad("/v1/refund", r#"{"receipt": ""}"#, "receipt"),
        bad("/v1/pause", r#"{"key": "u1", "seconds": 5}"#, "layer"),
        bad("/v1/pause", r#"{"layer": "users", "key": "u1", "seconds": 5}"#, "layer"),
        bad("/v1/pause", r#"{"layer": "user", "key": "u1", "rule": "r", "seconds": 5}"#, "layer"),
        bad("/v1/pause", r#"{"rule": "nowhere", "request": {"user": "u1"}, "seconds": 5}"#, "rule"),
        bad("/v1/pause", r#"{"rule": "posts", "request": {"ttlSec": 5}, "seconds": 5}"#, "ttlSec"),
        bad("/v1/pause", r#"{"rule": "posts", "request": {}, "seconds": 5}"#, "request"),
        bad("/v1/pause", r#"{"rule": "posts", "request": ["203.0.113.7"], "seconds": 5}"#, "request"),
        bad("/v1/pause", r#"{"rule": "posts", "seconds": 5}"#, "layer"),
        bad("/v1/pause", r#"{"layer": "user", "key": "u1", "request": {}, "seconds": 5}"#, "layer"),
        bad("/v1/pause", r#"{"layer": "user", "seconds": 5}"#, "key"),
        bad("/v1/pause", r#"{"layer": "user", "key": "", "seconds": 5}"#, "key"),
        bad("/v1/pause", r#"{"layer": "edge", "key": "banana", "seconds": 5}"#, "key"),
        bad("/v1/pause", r#"{"layer": "edge", "key": "203.0.113.0/24", "seconds": 5}"#, "key"),
        bad("/v1/forgive", r#"{"rule": "nowhere", "request": {"user": "u1"}}"#, "rule"),
        bad("/v1/forgive", r#"{"rule": "posts", "request": {}}"#, "request"),
        bad("/v1/forgive", r#"{"rule": "posts", "request": ["203.0.113.7"]}"#, "request"),
        bad("/v1/forgive", r#"{"rule": "posts"}"#, "request"),
        bad("/v1/forgive", r#"{"rule": "posts", "request": {"user": "u1"}, "reason": ""}"#, "reason"),
        bad("/v1/pause", r#"{"layer": "user", "key": "u1"}"#, "seconds"),
        bad("/v1/pause", r#"{"layer": "user", "key": "u1", "seconds": 0}"#, "seconds"),
        bad("/v1/pause", r#"{"layer": "user", "key": "u1", "seconds": 31536001}"#, "seconds"),
        bad("/v1/pause", r#"{"layer": "user", "key": 5, "seconds": 5}"#, "key"),
    ]);
}

#[test]
fn one_limit() {
    let bad = |body, field| ("/v1/limit", body, "bad_request", Some(field));
    check(&[
        bad("{}", "key"),
        bad(r#"{"limit": 5, "windowSec": 60}"#, "key"),
        bad(r#"{"key": "", "limit": 5, "windowSec": 60}"#, "key"),
        bad(r#"{"key": "k", "windowSec": 60}"#, "limit"),
        bad(r#"{"key": "k", "limit": 0, "windowSec": 60}"#, "limit"),
        bad(r#"{"key": "k", "limit": -5, "windowSec": 60}"#, "limit"),
        bad(r#"{"key": "k", "limit": 1000000000000000, "windowSec": 60}"#, "limit"),
        bad(r#"{"key": "k", "limit": 65537, "windowSec": 60, "algorithm": "concurrency"}"#, "limit"),
        bad(r#"{"key": "k", "limit": 5}"#, "windowSec"),
        bad(r#"{"key": "k", "limit": 5, "windowSec": 0}"#, "windowSec"),
        bad(r#"{"key": "k", "limit": 5, "windowSec": 0.5}"#, "windowSec"),
        bad(r#"{"key": "k", "limit": 5, "windowSec": 9007199254740991}"#, "windowSec"),
        bad(r#"{"key": "k", "limit": 5, "windowSeconds": 0}"#, "windowSeconds"),
        bad(r#"{"key": "k", "limit": 5, "windowSeconds": "60"}"#, "windowSeconds"),
        bad(r#"{"key": "k", "limit": 5, "windowSeconds": 9007199254740991}"#, "windowSeconds"),
        bad(r#"{"key": "k", "limit": 5, "windowSec": 60, "windowSeconds": 60}"#, "windowSeconds"),
        bad(r#"{"key": "k", "limit": 5, "windowSec": 60, "algorithm": "leaky"}"#, "algorithm"),
        bad(r#"{"key": "k", "limit": 5, "windowSec": 60, "burst": 5}"#, "burst"),
        ("/v1/limit", r#"{"key": "k", "limit": 5, "windowSec": 60, "cost": 6}"#, "cost_exceeds_limit", Some("cost")),
        ("/check", r#"{"key": "k", "limit": 5, "windowSec": 60, "cost": 6}"#, "cost_exceeds_limit", Some("cost")),
    ]);
}

#[test]
fn unknown_paths_methods_and_requests_of_web_pages() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let json_type = ("content-type", "application/json");
    let page = ("sec-fetch-site", "cross-site");
    type Fields<'a> = &'a [(&'a str, &'a str)];
    let rebound = ("host", "evil.example:8080");
    let cases: [(&str, &str, Fields<'_>, u16, &str); 11] = [
        ("GET", "/nowhere", &[], 404, "not_found"),
        ("POST", "/v1/checks", &[json_type], 404, "not_found"),
        ("GET", "/v1/check", &[], 405, "method_not_allowed"),
        ("DELETE", "/healthz", &[], 405, "method_not_allowed"),
        ("POST", "/v1/check", &[("origin", "https://example.com")], 403, "forbidden"),
        ("POST", "/v1/check", &[("origin", "http://localhost:3000")], 415, "unsupported_media_type"),
        ("POST", "/v1/check", &[page, ("content-type", "text/plain")], 415, "unsupported_media_type"),
        ("POST", "/v1/limit", &[page, ("content-type", "application/jsonp")], 415, "unsupported_media_type"),
        ("POST", "/v1/check", &[("content-encoding", "gzip")], 415, "unsupported_media_type"),
        ("POST", "/v1/limit", &[("content-encoding", "identity, br")], 415, "unsupported_media_type"),
        // DNS rebinding: a foreign name that resolves to this machine.
        ("POST", "/v1/check", &[page, json_type, rebound], 403, "forbidden"),
    ];
    for (method, path, fields, status, error) in cases {
        let body = if method == "POST" { r#"{"ip": "203.0.113.7"}"# } else { "" };
        let answer = client.send(method, path, fields, body).unwrap();
        assert_eq!((answer.status, &answer.json()["error"]), (status, &json!(error)), "{method} {path}");
        assert_eq!(answer.header("allow").is_some(), status == 405);
    }
    // A page that sends JSON has passed a CORS preflight; other clients need no content type.
    let fine: [Fields<'_>; 4] = [
        &[page, ("content-type", "Application/JSON; charset=utf-8")],
        &[],
        &[("content-type", "text/plain")],
        &[("content-encoding", "Identity")],
    ];
    for fields in fine {
        assert_eq!(client.send("POST", "/v1/check", fields, r#"{"ip": "203.0.113.7"}"#).unwrap().status, 200);
    }
}

/// A client that parses every error as JSON failed on the empty answers to requests that are not HTTP.
#[test]
fn even_a_request_that_is_not_http_is_answered_in_json() {
    let server = Start::default().server();
    let long = "x".repeat(20_000);
    let many: String = (0..200).map(|n| format!("x-{n}: 1\r\n")).collect();
    let cases = [
        ("nonsense\r\n\r\n".to_owned(), 400, "bad_request"),
        ("GET / HTTP/1.1\r\nbad header\r\n\r\n".to_owned(), 400, "bad_request"),
        ("POST /v1/check HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -5\r\n\r\n".to_owned(), 400, "bad_request"),
        (format!("GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: {long}\r\n\r\n"), 431, "headers_too_large"),
        (format!("GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n{many}\r\n"), 431, "headers_too_large"),
    ];
    for (request, status, error) in cases {
        let mut client = server.connect();
        client.write(&request).unwrap();
        let answer = client.read().unwrap();
        assert_eq!((answer.status, answer.header("content-type")), (status, Some("application/json")), "{answer:?}");
        assert_eq!(answer.json()["error"], error, "{answer:?}");
    }
}
