//! Token buckets that were given back to, in the store in memory.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::Arc;
use std::time::Duration;

use threshold_limiter::{Facts, Limiter, ManualClock, OnExpire, Policy, Receipt, Span, Timestamp};

const START: Timestamp = Timestamp::from_secs(1_767_225_600);

/// Something that somebody does to a limiter.
type Look = fn(&Small);
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

/// A bucket is larger while it remembers what it gave back: until what was charged before has refilled. Giving back the
/// latest charge needs no such memory.
///
/// Woken by: `charged < gross` as `true` in `RefundedState::give_back`; and leaving out the change to `State::Rate` in
/// `bring_refunded`.
#[test]
fn what_was_given_back_takes_memory_only_while_it_matters() {
    let (limiter, clock) = limiter("max_keys = 1000");
    let names: Vec<String> = (0..100).map(|number| format!("u{number}")).collect();
    let bytes = || limiter.store().usage().bytes;
    let receipts: Vec<_> = names.iter().map(|name| (charged(&limiter, name, 4), charged(&limiter, name, 4))).collect();
    let before = bytes();
    for (first, second) in receipts.iter().take(50) {
        assert!(limiter.refund(second).unwrap() && limiter.refund(first).unwrap());
    }
    assert_eq!(bytes(), before, "the latest charge was given back each time");
    for (first, _) in receipts.iter().skip(50) {
        assert!(limiter.refund(first).unwrap());
    }
    let kept = bytes();
    assert!(kept > before);
    clock.advance(Span::from_secs(48));
    for name in &names {
        assert!(limiter.check(&user(name, 1)).unwrap().allowed());
    }
    assert!(bytes() < kept, "every bucket fits its slot again");
}

/// While other receipts could give back once more what a bucket has given back, that counts as used for the store: the
/// bucket is not what goes to make room.
///
/// Woken by: `self.bucket` in place of the state at its peak in `RefundedState::at_peak`.
#[test]
fn a_bucket_that_was_given_back_to_is_not_forgotten_for_it() {
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
    // Everybody else is more than half used.
    for number in 0..5_000 {
        let _ = limiter.check(&user(&format!("flood {number}"), 6)).unwrap();
    }
    assert!(limiter.store().usage().counts.folded > 0, "the store was full");
    assert!(receipts.iter().all(|(name, _)| left(&limiter, name) == 5));
}

/// A reservation that expires released has been released for whoever looks, whatever they look with, and as of its expiry.
///
/// Woken by: leaving out `expire_reservations` in `each_balance`; and `self.expires` as `now` in `Reservation::expire`.
#[test]
fn nobody_sees_a_release_that_is_overdue() {
    let looks: [(&str, Look); 5] = [
        ("nothing", |_| ()),
        ("a request of somebody else", |limiter| drop(limiter.check(&user("somebody", 1)).unwrap())),
        ("a pause", |limiter| {
            assert!(limiter.pause(threshold_limiter::Layer::User, "somebody", Duration::from_secs(1)).unwrap());
        }),
        ("the file of counters", |limiter| {
            let at = limiter.now();
            let mut seen = Vec::new();
            limiter.store().each_balance(at, |_, limit, balance| seen.push(balance.used_share(limit, at)));
            // Of the peak, since the bucket was given back to: 60 s less the 12 that have passed.
            assert_eq!(seen, [800_000]);
        }),
        ("a refund", |limiter| {
            let receipt = charged(limiter, "somebody", 1);
            assert!(limiter.refund(&receipt).unwrap());
        }),
    ];
    for (what, look) in looks {
        let (limiter, clock) = limiter("max_keys = 1000");
        let ten = Duration::from_secs(10);
        assert!(limiter.reserve(&user("u1", 5), ten, OnExpire::Release).unwrap().reservation.is_some());
        let _ = charged(&limiter, "u1", 5);
        clock.advance(Span::from_secs(12));
        look(&limiter);
        clock.advance(Span::from_secs(16));
        assert_eq!(left(&limiter, "u1"), 8, "{what}");
    }
}
