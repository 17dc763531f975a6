//! Who is an operator: by a token that few have, and that nobody may guess at for long.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::request::Parts;
use http::{HeaderMap, Method, StatusCode};
use threshold_limiter::tower::PeerAddr;

use crate::door::sent::is_json_if_from_a_page;
use crate::door::{ApiError, App};
use crate::serve::Shown;

/// Somebody who may look; whoever may change may look too.
#[derive(Debug)]
pub(super) struct Reader;

/// Somebody who may change things, by the name that is written down.
#[derive(Debug)]
pub(super) struct Operator(pub(super) String);

impl FromRequestParts<Arc<App>> for Reader {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        admit(parts, app).map(|_| Self)
    }
}

impl FromRequestParts<Arc<App>> for Operator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        match admit(parts, app)? {
            Shown::Operator(token) => Ok(Self(format!("operator {}", app.desk.redact(&token)))),
            Shown::Open => Ok(Self("local".to_owned())),
            Shown::Reader | Shown::Nothing => {
                Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", "this token is for looking only"))
            }
        }
    }
}

/// Who a caller is, for the audit: the digest of a token where one is shown.
pub(in crate::door) fn caller_name(headers: &HeaderMap, app: &App) -> String {
    let shown = headers.get(AUTHORIZATION);
    let redacted = |token: &str| app.desk.redact(token);
    match app.tokens.operator(shown) {
        Shown::Operator(token) => format!("operator {}", redacted(&token)),
        Shown::Open => "local".to_owned(),
        Shown::Reader | Shown::Nothing => {
            let token = shown.and_then(|shown| shown.to_str().ok()?.split_once(' '));
            token.map_or_else(|| "caller".to_owned(), |(_, token)| format!("caller {}", redacted(token.trim())))
        }
    }
}

fn admit(parts: &Parts, app: &App) -> Result<Shown, ApiError> {
    if parts.method == Method::POST || parts.method == Method::PUT {
        is_json_if_from_a_page(&parts.headers)?;
    }
    if !is_own_page(&parts.headers) {
        let message = "a page of another site cannot be an operator";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message));
    }
    let peer = parts.extensions.get::<PeerAddr>().map(|peer| peer.0.ip());
    if app.guesses.bar_operators(peer) {
        let message = "too many wrong tokens from this address";
        return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", message));
    }
    match app.tokens.operator(parts.headers.get(AUTHORIZATION)) {
        Shown::Nothing => {
            // Whoever shows none does not guess, and neither does a caller whose token is right.
            if parts.headers.get(AUTHORIZATION).is_some_and(|shown| !app.tokens.know_any(shown)) {
                app.guesses.count_operator(peer, app);
            }
            let message = "send Authorization: Bearer and an operator's token (THRESHOLD_ADMIN_TOKEN)";
            Err(ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message))
        }
        shown => Ok(shown),
    }
}

/// Whether a call comes from no page at all, or from one of this server.
fn is_own_page(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let Some(origin) = headers.get(ORIGIN) else { return true };
    let own = origin.to_str().ok().and_then(|origin| Some(origin.split_once("://")?.1));
    own.is_some_and(|own| text(HOST).is_some_and(|host| host.eq_ignore_ascii_case(own)))
}

/// The parameters of a call, each at most once.
#[derive(Debug, Default)]
pub(super) struct Query(BTreeMap<String, String>);

impl Query {
    /// Refuses every other parameter.
    pub(super) fn only(self, known: &[&str]) -> Result<Self, ApiError> {
        match self.0.keys().find(|name| !known.contains(&name.as_str())) {
            None => Ok(self),
            Some(name) => Err(ApiError::bad(name.clone(), format!("unknown parameter `{name}`"))),
        }
    }

    pub(super) fn take(&mut self, name: &str) -> Option<String> {
        self.0.remove(name)
    }
}

impl FromRequestParts<Arc<App>> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, ApiError> {
        let mut query = Self::default();
        for (name, value) in form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()) {
            if query.0.insert(name.clone().into_owned(), value.into_owned()).is_some() {
                return Err(ApiError::bad(name.clone(), format!("`{name}` is given once")));
            }
        }
        Ok(query)
    }
}
