//! Observers of decisions: metrics, events, alerts.

use std::net::IpAddr;

use threshold_core::policy::TokenError;
use threshold_core::{Decision, Facts, Policy, Timestamp, TraceId};

/// Receives every decision, after it was made and on the thread that made it. It must not block: hand slow work on to another
/// thread.
pub trait Observer: Send + Sync {
    /// Called after a decision under `policy`.
    fn decided(&self, facts: &Facts<'_>, decision: &Decision, policy: &Policy);

    /// Called when the tower layer has refused a request without a decision. `reason` holds nothing that the client sent.
    fn refused(&self, refused: Refused<'_>, policy: &Policy) {
        let _ = (refused, policy);
    }

    /// Called when the bearer token of a request did not verify. The request is then decided without its claims.
    fn token_refused(&self, refused: TokenRefused, policy: &Policy) {
        let _ = (refused, policy);
    }

    /// Called when a request could not give back its charges: the store failed, or too many requests gave back at once.
    /// Concurrency that it held stays held until its `ttl`, and what was charged stays charged.
    fn return_lost(&self) {}
}

/// A bearer token that did not verify.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenRefused {
    /// When the token was refused.
    pub at: Timestamp,
    /// Why it was refused.
    pub reason: TokenError,
}

/// A request that was refused before any limit was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refused<'r> {
    /// When the request was refused.
    pub at: Timestamp,
    /// The client's address, if it is known.
    pub ip: Option<IpAddr>,
    /// The status of the answer.
    pub status: u16,
    /// The reason, for operators.
    pub reason: &'r str,
    /// The trace id that the client was answered with.
    pub trace: TraceId,
}
