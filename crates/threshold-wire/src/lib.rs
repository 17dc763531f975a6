//! The JSON of the HTTP API, for every host that serves it: bodies of calls, decisions, errors. Beside it bearer tokens ([`token`]; with
//! the feature `jwt` their signatures are verified) and the limits in tenants' files ([`tenant_config`]).
//!
//! The server and the Worker are two hosts of one API. What they parse and what they write is here, without a web framework and
//! without a runtime, so that neither can differ from the other in a byte.
//!
//! ```
//! use threshold_wire::{Answer, Requests};
//! use threshold_limiter::threshold_core::plan::Verb;
//! use threshold_limiter::{Limiter, TraceId};
//!
//! # async fn check(limiter: &Limiter, body: &[u8]) -> Result<Vec<u8>, threshold_wire::ApiError> {
//! let Requests::One(request) = threshold_wire::read_requests(body)? else {
//!     return Err(threshold_wire::ApiError::not_served("requests", "a list of requests"));
//! };
//! request.without_reservation()?;
//! let lists = request.lists();
//! let policy = limiter.policy();
//! let facts = request.facts(&lists, TraceId::default());
//! let (decision, _receipt) = limiter.decide_under(&policy, Verb::Check, &facts).await?;
//! Ok(Answer::new(&decision, &policy).to_json())
//! # }
//! ```

mod answer;
pub mod envoy;
mod error;
#[cfg(feature = "jwt")]
pub mod jwt;
mod limit;
mod login;
mod names;
mod read;
mod request;
#[cfg(feature = "schemas")]
mod schema;
pub mod tenant_config;
mod text;
pub mod token;
mod wait;
mod write;

pub use answer::Answer;
pub use error::{ApiError, ErrorBody, to_json};
pub use limit::{LimitAnswer, LimitBody, LimitCall};
pub use login::{AttemptAnswer, AttemptBody, ResultAnswer, ResultBody};
pub use names::{Address, LayerName, layer_named, unknown_layer};
pub(crate) use read::field_of;
pub use read::{Object, read, read_requests};
pub use request::{Lists, MAX_ITEMS, RequestBody, Requests};
pub use text::{Pairs, Text, Whole};
pub use wait::{MAX_WAIT_MS, refuse_waiting, wait_time};

/// The header field with the generation of the policy that decided, which grows by one with each reload.
pub const GENERATION_HEADER: &str = "x-threshold-generation";
