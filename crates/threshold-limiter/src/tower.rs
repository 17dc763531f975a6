//! A tower layer: every request is decided before the service sees it, and the response carries rate-limit fields.
//!
//! ```no_run
//! use std::{net::SocketAddr, sync::Arc};
//!
//! use axum::{Router, routing::get};
//! use threshold_limiter::{Limiter, Policy, tower::ThresholdLayer};
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let policy = Policy::from_file("policy.toml")?;
//!     let layer = ThresholdLayer::new(Arc::new(Limiter::new(policy)))?;
//!     let app = Router::new().route("/", get(|| async { "hello" })).layer(layer);
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//!     axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
//!     Ok(())
//! }
//! ```
//!
//! To limit by address alone, or by a key of your own ([`ThresholdLayer::per_key`]), no policy is needed:
//!
//! ```no_run
//! use std::net::SocketAddr;
//!
//! use axum::{Router, routing::get};
//! use threshold_limiter::tower::ThresholdLayer;
//!
//! # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
//! let app = Router::new().route("/", get(|| async { "hello" })).layer(ThresholdLayer::per_ip("100/min")?);
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//! axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
//! # Ok(())
//! # }
//! ```
//!
//! For each request:
//!
//! - **The caller** is identified as the policy's `[identity]` says: by the peer's address ([`PeerAddr`], axum's `ConnectInfo`
//!   with the feature `axum`, or [`ThresholdLayer::peer`]), and by header fields if the peer is a trusted proxy. The
//!   application may identify it in [`ThresholdLayer::identify`]. A `claim:` comes from the bearer token, verified as
//!   `[identity.jwt]` says; `threshold_wire::jwt` reads the keys. A token that does not verify identifies
//!   nobody.
//! - **An allowed request** goes to the service, and its response gets the rate-limit fields. Fields that the service has set
//!   stay as they are.
//! - **A denied request** does not reach the service. The response is a 429, or the rule's `status`, as JSON, as
//!   `application/problem+json`, or in gRPC as `RESOURCE_EXHAUSTED`.
//! - **A request that cannot be decided** is refused: a cost in bytes that never fits with 413, another one with 400; a request
//!   without any identity, not even an address, with 429, or with 500 where the layer was given no source of addresses; one that matches more rules than a plan holds with 503, since a
//!   limiter that cannot count must not let requests through.
//! - **Bytes** are charged when the request comes if the length is known, and otherwise when they have streamed.
//! - **Concurrency** is held until the body of the response ends or is dropped.
//! - **Rules with `count`** are charged when the request comes, and refunded if the response is not one that they count.
//!   Without a response the charge stays: a client cannot avoid it by leaving early.
//! - **Shadow bans** delay requests here, at most [`ThresholdLayer::max_delayed`] at once.
//!
//! Timers and tasks are those of tokio. A host without it gives its own to [`ThresholdLayer::with_runtime`].

mod answer;
mod body;
mod future;
mod gate;
mod layer;
mod pending_charges;
mod pool;
mod refused_request;
mod request_facts;
mod runtime;
mod service;

pub use answer::Unavailable;
pub use body::{BodyParts, Hold, RequestBody, ResponseBody};
pub use future::ResponseFuture;
#[cfg(feature = "memory")]
pub use layer::LayerError;
pub use layer::{NoTokenVerifier, ThresholdLayer};
pub use refused_request::RefusedRequest;
pub use request_facts::{Identified, PeerAddr};
pub use runtime::{Runtime, Task};
pub use service::ThresholdService;
