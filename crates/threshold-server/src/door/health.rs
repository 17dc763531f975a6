//! `/healthz` and `/readyz`: liveness and readiness. Both need no token; details are only for requests with one.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use axum::extract::{FromRequestParts, State};
use axum::response::Response;
use http::StatusCode;
use http::header::AUTHORIZATION;
use http::request::Parts;
use schemars::JsonSchema;
use serde::Serialize;
use threshold_limiter::tower::PeerAddr;
use tokio::sync::watch;

use super::openapi::{Operation, Schemas, WRONG_HOST, json_content};
use super::routes::{Route, get};
use super::{App, json};
use crate::metrics::Metrics;

/// The state that `/readyz` reports.
#[derive(Debug, Default)]
pub(crate) struct Health {
    draining: watch::Sender<bool>,
    /// Why the policy file could not be loaded.
    policy: ArcSwapOption<Problem>,
    /// Why files of tenants could not be loaded.
    tenants: ArcSwapOption<Problem>,
    /// Why the keys that verify JWTs could not be loaded.
    keys: ArcSwapOption<Problem>,
    /// Why the TLS certificate could not be loaded.
    certificate: ArcSwapOption<Problem>,
    /// Why clients refuse the certificate in use: it is expired or not yet valid.
    validity: ArcSwapOption<Problem>,
    /// When the certificate in use expires, in Unix seconds; `None` without a certificate.
    expiry: ArcSwapOption<i64>,
    /// Why the journal is not written, or was damaged.
    journal: ArcSwapOption<Problem>,
    /// Why the store that several nodes share does not answer.
    store: ArcSwapOption<Problem>,
}

/// A problem, as everyone may read it and in full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Without file names and without text of files.
    pub(crate) public: String,
    /// For the log, and for requests with a token.
    pub(crate) details: String,
}

impl Problem {
    /// A problem whose public text is the same but for the paths of these files.
    pub(crate) fn hiding(details: String, paths: &[impl AsRef<Path>]) -> Self {
        // To split by an empty text would separate all characters.
        let paths = paths.iter().map(|path| path.as_ref().display().to_string()).filter(|path| !path.is_empty());
        let public = paths.fold(details.clone(), |text, path| hide(&text, &path));
        Self { public, details }
    }
}

/// Replaces a path in a text, and also the path of a file beside it whose name begins with it, such as a damaged copy.
fn hide(text: &str, path: &str) -> String {
    let mut parts = text.split(path);
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        // A full stop at the end of a sentence is not the beginning of an extension.
        let beside = part.strip_prefix('.').filter(|rest| rest.starts_with(|c: char| c.is_ascii_alphanumeric()));
        let (name, rest) = match beside {
            Some(rest) => {
                ("a file beside it", rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '-'))
            }
            None => ("the file", part),
        };
        shown.push_str(name);
        shown.push_str(rest);
    }
    shown
}

impl Health {
    /// Sets the problem of the policy; `None` clears it.
    pub(crate) fn set_policy(&self, problem: Option<Problem>) {
        self.policy.store(problem.map(Arc::new));
    }

    /// Sets the problem of the tenants' files; `None` clears it.
    pub(crate) fn set_tenants(&self, problem: Option<Problem>) {
        self.tenants.store(problem.map(Arc::new));
    }

    /// Sets the problem of the keys that verify JWTs; `None` clears it.
    pub(crate) fn set_keys(&self, problem: Option<Problem>) {
        self.keys.store(problem.map(Arc::new));
    }

    /// Sets the problem of loading the certificate; `None` clears it.
    pub(crate) fn set_certificate(&self, problem: Option<Problem>) {
        self.certificate.store(problem.map(Arc::new));
    }

    /// Sets why clients refuse the certificate in use; `None` clears it.
    pub(crate) fn set_validity(&self, problem: Option<Problem>) {
        self.validity.store(problem.map(Arc::new));
    }

    /// Sets when the certificate in use expires, in Unix seconds.
    pub(crate) fn set_expiry(&self, expires: Option<i64>) {
        self.expiry.store(expires.map(Arc::new));
    }

    /// Sets the problem of the journal; `None` clears it.
    pub(crate) fn set_journal(&self, problem: Option<Problem>) {
        self.journal.store(problem.map(Arc::new));
    }

    /// Sets the problem of the shared store; `None` clears it.
    pub(crate) fn set_store(&self, problem: Option<Problem>) {
        self.store.store(problem.map(Arc::new));
    }

    /// Brings the metrics of files up to date.
    pub(super) fn update(&self, metrics: &Metrics) {
        let files = [
            ("policy", &self.policy),
            ("tenants", &self.tenants),
            ("keys", &self.keys),
            ("certificate", &self.certificate),
        ];
        for (file, problem) in files {
            metrics.set_reload_failed(file, problem.load().is_some());
        }
        metrics.set_certificate_expiry(self.expiry.load().as_deref().copied());
    }

    /// Returns all problems of this moment.
    pub(super) fn problems(&self) -> Vec<Arc<Problem>> {
        let files = [&self.policy, &self.tenants, &self.keys, &self.certificate];
        let problems = files.into_iter().chain([&self.validity, &self.journal, &self.store]);
        problems.filter_map(ArcSwapOption::load_full).collect()
    }

    /// Returns whether the server is draining.
    pub(crate) fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Marks the server as draining: it accepts no more connections.
    pub(crate) fn set_draining(&self) {
        self.draining.send_replace(true);
    }

    /// Waits until the server drains.
    pub(crate) async fn until_draining(&self) {
        // The sender is a field of this.
        let _ = self.draining.subscribe().wait_for(|draining| *draining).await;
    }
}

/// The health of the server.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Health")]
struct HealthBody {
    #[schemars(extend("enum" = ["ok", "degraded", "draining"]))]
    status: &'static str,
    /// Why the server is degraded; in full for requests with a token.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// Whether a request that needs no token has a valid one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Viewer {
    Anonymous,
    Authenticated,
}

impl FromRequestParts<Arc<App>> for Viewer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Infallible> {
        let peer = parts.extensions.get::<PeerAddr>().map(|peer| peer.0.ip());
        let is_known = app.token_guesses.is_known(parts.headers.get(AUTHORIZATION), peer, app).await;
        Ok(if is_known { Self::Authenticated } else { Self::Anonymous })
    }
}

pub(super) fn routes() -> Vec<Route> {
    vec![
        get("/healthz", alive, |schemas| describe(schemas, "healthz", "Whether the server is alive")),
        get("/readyz", ready, |schemas| {
            describe(schemas, "readyz", "Whether the server is ready, degraded or draining")
        }),
    ]
}

fn describe(schemas: &mut Schemas, id: &'static str, summary: &'static str) -> Operation {
    let health = json_content(&schemas.of::<HealthBody>());
    Operation::new(id, summary)
        .response(200, "The server works, or is degraded", &health)
        .response(503, "The server is about to stop", &health)
        .errors(&[WRONG_HOST])
        .security(serde_json::json!([]))
}

async fn alive() -> Response {
    json(StatusCode::OK, &HealthBody { status: "ok", reason: None })
}

/// A degraded server answers 200: it decides by the last good policy, and to take it out of service would not help.
async fn ready(State(app): State<Arc<App>>, viewer: Viewer) -> Response {
    // Before the problems: a load balancer must stop sending requests, whatever else is wrong.
    if app.health.is_draining() {
        return json(StatusCode::SERVICE_UNAVAILABLE, &HealthBody { status: "draining", reason: None });
    }
    // All of them are shown. One may hide the cause of another, as a full disk does.
    let shown = |problem: Arc<Problem>| match viewer {
        Viewer::Anonymous => problem.public.clone(),
        Viewer::Authenticated => problem.details.clone(),
    };
    let reasons: Vec<String> = app.health.problems().into_iter().map(shown).collect();
    let status = if reasons.is_empty() { "ok" } else { "degraded" };
    let reason = (!reasons.is_empty()).then(|| reasons.join("; "));
    json(StatusCode::OK, &HealthBody { status, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file beside the journal once appeared as `the file.damaged-1794794439965074`.
    #[test]
    fn the_public_text_of_a_problem_names_no_path() {
        let check =
            |details: &str, expect: &str| assert_eq!(Problem::hiding(details.to_owned(), &["/d/t.db"]).public, expect);
        check("cannot read /d/t.db: no", "cannot read the file: no");
        check("/d/t.db is cut; see /d/t.db.damaged-17, or not", "the file is cut; see a file beside it, or not");
        check("look at /d/t.db. Then go on", "look at the file. Then go on");
        check("nothing", "nothing");
    }

    /// Woken by a file under the name of another, and by a gauge that stays when the problem is over.
    #[test]
    fn a_file_that_cannot_be_loaded_is_a_metric() {
        type Set = fn(&Health, Option<Problem>);
        let files: [(&str, Set); 4] = [
            ("policy", Health::set_policy),
            ("tenants", Health::set_tenants),
            ("keys", Health::set_keys),
            ("certificate", Health::set_certificate),
        ];
        let (health, metrics) = (Health::default(), Metrics::new());
        let failed = || {
            health.update(&metrics);
            let text = metrics.text();
            let lines = text.lines().filter_map(|line| line.strip_prefix("threshold_reload_failed{file=\""));
            let lines: Vec<(&str, &str)> = lines.filter_map(|line| line.split_once("\"} ")).collect();
            assert_eq!(lines.len(), files.len(), "{text}");
            lines.into_iter().filter(|(_, value)| *value == "1").map(|(file, _)| file.to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(failed(), Vec::<String>::new());
        for (file, set) in files {
            set(&health, Some(Problem::hiding("no".to_owned(), &[""])));
            assert_eq!(failed(), [file]);
            set(&health, None);
        }
        assert_eq!(failed(), Vec::<String>::new());
    }
}
