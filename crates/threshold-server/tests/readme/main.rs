//! Every command of the README does what the README says.
//!
//! In each `console` block a line that begins with `$ ` is run in one scratch folder, and what follows must be what it
//! prints; `…` stands for any lines, or for any part of one, `[exit N]` for how it ends. `policy.example.toml` is the
//! README's own policy, and `cases.json` what its `cat` shows. A command that ends with `&` goes on beside the others, until
//! the next such command, and what the README calls port 8080 is a free one here. `cargo run --release --` is the program
//! under test; that it is the one binary which `cargo run` finds is a test of its own. The section whose service is in another
//! crate is tested there.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

mod console;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Where the README's server listens.
const ADDRESS: &str = "127.0.0.1:8080";

use console::Shown;

/// What stands for `threshold` in a clone.
const FROM_A_CLONE: &str = "cargo run --release -- ";

/// A command where `threshold` is the program under test.
fn shell(command: &str, folder: &Path) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_threshold")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(folder).env("PATH", path);
    shell
}

/// The README's server, on a free port, until the test ends.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Starts it, and says what it printed, with the README's address for its own.
    fn start(command: &str, folder: &Path) -> (Self, Vec<String>) {
        let command = format!("exec {command} --http 127.0.0.1:0");
        let mut child = shell(&command, folder).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let mut printed: Vec<String> = Vec::new();
        for line in out.lines().map(Result::unwrap) {
            let is_last = line.trim_start().starts_with("tokens ");
            printed.push(line);
            if is_last {
                break;
            }
        }
        let address = printed.iter().find_map(|line| line.trim().strip_prefix("http ")?.split("//").nth(1));
        let address = address.expect("it says where it listens").to_owned();
        let printed = printed.iter().map(|line| line.replace(&address, ADDRESS)).collect();
        (Self { child, address }, printed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs one command to its end.
fn run(command: &str, folder: &Path) -> Vec<String> {
    let output = shell(command, folder).output().unwrap();
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
    let mut server: Option<Server> = None;
    for Shown { command, output } in shown {
        // Installing is what put the program under test where it is, and this test is one of `./test`.
        if command.starts_with("cargo install") || command == "./test" {
            continue;
        }
        let command = command.replace(FROM_A_CLONE, "threshold ");
        if let Some(file) = command.strip_prefix("cat ") {
            std::fs::write(folder.join(file), output.join("\n")).unwrap();
            continue;
        }
        let lines = match (command.strip_suffix(" &"), &server) {
            (Some(command), _) => {
                // The one before has the journal.
                drop(server.take());
                let (started, printed) = Server::start(command, &folder);
                server = Some(started);
                printed
            }
            (None, Some(server)) => run(&command.replace(ADDRESS, &server.address), &folder),
            (None, None) => run(&command, &folder),
        };
        console::assert_agree(&command, &output, &lines);
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The first screen names the two commands that a clone is tried with: one starts the server, and is followed by a request
/// that it answers; the other runs the tests. Both are there to be run as they stand.
#[test]
fn the_first_screen_starts_the_server_and_the_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let screen: Vec<&str> = readme.lines().take(30).collect();
    let shown: Vec<String> = console::commands(&screen.join("\n")).into_iter().map(|shown| shown.command).collect();
    let [serve, curl, test] = shown.as_slice() else { panic!("{shown:?}") };
    assert_eq!(serve, &format!("{FROM_A_CLONE}serve &"));
    assert!(curl.starts_with("curl ") && curl.contains(ADDRESS), "{curl}");
    assert_eq!(test, "./test");
    let usage = Command::new(root.join("test")).arg("no such mode").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&usage.stderr).trim(), "usage: ./test [fast|long]");
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(&root)
        .output()
        .unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap().iter();
    let targets = packages.flat_map(|package| package["targets"].as_array().unwrap());
    let binaries = targets.filter(|target| target["kind"][0] == "bin").map(|target| target["name"].as_str().unwrap());
    assert_eq!(binaries.collect::<Vec<_>>(), ["threshold"]);
}

/// All files of Rust below a folder.
fn sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if entry.file_type().unwrap().is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

/// `docs/limits.md` names a test for each table that could fill, and every one of them is there.
#[test]
fn every_bound_has_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/limits.md")).unwrap();
    let mut code = String::new();
    for krate in ["threshold-core", "threshold-limiter", "threshold-server"] {
        for part in ["src", "tests"] {
            sources(&root.join("crates").join(krate).join(part), &mut code);
        }
    }
    let rows = page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| table"));
    let mut count = 0;
    for row in rows {
        let tests = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        let names: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test for {row}");
        for name in names {
            assert!(code.contains(&format!("fn {name}(")), "there is no test {name}");
        }
        count += 1;
    }
    assert!(count >= 20, "{count} rows");
}
