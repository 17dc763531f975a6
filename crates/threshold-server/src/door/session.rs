//! `/v1/session`: signing in to the dashboard, by a cookie.
//!
//! An operator's token is exchanged for a cookie that scripts cannot read, and that browsers send from pages of this server only. A
//! request with the cookie is treated as one with the token, so that no call knows of sessions.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use axum::extract::{Request, State};
use axum::response::Response;
use http::header::{AUTHORIZATION, CACHE_CONTROL, COOKIE, HOST, ORIGIN, SET_COOKIE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use threshold_core::policy::UserScope;
use threshold_core::{Span, Timestamp};
use threshold_limiter::tower::PeerAddr;
use threshold_wire::{Text, read};

use super::admin::{is_same_origin, is_sent_by_another_site};
use super::json_body::JsonBody;
use super::openapi::{Operation, Schemas, WRONG_HOST, json_content};
use super::routes::{Route, delete, get, post};
use super::{ApiError, App, json};
use crate::serve::OperatorAccess;
use crate::signals::lock;

const PATH: &str = "/v1/session";
/// Followed by the port, if the host has one: browsers send cookies to all ports of a host.
const COOKIE_NAME: &str = "threshold_session";
/// How long a session lasts: a working day.
const LIFETIME: Span = Span::from_secs(12 * 3_600);
/// The most sessions at once. The one that ends first makes room for another.
const MAX_SESSIONS: usize = 256;
/// The hexadecimal digits of a secret.
const SECRET_DIGITS: usize = 64;
/// The largest body: the longest text that the API takes, with every character escaped.
const MAX_BODY: usize = 64 << 10;

/// The sessions of this process. A restart ends them.
#[derive(Default)]
pub(super) struct Sessions(Mutex<HashMap<[u8; 32], Session>>);

/// Prints no token.
impl std::fmt::Debug for Sessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sessions({})", lock(&self.0).len())
    }
}

struct Session {
    /// `Authorization`, as a request with the token would have it.
    authorization: HeaderValue,
    ends: Timestamp,
}

impl Sessions {
    /// Begins a session, and returns its secret.
    fn begin(&self, authorization: HeaderValue, now: Timestamp) -> String {
        let secret: [u8; 32] = rand::random();
        let secret: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut sessions = lock(&self.0);
        sessions.retain(|_, session| session.ends > now);
        if sessions.len() >= MAX_SESSIONS {
            // Of the same token, if it has one: somebody who may only look must not sign operators out.
            let oldest = sessions.iter().min_by_key(|(_, own)| (own.authorization != authorization, own.ends));
            if let Some(oldest) = oldest.map(|(key, _)| *key) {
                sessions.remove(&oldest);
            }
        }
        sessions.insert(key(&secret), Session { authorization, ends: now.plus(LIFETIME) });
        secret
    }

    /// Returns the `Authorization` of a session that has not ended.
    fn find(&self, secret: &str, now: Timestamp) -> Option<HeaderValue> {
        if secret.len() != SECRET_DIGITS {
            return None;
        }
        // Looked up by a hash, so that the time of the comparison tells nothing about the secrets in the table.
        let sessions = lock(&self.0);
        sessions.get(&key(secret)).filter(|session| session.ends > now).map(|session| session.authorization.clone())
    }

    fn end(&self, secret: &str) {
        lock(&self.0).remove(&key(secret));
    }
}

fn key(secret: &str) -> [u8; 32] {
    Sha256::digest(secret).into()
}

/// Gives a request of a signed-in browser the `Authorization` of its session.
///
/// Guards against CSRF: a change must come from a page of this server. The cookie alone does not suffice, although browsers do not send
/// it from other sites: a site may be another port of the same host.
pub(super) fn authorize(app: &App, method: &Method, headers: &mut HeaderMap) {
    if headers.contains_key(AUTHORIZATION) || !headers.contains_key(COOKIE) {
        return;
    }
    let reads = *method == Method::GET || *method == Method::HEAD;
    // Browsers send `Origin` with every change.
    let has_origin = reads || headers.contains_key(ORIGIN);
    if !has_origin || !is_same_origin(headers) || is_sent_by_another_site(headers) {
        return;
    }
    if let Some(authorization) = authorization(app, headers) {
        headers.insert(AUTHORIZATION, authorization);
    }
}

/// Whether a request has a session that has not ended.
pub(super) fn is_signed_in(app: &App, headers: &HeaderMap) -> bool {
    authorization(app, headers).is_some()
}

/// Returns the `Authorization` of a request's session.
pub(super) fn authorization(app: &App, headers: &HeaderMap) -> Option<HeaderValue> {
    secrets(headers).find_map(|secret| app.sessions.find(secret, app.desk.now()))
}

/// Whether a stream may go on: it was not opened by a session, or its session has not ended.
pub(super) fn lasts(app: &App, session: Option<&HeaderMap>) -> bool {
    session.is_none_or(|headers| authorization(app, headers).is_some())
}

/// Returns the headers of a request by which its session is found, if it has one.
pub(super) fn of(app: &App, headers: &HeaderMap) -> Option<HeaderMap> {
    authorization(app, headers)?;
    let names = [COOKIE, HOST];
    // Over HTTP/2 browsers send a field for each cookie.
    let all = |name: HeaderName| headers.get_all(&name).iter().map(move |value| (name.clone(), value.clone()));
    Some(names.into_iter().flat_map(all).collect())
}

/// Returns the secrets in the cookies of this server's name. There may be many: a page of another port of the same host can set any number,
/// and none of them may hide the right one. The bound on heads bounds them.
fn secrets(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let own = cookie_name(headers);
    let cookies = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    let pairs = cookies.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.filter(move |(name, _)| *name == own).map(|(_, value)| value)
}

fn cookie_name(headers: &HeaderMap) -> String {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    // The port of an IPv6 address follows its bracket.
    let port =
        host.rsplit_once(':').map(|(_, port)| port).filter(|port| port.bytes().all(|byte| byte.is_ascii_digit()));
    port.map_or_else(|| COOKIE_NAME.to_owned(), |port| format!("{COOKIE_NAME}_{port}"))
}

/// Whether a browser is signed in, and what its page may show.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Session")]
struct SessionBody {
    /// `operator`, `reader` for a read-only token, or `none` before signing in.
    #[schemars(extend("enum" = ["operator", "reader", "none"]))]
    role: &'static str,
    /// Whether the server has tokens, so that one must sign in.
    sign_in: bool,
    /// Whether the traffic is made up.
    demo: bool,
    /// Whether users belong to tenants, so that operators name them `TENANT/USER`.
    users_of_tenants: bool,
    version: &'static str,
    /// The name of the server; empty before signing in.
    node: String,
}

/// A token to sign in with.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "NewSession")]
struct NewSession<'a> {
    /// `THRESHOLD_ADMIN_TOKEN` or `THRESHOLD_READ_TOKEN`.
    #[serde(borrow)]
    #[schemars(length(min = 1))]
    token: Text<'a>,
}

pub(super) fn routes() -> Vec<Route> {
    vec![
        get(PATH, show, describe_show),
        post(PATH, sign_in, describe_sign_in),
        delete(PATH, sign_out, describe_sign_out),
    ]
}

fn describe(id: &'static str, summary: &'static str, schemas: &mut Schemas) -> Operation {
    let session = json_content(&schemas.of::<SessionBody>());
    Operation::new(id, summary).response(200, "The session", &session).errors(&[WRONG_HOST]).security(json!([]))
}

fn describe_show(schemas: &mut Schemas) -> Operation {
    describe("session", "Whether the browser is signed in to the dashboard", schemas)
}

fn describe_sign_in(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<NewSession<'_>>();
    describe("signIn", "Sign in to the dashboard with an operator's token", schemas).body(body).errors(&[
        (400, "The request is invalid; the message says why, and in which field"),
        (401, "No operator has this token"),
        (408, "The body arrived too slowly"),
        (413, "The body is too large"),
        (415, "The body is not JSON"),
        (429, "Too many wrong tokens came from this address"),
    ])
}

fn describe_sign_out(schemas: &mut Schemas) -> Operation {
    describe("signOut", "Sign out of the dashboard", schemas)
}

async fn show(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let access = app.token_guesses.operator(request.headers().get(AUTHORIZATION), peer(&request), &app)?;
    Ok(answer(&app, &access))
}

async fn sign_in(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    if !is_same_origin(request.headers()) || is_sent_by_another_site(request.headers()) {
        let message = "a web page of another origin cannot sign in";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message));
    }
    let cookie = NewCookie::of(request.headers());
    let peer = peer(&request);
    app.token_guesses.refuse_guessers(peer)?;
    let JsonBody(body) = JsonBody::read_for_anyone(request, &app, MAX_BODY).await?;
    let NewSession { token } = read(&body)?;
    if token.as_str().is_empty() {
        return Err(ApiError::bad("token", "token must not be empty"));
    }
    let authorization = HeaderValue::from_str(&format!("Bearer {}", token.as_str()))
        .map_err(|_| ApiError::bad("token", "has a character that no token has"))?;
    let access = app.token_guesses.operator(Some(&authorization), peer, &app)?;
    match access {
        OperatorAccess::Denied => {
            Err(ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", "no operator has this token"))
        }
        // Without tokens there is nothing to sign in to.
        OperatorAccess::Open => Ok(answer(&app, &access)),
        OperatorAccess::Operator(_) | OperatorAccess::Reader => {
            let secret = app.sessions.begin(authorization, app.desk.now());
            Ok(cookie.on(answer(&app, &access), &secret, LIFETIME.secs_ceil()))
        }
    }
}

fn peer(request: &Request) -> Option<IpAddr> {
    request.extensions().get::<PeerAddr>().map(|peer| peer.0.ip())
}

async fn sign_out(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    if is_same_origin(&headers) {
        secrets(&headers).for_each(|secret| app.sessions.end(secret));
    }
    let access = if app.token_guesses.any_configured() { OperatorAccess::Denied } else { OperatorAccess::Open };
    NewCookie::of(&headers).on(answer(&app, &access), "", 0)
}

/// A cookie that a browser shall keep.
struct NewCookie {
    name: String,
    /// Whether the page was loaded over HTTPS, also where a proxy ends it.
    is_encrypted: bool,
}

impl NewCookie {
    fn of(headers: &HeaderMap) -> Self {
        // Browsers send `Origin` with every change.
        let is_encrypted = headers.get(ORIGIN).is_some_and(|origin| origin.as_bytes().starts_with(b"https://"));
        Self { name: cookie_name(headers), is_encrypted }
    }

    fn on(&self, mut response: Response, secret: &str, seconds: u64) -> Response {
        // Browsers discard a cookie with `Secure` that comes without encryption.
        let secure = if self.is_encrypted { "; Secure" } else { "" };
        let cookie = format!("{}={secret}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}", self.name);
        if let Ok(cookie) = HeaderValue::from_str(&cookie) {
            response.headers_mut().insert(SET_COOKIE, cookie);
        }
        response
    }
}

fn answer(app: &App, access: &OperatorAccess) -> Response {
    let role = match access {
        OperatorAccess::Operator(_) | OperatorAccess::Open => "operator",
        OperatorAccess::Reader => "reader",
        OperatorAccess::Denied => "none",
    };
    let node = if role == "none" { String::new() } else { app.signals.sinks.node.name.to_string() };
    let sign_in = app.token_guesses.any_configured();
    let body = SessionBody {
        role,
        sign_in,
        users_of_tenants: app.desk.policy().identity().user_scope == UserScope::Tenant,
        demo: app.is_demo.load(std::sync::atomic::Ordering::Relaxed),
        version: env!("CARGO_PKG_VERSION"),
        node,
    };
    let mut response = json(StatusCode::OK, &body);
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn token(number: usize) -> HeaderValue {
        HeaderValue::from_str(&format!("Bearer token-{number}")).unwrap()
    }

    /// Woken by leaving out the comparison with `ends`, or `end`.
    #[test]
    fn a_session_has_the_access_of_its_token_until_it_ends() {
        let sessions = Sessions::default();
        let (first, second) = (sessions.begin(token(1), NOW), sessions.begin(token(2), NOW));
        assert_eq!((first.len(), first == second), (64, false));
        assert_eq!(sessions.find(&first, NOW), Some(token(1)));
        assert_eq!(sessions.find(&second, NOW), Some(token(2)));
        assert_eq!(sessions.find("", NOW), None);
        assert_eq!(sessions.find(first.split_at(63).0, NOW), None);
        sessions.end(&first);
        assert_eq!(sessions.find(&first, NOW), None);
        let last = NOW.plus(LIFETIME);
        assert_eq!(sessions.find(&second, last), None);
    }

    /// Woken by leaving out `retain`, or the removal of the first.
    #[test]
    fn sessions_are_bounded_and_the_oldest_makes_room() {
        let sessions = Sessions::default();
        let at = |number: usize| NOW.plus(Span::from_secs(number.try_into().unwrap()));
        let secrets: Vec<String> = (0..=MAX_SESSIONS).map(|number| sessions.begin(token(number), at(number))).collect();
        assert_eq!(lock(&sessions.0).len(), MAX_SESSIONS);
        assert_eq!(sessions.find(&secrets[0], NOW), None);
        assert!(sessions.find(&secrets[1], NOW).is_some());
        // One token signs out its own sessions, and not those of another.
        sessions.begin(token(7), at(MAX_SESSIONS + 1));
        assert_eq!(sessions.find(&secrets[7], NOW), None);
        assert!(sessions.find(&secrets[1], NOW).is_some());
        sessions.begin(token(0), NOW.plus(LIFETIME).plus(LIFETIME));
        assert_eq!(lock(&sessions.0).len(), 1, "those that have ended are forgotten");
    }

    #[test]
    fn the_secret_is_found_among_other_cookies() {
        let find = |host: &'static str, text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(COOKIE, HeaderValue::from_static(text));
            headers.insert(HOST, HeaderValue::from_static(host));
            secrets(&headers).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(find("h", "a=b; threshold_session=abc; c=d"), ["abc"]);
        assert_eq!(find("h", "xthreshold_session=abc"), [""; 0]);
        assert_eq!(find("h", "threshold_session"), [""; 0]);
        // Each port has a cookie of its own, and one that a page of another port has set does not hide the right one.
        let two = "threshold_session_81=other; threshold_session_80=false; threshold_session_80=abc";
        assert_eq!(find("h:80", two), ["false", "abc"]);
        assert_eq!(find("[::1]:81", two), ["other"]);
        assert_eq!(find("[::1]", two), [""; 0]);
        let many = (0..300).map(|number| format!("threshold_session={number}; ")).collect::<String>();
        assert_eq!(
            find("h", Box::leak((many + "threshold_session=abc").into())).last().map(String::as_str),
            Some("abc")
        );
    }
}
