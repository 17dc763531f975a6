//! One limit by keys of one's own: many keys at once are decided as each alone would be.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use threshold_limiter::{Algorithm, KeyLimiter, Limit, Look, ManualClock, Span, Timestamp};

const ALGORITHMS: [Algorithm; 6] = [
    Algorithm::TokenBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
    Algorithm::SlidingEstimate,
    Algorithm::SlidingLog,
    Algorithm::Concurrency,
];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    /// Whatever keys come together, however often each, and whatever the buffer held before: the answers are those of
    /// one check after the other, in the same order.
    ///
    /// Woken by: leaving out `looks.clear()`; `chunks_exact` for `chunks`; and a batch decided from its end.
    #[test]
    fn many_keys_are_decided_as_each_alone_would_be(
        algorithm in prop::sample::select(&ALGORITHMS[..]),
        batches in vec((vec(0..12u8, 0..70), 0..3u64, 0..40u64), 1..5),
    ) {
        let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
        let text = if algorithm == Algorithm::Concurrency { "3" } else { "3/min" };
        let limit = Limit::parse(text, Some(algorithm)).unwrap();
        let limiter = || KeyLimiter::with_clock(limit, 1_000, Arc::clone(&clock));
        let (alone, together) = (limiter(), limiter());
        let mut looks = Vec::new();
        for (keys, cost, seconds) in batches {
            let names: Vec<String> = keys.iter().map(|key| format!("k{key}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let expect: Vec<Look> = names.iter().map(|name| alone.check(name, cost)).collect();
            together.check_many_into(&names, cost, &mut looks);
            prop_assert_eq!(&looks, &expect);
            clock.advance(Span::from_secs(seconds));
        }
        prop_assert_eq!(together.store().usage().keys, alone.store().usage().keys);
    }
}
