//! The decisions of Threshold, pure.
//!
//! Facts and the time go in, one decision comes out. This crate reads no clock, opens no file, starts no thread and
//! knows no network; whatever host carries it gives it the time, the stored state and the randomness it needs.
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | [`Facts`] | what a door knows of one request |
//! | [`Policy`], [`policy::Rule`], [`policy::Match`] | what one policy file means |
//! | [`Digest`] (key) | whose budget: a keyed digest of a rule and the identity it is counted by |
//! | [`Partition`], anchor | where a record is stored, and the identity that decides it |
//! | [`Limit`] | an algorithm with its figures |
//! | cost | how much of a limit a request uses |
//! | [`bill::Charge`] | one cost on one key under one limit |
//! | [`Bill`] | the charges of a plan and whom they may strike, without a policy: what a store settles |
//! | [`Plan`] | the charges and subjects of one request |
//! | [`Balance`] | the stored state of one key |
//! | [`settle()`] | the one atomic step: all charged or none |
//! | [`Outcome`] | what settling found and did |
//! | [`Reading`] | the figures of one limit that a request met |
//! | [`Decision`], [`Verdict`] | what the request is told |
//! | [`ladder::Ladder`], [`ladder::Rung`], strike, penalty | the graduated response |
//! | subject, [`Standing`] | who is punished, and how it stands with them |
//! | [`lockout::Login`], [`lockout::Account`] | protection of a login |
//! | [`Command`], [`Answer`], [`Records`] | an operation on stored state, what became of it, and what it works on |
//! | [`control::ControlChange`], [`control::ControlLog`] | a ban or setting that holds on every node, and all of them in order |
//! | [`Receipt`], [`Reservation`], [`Lease`] | what was charged, held, or granted ahead |
//! | [`receipt::Pending`] | what was charged to a request that is not over |
//! | enforce, observe | a rule that binds, and one that is only watched |
//!
//! # One request
//!
//! ```
//! use threshold_core::{Facts, Ledger, Policy, Timestamp, plan::Verb};
//!
//! let policy = Policy::parse(
//!     r#"
//!     [[rule]]
//!     name = "posts"
//!     per = ["user"]
//!     match = { method = "POST", path = "/api/posts" }
//!     limit = "2/h"
//!     "#,
//!     &|_| None,
//! )?;
//! let facts = Facts { user: Some("u1"), method: Some("POST"), path: Some("/API//posts/"), ..Facts::default() };
//! let mut ledger = Ledger::default();
//! let now = Timestamp::from_secs(1_767_225_600);
//! for expected in [true, true, false] {
//!     let checked = ledger.decide(&policy, Verb::Check, &facts, now)?;
//!     assert_eq!(checked.decision.allowed(), expected);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod address;
pub mod balance;
pub mod bill;
mod caller;
#[cfg(feature = "cases")]
pub mod case;
pub mod codec;
pub mod command;
pub mod control;
pub mod decision;
pub mod explain;
pub mod facts;
pub mod headers;
pub mod key;
pub mod ladder;
pub mod lease;
pub mod ledger;
pub mod limit;
pub mod lockout;
pub mod path;
pub mod plan;
pub mod policy;
pub mod receipt;
pub mod secret;
pub mod settle;
pub mod split;
pub mod text;
pub mod time;

pub use balance::Balance;
pub use bill::{Bill, OwnedBill};
pub use codec::{BytesError, Format};
pub use command::{Answer, Command, Records};
pub use decision::{Decision, Reading, Readings, Verdict};
pub use facts::Facts;
pub use key::{Digest, DigestKey, Partition, TraceId};
pub use ladder::Standing;
pub use lease::Lease;
pub use ledger::Ledger;
pub use limit::Limit;
pub use plan::{Plan, PlanError};
pub use policy::{Policy, PolicyError};
pub use receipt::{Receipt, Reservation};
pub use secret::{KeyId, Secret, Secrets};
pub use settle::{Balances, Outcome, Standings, settle, settle_into};
pub use split::Split;
pub use time::{Span, Timestamp};
