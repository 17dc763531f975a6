//! What a caller reads when a request cannot be answered: which field, and why.

use std::borrow::Cow;

use axum::response::{IntoResponse, Response};
use http::header::{CONNECTION, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::PlanError;
use threshold_core::policy::CostOf;
use threshold_limiter::bans::TooManyBans;
use threshold_limiter::store::StoreError;

use super::json;
use crate::desk::Refused;

/// An answer that is no decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) body: ErrorBody,
}

/// Why a request was not answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "Error")]
pub(crate) struct ErrorBody {
    /// A name that does not change.
    error: &'static str,
    /// What is wrong, for people.
    message: Cow<'static, str>,
    /// The field it is about, if it is about one.
    field: Option<String>,
    /// In a list: the item, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, error: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, body: ErrorBody { error, message: message.into(), field: None, index: None } }
    }

    /// 400, about one field.
    pub(crate) fn bad(field: impl Into<String>, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message).about(Some(field.into()))
    }

    /// 503: something was changed, and is not on disk. It holds in memory, and is written as soon as that can be done.
    pub(crate) fn not_saved() -> Self {
        let message = "this could not be written down in time; it holds until the server ends, and is still tried";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_saved", message)
    }

    /// 503: nothing was changed, because the audit has no room for what would be.
    fn not_recorded() -> Self {
        let message = "nothing was changed: too much waits for the disk already, and this could not be written down";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_recorded", message)
    }

    pub(crate) fn about(mut self, field: Option<String>) -> Self {
        self.body.field = field;
        self
    }

    /// The same, about one item of a list.
    pub(crate) fn at(mut self, index: Option<usize>) -> Self {
        self.body.index = index;
        self
    }
}

impl ErrorBody {
    /// What is wrong, for people.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The name of the error.
    #[cfg(test)]
    pub(crate) fn name(&self) -> &str {
        self.error
    }

    /// The field it is about.
    #[cfg(test)]
    pub(crate) fn field(&self) -> Option<&str> {
        self.field.as_deref()
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", error.to_string())
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Invalid { field, message } => Self::bad(field, message),
            Refused::UnknownBan => {
                Self::new(StatusCode::NOT_FOUND, "unknown_ban", "there is no such ban, or no longer")
            }
            Refused::TooManyBans => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "too_many_bans", TooManyBans.to_string())
            }
            Refused::TooManySettings => {
                let message = "there are too many settings already";
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "too_many_settings", message)
            }
            Refused::Store(error) => error.into(),
            Refused::NotRecorded => Self::not_recorded(),
            Refused::NotSaved => Self::not_saved(),
        }
    }
}

impl From<PlanError> for ApiError {
    fn from(error: PlanError) -> Self {
        let message = error.to_string();
        match error {
            PlanError::CostExceedsLimit { cost_of, .. } => {
                let field = match cost_of {
                    CostOf::Requests => "cost".to_owned(),
                    CostOf::Bytes => "bytes".to_owned(),
                    CostOf::Named(name) => format!("costs.{name}"),
                };
                Self::new(StatusCode::BAD_REQUEST, "cost_exceeds_limit", message).about(Some(field))
            }
            PlanError::Missing { field, .. } => Self::bad(field, message),
            // The policy's mistake, which its caller cannot mend.
            PlanError::TooManyRules => Self::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_rules", message),
            PlanError::Path(_) => Self::bad("path", message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json(self.status, &self.body);
        let headers = response.headers_mut();
        match self.status {
            StatusCode::UNAUTHORIZED => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"threshold\""));
            }
            // Tokens that were guessed at; nothing else is refused for coming too often.
            StatusCode::TOO_MANY_REQUESTS => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static(super::guesses::GUESS_AGAIN_AFTER));
            }
            // There is no room just now.
            StatusCode::SERVICE_UNAVAILABLE if matches!(self.body.error, "busy" | "too_many_request_ids") => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            // What is left of such a body is not worth reading.
            StatusCode::REQUEST_TIMEOUT | StatusCode::PAYLOAD_TOO_LARGE => {
                headers.insert(CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}
