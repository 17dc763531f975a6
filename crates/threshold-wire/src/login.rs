//! `/v1/login/attempt` and `/v1/login/result`: a login before its secret is checked, and afterwards.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use threshold_core::Span;
use threshold_core::lockout::{Attempted, LoginRequest, LoginResult};

use super::names::Address;
use super::read::read;
use super::text::Text;
use super::{ApiError, to_json};
use threshold_limiter::LoginError;

/// A login whose secret is about to be checked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema), schemars(rename = "LoginAttempt"))]
pub struct AttemptBody<'a> {
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
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema), schemars(rename = "LoginResult"))]
pub struct ResultBody<'a> {
    /// The token that the attempt was answered with.
    #[serde(borrow)]
    attempt: Text<'a>,
    /// Whether the secret was right.
    success: bool,
}

/// The answer to an attempt.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema), schemars(rename = "LoginAttemptAnswer"))]
pub struct AttemptAnswer {
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
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema), schemars(rename = "LoginResultAnswer"))]
pub struct ResultAnswer {
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

impl<'a> AttemptBody<'a> {
    /// Parses a body.
    ///
    /// # Errors
    /// 400 if a field is unknown or not valid, or if there is no address.
    pub fn read(body: &'a [u8]) -> Result<Self, ApiError> {
        read(body)
    }

    /// Returns the login.
    #[must_use]
    pub fn request(&self) -> LoginRequest<'_> {
        let Self { account, ip, factor, device, user, tenant } = self;
        let [account, factor, device, user, tenant] =
            [account, factor, device, user, tenant].map(|text| text.as_ref().map(Text::as_str));
        // The address is required here, unlike in the library: without it, one client could try the passwords of all accounts.
        LoginRequest { account, ip: Some(ip.0), factor, device, user, tenant }
    }
}

impl<'a> ResultBody<'a> {
    /// Parses a body.
    ///
    /// # Errors
    /// 400 if a field is unknown, missing or not valid.
    pub fn read(body: &'a [u8]) -> Result<Self, ApiError> {
        read(body)
    }

    /// Returns the token of the attempt.
    #[must_use]
    pub fn attempt(&self) -> &str {
        self.attempt.as_str()
    }

    /// Returns whether the secret was right.
    #[must_use]
    pub fn success(&self) -> bool {
        self.success
    }
}

impl AttemptAnswer {
    /// Returns the status: 200 where the secret may be checked, else 429.
    #[must_use]
    pub fn status(&self) -> u16 {
        if self.allowed { 200 } else { 429 }
    }

    /// Returns the value of `Retry-After`; `None` where the secret may be checked, and where waiting does not help.
    #[must_use]
    pub fn retry_after(&self) -> Option<u64> {
        self.lockout_remaining
    }

    /// Encodes the answer.
    #[must_use]
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

impl From<Attempted> for AttemptAnswer {
    fn from(attempted: Attempted) -> Self {
        match attempted {
            Attempted::Allowed(attempt) => Self { allowed: true, attempt: Some(attempt), ..Self::default() },
            Attempted::Refused(refusal) => Self {
                lockout_remaining: refusal.retry_after_secs(),
                error: Some(refusal.code()),
                message: Some(refusal.message()),
                ..Self::default()
            },
        }
    }
}

impl ResultAnswer {
    /// Encodes the answer.
    #[must_use]
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

impl From<LoginResult> for ResultAnswer {
    fn from(ended: LoginResult) -> Self {
        // Rounded up to whole seconds, at least one: a client that retries after them must not be refused for being early.
        let seconds = |wait: Duration| Span::from(wait).secs_ceil().max(1);
        let LoginResult { success, may_retry, lockout_remaining, device } = ended;
        Self { success, may_retry, lockout_remaining: lockout_remaining.map(seconds), device }
    }
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
            LoginError::UnknownAttempt => Self::new(404, "unknown_attempt", message).about(Some("attempt".to_owned())),
            LoginError::Store(error) => error.into(),
            // `NoLogin`, and what a later version adds: the caller's request cannot be served.
            _ => Self::new(400, "bad_request", message),
        }
    }
}
