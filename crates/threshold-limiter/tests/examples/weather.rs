//! The `weather` example: a public API with CORS, limits, authentication and panics.

use std::time::Instant;

use serde_json::Value;

use crate::running::{Answer, Running, field};

const TOKEN: (&str, &str) = ("authorization", "Bearer sunny");
const ORIGIN: (&str, &str) = ("origin", "https://page.example");

#[track_caller]
fn readable_by_a_page(answer: &Answer) {
    assert_eq!(field(answer, "access-control-allow-origin"), "*", "{answer:?}");
    let exposed: Vec<&str> = field(answer, "access-control-expose-headers").split(',').collect();
    for name in answer.headers().keys().filter(|name| name.as_str().contains("ratelimit") || *name == "retry-after") {
        assert!(exposed.contains(&name.as_str()), "{name} is not among {exposed:?}");
    }
}

fn get(running: &Running, path: &str, fields: &[(&str, &str)]) -> Answer {
    running.ask("GET", path, &[&[TOKEN, ORIGIN], fields].concat())
}

#[test]
fn ten_a_minute_are_allowed_and_a_page_can_read_the_denial() {
    let running = Running::start("weather", &[]);
    let start = Instant::now();
    let first = get(&running, "/forecast", &[]);
    assert_eq!((first.status().as_u16(), first.body().as_str()), (200, "sunny, later rain\n"));
    assert_eq!((field(&first, "x-ratelimit-limit"), field(&first, "x-ratelimit-remaining")), ("10", "9"));
    readable_by_a_page(&first);

    let answers = std::iter::repeat_with(|| get(&running, "/forecast", &[]));
    let (mut admitted, mut last) = (1, first);
    for answer in answers.take(100) {
        last = answer;
        if last.status().as_u16() == 429 {
            break;
        }
        admitted += 1;
    }
    // Ten at once, and one more every six seconds in case this machine is slow.
    let most = 10 + start.elapsed().as_secs() / 6;
    assert!((10..=most).contains(&admitted), "{admitted} of {most}");
    readable_by_a_page(&last);
    assert!(field(&last, "retry-after").parse::<u64>().unwrap() >= 1);
    let body: Value = serde_json::from_str(last.body()).unwrap();
    assert_eq!((&body["error"], &body["rule"]), (&"rate_limited".into(), &"per-ip".into()));
}

#[test]
fn preflight_requests_are_not_counted() {
    let running = Running::start("weather", &[("RATE_LIMIT_PER_IP", "1")]);
    let preflight = [ORIGIN, ("access-control-request-method", "GET"), ("access-control-request-headers", TOKEN.0)];
    for _ in 0..200 {
        let answer = running.ask("OPTIONS", "/forecast", &preflight);
        assert_eq!(answer.status().as_u16(), 200);
        assert_eq!(field(&answer, "access-control-allow-headers"), TOKEN.0);
        assert!(!answer.headers().contains_key("x-ratelimit-limit"), "{answer:?}");
    }
    assert_eq!(get(&running, "/forecast", &[]).status().as_u16(), 200);
    assert_eq!(get(&running, "/forecast", &[]).status().as_u16(), 429);
}

/// Checks the statuses of requests with these header fields, with a limit of one a minute.
#[track_caller]
fn check(path: &str, requests: &[&[(&str, &str)]], expect: &[u16]) {
    let running = Running::start("weather", &[("RATE_LIMIT_PER_IP", "1")]);
    let statuses = requests.iter().map(|fields| running.ask("GET", path, fields).status().as_u16());
    assert_eq!(statuses.collect::<Vec<_>>(), expect);
}

#[test]
fn limits_apply_before_authentication_on_all_routes() {
    check("/forecast", &[&[], &[], &[TOKEN]], &[401, 429, 429]);
    check("/elsewhere", &[&[TOKEN], &[TOKEN]], &[404, 429]);
}

#[test]
fn behind_a_trusted_proxy_the_client_is_the_address_that_it_forwards() {
    let (a, b) = (("cf-connecting-ip", "192.0.2.1"), ("cf-connecting-ip", "192.0.2.2"));
    check("/forecast", &[&[TOKEN, a], &[TOKEN, b], &[TOKEN, a]], &[200, 200, 429]);
    let hops = [("x-forwarded-for", "192.0.2.9, 192.0.2.1"), ("x-forwarded-for", "192.0.2.8, 192.0.2.1")];
    check("/forecast", &[&[TOKEN, hops[0]], &[TOKEN, hops[1]]], &[200, 429]);
    // Cloudflare's header field takes precedence.
    check("/forecast", &[&[TOKEN, a, hops[0]], &[TOKEN, b, hops[0]]], &[200, 200]);
}

/// Only on Linux is all of 127.0.0.0/8 local, so that a peer other than the trusted 127.0.0.1 can connect.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_forwarding_header_of_an_untrusted_peer_is_ignored() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    let running = Running::start("weather", &[("RATE_LIMIT_PER_IP", "1")]);
    let mut statuses = Vec::new();
    for claimed in ["192.0.2.1", "192.0.2.2"] {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        let mut stream = socket.connect(running.address.parse().unwrap()).await.unwrap();
        let fields = format!("host: x\r\nauthorization: Bearer sunny\r\ncf-connecting-ip: {claimed}\r\n");
        let request = format!("GET /forecast HTTP/1.1\r\n{fields}connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        statuses.push(answer.split(' ').nth(1).unwrap().to_owned());
    }
    assert_eq!(statuses, ["200", "429"]);
}

#[test]
fn all_clients_together_have_a_limit() {
    let running = Running::start("weather", &[("RATE_LIMIT_GLOBAL", "1")]);
    assert_eq!(get(&running, "/forecast", &[("cf-connecting-ip", "192.0.2.1")]).status().as_u16(), 200);
    let denied = get(&running, "/forecast", &[("cf-connecting-ip", "192.0.2.2")]);
    assert_eq!(denied.status().as_u16(), 429);
    let body: Value = serde_json::from_str(denied.body()).unwrap();
    assert_eq!(body["rule"], "global");
}

#[test]
fn a_panic_is_logged_and_answered_readably() {
    let running = Running::start("weather", &[]);
    let answer = get(&running, "/storm", &[]);
    assert_eq!(answer.status().as_u16(), 500);
    readable_by_a_page(&answer);
    assert_eq!(get(&running, "/forecast", &[]).status().as_u16(), 200);
    let log = running.end();
    assert!(log.contains("response failed") && log.contains("500 Internal Server Error"), "{log}");
}
