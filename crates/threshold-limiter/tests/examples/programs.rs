//! The examples that are no servers: each runs to its end and prints what it did.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ::axum::Router;
use ::axum::http::StatusCode;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::running::command;

/// Runs an example to its end, and returns the lines that it has printed.
#[track_caller]
fn run(name: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let output = command(name, variables).output().unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// A real provider answers 429 to the second call, and is not called a third time.
#[test]
fn a_provider_is_left_alone_for_as_long_as_it_asks() {
    let wait = asked_to_wait("1800");
    assert!((1_700..=1_800).contains(&wait), "{wait}");
    // The other form of the field was taken for one second.
    let wait = asked_to_wait("Tue, 31 Dec 2999 23:59:59 GMT");
    assert!((3_500..=3_600).contains(&wait), "{wait}: an hour is the longest that the example waits");
}

/// Runs the example against a provider whose 429 has this `Retry-After`, and returns for how long it does not call it.
fn asked_to_wait(retry_after: &'static str) -> u64 {
    let runtime = Runtime::new().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let answer = move || {
        let is_first = counted.fetch_add(1, Ordering::Relaxed) == 0;
        let status = if is_first { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
        async move { (status, [("retry-after", retry_after)]) }
    };
    runtime.spawn(async move { ::axum::serve(listener, Router::new().fallback(answer)).await });
    let lines = run("provider", &[("PROVIDER", &url)]);
    assert_eq!(lines.get(..2).unwrap(), ["200 OK", "429 Too Many Requests"]);
    assert_eq!(asked.load(Ordering::Relaxed), 2);
    let wait = lines.last().unwrap().strip_prefix("not sent: wait ").unwrap();
    wait.strip_suffix(" s").unwrap().parse().unwrap()
}

#[test]
fn tokens_are_reserved_and_the_real_count_is_committed() {
    let left = |tokens| format!("answered: {tokens} tokens are left");
    let expect = [left(1_580), left(1_160), left(740), "not asked: 740 tokens are left".to_owned()];
    assert_eq!(run("llm", &[]), expect);
}

#[test]
fn limits_follow_a_table() {
    let expect = ["acme: 50", "other: 3", "acme: 200", "other: 3", "acme: 3", "other: 3"];
    assert_eq!(run("database", &[]), expect.map(|line| format!("{line} a minute")));
}
