//! Tests a real Envoy with its rate limit filter and with its external authorization.
//!
//! `./test` installs it: `THRESHOLD_ENVOY` is the program, and `THRESHOLD_RATELIMIT` the source of envoyproxy/ratelimit.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]

#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/client.rs"]
mod client;
mod front;
#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/grpc_client.rs"]
mod grpc_client;
mod import;
#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/origin.rs"]
mod origin;
#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/process.rs"]
mod process;
// Not `expect`: under it, what the derived code uses counts as used, and nothing is dead.
#[allow(dead_code, reason = "the server uses all of it")]
#[path = "../../src/door/grpc/proto.rs"]
mod proto;

use std::time::{Duration, Instant};

use client::Answer;
use front::{Front, OPTIONAL};
use process::PATIENCE;

/// Calls of one client, until one is not answered with 200. Returns how many were, and the last answer.
fn until_refused(mut ask: impl FnMut() -> Answer) -> (usize, Answer) {
    for turn in 0..100 {
        let answer = ask();
        if answer.status != 200 {
            return (turn, answer);
        }
        assert!(answer.header("x-ratelimit-remaining").is_some(), "{answer:?}");
    }
    panic!("nothing is limited");
}

#[track_caller]
fn check_429(answer: &Answer, rule: &str) {
    assert_eq!(answer.status, 429, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.json()["rule"], rule);
    assert!(answer.header("retry-after").unwrap().parse::<u64>().unwrap() > 0);
    assert!(answer.header("x-ratelimit-limit").is_some() && answer.header("x-trace-id").is_some());
}

#[test]
fn the_rate_limit_filter_passes_requests_and_then_answers_429_with_headers_and_a_body() {
    let front = Front::start();
    let (passed, last) = until_refused(|| front.get("limited", "/", &[("x-user", "u1")]));
    assert_eq!(passed, 3);
    check_429(&last, "user");
    // All or none: the address was charged three times, and has two left.
    let (passed, last) = until_refused(|| front.get("limited", "/", &[]));
    assert_eq!(passed, 2);
    check_429(&last, "address");
}

#[test]
fn a_descriptor_has_its_own_cost() {
    let front = Front::start();
    let (passed, last) = until_refused(|| front.get("limited", "/", &[("x-cost", "40")]));
    assert_eq!(passed, 2);
    check_429(&last, "cost");
    // A cost that never fits is denied as well, and charges nothing.
    assert_eq!(front.get("limited", "/", &[("x-cost", "101")]).status, 429);
    assert_eq!(front.get("limited", "/", &[("x-cost", "20")]).status, 200);
}

/// Twenty optional headers were an error, which Envoy lets through unless it is told otherwise. Their client had no limit.
///
/// Woken by: an error in `excess` or `too_large` in place of a denial, and by charging such a request.
#[test]
fn a_client_that_sends_every_optional_header_or_a_huge_one_is_denied() {
    let front = Front::start();
    let names: Vec<String> = (0..OPTIONAL).map(|n| format!("x-optional-{n}")).collect();
    let all: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "v")).collect();
    let huge = "v".repeat(5 << 20);
    for fields in [&all[..], &[("x-optional-0", &huge)]] {
        for _ in 0..8 {
            let answer = front.get("optional", "/", fields);
            assert_eq!((answer.status, &answer.json()["error"]), (429, &"rate_limited".into()), "{answer:?}");
            assert!(answer.header("x-trace-id").is_some(), "{answer:?}");
        }
    }
    assert_eq!(front.origin.seen(), 0);
    let said = front.log("request refused undecided");
    assert!(said.contains("a request has at most 16 descriptors, this one has 21"), "{said}");
    // External authorization is asked about the same headers, and denies as well.
    assert_eq!(front.get("open-authz", "/", &[("x-other", &huge)]).status, 400);
    // Nothing was charged, and fifteen of them are decided.
    let answer = front.get("optional", "/", &all[..15]);
    let figures = answer.header("ratelimit").unwrap();
    assert!(answer.status == 200 && figures.contains("\"optional\";r=999999;"), "{answer:?}");
}

/// What has happened is never denied, so its error charged nothing: a client that sent every optional header was never counted.
///
/// Woken by: leaving out `record_each`.
#[test]
fn a_stream_with_every_optional_header_is_recorded() {
    let front = Front::start();
    let names: Vec<String> = (0..OPTIONAL).map(|n| format!("x-optional-{n}")).collect();
    let all: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "v")).collect();
    // It is as much as the limit. Envoy reports it at the end, and does not wait for the answer.
    assert_eq!(front.get("optional-done", "/", &all).status, 200);
    let begun = Instant::now();
    while front.get("optional", "/", &[]).status == 200 {
        assert!(begun.elapsed() < PATIENCE, "nothing is recorded");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_a_stream_has_cost_is_charged_when_it_is_done() {
    let front = Front::start();
    // Nothing was charged when they began, so all of them pass. Envoy reports at the end of each, and does not wait for the answer.
    let begun = Instant::now();
    while front.get("done", "/", &[]).status == 200 {
        assert!(begun.elapsed() < PATIENCE, "nothing is charged at the end of streams");
        std::thread::sleep(Duration::from_millis(20));
    }
    check_429(&front.get("done", "/", &[]), "done");
}

/// Woken by: leaving out `DELAY_PERCENTAGE` or `DELAY`.
#[test]
fn a_shadow_ban_asks_envoys_fault_filter_to_delay_the_request() {
    let front = Front::start();
    // No client cancels its delay; for the rate limit filter, only Envoy's configuration can see to that.
    let ask = |listener: &str| {
        let none = [("x-user", "shadowed"), ("x-envoy-fault-delay-request-percentage", "0")];
        front.get(listener, "/", if listener == "shadow-authz" { &none } else { &none[..1] })
    };
    for listener in ["shadow", "shadow-authz"] {
        assert_eq!(ask(listener).status, 200);
        assert!(!front.origin.head().contains("x-envoy-fault-delay-request:"));
        assert_eq!(ask(listener).status, 429);
        // The limit has room again.
        std::thread::sleep(Duration::from_millis(3_100));
        let answer = ask(listener);
        assert_eq!(answer.status, 200, "{listener}: {answer:?}");
        assert!(answer.headers.iter().all(|(name, _)| !name.contains("delay")), "{answer:?}");
        let head = front.origin.head();
        let delay = head.lines().find_map(|line| line.strip_prefix("x-envoy-fault-delay-request: "));
        let delay: u64 = delay.unwrap_or_else(|| panic!("{listener}: {head}")).parse().unwrap();
        assert!((1_000..=3_000).contains(&delay) && !head.contains("percentage"), "{head}");
        front.forgive("shadowed");
    }
}

#[test]
fn external_authorization_passes_requests_and_then_answers_a_real_429() {
    let front = Front::start();
    for listener in ["authz", "authz-http"] {
        // A client cannot choose its address, or its path.
        let fields = [("x-forwarded-for", "198.51.100.7"), ("x-original-uri", "/other"), ("x-forwarded-uri", "/other")];
        let (passed, last) = until_refused(|| front.get(listener, "/api//posts?a=b", &fields));
        assert_eq!(passed, 2, "{listener}");
        check_429(&last, "posts");
        assert_eq!(front.get(listener, "/%61pi/posts/", &[]).status, 429, "{listener}");
        assert_eq!(front.get(listener, "/other", &[]).status, 200, "{listener}");
        front.restart_threshold();
    }
}

#[test]
fn without_the_server_envoys_failure_mode_decides() {
    let mut front = Front::start();
    for listener in ["limited", "done", "authz", "open", "open-authz"] {
        assert_eq!(front.get(listener, "/", &[]).status, 200, "{listener}");
    }
    front.stop_threshold();
    for (listener, status) in [("limited", 500), ("open", 200), ("authz", 403), ("open-authz", 200)] {
        assert_eq!(front.get(listener, "/", &[]).status, status, "{listener}");
    }
}

/// Woken by: leaving out the rate limits, `merge_slashes`, or one of the `early_header_mutation_extensions`, without which a client chooses how
/// long a request of its own is held, or that it is not held.
#[test]
fn the_files_of_deploy_limit_requests_and_leave_delays_to_the_server() {
    for file in ["ratelimit.yaml", "ext-authz.yaml"] {
        let front = Front::of_deploy(file);
        // An hour: a filter that obeys it does not answer in time for this test.
        for fault in [("x-envoy-fault-delay-request", "3600000"), ("x-envoy-fault-delay-request-percentage", "0")] {
            assert_eq!(front.get("public", "/", &[fault]).status, 200, "{file}");
            assert!(!front.origin.head().contains("x-envoy-fault"), "{file}: {}", front.origin.head());
        }
        let (passed, last) = until_refused(|| front.get("public", "//login?again", &[]));
        assert_eq!(passed, 10, "{file}");
        check_429(&last, "login");
        assert_eq!(front.get("public", "/", &[]).status, 200, "{file}");
    }
}
