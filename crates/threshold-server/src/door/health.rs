//! Whether the server lives, and whether it does all that it should. Open to everyone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwapOption;
use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;

use super::{App, json};

/// How the server stands.
#[derive(Debug, Default)]
pub(crate) struct Health {
    draining: AtomicBool,
    /// Why it does less than it should, if it does.
    trouble: ArcSwapOption<String>,
}

impl Health {
    /// From now on it does less than it should.
    pub(crate) fn degrade(&self, reason: String) {
        self.trouble.store(Some(Arc::new(reason)));
    }

    /// All is well again.
    pub(crate) fn recover(&self) {
        self.trouble.store(None);
    }

    /// It takes no new connections any more.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }
}

/// How the server stands.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Health")]
pub(crate) struct HealthBody {
    #[schemars(extend("enum" = ["ok", "degraded", "draining"]))]
    status: &'static str,
    /// Why it is degraded.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/healthz", get(alive)).route("/readyz", get(ready))
}

async fn alive() -> Response {
    json(StatusCode::OK, &HealthBody { status: "ok", reason: None })
}

/// Degraded is still 200: it decides by the last good policy, and taking it out of service would help nobody.
async fn ready(State(app): State<Arc<App>>) -> Response {
    if app.health.draining.load(Ordering::Relaxed) {
        return json(StatusCode::SERVICE_UNAVAILABLE, &HealthBody { status: "draining", reason: None });
    }
    let trouble = app.health.trouble.load();
    let (status, reason) = match trouble.as_deref() {
        None => ("ok", None),
        Some(reason) => ("degraded", Some(reason.clone())),
    };
    json(StatusCode::OK, &HealthBody { status, reason })
}
