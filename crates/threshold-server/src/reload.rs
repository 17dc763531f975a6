//! Puts changed files in force while the server runs: the policy, the keys that its tokens are verified with, and the
//! certificate with its key. What cannot be used is reported, and the old one stays.

mod watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use threshold_core::policy::{Finding, Policy};
use threshold_limiter::jwt::Verifier;

use crate::door::{App, Trouble};
use crate::jwt::{self, TokenKeys};
use crate::serve::Certificates;
use crate::serve::offers;
use crate::source::Source;
use watch::{Contents, Found, Watch};

/// How often files are looked at. A change must be there twice, so it is in force a second after it was written.
const EVERY: Duration = Duration::from_millis(500);

/// How many errors of a policy are told to everyone.
const MAX_CODES: usize = 3;

/// Watches the files that a server was started with.
pub(crate) struct Reloader {
    app: Arc<App>,
    /// Whether a policy that limits nobody may be put in force.
    allow_empty: bool,
    watched: Vec<Watched>,
}

/// Files that are read together, and what for.
struct Watched {
    paths: Vec<PathBuf>,
    watch: Watch,
    kind: Kind,
}

enum Kind {
    Policy,
    Certificate(Arc<Certificates>),
    /// The keys of the policy in force.
    Keys(Arc<Verifier>),
}

impl Reloader {
    /// Watches nothing yet. `allow_empty` says whether a policy that limits nobody may be put in force.
    pub(crate) fn new(app: Arc<App>, allow_empty: bool) -> Self {
        Self { app, allow_empty, watched: Vec::new() }
    }

    /// Watches a policy, of which this is in force.
    pub(crate) fn watch_policy(&mut self, path: PathBuf, text: String) {
        let watch = Watch::new(&Ok(vec![text.into_bytes()]));
        self.watched.push(Watched { paths: vec![path], watch, kind: Kind::Policy });
    }

    /// Watches the files of a certificate and its key, of which these are in force.
    pub(crate) fn watch_certificate(&mut self, certificates: Arc<Certificates>, files: [Vec<u8>; 2]) {
        certificates.tell_validity(SystemTime::now(), &self.app.health);
        let (paths, watch) = (certificates.paths().to_vec(), Watch::new(&Ok(files.into())));
        self.watched.push(Watched { paths, watch, kind: Kind::Certificate(certificates) });
    }

    /// Watches the file of keys that the policy in force names, and no other.
    pub(crate) fn watch_keys(&mut self, keys: Option<TokenKeys>) {
        self.watched.retain(|watched| !matches!(watched.kind, Kind::Keys(_)));
        let Some(TokenKeys { verifier, contents: Some(contents) }) = keys else { return };
        let Some(path) = verifier.key_file().map(Path::to_owned) else { return };
        let watch = Watch::new(&Ok(vec![contents]));
        self.watched.push(Watched { paths: vec![path], watch, kind: Kind::Keys(verifier) });
    }

    /// Looks at the files once, half a second from now. Dropped at any moment, it leaves nothing half done.
    pub(crate) async fn look(&mut self) {
        tokio::time::sleep(EVERY).await;
        let mut renewed = None;
        for watched in &mut self.watched {
            if watched.is_replaced(renewed.as_ref()) {
                continue;
            }
            let (paths, seen) = (watched.paths.clone(), watched.watch.trusted());
            // A file system may take its time, and requests shall not wait for it.
            let found = tokio::task::spawn_blocking(move || Found::unless(&paths, seen.as_deref())).await;
            if let Ok(Some(found)) = found
                && let Some(contents) = watched.watch.take(found, SystemTime::now())
            {
                renewed = watched.load(&contents, &self.app, self.allow_empty).or(renewed);
            }
            if let Kind::Certificate(certificates) = &watched.kind {
                certificates.tell_validity(SystemTime::now(), &self.app.health);
            }
        }
        self.take_over(renewed);
    }

    /// Loads all files now, changed or not.
    pub(crate) async fn now(&mut self) {
        let mut renewed = None;
        for watched in &mut self.watched {
            if watched.is_replaced(renewed.as_ref()) {
                continue;
            }
            let paths = watched.paths.clone();
            if let Ok(contents) = tokio::task::spawn_blocking(move || watch::read(&paths)).await {
                watched.watch = Watch::new(&contents);
                renewed = watched.load(&contents, &self.app, self.allow_empty).or(renewed);
            }
        }
        self.take_over(renewed);
    }

    /// Another policy is in force, with keys of its own.
    fn take_over(&mut self, renewed: Option<NewPolicy>) {
        if let Some(NewPolicy { keys }) = renewed {
            self.watch_keys(keys);
        }
    }
}

impl Watched {
    /// Whether these are keys of a policy that another one has just replaced.
    fn is_replaced(&self, renewed: Option<&NewPolicy>) -> bool {
        renewed.is_some() && matches!(self.kind, Kind::Keys(_))
    }

    /// Puts what was read in force, or says why not.
    fn load(&self, contents: &Contents, app: &App, allow_empty: bool) -> Option<NewPolicy> {
        let files = contents.as_deref().map_err(Clone::clone);
        match &self.kind {
            Kind::Policy => {
                let [path] = self.paths.as_slice() else { return None };
                let text = files.map(<[Vec<u8>]>::concat);
                return load_policy(path, text, app, allow_empty);
            }
            Kind::Keys(verifier) => {
                let contents = files.map(<[Vec<u8>]>::concat);
                let loaded = contents.and_then(|key| jwt::load(verifier, &key).map_err(jwt::describe));
                let trouble =
                    loaded.as_ref().err().map(|error| format!("the keys of tokens are not in force: {error}"));
                app.health.keys(trouble.map(|full| Trouble::hiding(full, &self.paths)));
                match &loaded {
                    Ok(()) => tracing::info!("new keys of tokens are in force"),
                    Err(error) => tracing::error!("the old keys of tokens stay: {error}"),
                }
            }
            Kind::Certificate(certificates) => {
                let loaded = files.and_then(|files| certificates.load(files).map_err(|error| format!("{error:#}")));
                let trouble = loaded.as_ref().err().map(|error| format!("the certificate is not in force: {error}"));
                app.health.certificate(trouble.map(|full| Trouble::hiding(full, &self.paths)));
                certificates.tell_validity(SystemTime::now(), &app.health);
                match &loaded {
                    Ok(()) => tracing::info!(certificate = %certificates, "a new certificate is in force"),
                    Err(error) => tracing::error!(certificate = %certificates, "the old certificate stays: {error}"),
                }
            }
        }
        None
    }
}

/// A policy was put in force.
struct NewPolicy {
    keys: Option<TokenKeys>,
}

fn load_policy(path: &Path, bytes: Result<Vec<u8>, String>, app: &App, allow_empty: bool) -> Option<NewPolicy> {
    let name = path.display().to_string();
    match usable(path, bytes, &app.desk.policy(), allow_empty) {
        Ok((policy, keys)) => {
            if policy.memory() != app.desk.policy().memory() {
                tracing::warn!(policy = name, "[memory] changed: that takes effect when the server starts again");
            }
            let (rules, is_empty) = (policy.rules().len(), policy.is_empty());
            let generation = app.desk.swap(policy);
            app.health.policy(None);
            app.health.keys(None);
            tracing::info!(policy = name, rules, generation, "a new policy is in force");
            offers::warn(&app.desk.policy());
            if is_empty {
                tracing::warn!(policy = name, "the policy has no rules: nobody is limited");
            }
            Some(NewPolicy { keys })
        }
        Err(Trouble { open, full }) => {
            let said = |text: &str| format!("the policy file is not in force: {text}");
            app.health.policy(Some(Trouble { open: said(&open), full: said(&full) }));
            tracing::error!(policy = name, "the old policy stays in force: {full}");
            None
        }
    }
}

/// A policy that may take the place of the one in force, or why it may not.
fn usable(
    path: &Path,
    bytes: Result<Vec<u8>, String>,
    in_force: &Policy,
    allow_empty: bool,
) -> Result<(Policy, Option<TokenKeys>), Trouble> {
    let bytes = bytes.map_err(|error| Trouble::hiding(error, &[path]))?;
    let source = Source::from_bytes(path, bytes).map_err(|error| Trouble::hiding(format!("{error:#}"), &[path]))?;
    let policy = source.policy_or_errors().map_err(|errors| {
        let full = format!("the policy cannot be used\n{}", source.render(&errors));
        Trouble { open: codes(&errors, &source.text), full }
    })?;
    if let Some(text) = offers::refuses(&policy) {
        return Err(Trouble { open: "a rule asks for more than the store offers".to_owned(), full: text });
    }
    // A file that was emptied or cut is a policy, too. One for logins alone never had rules.
    let loses_rules = policy.rules().is_empty() && !in_force.rules().is_empty();
    if (policy.is_empty() || loses_rules) && !allow_empty {
        let text = "no-rules: it would limit nobody any more (--allow-empty accepts that)".to_owned();
        return Err(Trouble { open: text.clone(), full: text });
    }
    jwt::attach(policy)
        .map_err(|error| Trouble { open: "a key of tokens cannot be used".to_owned(), full: jwt::describe(error) })
}

/// What errors there are and in which lines, and nothing that the file says there.
fn codes(errors: &[Finding], source: &str) -> String {
    let codes = errors.iter().take(MAX_CODES).map(|error| format!("{} in line {}", error.code, error.place(source).0));
    let more = errors.len().saturating_sub(MAX_CODES);
    let more = (more > 0).then(|| format!("{more} more"));
    codes.chain(more).collect::<Vec<_>>().join(", ")
}
