//! The `login` example: guesses, locks and known devices. All clients have the same address.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::running::{Answer, MAX_CONNECTIONS, Running, field};

const RIGHT: &str = "lovelace";
const WRONG: &str = "guess";
const CHECKED: &str = "a password is checked";

/// Logs in with these cookies.
fn login(running: &Running, account: &str, password: &str, cookies: &str) -> Answer {
    let body = json!({ "account": account, "password": password }).to_string();
    running.post("/login", &[("cookie", cookies)], &body)
}

fn statuses(running: &Running, passwords: &[&str], cookies: &str) -> Vec<u16> {
    passwords.iter().map(|password| login(running, "ada", password, cookies).status().as_u16()).collect()
}

/// Returns the name and the value of the cookie that an answer sets.
fn device(answer: &Answer) -> String {
    field(answer, "set-cookie").split(';').next().unwrap_or_default().to_owned()
}

#[track_caller]
fn refused(answer: &Answer, code: &str, message: &str) {
    assert_eq!(answer.status().as_u16(), 429, "{answer:?}");
    let body: Value = serde_json::from_str(answer.body()).unwrap();
    assert_eq!(body, json!({ "error": code, "message": message }));
    assert!(field(answer, "retry-after").parse::<u64>().unwrap() >= 1);
}

#[track_caller]
fn locked(answer: &Answer) {
    refused(answer, "account_locked", "Too many failed attempts. Account temporarily locked.");
}

#[test]
fn a_thousand_guesses_at_once_reach_the_verifier_three_times() {
    let running = Running::start("login", &[]);
    let (made, unauthorized) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..MAX_CONNECTIONS {
            scope.spawn(|| {
                while made.fetch_add(1, Ordering::Relaxed) < 1_000 {
                    match login(&running, "ada", WRONG, "").status().as_u16() {
                        401 => drop(unauthorized.fetch_add(1, Ordering::Relaxed)),
                        status => assert_eq!(status, 429),
                    }
                }
            });
        }
    });
    assert_eq!(unauthorized.into_inner(), 3);
    let log = running.end();
    assert_eq!(log.matches(CHECKED).count(), 3, "{log}");
}

#[test]
fn a_known_device_gets_in_while_the_account_is_locked_for_others() {
    let running = Running::start("login", &[]);
    let first = login(&running, "ada", RIGHT, "");
    assert_eq!(first.status().as_u16(), 200);
    let (_, attributes) = field(&first, "set-cookie").split_once("; ").unwrap();
    assert_eq!(attributes, "Path=/; Max-Age=15552000; HttpOnly; Secure; SameSite=Lax");
    let known = device(&first);
    assert!(known.starts_with("__Host-device=") && known.len() > 30, "{known}");

    assert_eq!(statuses(&running, &[WRONG; 3], ""), [401; 3]);
    locked(&login(&running, "ada", RIGHT, ""));
    locked(&login(&running, "ada", RIGHT, "__Host-device=forged"));
    let of_bob = device(&login(&running, "bob", "correct horse", ""));
    locked(&login(&running, "ada", RIGHT, &of_bob));

    let again = login(&running, "ada", RIGHT, &format!("theme=dark; {known}"));
    assert_eq!(again.status().as_u16(), 200);
    locked(&login(&running, "ada", RIGHT, ""));
    // A stolen device token gives no more guesses than an unknown device has.
    assert_eq!(statuses(&running, &[WRONG, WRONG, WRONG, RIGHT], &device(&again)), [401, 401, 401, 429]);
}

#[test]
fn a_success_resets_the_consecutive_failures() {
    let running = Running::start("login", &[]);
    assert_eq!(statuses(&running, &[WRONG, WRONG, RIGHT, WRONG, WRONG, RIGHT], ""), [401, 401, 200, 401, 401, 200]);
}

#[test]
fn an_unknown_account_gets_the_same_answers_as_a_known_one() {
    let running = Running::start("login", &[]);
    let told = |account: &str| {
        let answers = std::iter::repeat_with(|| login(&running, account, WRONG, "")).take(4);
        answers.map(|answer| (answer.status(), answer.headers().len(), answer.into_body())).collect::<Vec<_>>()
    };
    assert_eq!(told("ada"), told("nobody"));
    assert_eq!(login(&running, "somebody", RIGHT, "").status().as_u16(), 401, "nor does anyone's password open it");
    let log = running.end();
    assert_eq!(log.matches(CHECKED).count(), 7, "{log}");
    assert!(!log.contains("nobody") && !log.contains("ada") && !log.contains(WRONG), "{log}");
}

#[test]
fn an_address_has_one_limit_for_all_accounts() {
    let running = Running::start("login", &[]);
    for guess in 0..20 {
        assert_eq!(login(&running, &format!("account {guess}"), WRONG, "").status().as_u16(), 401);
    }
    let message = "Too many authentication attempts. Please try again later.";
    refused(&login(&running, "ada", RIGHT, ""), "too_many_requests", message);
}
