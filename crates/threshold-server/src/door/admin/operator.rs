//! Who is an operator: by a token that few have, and that nobody may guess at for long.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::request::Parts;
use http::{HeaderMap, Method, StatusCode};
use threshold_limiter::tower::PeerAddr;
use threshold_limiter::{KeyLimiter, Limit};

use crate::door::sent::heard;
use crate::door::{ApiError, App};
use crate::serve::Shown;

/// The wrong tokens that one address may show. A person mistypes; a program tries.
const GUESSES: &str = "10/min";
/// When the next one is heard, in seconds: ten in a minute are one in six seconds.
pub(in crate::door) const GUESS_AGAIN_AFTER: &str = "6";
/// The most addresses whose wrong tokens are counted at once.
const GUESSERS: u64 = 10_000;

/// How often each address has shown a wrong token.
#[derive(Debug)]
pub(in crate::door) struct Guesses(KeyLimiter);

/// Somebody who may look; whoever may change may look too.
#[derive(Debug)]
pub(super) struct Reader;

/// Somebody who may change things, by the name that is written down.
#[derive(Debug)]
pub(super) struct Operator(pub(super) String);

impl Default for Guesses {
    fn default() -> Self {
        Self(KeyLimiter::new(Limit::parse(GUESSES, None).expect("the limit is possible"), GUESSERS))
    }
}

impl Guesses {
    fn spent(&self, peer: &str) -> bool {
        self.0.check(peer, 0).remaining == 0
    }

    fn count(&self, peer: &str) {
        let _ = self.0.check(peer, 1);
    }
}

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
            Shown::Operator(token) => Ok(Self(format!("operator {}", app.desk.limiter.key().redact(&token)))),
            Shown::Open => Ok(Self("local".to_owned())),
            Shown::Reader | Shown::Nothing => {
                Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", "this token is for looking only"))
            }
        }
    }
}

fn admit(parts: &Parts, app: &App) -> Result<Shown, ApiError> {
    heard(&parts.headers, app, parts.method == Method::POST || parts.method == Method::PUT)?;
    if !is_own_page(&parts.headers) {
        let message = "a page of another site cannot be an operator";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message));
    }
    let peer = parts.extensions.get::<PeerAddr>().map(|peer| peer.0.ip().to_canonical());
    let peer = peer.map_or_else(String::new, |ip: IpAddr| ip.to_string());
    if app.guesses.spent(&peer) {
        let message = "too many wrong tokens from this address";
        return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", message));
    }
    match app.tokens.operator(parts.headers.get(AUTHORIZATION)) {
        Shown::Nothing => {
            // Whoever shows none does not guess.
            if parts.headers.contains_key(AUTHORIZATION) {
                app.guesses.count(&peer);
                tell_guesses(app, &peer);
            }
            let message = "send Authorization: Bearer and an operator's token (THRESHOLD_ADMIN_TOKEN)";
            Err(ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message))
        }
        shown => Ok(shown),
    }
}

/// Says that an address guesses at tokens, once it is no longer heard.
fn tell_guesses(app: &App, peer: &str) {
    if app.guesses.spent(peer) {
        let policy = app.desk.limiter.policy();
        let ip = if policy.identity().log_identifiers { peer.to_owned() } else { policy.key().redact(peer) };
        tracing::warn!(ip, "too many wrong tokens for operators; this address is not heard for a while");
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
