//! What a caller sent: nothing is read of a request before its token, its type and its size are known.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Request};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, ORIGIN};
use http::request::Parts;
use http::{Extensions, HeaderMap, StatusCode};
use http_body_util::BodyExt as _;
use threshold_limiter::tower::PeerAddr;

use super::{ApiError, App};

/// Proof that a request came from a caller: with a token, where one is asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller;

/// The JSON that a caller sent, whole and not yet parsed.
#[derive(Debug)]
pub(super) struct Sent(pub(super) Bytes);

impl Caller {
    async fn of(headers: &HeaderMap, extensions: &Extensions, app: &App) -> Result<Self, ApiError> {
        let shown = headers.get(AUTHORIZATION);
        if app.tokens.admit_caller(shown) {
            return Ok(Self);
        }
        // Whoever shows none does not guess.
        if shown.is_some() {
            let peer = extensions.get::<PeerAddr>().map(|peer| peer.0.ip());
            app.guesses.caller(peer, app).await?;
        }
        let message = "send Authorization: Bearer and a token of this server";
        Err(ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message))
    }
}

impl FromRequestParts<Arc<App>> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        Self::of(&parts.headers, &parts.extensions, app).await
    }
}

impl FromRequest<Arc<App>> for Sent {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let headers = request.headers();
        Caller::of(headers, request.extensions(), app).await?;
        is_json_if_from_a_page(headers)?;
        is_plain(headers)?;
        let bounds = app.bounds;
        let announced = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        if announced.is_some_and(|length: usize| length > bounds.body) {
            return Err(too_large(bounds.body));
        }
        match tokio::time::timeout(bounds.patience, whole(request.into_body(), bounds.body)).await {
            Ok(body) => body.map(Self),
            Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", "the body came too slowly")),
        }
    }
}

/// Guards against CSRF: what a page sends must be JSON by its type.
pub(super) fn is_json_if_from_a_page(headers: &HeaderMap) -> Result<(), ApiError> {
    if is_from_a_page(headers) { is_json(headers) } else { Ok(()) }
}

/// A body from its first to its last byte. Most come in one piece, which is handed on as it is.
async fn whole(mut body: Body, most: usize) -> Result<Bytes, ApiError> {
    let mut first = Bytes::new();
    let mut joined = Vec::new();
    while let Some(frame) = body.frame().await {
        let early = |_| ApiError::new(StatusCode::BAD_REQUEST, "bad_request", "the body ended too early");
        let Ok(piece) = frame.map_err(early)?.into_data() else { continue };
        if first.len().max(joined.len()).saturating_add(piece.len()) > most {
            return Err(too_large(most));
        }
        if first.is_empty() {
            first = piece;
            continue;
        }
        if joined.is_empty() {
            joined.extend_from_slice(&first);
        }
        joined.extend_from_slice(&piece);
    }
    Ok(if joined.is_empty() { first } else { joined.into() })
}

/// Browsers say that they are one. What follows is asked of them alone, so that `curl -d` will do.
fn is_from_a_page(headers: &HeaderMap) -> bool {
    headers.contains_key(ORIGIN) || headers.contains_key("sec-fetch-site")
}

/// A browser sends this type to another site only if that site has agreed: no page that an operator looks at can make
/// calls to a server on their machine.
fn is_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "a page must send Content-Type: application/json";
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

/// A compressed body would be as large as somebody likes once it is unpacked, and one request is a line.
fn is_plain(headers: &HeaderMap) -> Result<(), ApiError> {
    let coded =
        headers.get_all(CONTENT_ENCODING).iter().any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"));
    if !coded {
        return Ok(());
    }
    let message = "send the body as it is, without Content-Encoding";
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

fn too_large(most: usize) -> ApiError {
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", format!("a body is at most {most} bytes"))
}
