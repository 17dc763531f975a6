//! Puts changed files in force while the server runs: the policy, and the certificate with its key. What cannot be used is
//! reported, and the old one stays.

mod watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::door::App;
use crate::serve::Certificates;
use crate::source::Source;
use watch::{Contents, Found, Watch};

/// How often files are looked at. A change must be there twice, so it is in force a second after it was written.
const EVERY: Duration = Duration::from_millis(500);

/// Watches the files that a server was started with.
pub(crate) struct Reloader {
    app: Arc<App>,
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
}

impl Reloader {
    /// Watches nothing yet.
    pub(crate) fn new(app: Arc<App>) -> Self {
        Self { app, watched: Vec::new() }
    }

    /// Watches a policy, of which this is in force.
    pub(crate) fn watch_policy(&mut self, path: PathBuf, text: String) {
        let watch = Watch::new(&Ok(vec![text.into_bytes()]));
        self.watched.push(Watched { paths: vec![path], watch, kind: Kind::Policy });
    }

    /// Watches the files of a certificate and its key, of which these are in force.
    pub(crate) fn watch_certificate(&mut self, certificates: Arc<Certificates>, files: [Vec<u8>; 2]) {
        let (paths, watch) = (certificates.paths().to_vec(), Watch::new(&Ok(files.into())));
        self.watched.push(Watched { paths, watch, kind: Kind::Certificate(certificates) });
    }

    /// Looks at the files once, half a second from now. Dropped at any moment, it leaves nothing half done.
    pub(crate) async fn look(&mut self) {
        tokio::time::sleep(EVERY).await;
        for watched in &mut self.watched {
            let (paths, seen) = (watched.paths.clone(), watched.watch.trusted());
            // A file system may take its time, and requests shall not wait for it.
            let found = tokio::task::spawn_blocking(move || Found::unless(&paths, seen.as_deref())).await;
            if let Ok(Some(found)) = found
                && let Some(contents) = watched.watch.take(found, SystemTime::now())
            {
                watched.load(&contents, &self.app);
            }
        }
    }

    /// Loads all files now, changed or not.
    pub(crate) async fn now(&mut self) {
        for watched in &mut self.watched {
            let paths = watched.paths.clone();
            if let Ok(contents) = tokio::task::spawn_blocking(move || watch::read(&paths)).await {
                watched.watch = Watch::new(&contents);
                watched.load(&contents, &self.app);
            }
        }
    }
}

impl Watched {
    /// Puts what was read in force, or says why not.
    fn load(&self, contents: &Contents, app: &App) {
        let files = contents.as_deref().map_err(Clone::clone);
        match &self.kind {
            Kind::Policy => {
                let [path] = self.paths.as_slice() else { return };
                let text = files.map(<[Vec<u8>]>::concat);
                load_policy(path, text, app);
            }
            Kind::Certificate(certificates) => {
                let loaded = files.and_then(|files| certificates.load(files).map_err(|error| format!("{error:#}")));
                match &loaded {
                    Ok(()) => tracing::info!(certificate = %certificates, "a new certificate is in force"),
                    Err(error) => tracing::error!(certificate = %certificates, "the old certificate stays: {error}"),
                }
                app.health.certificate(loaded.err().map(|error| format!("the certificate is not in force: {error}")));
            }
        }
    }
}

fn load_policy(path: &Path, bytes: Result<Vec<u8>, String>, app: &App) {
    let name = path.display().to_string();
    let parsed = bytes.and_then(|bytes| {
        let policy = Source::from_bytes(path, bytes).and_then(|source| source.policy());
        policy.map_err(|error| format!("{error:#}"))
    });
    match parsed {
        Ok(policy) => {
            if policy.memory() != app.desk.limiter.policy().memory() {
                tracing::warn!(policy = name, "[memory] changed: that takes effect when the server starts again");
            }
            let rules = policy.rules().len();
            let generation = app.desk.swap(policy);
            app.health.policy(None);
            tracing::info!(policy = name, rules, generation, "a new policy is in force");
            if rules == 0 {
                tracing::warn!(policy = name, "the policy has no rules: nobody is limited");
            }
        }
        Err(error) => {
            app.health.policy(Some(format!("the policy file is not in force: {error}")));
            tracing::error!(policy = name, "the old policy stays in force: {error}");
        }
    }
}
