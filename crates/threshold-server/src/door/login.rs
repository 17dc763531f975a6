//! Login protection over HTTP: an attempt before a secret is checked, and its result afterwards.
//!
//! The changes that a result makes are on disk before it is answered.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::header::RETRY_AFTER;
use http::{HeaderValue, StatusCode};
use threshold_limiter::LoginError;
use threshold_wire::{AttemptAnswer, AttemptBody, ErrorBody, ResultAnswer, ResultBody};

use super::forward_auth::traced;
use super::json_body::JsonBody;
use super::openapi::{Operation, Schemas, json_content};
use super::routes::{Route, post};
use super::{ApiError, App, json};
use crate::desk::new_trace;

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
    let body = AttemptBody::read(&body)?;
    let trace = new_trace();
    let answer = AttemptAnswer::from(app.desk.login_attempt(&body.request(), trace).await?);
    let status = if answer.status() == 200 { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
    let mut response = json(status, &answer);
    if let Some(wait) = answer.retry_after() {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(wait));
    }
    Ok(traced(response, trace))
}

async fn result(State(app): State<Arc<App>>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    let body = ResultBody::read(&body)?;
    let ended = app.desk.login_result(body.attempt(), body.success()).await?.ok_or_else(ApiError::not_saved)?;
    Ok(json(StatusCode::OK, &ResultAnswer::from(ended)).into_response())
}

impl From<LoginError> for ApiError {
    fn from(error: LoginError) -> Self {
        threshold_wire::ApiError::from(error).into()
    }
}
