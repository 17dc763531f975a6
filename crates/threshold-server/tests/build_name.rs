//! Tests where the build script finds the commit that `threshold --version` names.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::path::{Path, PathBuf};
use std::process::Command;

#[expect(dead_code, reason = "cargo calls `main`")]
#[path = "../build.rs"]
mod build;

/// A folder that is removed after the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("threshold-build-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn folder(&self, name: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn git(folder: &Path, args: &[&str]) -> String {
    let output = Command::new("git").arg("-C").arg(folder).args(args).output().unwrap();
    assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// An operator could not tell which build a server ran: `--version` was 0.1.0 for every commit.
#[test]
fn a_clone_names_the_commit_that_is_checked_out() {
    let root = Scratch::new("clone");
    let package = root.folder("crates/threshold-server");
    assert_eq!(build::checked_out_commit(&package), None);
    git(&root.0, &["init", "--quiet"]);
    // There is no commit yet.
    assert_eq!(build::checked_out_commit(&package), None);
    let author = ["-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "--quiet", "--allow-empty", "-m"];
    for message in ["one", "two"] {
        git(&root.0, &[&author[..], &[message]].concat());
        let commit = git(&root.0, &["rev-parse", "HEAD"]);
        assert_eq!(build::checked_out_commit(&package).as_deref(), commit.get(..12));
    }
}

/// A package has no repository of its own, and must not name the commit of one that it is unpacked in.
#[test]
fn a_package_names_the_commit_that_cargo_has_recorded() {
    let root = Scratch::new("package");
    let package = root.folder("vendor/threshold-server");
    git(&root.0, &["init", "--quiet"]);
    assert_eq!((build::packaged_commit(&package), build::checked_out_commit(&package)), (None, None));
    let record = package.join(".cargo_vcs_info.json");
    let text = r#"{
  "git": {
    "sha1": "41fd9721d7c7b8f0c1e2d3a4b5c6d7e8f9a0b1c2"
  },
  "path_in_vcs": "crates/threshold-server"
}"#;
    std::fs::write(&record, text).unwrap();
    assert_eq!(build::packaged_commit(&package).as_deref(), Some("41fd9721d7c7"));
    for wrong in ["", "{}", r#"{"git":{"sha1":""}}"#, r#"{"git":{"sha1":"unknown commit"}}"#] {
        std::fs::write(&record, wrong).unwrap();
        assert_eq!(build::packaged_commit(&package), None, "{wrong}");
    }
}

#[test]
fn the_program_names_its_build() {
    let output = Command::new(env!("CARGO_BIN_EXE_threshold")).arg("--version").output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    // A release build without a known commit has the version alone.
    let version = env!("CARGO_PKG_VERSION");
    let rest = shown.trim().strip_prefix(&format!("threshold {version}")).unwrap();
    let commit = rest.strip_prefix(" (").and_then(|rest| rest.strip_suffix(')'));
    let is_commit =
        commit.is_some_and(|commit| commit.len() == 12 && commit.bytes().all(|byte| byte.is_ascii_hexdigit()));
    assert!(is_commit || commit == Some("debug build") || rest.is_empty(), "{shown}");
    assert!(!cfg!(debug_assertions) || commit.is_some(), "{shown}");
}
