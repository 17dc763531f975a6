//! Authorizes operators: CSRF checks, a limit on guessed tokens, and the token itself.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::request::Parts;
use http::{HeaderMap, Method, StatusCode};
use threshold_limiter::tower::PeerAddr;

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

/// Returns a caller's name in the audit: a digest of its token, if it has one.
pub(in crate::door) fn caller_name(headers: &HeaderMap, app: &App) -> String {
    let authorization = headers.get(AUTHORIZATION);
    let redacted = |token: &str| app.desk.redact(token);
    match app.tokens.operator_access(authorization) {
        OperatorAccess::Operator(token) => format!("operator {}", redacted(&token)),
        OperatorAccess::Open => "local".to_owned(),
        OperatorAccess::Reader | OperatorAccess::Denied => {
            let token = authorization.and_then(|value| value.to_str().ok()?.split_once(' '));
            token.map_or_else(|| "caller".to_owned(), |(_, token)| format!("caller {}", redacted(token.trim())))
        }
    }
}

/// Authorizes a request.
///
/// The CSRF checks come first: on a server without tokens, a web page that the operator has open is as authorized as the
/// operator. The count of wrong tokens comes before the token, so that a blocked address cannot go on guessing.
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
    if app.token_guesses.blocks_operators(peer) {
        return Err(too_many_wrong_tokens());
    }
    match app.tokens.operator_access(parts.headers.get(AUTHORIZATION)) {
        OperatorAccess::Denied => {
            // A missing token is not a guess, and neither is a caller's token, which is valid elsewhere.
            if parts.headers.get(AUTHORIZATION).is_some_and(|value| !app.tokens.is_any_known(value)) {
                app.token_guesses.count_for_operators(peer, app);
            }
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

/// The refusal of an address that has guessed tokens.
pub(in crate::door) fn too_many_wrong_tokens() -> ApiError {
    let message = "too many wrong tokens from this address";
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", message)
}

/// Whether a request has no `Origin`, or that of this server. Guards against CSRF.
pub(in crate::door) fn is_same_origin(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let Some(origin) = headers.get(ORIGIN) else { return true };
    // Without the scheme: a proxy in front may end TLS, and the server cannot know how the page was loaded.
    let own = origin.to_str().ok().and_then(|origin| Some(origin.split_once("://")?.1));
    own.is_some_and(|own| text(HOST).is_some_and(|host| host.eq_ignore_ascii_case(own)))
}
