//! Tests of the metrics: what they count, and that no caller can add a series.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use threshold_core::control::ControlChange;
use threshold_core::decision::Degraded;
use threshold_core::policy::{Ban, ListEntry, Owner, Setting};
use threshold_core::{Decision, Facts, Span, Timestamp};

use super::*;
use crate::ManualClock;
use crate::store::StoreError;

const POLICY: &str = "[[rule]]\nname = 'posts'\nper = ['user']\nlimit = '2/h'\nalgorithm = 'fixed-window'";

fn policy(text: &str) -> Policy {
    Policy::parse(text, &|_| None).unwrap()
}

#[track_caller]
fn has(metrics: &Metrics, lines: &[&str]) {
    let text = metrics.text();
    for line in lines {
        assert!(text.lines().any(|own| own == *line), "{line} is missing:\n{text}");
    }
}

fn operation(operation: Operation, result: OperationResult, elapsed: Duration) -> ObservedOperation {
    ObservedOperation { operation, at: Timestamp::EPOCH, subject: None, result, degraded: None, elapsed }
}

/// Fails if `watch` does not create the series of its policy, or a list of labels is incomplete.
#[test]
fn every_reason_and_every_operation_has_a_series_from_the_start() {
    let metrics = Metrics::new();
    let text = metrics.text();
    for reason in ["store_timeout", "store_error", "store_full", "too_many_rules", "journal", "shared_budget"] {
        let line = format!("threshold_degraded_total{{reason=\"{reason}\"}} 0");
        assert!(text.lines().any(|own| own == line), "{line}\n{text}");
    }
    for operation in Operation::ALL {
        for result in shards::RESULTS {
            let line = format!(r#"threshold_operations_total{{operation="{}",result="{result}"}} 0"#, operation.name());
            assert!(text.lines().any(|own| own == line), "{line}\n{text}");
        }
    }
    has(&metrics, &[r#"threshold_tokens_refused_total{reason="expired"} 0"#, "threshold_store_errors_total 0"]);
    let limiter = Arc::new(crate::Limiter::new(policy(POLICY)));
    metrics.watch(&limiter);
    has(
        &metrics,
        &[
            r#"threshold_decisions_total{layer="user",rule="posts",verdict="ban"} 0"#,
            r#"threshold_decisions_total{layer="none",rule="",verdict="allow"} 0"#,
            r#"threshold_blocks_total{layer="user"} 0"#,
            r#"threshold_expired_total{kind="ban"} 0"#,
            "threshold_keys 0",
        ],
    );
}

/// Woken by counting peeks as decisions, or blocks without their layer.
#[test]
fn a_peek_is_an_operation_and_neither_a_decision_nor_a_block() {
    let metrics = Metrics::new();
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
    let builder = crate::Limiter::builder(policy(POLICY)).clock(Arc::clone(&clock)).observer(metrics.observer());
    let limiter = Arc::new(builder.build());
    metrics.watch(&limiter);
    let facts = Facts { user: Some("u1"), ..Facts::default() };
    for _ in 0..3 {
        let _ = limiter.check(&facts).unwrap();
    }
    for _ in 0..4 {
        assert!(!limiter.peek(&facts).unwrap().allowed());
    }
    has(
        &metrics,
        &[
            r#"threshold_decisions_total{layer="user",rule="posts",verdict="allow"} 2"#,
            r#"threshold_decisions_total{layer="user",rule="posts",verdict="deny"} 1"#,
            r#"threshold_blocks_total{layer="user"} 1"#,
            r#"threshold_operations_total{operation="check",result="done"} 2"#,
            r#"threshold_operations_total{operation="check",result="denied"} 1"#,
            r#"threshold_operations_total{operation="peek",result="denied"} 4"#,
            "threshold_decision_seconds_count 3",
            "threshold_keys 1",
        ],
    );
    drop(limiter);
    assert!(!metrics.text().contains("threshold_keys "), "metrics keep no limiter alive");
}

/// Woken by the layer of the binding rule alone, which a penalty has not.
#[test]
fn a_block_counts_for_the_layer_of_a_ladder_and_for_none_of_an_operator() {
    let ladder = "ladder = 'l'\nstrike = 'request'\n[ladders.l]\nrungs = ['ban 1h']\n[lists]\ndeny = ['user:eve']";
    let metrics = Metrics::new();
    let policy = policy(&format!("{POLICY}\n{ladder}"));
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
    let limiter = crate::Limiter::builder(policy).clock(clock).observer(metrics.observer()).build();
    let deny = |user: &str, times: usize| {
        let facts = Facts { user: Some(user), ..Facts::default() };
        (0..times).for_each(|_| assert!(!limiter.check(&facts).unwrap().allowed()));
    };
    for _ in 0..2 {
        assert!(limiter.check(&Facts { user: Some("u1"), ..Facts::default() }).unwrap().allowed());
    }
    // One strike, and two denials by its ban.
    deny("u1", 3);
    deny("eve", 4);
    limiter.pause(crate::Layer::User, "u2", Duration::from_secs(60)).unwrap();
    deny("u2", 1);
    has(&metrics, &[r#"threshold_blocks_total{layer="user"} 3"#, r#"threshold_blocks_total{layer="none"} 5"#]);
}

/// Fails if an operation's time or failure is not counted, or if a slow journal counts as a failure of the store.
#[test]
fn times_and_errors_of_decisions_and_operations_are_counted() {
    let metrics = Metrics::new();
    let (policy, facts) = (policy(POLICY), Facts::default());
    let mut decision = Decision::default();
    let observer = metrics.observer();
    for degraded in [None, Some(Degraded::Timeout), Some(Degraded::Journal)] {
        decision.degraded = degraded;
        let observed = ObservedDecision::new(&facts, &decision, &policy);
        observer.decided(&ObservedDecision {
            elapsed: Duration::from_micros(3),
            in_store: Duration::from_micros(2),
            ..observed
        });
    }
    observer.performed(&operation(Operation::Refund, OperationResult::Done, Duration::from_millis(5)));
    let failed = OperationResult::Failed(StoreError::Timeout);
    observer.performed(&operation(Operation::Refund, failed, Duration::from_secs(20)));
    // A login that was decided without the store.
    let login = operation(Operation::LoginAttempt, OperationResult::Done, Duration::from_secs(20));
    observer.performed(&ObservedOperation { degraded: Some(Degraded::StoreError), ..login });
    has(
        &metrics,
        &[
            r#"threshold_degraded_total{reason="store_timeout"} 1"#,
            r#"threshold_degraded_total{reason="journal"} 1"#,
            r#"threshold_degraded_total{reason="store_error"} 1"#,
            "threshold_store_errors_total 3",
            r#"threshold_operations_total{operation="refund",result="failed"} 1"#,
            "threshold_decision_seconds_count 3",
            r#"threshold_decision_seconds_bucket{le="0.000002048"} 0"#,
            r#"threshold_decision_seconds_bucket{le="0.000004096"} 3"#,
            r#"threshold_decision_seconds_bucket{le="+Inf"} 3"#,
            "threshold_store_seconds_count 6",
            r#"threshold_store_seconds_bucket{le="0.000002048"} 3"#,
            r#"threshold_store_seconds_bucket{le="17.179869184"} 4"#,
            r#"threshold_store_seconds_bucket{le="+Inf"} 6"#,
            "threshold_store_seconds_sum 40.005006",
        ],
    );
}

/// Fails without `count_observed`, if that counts peeks or records, and if a rule that is enforced after a reload keeps its series.
#[test]
fn what_observing_rules_would_deny_is_counted() {
    let observing = format!("{}\nmode = 'observe'", POLICY);
    let enforced = "[[rule]]\nname = 'all'\nper = ['user']\nlimit = '4/h'\nalgorithm = 'fixed-window'";
    let metrics = Metrics::new();
    let tried = policy(&format!("[lists]\ndeny = ['user:mallory']\n{observing}\n{enforced}"));
    let limiter = Arc::new(crate::Limiter::builder(tried).observer(metrics.observer()).build());
    metrics.watch(&limiter);
    has(&metrics, &[r#"threshold_observed_total{layer="user",rule="posts"} 0"#]);
    let facts = Facts { user: Some("u1"), ..Facts::default() };
    // Two fit, two are over the limit that is tried, and one is denied by the other rule as well.
    let allowed = std::array::from_fn(|_| limiter.check(&facts).unwrap().allowed());
    assert_eq!(allowed, [true, true, true, true, false]);
    assert!(!limiter.peek(&facts).unwrap().readings.iter().any(|reading| reading.allowed));
    let _ = limiter.record(&facts).unwrap();
    for _ in 0..4 {
        assert!(!limiter.check(&Facts { user: Some("mallory"), ..Facts::default() }).unwrap().allowed());
    }
    has(&metrics, &[r#"threshold_observed_total{layer="user",rule="posts"} 3"#]);
    let series = || metrics.text().lines().filter(|line| line.starts_with("threshold_observed_total{")).count();
    assert_eq!(series(), 1, "no rule that is enforced has one");
    limiter.reload(policy(POLICY));
    let _ = limiter.check(&facts).unwrap();
    assert_eq!(series(), 0);
}

/// Fails without the `retain` in `series_of`, or if an older policy adds its series again.
#[test]
fn there_are_only_series_of_the_policy_in_force_however_often_it_is_reloaded() {
    let metrics = Metrics::new();
    let series = || metrics.text().lines().filter(|line| line.starts_with("threshold_decisions_total{")).count();
    for generation in 1..=100 {
        let text = format!(
            "[[rule]]\nname = 'stays'\nper = ['user']\nlimit = '1/h'\n\
             [[rule]]\nname = 'rule {generation}'\nper = ['user']\nlimit = '1/h'"
        );
        let policy = policy(&text).with_generation(generation);
        metrics.observer().decided(&ObservedDecision::new(&Facts::default(), &Decision::default(), &policy));
        // Two rules, and the decisions without a binding rule.
        assert_eq!(series(), 3 * VERDICTS.len(), "after {generation} policies");
    }
    // A request that was decided before the last reload is counted after it.
    let before = policy("[[rule]]\nname = 'rule 99'\nper = ['user']\nlimit = '1/h'").with_generation(99);
    metrics.observer().decided(&ObservedDecision::new(&Facts::default(), &Decision::default(), &before));
    let text = metrics.text();
    assert!(text.contains(r#"rule="rule 100""#) && !text.contains(r#"rule="rule 99""#));
    let allowed = text.lines().find(|line| line.contains(r#"layer="none""#) && line.contains("allow"));
    assert!(allowed.is_some_and(|line| line.ends_with(" 101")), "a series that stays keeps its count: {allowed:?}");
}

/// Fails if a counter is read and then written, or if a decision that took no time in the store is counted there.
#[test]
fn threads_count_exactly() {
    let metrics = Metrics::new();
    let policy = policy(POLICY);
    std::thread::scope(|scope| {
        for _ in 0..10 {
            let (observer, policy) = (metrics.observer(), &policy);
            scope.spawn(move || {
                for _ in 0..1_000 {
                    observer.decided(&ObservedDecision::new(&Facts::default(), &Decision::default(), policy));
                }
            });
        }
    });
    has(
        &metrics,
        &[
            r#"threshold_decisions_total{layer="none",rule="",verdict="allow"} 10000"#,
            r#"threshold_operations_total{operation="check",result="done"} 10000"#,
            "threshold_decision_seconds_count 10000",
            "threshold_store_seconds_count 0",
        ],
    );
}

/// Fails if warnings or bans of other subjects than users are counted as bans of users.
#[test]
fn strikes_that_warn_and_strikes_that_ban_users_are_counted() {
    let metrics = Metrics::new();
    let ladder = "[ladders.l]\nrungs = ['warn', 'ban 1h']\n";
    let rule = |name: &str| {
        format!(
            "[[rule]]\nname = '{name}s'\nper = ['{name}']\nlimit = '1/h'\nladder = 'l'\nstrike = 'request'\nban_shared = true\non_missing = 'skip'\n"
        )
    };
    let policy = policy(&format!("{ladder}{}{}", rule("user"), rule("tenant")));
    let limiter = crate::Limiter::builder(policy).observer(metrics.observer()).build();
    for facts in [Facts { user: Some("u1"), ..Facts::default() }, Facts { tenant: Some("t1"), ..Facts::default() }] {
        // One fits, one is a warning, one brings the ban, and one meets it.
        let allowed = std::array::from_fn(|_| limiter.check(&facts).unwrap().allowed());
        assert_eq!(allowed, [true, true, false, false]);
    }
    has(&metrics, &["threshold_warnings_total 2", "threshold_user_bans_total 1"]);
}

/// Fails if a token is counted under another reason, or one of the counters is not raised.
#[test]
fn what_client_doors_refuse_is_counted() {
    let (metrics, policy) = (Metrics::new(), policy(POLICY));
    let observer = metrics.observer();
    for reason in TokenError::ALL {
        observer.token_refused(TokenRefused { reason, at: Timestamp::EPOCH }, &policy);
    }
    observer.token_refused(TokenRefused { reason: TokenError::Expired, at: Timestamp::EPOCH }, &policy);
    observer.return_lost();
    let trace = threshold_core::TraceId::default();
    for _ in 0..3 {
        observer.refused(Refused { at: Timestamp::EPOCH, ip: None, status: 400, reason: "r", trace }, &policy);
    }
    has(
        &metrics,
        &[
            r#"threshold_tokens_refused_total{reason="expired"} 2"#,
            r#"threshold_tokens_refused_total{reason="audience"} 1"#,
            "threshold_returns_lost_total 1",
            "threshold_refused_total 3",
        ],
    );
}

/// Fails if one of the three kinds is not counted, or is counted as another.
#[test]
fn what_ends_by_time_is_counted() {
    let metrics = Metrics::new();
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
    let limiter = Arc::new(crate::Limiter::builder(policy(POLICY)).clock(Arc::clone(&clock)).build());
    metrics.watch(&limiter);
    let facts = Facts { user: Some("u1"), ..Facts::default() };
    for _ in 0..2 {
        let reserved = limiter.reserve(&facts, Duration::from_secs(60), crate::OnExpire::Release).unwrap();
        assert!(reserved.reservation.is_some());
    }
    let (from, until) = (limiter.time(), limiter.time().plus(Span::MINUTE));
    for (number, user) in ["ban 1", "ban 2", "ban 3", "stays"].into_iter().enumerate() {
        let whom = ListEntry::User(user.into());
        let until = if number < 3 { until } else { Timestamp::MAX };
        let ban = Ban { whom: whom.clone(), reason: "r".into(), by: "ops".into(), from, until };
        now(limiter.change_control(ControlChange::Ban { id: whom.ban_id(limiter.key()), ban: Some(Arc::new(ban)) }));
    }
    let (limits, by, reason) = (BTreeMap::new(), "ops".into(), "".into());
    let setting = Some(Arc::new(Setting { tier: None, limits, times: 2, until, from, by, reason }));
    now(limiter.change_control(ControlChange::Setting { owner: Owner::User, name: "u2".into(), setting }));
    let kinds = |counts: [u64; 3]| {
        let kinds = ["reservation", "ban", "setting"].into_iter().zip(counts);
        let lines = kinds.map(|(kind, count)| format!(r#"threshold_expired_total{{kind="{kind}"}} {count}"#));
        has(&metrics, &lines.collect::<Vec<_>>().iter().map(String::as_str).collect::<Vec<_>>());
    };
    kinds([0, 0, 0]);
    clock.advance(Span::HOUR);
    let _ = limiter.check(&facts).unwrap();
    limiter.bans().sweep(limiter.time());
    limiter.end_settings(limiter.now());
    kinds([2, 3, 1]);
}

/// Returns the result of a change on a store in memory, which is ready at once.
fn now<T, E: fmt::Debug>(change: impl Future<Output = Result<T, E>>) -> T {
    let polled = std::pin::pin!(change).poll(&mut Context::from_waker(Waker::noop()));
    let ready = if let Poll::Ready(result) = polled { Some(result) } else { None };
    ready.unwrap().unwrap()
}
