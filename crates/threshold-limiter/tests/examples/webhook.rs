//! The `webhook` example: a bot, and a Bot API that records what the bot sends.

use http::StatusCode;
use serde_json::{Value, json};

use crate::outside::Outside;
use crate::running::{Answer, Running, command};

const SECRET: (&str, &str) = ("x-telegram-bot-api-secret-token", "hush");
const FULL: &str = "You've reached the message limit. Please try again later.";
/// The id of a group chat.
const CHAT: i64 = -1001;
const TOKEN: &str = "123:abc";

fn start(api: &str) -> Running {
    let own = [("BOT_TOKEN", TOKEN), ("WEBHOOK_SECRET", SECRET.1), ("ALLOWED_USERS", "42, 43"), ("BOT_API", api)];
    Running::start("webhook", &[&own[..], &[("RATE_LIMIT_MAX", "2"), WINDOW]].concat())
}

/// A year: a fixed window of an hour might end while the test runs.
const WINDOW: (&str, &str) = ("RATE_LIMIT_WINDOW_MS", "31536000000");

fn message(from: i64) -> Value {
    json!({ "update_id": 1, "message": { "from": { "id": from }, "chat": { "id": CHAT }, "text": "hi" } })
}

fn send(running: &Running, update: &Value) -> Answer {
    running.post("/webhook", &[SECRET], &update.to_string())
}

#[track_caller]
fn done(answer: &Answer) {
    assert_eq!((answer.status().as_u16(), answer.body().as_str()), (200, "{\"ok\":true}"));
}

#[track_caller]
fn replied(api: &Outside, text: &str) {
    assert_eq!(api.next(), (format!("/bot{TOKEN}/sendMessage"), json!({ "chat_id": CHAT, "text": text })));
}

#[test]
fn each_user_has_a_limit_and_gets_a_message_when_it_is_reached() {
    let api = Outside::start();
    let running = start(&api.url());
    for text in ["You said: hi", "You said: hi", FULL, FULL] {
        done(&send(&running, &message(42)));
        replied(&api, text);
    }
    done(&send(&running, &message(43)));
    replied(&api, "You said: hi");
    assert!(api.is_quiet());
}

#[test]
fn a_reply_that_fails_is_logged_and_the_webhook_still_answers() {
    let api = Outside::start();
    let running = start(&api.url());
    api.answer_with(Some(StatusCode::INTERNAL_SERVER_ERROR));
    for text in ["You said: hi", "You said: hi", FULL] {
        done(&send(&running, &message(42)));
        replied(&api, text);
    }
    drop(api);
    done(&send(&running, &message(42)));
    let log = running.end();
    assert_eq!(log.matches("the reply was not sent").count(), 4, "{log}");
    assert!(!log.contains(TOKEN), "{log}");
}

#[test]
fn updates_that_are_not_for_the_bot_are_not_counted() {
    let api = Outside::start();
    let running = start(&api.url());
    let channel_post = json!({ "message": { "chat": { "id": CHAT }, "text": "hi" } });
    let edited = json!({ "edited_message": message(42)["message"] });
    for _ in 0..3 {
        done(&send(&running, &message(44)));
        done(&send(&running, &channel_post));
        done(&send(&running, &edited));
        done(&send(&running, &json!([])));
        assert_eq!(running.post("/webhook", &[SECRET], "{").status().as_u16(), 400);
        let update = message(42).to_string();
        assert_eq!(running.post("/webhook", &[], &update).status().as_u16(), 401);
        assert_eq!(running.post("/webhook", &[(SECRET.0, "hus")], &update).status().as_u16(), 401);
        assert_eq!(running.post("/webhook", &[(SECRET.0, "wrong")], "{").status().as_u16(), 401, "before it is read");
    }
    assert!(api.is_quiet());
    for text in ["You said: hi", "You said: hi", FULL] {
        done(&send(&running, &message(42)));
        replied(&api, text);
    }
}

/// Otherwise a request without a secret would have the right one.
#[test]
fn the_example_does_not_start_without_a_secret() {
    for secret in [&[][..], &[("WEBHOOK_SECRET", "")]] {
        let variables = [&[("BOT_TOKEN", TOKEN), ("ALLOWED_USERS", "42")], secret].concat();
        let ended = command("webhook", &variables).output().unwrap();
        assert!(!ended.status.success());
        assert!(String::from_utf8(ended.stderr).unwrap().contains("WEBHOOK_SECRET is not set"));
    }
}
