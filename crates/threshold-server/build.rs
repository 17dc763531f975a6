//! Names the build for `threshold --version`: the version, and the commit where it is known.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The digits of a commit that are shown: as many as the largest repositories need.
const DIGITS: usize = 12;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=THRESHOLD_COMMIT");
    let variable = |name| std::env::var(name).unwrap_or_default();
    let folder = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let given = Some(variable("THRESHOLD_COMMIT")).filter(|commit| !commit.is_empty());
    let is_debug = variable("PROFILE") == "debug";
    let found = match given.as_deref().and_then(digits).or_else(|| packaged_commit(&folder)) {
        // Each commit would rebuild the program and its tests.
        None if is_debug => None,
        found => found.or_else(|| checked_out_commit(&folder)),
    };
    let version = variable("CARGO_PKG_VERSION");
    let build = match found {
        Some(commit) => format!("{version} ({commit})"),
        None if is_debug => format!("{version} (debug build)"),
        None => version,
    };
    println!("cargo::rustc-env=THRESHOLD_BUILD={build}");
}

/// Returns the commit that cargo has recorded in a package, which has no git repository.
pub(crate) fn packaged_commit(folder: &Path) -> Option<String> {
    let record = folder.join(".cargo_vcs_info.json");
    let text = std::fs::read_to_string(&record).ok()?;
    println!("cargo::rerun-if-changed={}", record.display());
    let (_, after) = text.split_once("\"sha1\"")?;
    digits(after.trim_start_matches([':', ' ', '"']))
}

/// Returns the commit of this repository. A package that was unpacked inside of another repository is not a part of that.
pub(crate) fn checked_out_commit(folder: &Path) -> Option<String> {
    let root = folder.parent()?.parent()?;
    if !root.join(".git").exists() || !root.join("crates/threshold-server").is_dir() {
        return None;
    }
    let git = |args: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // Both change with every commit and checkout. A path that does not exist would rerun this script each time.
    for name in ["HEAD", "logs/HEAD"] {
        let path = root.join(git(&["rev-parse", "--git-path", name])?);
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    digits(&git(&["rev-parse", "HEAD"])?)
}

/// Returns the first digits of a commit, or `None` if the text does not begin with one.
fn digits(text: &str) -> Option<String> {
    let start: String = text.trim().chars().take(DIGITS).collect();
    (start.len() == DIGITS && start.chars().all(|c| c.is_ascii_hexdigit())).then_some(start)
}
