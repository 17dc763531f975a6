//! Every command of the README does what the README says.
//!
//! In each `console` block a line that begins with `$ ` is run in one scratch folder, and what follows must be what it
//! prints; `…` stands for any lines, `[exit N]` for how it ends. `policy.example.toml` is the README's own policy, and
//! `cases.json` what its `cat` shows.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// A command of the README and what it is said to print.
#[derive(Debug)]
struct Shown {
    command: String,
    output: Vec<String>,
}

fn blocks<'t>(readme: &'t str, language: &str) -> Vec<Vec<&'t str>> {
    let opening = format!("```{language}");
    let mut lines = readme.lines();
    let mut blocks = Vec::new();
    while lines.any(|line| line == opening) {
        blocks.push(lines.by_ref().take_while(|line| *line != "```").collect());
    }
    blocks
}

fn commands(readme: &str) -> Vec<Shown> {
    let mut shown: Vec<Shown> = Vec::new();
    for line in blocks(readme, "console").concat() {
        match line.strip_prefix("$ ") {
            Some(command) => shown.push(Shown { command: command.to_owned(), output: Vec::new() }),
            None => shown.last_mut().expect("a block begins with a command").output.push(line.to_owned()),
        }
    }
    shown
}

/// Runs one command where `threshold` is the program under test.
fn run(command: &str, folder: &Path) -> Vec<String> {
    let program = Path::new(env!("CARGO_BIN_EXE_threshold")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let output = Command::new("sh").args(["-c", command]).current_dir(folder).env("PATH", path).output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    if !output.status.success() {
        lines.push(format!("[exit {}]", output.status.code().unwrap()));
    }
    lines
}

/// Whether lines are as shown, `…` standing for any of them.
fn agree(shown: &[String], lines: &[String]) -> bool {
    match shown.split_first() {
        None => lines.is_empty(),
        Some((first, rest)) if first == "…" => {
            (0..=lines.len()).any(|skip| lines.get(skip..).is_some_and(|left| agree(rest, left)))
        }
        Some((first, rest)) => lines.split_first().is_some_and(|(line, left)| line == first && agree(rest, left)),
    }
}

#[test]
fn the_readme_does_what_it_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let folder: PathBuf = std::env::temp_dir().join(format!("threshold-readme-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let policy = blocks(&readme, "toml").first().expect("the README shows a policy").join("\n") + "\n";
    std::fs::write(folder.join("policy.example.toml"), policy).unwrap();
    let shown = commands(&readme);
    assert!(shown.len() >= 8, "the README shows {} commands", shown.len());
    for Shown { command, output } in shown {
        // Installing is what put the program under test where it is.
        if command.starts_with("cargo install") {
            continue;
        }
        if let Some(file) = command.strip_prefix("cat ") {
            std::fs::write(folder.join(file), output.join("\n")).unwrap();
            continue;
        }
        let lines = run(&command, &folder);
        assert!(agree(&output, &lines), "$ {command}\nshown:\n{}\nprinted:\n{}", output.join("\n"), lines.join("\n"));
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
