//! Pauses: what a provider asked to be left alone is denied until then, whatever it is counted by.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::Arc;
use std::time::Duration;

use threshold_core::{Span, Timestamp};
use threshold_limiter::store::StoreError;
use threshold_limiter::{Facts, KeyLimiter, Layer, Limit, Limiter, ManualClock, PauseError, Policy};

const START: Timestamp = Timestamp::from_secs(1_767_225_600);
const MINUTE: Duration = Duration::from_secs(60);

fn limiter(
    policy: &str,
) -> (Limiter<threshold_limiter::store::memory::MemoryStore, Arc<ManualClock>>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(START));
    (Limiter::builder(Policy::parse(policy, &|_| None).unwrap()).clock(Arc::clone(&clock)).build(), clock)
}

/// A client for a provider counted its calls by host. `pause` answered `Ok(false)`, `?` threw that away, and the calls went on
/// against the provider's `Retry-After`.
#[test]
fn what_a_rule_counts_by_alone_is_paused_by_rule_and_key() {
    let rules = "[[rule]]\nname = 'provider'\nper = ['host']\nlimit = '100/s'\nmatch = { path = '/v1/**' }\n\
                 [[rule]]\nname = 'account'\nper = ['tenant', 'host']\non_missing = 'skip'\nlimit = '100/s'\n";
    let (limiter, clock) = limiter(rules);
    let call = |tenant, host| Facts { host: Some(host), tenant, path: Some("/v1/chat"), ..Facts::default() };
    let ready = |tenant, host| limiter.peek(&call(tenant, host)).unwrap().retry_after_secs();
    // Without the path, which the rule only matches.
    limiter.pause_rule("provider", &Facts { host: Some("a.example"), ..Facts::default() }, MINUTE).unwrap();
    assert_eq!((ready(None, "a.example"), ready(None, "b.example")), (Some(60), None));
    // A key of two parts.
    limiter.pause_rule("account", &call(Some("acme"), "b.example"), MINUTE).unwrap();
    assert_eq!((ready(Some("acme"), "b.example"), ready(Some("other"), "b.example")), (Some(60), None));
    clock.advance(Span::from_secs(60));
    assert_eq!((ready(None, "a.example"), ready(Some("acme"), "b.example")), (None, None));
}

/// Nothing was paused, and the answer said so in a way that a caller with `?` did not see.
#[test]
fn a_pause_of_nothing_is_an_error() {
    let (limiter, _) = limiter("[[rule]]\nname = 'provider'\nper = ['host']\nlimit = '100/s'\n");
    let host = Facts { host: Some("a.example"), ..Facts::default() };
    assert_eq!(limiter.pause(Layer::User, "ada", MINUTE), Err(PauseError::NoSubject));
    assert_eq!(limiter.pause_rule("providers", &host, MINUTE), Err(PauseError::NoRule));
    assert_eq!(limiter.pause_rule("provider", &Facts::default(), MINUTE), Err(PauseError::NoKey));
}

/// A pause of a host for a year could not be ended: a subject has a layer, and a host has none.
#[test]
fn a_pause_of_a_rule_is_ended_by_the_rule() {
    let rules = "[[rule]]\nname = 'provider'\nper = ['tenant', 'host']\nlimit = '1/day'\n";
    let (limiter, _) = limiter(rules);
    let call = |host| Facts { host: Some(host), tenant: Some("acme"), ..Facts::default() };
    for host in ["a.example", "b.example"] {
        limiter.pause_rule("provider", &call(host), 60 * MINUTE).unwrap();
    }
    assert_eq!(limiter.forgive_rule("providers", &call("a.example")), Err(PauseError::NoRule));
    assert_eq!(limiter.forgive_rule("provider", &Facts::default()), Err(PauseError::NoKey));
    limiter.forgive_rule("provider", &call("a.example")).unwrap();
    assert!(limiter.check(&call("a.example")).unwrap().allowed());
    assert!(!limiter.check(&call("b.example")).unwrap().allowed());
    // What was used is cleared too.
    assert!(!limiter.check(&call("a.example")).unwrap().allowed());
    limiter.forgive_rule("provider", &call("a.example")).unwrap();
    assert!(limiter.check(&call("a.example")).unwrap().allowed());
}

/// A limiter of one limit had no pause at all.
///
/// Woken by: a pause that another of the same key shortens.
#[test]
fn a_key_limiter_pauses_a_key_under_every_algorithm() {
    for limit in ["2/min", "2/h"] {
        let clock = Arc::new(ManualClock::new(START));
        let limiter = KeyLimiter::builder(limit.parse::<Limit>().unwrap()).clock(Arc::clone(&clock)).build();
        limiter.pause("a.example", MINUTE).unwrap();
        limiter.pause("a.example", MINUTE / 2).unwrap();
        let denied = limiter.check("a.example");
        assert_eq!((denied.allowed, denied.remaining, denied.retry_after()), (false, 0, Some(MINUTE)), "{limit}");
        let many = limiter.check_many(&["a.example", "b.example"]);
        assert_eq!(many.iter().map(|decision| decision.allowed).collect::<Vec<_>>(), [false, true], "{limit}");
        clock.advance(Span::from_secs(60));
        assert!(limiter.check_cost("a.example", 2).allowed, "{limit}: nothing was charged meanwhile");
    }
}

/// The pauses of a client that calls ever new hosts have a bound.
#[test]
fn a_key_limiter_pauses_no_more_than_10_000_keys_at_once() {
    let clock = Arc::new(ManualClock::new(START));
    let limiter = KeyLimiter::builder(Limit::per_second(1)).clock(Arc::clone(&clock)).build();
    for key in 0..10_000 {
        limiter.pause(&key, MINUTE).unwrap();
    }
    assert_eq!(limiter.pause(&10_000, MINUTE), Err(StoreError::Full));
    limiter.pause(&0, 2 * MINUTE).unwrap();
    clock.advance(Span::from_secs(60));
    limiter.pause(&10_000, MINUTE).unwrap();
    assert_eq!([0, 1, 10_000].map(|key| limiter.check(&key).allowed), [false, true, false]);
}
