//! Reads the body of a call, after its token, its content type and its declared size were checked.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Request};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, ORIGIN};
use http::request::Parts;
use http::{Extensions, HeaderMap, StatusCode};
use http_body_util::BodyExt as _;
use threshold_limiter::tower::PeerAddr;

use super::admin::Reader;
use super::client_memory::{ClientMemory, MemoryPermit};
use super::token_guesses::{Callers, Shown};
use super::{ApiError, App};

/// The largest body that has memory of its own: checks are far smaller, and so wait for no large bodies.
pub(super) const SMALL_BODY: usize = 16 << 10;

/// Proof that a request may call the API: it has a token, or the server requires none.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller;

/// Proof that a request may make a call that changes nothing: a token that only reads suffices too.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallerOrReader;

/// What bounds the sum of the bodies that are read at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bound {
    /// The memory for bodies of those whose token the request shows.
    Token,
    /// That for bodies of requests that need no token.
    Anyone,
    /// A turn that the caller holds.
    Turn,
}

impl Bound {
    /// Returns the memory for small bodies, and for others.
    fn memory<'a>(self, headers: &HeaderMap, app: &'a App) -> Option<[&'a ClientMemory; 2]> {
        match self {
            Self::Token => Some(app.token_guesses.body_memory_of(headers.get(AUTHORIZATION), app)),
            Self::Anyone => Some([&app.anyones_body_memory; 2]),
            Self::Turn => None,
        }
    }
}

/// The whole body of a request, not yet parsed.
#[derive(Debug)]
pub(super) struct JsonBody(pub(super) Bytes);

impl Caller {
    pub(super) async fn of(headers: &HeaderMap, extensions: &Extensions, app: &App) -> Result<Self, ApiError> {
        Self::among(Callers::Only, headers, extensions, app).await
    }

    async fn among(
        callers: Callers,
        headers: &HeaderMap,
        extensions: &Extensions,
        app: &App,
    ) -> Result<Self, ApiError> {
        let (shown, peer) = (Shown::Authorization(headers.get(AUTHORIZATION)), extensions.get::<PeerAddr>());
        app.token_guesses.admit(shown, callers, peer.map(|peer| peer.0.ip()), app).await?;
        Ok(Self)
    }
}

impl FromRequestParts<Arc<App>> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        Self::of(&parts.headers, &parts.extensions, app).await
    }
}

impl FromRequestParts<Arc<App>> for CallerOrReader {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        Caller::among(Callers::AndReaders, &parts.headers, &parts.extensions, app).await.map(|_| Self)
    }
}

impl FromRequest<Arc<App>> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        Self::read(request, app, app.bounds.body).await
    }
}

impl JsonBody {
    /// Reads the body of a request, of at most this many bytes.
    pub(super) async fn read(request: Request, app: &App, max: usize) -> Result<Self, ApiError> {
        Self::read_coded(request, app, (max, Bound::Token), &["identity"]).await
    }

    /// Reads the body of a request, of at most this many bytes. The caller holds a turn, by which few of them are read at once.
    pub(super) async fn read_in_turn(request: Request, app: &App, max: usize) -> Result<Self, ApiError> {
        Self::read_coded(request, app, (max, Bound::Turn), &["identity"]).await
    }

    /// Reads a body as [`read_in_turn`](Self::read_in_turn) does, which may be compressed with gzip. It is returned as it was sent.
    pub(super) async fn read_compressed(request: Request, app: &App, max: usize) -> Result<Self, ApiError> {
        Self::read_coded(request, app, (max, Bound::Turn), &["identity", "gzip", "x-gzip"]).await
    }

    /// Reads the body of a request that needs no token, of at most this many bytes. It must be declared as JSON.
    pub(super) async fn read_for_anyone(request: Request, app: &App, max: usize) -> Result<Self, ApiError> {
        require_json(request.headers())?;
        Self::read_any(request, app, (max, Bound::Anyone), &["identity"]).await
    }

    /// Reads the body of an operator's request that changes nothing, after its token was checked.
    pub(super) async fn read_for_reader(_: &Reader, request: Request, app: &App) -> Result<Self, ApiError> {
        Self::read_any(request, app, (app.bounds.body, Bound::Token), &["identity"]).await
    }

    /// Reads the body of a call that changes nothing, after its token was checked.
    pub(super) async fn read_unchanging(_: CallerOrReader, request: Request, app: &App) -> Result<Self, ApiError> {
        require_json_from_pages(request.headers())?;
        Self::read_any(request, app, (app.bounds.body, Bound::Token), &["identity"]).await
    }

    async fn read_coded(request: Request, app: &App, max: (usize, Bound), codings: &[&str]) -> Result<Self, ApiError> {
        Caller::of(request.headers(), request.extensions(), app).await?;
        require_json_from_pages(request.headers())?;
        Self::read_any(request, app, max, codings).await
    }

    async fn read_any(
        request: Request,
        app: &App,
        (max, bound): (usize, Bound),
        codings: &[&str],
    ) -> Result<Self, ApiError> {
        let headers = request.headers();
        require_coding(headers, codings)?;
        let bounds = app.bounds;
        // Refused by its declared size before a byte is read: a client that waits for 100 Continue never sends it.
        let declared = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        if declared.is_some_and(|length: usize| length > max) {
            return Err(too_large(max));
        }
        let memory = bound.memory(headers, app);
        // Before a byte is read, and not in the client's time.
        let acquired = match memory {
            Some([small, large]) => {
                let length = declared.unwrap_or(SMALL_BODY).min(max);
                Some(if length > SMALL_BODY { large } else { small }.acquire(length).await?)
            }
            None => None,
        };
        // One timeout for the whole body: a client that sends a byte at a time (slowloris) cannot extend it.
        let memory = memory.filter(|_| declared.is_none());
        let reading = read_all(request.into_body(), (max, declared), memory.map(|[_, large]| large), acquired);
        match tokio::time::timeout(bounds.client_timeout, reading).await {
            Ok(body) => body.map(Self),
            Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", "the body arrived too slowly")),
        }
    }
}

/// Guards against CSRF: a browser must send `Content-Type: application/json`.
///
/// To another origin, a browser sends that type only after a CORS preflight, which this server never answers. Other clients
/// need not send it, so that `curl -d` works.
pub(super) fn require_json_from_pages(headers: &HeaderMap) -> Result<(), ApiError> {
    if is_from_browser(headers) { require_json(headers) } else { Ok(()) }
}

/// Reads a body to its end, of at most `max` bytes. Most arrive in one frame, which is returned without a copy. One that is not small holds
/// its memory until it is dropped.
async fn read_all(
    mut body: Body,
    (max, declared): (usize, Option<usize>),
    mut large: Option<&ClientMemory>,
    mut acquired: Option<MemoryPermit>,
) -> Result<Bytes, ApiError> {
    let mut first = Bytes::new();
    let mut joined = Vec::new();
    while let Some(frame) = body.frame().await {
        let early = |_| ApiError::new(StatusCode::BAD_REQUEST, "bad_request", "the body ended too early");
        let Ok(data) = frame.map_err(early)?.into_data() else { continue };
        // The declared length may be missing with chunked encoding, so what arrives is counted too. `joined` contains
        // `first`, so the larger of the two is the sum so far.
        let sum = first.len().max(joined.len()).saturating_add(data.len());
        if sum > max {
            return Err(too_large(max));
        }
        // Its length was not declared, and it is no small one.
        if sum > SMALL_BODY
            && let Some(memory) = large.take()
        {
            // What it holds is released first: those who wait for more than they hold would wait for each other.
            drop(acquired.take());
            acquired = Some(memory.acquire(max).await?);
        }
        if first.is_empty() {
            first = data;
            continue;
        }
        if joined.is_empty() {
            // No more than was acquired: a vector that grows by itself has twice as much.
            joined.reserve_exact(declared.unwrap_or(if sum > SMALL_BODY { max } else { SMALL_BODY.min(max) }));
            joined.extend_from_slice(&first);
        }
        joined.extend_from_slice(&data);
    }
    match (joined.is_empty(), acquired) {
        (true, _) => Ok(first),
        (false, Some(acquired)) => acquired.bytes(joined),
        (false, None) => Ok(joined.into()),
    }
}

/// Whether a request has a header that only browsers send, and that scripts in them cannot remove.
fn is_from_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(ORIGIN) || headers.contains_key("sec-fetch-site")
}

fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    // Parameters such as `charset=utf-8` do not change the type.
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "a web page must send Content-Type: application/json";
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

/// Refuses compressed bodies, unless their call bounds what they expand to: a small one can expand to any size (a decompression
/// bomb).
fn require_coding(headers: &HeaderMap, codings: &[&str]) -> Result<(), ApiError> {
    let is_taken = |value: &[u8]| codings.iter().any(|coding| value.eq_ignore_ascii_case(coding.as_bytes()));
    if headers.get_all(CONTENT_ENCODING).iter().all(|value| is_taken(value.as_bytes())) {
        return Ok(());
    }
    let message = match codings {
        [_] => "send the body uncompressed, without Content-Encoding",
        _ => "send the body uncompressed, or with Content-Encoding: gzip",
    };
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

fn too_large(max: usize) -> ApiError {
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", format!("a body has at most {max} bytes"))
}
