//! The commands of the README and of the tutorial print what these pages show; pages, links and figures agree.
//!
//! In each `console` block a line that begins with `$ ` is run in one scratch folder, and the lines after it must be its
//! output; `…` stands for any lines, or for any part of one, `[exit N]` for the exit status. `policy.example.toml` is the file of
//! the repository. `cat FILE` writes what the page shows into that file. A server runs beside the commands that follow,
//! until the next server, and listens on a free port instead of 8080. `cargo run --release --` is the program under test; that
//! it is the only binary which `cargo run` finds is a test of its own.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

mod architecture;
mod console;
mod links;
mod runbooks;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use console::Shown;

/// Where the pages' servers listen for Redis clients.
const RESP_ADDRESS: &str = "127.0.0.1:6380";
/// Where the pages' servers listen.
const ADDRESS: &str = "127.0.0.1:8080";

/// Where they answer Envoy.
const GRPC_ADDRESS: &str = "127.0.0.1:8081";

/// The command that takes the place of `threshold` in a clone.
const FROM_A_CLONE: &str = "cargo run --release -- ";

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// A command where `threshold` is the program under test.
fn shell(command: &str, folder: &Path) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_threshold")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(folder).env("PATH", path);
    shell
}

/// A page's server, on a free port, until it is dropped.
struct Server {
    child: Child,
    address: String,
    grpc: String,
}

impl Server {
    /// Starts it, and returns what it printed, with the page's address in place of its own.
    fn start(command: &str, folder: &Path) -> (Self, Vec<String>) {
        let command = format!("exec {command} --http 127.0.0.1:0 --grpc 127.0.0.1:0 --resp 127.0.0.1:0");
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
        let listener = |name: &str| {
            let address = printed.iter().find_map(|line| line.trim().strip_prefix(name)?.split("//").nth(1));
            address.expect("it says where it listens").to_owned()
        };
        let (address, grpc, resp) = (listener("http "), listener("grpc "), listener("resp "));
        let shown =
            |line: &String| line.replace(&address, ADDRESS).replace(&grpc, GRPC_ADDRESS).replace(&resp, RESP_ADDRESS);
        let printed = printed.iter().map(shown).collect();
        (Self { child, address, grpc }, printed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs one command to its end. The program's own commands find the server, if there is one, at the port it really has.
fn run(command: &str, folder: &Path, server: Option<&Server>) -> Vec<String> {
    let mut shell = shell(command, folder);
    if let Some(server) = server {
        shell.env("THRESHOLD_SERVER", format!("http://{}", server.address));
    }
    let output = shell.output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    if !output.status.success() {
        lines.push(format!("[exit {}]", output.status.code().unwrap()));
    }
    lines
}

/// Runs the commands of a page in a folder.
fn play(shown: Vec<Shown>, folder: &Path) {
    assert!(shown.len() >= 4, "the page shows {} commands", shown.len());
    let mut server: Option<Server> = None;
    for Shown { command, output } in shown {
        // The tests run on an installed program already, and are what `./test` runs.
        if command.starts_with("cargo install") || command == "./test" {
            continue;
        }
        let here = |text: &str| match &server {
            Some(server) => text.replace(ADDRESS, &server.address),
            None => text.to_owned(),
        };
        let command = command.replace(FROM_A_CLONE, "threshold ");
        if let Some(file) = command.strip_prefix("cat ") {
            std::fs::write(folder.join(file), here(&output.join("\n")) + "\n").unwrap();
            continue;
        }
        let lines = if command.starts_with("threshold serve") {
            // Two servers cannot have the same journal.
            drop(server.take());
            let (started, printed) = Server::start(&command, folder);
            server = Some(started);
            printed
        } else {
            run(&here(&command), folder, server.as_ref())
        };
        console::assert_agree(&command, &output, &lines);
    }
}

/// An empty folder for the commands of a page.
fn scratch(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("threshold-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn the_readme_does_what_it_says() {
    let (readme, folder) = (read("README.md"), scratch("readme"));
    std::fs::copy(root().join("policy.example.toml"), folder.join("policy.example.toml")).unwrap();
    play(console::commands(&readme), &folder);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The commands of the README named `policy.example.toml`, which was nowhere: only the test knew that it is the policy above them.
#[test]
fn the_policy_of_the_readme_is_a_file() {
    let readme = read("README.md");
    let shown = console::blocks(&readme, "toml").first().expect("the README shows a policy").join("\n") + "\n";
    assert_eq!(read("policy.example.toml"), shown);
    assert!(readme.contains("`policy.example.toml`"), "the README does not say that the policy is a file");
}

/// Every preset began with `#:schema ./schema.json`, and nothing wrote that file: editors complained about line 1.
#[test]
fn the_files_that_init_names_are_there() {
    let folder = scratch("init");
    let printed = |command: &str| {
        let output = shell(command, &folder).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let schema = read("policies/schema.json");
    assert_eq!(printed("threshold schema"), schema);
    let presets = printed("threshold init --list");
    for preset in presets.lines().filter_map(|line| line.split_whitespace().next()) {
        let policy = printed(&format!("threshold init {preset}"));
        let mut lines = policy.lines();
        let name = lines.next().and_then(|line| line.strip_prefix("#:schema ./")).expect(preset);
        // In a clone, where the README has it written.
        assert_eq!(read(name), schema);
        // Anywhere else, the next line has the command.
        let command = lines.next().and_then(|line| line.split('`').nth(1)).expect(preset);
        printed(command);
        assert_eq!(std::fs::read_to_string(folder.join(name)).unwrap(), schema);
        std::fs::remove_file(folder.join(name)).unwrap();
        for path in links::paths(&policy) {
            assert!(root().join(&path).exists(), "init {preset} names {path}, which does not exist");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn the_tutorial_does_what_it_says() {
    let folder = scratch("tutorial");
    play(console::commands(&read("docs/tutorial.md")), &folder);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The figures of the README are those of the page that says how they were measured: the README showed ×1.02 where that page had
/// measured ×1.34.
#[test]
fn the_readme_shows_figures_that_were_measured() {
    let (readme, measured) = (read("README.md"), read("docs/benchmarks.md"));
    for figure in readme.split_whitespace().filter(|word| word.starts_with('×')) {
        assert!(measured.contains(figure), "docs/benchmarks.md does not have {figure}");
    }
}

/// A front page of 17 KB was read by nobody to its end.
#[test]
fn the_readme_is_short() {
    let length = read("README.md").len();
    assert!(
        length <= 7_168,
        "README.md has {length} bytes: move what is too long to the page of docs/ that is about it"
    );
}

/// Each of the five systems has its policy, and the program that its command starts.
#[test]
fn the_systems_of_the_readme_have_a_policy_and_a_program() {
    let (root, readme) = (root(), read("README.md"));
    let section = console::sections(&readme).find(|text| text.starts_with("Five systems that run\n")).unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let mut count = 0;
    for row in rows {
        let code: Vec<&str> = row.split('`').skip(1).step_by(2).collect();
        let [name, command, ..] = code.as_slice() else { panic!("{row}") };
        assert!(root.join(format!("policies/{name}.toml")).exists(), "{row}");
        let program = match command.split_once("cargo run --example ") {
            Some((_, example)) => format!("crates/threshold-limiter/examples/{example}.rs"),
            None => format!("examples/workers/{}/wrangler.toml", command.split(' ').nth(1).unwrap()),
        };
        assert!(root.join(&program).exists(), "{row}: {program} does not exist");
        count += 1;
    }
    assert_eq!(count, 5);
}

/// The first screen says what this is, and names the two commands to try in a clone: one starts the server, followed by a
/// request that it answers; the other runs the tests.
#[test]
fn the_first_screen_starts_the_server_and_the_tests() {
    let (root, readme) = (root(), read("README.md"));
    let screen: Vec<&str> = readme.lines().take(35).collect();
    let shown: Vec<String> = console::commands(&screen.join("\n")).into_iter().map(|shown| shown.command).collect();
    let [serve, curl, test] = shown.as_slice() else { panic!("{shown:?}") };
    assert_eq!(serve, "cargo run --release -- serve");
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

/// Adds the text of all Rust files below a folder.
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

/// Returns the folders of all crates, from the root of the repository.
fn crates() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("crates")).unwrap();
    entries.map(|entry| Path::new("crates").join(entry.unwrap().file_name())).collect()
}

/// `docs/limits.md` names a test for each bound, and every one of them exists.
#[test]
fn every_bound_has_a_test() {
    let (root, page) = (root(), read("docs/limits.md"));
    let mut code = String::new();
    for krate in crates() {
        for folder in ["src", "tests"].map(|part| root.join(&krate).join(part)) {
            if folder.exists() {
                sources(&folder, &mut code);
            }
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
