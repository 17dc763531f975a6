//! The commands in the documentation of each example give the results that the comments beside them show.

use std::process::Command;

use crate::console;
use crate::guide::{documentation, read};
use crate::outside::Outside;
use crate::running::Running;

/// Parses the statuses of a comment: "200", "401, and why", "200 twice, then 429", "401 five times, then 429".
fn promised(comment: &str) -> Vec<u16> {
    let number = |word: &str| word.get(..3)?.parse::<u16>().ok();
    let mut words = comment.split_whitespace();
    let Some(first) = words.next().and_then(number) else { return Vec::new() };
    let times = match words.next() {
        Some("twice,") => 2,
        Some("three") => 3,
        Some("five") => 5,
        _ => return vec![first],
    };
    let then = comment.split_once("then ").and_then(|(_, then)| number(then)).expect("what comes then");
    [vec![first; times], vec![then]].concat()
}

/// Starts an example with the command of its documentation, and sends the documented requests.
#[track_caller]
fn check(name: &str) {
    let outside = Outside::start();
    let url = outside.url();
    let commands = console::commands(&documentation(&read(&format!("examples/{name}.rs"))));
    let (asked, start): (Vec<_>, Vec<_>) = commands.iter().partition(|shown| shown.command.starts_with("curl"));
    assert!(start.last().unwrap().command.ends_with(&format!("cargo run --example {name}")), "{start:?}");
    let words = start.iter().flat_map(|shown| shown.command.split(' '));
    let mut variables: Vec<(&str, &str)> = words.filter_map(|word| word.split_once('=')).collect();
    variables.extend([("BOT_API", url.as_str()), ("RELAY", &url)]);
    let running = Running::start(name, &variables);
    let mut kept = Vec::new();
    for shown in asked {
        let command = shown.command.replace("127.0.0.1:3000", &running.address);
        let (_, comment) = command.split_once("# ").unwrap_or_default();
        for status in promised(comment) {
            let printed = Command::new("sh").args(["-c", &command]).output().unwrap();
            let head = String::from_utf8(printed.stdout).unwrap();
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "$ {command}\n{head}");
            kept.push(status);
        }
    }
    assert!(!kept.is_empty(), "{name} promises nothing");
}

/// Returns the pages with documentation for users, from the root of the repository.
fn pages() -> Vec<String> {
    let mut pages: Vec<String> = ["README.md", "crates/threshold-core/README.md", "crates/threshold-limiter/README.md"]
        .map(str::to_owned)
        .into();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    pages.extend(names.filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}")));
    pages
}

/// The twelve blocks of docs/library.md were compiled by nobody: they lacked every `use`, and a reader had to guess.
#[test]
fn every_block_of_rust_in_the_documentation_is_compiled() {
    let library = read("src/lib.rs");
    for page in pages() {
        let text = read(&format!("../../{page}"));
        let fences = text.lines().filter_map(|line| line.trim_start().strip_prefix("```"));
        let opening: Vec<&str> = fences.step_by(2).collect();
        let is_included = library.contains(&format!("#[doc = include_str!(\"../../../{page}\")]"));
        assert!(!is_included || !opening.contains(&""), "{page}: rustdoc takes a block without a language for Rust");
        for block in opening.iter().filter(|block| block.starts_with("rust")) {
            assert!(["rust", "rust,no_run"].contains(block), "{page}: a block is not compiled: {block}");
            assert!(is_included, "{page} has Rust, and src/lib.rs does not include it");
        }
    }
}

/// The README of the crate said that no feature was on by default, and left out half of them.
#[test]
fn every_feature_is_in_the_tables_of_features() {
    for (krate, pages) in [
        (
            "threshold-limiter",
            &["crates/threshold-limiter/README.md", "docs/library.md", "crates/threshold-limiter/src/lib.rs"][..],
        ),
        ("threshold-core", &["crates/threshold-core/README.md"]),
    ] {
        let manifest = read(&format!("../{krate}/Cargo.toml"));
        let (_, features) = manifest.split_once("[features]\n").unwrap();
        let features = features.lines().take_while(|line| !line.starts_with('['));
        let names = features.filter(|line| !line.starts_with('#')).filter_map(|line| Some(line.split_once(" = ")?.0));
        let names: Vec<&str> = names.filter(|name| *name != "default").collect();
        assert!(names.len() > 4, "{names:?}");
        for page in pages {
            let text = read(&format!("../../{page}"));
            let rows: Vec<&str> = text.lines().map(|line| line.trim_start_matches("//! ")).collect();
            let is_listed = |name: &&str| {
                rows.iter().any(|row| {
                    row.starts_with("| `")
                        && row.split('|').nth(1).is_some_and(|cell| cell.contains(&format!("`{name}`")))
                })
            };
            let missing: Vec<&str> = names.iter().copied().filter(|name| !is_listed(name)).collect();
            assert!(missing.is_empty(), "{page} does not list the features {missing:?}");
        }
    }
}

#[test]
fn the_documented_commands_of_every_example_work() {
    for name in ["axum", "login", "mailer", "per_ip", "weather", "webhook"] {
        check(name);
    }
}
