//! `GET /metrics`: the metrics for Prometheus. Any token of the server is accepted; without configured tokens none is needed.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};
use serde_json::json;

use super::health::Viewer;
use super::openapi::{Operation, Schemas, WRONG_HOST};
use super::routes::{Route, get};
use super::{ApiError, App};

pub(super) fn routes() -> Vec<Route> {
    vec![get("/metrics", metrics, describe)]
}

fn describe(_: &mut Schemas) -> Operation {
    let text = json!({"application/openmetrics-text": {"schema": {"type": "string"}}});
    Operation::new("metrics", "The metrics for Prometheus")
        .response(200, "OpenMetrics text", &text)
        .errors(&[(401, "The server has tokens, and the request has none of them"), WRONG_HOST])
}

async fn metrics(State(app): State<Arc<App>>, viewer: Viewer) -> Result<Response, ApiError> {
    // Names of rules and the volume of traffic are not for everyone. Any token will do, because a scraper needs no
    // more than to read.
    if app.tokens.any_configured() && viewer == Viewer::Anonymous {
        let message = "send Authorization: Bearer with a token of this server";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message));
    }
    let mut response = Response::new(app.metrics_text().into());
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}
