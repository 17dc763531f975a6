//! Who is told of decisions: metrics, events, alerts. Told after the fact, and never waited for.

use std::net::IpAddr;

use threshold_core::policy::TokenError;
use threshold_core::{Decision, Facts, Policy, Timestamp};

/// Is told of every decision, on the thread that made it. It must not block: hand on what takes time.
pub trait Observer: Send + Sync {
    /// A decision was made under `policy`.
    fn decided(&self, facts: &Facts<'_>, decision: &Decision, policy: &Policy);

    /// The tower layer refused a request undecided. `reason` holds nothing that the client sent.
    fn refused(&self, refused: Refused<'_>, policy: &Policy) {
        let _ = (refused, policy);
    }

    /// The bearer token of a request did not verify. The request is then decided without its claims.
    fn token_refused(&self, refused: TokenRefused, policy: &Policy) {
        let _ = (refused, policy);
    }

    /// What a request should have given back was lost: the store failed, or too many requests were giving back at once.
    /// What was held is held to the end of its time, and what was charged stays charged.
    fn return_lost(&self) {}
}

/// A bearer token that did not verify.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenRefused {
    /// When.
    pub at: Timestamp,
    /// Why.
    pub reason: TokenError,
}

/// Why a request was refused before any limit was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refused<'r> {
    /// When.
    pub at: Timestamp,
    /// The client's address, if it is known.
    pub ip: Option<IpAddr>,
    /// The status of the answer.
    pub status: u16,
    /// What is wrong, for operators.
    pub reason: &'r str,
}
