//! The errors of the HTTP API: a status, a stable code, a message and the field it is about.

use std::borrow::Cow;

use serde::Serialize;
use threshold_core::PlanError;
use threshold_core::policy::CostOf;
use threshold_core::text::printable;

use threshold_limiter::store::StoreError;

const BAD_REQUEST: u16 = 400;
const SERVICE_UNAVAILABLE: u16 = 503;

/// An error with its HTTP status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// The HTTP status.
    pub status: u16,
    /// The body.
    pub body: ErrorBody,
}

/// The body of an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema), schemars(rename = "Error"))]
pub struct ErrorBody {
    /// A stable code for programs.
    error: &'static str,
    /// The error in words.
    message: Cow<'static, str>,
    /// The field that the error is about, if any.
    field: Option<String>,
    /// The index of the item in a list, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
}

impl ApiError {
    /// An error with a status, a stable code and a message.
    #[must_use]
    pub fn new(status: u16, code: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, body: ErrorBody { error: code, message: message.into(), field: None, index: None } }
    }

    /// 400 `bad_request`, about one field.
    #[must_use]
    pub fn bad(field: impl Into<String>, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(BAD_REQUEST, "bad_request", message).about(Some(field.into()))
    }

    /// 400 `bad_request`, about a field that the server takes and this host does not: `what` is the part of the API that is
    /// missing here.
    #[must_use]
    pub fn not_served(field: &'static str, what: &str) -> Self {
        Self::bad(field, format!("{what} is served by `threshold serve` only: leave out {field}"))
    }

    /// Sets the field that the error is about.
    #[must_use]
    pub fn about(self, field: Option<String>) -> Self {
        Self { body: self.body.about(field), ..self }
    }

    /// Sets the index of the item in a list.
    #[must_use]
    pub fn at(self, index: Option<usize>) -> Self {
        Self { body: self.body.at(index), ..self }
    }

    /// Encodes the body.
    #[must_use]
    pub fn to_json(&self) -> String {
        to_json(&self.body)
    }
}

impl ErrorBody {
    /// Sets the field that the error is about.
    #[must_use]
    pub fn about(self, field: Option<String>) -> Self {
        Self { field, ..self }
    }

    /// Sets the index of the item in a list.
    #[must_use]
    pub fn at(self, index: Option<usize>) -> Self {
        Self { index, ..self }
    }

    /// Returns the error in words.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.error
    }

    /// Returns the field that the error is about.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        self.field.as_deref()
    }
}

/// Encodes a body. It may quote a client's text and be printed to a terminal, so control characters are written as JSON
/// escapes, which does not change the value.
#[must_use]
pub fn to_json<T: Serialize>(body: &T) -> String {
    let text = serde_json::to_string(body).unwrap_or_default();
    match printable(&text) {
        Cow::Borrowed(_) => text,
        Cow::Owned(escaped) => escaped,
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let message = match error {
            // What was charged for a refused request is withdrawn. Any other change stays.
            StoreError::Timeout => format!("{error}; a change may have been made all the same"),
            _ => error.to_string(),
        };
        Self::new(SERVICE_UNAVAILABLE, "unavailable", message)
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
                Self::new(BAD_REQUEST, "cost_exceeds_limit", message).about(Some(field))
            }
            PlanError::Missing { field, .. } => Self::bad(field, message),
            // A mistake of the policy, which the caller cannot correct: therefore not 400.
            PlanError::TooManyRules => Self::new(SERVICE_UNAVAILABLE, "too_many_rules", message),
            PlanError::Path(_) => Self::bad("path", message),
        }
    }
}
