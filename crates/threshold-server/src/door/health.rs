//! Whether the server lives, and whether it does all that it should. Open to everyone; details are for those with a token.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwapOption;
use axum::Router;
use axum::extract::{FromRequestParts, State};
use axum::response::Response;
use axum::routing::get;
use http::StatusCode;
use http::header::AUTHORIZATION;
use http::request::Parts;
use schemars::JsonSchema;
use serde::Serialize;
use threshold_limiter::tower::PeerAddr;

use super::{App, json};

/// How the server stands.
#[derive(Debug, Default)]
pub(crate) struct Health {
    draining: AtomicBool,
    /// Why the policy is not the one that it should be, if it is not.
    policy: ArcSwapOption<Trouble>,
    /// The same of the keys that tokens are verified with.
    keys: ArcSwapOption<Trouble>,
    /// The same of the certificate.
    certificate: ArcSwapOption<Trouble>,
    /// Why clients do not accept the certificate in force, if they do not.
    validity: ArcSwapOption<Trouble>,
    /// What is wrong with the journal, if anything is.
    journal: ArcSwapOption<Trouble>,
}

/// What is wrong, in two versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// For everyone: it names no files, and quotes none.
    pub(crate) open: String,
    /// For the log, and for those who show a token.
    pub(crate) full: String,
}

impl Trouble {
    /// The same for everyone, but for the paths of these files.
    pub(crate) fn hiding(full: String, paths: &[impl AsRef<Path>]) -> Self {
        let paths = paths.iter().map(|path| path.as_ref().display().to_string()).filter(|path| !path.is_empty());
        let open = paths.fold(full.clone(), |text, path| hide(&text, &path));
        Self { open, full }
    }
}

/// A text without a path, or the name of a file beside it that begins as it does.
fn hide(text: &str, path: &str) -> String {
    let mut parts = text.split(path);
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let beside = part.strip_prefix('.').filter(|rest| rest.starts_with(|c: char| c.is_ascii_alphanumeric()));
        let (name, rest) = match beside {
            Some(rest) => ("one beside it", rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '-')),
            None => ("the file", part),
        };
        shown.push_str(name);
        shown.push_str(rest);
    }
    shown
}

impl Health {
    /// How it stands with the policy: what is wrong, or nothing.
    pub(crate) fn policy(&self, trouble: Option<Trouble>) {
        self.policy.store(trouble.map(Arc::new));
    }

    /// How it stands with the keys that tokens are verified with: what is wrong, or nothing.
    pub(crate) fn keys(&self, trouble: Option<Trouble>) {
        self.keys.store(trouble.map(Arc::new));
    }

    /// How it stands with the certificate: what is wrong, or nothing.
    pub(crate) fn certificate(&self, trouble: Option<Trouble>) {
        self.certificate.store(trouble.map(Arc::new));
    }

    /// Whether clients accept the certificate in force: why they do not, or nothing.
    pub(crate) fn validity(&self, trouble: Option<Trouble>) {
        self.validity.store(trouble.map(Arc::new));
    }

    /// How it stands with the journal: what is wrong, or nothing.
    pub(crate) fn journal(&self, trouble: Option<Trouble>) {
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
    /// Why it is degraded; with a token in full.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// Who asks how the server stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asker {
    Anyone,
    /// Somebody with a token of this server.
    Known,
}

impl FromRequestParts<Arc<App>> for Asker {
    type Rejection = Infallible;

    /// A wrong token is counted here as everywhere, and otherwise the same as none: this path is open.
    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Infallible> {
        let shown = parts.headers.get(AUTHORIZATION).filter(|_| app.tokens.are_some());
        let Some(shown) = shown else { return Ok(Self::Anyone) };
        if app.tokens.know_any(shown) {
            return Ok(Self::Known);
        }
        let peer = parts.extensions.get::<PeerAddr>().map(|peer| peer.0.ip());
        let _ = app.guesses.caller(peer, app).await;
        Ok(Self::Anyone)
    }
}

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/healthz", get(alive)).route("/readyz", get(ready))
}

async fn alive() -> Response {
    json(StatusCode::OK, &HealthBody { status: "ok", reason: None })
}

/// Degraded is still 200: it decides by the last good policy, and taking it out of service would help nobody.
async fn ready(State(app): State<Arc<App>>, asker: Asker) -> Response {
    if app.health.draining.load(Ordering::Relaxed) {
        return json(StatusCode::SERVICE_UNAVAILABLE, &HealthBody { status: "draining", reason: None });
    }
    let health = &app.health;
    let troubles = [&health.policy, &health.keys, &health.certificate, &health.validity, &health.journal];
    let troubles = troubles.map(ArcSwapOption::load);
    let told = |trouble: &Arc<Trouble>| match asker {
        Asker::Anyone => trouble.open.clone(),
        Asker::Known => trouble.full.clone(),
    };
    let reasons: Vec<String> = troubles.iter().filter_map(|trouble| trouble.as_ref().map(told)).collect();
    let status = if reasons.is_empty() { "ok" } else { "degraded" };
    let reason = (!reasons.is_empty()).then(|| reasons.join("; "));
    json(StatusCode::OK, &HealthBody { status, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file beside the journal was told as `the file.damaged-1794794439965074`.
    #[test]
    fn no_path_is_told_to_everyone() {
        let check = |full: &str, expect: &str| assert_eq!(Trouble::hiding(full.to_owned(), &["/d/t.db"]).open, expect);
        check("cannot read /d/t.db: no", "cannot read the file: no");
        check("/d/t.db is cut; see /d/t.db.damaged-17, or not", "the file is cut; see one beside it, or not");
        check("look at /d/t.db. Then go on", "look at the file. Then go on");
        check("nothing", "nothing");
    }
}
