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
    /// Why the policy is not the one that it should be, if it is not.
    policy: ArcSwapOption<String>,
    /// The same of the certificate.
    certificate: ArcSwapOption<String>,
    /// What is wrong with the journal, if anything is.
    journal: ArcSwapOption<String>,
}

impl Health {
    /// How it stands with the policy: what is wrong, or nothing.
    pub(crate) fn policy(&self, trouble: Option<String>) {
        self.policy.store(trouble.map(Arc::new));
    }

    /// How it stands with the certificate: what is wrong, or nothing.
    pub(crate) fn certificate(&self, trouble: Option<String>) {
        self.certificate.store(trouble.map(Arc::new));
    }

    /// How it stands with the journal: what is wrong, or nothing.
    pub(crate) fn journal(&self, trouble: Option<String>) {
        self.journal.store(trouble.map(Arc::new));
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
    let health = &app.health;
    let troubles = [health.policy.load(), health.certificate.load(), health.journal.load()];
    let reasons: Vec<&str> = troubles.iter().filter_map(|reason| Some(reason.as_ref()?.as_str())).collect();
    let status = if reasons.is_empty() { "ok" } else { "degraded" };
    let reason = (!reasons.is_empty()).then(|| reasons.join("; "));
    json(StatusCode::OK, &HealthBody { status, reason })
}
