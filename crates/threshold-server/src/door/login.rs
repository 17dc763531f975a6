//! Login over HTTP: asked before a secret is checked, told afterwards. What a result changes is on disk before it is told.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use http::header::RETRY_AFTER;
use http::{HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::Span;
use threshold_limiter::{Attempted, LoginError, LoginRequest};

use super::http::{Address, Text, read};
use super::sent::Sent;
use super::{ApiError, App, json};

/// A login whose secret is about to be checked.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "LoginAttempt")]
pub(super) struct AttemptBody<'a> {
    /// The account's name, in any spelling.
    #[serde(borrow)]
    account: Option<Text<'a>>,
    /// The client's address.
    ip: Address,
    /// Which secret is tried: a password, unless said.
    #[serde(borrow)]
    factor: Option<Text<'a>>,
    /// The device token that the client showed.
    #[serde(borrow)]
    device: Option<Text<'a>>,
    /// Whose account it is, as bans and penalties name them; the account's own name, unless said.
    #[serde(borrow)]
    user: Option<Text<'a>>,
    /// The tenant whose login it is. Where users belong to tenants, each has accounts of its own.
    #[serde(borrow)]
    tenant: Option<Text<'a>>,
}

/// How a login went.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "LoginResult")]
pub(super) struct ResultBody<'a> {
    /// What the attempt was given.
    #[serde(borrow)]
    attempt: Text<'a>,
    /// Whether the secret was right.
    success: bool,
}

/// What becomes of a login.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Login")]
pub(super) struct LoginBody {
    /// Before: whether to check the secret. After: whether the client is in, or may try again.
    allowed: bool,
    /// What to tell the result with.
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<String>,
    /// For how many seconds this client is kept from trying.
    #[serde(skip_serializing_if = "Option::is_none")]
    lockout_remaining: Option<u64>,
    /// By what this device is known from now on, for a cookie that is `__Host-`, `HttpOnly`, `Secure` and `SameSite=Lax`.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    /// Why not: `too_many_requests`, `account_locked` or `banned`.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    /// The same, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'static str>,
}

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/v1/login/attempt", post(attempt)).route("/v1/login/result", post(result))
}

async fn attempt(State(app): State<Arc<App>>, Sent(body): Sent) -> Result<Response, ApiError> {
    let AttemptBody { account, ip, factor, device, user, tenant } = read(&body)?;
    let request = LoginRequest {
        account: account.as_ref().map(Text::as_str),
        ip: Some(ip.0),
        factor: factor.as_ref().map(Text::as_str),
        device: device.as_ref().map(Text::as_str),
        user: user.as_ref().map(Text::as_str),
        tenant: tenant.as_ref().map(Text::as_str),
    };
    let refusal = match app.desk.login_attempt(&request).await? {
        Attempted::Allowed(attempt) => {
            let body = LoginBody { allowed: true, attempt: Some(attempt), ..LoginBody::default() };
            return Ok(json(StatusCode::OK, &body));
        }
        Attempted::Refused(refusal) => refusal,
    };
    let wait = refusal.retry_after.map(seconds);
    let body = LoginBody {
        lockout_remaining: wait,
        error: Some(refusal.code()),
        message: Some(refusal.message()),
        ..LoginBody::default()
    };
    let mut response = json(StatusCode::TOO_MANY_REQUESTS, &body);
    if let Some(wait) = wait {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(wait));
    }
    Ok(response)
}

async fn result(State(app): State<Arc<App>>, Sent(body): Sent) -> Result<Response, ApiError> {
    let ResultBody { attempt, success } = read(&body)?;
    let ended = app.desk.login_result(attempt.as_str(), success).await?.ok_or_else(ApiError::not_saved)?;
    let lockout_remaining = ended.lockout_remaining.map(seconds);
    let body = LoginBody { allowed: ended.allowed, lockout_remaining, device: ended.device, ..LoginBody::default() };
    Ok(json(StatusCode::OK, &body).into_response())
}

/// Whole seconds, at least one: nobody is told to come back at once and then refused.
fn seconds(span: Span) -> u64 {
    span.secs_ceil().max(1)
}

impl From<LoginError> for ApiError {
    fn from(error: LoginError) -> Self {
        let message = error.to_string();
        match error {
            LoginError::NotOurs => Self::bad("attempt", message),
            LoginError::NoAccount => {
                Self::bad("account", "an account has a name that can be seen; leave it out where a login names none")
            }
            LoginError::WhoseAccount => Self::bad("account", message),
            LoginError::UnknownAttempt => {
                Self::new(StatusCode::NOT_FOUND, "unknown_attempt", message).about(Some("attempt".to_owned()))
            }
            LoginError::Store(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message),
            _ => Self::new(StatusCode::BAD_REQUEST, "bad_request", message),
        }
    }
}
