//! The examples do what they say: each is started as a person starts it, on a socket of its own.

#![cfg(feature = "tower")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// An example that is running, until this is dropped.
struct Running {
    child: Child,
    address: String,
}

impl Running {
    fn start(name: &str) -> Self {
        // Cargo puts examples beside the tests; it builds them unless it is asked for this test alone.
        let tests = std::env::current_exe().unwrap();
        let program = tests.ancestors().nth(2).unwrap().join("examples").join(name);
        assert!(program.exists(), "build it first: cargo build -p threshold-limiter --all-features --example {name}");
        let mut child = Command::new(program).arg("127.0.0.1:0").stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit('/').next().unwrap().to_owned();
        Self { child, address }
    }

    /// The status of an answer, and all of its text.
    fn get(&self, path: &str, token: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let host = &self.address;
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        (text.split(' ').nth(1).unwrap().parse().unwrap(), text)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn axum_limits_tenants_and_users() {
    let running = Running::start("axum");
    let statuses = |token: &str, times: usize| -> Vec<u16> {
        std::iter::repeat_with(|| running.get("/notes", token).0).take(times).collect()
    };
    let (status, text) = running.get("/notes", "ada");
    assert_eq!(status, 200);
    assert!(text.contains("\r\nx-ratelimit-limit: 3\r\n") && text.ends_with("the notes of ada\n"), "{text}");
    assert_eq!(statuses("ada", 3), [200, 200, 429]);
    assert_eq!(statuses("bob", 2), [200, 200]);
    let (status, text) = running.get("/notes", "bob");
    assert_eq!(status, 429);
    assert!(text.contains("tenant_rate_limited") && text.contains("\r\nretry-after: "), "{text}");
    assert_eq!(statuses("eve", 1), [200]);
    assert_eq!(statuses("guess", 6), [401, 401, 401, 401, 401, 429]);
}

#[test]
fn the_readme_shows_the_example_that_is_compiled() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let block = |text: &str, opening: &str| -> String {
        let lines = text.lines().skip_while(|line| *line != opening).skip(1);
        lines.take_while(|line| *line != "```").flat_map(|line| [line, "\n"]).collect()
    };
    let source = read("src/tower.rs");
    let documented: String = source
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .fold(String::new(), |text, line| text + line.strip_prefix(' ').unwrap_or(line) + "\n");
    let compiled = block(&documented, "```no_run");
    assert!(compiled.lines().count() > 10, "{compiled}");
    assert_eq!(block(&read("../../README.md"), "```rust"), compiled);
}
