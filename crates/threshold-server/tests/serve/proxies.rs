//! Real nginx and real Caddy in front of an application, configured by the files in `deploy/`, and asked as clients ask.

use serde_json::Value;

use super::client::{Answer, Client};
use super::origin::{Origin, connect_from};
use super::process::{Scratch, Server};
use super::proxy::{Kind, Proxy};

const POLICY: &str = r#"
[identity]
trusted_proxies = ["127.0.0.1/32"]
client_ip = "x-forwarded-for"
user = "header:x-user"

[[rule]]
name = "address"
layer = "edge"
per = ["ip"]
limit = "3/h"
algorithm = "sliding-log"
match = { path = "/page/**" }

[[rule]]
name = "login"
layer = "endpoint"
per = ["ip"]
limit = "1/h"
algorithm = "sliding-log"
match = { method = "POST", path = "/api/login" }

[[rule]]
name = "admin"
layer = "edge"
per = ["ip"]
limit = "1/h"
algorithm = "sliding-log"
match = { host = "admin.example.com" }

[[rule]]
name = "upload"
layer = "user"
per = ["user"]
limit = "100B/h"
algorithm = "sliding-window"
match = { path = "/upload" }

[[rule]]
name = "closed"
layer = "edge"
per = ["ip"]
deny = true
match = { path = "/closed" }
body = """
Closed,
all day.
"""
"#;

/// A client's address. It is not one of the trusted, as every client's should be.
const CLIENT: [u8; 4] = [127, 0, 0, 2];

/// A site: an application, Threshold beside it, and a proxy in front of both.
struct Site {
    proxy: Proxy,
    server: Option<Server>,
    origin: Origin,
    _policy: Scratch,
}

impl Site {
    fn new(kind: Kind) -> Self {
        let (server, policy) = Server::with(POLICY);
        let origin = Origin::start();
        let threshold = server.place.strip_prefix("http://").unwrap().to_owned();
        let proxy = Proxy::start(kind, &threshold, &origin.address().to_string());
        Self { proxy, server: Some(server), origin, _policy: policy }
    }

    fn client(&self, ip: [u8; 4]) -> Client<std::net::TcpStream> {
        Client::new(connect_from(ip, self.proxy.address))
    }

    fn get(&self, ip: [u8; 4], path: &str, fields: &[(&str, &str)]) -> Answer {
        self.client(ip).send("GET", path, fields, "").unwrap()
    }
}

/// Every test is about both.
fn each(test: impl Fn(&Site)) {
    for kind in [Kind::Nginx, Kind::Caddy] {
        test(&Site::new(kind));
    }
}

#[track_caller]
fn is_denied_by(rule: &str, answer: &Answer) -> Value {
    assert_eq!(answer.status, 429, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"), "{answer:?}");
    assert_eq!(answer.header("cache-control"), Some("no-store"), "{answer:?}");
    let json = answer.json();
    assert_eq!(json["rule"], rule, "{answer:?}");
    json
}

#[test]
fn clients_cross_until_they_are_told_when_to_come_back() {
    each(|site| {
        for left in ["2", "1", "0"] {
            let answer = site.get(CLIENT, "/page/1?q=1", &[]);
            assert_eq!(answer.status, 200, "{answer:?}");
            assert!(answer.body.starts_with("GET /page/1?q=1 "), "{answer:?}");
            assert_eq!(answer.header("x-ratelimit-limit"), Some("3"));
            assert_eq!(answer.header("x-ratelimit-remaining"), Some(left));
            assert_eq!(answer.header("ratelimit-policy"), Some("\"address\";q=3;w=3600"));
            assert!(answer.header("ratelimit").unwrap().starts_with(&format!("\"address\";r={left};t=")));
            assert_eq!((answer.header("retry-after"), answer.header("cache-control")), (None, None));
        }
        let seen = site.origin.seen();
        let denied = site.get(CLIENT, "/page/2", &[]);
        let json = is_denied_by("address", &denied);
        assert_eq!(
            (&json["error"], &json["limit"], &json["remaining"]),
            (&"rate_limited".into(), &3.into(), &0.into())
        );
        assert_eq!(json["traceId"].as_str().unwrap().len(), 32);
        let wait = denied.header("retry-after").unwrap();
        assert_eq!(json["retryAfter"].to_string(), wait);
        assert_eq!(denied.header("x-ratelimit-limit"), Some("3"));
        assert_eq!(denied.header("x-ratelimit-remaining"), Some("0"));
        assert!(denied.header("x-ratelimit-reset").is_some());
        assert_eq!(denied.header("ratelimit-policy"), Some("\"address\";q=3;w=3600"));
        assert_eq!(denied.header("ratelimit"), Some(format!("\"address\";r=0;t={wait}").as_str()));
        assert_eq!(site.origin.seen(), seen, "the application saw a request that was denied");
        // Of what the proxy was told, nothing else reaches the client.
        assert!(["status", "form", "body"].iter().all(|n| denied.header(&format!("x-threshold-{n}")).is_none()));
        // Another client has a budget of its own.
        assert_eq!(site.get([127, 0, 0, 3], "/page/1", &[]).status, 200);
    });
}

#[test]
fn nothing_that_a_client_sends_changes_who_it_is_or_what_it_asks() {
    let forged = [
        ("x-forwarded-for", "203.0.113.9"),
        ("forwarded", "for=203.0.113.9"),
        ("x-real-ip", "203.0.113.9"),
        ("x-original-uri", "/free"),
        ("x-original-method", "OPTIONS"),
        ("x-original-host", "free.example.com"),
        ("x-forwarded-uri", "/free"),
        ("x-forwarded-method", "OPTIONS"),
        ("x-forwarded-host", "free.example.com"),
        ("x-original-content-length", "0"),
        ("content-type", "application/grpc"),
        ("x-user", "somebody"),
    ];
    each(|site| {
        for _ in 0..3 {
            assert_eq!(site.get(CLIENT, "/page/1", &[]).status, 200);
        }
        for field in forged {
            is_denied_by("address", &site.get(CLIENT, "/page/1", &[field]));
        }
        is_denied_by("address", &site.get(CLIENT, "/page/1", &forged));
    });
}

#[test]
fn rules_by_method_path_and_host_see_the_clients_own_in_any_spelling() {
    each(|site| {
        let post = |path| site.client(CLIENT).send("POST", path, &[], "name=a").unwrap();
        assert_eq!(post("/api/login").body, "POST /api/login name=a");
        for path in ["/api/login", "//api/./login", "/API/login/", "/api/%6cogin?x=1", "/x/../api/login"] {
            is_denied_by("login", &post(path));
        }
        assert_eq!(site.get(CLIENT, "/api/login", &[]).status, 200);
        let mut client = site.client(CLIENT);
        let request = "GET / HTTP/1.1\r\nhost: Admin.Example.com:8080\r\n\r\n";
        client.write(request).unwrap();
        assert_eq!(client.read().unwrap().status, 200);
        client.write(request).unwrap();
        is_denied_by("admin", &client.read().unwrap());
        // What no proxy and no URI should have, but proxies pass on.
        assert!(matches!(site.get(CLIENT, "/odd/<a>^`|{}\"", &[]).status, 200 | 400));
    });
}

#[test]
fn bodies_pass_and_their_length_counts() {
    each(|site| {
        let post = |length| site.client(CLIENT).send("POST", "/upload", &[], &"x".repeat(length)).unwrap();
        assert_eq!(post(60).body, format!("POST /upload {}", "x".repeat(60)));
        is_denied_by("upload", &post(60));
        let never = post(101);
        assert_eq!((never.status, &never.json()["error"]), (413, &"cost_exceeds_limit".into()), "{never:?}");
        assert_eq!(post(40).status, 200);
    });
}

#[test]
fn a_denial_has_the_form_that_the_client_reads_or_the_rule_says() {
    each(|site| {
        (0..3).for_each(|_| drop(site.get(CLIENT, "/page/1.html", &[])));
        let problem = site.get(CLIENT, "/page/1.html", &[("accept", "application/problem+json")]);
        assert_eq!(problem.status, 429);
        assert_eq!(problem.header("content-type"), Some("application/problem+json"));
        assert_eq!(problem.json()["violated-policies"], serde_json::json!(["address"]));
        let own = site.get(CLIENT, "/closed", &[]);
        assert_eq!((own.status, own.header("content-type")), (429, Some("text/plain; charset=utf-8")), "{own:?}");
        assert_eq!(own.body.split_whitespace().collect::<Vec<_>>(), ["Closed,", "all", "day."]);
        let head = site.client(CLIENT);
        let answer = { head }.send_head("/page/1").unwrap();
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (429, Some("0")));
    });
}

#[test]
fn a_websocket_passes_and_is_counted_once() {
    each(|site| {
        let upgrade = [
            ("connection", "Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ];
        let mut client = site.client(CLIENT);
        let fields: String = upgrade.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        client.write(&format!("GET /page/socket HTTP/1.1\r\nhost: t\r\n{fields}\r\n")).unwrap();
        let answer = client.read().unwrap();
        assert_eq!(answer.status, 101, "{answer:?}");
        assert_eq!(client.echo("hello"), "hello");
        let next = site.get(CLIENT, "/page/1", &[]);
        assert_eq!(next.header("x-ratelimit-remaining"), Some("1"), "{next:?}");
        assert_eq!(site.get(CLIENT, "/page/1", &[]).status, 200);
        is_denied_by("address", &site.get(CLIENT, "/page/1", &upgrade));
    });
}

#[test]
fn without_threshold_nobody_crosses() {
    for (kind, status) in [(Kind::Nginx, 500), (Kind::Caddy, 502)] {
        let mut site = Site::new(kind);
        assert_eq!(site.get(CLIENT, "/page/1", &[]).status, 200);
        site.server = None;
        assert_eq!(site.get(CLIENT, "/page/1", &[]).status, status);
    }
}

#[test]
fn nginx_leaves_out_what_is_told_to_and_can_be_told_to_open() {
    let mut site = Site::new(Kind::Nginx);
    let health = site.get(CLIENT, "/health", &[]);
    assert_eq!((health.status, health.header("x-ratelimit-limit")), (200, None));
    // Neither of its inner locations is there for clients.
    for inner in ["/_threshold", "/_threshold_denied/answer.json"] {
        assert_eq!(site.get(CLIENT, inner, &[]).status, 404);
    }
    site.proxy = site.proxy.uncommented(&[
        "error_page 502 504",
        "location @threshold_away",
        "    auth_request off;",
        "    return 204",
        "}",
    ]);
    site.server = None;
    assert_eq!(site.get(CLIENT, "/page/1", &[]).status, 200);
}
