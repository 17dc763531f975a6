//! Logins through the limiter, as an application uses them. The conformance vectors cover what counts and for how long.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use threshold_core::decision::Cause;
use threshold_core::policy::Layer;
use threshold_core::{Span, Timestamp};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{Attempted, Limiter, LoginError, LoginRequest, ManualClock, Policy, Refusal, RefusedBy};

type LoginLimiter = Limiter<MemoryStore, Arc<ManualClock>>;

fn limiter_of(policy: &str) -> (LoginLimiter, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
    let policy = Policy::parse(&format!("{policy}\n[memory]\nmax_keys = 1000\n"), &|_| None).unwrap();
    (Limiter::builder(policy).clock(Arc::clone(&clock)).build(), clock)
}

fn ada(device: Option<&str>) -> LoginRequest<'_> {
    LoginRequest { account: Some("ada"), device, ..LoginRequest::default() }
}

/// Makes a login attempt and reports its result.
fn try_once(limiter: &LoginLimiter, request: &LoginRequest<'_>, success: bool) -> Result<Option<String>, Refusal> {
    match limiter.login_attempt(request).unwrap() {
        Attempted::Allowed(attempt) => Ok(limiter.login_result(&attempt, success).unwrap().device),
        Attempted::Refused(refusal) => Err(refusal),
    }
}

#[test]
fn a_refusal_has_the_code_message_and_wait_of_the_answer() {
    let (limiter, clock) = limiter_of("[login]\nip = \"4/5min\"\nceiling = 4\nlocks = { 3 = \"1min\" }");
    for _ in 0..3 {
        assert_eq!(try_once(&limiter, &ada(None), false), Ok(None));
    }
    let locked = try_once(&limiter, &ada(None), true).unwrap_err();
    let (cause, minute) = (Cause::Login, Some(Duration::from_secs(60)));
    let expected = Refusal { by: RefusedBy::Lock, cause, layer: Some(Layer::User), retry_after: minute };
    assert_eq!(locked, expected);
    assert_eq!(locked.code(), "account_locked");
    assert_eq!(locked.message(), "Too many failed attempts. Account temporarily locked.");
    clock.advance(Span::MINUTE);
    assert_eq!(try_once(&limiter, &ada(None), false), Ok(None));
    clock.advance(Span::HOUR);
    let ceiling = try_once(&limiter, &ada(None), true).unwrap_err();
    let expected = Refusal { by: RefusedBy::Ceiling, retry_after: None, ..expected };
    assert_eq!((ceiling, ceiling.code()), (expected, "account_locked"));

    let from = LoginRequest { ip: "203.0.113.7".parse().ok(), ..LoginRequest::default() };
    for _ in 0..4 {
        assert_eq!(try_once(&limiter, &from, false), Ok(None));
    }
    let address = try_once(&limiter, &from, true).unwrap_err();
    let retry_after = Some(Duration::from_secs(300));
    assert_eq!(address, Refusal { by: RefusedBy::Address, layer: Some(Layer::Edge), retry_after, ..expected });
    assert_eq!(address.code(), "too_many_requests");
    assert_eq!(address.message(), "Too many authentication attempts. Please try again later.");
}

/// The answer had one field, `allowed`, which was true after a wrong password that locked nothing. A developer wrote
/// `if result.allowed { log_in() }`, and every second guess was in.
#[test]
fn a_wrong_secret_is_no_success_and_says_whether_to_try_again() {
    let (limiter, _) = limiter_of("[login]\nlocks = { 2 = \"1min\" }");
    let end = |success| {
        let attempt = limiter.login_attempt(&ada(None)).unwrap();
        let result = limiter.login_result(attempt.token().unwrap(), success).unwrap();
        (result.success, result.may_retry, result.lockout_remaining, result.device.is_some())
    };
    assert_eq!(end(false), (false, true, None, false));
    assert_eq!(end(true), (true, true, None, true));
    assert_eq!(end(false), (false, true, None, false));
    assert_eq!(end(false), (false, false, Some(Duration::from_secs(60)), false));
}

#[test]
fn a_lock_has_an_end_and_the_ceiling_has_none() {
    let (limiter, clock) = limiter_of("[login]\nceiling = 4\nlocks = { 3 = \"1min\" }");
    let mut results = Vec::new();
    for _ in 0..4 {
        let Attempted::Allowed(attempt) = limiter.login_attempt(&ada(None)).unwrap() else { break };
        let result = limiter.login_result(&attempt, false).unwrap();
        results.push((result.may_retry, result.lockout_remaining));
        clock.advance(result.lockout_remaining.unwrap_or_default().into());
    }
    assert_eq!(results, [(true, None), (true, None), (false, Some(Duration::from_secs(60))), (false, None)]);
}

#[test]
fn a_known_device_gets_in_while_others_are_locked_out_until_a_reset() {
    let (limiter, _) = limiter_of("[login]");
    let device = try_once(&limiter, &ada(None), true).unwrap();
    assert!(device.is_some());
    for _ in 0..3 {
        assert!(try_once(&limiter, &ada(None), false).is_ok());
    }
    assert!(try_once(&limiter, &ada(None), true).is_err());
    assert!(try_once(&limiter, &ada(device.as_deref()), true).is_ok());
    // Lifting the locks lets other devices try again. A reset makes every device unknown.
    limiter.pardon_account(" ADA ").unwrap();
    let device = try_once(&limiter, &ada(None), true).unwrap();
    limiter.reset_account("ada").unwrap();
    for _ in 0..3 {
        assert!(try_once(&limiter, &ada(device.as_deref()), false).is_ok());
    }
    assert!(try_once(&limiter, &ada(device.as_deref()), true).is_err(), "it counts as an unknown device");
}

#[test]
fn each_invalid_login_call_has_its_own_error() {
    let (limiter, clock) = limiter_of("[login]");
    let (other, _) = limiter_of("[login]");
    let (none, _) = limiter_of("");
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
    assert_eq!(
        limiter.login_result(late.token().unwrap(), true),
        Err(LoginError::UnknownAttempt),
        "the attempt has timed out"
    );
    for nobody in ["", " \t"] {
        assert_eq!(limiter.reset_account(nobody), Err(LoginError::NoAccount));
        assert_eq!(limiter.pardon_account(nobody), Err(LoginError::NoAccount));
    }
    assert_eq!(LoginError::NoLogin.to_string(), "the policy has no [login]");
}

#[test]
fn a_thousand_guesses_at_once_reach_the_verifier_three_times() {
    let (limiter, _) = limiter_of("[login]");
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
fn names_and_tokens_are_not_in_debug_output() {
    let (limiter, _) = limiter_of("[login]");
    let request = LoginRequest { ip: "203.0.113.7".parse().ok(), factor: Some("totp"), ..ada(Some("my-device")) };
    let attempted = limiter.login_attempt(&request).unwrap();
    let mut logged = format!("{request:?} {attempted:?}");
    let attempt = attempted.token().unwrap();
    let result = limiter.login_result(attempt, true).unwrap();
    logged += &format!("{result:?}");
    for secret in ["ada", "203.0.113.7", "my-device", attempt, result.device.as_deref().unwrap()] {
        assert!(!logged.contains(secret), "{logged}");
    }
}
