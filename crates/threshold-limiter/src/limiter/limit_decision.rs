//! The answer of one limit that a caller chooses.

use std::time::{Duration, SystemTime};

use threshold_core::balance::Checked;
use threshold_core::{Limit, Span, Timestamp};

/// The answer of [`Limiter::check_limit`](super::Limiter::check_limit).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a decision that nobody reads protects nothing"]
#[non_exhaustive]
pub struct LimitDecision {
    /// Whether the cost fitted, and was charged.
    pub allowed: bool,
    /// The cost that still fits, after this charge.
    pub remaining: u64,
    /// When the limit resets, as in the answers to requests; for a denial, when the client may retry. `None` where the
    /// algorithm has no such time.
    pub reset_at: Option<SystemTime>,
    /// For a denial, how long to wait before this cost fits, at least a second.
    pub retry_after: Option<Duration>,
    /// How long until the limit resets, whether the cost fitted or not: a token bucket is full again then.
    pub reset_after: Option<Duration>,
}

impl LimitDecision {
    /// Returns the decision that a store has made at this time, for a host that executes [`Command::Limit`] itself.
    ///
    /// [`Command::Limit`]: threshold_core::Command::Limit
    pub fn new(limit: &Limit, checked: &Checked, now: Timestamp) -> Self {
        let look = &checked.look;
        let charged = checked.mark.map_or(0, |mark| mark.amount);
        let remaining = look.available.saturating_sub(charged);
        let reset = limit.reset_at(look, charged > 0, now).unless_never();
        let reset_after = reset.map(|reset| reset.since(now).into());
        if look.allowed {
            let reset_at = reset.map(SystemTime::from);
            return Self { allowed: true, remaining, reset_at, retry_after: None, reset_after };
        }
        // A full store denies a new key without a time at which it would fit: a second is the least to wait.
        let wait = look.ready_at.since(now).max(Span::SECOND);
        // Clients are told whole seconds, and what they are told holds.
        let reset_at = now.plus(Span::from_secs(wait.secs_ceil()));
        Self { allowed: false, remaining, reset_at: Some(reset_at.into()), retry_after: Some(wait.into()), reset_after }
    }
}
