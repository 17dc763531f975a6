//! A request is charged and reserved, or neither.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use threshold_limiter::{
    Degraded, Facts, Limiter, ManualClock, ObservedDecision, Observer, OnExpire, Policy, Reserved, Span, Timestamp,
    Verdict,
};

/// The store has room for 1,024 reservations, and for every key.
const POLICY: &str = r#"
    [memory]
    max_keys = 8000
    [[rule]]
    name = "in all"
    layer = "global"
    per = []
    limit = "5000/h"
    algorithm = "fixed-window"
    [[rule]]
    name = "at once"
    layer = "global"
    per = []
    limit = "5000"
    algorithm = "concurrency"
    ttl = "1h"
    [[rule]]
    name = "own"
    per = ["user"]
    limit = "2/h"
    on_store_error = "open"
"#;

/// An observer that collects verdicts.
#[derive(Default)]
struct Verdicts(Mutex<Vec<Verdict>>);

impl Observer for Verdicts {
    fn decided(&self, ObservedDecision { decision, .. }: &ObservedDecision<'_>) {
        self.0.lock().unwrap().push(decision.verdict);
    }
}

fn user(name: &str) -> Facts<'_> {
    Facts { user: Some(name), ..Facts::default() }
}

/// Without room for another reservation, the request is denied in every mode of `on_store_error`, all its charges are given
/// back, and observers hear only of the denial. There is room again as soon as a reservation has expired.
///
/// Seen to fail after: leaving out the `give_back` in `Limiter::reserve` and that in `withdraw_async`; telling observers before
/// `finish` in `Limiter::decide`.
#[test]
fn without_room_for_a_reservation_nothing_is_charged() {
    let verdicts = Arc::new(Verdicts::default());
    let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
    let limiter = Limiter::builder(Policy::parse(POLICY, &|_| None).unwrap())
        .clock(Arc::clone(&clock))
        .observer(Arc::clone(&verdicts) as Arc<dyn Observer>)
        .build();
    let left = || {
        let decision = limiter.peek(&Facts { cost: Some(0), ..user("last") }).unwrap();
        decision.readings.iter().map(|reading| reading.remaining).collect::<Vec<_>>()
    };
    let called = || limiter.reserve(&user("last"), Duration::from_secs(60), OnExpire::Release).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let awaited =
        || runtime.block_on(limiter.reserve_async(&user("last"), Duration::from_secs(60), OnExpire::Release)).unwrap();
    for index in 0..1_024 {
        let name = format!("u{index}");
        assert!(
            limiter.reserve(&user(&name), Duration::from_secs(60), OnExpire::Release).unwrap().reservation.is_some()
        );
    }
    let before = left();
    assert_eq!(before, [5_000 - 1_024, 5_000 - 1_024, 2]);
    for reserve in [&called as &dyn Fn() -> Reserved, &awaited] {
        verdicts.0.lock().unwrap().clear();
        let Reserved { decision, reservation } = reserve();
        assert_eq!((decision.verdict, decision.degraded), (Verdict::Deny, Some(Degraded::StoreFull)));
        assert!(reservation.is_none());
        assert_eq!(*verdicts.0.lock().unwrap(), [Verdict::Deny]);
        assert_eq!(left(), before);
    }
    clock.advance(Span::MINUTE);
    for reserve in [&called as &dyn Fn() -> Reserved, &awaited] {
        let Reserved { decision, reservation } = reserve();
        assert!(decision.allowed() && reservation.is_some());
    }
    assert_eq!(left(), [4_998, 4_998, 0]);
}
