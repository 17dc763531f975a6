//! The doors on one router, and what they share.

mod admin;
pub(crate) mod error;
mod forward_auth;
pub(crate) mod health;
mod http;
mod login;
mod sent;
#[cfg(test)]
mod serving;

use std::sync::Arc;
use std::time::Duration;

use ::http::HeaderValue;
use ::http::StatusCode;
use ::http::header::CONTENT_TYPE;
use axum::Router;
use axum::body::Body;
use axum::response::Response;
use serde::Serialize;

use crate::desk::Desk;
use crate::serve::Tokens;
pub(crate) use error::ApiError;
pub(crate) use health::Health;

/// What every door is given.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) desk: Desk,
    pub(crate) tokens: Tokens,
    pub(crate) health: Health,
    pub(crate) bounds: Bounds,
    once: http::Once,
    guesses: admin::Guesses,
    forward_auth: forward_auth::ForwardAuth,
}

/// What a client may ask of the server's memory and patience.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// The most connections at once.
    pub(crate) connections: usize,
    /// The largest body, in bytes.
    pub(crate) body: usize,
    /// How long a client may keep the server waiting.
    pub(crate) patience: Duration,
}

impl App {
    pub(crate) fn new(desk: Desk, tokens: Tokens, bounds: Bounds) -> Self {
        let forward_auth = forward_auth::ForwardAuth::new(&desk);
        let (health, once, guesses) = (Health::default(), http::Once::default(), admin::Guesses::default());
        Self { desk, tokens, health, bounds, once, guesses, forward_auth }
    }
}

/// All doors that speak HTTP.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .merge(health::routes())
        .merge(http::routes())
        .merge(login::routes())
        .merge(admin::routes())
        .merge(forward_auth::routes())
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is nothing at this path") })
        .method_not_allowed_fallback(|| async {
            let message = "this path takes another method; see Allow";
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
        })
        .with_state(app)
}

/// An answer in JSON.
fn json<T: Serialize>(status: StatusCode, body: &T) -> Response {
    json_bytes(status, serde_json::to_vec(body).unwrap_or_default())
}

/// An answer that is JSON already.
fn json_bytes(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
