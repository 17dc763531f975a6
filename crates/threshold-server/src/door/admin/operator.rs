//! Authorizes operators: CSRF checks, and the token.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use threshold_limiter::tower::PeerAddr;

use crate::door::client_memory::{MemoryPermit, PAGE_BYTES};
use crate::door::json_body::require_json_from_pages;
use crate::door::{ApiError, App};
use crate::serve::OperatorAccess;

/// Proof that a request may read: by a read-only token or an operator's.
#[derive(Debug)]
pub(in crate::door) struct Reader {
    /// Whether it may make changes too.
    pub(in crate::door) may_change: bool,
}

/// Proof that a request may make changes, and the operator's name in the audit.
#[derive(Debug)]
pub(in crate::door) struct Operator(pub(in crate::door) String);

impl FromRequestParts<Arc<App>> for Reader {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let access = admit(parts, app)?;
        Ok(Self { may_change: matches!(access, OperatorAccess::Operator(_) | OperatorAccess::Open) })
    }
}

impl FromRequestParts<Arc<App>> for Operator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        match admit(parts, app)? {
            // A digest and not the token: the audit is read by others than the operator.
            OperatorAccess::Operator(token) => Ok(Self(format!("operator {}", app.desk.redact(&token)))),
            OperatorAccess::Open => Ok(Self("local".to_owned())),
            OperatorAccess::Reader | OperatorAccess::Denied => {
                Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", "this token is read-only"))
            }
        }
    }
}

impl Reader {
    /// Acquires memory for an answer, before anything of it is made.
    pub(in crate::door) async fn memory(&self, app: &App) -> Result<MemoryPermit, ApiError> {
        self.memory_for(app, PAGE_BYTES).await
    }

    /// Acquires memory for an answer that may have so many bytes.
    pub(in crate::door) async fn memory_for(&self, app: &App, bytes: usize) -> Result<MemoryPermit, ApiError> {
        let memory = if self.may_change { &app.operator_answer_memory } else { &app.reader_answer_memory };
        memory.acquire(bytes).await
    }
}

/// Acquires memory for an answer that callers and operators may ask for, from that of their kind.
pub(in crate::door) async fn memory_of(
    authorization: Option<&HeaderValue>,
    app: &App,
) -> Result<MemoryPermit, ApiError> {
    app.token_guesses.answer_memory_of(authorization, app).acquire(PAGE_BYTES).await
}

/// Authorizes a request.
///
/// The CSRF checks come first: on a server without tokens, a web page that the operator has open is as authorized as the
/// operator.
fn admit(parts: &Parts, app: &App) -> Result<OperatorAccess, ApiError> {
    // A `DELETE` has no body to declare. Browsers send it to another origin only after a preflight, which is never
    // answered.
    if parts.method == Method::POST || parts.method == Method::PUT {
        require_json_from_pages(&parts.headers)?;
    }
    if !is_same_origin(&parts.headers) || is_sent_by_another_site(&parts.headers) {
        let message = "a web page of another origin cannot make operators' calls";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message));
    }
    let peer = parts.extensions.get::<PeerAddr>().map(|peer| peer.0.ip());
    match app.token_guesses.operator(parts.headers.get(AUTHORIZATION), peer, app)? {
        OperatorAccess::Denied => {
            let message = "send Authorization: Bearer with an operator's token (THRESHOLD_ADMIN_TOKEN)";
            Err(ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message))
        }
        access => Ok(access),
    }
}

/// Whether a browser says that a page of another origin sends the request. An image or a link of such a page has no `Origin`: it cannot
/// read the answer, but could open all streams of events.
pub(in crate::door) fn is_sent_by_another_site(headers: &HeaderMap) -> bool {
    let mut sites = headers.get_all("sec-fetch-site").iter();
    sites.any(|site| !matches!(site.as_bytes(), b"same-origin" | b"none"))
}

/// Whether a request has no `Origin`, or that of this server. Guards against CSRF.
pub(in crate::door) fn is_same_origin(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let Some(origin) = headers.get(ORIGIN) else { return true };
    // Without the scheme: a proxy in front may end TLS, and the server cannot know how the page was loaded.
    let own = origin.to_str().ok().and_then(|origin| Some(origin.split_once("://")?.1));
    own.is_some_and(|own| text(HOST).is_some_and(|host| host.eq_ignore_ascii_case(own)))
}
