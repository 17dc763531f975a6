//! The layer in front of axum: what a client sees, and what is counted, held and given back behind it.

#![cfg(feature = "tower")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::MatchedPath;
use axum::response::Response;
use axum::routing::{any, get, post};
use http::{HeaderMap, Request, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use threshold_core::policy::Layer;
use threshold_core::{Span, Timestamp, Verdict};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::tower::{Identified, PeerAddr, RequestBody, ThresholdLayer};
use threshold_limiter::{Clock, Facts, Limiter, ManualClock, Policy};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;
use tower::{Layer as _, Service as _, ServiceExt as _};

const START: Timestamp = Timestamp::from_secs(1_767_225_600);
const CLIENT: &str = "203.0.113.7:4711";
const PROXY: &str = "10.0.0.1:4711";

type Shared = Arc<Limiter<MemoryStore, Arc<ManualClock>>>;

/// A limiter under a policy, with its clock.
struct World {
    clock: Arc<ManualClock>,
    limiter: Shared,
}

impl World {
    #[track_caller]
    fn new(policy: &str) -> Self {
        let clock = Arc::new(ManualClock::new(START));
        let policy = Policy::parse(policy, &|_| None).unwrap();
        let limiter = Arc::new(Limiter::builder(policy).clock(Arc::clone(&clock)).build());
        Self { clock, limiter }
    }

    fn layer(&self) -> ThresholdLayer {
        ThresholdLayer::new(Arc::clone(&self.limiter)).unwrap()
    }

    /// Answers everything with "hello".
    fn hello(&self) -> Router {
        Router::new().route("/{*path}", any(|| async { "hello" })).layer(self.layer())
    }

    /// What remains of the limit that binds, for a client at the address used throughout.
    fn remaining(&self) -> u64 {
        let facts = Facts { ip: Some([203, 0, 113, 7].into()), cost: Some(0), ..Facts::default() };
        self.limiter.peek(&facts).unwrap().bound_by().unwrap().remaining
    }
}

/// A request of a peer, with these header fields.
fn request(peer: &str, path: &str, fields: &[(&str, &str)]) -> Request<Body> {
    let peer: SocketAddr = peer.parse().unwrap();
    let builder = fields.iter().fold(Request::builder().uri(path), |built, (name, value)| built.header(*name, *value));
    builder.extension(PeerAddr(peer)).body(Body::empty()).unwrap()
}

async fn send(app: &Router, request: Request<Body>) -> Response {
    app.clone().oneshot(request).await.unwrap()
}

async fn ask(app: &Router, peer: &str, fields: &[(&str, &str)]) -> Response {
    send(app, request(peer, "/x", fields)).await
}

async fn status(app: &Router, peer: &str, fields: &[(&str, &str)]) -> u16 {
    ask(app, peer, fields).await.status().as_u16()
}

async fn json(response: Response) -> Value {
    serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
}

/// The status and the header fields of a response, without its trace id, which no two responses share.
fn untraced(response: &Response) -> (StatusCode, HeaderMap) {
    let mut headers = response.headers().clone();
    assert!(headers.remove("x-trace-id").is_some());
    (response.status(), headers)
}

fn field<'r>(headers: &'r HeaderMap, name: &str) -> Option<&'r str> {
    headers.get(name).map(|value| value.to_str().unwrap())
}

const TWO_AN_HOUR: &str = r#"
    [identity]
    trusted_proxies = ["10.0.0.0/8"]
    client_ip = "x-forwarded-for"
    user = "header:x-user"

    [[rule]]
    name = "edge"
    per = ["ip"]
    limit = "2/h"
"#;

#[tokio::test]
async fn an_allowed_answer_says_how_its_caller_stands() {
    let app = World::new(TWO_AN_HOUR).hello();
    let response = ask(&app, CLIENT, &[]).await;
    assert_eq!(response.status(), StatusCode::OK);
    let headers = response.headers();
    assert_eq!(field(headers, "x-ratelimit-limit"), Some("2"));
    assert_eq!(field(headers, "x-ratelimit-remaining"), Some("1"));
    assert!(field(headers, "x-ratelimit-reset").is_some());
    assert!(field(headers, "ratelimit").unwrap().starts_with("\"edge\";r=1"));
    assert_eq!(field(headers, "ratelimit-policy"), Some("\"edge\";q=2;w=3600"));
    assert_eq!(field(headers, "retry-after"), None);
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");
}

#[tokio::test]
async fn a_denied_request_never_reaches_the_service_and_is_told_when_to_come_back() {
    let world = World::new(TWO_AN_HOUR);
    let app = world.hello();
    for _ in 0..2 {
        assert_eq!(status(&app, CLIENT, &[]).await, 200);
    }
    let response = ask(&app, CLIENT, &[]).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let headers = response.headers();
    assert_eq!(field(headers, "content-type"), Some("application/json"));
    assert_eq!(field(headers, "cache-control"), Some("no-store"));
    assert_eq!(field(headers, "x-ratelimit-remaining"), Some("0"));
    let wait: u64 = field(headers, "retry-after").unwrap().parse().unwrap();
    let body = json(response).await;
    assert_eq!(body["error"], "rate_limited");
    assert_eq!(body["rule"], "edge");
    assert_eq!(body["retryAfter"], wait);
    assert_eq!(body["traceId"].as_str().unwrap().len(), 32);

    world.clock.advance(Span::from_secs(wait - 1));
    assert_eq!(status(&app, CLIENT, &[]).await, 429);
    world.clock.advance(Span::SECOND);
    assert_eq!(status(&app, CLIENT, &[]).await, 200);
}

#[tokio::test]
async fn a_client_that_reads_problems_gets_one() {
    let app = World::new(TWO_AN_HOUR).hello();
    for _ in 0..2 {
        assert_eq!(status(&app, CLIENT, &[]).await, 200);
    }
    let response = ask(&app, CLIENT, &[("accept", "text/html, application/problem+json")]).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(field(response.headers(), "content-type"), Some("application/problem+json"));
    let body = json(response).await;
    assert_eq!(body["status"], 429);
    assert_eq!(body["violated-policies"][0], "edge");
}

#[tokio::test]
async fn a_spoofed_address_changes_nothing_and_a_trusted_one_counts() {
    let app = World::new(TWO_AN_HOUR).hello();
    for (spoofed, expect) in [("1.1.1.1", 200), ("1.1.1.2", 200), ("1.1.1.3", 429)] {
        let headers = [("x-forwarded-for", spoofed)];
        assert_eq!(status(&app, CLIENT, &headers).await, expect);
    }
    for (client, expect) in [("1.1.1.1", 200), ("1.1.1.1", 200), ("1.1.1.1", 429), ("1.1.1.2", 200)] {
        assert_eq!(status(&app, PROXY, &[("x-forwarded-for", client)]).await, expect);
    }
    // What the client wrote to the left of what the proxy saw is not believed either.
    assert_eq!(status(&app, PROXY, &[("x-forwarded-for", "9.9.9.9, 1.1.1.1")]).await, 429);
}

/// A byte that is no text had the proxy's own address charged.
#[tokio::test]
async fn a_line_that_is_no_text_does_not_bring_a_forged_one_forward() {
    let app = World::new(TWO_AN_HOUR).hello();
    let forged = |number: u8, client: &str| {
        let mut request = request(PROXY, "/x", &[("x-forwarded-for", &format!("6.6.6.{number}"))]);
        let line = [b"\xff, ", client.as_bytes()].concat();
        request.headers_mut().append("x-forwarded-for", http::HeaderValue::from_bytes(&line).unwrap());
        request
    };
    for (number, expect) in [(1, 200), (2, 200), (3, 429)] {
        assert_eq!(send(&app, forged(number, "203.0.113.7")).await.status().as_u16(), expect);
    }
    assert_eq!(send(&app, forged(4, "203.0.113.8")).await.status().as_u16(), 200, "another client has its own budget");
}

const ONE_HOST: &str = r#"
    [[rule]]
    name = "api"
    per = ["ip"]
    match = { host = "api.example.com" }
    limit = "1/h"
"#;

/// An absolute URI dodged a rule by host, where the application reads `Host`.
#[tokio::test]
async fn a_uri_and_a_host_field_that_differ_are_refused() {
    let app = World::new(ONE_HOST).hello();
    let answer = |uri: &'static str, hosts: &'static [&'static str]| {
        let fields: Vec<(&str, &str)> = hosts.iter().map(|host| ("host", *host)).collect();
        send(&app, request(CLIENT, uri, &fields))
    };
    assert_eq!(answer("/x", &["api.example.com"]).await.status(), StatusCode::OK);
    let same: [(&str, &[&str]); 4] = [
        ("http://api.example.com/x", &["api.example.com"]),
        ("http://API.example.com./x", &["api.EXAMPLE.com:80"]),
        ("https://api.example.com:443/x", &["api.example.com"]),
        ("https://api.example.com/x", &[]),
    ];
    for (uri, hosts) in same {
        assert_eq!(answer(uri, hosts).await.status(), StatusCode::TOO_MANY_REQUESTS, "{uri} {hosts:?}");
    }
    let differ: [(&str, &[&str]); 4] = [
        ("http://other.example.com/x", &["api.example.com"]),
        ("http://api.example.com/x", &["other.example.com"]),
        ("http://other.example.com/x", &[""]),
        ("/x", &["other.example.com", "api.example.com"]),
    ];
    for (uri, hosts) in differ {
        let response = answer(uri, hosts).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{uri} {hosts:?}");
        assert_eq!(field(response.headers(), "cache-control"), Some("no-store"));
        let body = json(response).await;
        assert_eq!((&body["error"], &body["field"]), (&"bad_request".into(), &"host".into()));
    }
    let fields = [("host", "api.example.com"), ("accept", "application/problem+json")];
    let problem = send(&app, request(CLIENT, "http://other/x", &fields)).await;
    assert_eq!(field(problem.headers(), "content-type"), Some("application/problem+json"));
    assert_eq!(json(problem).await["status"], 400);
    let fields = [("host", "api.example.com"), ("content-type", "application/grpc")];
    let grpc = send(&app, request(CLIENT, "http://other/x", &fields)).await;
    assert_eq!(field(grpc.headers(), "grpc-status"), Some("3"));
}

/// The same on the wire, where the request line is what makes the URI.
#[tokio::test]
async fn a_request_line_with_another_host_is_refused() {
    let world = World::new(ONE_HOST);
    let layer = world.layer().peer(|_| CLIENT.parse().ok());
    let app = Router::new().fallback(|| async { "hello" }).layer(layer);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    let cases = [
        ("GET http://other/x HTTP/1.1\r\nHost: api.example.com\r\n", "400"),
        ("GET /x HTTP/1.1\r\nHost: other\r\nHost: api.example.com\r\n", "400"),
        ("GET http://api.example.com/x HTTP/1.1\r\nHost: api.example.com\r\n", "200"),
        ("GET /x HTTP/1.1\r\nHost: api.example.com\r\n", "429"),
    ];
    for (head, expect) in cases {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer.split(' ').nth(1), Some(expect), "{head}{answer}");
    }
    server.abort();
}

/// Rule `/api/login` was used up, and the login still ran: axum's `nest` matches the prefix of a path that resolves to
/// another one.
#[tokio::test]
async fn odd_paths_are_refused_or_matched_by_all_their_readings() {
    const LOGIN: &str = r#"
        [[rule]]
        name = "login"
        per = ["ip"]
        match = { path = "/api/login" }
        limit = "1/h"
    "#;
    let odd = ["/api/login/../../health", "/api/login/%2e%2e/x", "/api/x/..;/login", "/api\\login", "/api/login%0a"];
    let refusing = World::new(LOGIN);
    let app = refusing.hello();
    for path in odd {
        let answer = send(&app, request(CLIENT, path, &[])).await;
        assert_eq!(answer.status(), 400, "{path}");
        assert_eq!(field(answer.headers(), "cache-control"), Some("no-store"));
        let body = json(answer).await;
        assert_eq!((&body["error"], &body["field"]), (&"bad_request".into(), &"path".into()));
        // What is wrong in general words, and nothing that the client sent.
        let message = body["message"].as_str().unwrap();
        assert!(message.contains("path has a") && !message.contains("login") && !message.contains('%'), "{message}");
        let problem = send(&app, request(CLIENT, path, &[("accept", "application/problem+json")])).await;
        assert_eq!(json(problem).await["detail"], message);
    }
    assert_eq!(send(&app, request(CLIENT, "/api%2flogin", &[])).await.status(), 200, "nothing was charged before");
    assert_eq!(send(&app, request(CLIENT, "/api/login", &[])).await.status(), 429);
    let matching = World::new(&format!("[identity]\nodd_paths = \"match\"\n{LOGIN}"));
    let app = matching.hello();
    assert_eq!(send(&app, request(CLIENT, "/api/login", &[])).await.status(), 200);
    for path in odd {
        assert_eq!(send(&app, request(CLIENT, path, &[])).await.status(), 429, "{path}");
    }
    let long = |length: usize| format!("/{}", "a".repeat(length - 1));
    assert_eq!(send(&app, request(CLIENT, &long(8192), &[])).await.status(), 200);
    assert_eq!(send(&app, request(CLIENT, &long(8193), &[])).await.status(), 414);
}

/// Inside of `nest` the prefix is cut off, so that a rule for the whole path did not hold there.
#[cfg(feature = "axum")]
#[tokio::test]
async fn the_route_that_axum_matched_is_a_reading() {
    let world = World::new(
        r#"
        [[rule]]
        name = "login"
        per = ["ip"]
        match = { path = "/api/login" }
        limit = "1/h"
        "#,
    );
    let inner = Router::new().route("/login", get(|| async { "hello" })).route("/{id}", get(|| async { "hello" }));
    let app = Router::new().nest("/api", inner.layer(world.layer()));
    assert_eq!(send(&app, request(CLIENT, "/api/login", &[])).await.status(), 200);
    assert_eq!(send(&app, request(CLIENT, "/api/login", &[])).await.status(), 429);
    assert_eq!(send(&app, request(CLIENT, "/api/7", &[])).await.status(), 200);
}

#[tokio::test]
async fn a_path_that_names_two_tenants_is_refused() {
    let world = World::new(
        r#"
        [identity]
        tenant = "path:/t/{tenant}/**"
        odd_paths = "match"
        [[rule]]
        name = "tenant"
        per = ["tenant"]
        limit = "1/h"
        "#,
    );
    let app = world.hello();
    assert_eq!(send(&app, request(CLIENT, "/t/acme/../../t/evil/x", &[])).await.status(), 400);
    assert_eq!(send(&app, request(CLIENT, "/t/acme%5cevil/x", &[])).await.status(), 400);
    assert_eq!(send(&app, request(CLIENT, "/t%2facme/x", &[])).await.status(), 200);
    assert_eq!(send(&app, request(CLIENT, "/t/acme/x", &[])).await.status(), 429);
    assert_eq!(send(&app, request(CLIENT, "/t/evil/x", &[])).await.status(), 200);
}

#[tokio::test]
async fn names_come_from_trusted_peers_or_from_the_application() {
    let rule = "[[rule]]\nname = \"user\"\nper = [\"user\"]\nlimit = \"1/h\"\n";
    let policy = TWO_AN_HOUR.replace("limit = \"2/h\"", "limit = \"100/h\"") + rule;
    let app = World::new(&policy).hello();
    assert_eq!(status(&app, PROXY, &[("x-user", "u1")]).await, 200);
    assert_eq!(status(&app, PROXY, &[("x-user", "u1")]).await, 429);
    assert_eq!(status(&app, PROXY, &[("x-user", "u2")]).await, 200);
    // From anybody else the header says nothing: all of them are this one address.
    assert_eq!(status(&app, CLIENT, &[("x-user", "u3")]).await, 200);
    assert_eq!(status(&app, CLIENT, &[("x-user", "u4")]).await, 429);

    let layer = World::new(&policy).layer().identify(|parts| Identified {
        user: parts.headers.get("authorization").map(|value| value.to_str().unwrap().to_owned()),
        ..Identified::default()
    });
    let app = Router::new().route("/x", get(|| async { "hello" })).layer(layer);
    let headers = |user| [("authorization", user), ("x-user", "somebody else")];
    assert_eq!(status(&app, PROXY, &headers("u1")).await, 200);
    assert_eq!(status(&app, PROXY, &headers("u1")).await, 429);
    assert_eq!(status(&app, PROXY, &headers("u2")).await, 200);
    // What the application leaves out is found as the policy says.
    assert_eq!(status(&app, PROXY, &[("x-user", "u2")]).await, 429);
}

#[tokio::test]
async fn the_application_says_endpoint_facts_and_costs() {
    let world = World::new(
        r#"
        [[rule]]
        name = "endpoint"
        per = ["ip", "endpoint"]
        limit = "1/h"
        match = { fact.kind = "paid" }
        [[rule]]
        name = "tokens"
        per = ["ip"]
        limit = "100/h"
        cost = "tokens"
        "#,
    );
    let layer = world.layer().identify(|parts| Identified {
        endpoint: parts.extensions.get::<MatchedPath>().map(|path| path.as_str().to_owned()),
        facts: vec![("kind".to_owned(), "paid".to_owned())],
        costs: vec![("tokens".to_owned(), 30)],
        ..Identified::default()
    });
    let hello = || get(|| async { "hello" });
    let app = Router::new().route("/a/{id}", hello()).route("/b/{id}", hello()).layer(layer);
    for (path, expect) in [("/a/1", 200), ("/a/2", 429), ("/b/1", 200), ("/b/2", 429)] {
        let response = send(&app, request(CLIENT, path, &[])).await;
        assert_eq!(response.status().as_u16(), expect, "{path}");
    }
    let left = world.limiter.peek(&Facts { ip: Some([203, 0, 113, 7].into()), ..Facts::default() }).unwrap();
    assert_eq!(left.bound_by().unwrap().remaining, 40);
}

#[tokio::test]
async fn rules_count_by_header_fields_under_the_policy_in_force() {
    let rule = |name: &str| format!("[[rule]]\nname = \"key\"\nper = [\"header:{name}\"]\nlimit = \"1/h\"\n");
    let world = World::new(&rule("x-api-key"));
    let app = world.hello();
    assert_eq!(status(&app, CLIENT, &[("X-Api-Key", "k1")]).await, 200);
    assert_eq!(status(&app, CLIENT, &[("X-Api-Key", "k1")]).await, 429);
    assert_eq!(status(&app, CLIENT, &[("X-Api-Key", "k2")]).await, 200);
    // In two lines it is missing, and the address stands in for it.
    assert_eq!(status(&app, CLIENT, &[("X-Api-Key", "k3"), ("X-Api-Key", "k1")]).await, 200);
    assert_eq!(status(&app, CLIENT, &[("X-Api-Key", "k4"), ("X-Api-Key", "k4")]).await, 429);
    world.limiter.swap(Policy::parse(&rule("x-other"), &|_| None).unwrap());
    for (key, expect) in [("o1", 200), ("o1", 429), ("o2", 200)] {
        assert_eq!(status(&app, CLIENT, &[("x-other", key), ("x-api-key", "k1")]).await, expect);
    }
}

#[tokio::test]
async fn mounted_twice_it_counts_once_but_two_limiters_count_both() {
    let world = World::new(TWO_AN_HOUR);
    let app = world.hello().layer(world.layer());
    assert_eq!(field(ask(&app, CLIENT, &[]).await.headers(), "x-ratelimit-remaining"), Some("1"));
    assert_eq!(world.remaining(), 1);

    let other = World::new(&TWO_AN_HOUR.replace("2/h", "1/h"));
    let app = world.hello().layer(other.layer());
    assert_eq!(status(&app, CLIENT, &[]).await, 200);
    assert_eq!((world.remaining(), other.remaining()), (0, 0));
}

const ONE_AT_ONCE: &str = r#"
    [[rule]]
    name = "at-once"
    per = ["ip"]
    limit = "1"
    algorithm = "concurrency"
"#;

#[tokio::test]
async fn concurrency_is_held_until_the_body_ends() {
    let world = World::new(ONE_AT_ONCE);
    let app = world.hello();
    let first = ask(&app, CLIENT, &[]).await;
    assert_eq!(status(&app, CLIENT, &[]).await, 429);
    let mut body = first.into_body();
    while body.frame().await.is_some() {}
    assert_eq!(world.remaining(), 1, "the body has ended, though it is still there");
    drop(body);
    assert_eq!(status(&app, CLIENT, &[]).await, 200);
}

#[tokio::test]
async fn concurrency_is_given_back_when_the_client_goes() {
    let world = World::new(ONE_AT_ONCE);
    let app = world.hello();
    let first = ask(&app, CLIENT, &[]).await;
    assert_eq!(world.remaining(), 0);
    drop(first);
    assert_eq!(world.remaining(), 1, "the body was dropped");

    let hangs = Router::new().route("/x", get(std::future::pending::<&str>)).layer(world.layer());
    let mut future = Box::pin(hangs.oneshot(request(CLIENT, "/x", &[])));
    let polled = tokio::time::timeout(Duration::ZERO, &mut future).await;
    assert!(polled.is_err());
    assert_eq!(world.remaining(), 0);
    // A clock that runs back a little, as the system's may, keeps nobody's place.
    world.clock.set(START.minus(Span::from_millis(5)));
    drop(future);
    assert_eq!(world.remaining(), 1, "the future was dropped");
}

#[tokio::test]
async fn ordinary_charges_stay_when_the_client_goes() {
    let world = World::new(TWO_AN_HOUR);
    drop(world.hello().oneshot(request(CLIENT, "/x", &[])));
    assert_eq!(world.remaining(), 2, "nothing was asked yet");
    let hangs = Router::new().route("/x", get(std::future::pending::<&str>)).layer(world.layer());
    let future = hangs.oneshot(request(CLIENT, "/x", &[]));
    assert!(tokio::time::timeout(Duration::ZERO, future).await.is_err());
    assert_eq!(world.remaining(), 1);
}

#[tokio::test]
async fn rules_count_by_outcome() {
    let policy = "[[rule]]\nname = \"failures\"\nper = [\"ip\"]\nlimit = \"2/h\"\ncount = \"status:401,403\"\n";
    let world = World::new(policy);
    let answer = |parts: Request<Body>| async move {
        let status = parts.headers().get("x-answer").and_then(|value| value.to_str().ok()?.parse().ok());
        status.and_then(|status| StatusCode::from_u16(status).ok()).unwrap_or(StatusCode::OK)
    };
    let app = Router::new().route("/x", get(answer)).layer(world.layer());
    for (answer, remaining) in [("200", 2), ("500", 2), ("401", 1), ("204", 1), ("403", 0)] {
        let response = ask(&app, CLIENT, &[("x-answer", answer)]).await;
        assert_eq!(response.status().as_str(), answer);
        assert_eq!(world.remaining(), remaining, "after {answer}");
    }
    assert_eq!(status(&app, CLIENT, &[("x-answer", "200")]).await, 429);

    // Who leaves before the answer may have been counted, and stays so.
    let world = World::new(policy);
    let hangs = Router::new().route("/x", get(std::future::pending::<&str>)).layer(world.layer());
    let future = hangs.oneshot(request(CLIENT, "/x", &[]));
    assert!(tokio::time::timeout(Duration::ZERO, future).await.is_err());
    assert_eq!(world.remaining(), 1);
}

const BYTES: &str = "[[rule]]\nname = \"upload\"\nper = [\"ip\"]\nlimit = \"1000B/h\"\n";

/// An app that reads what it is sent.
fn reads(world: &World) -> Router {
    let read = |body: Bytes| async move { body.len().to_string() };
    Router::new().route("/x", post(read)).layer(world.layer())
}

fn upload(body: Body) -> Request<Body> {
    let mut request = request(CLIENT, "/x", &[]).map(|_| body);
    *request.method_mut() = http::Method::POST;
    request
}

#[tokio::test]
async fn bytes_are_charged_by_length() {
    let world = World::new(BYTES);
    let app = reads(&world);
    let response = send(&app, upload(Body::from(vec![0; 600]))).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(world.remaining(), 400);
    let response = send(&app, upload(Body::from(vec![0; 600]))).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    // What never fits is no reason to come back later.
    let response = send(&app, upload(Body::from(vec![0; 1001]))).await;
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(field(response.headers(), "retry-after"), None);
    assert_eq!(json(response).await["error"], "cost_exceeds_limit");
    assert_eq!(world.remaining(), 400);
}

/// A client that reads one kind of error body met others where nothing is decided: a path that is refused, content that never
/// fits. They have the policy's body too, and every response has the trace id.
#[tokio::test]
async fn every_refusal_has_the_policys_body_and_every_response_a_trace_id() {
    let envelope = "[answers]\nbody = '{\"code\":{code},\"status\":{status},\"limit\":{limit},\"id\":\"{traceId}\"}'\n";
    let world = World::new(&format!("{BYTES}\n{envelope}"));
    let app = reads(&world);
    let response = send(&app, upload(Body::from(vec![0; 600]))).await;
    assert_eq!((response.status(), field(response.headers(), "x-trace-id").map(str::len)), (StatusCode::OK, Some(32)));
    let odd = request(CLIENT, "/a/../x", &[]);
    let refused = [
        (upload(Body::from(vec![0; 600])), 429, "rate_limited", serde_json::json!(1000)),
        (upload(Body::from(vec![0; 1001])), 413, "cost_exceeds_limit", Value::Null),
        (odd, 400, "bad_request", Value::Null),
    ];
    for (request, status, code, limit) in refused {
        let response = send(&app, request).await;
        assert_eq!(response.status().as_u16(), status);
        let id = field(response.headers(), "x-trace-id").unwrap().to_owned();
        let body = serde_json::json!({"code": code, "status": status, "limit": limit, "id": id});
        assert_eq!(json(response).await, body);
    }
}

/// A body of so many chunks of 100 bytes whose length nobody knows.
struct Chunks(usize);

impl http_body::Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let left = self.0.checked_sub(1);
        self.0 = left.unwrap_or(0);
        Poll::Ready(left.map(|_| Ok(Frame::data(Bytes::from(vec![0; 100])))))
    }
}

fn streamed(chunks: usize) -> Body {
    Body::new(Chunks(chunks))
}

#[tokio::test]
async fn bytes_that_stream_are_recorded() {
    let world = World::new(BYTES);
    let app = reads(&world);
    let response = send(&app, upload(streamed(6))).await;
    assert_eq!(json(response).await, 600);
    assert_eq!(world.remaining(), 400);

    // A length that was too small is made up for.
    let mut lies = upload(streamed(3));
    lies.headers_mut().insert("content-length", http::HeaderValue::from_static("100"));
    assert_eq!(json(send(&app, lies).await).await, 300);
    assert_eq!(world.remaining(), 100);

    // Who goes over owes the rest, and is denied until it is paid.
    assert_eq!(json(send(&app, upload(streamed(2))).await).await, 200);
    let response = send(&app, upload(streamed(1))).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn what_streams_costs_bytes_and_nothing_else() {
    let requests = "[[rule]]\nname = \"requests\"\nper = [\"ip\"]\nlimit = \"10/h\"\n";
    let tokens = "[[rule]]\nname = \"tokens\"\nper = [\"ip\"]\nlimit = \"50/h\"\ncost = \"tokens\"\n";
    let world = World::new(&format!("{BYTES}{requests}{tokens}"));
    let costs = || vec![("tokens".to_owned(), 20)];
    let layer = world.layer().identify(move |_| Identified { cost: Some(3), costs: costs(), ..Identified::default() });
    let app = Router::new().route("/x", post(|body: Bytes| async move { body.len().to_string() })).layer(layer);
    assert_eq!(json(send(&app, upload(streamed(2))).await).await, 200);
    let facts = Facts { ip: Some([203, 0, 113, 7].into()), cost: Some(0), ..Facts::default() };
    let left = world.limiter.peek(&facts).unwrap();
    assert_eq!(left.readings.iter().map(|reading| reading.remaining).collect::<Vec<_>>(), [800, 7, 30]);
}

#[tokio::test]
async fn bytes_that_streamed_before_the_client_went_are_recorded() {
    let world = World::new(BYTES);
    let read_one = |request: Request<Body>| async move {
        let _first = request.into_body().frame().await;
        std::future::pending::<&str>().await
    };
    let app = Router::new().route("/x", post(read_one)).layer(world.layer());
    let future = app.oneshot(upload(streamed(5)));
    assert!(tokio::time::timeout(Duration::ZERO, future).await.is_err());
    assert_eq!(world.remaining(), 900);
}

const SHADOWED: &str = r#"
    [identity]
    trusted_proxies = ["10.0.0.0/8"]
    user = "header:x-user"

    [ladders.quiet]
    rungs = ["shadow", "deny"]

    [[rule]]
    name = "posts"
    per = ["user"]
    limit = "2/h"
    algorithm = "fixed-window"
    ladder = "quiet"
"#;

const U1: &[(&str, &str)] = &[("x-user", "u1")];

/// A world in which `u1` is shadow banned and has used nothing in this hour.
fn shadowed(more: &str) -> World {
    let world = World::new(&format!("{SHADOWED}{more}"));
    let facts = Facts { user: Some("u1"), ..Facts::default() };
    for _ in 0..3 {
        assert!(world.limiter.check(&facts).unwrap().allowed());
    }
    world.clock.advance(Span::HOUR);
    world
}

#[tokio::test(start_paused = true)]
async fn a_shadow_ban_is_waited_out_and_never_told() {
    let world = shadowed("");
    let app = world.hello();
    let before = Instant::now();
    let slow = ask(&app, PROXY, U1).await;
    let waited = before.elapsed();
    assert!((Duration::from_secs(1)..=Duration::from_millis(3_001)).contains(&waited), "{waited:?}");

    let before = Instant::now();
    let quick = ask(&app, PROXY, &[("x-user", "u2")]).await;
    assert_eq!(before.elapsed(), Duration::ZERO);
    assert_eq!(untraced(&slow), untraced(&quick));

    // A request that is denied anyway is denied at once.
    assert_eq!(status(&app, PROXY, U1).await, 200);
    let before = Instant::now();
    assert_eq!(status(&app, PROXY, U1).await, 429);
    assert_eq!(before.elapsed(), Duration::ZERO);
}

/// A clock that goes with tokio's: while that is paused it jumps to the end of a wait.
struct PausedClock(Instant);

impl Clock for PausedClock {
    fn now(&self) -> Timestamp {
        START.plus(Span::from_micros(u64::try_from(self.0.elapsed().as_micros()).unwrap()))
    }
}

/// The figures of a shadow-banned request were those of its arrival: its reset minus `Date` told how long it had waited.
#[tokio::test(start_paused = true)]
async fn the_figures_after_a_wait_are_those_of_the_answer() {
    let limits = [
        "limit = '3/min'",
        "limit = '1/s burst 3'",
        "limit = '7/min burst 4'",
        "limit = '3/min burst 2'",
        "limit = '3/h'\nalgorithm = 'fixed-window'",
        "limit = '3/h'\nalgorithm = 'fixed-window'\nanchor = 'first'",
        "limit = '3/min'\nalgorithm = 'sliding-log'",
        "limit = '3/min'\nalgorithm = 'sliding-window'",
        "limit = '3/min'\nalgorithm = 'sliding-estimate'",
    ];
    for limit in limits {
        let trap = "per = ['user']\nmatch = { path = '/trap' }\nlimit = '1/day'\nladder = 'quiet'\nstrike = 'request'";
        let text = format!(
            "[identity]\ntrusted_proxies = ['10.0.0.0/8']\nuser = 'header:x-user'\n\
             [ladders.quiet]\nrungs = ['shadow']\n[[rule]]\nname = 'trap'\n{trap}\n\
             [[rule]]\nname = 'pages'\nmatch = {{ path = '/x' }}\nper = ['user']\n{limit}\n"
        );
        let policy = Policy::parse(&text, &|_| None).unwrap();
        let limiter = Arc::new(Limiter::builder(policy).clock(PausedClock(Instant::now())).build());
        let layer = ThresholdLayer::new(Arc::clone(&limiter)).unwrap();
        let app = Router::new().route("/{*path}", any(|| async { "hello" })).layer(layer);
        for _ in 0..2 {
            assert_eq!(send(&app, request(PROXY, "/trap", U1)).await.status(), StatusCode::OK);
        }
        for gap in [0, 5, 0, 20, 0, 0, 0] {
            tokio::time::sleep(Duration::from_secs(gap)).await;
            let before = Instant::now();
            let shadowed = ask(&app, PROXY, U1).await;
            let waited = before.elapsed();
            // A clean client whose requests come when the shadowed one's are answered.
            let clean = ask(&app, PROXY, &[("x-user", "u2")]).await;
            assert_eq!(waited >= Duration::from_secs(1), clean.status() == StatusCode::OK, "{limit}: {waited:?}");
            assert_eq!(untraced(&shadowed), untraced(&clean), "{limit}");
        }
    }
}

/// A request that a rung lets through over a full limit keeps its warning and its figures, and is not punished again.
#[tokio::test(start_paused = true)]
async fn a_wait_strikes_nobody_twice() {
    let text = "[identity]\ntrusted_proxies = ['10.0.0.0/8']\nuser = 'header:x-user'\n\
        [ladders.quiet]\nwarning_cookie = 'seen'\nrungs = ['warn + shadow', 'deny + shadow']\n\
        [[rule]]\nname = 'pages'\nper = ['user']\nlimit = '2/min'\nalgorithm = 'sliding-log'\nladder = 'quiet'\nstrike = 'request'\n\
        [[rule]]\nname = 'wide'\nper = ['user']\nlimit = '100/h'\nalgorithm = 'sliding-log'\n";
    let policy = Policy::parse(text, &|_| None).unwrap();
    let limiter = Arc::new(Limiter::builder(policy).clock(PausedClock(Instant::now())).build());
    let app =
        Router::new().route("/x", get(|| async { "hello" })).layer(ThresholdLayer::new(Arc::clone(&limiter)).unwrap());
    for _ in 0..2 {
        assert_eq!(status(&app, PROXY, U1).await, 200);
    }
    let before = Instant::now();
    let lifted = ask(&app, PROXY, U1).await;
    let waited = before.elapsed();
    assert!(waited >= Duration::from_secs(1), "{waited:?}");
    assert_eq!((lifted.status(), field(lifted.headers(), "x-ratelimit-warning")), (StatusCode::OK, Some("true")));
    assert!(field(lifted.headers(), "set-cookie").unwrap().starts_with("seen=1;"));
    assert_eq!(field(lifted.headers(), "x-ratelimit-remaining"), Some("0"));
    // Both limits' oldest requests leave when they do, whatever this one waited. The full one was not charged.
    let left = |seconds| (Duration::from_secs(seconds) - waited).as_micros().div_ceil(1_000_000);
    let expect = format!("\"pages\";r=0;t={}, \"wide\";r=97;t={}", left(60), left(3_600));
    assert_eq!(field(lifted.headers(), "ratelimit"), Some(expect.as_str()));
    let next = limiter.check(&Facts { user: Some("u1"), ..Facts::default() }).unwrap();
    assert_eq!(next.escalations.iter().map(|strike| strike.strikes).collect::<Vec<_>>(), [2]);
}

#[tokio::test(start_paused = true)]
async fn past_the_pool_a_shadow_ban_is_an_ordinary_denial() {
    let world = shadowed("");
    let layer = world.layer().max_delayed(1);
    let app = Router::new().route("/x", get(|| async { "hello" })).layer(layer);
    let mut first = Box::pin(ask(&app, PROXY, U1));
    assert!(tokio::time::timeout(Duration::ZERO, &mut first).await.is_err());
    let before = Instant::now();
    let turned_away = ask(&app, PROXY, U1).await;
    assert_eq!(before.elapsed(), Duration::ZERO);
    assert_eq!(first.await.status(), StatusCode::OK);
    assert_eq!(status(&app, PROXY, U1).await, 200, "there is room again, and the refusal charged nothing");

    let genuine = ask(&app, PROXY, U1).await;
    assert_eq!(untraced(&turned_away), untraced(&genuine));
    let (mut turned_away, mut genuine) = (json(turned_away).await, json(genuine).await);
    assert_ne!(turned_away["traceId"].take(), genuine["traceId"].take());
    assert_eq!(turned_away, genuine);
}

/// A request was once decided a second time after its wait: what had happened meanwhile could deny it, or strike it. It is
/// admitted once, and holds what it was given from then on.
#[tokio::test(start_paused = true)]
async fn what_was_admitted_crosses_after_its_wait() {
    let ladder = "[ladders.hard]\nrungs = [\"ban 1h\"]\n";
    let at_once = "[[rule]]\nname = \"at-once\"\nper = [\"user\"]\nlimit = \"1\"\nalgorithm = \"concurrency\"
        match = { method = \"GET\" }\nladder = \"hard\"\n[[rule]]\nname = \"also\"\nper = [\"user\"]\nlimit = \"9/h\"\n";
    let world = shadowed(&format!("{ladder}{at_once}"));
    let app = world.hello();
    let mut slow = Box::pin(ask(&app, PROXY, U1));
    assert!(tokio::time::timeout(Duration::ZERO, &mut slow).await.is_err());
    // While it waits: a provider asks for a pause, and the same user is banned for a second request at once.
    world.limiter.pause(Layer::User, "u1", Duration::from_secs(3_600)).unwrap();
    let facts = Facts { user: Some("u1"), method: Some("GET"), ..Facts::default() };
    assert_eq!(world.limiter.check(&facts).unwrap().verdict, Verdict::Deny, "of the pause");
    world.limiter.forgive(Layer::User, "u1").unwrap();
    for expect in [Verdict::Allow, Verdict::Ban] {
        assert_eq!(world.limiter.check(&facts).unwrap().verdict, expect);
    }
    assert_eq!(slow.await.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn who_waits_holds_its_place() {
    let at_once = "[[rule]]\nname = \"at-once\"\nper = []\nlimit = \"1\"\nalgorithm = \"concurrency\"
        match = { method = \"GET\" }\n";
    let world = shadowed(at_once);
    let app = world.hello();
    let mut slow = Box::pin(ask(&app, PROXY, U1));
    assert!(tokio::time::timeout(Duration::ZERO, &mut slow).await.is_err());
    assert_eq!(status(&app, PROXY, &[("x-user", "u2")]).await, 429, "the place is taken while the other waits");
    let slow = slow.await;
    assert_eq!(slow.status(), StatusCode::OK);
    assert_eq!(status(&app, PROXY, &[("x-user", "u2")]).await, 429, "and until its answer has ended");
    drop(slow);
    assert_eq!(status(&app, PROXY, &[("x-user", "u2")]).await, 200);
    // A client that leaves while it waits gives its place back.
    let left = ask(&app, PROXY, U1);
    assert!(tokio::time::timeout(Duration::ZERO, left).await.is_err());
    assert_eq!(status(&app, PROXY, &[("x-user", "u2")]).await, 200);
}

#[tokio::test]
async fn grpc_is_told_in_its_own_terms() {
    let app = World::new(&format!("{TWO_AN_HOUR}message = \"100 % used\"\n")).hello();
    let headers = [("content-type", "application/grpc+proto")];
    for _ in 0..2 {
        assert_eq!(field(ask(&app, CLIENT, &headers).await.headers(), "grpc-status"), None);
    }
    let response = ask(&app, CLIENT, &headers).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(field(response.headers(), "content-type"), Some("application/grpc"));
    assert_eq!(field(response.headers(), "grpc-status"), Some("8"));
    assert_eq!(field(response.headers(), "grpc-message"), Some("100 %25 used"));
    assert!(response.headers().contains_key("retry-after"));
    assert!(http_body::Body::is_end_stream(response.body()), "trailers only");
}

#[tokio::test]
async fn warnings_and_bans_are_told() {
    let ladder = "rungs = [\"warn\", \"ban 1h\"]\nwarning_cookie = \"warned\"";
    let policy = SHADOWED.replace("rungs = [\"shadow\", \"deny\"]", ladder) + "strike = \"request\"\n";
    let world = World::new(&policy);
    let app = world.hello();
    for _ in 0..2 {
        assert_eq!(field(ask(&app, PROXY, U1).await.headers(), "x-ratelimit-warning"), None);
    }
    let warned = ask(&app, PROXY, U1).await;
    assert_eq!(warned.status(), StatusCode::OK);
    assert_eq!(field(warned.headers(), "x-ratelimit-warning"), Some("true"));
    assert!(field(warned.headers(), "set-cookie").unwrap().starts_with("warned=1;"));
    let banned = ask(&app, PROXY, U1).await;
    assert_eq!(banned.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(field(banned.headers(), "x-ratelimit-banned"), Some("true"));
    assert_eq!(field(banned.headers(), "x-ratelimit-warning"), None);
    assert_eq!(json(banned).await["error"], "banned");
}

#[tokio::test]
async fn a_429_is_a_warning_while_strikes_count() {
    let ladder = "rungs = [\"warn\", \"ban 1h\"]\ndecay = \"2h\"\nwarning_cookie = \"warned\"";
    let world = World::new(&SHADOWED.replace("rungs = [\"shadow\", \"deny\"]", ladder));
    let app = world.hello();
    for _ in 0..3 {
        assert_eq!(status(&app, PROXY, U1).await, 200);
    }
    world.clock.advance(Span::from_secs(600));
    let denied = ask(&app, PROXY, U1).await;
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(field(denied.headers(), "x-ratelimit-warning"), Some("true"));
    let cookie = field(denied.headers(), "set-cookie").unwrap();
    assert_eq!(cookie, "warned=1; Path=/; Max-Age=6600; SameSite=Lax", "as long as the strike counts");
    // Nobody else is warned.
    for expect in [200, 200] {
        assert_eq!(status(&app, PROXY, &[("x-user", "u2")]).await, expect);
    }
}

#[tokio::test]
async fn a_rule_discloses_as_much_as_it_says() {
    let told = |disclosure: &'static str| async move {
        let app = World::new(&format!("{TWO_AN_HOUR}disclosure = \"{disclosure}\"\n")).hello();
        for _ in 0..2 {
            assert_eq!(status(&app, CLIENT, &[]).await, 200);
        }
        let response = ask(&app, CLIENT, &[]).await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        let has = |name: &str| response.headers().contains_key(name);
        (has("ratelimit"), has("retry-after"), json(response).await.get("limit").is_some())
    };
    assert_eq!(told("full").await, (true, true, true));
    assert_eq!(told("minimal").await, (false, true, false));
    assert_eq!(told("none").await, (false, false, false));
}

#[tokio::test]
async fn what_cannot_be_decided_is_refused() {
    let world = World::new("[[rule]]\nname = \"user\"\nper = [\"user\"]\nlimit = \"5/h\"\n");
    let app = Router::new().route("/x", get(|| async { "hello" })).layer(world.layer().peer(|_| None));
    let nobody = Request::builder().uri("/x").body(Body::empty()).unwrap();
    let response = send(&app, nobody).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(json(response).await["error"], "rate_limited");

    let layer = world.layer().identify(|_| Identified { cost: Some(6), ..Identified::default() });
    let app = Router::new().route("/x", get(|| async { "hello" })).layer(layer);
    assert_eq!(status(&app, CLIENT, &[]).await, 400);
}

#[tokio::test]
async fn a_service_is_not_called_before_it_is_ready_nor_when_the_request_is_denied() {
    let world = World::new(TWO_AN_HOUR);
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let inner = tower::service_fn(move |_: Request<RequestBody<Body>>| {
        counted.fetch_add(1, Ordering::Relaxed);
        async { Ok::<_, Infallible>(http::Response::new(Full::new(Bytes::from("hello")))) }
    });
    let mut service = world.layer().layer(inner);
    for expect in [200, 200, 429, 429] {
        let response = service.ready().await.unwrap().call(request(CLIENT, "/x", &[])).await.unwrap();
        assert_eq!(response.status().as_u16(), expect);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn who_leaves_while_it_waits_made_no_attempt() {
    let failures = "[[rule]]\nname = \"failures\"\nper = [\"user\"]\nlimit = \"1/h\"\ncount = \"status:401\"\n";
    let world = shadowed(failures);
    let app = Router::new().route("/x", get(|| async { "hello" })).layer(world.layer().max_delayed(1));
    let slow = ask(&app, PROXY, U1);
    assert!(tokio::time::timeout(Duration::ZERO, slow).await.is_err());
    // Its place among those who wait is free again, and so is the one failure; the post stays charged.
    assert_eq!(field(ask(&app, PROXY, U1).await.headers(), "x-ratelimit-remaining"), Some("0"));
    let facts = Facts { user: Some("u1"), cost: Some(0), ..Facts::default() };
    let left = world.limiter.peek(&facts).unwrap();
    assert_eq!(left.readings.iter().map(|reading| reading.remaining).collect::<Vec<_>>(), [0, 1]);
}

#[tokio::test]
async fn a_store_that_cannot_answer_is_no_reason_to_wave_through() {
    let world = World::new(&format!("[memory]\nmax_keys = 1000\nwhen_full = \"deny\"\n{TWO_AN_HOUR}"));
    // Until every place is taken by an address that has used up its limit, and must not be forgotten.
    for address in 0..20_000u32 {
        let facts = Facts { ip: Some((address + (11 << 24)).to_be_bytes().into()), ..Facts::default() };
        let _ = (world.limiter.check(&facts), world.limiter.check(&facts));
    }
    let response = ask(&world.hello(), CLIENT, &[]).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(field(response.headers(), "retry-after"), Some("1"));
    assert_eq!(json(response).await["error"], "unavailable");
}

#[tokio::test]
async fn hyper_serves_it_and_a_connection_that_breaks_holds_nothing() {
    let world = World::new(ONE_AT_ONCE);
    let endless = |_: Request<RequestBody<hyper::body::Incoming>>| async {
        Ok::<_, Infallible>(http::Response::new(Chunks(usize::MAX)))
    };
    let layer = world.layer().peer(|_| CLIENT.parse().ok());
    let service = TowerToHyperService::new(layer.layer(tower::service_fn(endless)));
    let connect = || {
        let (mut client, server) = tokio::io::duplex(1_024);
        let connection =
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(server), service.clone());
        let served = tokio::spawn(connection);
        async move {
            client.write_all(b"GET /x HTTP/1.1\r\nHost: example.com\r\n\r\n").await.unwrap();
            let mut first = [0; 512];
            client.read_exact(&mut first).await.unwrap();
            (String::from_utf8_lossy(&first).into_owned(), client, served)
        }
    };
    let (answer, client, served) = connect().await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\nx-ratelimit-limit: 1\r\n"), "{answer}");
    assert_eq!(world.remaining(), 0);
    let (answer, ..) = connect().await;
    assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
    drop(client);
    assert!(served.await.unwrap().is_err(), "the client is gone");
    assert_eq!(world.remaining(), 1);
}

#[tokio::test]
async fn tonic_serves_it_and_reads_its_denials() {
    let world = World::new(TWO_AN_HOUR);
    let service = world.layer().layer(tonic::service::Routes::default());
    let call = || async {
        let request = request(CLIENT, "/x.Y/Z", &[("content-type", "application/grpc")]).map(tonic::body::Body::new);
        let response = service.clone().oneshot(request).await.unwrap();
        tonic::Status::from_header_map(response.headers()).unwrap().code()
    };
    for _ in 0..2 {
        assert_eq!(call().await, tonic::Code::Unimplemented, "nobody serves this, but it was asked");
    }
    assert_eq!(call().await, tonic::Code::ResourceExhausted);
}
