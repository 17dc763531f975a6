//! Lists of requests: how long they keep a thread, and how large their answers are.

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
use crate::serve::{Line, Tokens};

fn app(policy: &str, bounds: Bounds) -> App {
    let policy = Policy::parse(policy, &|_| None).unwrap();
    App::new(Desk::new(policy, Arc::new(ManualClock::default())), Tokens::default(), bounds)
}

const USER: &str = "[[rule]]\nname = 'r'\nper = ['user']\nlimit = '100000/h'\n";

fn list(item: &str, times: usize) -> String {
    format!("[{}]", vec![item; times].join(","))
}

/// A thousand requests took 53 ms in one piece, and whoever else that thread had to serve waited.
///
/// Woken by: leaving out either `yield_now` in `answer_all`.
#[tokio::test]
async fn others_have_their_turn_between_two_items() {
    let app = app(USER, Bounds::default());
    for verb in [Verb::Check, Verb::Peek, Verb::Record] {
        let (line, body) = (Line::default(), list(r#"{"user": "u"}"#, 1_000));
        let mut deciding = pin!(decide(&app, &line, verb, body.as_bytes()));
        let mut turns = 0;
        let response = poll_fn(|cx| {
            turns += 1;
            deciding.as_mut().poll(cx)
        });
        assert_eq!(response.await.unwrap().status(), 200);
        assert!(turns >= 2_000, "planning and deciding have a turn for each item: {turns}");
    }
}

/// What is taken for a list before it is read is enough for the largest answer that it can have.
///
/// Woken by: half of `LARGEST_READING`.
#[tokio::test]
async fn room_is_taken_for_the_largest_answer() {
    let large = "limit = '999999999999999/year'\nalgorithm = 'fixed-window'\non_missing = 'floor'\n";
    let rules = (0..16).map(|number| {
        let name = format!("{}{number:02}", "n".repeat(62));
        format!("[[rule]]\nname = '{name}'\nlayer = 'endpoint'\nper = ['user', 'fact:f{number}']\n{large}")
    });
    let (policy, line) = (rules.collect::<String>(), Line::default());
    for (policy, item) in [(policy.as_str(), r#"{"user": "u", "ip": "::1"}"#), (USER, r#"{"user": "u"}"#), ("", "{}")] {
        let app = app(policy, Bounds::default());
        let all = app.large.free();
        for items in [0, 1, 100] {
            let body = list(item, items);
            let expected = list_bytes(body.as_bytes(), &app.desk.policy()).unwrap();
            let response = decide(&app, &line, Verb::Check, body.as_bytes()).await.unwrap();
            let taken = all - app.large.free();
            let answer = response.into_body().collect().await.unwrap().to_bytes();
            assert!(answer.len() <= expected, "{} of {expected} for {items} items", answer.len());
            assert!((answer.len()..answer.len() + 1_024).contains(&taken), "{taken} for {}", answer.len());
            drop(answer);
            assert_eq!(app.large.free(), all);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_that_finds_no_room_is_refused_and_charges_nothing() {
    let app = app(USER, Bounds::default());
    let (line, one) = (Line::default(), r#"{"user": "u"}"#);
    let all = app.large.room(usize::MAX).await.unwrap();
    let refused = decide(&app, &line, Verb::Check, list(one, 3).as_bytes()).await.unwrap_err();
    assert_eq!((refused.status.as_u16(), refused.body.name()), (503, "busy"));
    // One request needs none.
    let peeked = decide(&app, &line, Verb::Peek, one.as_bytes()).await.unwrap().into_body();
    let peeked: serde_json::Value = serde_json::from_slice(&peeked.collect().await.unwrap().to_bytes()).unwrap();
    assert_eq!(peeked["remaining"], 99_999);
    drop(all);
    assert!(decide(&app, &line, Verb::Check, list(one, 3).as_bytes()).await.is_ok());
}
