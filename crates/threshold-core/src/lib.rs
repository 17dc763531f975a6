//! The decision engine of Threshold, a rate limiter: pure functions from facts, stored state and the time to a decision.
//!
//! This crate reads no clock, opens no file, starts no thread and uses no network. Its host passes in the time, the stored state
//! and random numbers. `threshold-limiter` is a host for applications, `threshold-server` one for other programs.
//!
//! # Glossary
//!
//! | term | definition |
//! |---|---|
//! | [`Facts`] | the properties of one request that rules can use: address, user, method, path, cost and so on |
//! | door | the code that takes requests in some protocol, makes facts of them and writes the answers |
//! | [`Policy`] | the meaning of one policy file: rules, lists, tiers, ladders and login settings |
//! | [`policy::Rule`], [`policy::Match`] | a limit with the requests that it applies to, and the condition that selects them |
//! | enforce, observe | the two modes of a rule: it denies, or it is only counted and reported |
//! | [`Limit`] | an algorithm with its parameters, such as 100 requests a minute as a token bucket |
//! | cost | how much of a limit a request uses; 1 by default |
//! | key, [`Digest`] | the identity of a budget: a keyed 128-bit hash of a rule and the user, address or tenant that it counts |
//! | budget | what one key may use under its limit |
//! | [`Partition`], anchor | the part of a store that holds a record, and the identity that the partition is computed from |
//! | normal form | the one form of a path, host, method or account name that is matched, whatever spelling a client sends |
//! | reading (of a path) | a path that some server would take the request's path for; a request meets the rules of all its readings |
//! | [`Plan`] | the rules that one request meets under a policy, with keys and costs |
//! | [`Bill`] | the part of a plan that a store settles: charges and subjects, without the policy |
//! | [`bill::Charge`] | one cost on one key under one limit |
//! | [`Balance`] | the stored state of one key |
//! | [`settle()`] | the atomic step that decides a bill and charges all of its limits or none |
//! | [`Outcome`] | the result of settling: what was found, charged and changed |
//! | [`Decision`], [`Verdict`] | the result for the caller: allow, warn, slow down, deny or ban, with its reasons |
//! | [`Reading`] | the figures of one limit in a decision: limit, remaining, reset time |
//! | [`event::Event`] | what is recorded of a denial, a warning or a strike |
//! | [`alert::Episode`] | the time in which a count of events stays at an alert's threshold |
//! | violation | a request that exceeds an enforced limit |
//! | subject | an identity that is punished for violations, on all paths and under all rules |
//! | strike | a violation that counts against a subject |
//! | [`ladder::Ladder`], [`ladder::Rung`] | the graduated response to strikes, and its consequence at one of them |
//! | [`Standing`] | the stored state of one subject: strikes, cool-down, ban |
//! | [`ladder::Penalty`] | a cool-down or ban in force, which denies every request of a subject |
//! | block, pause | a denial of one key for a time, after a violation (`block_for`) or by an operator |
//! | stand-in | a key that many callers share in a store without room for keys of their own |
//! | [`lockout::Login`], [`lockout::Account`] | the login settings of a policy, and the stored login state of one account |
//! | [`Records`] | the stored state, as commands see it |
//! | [`Command`], [`Answer`] | an operation on records, and its result |
//! | [`control::ControlChange`], [`control::ControlLog`] | a change of a ban or setting for every node, and all of them in order |
//! | [`Receipt`] | a signed record of what was charged, which can be refunded |
//! | [`Reservation`] | charges that are held until they are committed, released or expire |
//! | [`receipt::Pending`] | charges of a request under way, which its end or its outcome may refund |
//!
//! To *bring* a balance or standing is to convert it to the current limit or ladder and the current time before it is used, for
//! example after a policy change or after the clock was set back.
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
pub mod alert;
pub mod balance;
pub mod bill;
mod caller;
#[cfg(feature = "cases")]
pub mod case;
pub mod codec;
pub mod command;
pub mod control;
pub mod decision;
pub mod event;
pub mod explain;
pub mod facts;
pub mod headers;
pub mod key;
pub mod ladder;
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
pub use event::Event;
pub use facts::Facts;
pub use key::{Digest, DigestKey, Partition, TraceId};
pub use ladder::Standing;
pub use ledger::Ledger;
pub use limit::Limit;
pub use plan::{Plan, PlanError};
pub use policy::{Policy, PolicyError};
pub use receipt::{Receipt, Reservation};
pub use secret::{KeyId, Secret, Secrets};
pub use settle::{Balances, Outcome, Standings, settle, settle_into};
pub use split::Split;
pub use time::{Span, Timestamp};
