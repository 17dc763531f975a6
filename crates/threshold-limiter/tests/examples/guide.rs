//! The guide for programs in Rust agrees with the examples.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::console;
use crate::running::Running;

/// Returns the module documentation of a source file.
pub(crate) fn documentation(source: &str) -> String {
    let lines = source.lines().map_while(|line| line.strip_prefix("//!"));
    lines.fold(String::new(), |text, line| text + line.strip_prefix(' ').unwrap_or(line) + "\n")
}

pub(crate) fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The page that the examples are listed on.
const GUIDE: &str = "../../docs/library.md";

#[test]
fn the_guide_shows_the_code_of_the_layers_own_page() {
    let page = documentation(&read("src/tower.rs"));
    let code = page.split("```").nth(1).and_then(|block| block.strip_prefix("no_run\n")).expect("it begins with code");
    assert!(code.len() > 100, "{code}");
    assert!(read(GUIDE).contains(code), "docs/library.md does not show the code of src/tower.rs");
}

#[test]
fn the_example_of_the_guide_does_what_the_guide_says() {
    let guide = read(GUIDE);
    let shown = console::commands(console::sections(&guide).find(|text| text.starts_with("Examples\n")).unwrap());
    let (start, asked) = shown.split_first().unwrap();
    assert_eq!(start.command, "cargo run --example axum");
    assert_eq!(start.output, ["listening on http://127.0.0.1:3000"]);
    assert!(asked.len() >= 3, "{asked:?}");
    let running = Running::start("axum", &[]);
    for console::Shown { command, output } in asked {
        assert!(command.contains("127.0.0.1:3000"), "{command}");
        let command = command.replace("127.0.0.1:3000", &running.address);
        let printed = Command::new("sh").args(["-c", &command]).output().unwrap();
        assert!(printed.status.success(), "$ {command}\n{}", String::from_utf8_lossy(&printed.stderr));
        let lines: Vec<String> = String::from_utf8(printed.stdout).unwrap().lines().map(str::to_owned).collect();
        console::assert_agree(&command, output, &lines);
    }
}

/// `cargo run --example NAME` has to work without further options.
#[test]
fn examples_need_no_feature_to_be_named_and_fit_a_page() {
    let metadata = ["metadata", "--format-version=1", "--no-deps", "--offline"];
    let printed = Command::new(env!("CARGO")).args(metadata).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    let metadata: Value = serde_json::from_slice(&printed.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let own = packages.iter().find(|package| package["name"] == env!("CARGO_PKG_NAME")).unwrap();
    let examples = own["targets"].as_array().unwrap().iter().filter(|target| target["kind"][0] == "example");
    let mut names = Vec::new();
    for example in examples {
        assert_eq!(example.get("required-features"), None, "{example}");
        let lines = read(example["src_path"].as_str().unwrap()).lines().count();
        assert!(lines < 80, "{example} has {lines} lines");
        names.push(example["name"].as_str().unwrap());
    }
    let layer = own["dependencies"].as_array().unwrap().iter().find(|needed| needed["name"] == own["name"]).unwrap();
    assert_eq!(layer["kind"], "dev");
    assert!(layer["features"].as_array().unwrap().contains(&"tower".into()), "{layer}");
    let guide = read(GUIDE);
    for name in names {
        assert!(guide.contains(&format!("examples/{name}.rs)")), "docs/library.md does not list {name}");
    }
}
