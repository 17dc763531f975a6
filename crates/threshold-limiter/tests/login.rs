//! A login through the limiter, as an application meets it. What counts and for how long, the vectors say.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use threshold_core::{Span, Timestamp};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{Attempted, Limiter, LoginError, LoginRequest, ManualClock, Policy, Refusal, RefusedBy};

type Watched = Limiter<MemoryStore, Arc<ManualClock>>;

fn watched(policy: &str) -> (Watched, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
    let policy = Policy::parse(&format!("{policy}\n[memory]\nmax_keys = 1000\n"), &|_| None).unwrap();
    (Limiter::builder(policy).clock(Arc::clone(&clock)).build(), clock)
}

fn ada(device: Option<&str>) -> LoginRequest<'_> {
    LoginRequest { account: Some("ada"), device, ..LoginRequest::default() }
}

/// Tries a login, and says how the secret turned out.
fn try_once(limiter: &Watched, request: &LoginRequest<'_>, success: bool) -> Result<Option<String>, Refusal> {
    match limiter.login_attempt(request).unwrap() {
        Attempted::Allowed(attempt) => Ok(limiter.login_result(&attempt, success).unwrap().device),
        Attempted::Refused(refusal) => Err(refusal),
    }
}

#[test]
fn a_refusal_says_what_the_answer_is() {
    let (limiter, clock) = watched("[login]\nip = \"4/5min\"\nceiling = 4\nlocks = { 3 = \"1min\" }");
    for _ in 0..3 {
        assert_eq!(try_once(&limiter, &ada(None), false), Ok(None));
    }
    let locked = try_once(&limiter, &ada(None), true).unwrap_err();
    assert_eq!(locked, Refusal { by: RefusedBy::Lock, retry_after: Some(Span::MINUTE) });
    assert_eq!(locked.code(), "account_locked");
    assert_eq!(locked.message(), "Too many failed attempts. Account temporarily locked.");
    clock.advance(Span::MINUTE);
    assert_eq!(try_once(&limiter, &ada(None), false), Ok(None));
    clock.advance(Span::HOUR);
    let ceiling = try_once(&limiter, &ada(None), true).unwrap_err();
    assert_eq!((ceiling, ceiling.code()), (Refusal { by: RefusedBy::Ceiling, retry_after: None }, "account_locked"));

    let from = LoginRequest { ip: "203.0.113.7".parse().ok(), ..LoginRequest::default() };
    for _ in 0..4 {
        assert_eq!(try_once(&limiter, &from, false), Ok(None));
    }
    let address = try_once(&limiter, &from, true).unwrap_err();
    assert_eq!(address, Refusal { by: RefusedBy::Address, retry_after: Some(Span::from_secs(300)) });
    assert_eq!(address.code(), "too_many_requests");
    assert_eq!(address.message(), "Too many authentication attempts. Please try again later.");
}

#[test]
fn a_result_at_the_ceiling_has_no_end_and_one_before_it_has() {
    let (limiter, clock) = watched("[login]\nceiling = 4\nlocks = { 3 = \"1min\" }");
    let mut results = Vec::new();
    for _ in 0..4 {
        let Attempted::Allowed(attempt) = limiter.login_attempt(&ada(None)).unwrap() else { break };
        let told = limiter.login_result(&attempt, false).unwrap();
        results.push((told.allowed, told.lockout_remaining));
        clock.advance(told.lockout_remaining.unwrap_or(Span::ZERO));
    }
    assert_eq!(results, [(true, None), (true, None), (false, Some(Span::MINUTE)), (false, None)]);
}

#[test]
fn a_known_device_gets_in_while_others_are_locked_out_until_a_reset() {
    let (limiter, _) = watched("[login]");
    let device = try_once(&limiter, &ada(None), true).unwrap();
    assert!(device.is_some());
    for _ in 0..3 {
        assert!(try_once(&limiter, &ada(None), false).is_ok());
    }
    assert!(try_once(&limiter, &ada(None), true).is_err());
    assert!(try_once(&limiter, &ada(device.as_deref()), true).is_ok());
    // A pardon frees the others; the secret may be known to whoever guessed, and a reset makes every device unknown.
    limiter.pardon_account(" ADA ").unwrap();
    let device = try_once(&limiter, &ada(None), true).unwrap();
    limiter.reset_account("ada").unwrap();
    for _ in 0..3 {
        assert!(try_once(&limiter, &ada(device.as_deref()), false).is_ok());
    }
    assert!(try_once(&limiter, &ada(device.as_deref()), true).is_err(), "it counts as any other");
}

#[test]
fn what_cannot_be_is_an_error_of_its_own() {
    let (limiter, clock) = watched("[login]");
    let (other, _) = watched("[login]");
    let (none, _) = watched("");
    let attempt = limiter.login_attempt(&ada(None)).unwrap();
    let attempt = attempt.token().unwrap();
    assert_eq!(none.login_attempt(&ada(None)), Err(LoginError::NoLogin));
    assert_eq!(none.login_result(attempt, true), Err(LoginError::NoLogin));
    assert_eq!(other.login_result(attempt, true), Err(LoginError::NotOurs));
    assert_eq!(limiter.login_result("made up", true), Err(LoginError::NotOurs));
    assert!(limiter.login_result(attempt, true).is_ok());
    assert_eq!(limiter.login_result(attempt, true), Err(LoginError::UnknownAttempt), "it has ended");
    let late = limiter.login_attempt(&ada(None)).unwrap();
    clock.advance(Span::MINUTE);
    assert_eq!(limiter.login_result(late.token().unwrap(), true), Err(LoginError::UnknownAttempt), "its minute was up");
    for nobody in ["", " \t"] {
        assert_eq!(limiter.reset_account(nobody), Err(LoginError::NoAccount));
        assert_eq!(limiter.pardon_account(nobody), Err(LoginError::NoAccount));
    }
    assert_eq!(LoginError::NoLogin.to_string(), "the policy has no [login]");
}

#[test]
fn a_thousand_guesses_at_once_reach_the_verifier_three_times() {
    let (limiter, _) = watched("[login]");
    let reached = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..125 {
                    if let Attempted::Allowed(_) = limiter.login_attempt(&ada(None)).unwrap() {
                        reached.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert_eq!(reached.into_inner(), 3);
}

#[test]
fn names_and_tokens_are_not_in_what_is_logged() {
    let (limiter, _) = watched("[login]");
    let request = LoginRequest { ip: "203.0.113.7".parse().ok(), factor: Some("totp"), ..ada(Some("my-device")) };
    let attempted = limiter.login_attempt(&request).unwrap();
    let mut logged = format!("{request:?} {attempted:?}");
    let attempt = attempted.token().unwrap();
    let told = limiter.login_result(attempt, true).unwrap();
    logged += &format!("{told:?}");
    for secret in ["ada", "203.0.113.7", "my-device", attempt, told.device.as_deref().unwrap()] {
        assert!(!logged.contains(secret), "{logged}");
    }
}
