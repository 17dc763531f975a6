//! Tests forward auth with the requests that proxies send: which headers are trusted, from whom, and what is answered.

use std::os::unix::net::UnixStream;

use super::client::{Answer, Client};
use super::origin::connect_from;
use super::process::{Scratch, Server, Start};

const POLICY: &str = r#"
[identity]
trusted_proxies = ["127.0.0.1/32"]
client_ip = "x-forwarded-for"

[[rule]]
name = "address"
layer = "edge"
per = ["ip"]
limit = "2/h"
algorithm = "sliding-log"

[[rule]]
name = "at-once"
layer = "edge"
per = ["ip"]
match = { path = "/slow" }
limit = "1"
algorithm = "concurrency"
ttl = "1h"

[[rule]]
name = "failures"
layer = "edge"
per = ["ip"]
match = { path = "/login" }
limit = "1/h"
count = "status:401"
"#;

const TRUSTED: [u8; 4] = [127, 0, 0, 1];

/// The headers that Traefik's ForwardAuth sends for a client's request, in its order.
fn traefik(server: &Server, from: [u8; 4], client: &str, more: &[(&str, &str)]) -> Answer {
    let (_, address) = server.place.split_once("://").unwrap();
    let first = [("host", address), ("user-agent", "curl/8.5.0"), ("accept", "*/*"), ("accept-encoding", "gzip")];
    let own = [
        ("x-forwarded-for", client),
        ("x-forwarded-host", "app.example.com"),
        ("x-forwarded-method", "GET"),
        ("x-forwarded-port", "443"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-server", "edge-1"),
        ("x-forwarded-uri", "/page?x=1"),
    ];
    let fields = first.iter().chain(more).chain(&own);
    // Each character is one byte.
    let bytes = |value: &str| value.chars().map(|c| u8::try_from(c).unwrap()).collect();
    let fields: Vec<(String, Vec<u8>)> = fields.map(|(name, value)| ((*name).to_owned(), bytes(value))).collect();
    Client::new(connect_from(from, address.parse().unwrap())).ask_bytes("GET", "/auth", &fields).unwrap()
}

fn ask(server: &Server, path: &str, fields: &[(&str, &str)]) -> Answer {
    server.connect().send("GET", path, fields, "").unwrap()
}

fn nginx(path: &'static str) -> [(&'static str, &'static str); 3] {
    [("x-original-method", "GET"), ("x-original-uri", path), ("x-forwarded-for", "203.0.113.7")]
}

/// A header with one byte that is not UTF-8 once had the proxy's own address charged.
#[test]
fn a_byte_that_is_not_utf_8_does_not_change_the_client() {
    let (server, _policy) = Server::with(POLICY);
    for (forged, status) in
        [("\u{ff}, 203.0.113.7", 200), ("\u{ff}\u{fe},203.0.113.7", 200), ("\u{fd}, 203.0.113.7", 429)]
    {
        assert_eq!(traefik(&server, TRUSTED, forged, &[]).status, status, "{forged}");
    }
    assert_eq!(traefik(&server, TRUSTED, "\u{ff}, 203.0.113.8", &[]).status, 200);
}

#[test]
fn traefik_gets_the_whole_answer_for_its_client() {
    let (server, _policy) = Server::with(POLICY);
    for left in ["1", "0"] {
        let answer = traefik(&server, TRUSTED, "203.0.113.7", &[]);
        assert_eq!((answer.status, answer.body.as_str()), (200, ""));
        assert_eq!(answer.header("x-ratelimit-remaining"), Some(left));
    }
    let denied = traefik(&server, TRUSTED, "203.0.113.7", &[]);
    assert_eq!((denied.status, denied.header("content-type")), (429, Some("application/json")));
    assert!(denied.header("retry-after").is_some() && denied.header("ratelimit").is_some());
    assert_eq!(denied.json()["rule"], "address");
    assert_eq!(traefik(&server, TRUSTED, "203.0.113.8", &[]).status, 200);
    // A gRPC denial has the status 200, which would allow the request here.
    let grpc = traefik(&server, TRUSTED, "203.0.113.7", &[("content-type", "application/grpc"), ("te", "trailers")]);
    assert_eq!(grpc.status, 429);
    // A client's header that the proxy passed on beside its own: they cannot be told apart.
    for forged in [("x-original-uri", "/free"), ("x-original-host", "free.example.com"), ("x-original-method", "PUT")] {
        let answer = traefik(&server, TRUSTED, "203.0.113.9", &[forged]);
        assert_eq!((answer.status, &answer.json()["error"]), (400, &"bad_request".into()));
    }
    assert_eq!(traefik(&server, TRUSTED, "203.0.113.9", &[]).header("x-ratelimit-remaining"), Some("1"));
}

/// Whatever headers an untrusted peer sends, it is one client. The log once named the peer by a digest, which nobody can list in
/// `trusted_proxies`.
#[test]
fn an_untrusted_peer_is_decided_as_a_client() {
    let (server, _policy) = Server::with(POLICY);
    let spoofed = ["203.0.113.7", "127.0.0.1", "127.0.0.3", "203.0.113.7"];
    let statuses = spoofed.map(|client| traefik(&server, [127, 0, 0, 2], client, &[]).status);
    assert_eq!(statuses, [200, 200, 429, 429]);
    for client in ["203.0.113.7", "127.0.0.3"] {
        let answer = traefik(&server, TRUSTED, client, &[]);
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some("1")));
    }
    let told = server.wait_for_log("peer at /auth");
    assert!(told.contains("trusted_proxies") && told.contains("peer=127.0.0.2 "), "{told}");
}

#[test]
fn for_nginx_a_denial_is_a_403_that_carries_the_answer() {
    let (server, _policy) = Server::with(POLICY);
    for _ in 0..2 {
        let answer = ask(&server, "/auth?deny=403", &nginx("/"));
        assert_eq!((answer.status, answer.header("x-threshold-status")), (200, None));
    }
    let denied = ask(&server, "/auth?deny=403", &nginx("/"));
    assert_eq!((denied.status, denied.header("x-threshold-status")), (403, Some("429")));
    assert_eq!(denied.header("x-threshold-form"), Some("json"));
    assert_eq!(denied.header("x-threshold-body"), Some(denied.body.as_str()));
    assert!(denied.header("retry-after").is_some());
    let problem =
        ask(&server, "/auth?deny=403", &[&nginx("/")[..], &[("accept", "application/problem+json")]].concat());
    assert_eq!(problem.header("x-threshold-form"), Some("problem"));
    // Without `deny=403` the denial is passed through.
    assert_eq!(ask(&server, "/auth", &nginx("/")).status, 429);
    // Other parameters are ignored: Caddy's forward_auth adds those of its client.
    assert_eq!(ask(&server, "/auth?q=1&lang=en", &nginx("/")).status, 429);
}

/// nginx asks again after each internal redirect, and each time once was charged.
#[test]
fn a_request_with_a_proxys_id_is_counted_once() {
    let (server, _policy) = Server::with(POLICY);
    let named = |path: &'static str, id: &str| {
        ask(&server, "/auth?deny=403", &[&nginx(path)[..], &[("x-threshold-request-id", id)]].concat())
    };
    let first = named("/", "0123456789abcdef0123456789abcdef");
    assert_eq!((first.status, first.header("x-ratelimit-remaining")), (200, Some("1")));
    for _ in 0..3 {
        let again = named("/", "0123456789abcdef0123456789abcdef");
        assert_eq!((again.status, again.header("ratelimit")), (200, first.header("ratelimit")));
        assert_eq!(again.header("x-ratelimit-remaining"), Some("1"));
    }
    // Another id, or another question with the same id, is counted.
    assert_eq!(named("/other", "0123456789abcdef0123456789abcdef").header("x-ratelimit-remaining"), Some("0"));
    assert_eq!(named("/", "fedcba9876543210fedcba9876543210").status, 403);
    // The first question may still be repeated.
    assert_eq!(named("/", "0123456789abcdef0123456789abcdef").status, 200);
    // A denial is decided again.
    assert_eq!(named("/", "fedcba9876543210fedcba9876543210").status, 403);
}

#[test]
fn an_id_is_accepted_from_trusted_peers_only_and_must_be_valid() {
    let (server, _policy) = Server::with(POLICY);
    let id = ("x-threshold-request-id", "0123456789abcdef");
    let statuses = [(); 4].map(|()| traefik(&server, [127, 0, 0, 2], "203.0.113.7", &[id]).status);
    assert_eq!(statuses, [200, 200, 429, 429]);
    let twice = ask(&server, "/auth", &[&nginx("/")[..], &[id, id]].concat());
    assert_eq!((twice.status, &twice.json()["field"]), (400, &"x-threshold-request-id".into()));
}

/// nginx passes on 401 and 403 and turns anything else into 500, so a client with an invalid request once got a server error.
#[test]
fn for_nginx_what_cannot_be_asked_is_a_403_that_carries_the_answer_too() {
    let (server, _policy) = Server::with(POLICY);
    let odd = [("x-original-method", "GET"), ("x-original-uri", "nowhere"), ("x-forwarded-for", "203.0.113.7")];
    let answer = ask(&server, "/auth?deny=403", &odd);
    assert_eq!((answer.status, answer.header("x-threshold-status")), (403, Some("400")));
    assert_eq!(answer.header("x-threshold-body"), Some(answer.body.as_str()));
    assert_eq!((answer.header("x-threshold-form"), &answer.json()["error"]), (Some("json"), &"bad_request".into()));
    assert_eq!(ask(&server, "/auth", &odd).status, 400);
}

#[test]
fn concurrency_lasts_for_its_ttl_and_outcomes_are_not_counted() {
    let (server, _policy) = Server::with(POLICY);
    assert_eq!(ask(&server, "/auth", &nginx("/slow")).status, 200);
    assert_eq!(ask(&server, "/auth", &nginx("/slow")).json()["rule"], "at-once");
    let (server, _policy) = Server::with(&POLICY.replace("2/h", "9/h"));
    for _ in 0..3 {
        assert_eq!(ask(&server, "/auth", &nginx("/login")).status, 200);
    }
}

#[test]
fn a_proxy_sends_its_token_in_a_header_of_its_own() {
    let policy = Scratch::file("policy.toml", POLICY);
    let variables = [("THRESHOLD_TOKEN", "t0ken-0123456789")];
    let server = Start { policy: Some(policy.path()), variables: &variables, ..Start::default() }.server();
    let asked = |field: (&str, &str)| ask(&server, "/auth", &[&nginx("/")[..], &[field]].concat()).status;
    assert_eq!(asked(("x-threshold-token", "t0ken-0123456789")), 200);
    assert_eq!(asked(("x-threshold-token", "token-0123456789")), 401);
    // `Authorization` is the client's.
    assert_eq!(asked(("authorization", "Bearer t0ken-0123456789")), 401);
}

#[test]
fn a_peer_on_a_unix_socket_is_this_machine() {
    let folder = Scratch::folder();
    let policy = Scratch::file("policy.toml", POLICY);
    let path = folder.path().join("threshold.sock");
    let address = format!("unix:{}", path.display());
    let _server = Start { policy: Some(policy.path()), args: &["--http", &address], ..Start::default() }.server();
    let mut client = Client::new(UnixStream::connect(&path).unwrap());
    for status in [200, 200, 429] {
        assert_eq!(client.send("GET", "/auth", &nginx("/"), "").unwrap().status, status);
    }
}

#[test]
fn every_method_is_accepted_and_a_body_is_ignored() {
    let (server, _policy) = Server::with(POLICY);
    let mut client = server.connect();
    for status in [200, 200, 429, 429] {
        let answer = client.send("POST", "/auth", &nginx("/"), "name=value").unwrap();
        assert_eq!(answer.status, status);
    }
}

/// A chat client that reads one kind of error body got three: the rule's, the door's own for odd paths, and the API's. And a user
/// who was let through had no id to quote. Now every answer has `X-Trace-Id`, every refusal has the policy's body with the same
/// id, and so has the log.
#[test]
fn every_answer_has_a_trace_id_and_every_refusal_the_policys_body() {
    let preset = include_str!("../../../../policies/chat-tenants.toml");
    let policy = Scratch::file("policy.toml", &preset.replace("60/min", "1/h"));
    let server = Start { policy: Some(policy.path()), args: &["--log", "json"], ..Start::default() }.server();
    let ask = |path: &str, fields: &[(&str, &str)]| {
        let own = [("x-forwarded-for", "203.0.113.7"), ("x-tenant", "t1"), ("x-user", "u1")];
        ask(&server, path, &own.iter().chain(fields).copied().collect::<Vec<_>>())
    };
    let get = |uri| [("x-original-method", "GET"), ("x-original-uri", uri)];
    let trace = |answer: &Answer| {
        let trace = answer.header("x-trace-id").unwrap_or_else(|| panic!("no trace id: {answer:?}")).to_owned();
        assert_eq!(trace.len(), 32);
        trace
    };
    let allowed = ask("/auth", &get("/chat"));
    assert_eq!(allowed.status, 200);
    trace(&allowed);
    let mut traces = Vec::new();
    let mut refused = |answer: Answer, status: u16, code: &str, message: &str| {
        assert_eq!((answer.status, answer.header("content-type")), (status, Some("application/json")), "{answer:?}");
        let id = trace(&answer);
        let body = serde_json::json!({"ok": false, "error": {"code": code, "message": message}, "traceId": id});
        assert_eq!(answer.json(), body);
        traces.push(id);
    };
    refused(ask("/auth", &get("/chat")), 429, "rate_limited", "Too many messages. Please wait a moment and try again.");
    refused(ask("/auth", &get("/a/../chat")), 400, "bad_request", "the path has a dot segment (. or ..)");
    refused(
        ask("/auth", &get("/chat")[1..]),
        400,
        "bad_request",
        "a proxy must send x-original-method or x-forwarded-method",
    );
    // nginx gets the same body in a header.
    let denied = ask("/auth?deny=403", &get("/chat"));
    assert_eq!((denied.status, denied.header("x-threshold-status")), (403, Some("429")));
    let body = denied.header("x-threshold-body").unwrap();
    assert!(body.contains("{\"ok\":false,") && body.contains(&trace(&denied)), "{body}");
    server.signal("TERM");
    let (_, log) = server.wait();
    for trace in traces {
        assert!(log.contains(&trace), "{trace} is not in {log}");
    }
}

/// The proxy's own mistake is answered as by the API, with an id that is in the log.
#[test]
fn a_proxy_without_its_token_gets_a_trace_id_too() {
    let token = [("THRESHOLD_TOKEN", "a-token-of-some-length")];
    let server = Start { variables: &token, args: &["--log", "json"], ..Start::default() }.server();
    let answer = ask(&server, "/auth", &nginx("/"));
    assert_eq!((answer.status, &answer.json()["error"]), (401, &"unauthorized".into()));
    let trace = answer.header("x-trace-id").unwrap().to_owned();
    server.signal("TERM");
    assert!(server.wait().1.contains(&trace));
}
