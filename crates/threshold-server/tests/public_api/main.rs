//! Holds `API.md` in the folder of each library equal to its public API.
//!
//! The pages are made from rustdoc's JSON. After a change of the API, write them again with
//! `UPDATE_API=1 cargo test -p threshold-server --test public_api`.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]
#![expect(clippy::indexing_slicing, reason = "a JSON value answers null where there is nothing, and does not panic")]

mod page;
mod rustdoc;
mod signature;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rustdoc::Docs;

/// The command that writes the pages.
const UPDATE: &str = "UPDATE_API=1 cargo test -p threshold-server --test public_api";

/// Crates whose types and traits may stand in a public signature: a new major version of one of them is a new major version
/// of Threshold. Everything else is a detail that can be replaced.
const ALLOWED: [(&str, &[&str]); 4] = [
    // `serde` and `serde_json` are what a case file is read and answered with.
    ("threshold_core", &["serde_core", "serde_json"]),
    // `prometheus_client` is behind a feature: a program has one registry for all its metrics.
    (
        "threshold_limiter",
        &["threshold_core", "bytes", "http", "http_body", "prometheus_client", "tower_layer", "tower_service"],
    ),
    ("threshold_redis", &["threshold_core", "threshold_limiter"]),
    // `serde` is what the bodies of API calls are read with, and `schemars` describes them, behind a feature.
    ("threshold_wire", &["threshold_core", "threshold_limiter", "schemars", "serde_core"]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs rustdoc once for all tests, with the features that docs.rs builds with.
fn docs(krate: &str) -> Docs {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        // The whole workspace, so that cargo finds the dependencies as `./test` has built them for its lints.
        let output = Command::new(env!("CARGO"))
            .args(["doc", "--workspace", "--all-features", "--no-deps", "--locked", "--lib"])
            .env("RUSTDOC", root().join("crates/threshold-server/tests/public_api/rustdoc.sh"))
            .env("RUSTDOCFLAGS", "-Z unstable-options --output-format json")
            .current_dir(root())
            .output()
            .unwrap();
        assert!(output.status.success(), "cargo doc failed:\n{}", String::from_utf8_lossy(&output.stderr));
        let metadata = Command::new(env!("CARGO"))
            .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
            .current_dir(root())
            .output()
            .unwrap();
        let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
        Path::new(metadata["target_directory"].as_str().unwrap()).join("doc")
    });
    Docs::read(&folder.join(format!("{krate}.json"))).unwrap_or_else(|message| panic!("{message}"))
}

#[track_caller]
fn check(krate: &str) {
    let page = page::write(&docs(krate), UPDATE);
    let path = root().join("crates").join(krate.replace('_', "-")).join("API.md");
    if std::env::var_os("UPDATE_API").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = written.lines().zip(page.lines()).find(|(old, new)| old != new);
    let path = path.display();
    assert!(written == page, "{path} is not the API of {krate}: {differs:?}\nwrite it again with\n  {UPDATE}");
}

#[test]
fn the_page_of_each_library_is_its_api() {
    for (krate, _) in ALLOWED {
        check(krate);
    }
}

/// A type of a dependency in a signature makes that dependency's version part of the API.
#[test]
fn signatures_name_no_types_of_other_crates() {
    for (krate, allowed) in ALLOWED {
        let docs = docs(krate);
        let own = ["std", "core", "alloc", krate];
        let named = page::foreign(&docs);
        for name in allowed {
            assert!(
                named.iter().any(|(owner, _)| owner == name),
                "nothing of {krate} names {name}: take it off the list"
            );
        }
        let foreign =
            named.into_iter().filter(|(owner, _)| !own.contains(&owner.as_str()) && !allowed.contains(&owner.as_str()));
        let mut found: Vec<String> = foreign.map(|(owner, line)| format!("{owner}: {line}")).collect();
        found.sort();
        found.dedup();
        assert!(found.is_empty(), "the public API of {krate} names types of other crates:\n{}", found.join("\n"));
    }
}
