//! Property tests for everything above a single limit, on random policies and random sequences of requests.
//!
//! Each test states a law. "Seen to fail after" lists the changes to the code that were made once to see it fail.

#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that overflows or unwraps nothing should fail on the line where it does"
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
mod shards;
mod split;
mod world;

use proptest::test_runner::Config;

/// Returns a configuration with this many cases, or a multiple of it in a long run.
fn cases(cases: u32) -> Config {
    let factor = option_env!("THRESHOLD_LAW_FACTOR").and_then(|factor| factor.parse().ok()).unwrap_or(1);
    let cases = cases.saturating_mul(factor);
    Config { cases, max_global_rejects: cases.saturating_add(1_024), ..Config::default() }
}
