//! Every command of the README does what the README says.
//!
//! In each `console` block a line that begins with `$ ` is run in one scratch folder, and what follows must be what it
//! prints; `…` stands for any lines, `[exit N]` for how it ends. `policy.example.toml` is the README's own policy, and
//! `cases.json` what its `cat` shows. The section whose service is in another crate is tested there.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

mod console;

use std::path::{Path, PathBuf};
use std::process::Command;

use console::Shown;

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

#[test]
fn the_readme_does_what_it_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let folder: PathBuf = std::env::temp_dir().join(format!("threshold-readme-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let policy = console::blocks(&readme, "toml").first().expect("the README shows a policy").join("\n") + "\n";
    std::fs::write(folder.join("policy.example.toml"), policy).unwrap();
    let sections = console::sections(&readme).filter(|text| !text.starts_with(console::OWN_SERVICE));
    let shown: Vec<Shown> = sections.flat_map(console::commands).collect();
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
        console::assert_agree(&command, &output, &lines);
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
