//! Several servers on one Redis: `--store redis://…` is all it takes.

use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use super::process::{PATIENCE, POLICY, Scratch, Server, Start};

const SECRET: &str = "the secret of all of these nodes";

/// A Redis on a socket in a folder of its own.
struct Redis {
    child: Child,
    folder: Scratch,
}

impl Redis {
    fn start() -> Self {
        let folder = Scratch::folder();
        let child = Command::new("redis-server")
            .args(["--port", "0", "--unixsocket", "socket", "--save", "", "--appendonly", "no"])
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is installed: ./test does that");
        let (redis, begun) = (Self { child, folder }, Instant::now());
        while UnixStream::connect(redis.folder.path().join("socket")).is_err() {
            assert!(begun.elapsed() < PATIENCE, "redis-server does not answer");
            std::thread::yield_now();
        }
        redis
    }

    fn url(&self) -> String {
        format!("redis+unix://{}", self.folder.path().join("socket").display())
    }

    fn node(&self, policy: &Scratch) -> Server {
        let (url, policy) = (self.url(), Some(policy.path()));
        let variables = [("THRESHOLD_SECRET", SECRET)];
        Start { args: &["--store", &url], variables: &variables, policy, ..Start::default() }.server()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn check(node: &Server, user: &str) -> Value {
    let body = json!({"user": user, "ip": "192.0.2.1"}).to_string();
    node.connect().post("/v1/check", &body).unwrap().json()
}

/// Somebody starts a second server beside the first, and three requests are allowed in all, not three by each.
#[test]
fn two_servers_share_a_limit() {
    let (redis, policy) = (Redis::start(), Scratch::file("policy.toml", POLICY));
    let (one, other) = (redis.node(&policy), redis.node(&policy));
    let asked: Vec<Value> = [&one, &other, &one, &other, &one].map(|node| check(node, "ada")).to_vec();
    let allowed: Vec<bool> = asked.iter().map(|answer| answer["allowed"] == true).collect();
    assert_eq!(allowed, [true, true, true, false, false], "{asked:?}");
    assert!(asked.iter().all(|answer| answer["degraded"] == false), "{asked:?}");
    assert_eq!(check(&other, "bob")["allowed"], true);
}

/// An operator bans an address on one node, and it is banned on the other within a second.
#[test]
fn a_ban_on_one_server_holds_on_the_other() {
    let (redis, policy) = (Redis::start(), Scratch::file("policy.toml", POLICY));
    let (one, other) = (redis.node(&policy), redis.node(&policy));
    let ban = json!({"layer": "edge", "key": "192.0.2.1", "reason": "scraping"}).to_string();
    assert_eq!(one.connect().post("/v1/bans", &ban).unwrap().status, 200);
    let begun = Instant::now();
    while check(&other, "ada")["verdict"] != "ban" {
        assert!(begun.elapsed() < PATIENCE, "the ban did not arrive");
        std::thread::yield_now();
    }
}

/// A node without the secret of the others would count under other digests, and admit everything a second time.
#[test]
fn a_node_needs_the_secret_of_the_others() {
    let (redis, policy) = (Redis::start(), Scratch::file("policy.toml", POLICY));
    let _node = redis.node(&policy);
    let url = redis.url();
    let refusal = |variables: &[(&str, &str)]| {
        let args = ["--store", url.as_str()];
        let start = Start { args: &args, variables, policy: Some(policy.path()), ..Start::default() };
        let output = start.command().output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let without = refusal(&[]);
    assert!(without.contains("THRESHOLD_SECRET, the same on every node"), "{without}");
    let with_another = refusal(&[("THRESHOLD_SECRET", "another secret than the others")]);
    assert!(with_another.contains("was written with the secret"), "{with_another}");
}
