//! Tests the files of `deploy/` that no proxy reads: container, compose and Kubernetes. `./test` compares the manifests with the
//! schema of Kubernetes.

use std::path::Path;
use std::process::Command;

use super::process::{Scratch, Server};

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)).unwrap()
}

/// Runs the program, and returns its exit code and its output.
fn threshold(args: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_threshold")).args(args).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

/// The image has no curl, so a container had no health check. Docker accepts 0 and 1 from one.
#[test]
fn a_container_can_ask_for_its_health() {
    assert!(read("deploy/Containerfile").contains("CMD [\"threshold\", \"health\"]"));
    let (mut server, policy) = Server::with("[[rule]]\nname = \"r\"\nper = [\"ip\"]\nlimit = \"5/h\"\n");
    let health = |server: &Server, more: &[&str]| threshold(&[&["health", "--server", &server.place], more].concat());
    assert_eq!(health(&server, &[]), (0, "ok\n".to_owned()));
    assert_eq!(health(&server, &["--ready"]), (0, "ok\n".to_owned()));
    // A bad policy file is told, and is no reason to restart it.
    policy.replace("limit = 5");
    server.signal("HUP");
    server.wait_for_log("policy not reloaded");
    let (code, text) = health(&server, &["--ready"]);
    assert!(code == 0 && text.starts_with("degraded: the policy could not be reloaded: "), "{text}");
    assert_eq!(health(&server, &[]), (0, "ok\n".to_owned()));
    let place = server.place.clone();
    server.signal("TERM");
    while server.ended().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let (code, text) = threshold(&["health", "--server", &place]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("no server answers at"), "{text}");
}

/// Docker ignores `.containerignore`: it sent `target/`, and journals with their secrets, to the build.
#[test]
fn docker_and_podman_leave_out_the_same_files() {
    let ignored = read(".dockerignore");
    assert_eq!(ignored, read(".containerignore"));
    for name in ["**/target", ".git", "*.db", "*.secret"] {
        assert!(ignored.lines().any(|line| line == name), "{name} is not in .dockerignore");
    }
}

/// The policy in the ConfigMap is one that a server takes, without a warning.
#[test]
fn the_policy_of_the_manifests_has_no_findings() {
    let manifest = read("deploy/kubernetes/configmap.yaml");
    let (_, block) = manifest.split_once("  policy.toml: |\n").unwrap();
    let policy: String =
        block.lines().map(|line| format!("{}\n", line.strip_prefix("    ").unwrap_or_default())).collect();
    let file = Scratch::file("policy.toml", &policy);
    let (code, text) = threshold(&["lint", "--deny", "warnings", file.path().to_str().unwrap()]);
    assert_eq!(code, 0, "{text}");
}

/// Kubernetes kills a pod after its grace period. A period as long as `--drain` alone would cut off the closing of the journal.
#[test]
fn the_grace_periods_are_longer_than_the_server_needs_to_end() {
    let manifest = read("deploy/kubernetes/deployment.yaml");
    let number = |text: &str, before: &str| -> u64 {
        let rest = text.split_once(before).unwrap_or_else(|| panic!("no {before}")).1.trim_start();
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap()
    };
    let drain = number(&manifest, "- --drain\n            -");
    let sleep = number(&manifest, "sleep:\n                seconds:");
    assert!(number(&manifest, "terminationGracePeriodSeconds:") > sleep + 2 * drain);
    // The compose files leave --drain at its default.
    let (_, help) = threshold(&["serve", "--help"]);
    let default = help.split_once("--drain").unwrap().1.split_once("[default: ").unwrap().1;
    for file in ["deploy/compose.yml", "deploy/compose-nginx.yml"] {
        assert!(number(&read(file), "stop_grace_period:") > 2 * number(default, ""), "{file}");
    }
}
