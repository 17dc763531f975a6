//! The laws of everything above the single limit, as property tests over one generator of policies and one of traces.
//!
//! Each law says what it states and which change to the code it was seen to fail on.

#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that overflows, misses or unwraps nothing should fail loudly, on the line where it does"
)]

mod answers;
mod bills;
mod control;
mod keys;
mod ladder;
mod login;
mod login_model;
mod partitions;
mod receipts;
mod settling;
mod split;
mod world;

use proptest::test_runner::Config;

/// So many cases, or more in a long run.
fn cases(cases: u32) -> Config {
    let factor = option_env!("THRESHOLD_LAW_FACTOR").and_then(|factor| factor.parse().ok()).unwrap_or(1);
    let cases = cases.saturating_mul(factor);
    Config { cases, max_global_rejects: cases.saturating_add(1_024), ..Config::default() }
}
