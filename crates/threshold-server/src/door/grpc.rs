//! The gRPC door: Envoy's rate limit service and external authorization, and gRPC's health checks.

#[cfg(test)]
mod cluster_tests;
#[cfg(test)]
mod conformance;
#[cfg(test)]
mod fuzz;
pub(crate) mod proto;
mod wire;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::response::{IntoResponse as _, Response};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, Method, Request, StatusCode};
use hyper::body::Incoming;
use prost::Message;

use super::token_guesses::{Callers, Refused, Shown};
use super::{ApiError, App, envoy, ext_authz};
use crate::log::shown_address;
use proto::{HealthCheckRequest, HealthCheckResponse, ServingStatus};
pub(crate) use wire::GrpcCode;
pub(super) use wire::GrpcError;

/// The largest message, as in other servers of gRPC: 16 descriptors may have the largest headers that Envoy accepts each, 60 KiB by
/// default, and external authorization may have a body. A larger one is denied: a client chooses how long its headers are, and Envoy
/// may let through what is an error.
const MAX_MESSAGE: usize = 4 << 20;

const RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const AUTHORIZATION_CHECK: &str = "/envoy.service.auth.v3.Authorization/Check";
const HEALTH: &str = "/grpc.health.v1.Health/Check";
/// The services whose health can be asked for; an empty name is the whole server.
const SERVICES: [&str; 4] = [
    "",
    "envoy.service.ratelimit.v3.RateLimitService",
    "envoy.service.auth.v3.Authorization",
    // That of envoyproxy/ratelimit, which checks of it ask for.
    "ratelimit",
];
/// The largest message of a health check, which has the name of a service. It needs no token, so it must not cost memory.
const MAX_HEALTH_MESSAGE: usize = 1_024;

/// Answers one call.
pub(super) async fn answer(app: Arc<App>, peer: SocketAddr, request: Request<Incoming>) -> Response {
    if let Err(error) = check_protocol(&request) {
        return error.into_response();
    }
    // One time for the whole call: a client that sends a byte at a time (slowloris) cannot extend it.
    let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let error = match tokio::time::timeout(app.bounds.client_timeout, call(&app, peer, request)).await {
        Ok(Ok(response)) => return response,
        Ok(Err(error)) => error,
        Err(_) => GrpcError::new(GrpcCode::DeadlineExceeded, "the call took too long"),
    };
    report(&app, peer, &method, &error);
    error.into_response()
}

/// Counts and logs an error: Envoy lets the request through that it asked about, unless it is told otherwise.
fn report(app: &App, peer: SocketAddr, method: &str, error: &GrpcError) {
    app.desk.metrics.count_grpc_error(error.code);
    if let Some(left_out) = app.refused.sample(app.desk.now()) {
        let peer = shown_address(peer.ip(), &app.desk.policy());
        // A client may name any method, and none of ours is longer.
        let method: String = method.chars().take(32).collect();
        tracing::warn!(code = error.code.name(), reason = %error.message, method, peer, left_out, "gRPC call refused");
    }
}

async fn call(app: &Arc<App>, peer: SocketAddr, request: Request<Incoming>) -> Result<Response, GrpcError> {
    let (parts, body) = request.into_parts();
    match parts.uri.path() {
        RATE_LIMIT => {
            authorize(app, peer, &parts.headers).await?;
            match wire::read(&parts.headers, body, MAX_MESSAGE, &app.message_memory).await {
                Ok(asked) => answered(&envoy::should_rate_limit(app, &parts.headers, &asked).await?),
                Err(error) if error.code == GrpcCode::ResourceExhausted => {
                    answered(&envoy::too_large(app, &error.message))
                }
                Err(error) => Err(error),
            }
        }
        AUTHORIZATION_CHECK => {
            authorize(app, peer, &parts.headers).await?;
            match wire::read(&parts.headers, body, MAX_MESSAGE, &app.message_memory).await {
                Ok(asked) => answered(&ext_authz::check(app, peer, asked).await?),
                Err(error) if error.code == GrpcCode::ResourceExhausted => {
                    answered(&ext_authz::refuse(app, "size").await)
                }
                Err(error) => Err(error),
            }
        }
        // Health checks need no token, as over HTTP.
        HEALTH => {
            answered(&health(app, &wire::read(&parts.headers, body, MAX_HEALTH_MESSAGE, &app.message_memory).await?)?)
        }
        _ => Err(GrpcError::new(GrpcCode::Unimplemented, "this server has no such method")),
    }
}

fn answered(message: &impl Message) -> Result<Response, GrpcError> {
    Ok(wire::response(message))
}

/// Refuses what is no gRPC. A client that expects HTTP gets an HTTP error.
fn check_protocol<B>(request: &Request<B>) -> Result<(), ApiError> {
    let kind = request.headers().get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if !is_grpc(kind) {
        let message = "this listener speaks gRPC: send Content-Type: application/grpc, or HTTP requests to --http";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
    }
    if request.method() != Method::POST {
        let message = "a gRPC call is a POST";
        return Err(ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message));
    }
    Ok(())
}

/// Whether a media type is gRPC's, with its message format or parameters. gRPC-Web is another protocol.
fn is_grpc(kind: &[u8]) -> bool {
    kind.strip_prefix(b"application/grpc").is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';' | b' ')))
}

/// Tells a gRPC client that it has found a listener for HTTP, with an error that it shows; `None` for other clients.
pub(super) fn misdirected(app: &App, headers: &HeaderMap) -> Option<Response> {
    headers.get(CONTENT_TYPE).filter(|kind| is_grpc(kind.as_bytes()))?;
    let message = "this listener speaks HTTP: send gRPC to --grpc";
    if let Some(left_out) = app.refused.sample(app.desk.now()) {
        tracing::warn!(left_out, "gRPC call refused: {message}");
    }
    Some(GrpcError::new(GrpcCode::Unimplemented, message).into_response())
}

/// Checks the token of a caller, before anything of its message is read.
async fn authorize(app: &App, peer: SocketAddr, headers: &HeaderMap) -> Result<(), GrpcError> {
    let shown = Shown::Authorization(headers.get(AUTHORIZATION));
    let message = match app.token_guesses.admit(shown, Callers::Only, Some(peer.ip()), app).await {
        Ok(()) => return Ok(()),
        Err(Refused::TooMany) => return Err(GrpcError::new(GrpcCode::ResourceExhausted, "too many wrong tokens")),
        Err(_) => "send the metadata authorization: Bearer with a token of this server",
    };
    Err(GrpcError::new(GrpcCode::Unauthenticated, message))
}

fn health(app: &App, asked: &HealthCheckRequest) -> Result<HealthCheckResponse, GrpcError> {
    if !SERVICES.contains(&asked.service.as_str()) {
        return Err(GrpcError::new(GrpcCode::NotFound, "unknown service"));
    }
    let status = if app.health.is_draining() { ServingStatus::NotServing } else { ServingStatus::Serving };
    Ok(HealthCheckResponse { status: status.into() })
}
