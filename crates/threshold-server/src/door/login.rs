//! Login protection over HTTP: an attempt before a secret is checked, and its result afterwards.
//!
//! The changes that a result makes are on disk before it is answered.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::header::RETRY_AFTER;
use http::{HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::Span;
use threshold_limiter::api::{Address, ErrorBody, Text, read};
use threshold_limiter::{Attempted, LoginError, LoginRequest, LoginResult};

use super::json_body::JsonBody;
use super::openapi::{Operation, Schemas, json_content};
use super::routes::{Route, post};
use super::{ApiError, App, json};

/// A login whose secret is about to be checked.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "LoginAttempt")]
struct AttemptBody<'a> {
    /// The account's name, in any spelling.
    #[serde(borrow)]
    account: Option<Text<'a>>,
    /// The client's address.
    ip: Address,
    /// The kind of secret that is tried; a password by default.
    #[serde(borrow)]
    factor: Option<Text<'a>>,
    /// The device token from the client's cookie.
    #[serde(borrow)]
    device: Option<Text<'a>>,
    /// The user as bans and penalties name them; the account's name by default.
    #[serde(borrow)]
    user: Option<Text<'a>>,
    /// The tenant. With `user_scope = "tenant"` each tenant has accounts of its own.
    #[serde(borrow)]
    tenant: Option<Text<'a>>,
}

/// The result of a login attempt.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "LoginResult")]
struct ResultBody<'a> {
    /// The token that the attempt was answered with.
    #[serde(borrow)]
    attempt: Text<'a>,
    /// Whether the secret was right.
    success: bool,
}

/// The answer to an attempt.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "LoginAttemptAnswer")]
struct AttemptAnswer {
    /// Whether to check the secret.
    allowed: bool,
    /// The token to send the result with.
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<String>,
    /// The seconds until this client may try again.
    #[serde(skip_serializing_if = "Option::is_none")]
    lockout_remaining: Option<u64>,
    /// Why the attempt was refused: `too_many_requests`, `account_locked` or `banned`.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    /// The same in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'static str>,
}

/// The answer to a result.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "LoginResultAnswer")]
struct ResultAnswer {
    /// Whether the client is logged in: the secret was right, and the attempt counted.
    success: bool,
    /// Whether the account takes another attempt of this client now.
    may_retry: bool,
    /// The seconds until the account takes another attempt of this client.
    #[serde(skip_serializing_if = "Option::is_none")]
    lockout_remaining: Option<u64>,
    /// The new device token, for a cookie that is `__Host-`, `HttpOnly`, `Secure` and `SameSite=Lax`.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
}

pub(super) fn routes() -> Vec<Route> {
    vec![post("/v1/login/attempt", attempt, describe_attempt), post("/v1/login/result", result, describe_result)]
}

fn describe_attempt(schemas: &mut Schemas) -> Operation {
    let (body, login) = (schemas.of::<AttemptBody<'_>>(), schemas.of::<AttemptAnswer>());
    let refused = serde_json::json!({"anyOf": [login, schemas.of::<ErrorBody>()]});
    Operation::call("loginAttempt", "Ask, before a secret is checked, whether to check it", &login)
        .body(body)
        .response(429, "Do not check the secret; or too many wrong tokens", &json_content(&refused))
        .errors(&[(503, "The store is full or cannot answer, and logins fail closed")])
}

fn describe_result(schemas: &mut Schemas) -> Operation {
    let (body, login) = (schemas.of::<ResultBody<'_>>(), schemas.of::<ResultAnswer>());
    Operation::call("loginResult", "Report, after a secret was checked, whether it was right", &login)
        .body(body)
        .errors(&[
            (404, "The attempt is unknown, already ended, or older than a minute"),
            (503, "The result is not on disk yet (`not_saved`), or the store cannot answer"),
        ])
}

async fn attempt(State(app): State<Arc<App>>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    let AttemptBody { account, ip, factor, device, user, tenant } = read(&body)?;
    let request = LoginRequest {
        account: account.as_ref().map(Text::as_str),
        // Required here, unlike in the library: without an address, one client could try the passwords of all
        // accounts.
        ip: Some(ip.0),
        factor: factor.as_ref().map(Text::as_str),
        device: device.as_ref().map(Text::as_str),
        user: user.as_ref().map(Text::as_str),
        tenant: tenant.as_ref().map(Text::as_str),
    };
    let refusal = match app.desk.login_attempt(&request).await? {
        Attempted::Allowed(attempt) => {
            let body = AttemptAnswer { allowed: true, attempt: Some(attempt), ..AttemptAnswer::default() };
            return Ok(json(StatusCode::OK, &body));
        }
        Attempted::Refused(refusal) => refusal,
    };
    let wait = refusal.retry_after_secs();
    let body = AttemptAnswer {
        lockout_remaining: wait,
        error: Some(refusal.code()),
        message: Some(refusal.message()),
        ..AttemptAnswer::default()
    };
    let mut response = json(StatusCode::TOO_MANY_REQUESTS, &body);
    if let Some(wait) = wait {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(wait));
    }
    Ok(response)
}

async fn result(State(app): State<Arc<App>>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    let ResultBody { attempt, success } = read(&body)?;
    let ended = app.desk.login_result(attempt.as_str(), success).await?.ok_or_else(ApiError::not_saved)?;
    let LoginResult { success, may_retry, lockout_remaining, device } = ended;
    let lockout_remaining = lockout_remaining.map(seconds);
    let body = ResultAnswer { success, may_retry, lockout_remaining, device };
    Ok(json(StatusCode::OK, &body).into_response())
}

/// Rounds up to whole seconds, at least one: a client that retries after them must not be refused for being early.
fn seconds(wait: Duration) -> u64 {
    Span::from(wait).secs_ceil().max(1)
}

impl From<LoginError> for ApiError {
    fn from(error: LoginError) -> Self {
        let message = error.to_string();
        match error {
            LoginError::NotOurs => Self::bad("attempt", message),
            LoginError::NoAccount => Self::bad(
                "account",
                "the account has no visible characters; leave the field out if a login has no account",
            ),
            // With `user_scope = "tenant"` the same name is another account in each tenant.
            LoginError::WhoseAccount => Self::bad("account", message),
            LoginError::UnknownAttempt => {
                Self::new(StatusCode::NOT_FOUND, "unknown_attempt", message).about(Some("attempt".to_owned()))
            }
            LoginError::Store(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message),
            _ => Self::new(StatusCode::BAD_REQUEST, "bad_request", message),
        }
    }
}
