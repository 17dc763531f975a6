//! The laws every algorithm keeps, as property tests over one generator of limits and one of traces.
//!
//! Each law says what it states and which change to the code it was seen to fail on. They run over `Algorithm::ALL`; what an
//! algorithm is, is said by its `Definition`.

#![expect(
    clippy::arithmetic_side_effects,
    reason = "a test that overflows should fail loudly, on the line where it does"
)]

mod bound;
mod bytes;
mod clock;
mod every_algorithm;
mod extremes;
mod refunds;
mod room;
mod world;

use proptest::prelude::ProptestConfig;

/// So many cases, or more in a long run.
fn cases(cases: u32) -> ProptestConfig {
    let factor = option_env!("THRESHOLD_LAW_FACTOR").and_then(|factor| factor.parse().ok()).unwrap_or(1);
    ProptestConfig::with_cases(cases.saturating_mul(factor))
}
