//! Reloads changed files while the server runs: the policy, the limits of tenants, the keys that verify JWTs, and the TLS
//! certificate.
//!
//! If a file cannot be used, the error is logged and set in `/readyz`, and the present contents stay in force.

mod tenants;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use threshold_core::policy::{Finding, Policy};
use threshold_limiter::files::Trust;
use threshold_wire::jwt::Verifier;

use crate::door::{App, Problem};
use crate::jwt::{self, TokenKeys};
use crate::serve::Certificates;
use crate::serve::policy_notes;
pub(crate) use tenants::TenantFolder;
use threshold_rehearsal::source::{Source, Tenants as TenantNames, changes, joined};
use watch::{Contents, Found, Watch};

/// How often files are checked. A change must be seen twice, so it is in force about a second after it was written.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// How many errors of a policy are in the public reason of `/readyz`.
const MAX_CODES: usize = 3;
/// How many changes of a policy are in the log line of a reload.
const MAX_CHANGES: usize = 8;

/// Watches the files that a server was started with.
pub(crate) struct Reloader {
    app: Arc<App>,
    /// Whether a policy without rules may be loaded.
    allow_empty: bool,
    watched: Vec<Watched>,
    tenants: Option<Tenants>,
}

/// The limits of tenants, and the policy that they are put above.
struct Tenants {
    /// Shared with the thread that reads the files, which goes on if a signal interrupts a check.
    folder: Arc<Mutex<TenantFolder>>,
    /// The policy of the file.
    policy: Policy,
}

/// Files that are loaded together, and their kind.
struct Watched {
    paths: Vec<PathBuf>,
    watch: Watch,
    kind: Kind,
}

enum Kind {
    /// The text of the policy in force.
    Policy(String),
    Certificate(Arc<Certificates>),
    /// The keys of the policy in force.
    Keys(Arc<Verifier>),
}

impl Reloader {
    /// A reloader that watches nothing yet. `allow_empty` allows a policy without rules.
    pub(crate) fn new(app: Arc<App>, allow_empty: bool) -> Self {
        Self { app, allow_empty, watched: Vec::new(), tenants: None }
    }

    /// Watches a policy file whose present text is in force.
    pub(crate) fn watch_policy(&mut self, path: PathBuf, text: String) {
        let watch = Watch::new(&Ok(vec![text.clone().into_bytes()]));
        self.watched.push(Watched { paths: vec![path], watch, kind: Kind::Policy(text) });
    }

    /// Watches a folder of tenants whose limits are in force above this policy.
    pub(crate) fn watch_tenants(&mut self, folder: TenantFolder, policy: Policy) {
        self.app.health.set_tenants(folder.problem());
        self.tenants = Some(Tenants { folder: Arc::new(Mutex::new(folder)), policy });
    }

    /// Watches the files of a certificate and its key, whose present contents are in force.
    pub(crate) fn watch_certificate(&mut self, certificates: Arc<Certificates>, files: [Vec<u8>; 2]) {
        certificates.report_validity(SystemTime::now(), &self.app.health);
        let (paths, watch) = (certificates.paths().to_vec(), Watch::new(&Ok(files.into())));
        self.watched.push(Watched { paths, watch, kind: Kind::Certificate(certificates) });
    }

    /// Watches the key file of the policy in force, in place of that of an earlier policy.
    pub(crate) fn watch_keys(&mut self, keys: Option<TokenKeys>) {
        // The new policy may have no keys, or keys in another file. A change of the old file must then do nothing.
        self.watched.retain(|watched| !matches!(watched.kind, Kind::Keys(_)));
        // A key in the policy itself has no file of its own, and changes with the policy.
        let Some(TokenKeys { verifier, contents: Some(contents) }) = keys else { return };
        let Some(path) = verifier.key_file().map(Path::to_owned) else { return };
        let watch = Watch::new(&Ok(vec![contents]));
        self.watched.push(Watched { paths: vec![path], watch, kind: Kind::Keys(verifier) });
    }

    /// Checks the files once, half a second from now.
    ///
    /// It may be cancelled: each file is compared and loaded without an `await` between, and SIGHUP, which cancels it, is
    /// followed by [`reload_all`](Self::reload_all).
    pub(crate) async fn check(&mut self) {
        tokio::time::sleep(CHECK_INTERVAL).await;
        let mut renewed = None;
        for watched in &mut self.watched {
            // The policy is first in the list. The new one has read its keys itself, and the old ones are not used
            // any more.
            if watched.is_replaced(renewed.as_ref()) {
                continue;
            }
            let (paths, trust, seen) = (watched.paths.clone(), watched.trust(), watched.watch.trusted());
            // On a blocking thread: a network file system may take long, and must not delay requests.
            let found = tokio::task::spawn_blocking(move || Found::unless(&paths, trust, seen.as_deref())).await;
            if let Ok(Some(found)) = found
                && let Some(contents) = watched.watch.take(found, SystemTime::now())
            {
                renewed = watched.load(&contents, (&self.app, self.tenants.as_mut()), self.allow_empty).or(renewed);
            }
            // At every check, also if the files are unchanged: a certificate expires by itself.
            if let Kind::Certificate(certificates) = &watched.kind {
                certificates.report_validity(SystemTime::now(), &self.app.health);
            }
        }
        // After the loop, which borrows the list that this changes.
        self.watch_new_keys(renewed);
        self.read_tenants(|folder| folder.check(SystemTime::now())).await;
    }

    /// Loads all files now, changed or not (SIGHUP).
    pub(crate) async fn reload_all(&mut self) {
        let mut renewed = None;
        for watched in &mut self.watched {
            if watched.is_replaced(renewed.as_ref()) {
                continue;
            }
            let (paths, trust) = (watched.paths.clone(), watched.trust());
            if let Ok(contents) = tokio::task::spawn_blocking(move || watch::read(&paths, trust)).await {
                // Before the load and whatever its result: contents that are refused now must not be refused again
                // half a second later.
                watched.watch = Watch::new(&contents);
                renewed = watched.load(&contents, (&self.app, self.tenants.as_mut()), self.allow_empty).or(renewed);
            }
        }
        self.watch_new_keys(renewed);
        self.read_tenants(TenantFolder::reload).await;
    }

    /// Reads the tenants' folder, and puts the limits in force if they have changed.
    async fn read_tenants(&mut self, read: impl FnOnce(&mut TenantFolder) + Send + 'static) {
        let Some(tenants) = &mut self.tenants else { return };
        let folder = Arc::clone(&tenants.folder);
        let read = tokio::task::spawn_blocking(move || {
            let mut folder = lock(&folder);
            read(&mut folder);
            folder.has_changed()
        });
        // What an interrupted check has read is marked as changed, and put in force by the next one.
        if let Ok(true) = read.await {
            let mut policy = tenants.policy.clone();
            let count = tenants.apply(&mut policy, &self.app);
            let generation = self.app.desk.reload_policy(policy);
            tracing::info!(tenants = count, generation, "tenants' limits reloaded");
        }
    }

    /// Watches the keys of a policy that was just loaded.
    fn watch_new_keys(&mut self, renewed: Option<NewPolicy>) {
        if let Some(NewPolicy { keys }) = renewed {
            self.watch_keys(keys);
        }
    }
}

impl Watched {
    /// What is demanded of the files, at the start and now.
    const fn trust(&self) -> Trust {
        match self.kind {
            Kind::Policy(_) => Trust::Settings,
            Kind::Certificate(_) | Kind::Keys(_) => Trust::Keys,
        }
    }

    /// Whether these are keys of a policy that was just replaced.
    fn is_replaced(&self, renewed: Option<&NewPolicy>) -> bool {
        renewed.is_some() && matches!(self.kind, Kind::Keys(_))
    }

    /// Puts the contents in force, or reports why not. Returns the policy's keys if a policy was loaded.
    fn load(
        &mut self,
        contents: &Contents,
        (app, tenants): (&App, Option<&mut Tenants>),
        allow_empty: bool,
    ) -> Option<NewPolicy> {
        let files = contents.as_deref().map_err(Clone::clone);
        match &mut self.kind {
            Kind::Policy(in_force) => {
                let [path] = self.paths.as_slice() else { return None };
                let text = files.map(<[Vec<u8>]>::concat);
                let (renewed, text) = load_policy((path, in_force), text, (app, tenants), allow_empty)?;
                *in_force = text;
                return Some(renewed);
            }
            Kind::Keys(verifier) => {
                let contents = files.map(<[Vec<u8>]>::concat);
                let loaded = contents.and_then(|key| jwt::load(verifier, &key).map_err(jwt::describe));
                let problem = loaded.as_ref().err().map(|error| format!("the JWT keys could not be reloaded: {error}"));
                app.health.set_keys(problem.map(|details| Problem::hiding(details, &self.paths)));
                match &loaded {
                    Ok(()) => tracing::info!("JWT keys reloaded"),
                    Err(error) => tracing::error!(%error, "JWT keys not reloaded: the old ones stay in force"),
                }
            }
            Kind::Certificate(certificates) => {
                let loaded = files.and_then(|files| certificates.load(files).map_err(|error| format!("{error:#}")));
                let problem =
                    loaded.as_ref().err().map(|error| format!("the certificate could not be reloaded: {error}"));
                app.health.set_certificate(problem.map(|details| Problem::hiding(details, &self.paths)));
                certificates.report_validity(SystemTime::now(), &app.health);
                match &loaded {
                    Ok(()) => tracing::info!(certificate = %certificates, "certificate reloaded"),
                    Err(error) => {
                        tracing::error!(certificate = %certificates, %error, "certificate not reloaded: the old one stays");
                    }
                }
            }
        }
        None
    }
}

impl Tenants {
    /// Puts the limits of tenants above a policy, and reports those that cannot be used. Returns the number of tenants.
    fn apply(&self, policy: &mut Policy, app: &App) -> usize {
        let mut folder = lock(&self.folder);
        let count = folder.apply(policy);
        app.health.set_tenants(folder.problem());
        count
    }
}

fn lock(folder: &Mutex<TenantFolder>) -> MutexGuard<'_, TenantFolder> {
    // Each file is updated as a whole, so that a panic leaves nothing half changed.
    folder.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The keys of a policy that was just loaded.
struct NewPolicy {
    keys: Option<TokenKeys>,
}

/// Puts a policy in force, or reports why not. Returns its keys and its text.
fn load_policy(
    (path, in_force): (&Path, &str),
    bytes: Result<Vec<u8>, String>,
    (app, tenants): (&App, Option<&mut Tenants>),
    allow_empty: bool,
) -> Option<(NewPolicy, String)> {
    let name = path.display().to_string();
    match usable(path, bytes, &app.desk.policy(), allow_empty) {
        Ok((mut policy, keys, text)) => {
            // The store was allocated at the start, and its balances are not moved.
            if policy.memory() != app.desk.policy().memory() {
                tracing::warn!(policy = name, "change of [memory] takes effect at the next start");
            }
            // Read before the policy is moved into the desk, where settings may be put on top of it.
            let (rules, is_empty) = (policy.rules().len(), policy.is_empty());
            if let Some(tenants) = tenants {
                tenants.policy = policy.clone();
                tenants.apply(&mut policy, app);
            }
            let generation = app.desk.reload_policy(policy);
            app.health.set_policy(None);
            // The policy could not have been loaded without keys, so an earlier problem with them is solved.
            app.health.set_keys(None);
            let changes = changes(in_force, &text, TenantNames::Unnamed);
            let changes = if changes.is_empty() { "none".to_owned() } else { joined(&changes, MAX_CHANGES, "; ") };
            tracing::info!(policy = name, rules, generation, changes, "policy reloaded");
            app.policy_file.store(Arc::new(app.policy_file.load().with_text(text.clone())));
            if is_empty {
                tracing::warn!(policy = name, "policy has no rules and limits nothing");
            }
            Some((NewPolicy { keys }, text))
        }
        Err(Problem { public, details }) => {
            let problem = |text: &str| format!("the policy could not be reloaded: {text}");
            app.health.set_policy(Some(Problem { public: problem(&public), details: problem(&details) }));
            tracing::error!(policy = name, error = details, "policy not reloaded: the old one stays in force");
            None
        }
    }
}

/// Parses a policy and checks that it may replace the one in force. Returns it with its keys and its text.
pub(crate) fn usable(
    path: &Path,
    bytes: Result<Vec<u8>, String>,
    in_force: &Policy,
    allow_empty: bool,
) -> Result<(Policy, Option<TokenKeys>, String), Problem> {
    let bytes = bytes.map_err(|error| Problem::hiding(error, &[path]))?;
    let source = Source::from_bytes(path, bytes).map_err(|error| Problem::hiding(format!("{error:#}"), &[path]))?;
    let policy = source.policy_or_errors().map_err(|errors| {
        let details = format!("the policy cannot be used\n{}", source.render(&errors));
        // `/readyz` is open to everyone. The text of a policy may contain names of customers, so it is in the details
        // only.
        Problem { public: codes(&errors, &source.text), details }
    })?;
    // A file that was emptied or truncated by mistake is a valid policy without rules. A policy for logins only never had any.
    let loses_rules = policy.rules().is_empty() && !in_force.rules().is_empty();
    if (policy.is_empty() || loses_rules) && !allow_empty {
        let text =
            "no-rules: the new policy has no rules and would limit nothing (--allow-empty accepts that)".to_owned();
        return Err(Problem { public: text.clone(), details: text });
    }
    policy_notes::warn_of_zero_limits(&source);
    let unusable = |error| Problem { public: "the JWT key cannot be used".to_owned(), details: jwt::describe(error) };
    let (policy, keys) = jwt::attach(policy).map_err(unusable)?;
    Ok((policy, keys, source.text))
}

/// Lists the codes and line numbers of errors, without text of the file.
fn codes(errors: &[Finding], source: &str) -> String {
    let codes = errors.iter().take(MAX_CODES).map(|error| format!("{} in line {}", error.code, error.place(source).0));
    let more = errors.len().saturating_sub(MAX_CODES);
    let more = (more > 0).then(|| format!("{more} more"));
    codes.chain(more).collect::<Vec<_>>().join(", ")
}
