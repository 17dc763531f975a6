//! Checks the links between the repository's pages.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use crate::{crates, read, root};

/// The pages of the repository, by their paths from its root.
fn pages() -> BTreeSet<PathBuf> {
    let mut pages = BTreeSet::new();
    let folders = ["", "docs", "docs/runbooks"].map(PathBuf::from);
    for folder in folders.into_iter().chain(crates()) {
        for entry in std::fs::read_dir(root().join(&folder)).unwrap() {
            let path = folder.join(entry.unwrap().file_name());
            if path.extension().is_some_and(|extension| extension == "md") {
                pages.insert(path);
            }
        }
    }
    pages
}

/// The text of a page without its code, which may look like links.
fn prose(page: &str) -> String {
    let mut fenced = false;
    let lines = page.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The targets of all links, `[label](target)`.
fn targets(page: &str) -> Vec<String> {
    let text = prose(page);
    let behind = text.split("](").skip(1);
    behind.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target.to_owned()).collect()
}

/// The anchors of a page's headings, made as GitHub makes them.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = prose(page).lines().map(str::to_owned).collect::<Vec<_>>().into_iter();
    let titles =
        headings.filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim().to_lowercase());
    titles
        .map(|title| {
            let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// A path without `.` and `..`.
fn resolved(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                parts.pop();
            }
            Component::CurDir => {}
            other => parts.push(other),
        }
    }
    parts
}

/// Splits a link on a page into the file it leads to and the anchor in it. Links to other sites lead to no file.
fn target(from: &Path, link: &str) -> Option<(PathBuf, Option<String>)> {
    if link.contains("://") {
        return None;
    }
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor.to_owned())));
    let path = if file.is_empty() { from.to_owned() } else { resolved(&from.parent().unwrap().join(file)) };
    Some((path, anchor))
}

#[test]
fn every_link_leads_somewhere() {
    let mut broken = Vec::new();
    let mut count = 0;
    for page in pages() {
        for link in targets(&read(page.to_str().unwrap())) {
            let Some((path, anchor)) = target(&page, &link) else { continue };
            count += 1;
            let found = root().join(&path).exists();
            let anchored =
                anchor.is_none_or(|anchor| found && anchors(&read(path.to_str().unwrap())).contains(&anchor));
            if !found || !anchored {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
    assert!(count > 100, "only {count} links");
}

#[test]
fn every_page_can_be_reached_from_the_readme() {
    let pages = pages();
    let mut reached = BTreeSet::from([PathBuf::from("README.md")]);
    let mut waiting: Vec<PathBuf> = reached.iter().cloned().collect();
    while let Some(page) = waiting.pop() {
        for (path, _) in targets(&read(page.to_str().unwrap())).iter().filter_map(|link| target(&page, link)) {
            if pages.contains(&path) && reached.insert(path.clone()) {
                waiting.push(path);
            }
        }
    }
    let lost: Vec<_> = pages.difference(&reached).filter(|page| !page.starts_with("crates")).collect();
    assert!(lost.is_empty(), "no link leads to {lost:?}");
}

/// The index lists every page of `docs/`.
#[test]
fn the_index_lists_every_page() {
    let index = read("docs/README.md");
    // The runbooks have an index of their own.
    for page in pages().iter().filter(|page| page.parent() == Some(Path::new("docs"))) {
        let name = page.file_name().unwrap().to_str().unwrap();
        assert!(name == "README.md" || index.contains(&format!("]({name})")), "docs/README.md does not list {name}");
    }
}

/// The paths in a text that begin with a folder of the repository. `*`, `{…}` and `NAME` stand for several names, so such a path
/// is cut to its folder. The results of benchmarks are not kept.
pub(crate) fn paths(text: &str) -> Vec<String> {
    const FOLDERS: [&str; 6] = ["bench/", "conformance/", "crates/", "deploy/", "docs/", "policies/"];
    const WRITTEN: [&str; 2] = ["bench/results/", "bench/target/"];
    let begins = |word: &str, with: &[&str]| with.iter().any(|folder| word.starts_with(folder));
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '-' | '_' | '*' | '{' | '}');
    let words = text.split(|c| !is_part(c)).filter(|word| begins(word, &FOLDERS) && !begins(word, &WRITTEN));
    let known = words.map(|word| {
        let known = word.split(['*', '{']).next().and_then(|word| word.split("NAME").next()).unwrap();
        if known == word { word.trim_end_matches('.') } else { known.rsplit_once('/').unwrap().0 }
    });
    known.map(str::to_owned).collect()
}

/// Every file of the repository that a page names exists.
#[test]
fn files_that_pages_name_exist() {
    let mut missing = Vec::new();
    let mut count = 0;
    // The generated pages name paths of modules and of requests.
    for page in pages().into_iter().filter(|page| !page.ends_with("API.md")) {
        let page = page.to_str().unwrap();
        for path in paths(&read(page)) {
            count += 1;
            // Pages of a crate and of `docs/` also name what is below their own folder.
            let beside = root().join(page).parent().unwrap().join(&path);
            if !root().join(&path).exists() && !beside.exists() {
                missing.push(format!("{page}: {path}"));
            }
        }
    }
    assert!(missing.is_empty(), "files that do not exist:\n{}", missing.join("\n"));
    assert!(count > 100, "only {count} paths");
}
