//! Refunds to token buckets, in the store in memory.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::Arc;
use std::time::Duration;

use threshold_limiter::{Facts, Limiter, ManualClock, OnExpire, Policy, Receipt, Span, Timestamp};

const START: Timestamp = Timestamp::from_secs(1_767_225_600);

/// An operation on a limiter.
type Operation = fn(&Small);
type Small = Limiter<threshold_limiter::store::memory::MemoryStore, Arc<ManualClock>>;

fn limiter(memory: &str) -> (Small, Arc<ManualClock>) {
    let text = format!("[memory]\n{memory}\n[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"10/min\"\n");
    let clock = Arc::new(ManualClock::new(START));
    (Limiter::builder(Policy::parse(&text, &|_| None).unwrap()).clock(Arc::clone(&clock)).build(), clock)
}

fn user(name: &str, cost: u64) -> Facts<'_> {
    Facts { user: Some(name), cost: Some(cost), ..Facts::default() }
}

fn charged(limiter: &Small, name: &str, cost: u64) -> Receipt {
    limiter.check_with_receipt(&user(name, cost)).unwrap().1.unwrap()
}

fn left(limiter: &Small, name: &str) -> u64 {
    limiter.peek(&user(name, 0)).unwrap().readings.first().unwrap().remaining
}

/// A bucket takes more memory while it has to remember its refunds, which is until the charges before them have refilled. A
/// refund of the latest charge does not have to be remembered.
///
/// Seen to fail after: `charged < gross` as `true` in `RefundedBucket::give_back`; and leaving out the change to `Bucket::Plain` in
/// `bring_refunded`.
#[test]
fn refunds_take_memory_only_while_they_matter() {
    let (limiter, clock) = limiter("max_keys = 1000");
    let names: Vec<String> = (0..100).map(|number| format!("u{number}")).collect();
    let bytes = || limiter.store().usage().bytes;
    let receipts: Vec<_> = names.iter().map(|name| (charged(&limiter, name, 4), charged(&limiter, name, 4))).collect();
    let before = bytes();
    for (first, second) in receipts.iter().take(50) {
        assert!(limiter.refund(second).unwrap() && limiter.refund(first).unwrap());
    }
    assert_eq!(bytes(), before, "each refund was of the latest charge");
    for (first, _) in receipts.iter().skip(50) {
        assert!(limiter.refund(first).unwrap());
    }
    let kept = bytes();
    assert!(kept > before);
    clock.advance(Span::from_secs(48));
    for name in &names {
        assert!(limiter.check(&user(name, 1)).unwrap().allowed());
    }
    assert!(bytes() < kept, "every bucket fits into its slot again");
}

/// A bucket remembers its refunds while other receipts could give the same capacity back once more. Until then the store counts
/// the refunded part as used, so that the bucket is not evicted.
///
/// Seen to fail after: `self.level` in place of the level at its peak in `RefundedBucket::at_peak`.
#[test]
fn a_bucket_with_refunds_is_not_evicted() {
    let (limiter, _) = limiter("max_keys = 1000\nwhen_full = \"deny\"");
    let receipts: Vec<(String, Receipt)> = (0..20)
        .map(|number| {
            let name = format!("u{number}");
            let first = charged(&limiter, &name, 5);
            let _ = charged(&limiter, &name, 5);
            (name, first)
        })
        .collect();
    for (name, first) in &receipts {
        assert!(limiter.refund(first).unwrap());
        assert_eq!(left(&limiter, name), 5);
    }
    // All other buckets are more than half used.
    for number in 0..5_000 {
        let _ = limiter.check(&user(&format!("flood {number}"), 6)).unwrap();
    }
    assert!(limiter.store().usage().counts.folded > 0, "the store was full");
    assert!(receipts.iter().all(|(name, _)| left(&limiter, name) == 5));
}

/// A reservation that expires with `OnExpire::Release` is released as of its expiry, whatever operation looks at the store next.
///
/// Seen to fail after: leaving out `expire_reservations` in `each_balance`; and `self.expires` as `now` in `Reservation::expire`.
#[test]
fn every_operation_sees_expired_reservations_as_released() {
    let operations: [(&str, Operation); 5] = [
        ("nothing", |_| ()),
        ("a request of another user", |limiter| drop(limiter.check(&user("other", 1)).unwrap())),
        ("a pause", |limiter| {
            limiter.pause(threshold_limiter::Layer::User, "other", Duration::from_secs(1)).unwrap();
        }),
        ("the file of counters", |limiter| {
            let at = Timestamp::from(limiter.now());
            let mut seen = Vec::new();
            limiter.store().each_balance(at, |_, limit, balance| seen.push(balance.used_share(limit, at)));
            // The share of the peak, since the bucket has a refund: 60 s less the 12 that have passed.
            assert_eq!(seen, [800_000]);
        }),
        ("a refund", |limiter| {
            let receipt = charged(limiter, "other", 1);
            assert!(limiter.refund(&receipt).unwrap());
        }),
    ];
    for (what, operate) in operations {
        let (limiter, clock) = limiter("max_keys = 1000");
        let ten = Duration::from_secs(10);
        assert!(limiter.reserve(&user("u1", 5), ten, OnExpire::Release).unwrap().reservation.is_some());
        let _ = charged(&limiter, "u1", 5);
        clock.advance(Span::from_secs(12));
        operate(&limiter);
        clock.advance(Span::from_secs(16));
        assert_eq!(left(&limiter, "u1"), 8, "{what}");
    }
}

/// A user recorded finished jobs under a concurrency limit, and each took a place for the five minutes of its `ttl`: no page said so.
/// docs/policy.md says it now, and how the place is given back.
#[test]
fn a_recorded_request_holds_its_place_until_its_receipt_is_refunded_or_its_time_is_up() {
    let text = "[[rule]]\nname = 'jobs'\nper = ['user']\nlimit = '2'\nalgorithm = 'concurrency'\nttl = '5min'\n";
    let clock = Arc::new(ManualClock::new(START));
    let limiter = Limiter::builder(Policy::parse(text, &|_| None).unwrap()).clock(Arc::clone(&clock)).build();
    let record = || limiter.record(&user("ada", 1)).unwrap().1.unwrap();
    let (first, _second) = (record(), record());
    assert!(!limiter.check(&user("ada", 1)).unwrap().allowed());
    limiter.refund(&first).unwrap();
    assert_eq!(left(&limiter, "ada"), 1);
    clock.advance(Span::from_secs(300));
    assert_eq!(left(&limiter, "ada"), 2);
}
