//! Threshold in your process: a policy, a bounded store and a clock.

pub mod store;
