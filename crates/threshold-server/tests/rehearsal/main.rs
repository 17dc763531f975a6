//! Tests the commands that read logs. A slow recount in the tests must find the same numbers.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]
#![expect(clippy::arithmetic_side_effects, reason = "a sum that overflows here fails the test, as it should")]
#![expect(clippy::indexing_slicing, reason = "what is not there fails the test, as it should")]

mod export;
mod kinds;
mod lint;
mod login;
mod logs;
mod page;
mod recount;
mod replay;
mod running;
mod suggest;
