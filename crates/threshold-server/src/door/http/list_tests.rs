//! Tests of lists of requests: how long one keeps a thread busy, and how much memory its answers take.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;

use http_body_util::BodyExt as _;
use threshold_core::Policy;
use threshold_core::plan::Verb;
use threshold_limiter::ManualClock;

use super::{decide, list_bytes};
use crate::desk::Desk;
use crate::door::{App, Bounds};
use crate::serve::{ConnectionWatch, Tokens};

fn app(policy: &str, bounds: Bounds) -> App {
    let policy = Policy::parse(policy, &|_| None).unwrap();
    App::new(Desk::new(policy, Arc::new(ManualClock::default())), Tokens::default(), bounds)
}

const USER: &str = "[[rule]]\nname = 'r'\nper = ['user']\nlimit = '100000/h'\n";

fn list(item: &str, times: usize) -> String {
    format!("[{}]", vec![item; times].join(","))
}

/// A thousand requests took 53 ms without yielding, and every other connection of that thread waited.
///
/// Woken by: leaving out either `yield_now` in `answer_all`.
#[tokio::test]
async fn a_list_yields_after_each_item() {
    let app = app(USER, Bounds::default());
    for verb in [Verb::Check, Verb::Peek, Verb::Record] {
        let (watch, body) = (ConnectionWatch::default(), list(r#"{"user": "u"}"#, 1_000));
        let mut deciding = pin!(decide(&app, &watch, verb, body.as_bytes()));
        let mut polls = 0;
        let response = poll_fn(|cx| {
            polls += 1;
            deciding.as_mut().poll(cx)
        });
        assert_eq!(response.await.unwrap().status(), 200);
        assert!(polls >= 2_000, "planning and deciding yield once for each item: {polls}");
    }
}

/// The memory that is acquired before a list is parsed is enough for its largest possible answer.
///
/// Woken by: half of `MAX_READING`.
#[tokio::test]
async fn an_answer_to_a_list_fits_the_memory_that_was_acquired() {
    let large = "limit = '999999999999999/year'\nalgorithm = 'fixed-window'\non_missing = 'floor'\n";
    let rules = (0..16).map(|number| {
        let name = format!("{}{number:02}", "n".repeat(62));
        format!("[[rule]]\nname = '{name}'\nlayer = 'endpoint'\nper = ['user', 'fact:f{number}']\n{large}")
    });
    let (policy, watch) = (rules.collect::<String>(), ConnectionWatch::default());
    for (policy, item) in [(policy.as_str(), r#"{"user": "u", "ip": "::1"}"#), (USER, r#"{"user": "u"}"#), ("", "{}")] {
        let app = app(policy, Bounds::default());
        let all = app.answer_memory.free();
        for items in [0, 1, 100] {
            let body = list(item, items);
            let expected = list_bytes(body.as_bytes(), &app.desk.policy()).unwrap();
            let response = decide(&app, &watch, Verb::Check, body.as_bytes()).await.unwrap();
            let taken = all - app.answer_memory.free();
            let answer = response.into_body().collect().await.unwrap().to_bytes();
            assert!(answer.len() <= expected, "{} of {expected} for {items} items", answer.len());
            assert!((answer.len()..answer.len() + 1_024).contains(&taken), "{taken} for {}", answer.len());
            drop(answer);
            assert_eq!(app.answer_memory.free(), all);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_without_memory_for_its_answers_is_refused_and_charges_nothing() {
    let app = app(USER, Bounds::default());
    let (watch, one) = (ConnectionWatch::default(), r#"{"user": "u"}"#);
    let all = app.answer_memory.acquire(usize::MAX).await.unwrap();
    let refused = decide(&app, &watch, Verb::Check, list(one, 3).as_bytes()).await.unwrap_err();
    assert_eq!((refused.status.as_u16(), refused.body.code()), (503, "busy"));
    // A single request acquires no memory.
    let peeked = decide(&app, &watch, Verb::Peek, one.as_bytes()).await.unwrap().into_body();
    let peeked: serde_json::Value = serde_json::from_slice(&peeked.collect().await.unwrap().to_bytes()).unwrap();
    assert_eq!(peeked["remaining"], 99_999);
    drop(all);
    assert!(decide(&app, &watch, Verb::Check, list(one, 3).as_bytes()).await.is_ok());
}
