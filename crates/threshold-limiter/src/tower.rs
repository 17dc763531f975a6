//! A tower layer: every request is decided before the service sees it, and its answer says how its caller stands.
//!
//! ```no_run
//! use std::{net::SocketAddr, sync::Arc};
//!
//! use axum::{Router, extract::ConnectInfo, routing::get};
//! use threshold_limiter::{Limiter, Policy, tower::ThresholdLayer};
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let policy = Policy::parse(&std::fs::read_to_string("policy.toml")?, &|name| std::env::var(name).ok())?;
//!     let layer = ThresholdLayer::new(Arc::new(Limiter::new(policy)))?
//!         .peer(|parts| parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0));
//!     let app = Router::new().route("/", get(|| async { "hello" })).layer(layer);
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//!     axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
//!     Ok(())
//! }
//! ```
//!
//! What the layer does with a request:
//!
//! - **Who is calling** it finds as the policy's `[identity]` says, from the peer's address ([`PeerAddr`], or
//!   [`ThresholdLayer::peer`]) and from header fields, which are believed from trusted peers only. What the application
//!   knows better it says in [`ThresholdLayer::identify`]. A `claim:` is that of the request's bearer token, verified as
//!   `[identity.jwt]` says; `threshold_limiter::jwt` (feature `jwt`) reads the keys. A token that does not verify names
//!   nobody.
//! - **Allowed**: the answer carries the rate-limit fields. Fields that the service set itself stay as they are.
//! - **Denied**: the service never sees it. The answer is a 429, or what the rule says, as JSON, as
//!   `application/problem+json`, or in gRPC as `RESOURCE_EXHAUSTED`.
//! - **Impossible**: a cost that no waiting makes fit is a 413 where it is in bytes, else a 400; a request without any
//!   identity, not even an address, is a 429; one that meets more rules than a plan holds is a 503, since a limiter that
//!   cannot count must not wave through.
//! - **Bytes** are charged when the request comes, as far as their number is known, and otherwise when they have streamed.
//! - **Concurrency** is held until the body of the answer ends or is dropped.
//! - **Rules with `count`** are charged when the request comes and give back their charge when the answer is not one that
//!   they count. Without any answer the charge stays: a client cannot dodge it by leaving early.
//! - **Shadow bans** are waited out here, by so many requests at once as [`ThresholdLayer::max_delayed`] says.

mod answer;
mod background;
mod body;
mod future;
mod gate;
mod layer;
mod pending_charges;
mod pool;
mod request_facts;
mod service;

pub use body::{RequestBody, ResponseBody};
pub use future::ResponseFuture;
pub use layer::{NoTokenVerifier, ThresholdLayer};
pub use request_facts::{Identified, PeerAddr};
pub use service::ThresholdService;
