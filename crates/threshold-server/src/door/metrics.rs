//! `GET /metrics`: what Prometheus scrapes. Any token of this server opens it, if there is one.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};

use super::health::Asker;
use super::{ApiError, App};

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/metrics", get(metrics))
}

async fn metrics(State(app): State<Arc<App>>, asker: Asker) -> Result<Response, ApiError> {
    if app.tokens.are_some() && asker == Asker::Anyone {
        let message = "send Authorization: Bearer and a token of this server";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message));
    }
    let mut response = Response::new(app.desk.metrics.text().into());
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}
