//! The `mailer` example: a gateway, and a relay that accepts mails, refuses them, or does not answer.

use std::sync::mpsc;

use http::StatusCode;
use serde_json::{Value, json};

use crate::outside::Outside;
use crate::running::{Answer, Running, field};

const MODES: [&str; 2] = ["/v1/messages", "/v1/messages?mode=reserve"];
const PER_MINUTE: &str = "GLOBAL_SEND_RATE_LIMIT_PER_MINUTE";
const PER_HOUR: &str = "GLOBAL_SEND_RATE_LIMIT_PER_HOUR";

fn start(relay: &Outside, limits: &[(&str, &str)]) -> Running {
    Running::start("mailer", &[limits, &[("RELAY", &relay.url())]].concat())
}

fn mail(to: &str) -> String {
    json!({ "to": to, "text": "hi" }).to_string()
}

fn send(running: &Running, path: &str) -> Answer {
    running.post(path, &[], &mail("ada@a.example"))
}

fn status(answer: &Answer) -> u16 {
    answer.status().as_u16()
}

fn detail(answer: &Answer) -> Value {
    serde_json::from_str::<Value>(answer.body()).unwrap().get("detail").unwrap().clone()
}

#[test]
fn sent_mails_count_and_filtered_or_failed_ones_do_not() {
    for path in MODES {
        let relay = Outside::start();
        let running = start(&relay, &[(PER_HOUR, "2")]);
        assert_eq!(status(&send(&running, path)), 202);
        assert_eq!(relay.next(), ("/".to_owned(), serde_json::from_str(&mail("ada@a.example")).unwrap()));
        for to in ["ada@elsewhere.example", "ada@a.example.evil.example", "ada", ""] {
            assert_eq!(status(&running.post(path, &[], &mail(to))), 403, "{to}");
        }
        assert_eq!(status(&running.post(path, &[], "{}")), 403);
        assert!(relay.is_quiet());
        relay.answer_with(Some(StatusCode::SERVICE_UNAVAILABLE));
        for _ in 0..3 {
            assert_eq!(status(&send(&running, path)), 502);
            relay.next();
        }
        relay.answer_with(Some(StatusCode::OK));
        assert_eq!(status(&send(&running, path)), 202);
        relay.next();
        let denied = send(&running, path);
        assert_eq!(status(&denied), 429);
        assert_eq!(detail(&denied), "Too many messages sent in the last hour. Please try again later.");
        assert!(relay.is_quiet());
        for _ in 0..5 {
            assert_eq!(status(&running.ask("GET", path, &[])), 200, "reading is not limited");
        }
    }
}

#[test]
fn nothing_is_limited_by_default() {
    let relay = Outside::start();
    let running = start(&relay, &[]);
    for path in MODES.into_iter().cycle().take(100) {
        assert_eq!(status(&send(&running, path)), 202);
    }
}

#[test]
fn of_two_full_limits_the_answer_has_the_longer_wait_and_the_log_names_both() {
    let relay = Outside::start();
    let running = start(&relay, &[(PER_MINUTE, "1"), (PER_HOUR, "1")]);
    assert_eq!(status(&send(&running, MODES[0])), 202);
    let denied = send(&running, MODES[0]);
    assert_eq!(status(&denied), 429);
    assert!(field(&denied, "retry-after").parse::<u64>().unwrap() > 61, "{denied:?}");
    assert_eq!(detail(&denied), "Too many messages sent in the last hour. Please try again later.");
    assert_eq!(status(&send(&running, MODES[1])), 429);
    let log = running.end();
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    assert_eq!(lines("WARN mailer: rejected name=\"per-minute\" count=1 limit=1"), 2, "{log}");
    assert_eq!(lines("WARN mailer: rejected name=\"per-hour\" count=1 limit=1"), 2, "{log}");
    assert_eq!(lines("DEBUG mailer: counted name=\"per-minute\" count=1 limit=1"), 1, "{log}");
    assert_eq!(lines("DEBUG mailer: counted name=\"per-hour\" count=1 limit=1"), 1, "{log}");
    assert_eq!(lines(""), 6, "{log}");
}

/// Both requests peek before either is recorded.
#[test]
fn peeking_first_and_recording_later_can_send_one_mail_too_many() {
    let relay = Outside::start();
    let running = start(&relay, &[(PER_HOUR, "1")]);
    relay.answer_with(None);
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let senders = [0; 2].map(|_| scope.spawn(|| status(&send(&running, MODES[0]))));
        let _both_are_under_way = (relay.next(), relay.next());
        relay.answer_with(Some(StatusCode::OK));
        senders.into_iter().map(|sender| sender.join().unwrap()).collect()
    });
    assert_eq!(statuses, [202, 202]);
    assert_eq!(status(&send(&running, MODES[0])), 429);
}

#[test]
fn reserving_never_sends_a_mail_too_many() {
    let relay = Outside::start();
    let running = start(&relay, &[(PER_HOUR, "3")]);
    relay.answer_with(None);
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        for _ in 0..20 {
            let (tell, running) = (tell.clone(), &running);
            scope.spawn(move || tell.send(status(&send(running, MODES[1]))).unwrap());
        }
        let next = |count: usize| -> Vec<u16> { told.iter().take(count).collect() };
        // Requests over the limit are denied while the others are still under way.
        assert_eq!(next(17), [429; 17]);
        relay.answer_with(Some(StatusCode::OK));
        assert_eq!(next(3), [202; 3]);
    });
    let _three = (relay.next(), relay.next(), relay.next());
    assert!(relay.is_quiet());
}
