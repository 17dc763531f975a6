//! Checks `ARCHITECTURE.md`: its length, its tables and drawings, and its list of files, which it also generates.

use std::collections::BTreeSet;
use std::path::Path;

use crate::{crates, read, root};

/// The command that writes the list of files again.
const UPDATE: &str = "UPDATE_ARCHITECTURE=1 cargo test -p threshold-server --test readme architecture";
const BEGIN: &str = "<!-- Generated; do not edit below. ";
const END: &str = "<!-- end of the generated part -->\n";

/// The most bytes written by hand: what a newcomer reads in a quarter of an hour.
const MAX_BYTES: usize = 15_000;

/// Returns the first sentence of the comment that a file begins with; `None` if it begins with none.
fn first_sentence(path: &Path) -> Option<String> {
    let mark = match path.extension()?.to_str()? {
        "rs" => "//!",
        "lua" => "--",
        "js" => "//",
        _ => return None,
    };
    let text = std::fs::read_to_string(path).unwrap();
    // Redis wants its own mark on the first line of a script.
    let lines = text.lines().skip_while(|line| line.starts_with("#!lua"));
    let comment = lines.map_while(|line| line.strip_prefix(mark)).map(str::trim).take_while(|line| !line.is_empty());
    let comment = comment.collect::<Vec<_>>().join(" ");
    let sentence = comment.split_once(". ").map_or(comment.clone(), |(sentence, _)| format!("{sentence}."));
    // Links to items lead nowhere on a page, and a bar would end the cell.
    let plain = sentence.replace("[`", "`").replace("`]", "`").replace('|', "\\|");
    (!plain.is_empty()).then_some(plain)
}

/// Returns the files of a crate to two levels, `src/x.rs` and `src/x/y.rs`, in order.
fn files(krate: &Path) -> BTreeSet<String> {
    let src = root().join(krate).join("src");
    let mut files = BTreeSet::new();
    for entry in std::fs::read_dir(&src).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_file() {
            files.insert(name);
            continue;
        }
        let below = std::fs::read_dir(entry.path()).unwrap().map(Result::unwrap);
        let below = below.filter(|entry| entry.file_type().unwrap().is_file());
        files.extend(below.map(|entry| format!("{name}/{}", entry.file_name().to_str().unwrap())));
    }
    files
}

/// Returns the list of all files, a table for each crate. Files in Rust have a sentence; other files may have one.
fn list() -> String {
    let mut text = String::from("\n## Files\n\nThe first sentence of each file, to two levels below `src/`.\n");
    let folders: BTreeSet<_> = crates().into_iter().collect();
    for krate in folders {
        let name = krate.file_name().unwrap().to_str().unwrap();
        text.push_str(&format!("\n### {name}\n\n| file | contains |\n|---|---|\n"));
        for file in files(&krate) {
            let path = krate.join("src").join(&file);
            match first_sentence(&root().join(&path)) {
                Some(sentence) => text.push_str(&format!("| [{file}]({}) | {sentence} |\n", path.display())),
                None => assert!(!file.ends_with(".rs"), "{}: begin with //! and one sentence", path.display()),
            }
        }
    }
    text
}

/// Splits the page into what is written by hand and what is generated.
fn parts(page: &str) -> (&str, &str) {
    page.split_at(page.find(BEGIN).expect("the page has a generated part"))
}

/// The list is generated. After a change of a first line, run `UPDATE`.
#[test]
fn architecture_lists_every_file() {
    let page = read("ARCHITECTURE.md");
    let (by_hand, generated) = parts(&page);
    let fresh = format!("{BEGIN}Write it again with `{UPDATE}`. -->\n{}\n{END}", list());
    if std::env::var_os("UPDATE_ARCHITECTURE").is_some() {
        std::fs::write(root().join("ARCHITECTURE.md"), format!("{by_hand}{fresh}")).unwrap();
        return;
    }
    let differs = generated.lines().zip(fresh.lines()).find(|(old, new)| old != new);
    assert!(generated == fresh, "the files of ARCHITECTURE.md are not those of crates: {differs:?}\n  {UPDATE}");
}

#[test]
fn what_architecture_says_by_hand_is_short() {
    let page = read("ARCHITECTURE.md");
    let bytes = parts(&page).0.len();
    assert!(bytes <= MAX_BYTES, "{bytes} bytes are written by hand, at most {MAX_BYTES} may be");
}

/// A newcomer finds the file to begin with for the changes that are made most. Links are tested in `links`.
#[test]
fn architecture_says_where_to_begin() {
    let page = read("ARCHITECTURE.md");
    let (_, rest) = page.split_once("## Where to change what\n").unwrap();
    let (table, _) = rest.split_once("\n## ").unwrap();
    let rows: Vec<_> = table.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    for row in &rows {
        assert!(row.split(" | ").nth(1).unwrap().contains("](crates/"), "no file to begin with: {row}");
    }
    for change in [
        "a response header",
        "a receiver of alerts",
        "a store",
        "an access log format",
        "a Redis script",
        "the cookie of the page",
        "an algorithm",
        "a rung",
        "a door",
        "an endpoint",
        "a key of the policy file",
        "a finding of `lint`",
        "a metric",
    ] {
        assert!(rows.iter().any(|row| row.starts_with(&format!("| {change}"))), "where to begin with {change}?");
    }
}

/// The drawings name files as a reader searches for them, by the end of their paths.
#[test]
fn architecture_draws_files_that_exist() {
    let page = read("ARCHITECTURE.md");
    let mut folders: Vec<_> = crates().iter().map(|krate| root().join(krate).join("src")).collect();
    let mut known = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() { folders.push(path) } else { known.push(path) }
        }
    }
    let drawings = parts(&page).0.split("```").skip(1).step_by(2);
    let words = drawings.flat_map(|drawing| drawing.split(|c: char| c.is_whitespace() || ",:;()".contains(c)));
    let named: BTreeSet<_> = words.filter(|word| word.ends_with(".rs")).collect();
    assert!(named.len() > 30, "only {} files are drawn", named.len());
    // Whole components are compared, so that `store.rs` is not the end of `async_store.rs`.
    let missing: Vec<_> = named.iter().filter(|name| !known.iter().any(|path| path.ends_with(name))).collect();
    assert!(missing.is_empty(), "the drawings name files that do not exist: {missing:?}");
}

/// The table of crates says what each depends on, and every arrow of it is one of Cargo's.
#[test]
fn architecture_says_what_crates_use() {
    let page = read("ARCHITECTURE.md");
    let (_, rest) = page.split_once("## Crates\n").unwrap();
    let (table, _) = rest.split_once("\n## ").unwrap();
    for krate in crates() {
        let name = krate.file_name().unwrap().to_str().unwrap();
        let manifest: toml::Table = read(krate.join("Cargo.toml").to_str().unwrap()).parse().unwrap();
        let used: BTreeSet<_> = manifest
            .get("dependencies")
            .and_then(toml::Value::as_table)
            .into_iter()
            .flat_map(toml::Table::keys)
            .filter_map(|name| name.strip_prefix("threshold-"))
            .collect();
        let row = table.lines().find(|line| line.starts_with(&format!("| `{name}`"))).expect(name);
        let said: BTreeSet<_> = row.split(" | ").nth(1).unwrap().split(", ").filter(|used| *used != "–").collect();
        assert_eq!(said, used, "{name} uses other crates");
    }
}
