//! The folder of `--tenants`: a configuration file for each tenant, whose limits apply above those of the policy.
//!
//! A file that cannot be used is reported, and the tenant keeps the limits that it had. A file that is removed takes its limits
//! with it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use threshold_core::policy::Policy;
use threshold_limiter::files::Trust;
use threshold_wire::tenant_config::TenantConfig;

use super::watch::{self, Contents, Found, Watch};
use crate::door::Problem;

/// The most entries of the folder. All of them are looked at twice a second, which takes about 20 ms for as many.
const MAX_ENTRIES: usize = 10_000;
/// The name of a tenant's file in a folder of its own. Otherwise it is the tenant's name and `.json`.
const FILE_NAME: &str = "tenant.config.json";
/// How many problems are listed in `/readyz`.
const MAX_SHOWN: usize = 3;

/// The tenants' files and the limits in them.
#[derive(Debug)]
pub(crate) struct TenantFolder {
    path: PathBuf,
    tenants: BTreeMap<String, TenantFile>,
    /// Entries that are no tenant's file, or why the folder cannot be read.
    problems: Vec<String>,
    /// Whether anything differs from what was last applied.
    changed: bool,
}

#[derive(Debug)]
struct TenantFile {
    path: PathBuf,
    watch: Watch,
    /// The limits of the last contents that could be parsed.
    parsed: Option<TenantConfig>,
    /// The limits that the policy accepted last. They stay in force while later ones cannot be used.
    applied: Option<TenantConfig>,
    /// Why the present contents cannot be parsed.
    unreadable: Option<String>,
    /// Why the policy does not accept them.
    unfit: Option<String>,
    /// Whether the file was gone at the last check. It counts as removed when it is still gone at the next one, because some
    /// programs replace a file by removing it first.
    gone: bool,
}

impl TenantFolder {
    /// Reads all files of a folder.
    ///
    /// # Errors
    /// If the folder itself cannot be read. A file that cannot be used is a [problem](Self::problems), because one tenant's mistake
    /// must not keep the server from starting for all others.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        list(path)?;
        let mut folder = Self { path: path.to_owned(), tenants: BTreeMap::new(), problems: Vec::new(), changed: true };
        folder.reload();
        Ok(folder)
    }

    /// Reads the files that have changed. A change counts once it was seen at two checks.
    pub(crate) fn check(&mut self, now: SystemTime) {
        self.update(|file| {
            let found =
                Found::unless(std::slice::from_ref(&file.path), Trust::Settings, file.watch.trusted().as_deref())?;
            file.watch.take(found, now)
        });
    }

    /// Reads all files now, changed or not.
    pub(crate) fn reload(&mut self) {
        self.changed = true;
        // A file that is missing now is removed now.
        self.tenants.values_mut().for_each(|file| file.gone = true);
        self.update(|file| {
            let contents = watch::read(std::slice::from_ref(&file.path), Trust::Settings);
            file.watch = Watch::new(&contents);
            Some(contents)
        });
    }

    /// Whether the limits differ from those that were last applied.
    pub(crate) fn has_changed(&self) -> bool {
        self.changed
    }

    /// Puts the limits above those of a policy. Those that do not fit it are problems, and the tenant's limits before them are
    /// used. Returns the number of tenants with limits.
    pub(crate) fn apply(&mut self, policy: &mut Policy) -> usize {
        self.changed = false;
        self.tenants.iter_mut().filter_map(|(tenant, file)| file.apply(policy, tenant)).count()
    }

    /// Returns why files cannot be used, each with its path.
    pub(crate) fn problems(&self) -> impl Iterator<Item = &str> {
        let files = self.tenants.values().filter_map(|file| file.unreadable.as_deref().or(file.unfit.as_deref()));
        self.problems.iter().map(String::as_str).chain(files)
    }

    /// Returns the problem that `/readyz` reports.
    pub(crate) fn problem(&self) -> Option<Problem> {
        let count = self.problems().count();
        if count == 0 {
            return None;
        }
        // Paths contain the names of customers, and `/readyz` is open to everyone.
        let public = format!("{count} of the tenants' files cannot be used");
        let shown: Vec<&str> = self.problems().take(MAX_SHOWN).collect();
        let details = format!("{public}: {}", shown.join("; "));
        Some(Problem { public, details })
    }

    fn update(&mut self, read: impl Fn(&mut TenantFile) -> Option<Contents>) {
        let (files, problems) = match list(&self.path) {
            Ok(listed) => listed,
            // The tenants keep their limits: a volume that is not mounted is not the removal of every file.
            Err(error) => return self.set_problems(vec![format!("{error:#}")]),
        };
        self.set_problems(problems);
        for (tenant, path) in &files {
            let file = self.tenants.entry(tenant.clone()).or_insert_with(|| TenantFile::new(path.clone()));
            if file.path != *path {
                file.path.clone_from(path);
                file.watch = unread();
            }
            file.gone = false;
            if let Some(contents) = read(file) {
                file.load(&contents);
                self.changed = true;
            }
        }
        let before = self.tenants.len();
        self.tenants.retain(|tenant, file| {
            let gone = !files.contains_key(tenant);
            let removed = gone && file.gone;
            file.gone = gone;
            !removed
        });
        self.changed |= self.tenants.len() < before;
    }

    fn set_problems(&mut self, problems: Vec<String>) {
        if self.problems != problems {
            for error in &problems {
                tracing::error!(error, "tenants' folder not usable");
            }
            self.problems = problems;
            self.changed = true;
        }
    }
}

impl TenantFile {
    fn new(path: PathBuf) -> Self {
        let (parsed, applied, unreadable, unfit) = (None, None, None, None);
        Self { path, watch: unread(), parsed, applied, unreadable, unfit, gone: false }
    }

    fn load(&mut self, contents: &Contents) {
        let parsed = contents.as_ref().map_err(String::clone).and_then(|files| {
            TenantConfig::parse(&files.concat()).map_err(|error| format!("{}:{error}", self.path.display()))
        });
        match parsed {
            Ok(config) => (self.parsed, self.unreadable) = (Some(config), None),
            Err(error) => {
                tracing::error!(error, "tenant's file not loaded: its limits stay as they were");
                self.unreadable = Some(error);
            }
        }
    }

    fn apply(&mut self, policy: &mut Policy, tenant: &str) -> Option<()> {
        let Err(error) = self.parsed?.apply(policy, tenant) else {
            (self.applied, self.unfit) = (self.parsed, None);
            return Some(());
        };
        let error = format!("{}: {error}", self.path.display());
        // Reported once, and not again whenever the file of another tenant changes.
        if self.unfit.as_ref() != Some(&error) {
            tracing::error!(error, "tenant's file does not fit the policy: its limits stay as they were");
        }
        self.unfit = Some(error);
        self.applied?.apply(policy, tenant).ok()
    }
}

/// A watch of a file whose contents are not known.
fn unread() -> Watch {
    // No file has these contents: they are the error of none.
    Watch::new(&Err(String::new()))
}

/// Returns the tenants' files by tenant, and the entries that are wrong.
fn list(folder: &Path) -> anyhow::Result<(BTreeMap<String, PathBuf>, Vec<String>)> {
    let (mut files, mut problems) = (BTreeMap::new(), Vec::new());
    let cannot_read = || format!("cannot read the tenants' folder {}", folder.display());
    for (index, entry) in std::fs::read_dir(folder).with_context(cannot_read)?.enumerate() {
        if index >= MAX_ENTRIES {
            anyhow::bail!("the tenants' folder {} has more than {MAX_ENTRIES} entries", folder.display());
        }
        let path = entry.with_context(cannot_read)?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            problems.push(format!("{}: the name is not UTF-8", path.display()));
            continue;
        };
        // Kubernetes keeps the files of a mounted ConfigMap in folders that begin with two dots, and editors their copies.
        if name.starts_with('.') {
            continue;
        }
        if name == FILE_NAME {
            let help = "name the file after its tenant, or put it into a folder with the tenant's name";
            problems.push(format!("{}: {help}", path.display()));
            continue;
        }
        let (tenant, file) = match name.strip_suffix(".json") {
            Some(tenant) => (tenant, path.clone()),
            // A folder without such a file, and a file such as a README, belong to no tenant.
            None if path.join(FILE_NAME).exists() => (name, path.join(FILE_NAME)),
            None => continue,
        };
        if let Some(other) = files.insert(tenant.to_owned(), file.clone()) {
            let (one, other) = if file < other { (other, file) } else { (file, other) };
            problems.push(format!("{}: {} is of the same tenant; remove one of them", one.display(), other.display()));
            files.insert(tenant.to_owned(), one);
        }
    }
    problems.sort_unstable();
    Ok((files, problems))
}
