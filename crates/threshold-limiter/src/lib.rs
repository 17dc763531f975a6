//! Threshold in your process: a policy, a bounded store and a clock.
//!
//! ```
//! use threshold_limiter::threshold_core::policy::{Per, Rule};
//! use threshold_limiter::{Facts, Limiter, Policy};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let policy = Policy::builder().rule(Rule::builder("posts").per([Per::User]).limit("2/h")).build()?;
//!     let limiter = Limiter::new(policy);
//!     let facts = Facts { user: Some("u1"), ..Facts::default() };
//!     assert!(limiter.check(&facts)?.allowed());
//!     assert!(limiter.check(&facts)?.allowed());
//!     assert!(!limiter.check(&facts)?.allowed());
//!     Ok(())
//! }
//! ```
//!
//! # Features
//!
//! Only `memory` is enabled by default. A [`KeyLimiter`], and a policy from [`Policy::builder`], need no other.
//!
//! | feature | enables |
//! |---|---|
//! | `memory` | the store in memory, [`KeyLimiter`] and the system's clock. Without it the crate builds for `wasm32-unknown-unknown`: the host brings a [`Store`] and a [`Clock`] to [`LimiterBuilder::new`] |
//! | `toml` | policies from TOML files: [`Policy::from_file`], [`Policy::from_env`], [`Policy::parse`] |
//! | `login` | login protection (`[login]` of a policy), with Unicode tables for account names |
//! | `tower` | a layer and a service for axum, hyper, tonic and other users of tower |
//! | `axum` | `tower`, and the route that axum's router matched |
//! | `wait` | waiting for capacity, on tokio's timer |
//! | `sqlite` | a journal in an SQLite file: bans, strikes and locks outlive the process |
//! | `partitions` | commands on a store of partitions, for stores such as that of `threshold-redis` |
//! | `metrics` | counters, histograms and gauges for Prometheus: `metrics::Metrics` |

pub mod active_penalties;
pub mod bans;
pub mod clock;
#[cfg(not(target_family = "wasm"))]
pub mod events;
#[cfg(feature = "memory")]
#[doc(hidden)]
pub mod files;
#[cfg(any(feature = "metrics", feature = "sqlite"))]
pub mod histogram;
#[cfg(feature = "sqlite")]
pub mod journal;
#[cfg(feature = "memory")]
pub mod keyed;
pub mod limiter;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod observer;
#[cfg(feature = "memory")]
mod prefetch;
pub mod store;
mod sync;
#[cfg(feature = "tower")]
pub mod tower;

pub use active_penalties::{ActivePenalties, ActiveShadowBan, PenaltyCounts};
pub use bans::BanList;
#[cfg(feature = "memory")]
pub use clock::SystemClock;
pub use clock::{Clock, ManualClock};
#[cfg(feature = "memory")]
pub use keyed::{KeyDecision, KeyLimiter, KeyLimiterBuilder};
pub use limiter::{LimitDecision, Limiter, LimiterBuilder, LoginError, OtherSecrets, PauseError, Reserved};
pub use observer::{ObservedDecision, ObservedOperation, Observer, Operation, OperationResult, Refused, TokenRefused};
pub use store::{ImmediateStore, Store};
/// Everything that a decision is made of, where the names below are not enough.
pub use threshold_core;
pub use threshold_core::decision::{Cause, Degraded};
pub use threshold_core::explain::Explained;
pub use threshold_core::limit::{Algorithm, Anchor, LimitError, LimitOptions};
pub use threshold_core::lockout::{Attempted, LoginRequest, LoginResult, Refusal, RefusedBy};
pub use threshold_core::policy::Layer;
#[cfg(feature = "toml")]
pub use threshold_core::policy::PolicyFileError;
pub use threshold_core::receipt::{ActualCost, CommitError, OnExpire, UnknownReservation};
pub use threshold_core::{
    BytesError, Decision, DigestKey, Facts, Limit, PlanError, Policy, PolicyError, Reading, Readings, Receipt, Secret,
    Secrets, Span, Timestamp, TraceId, Verdict,
};

// The Rust of the documentation, compiled and run as documentation tests. The package has neither these pages nor its tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/library.md")]
#[doc = include_str!("../../../docs/policy.md")]
#[doc = include_str!("../../../docs/scale.md")]
mod pages {}

/// What hosts of this project use of the inside: stores, servers and the Worker. It changes without notice.
#[doc(hidden)]
pub mod host {
    use threshold_core::TraceId;

    /// Returns an id nobody can guess.
    #[must_use]
    pub fn random_id() -> TraceId {
        super::random_id()
    }
}

/// Fresh random bytes that nobody can guess.
fn random<const N: usize>() -> [u8; N] {
    use rand::Rng as _;
    let mut bytes = [0; N];
    rand::rng().fill_bytes(&mut bytes);
    bytes
}

/// An id nobody can guess.
fn random_id() -> TraceId {
    use rand::Rng as _;
    // Two words are drawn faster than as many bytes.
    let mut rng = rand::rng();
    TraceId::from_u128(u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64()))
}
