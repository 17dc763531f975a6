//! The errors of the HTTP API as responses: those of operations, and header fields beside the body.

use std::borrow::Cow;

use axum::response::{IntoResponse, Response};
use http::header::{CONNECTION, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};
use threshold_core::PlanError;
use threshold_limiter::bans::TooManyBans;
use threshold_limiter::store::StoreError;
use threshold_wire::ErrorBody;

use super::json;
use crate::desk::OperationError;

/// An error with its HTTP status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) body: ErrorBody,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, body: threshold_wire::ApiError::new(status.as_u16(), code, message).body }
    }

    /// 400 `bad_request`, about one field.
    pub(crate) fn bad(field: impl Into<String>, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message).about(Some(field.into()))
    }

    /// 503 `not_saved`: a change is in effect, but not on disk yet. The journal goes on trying to write it.
    pub(crate) fn not_saved() -> Self {
        let message =
            "the change is in effect but could not be saved in time; it is lost if the server ends before it is";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_saved", message)
    }

    /// 503 `not_recorded`: nothing was changed, because the queue of audit records is full.
    fn not_recorded() -> Self {
        let message = "nothing was changed: the audit is full of records that wait for the disk";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_recorded", message)
    }

    /// Sets the field that the error is about.
    pub(crate) fn about(self, field: Option<String>) -> Self {
        Self { body: self.body.about(field), ..self }
    }

    /// Sets the index of the item in a list.
    pub(crate) fn at(self, index: Option<usize>) -> Self {
        Self { body: self.body.at(index), ..self }
    }
}

impl From<threshold_wire::ApiError> for ApiError {
    fn from(error: threshold_wire::ApiError) -> Self {
        // The module writes statuses as numbers, because it serves hosts without the crate `http`.
        let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self { status, body: error.body }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        threshold_wire::ApiError::from(error).into()
    }
}

impl From<PlanError> for ApiError {
    fn from(error: PlanError) -> Self {
        threshold_wire::ApiError::from(error).into()
    }
}

impl From<OperationError> for ApiError {
    fn from(error: OperationError) -> Self {
        match error {
            OperationError::Invalid { field, message } => Self::bad(field, message),
            OperationError::UnknownBan => {
                Self::new(StatusCode::NOT_FOUND, "unknown_ban", "the ban is unknown or already ended")
            }
            OperationError::AmbiguousBan(bans) => {
                let message = format!("more than one ban has an id that begins so: {}", bans.join(", "));
                Self::new(StatusCode::CONFLICT, "ambiguous_ban", message).about(Some("id".to_owned()))
            }
            OperationError::UnknownDigest => {
                let message = "nobody with this digest is known: the names of callers are kept on the node that denied, warned or \
                               struck them, for an hour after the last time; give the name, or a digest of a newer event; \
                               a name that looks like a digest is written with one more #";
                Self::new(StatusCode::NOT_FOUND, "unknown_digest", message).about(Some("key".to_owned()))
            }
            OperationError::AmbiguousDigest(callers) => {
                let message = format!("more than one caller has this digest, name the tenant: {}", callers.join(", "));
                Self::new(StatusCode::CONFLICT, "ambiguous_digest", message).about(Some("key".to_owned()))
            }
            OperationError::InvalidEntry { index, message } => Self::bad("bans", message).at(Some(index)),
            OperationError::NoJournal => {
                let message = "this server has no journal (--no-db), and so no audit; its log has the same lines";
                Self::new(StatusCode::NOT_FOUND, "no_journal", message)
            }
            OperationError::AuditUnreadable => {
                let message = "the audit could not be read; the server's log says why";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
            }
            OperationError::TooManyBans => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "too_many_bans", TooManyBans.to_string())
            }
            OperationError::TooManySettings => {
                let message = "there are too many settings; remove one first";
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "too_many_settings", message)
            }
            OperationError::Store(error) => error.into(),
            OperationError::NotRecorded => Self::not_recorded(),
            OperationError::NotSaved => Self::not_saved(),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json(self.status, &self.body);
        let headers = response.headers_mut();
        match self.status {
            // RFC 9110 requires a challenge with every 401.
            StatusCode::UNAUTHORIZED => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"threshold\""));
            }
            // Only guessed tokens are answered with this status: a denied request is a 200 with a decision.
            StatusCode::TOO_MANY_REQUESTS => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static(super::token_guesses::RETRY_AFTER_SECS));
            }
            // Memory for answers or for request ids is full, and is free again as soon as others are done; or the store does not
            // answer, such as for a login, which fails closed. What is in effect and not saved must not be sent again.
            StatusCode::SERVICE_UNAVAILABLE
                if matches!(self.body.code(), "busy" | "too_many_request_ids" | "unavailable") =>
            {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            // The rest of the body is not read, so the connection cannot be used for another request.
            StatusCode::REQUEST_TIMEOUT | StatusCode::PAYLOAD_TOO_LARGE => {
                headers.insert(CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}
