//! Bearer tokens: which of them name somebody, and what the layer makes of those that do not.

#![cfg(feature = "jwt")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]
#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::string_slice,
    reason = "a test that cannot go on should say so loudly"
)]

mod keys;
mod layer;
mod sign;
mod tokens;

use threshold_limiter::Timestamp;

/// The tests' own time, in Unix seconds.
const NOW: u64 = 1_767_225_600;
const START: Timestamp = Timestamp::from_secs(NOW);
