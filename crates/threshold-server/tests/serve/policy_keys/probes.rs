//! Observes a policy: answers to clients, answers without the store, logins, the banner and the log.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Empty, Full};
use serde_json::json;
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::tower::{Identified, RequestBody, ThresholdLayer};
use threshold_limiter::{
    Attempted, Degraded, DigestKey, Facts, Limiter, LoginRequest, ManualClock, Policy, Secret, Span, Timestamp,
};
use threshold_wire::jwt;
use tower_layer::Layer as _;
use tower_service::Service;

use crate::dead_store::DeadStore;
use crate::jwt::sign;
use crate::process::{Scratch, Start};

/// A time between two full minutes, so that clock windows and windows from the first request differ.
pub(super) const START: u64 = 1_767_225_617;
const TRUSTED: [u8; 4] = [127, 0, 0, 1];

fn parse(policy: &str) -> Result<Policy, String> {
    let policy = Policy::parse(policy, &|_| None).map_err(|error| error.to_string())?;
    jwt::attach(policy).map(|(policy, _)| policy).map_err(|error| error.to_string())
}

fn runtime() -> tokio::runtime::Runtime {
    // Time is paused, and advances when all tasks are idle.
    tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

/// Returns paths as they are recorded.
pub(super) fn recorded(policy: &str) -> Result<String, String> {
    let policy = parse(policy)?;
    Ok(["/invite/ada", "/posts"].map(|path| policy.recorded_path(path).into_owned()).join(" "))
}

/// The service behind the layer: `/status/N` answers with N, everything else with 200.
#[derive(Clone)]
struct Inner;

impl Service<Request<RequestBody<Empty<Bytes>>>> for Inner {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Empty<Bytes>>>) -> Self::Future {
        let status = request.uri().path().strip_prefix("/status/").map_or(200, |status| status.parse().unwrap());
        ready(Ok(Response::builder().status(status).body(Full::default()).unwrap()))
    }
}

enum Step {
    Ask { peer: [u8; 4], request: Box<Request<Empty<Bytes>>> },
    Wait(u64),
}

/// Builds a request with some headers changed; an empty value removes one.
fn ask(line: &str, changes: &[(&str, &str)]) -> Step {
    let (method, path) = line.split_once(' ').unwrap();
    let usual = [
        ("host", "a.example.com"),
        ("x-forwarded-for", "203.0.113.7"),
        ("x-user", "u1"),
        ("x-tenant", "t1"),
        ("x-tier", "gold"),
        ("fact-inbox", "7"),
        ("cost-tokens", "5"),
    ];
    let changed = |name: &str| changes.iter().any(|(own, _)| *own == name);
    let fields = usual.iter().filter(|(name, _)| !changed(name)).chain(changes);
    let request = fields
        .filter(|(_, value)| !value.is_empty())
        .fold(Request::builder().method(method).uri(path), |built, (name, value)| built.header(*name, *value));
    Step::Ask { peer: TRUSTED, request: Box::new(request.body(Empty::new()).unwrap()) }
}

/// Requests of all kinds, so that almost every key has an effect on them.
fn script() -> Vec<Step> {
    let nobody = [("x-user", ""), ("x-tenant", ""), ("x-tier", "")];
    let from = |address| [nobody.as_slice(), &[("x-forwarded-for", address)]].concat();
    let claims = json!({ "sub": "u9", "iss": "https://id", "aud": "api", "exp": START + 300 });
    let bearer = format!("Bearer {}", sign::token("HS256", &claims));
    let mut steps = Vec::new();
    let mut times = |number: usize, line: &str, changes: &[(&str, &str)]| {
        steps.extend((0..number).map(|_| ask(line, changes)));
    };
    times(4, "GET /x", &[]);
    times(2, "POST /posts", &[]);
    times(2, "GET /x", &[("host", "b.example.com")]);
    times(2, "GET /x", &[("x-user", "u2")]);
    times(2, "GET /x", &[("x-user", "u3"), ("x-tenant", "t2")]);
    times(2, "GET /x", &[("x-user", "u2"), ("x-tenant", "t2")]);
    times(2, "GET /x", &[("x-user", "u4"), ("x-tier", "silver")]);
    times(2, "GET /x", &[("x-user", "u5"), ("x-tenant", "t3"), ("x-tier", "")]);
    times(3, "GET /x", &[("x-user", ""), ("x-forwarded-for", "198.51.100.1")]);
    for address in ["2001:db8:0:1::1", "2001:db8:0:2::1", "2001:db8:0:3::1"] {
        times(1, "GET /x", &from(address));
    }
    times(2, "GET /x", &[("x-user", "u6"), ("fact-inbox", "8")]);
    times(3, "GET /status/401", &[("x-user", "u7")]);
    times(2, "GET /x", &[("x-other", "u8")]);
    times(1, "GET /a/../x", &[]);
    times(3, "GET /x", &[("x-user", ""), ("authorization", &bearer)]);
    for address in ["203.0.113.98", "203.0.113.99"] {
        let Step::Ask { request, .. } = ask("GET /x", &[("x-forwarded-for", address)]) else { continue };
        steps.push(Step::Ask { peer: [192, 0, 2, 9], request });
    }
    for wait in [20, 61, 300, 3_600, 90_000] {
        steps.push(Step::Wait(wait));
        steps.extend((0..3).map(|_| ask("GET /x", &[])));
    }
    steps
}

/// Returns the answers to clients.
pub(super) fn answers(policy: &str) -> Result<String, String> {
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(START)));
    let limiter = Arc::new(Limiter::builder(parse(policy)?).clock(Arc::clone(&clock)).build());
    let named = |parts: &http::request::Parts, kind: &str| -> Vec<(String, String)> {
        let named = parts.headers.iter().filter_map(|(name, value)| Some((name.as_str().strip_prefix(kind)?, value)));
        named.map(|(name, value)| (name.to_owned(), value.to_str().unwrap().to_owned())).collect()
    };
    let layer = ThresholdLayer::new(limiter).map_err(|error| error.to_string())?.identify(move |parts| Identified {
        facts: named(parts, "fact-"),
        costs: named(parts, "cost-").into_iter().map(|(name, cost)| (name, cost.parse().unwrap())).collect(),
        ..Identified::default()
    });
    let mut service = layer.layer(Inner);
    let runtime = runtime();
    let (mut seen, mut held) = (String::new(), Vec::new());
    for step in script() {
        match step {
            Step::Wait(seconds) => clock.advance(Span::from_secs(seconds)),
            Step::Ask { peer, request } => {
                let asked = async { service.call_from(Some(SocketAddr::from((peer, 4711))), *request).await };
                let Ok(response) = runtime.block_on(asked);
                let (parts, body) = response.into_parts();
                let mut fields: Vec<String> = { parts.headers.iter() }
                    .filter(|(name, _)| *name != "x-trace-id")
                    .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
                    .collect();
                fields.sort_unstable();
                seen.push_str(&format!("{} {}", parts.status.as_u16(), fields.join("; ")));
                // Concurrency is held until the answer's body was read.
                if parts.status.is_success() {
                    held.push(body);
                } else {
                    let body = runtime.block_on(body.collect()).unwrap().to_bytes();
                    seen.push_str(&without_trace(std::str::from_utf8(&body).unwrap()));
                }
                seen.push('\n');
            }
        }
    }
    Ok(seen)
}

/// Returns a body without its random trace id.
fn without_trace(body: &str) -> String {
    match body.split_once("\"traceId\":\"") {
        Some((before, after)) => format!(" {before}{}", after.split_once('"').unwrap().1),
        None => format!(" {body}"),
    }
}

/// Returns the decisions and the logins without a store.
pub(super) fn without_store(policy: &str) -> Result<String, String> {
    let (clock, secret) = (ManualClock::new(Timestamp::from_secs(START)), Secret::new(&[7; 32]).unwrap());
    let limiter = Limiter::builder(parse(policy)?)
        .store(DeadStore)
        .clock(clock)
        .digest_key(DigestKey::new([7; 16]))
        .secrets(secret)
        .build()
        .unwrap();
    runtime().block_on(async {
        let mut seen = String::new();
        for _ in 0..3 {
            let facts = Facts { user: Some("u1"), ..Facts::default() };
            let decision = limiter.check_async(&facts).await.unwrap();
            seen.push_str(&format!("{} {:?}; ", decision.verdict.name(), decision.degraded.map(Degraded::name)));
            let request = LoginRequest { account: Some("a"), ..LoginRequest::default() };
            seen.push_str(&match limiter.login_attempt_async(&request).await {
                Ok(Attempted::Allowed(_)) => "allowed\n".to_owned(),
                Ok(Attempted::Refused(refusal)) => format!("refused: {}\n", refusal.code()),
                Err(error) => format!("{error}\n"),
            });
        }
        Ok(seen)
    })
}

/// Returns the answers to failing logins, on one account and on many.
pub(super) fn logins(policy: &str) -> Result<String, String> {
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(START)));
    let limiter = Limiter::builder(parse(policy)?).clock(Arc::clone(&clock)).build();
    let mut seen = String::new();
    for number in 0..24 {
        for account in ["same".to_owned(), format!("other {number}")] {
            let request =
                LoginRequest { account: Some(&account), ip: Some([203, 0, 113, 7].into()), ..LoginRequest::default() };
            seen.push_str(&match limiter.login_attempt(&request).unwrap() {
                Attempted::Refused(refusal) => format!("{} {:?}; ", refusal.code(), refusal.retry_after),
                Attempted::Allowed(attempt) => {
                    let result = limiter.login_result(&attempt, false).unwrap();
                    format!("{:?}; ", result.lockout_remaining)
                }
            });
        }
        clock.advance(Span::from_secs(70));
    }
    Ok(seen)
}

/// Returns what is left for others after a flood of keys has filled the table.
pub(super) fn full_table(policy: &str) -> Result<String, String> {
    let clock = ManualClock::new(Timestamp::from_secs(START));
    let limiter: Limiter<MemoryStore, ManualClock> = Limiter::builder(parse(policy)?).clock(clock).build();
    let check = |user: &str, ip: Ipv4Addr| {
        let facts = Facts { user: Some(user), ip: Some(IpAddr::V4(ip)), ..Facts::default() };
        limiter.check(&facts).unwrap()
    };
    for number in 0..4_000 {
        for _ in 0..2 {
            let _ = check(&format!("flood {number}"), Ipv4Addr::new(203, 0, 113, 7));
        }
    }
    let keys = limiter.store().usage().keys;
    let late: Vec<_> =
        (0..=200).map(|number| check(&format!("late {number}"), Ipv4Addr::new(10, 0, number, 1))).collect();
    let most = |count: usize| if count > 150 { "most" } else { "few" };
    let allowed = late.iter().filter(|decision| decision.allowed()).count();
    let full = late.iter().filter(|decision| decision.degraded.map(Degraded::name) == Some("store_full")).count();
    Ok(format!("{} keys, {} allowed, {} met a full store", most(keys / 20), most(allowed), most(full)))
}

/// Returns in how many partitions of a store the budgets of a tenant's users are.
pub(super) fn partitions(policy: &str) -> Result<String, String> {
    let policy = parse(policy)?.with_key(DigestKey::new([7; 16]));
    let mut partitions = BTreeSet::new();
    for number in 0..200 {
        let user = format!("u{number}");
        let facts = Facts { tenant: Some("t1"), user: Some(&user), ..Facts::default() };
        let plan = policy.plan(&facts).map_err(|error| error.to_string())?;
        partitions.extend(plan.charges().iter().map(|charge| charge.key().partition()));
    }
    Ok(format!("{} partitions", partitions.len()))
}

/// Returns the banner and the warnings of a server, or why it does not start.
pub(super) fn started(policy: &str) -> Result<String, String> {
    let file = Scratch::file("policy.toml", policy);
    let mut child = Start { policy: Some(file.path()), ..Start::default() }.command().spawn().unwrap();
    let mut banner = String::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok) {
        let is_last = line.trim_start().starts_with("tokens");
        if line.trim_start().starts_with("store") {
            banner.push_str(&line);
        }
        if is_last {
            break;
        }
    }
    let _ = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    let mut log = String::new();
    child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    child.wait().unwrap();
    let warnings = log.lines().filter(|line| line.contains("WARN")).filter_map(|line| Some(line.split_once("WARN")?.1));
    let warnings: Vec<&str> = warnings.filter(|line| !line.contains("number of open files")).collect();
    if banner.is_empty() { Err(log) } else { Ok(format!("{banner}\n{}", warnings.join("\n"))) }
}

/// Returns what a server logs of 60 denials of one user: how many lines, and whether the user is named.
pub(super) fn log(policy: &str) -> Result<String, String> {
    let file = Scratch::file("policy.toml", policy);
    let server = Start { policy: Some(file.path()), ..Start::default() }.server();
    let mut client = server.connect();
    for _ in 0..61 {
        assert_eq!(client.post("/v1/check", r#"{"user": "somebody", "ip": "203.0.113.7"}"#).unwrap().status, 200);
    }
    server.signal("TERM");
    let (_, log) = server.wait();
    let denials: Vec<&str> = log.lines().filter(|line| line.contains("denied")).collect();
    let named = |text: &str| denials.iter().any(|line| line.contains(text));
    Ok(format!("each: {}, user: {}, address: {}", denials.len() == 60, named("somebody"), named("203.0.113.7")))
}
