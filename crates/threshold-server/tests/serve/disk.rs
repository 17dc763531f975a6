//! Tests the journal on a disk that is full, read-only, slow or failing, and with a damaged file. Decisions continue, nothing is
//! acknowledged that is not on disk, and the server recovers without a restart.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use super::envoy::{codes, descriptor, grpc_address};
use super::grpc_client::{GrpcClient, RATE_LIMIT};
use super::process::{PATIENCE, Scratch, Server, Start, compiled};
use super::proto::{Code, RateLimitRequest};

const POLICY: &str = r#"
[envoy.descriptors]
"x-user" = "user"

[login]
locks = { 2 = "1h" }

[[rule]]
name = "posts"
per = ["user"]
limit = "1/day"
ladder = "strict"
strike = "request"
on_missing = "skip"
"#;

/// A small file system in a mount namespace of its own, which only the test and its servers see. It needs `unshare` and user
/// namespaces, or root, and ends with the test.
struct Disk {
    holder: Child,
    folder: Scratch,
}

impl Disk {
    fn of_size(size: &str) -> Self {
        let folder = Scratch::folder();
        let script = format!("mount -t tmpfs -o size={size} tmpfs \"$0\" && echo mounted && exec cat");
        let mut unshare = Command::new("unshare");
        unshare.args(["--map-root-user", "--mount", "sh", "-c", &script]).arg(folder.path());
        let mut holder = unshare.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said.trim(), "mounted", "a mount namespace cannot be had here (unshare --map-root-user --mount)");
        Self { holder, folder }
    }

    fn db(&self) -> PathBuf {
        self.folder.path().join("threshold.db")
    }

    /// The words before a command that is to run in the namespace.
    fn inside(&self) -> Vec<String> {
        let holder = self.holder.id().to_string();
        ["nsenter", "--target", &holder, "--user", "--mount", "--preserve-credentials", "--"].map(str::to_owned).into()
    }

    /// Runs a shell command in the namespace, with the disk as `$0`. Returns whether it succeeded.
    fn run(&self, line: &str) -> bool {
        let inside = self.inside();
        let (program, words) = inside.split_first().unwrap();
        let mut command = Command::new(program);
        command.args(words).args(["sh", "-c", line]).arg(self.folder.path()).stderr(Stdio::null());
        command.status().unwrap().success()
    }

    fn server(&self, policy: &Path) -> Server {
        let (inside, db) = (self.inside(), self.db());
        let before: Vec<&str> = inside.iter().map(String::as_str).collect();
        Start { policy: Some(policy), args: &["--db", db.to_str().unwrap()], before: &before, ..Start::default() }
            .server()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // It ends with its standard input.
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

fn get(server: &Server, path: &str) -> Value {
    server.connect().send("GET", path, &[], "").unwrap().json()
}

fn post(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let answer = server.connect().post(path, &body.to_string()).unwrap();
    (answer.status, answer.json())
}

fn ban(server: &Server, user: &str) -> u16 {
    let (status, told) = post(server, "/v1/bans", &json!({"layer": "user", "key": user, "reason": "test"}));
    if status != 200 {
        assert_eq!((status, &told["error"]), (503, &json!("not_saved")), "{told}");
    }
    status
}

/// Bans a user, and repeats that until it is on disk: the machine's own disk may be busy.
fn ban_for_sure(server: &Server, user: &str) {
    let begun = Instant::now();
    while ban(server, user) != 200 {
        assert!(begun.elapsed() < PATIENCE, "nothing is written any more");
    }
}

/// Exceeds the limit. Returns whether the strike was on disk when the request was answered.
fn strike(server: &Server, user: &str) -> bool {
    let told: Vec<Value> = (0..2).map(|_| post(server, "/v1/check", &json!({"user": user})).1).collect();
    assert_eq!((&told[0]["allowed"], &told[1]["allowed"]), (&json!(true), &json!(false)), "{told:?}");
    if told[1]["degraded"] == true {
        assert_eq!(told[1]["degradedReason"], "journal");
    }
    told[1]["degraded"] == false
}

/// Fails a login. Returns the status of the answer to its result.
fn guess(server: &Server, account: &str) -> u16 {
    let (status, told) = post(server, "/v1/login/attempt", &json!({"account": account, "ip": "203.0.113.7"}));
    assert_eq!(status, 200, "{told}");
    post(server, "/v1/login/result", &json!({"attempt": told["attempt"], "success": false})).0
}

/// Polls `/readyz` until the condition holds, and fails after a bounded time.
fn until_ready(server: &Server, says: impl Fn(&Value) -> bool) -> Value {
    let begun = Instant::now();
    loop {
        let ready = get(server, "/readyz");
        if says(&ready) {
            return ready;
        }
        assert!(begun.elapsed() < PATIENCE, "it still says {ready}");
        std::thread::yield_now();
    }
}

/// Checks a server whose disk fails: it reports that, acknowledges nothing, and continues to decide by its changes.
fn check_degraded(server: &Server, reason: &str) {
    assert_eq!(ban(server, "meanwhile"), 503);
    let ready = get(server, "/readyz");
    assert_eq!(ready["status"], "degraded");
    assert!(ready["reason"].as_str().unwrap().contains(reason), "{ready}");
    while !server.wait_for_log("journal degraded").contains(reason) {}
    assert!(!strike(server, "striker"), "a strike was said to be on a disk that is not written to");
    assert_eq!(guess(server, "victim"), 503);
    assert_eq!(post(server, "/v1/check", &json!({"user": "meanwhile"})).1["banned"], true);
    assert_eq!(post(server, "/v1/check", &json!({"user": "somebody"})).1["degraded"], false);
}

/// Checks that changes are acknowledged, and that all of them are there after `kill -9`.
fn check_all_there(server: Server, start: impl Fn() -> Server) -> Server {
    guess(&server, "victim");
    ban_for_sure(&server, "afterwards");
    server.signal("KILL");
    drop(server);
    let server = start();
    assert_eq!(get(&server, "/readyz")["status"], "ok");
    for user in ["before", "meanwhile", "afterwards"] {
        assert_eq!(post(&server, "/v1/check", &json!({"user": user})).1["banned"], true, "{user}");
    }
    assert_eq!(get(&server, "/v1/subjects/user/striker")["strikes"], 1);
    assert_eq!(get(&server, "/v1/subjects/account/victim")["failures"], 2);
    server
}

/// Checks a server whose disk works again: it reports that, acknowledges changes, and has lost nothing.
fn check_recovered(server: Server, start: impl Fn() -> Server) {
    until_ready(&server, |ready| ready["status"] == "ok");
    server.wait_for_log("journal recovered");
    check_all_there(server, start);
}

fn policy() -> Scratch {
    Scratch::file("policy.toml", POLICY)
}

#[test]
fn a_full_disk() {
    let (disk, policy) = (Disk::of_size("1m"), policy());
    let server = disk.server(policy.path());
    ban_for_sure(&server, "before");
    assert!(!disk.run("cat /dev/zero > $0/filler"), "a disk of a megabyte is full some time");
    check_degraded(&server, "database or disk is full");
    assert!(disk.run("rm $0/filler"));
    check_recovered(server, || disk.server(policy.path()));
}

/// Remounts the file system of the journal read-only for a while.
#[test]
fn a_read_only_disk() {
    let (disk, policy) = (Disk::of_size("1m"), policy());
    let server = disk.server(policy.path());
    ban_for_sure(&server, "before");
    assert!(disk.run("mount -t tmpfs -o ro tmpfs $0"));
    check_degraded(&server, "Read-only file system");
    assert!(disk.run("umount $0"));
    check_recovered(server, || disk.server(policy.path()));
    // A server does not start on such a disk, and says why.
    assert!(disk.run("mount -o remount,bind,ro $0"));
    let (inside, db) = (disk.inside(), disk.db());
    let before: Vec<&str> = inside.iter().map(String::as_str).collect();
    let args = ["--db", db.to_str().unwrap()];
    let refused = Start { policy: Some(policy.path()), args: &args, before: &before, ..Start::default() }.command();
    let refused = { refused }.output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("Read-only file system"), "{said}");
}

/// A server whose writes are slowed or failed by a preloaded library, which a file controls.
struct Ordered {
    folder: Scratch,
    policy: Scratch,
}

impl Ordered {
    fn new() -> Self {
        let ordered = Self { folder: Scratch::folder(), policy: policy() };
        compiled("disk/fsync.c", ordered.folder.path());
        ordered.order("ok");
        ordered
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn order(&self, order: &str) {
        let next = self.path("order.next");
        std::fs::write(&next, order).unwrap();
        std::fs::rename(next, self.path("order")).unwrap();
    }

    fn server(&self) -> Server {
        self.server_with(&[])
    }

    fn server_with(&self, more: &[&str]) -> Server {
        let (db, library, order) = (self.path("threshold.db"), self.path("fsync.so"), self.path("order"));
        let variables = [("LD_PRELOAD", library.to_str().unwrap()), ("THRESHOLD_FSYNC", order.to_str().unwrap())];
        let args = [&["--db", db.to_str().unwrap()], more].concat();
        Start { policy: Some(self.policy.path()), args: &args, variables: &variables, ..Start::default() }.server()
    }
}

#[test]
fn a_disk_that_fails() {
    let disk = Ordered::new();
    let server = disk.server();
    ban_for_sure(&server, "before");
    disk.order("fail");
    check_degraded(&server, "disk I/O error");
    disk.order("ok");
    check_recovered(server, || disk.server());
}

/// A write that does not return: requests that need no disk are not delayed, and nothing is acknowledged.
#[test]
fn a_disk_that_is_slow() {
    let disk = Ordered::new();
    let server = disk.server();
    ban_for_sure(&server, "before");
    disk.order("hold");
    assert!(!strike(&server, "striker"));
    let ready = until_ready(&server, |ready| ready["status"] == "degraded");
    assert!(ready["reason"].as_str().unwrap().contains("the journal is slow"), "{ready}");
    server.wait_for_log("journal slow");
    assert_eq!((ban(&server, "meanwhile"), guess(&server, "victim")), (503, 503));
    for number in 0..100 {
        let told = post(&server, "/v1/check", &json!({"user": format!("u{number}")})).1;
        assert_eq!((&told["allowed"], &told["degraded"]), (&json!(true), &json!(false)));
    }
    disk.order("ok");
    server.wait_for_log("journal no longer slow");
    guess(&server, "victim");
    ban_for_sure(&server, "afterwards");
    server.signal("KILL");
    drop(server);
    let server = disk.server();
    assert_eq!(get(&server, "/v1/subjects/user/striker")["strikes"], 1);
    assert_eq!(get(&server, "/v1/subjects/account/victim")["failures"], 2);
    for user in ["before", "meanwhile", "afterwards"] {
        assert_eq!(post(&server, "/v1/check", &json!({"user": user})).1["banned"], true, "{user}");
    }
}

/// An answer to Envoy cannot say that its strike is not on disk yet, but it is counted.
///
/// Woken by: answering Envoy without `save_strikes`.
#[test]
fn a_strike_for_envoy_waits_for_the_disk_too() {
    let disk = Ordered::new();
    let server = disk.server_with(&["--grpc", "127.0.0.1:0"]);
    let mut client = GrpcClient::connect(grpc_address(&server));
    disk.order("hold");
    let descriptors = vec![descriptor(&[("x-user", "striker")])];
    let request = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 };
    let asked = [(); 2].map(|()| codes(&client.call(RATE_LIMIT, &request).unwrap()).0);
    assert_eq!(asked, [Code::Ok, Code::OverLimit]);
    let metrics = server.connect().send("GET", "/metrics", &[], "").unwrap().body;
    assert!(metrics.contains("threshold_degraded_total{reason=\"journal\"} 1"), "{metrics}");
    disk.order("ok");
}

/// A disk that never answers does not keep the server from ending. Woken by: waiting for `Desk::close` without a bound.
#[test]
fn a_server_ends_although_its_disk_hangs() {
    let disk = Ordered::new();
    let server = disk.server_with(&["--drain", "1s"]);
    assert_eq!(ban(&server, "before"), 200);
    disk.order("hold");
    assert!(!strike(&server, "striker"));
    server.signal("TERM");
    let (status, log) = server.wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("journal not closed in time"), "{log}");
}

/// The file is overwritten while the server runs: the server detects, reports and repairs that by itself.
#[test]
fn a_file_that_is_damaged_while_the_server_runs() {
    let (folder, policy) = (Scratch::folder(), policy());
    let db = folder.path().join("threshold.db");
    let start =
        || Start { policy: Some(policy.path()), args: &["--db", db.to_str().unwrap()], ..Start::default() }.server();
    let server = start();
    strike(&server, "striker");
    guess(&server, "victim");
    for user in ["before", "meanwhile"] {
        ban_for_sure(&server, user);
    }
    let given = json!({"times": 10, "reason": "test"});
    assert_eq!(
        server
            .connect()
            .send("PUT", "/v1/users/u1", &[("content-type", "application/json")], &given.to_string())
            .unwrap()
            .status,
        200
    );
    for (file, text) in [("threshold.db", "no database"), ("threshold.db-wal", "no log")] {
        let path = folder.path().join(file);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.iter_mut().zip(text.bytes().cycle()).skip(100).for_each(|(byte, other)| *byte = other);
        std::fs::write(&path, &bytes).unwrap();
    }
    let said = server.wait_for_log("journal rebuilt");
    assert!(said.contains("threshold.db.damaged-"), "{said}");
    // The repair is reported for a while, so that a health check sees it.
    let ready = until_ready(&server, |ready| ready["reason"].as_str().is_some_and(|reason| reason.contains("rebuilt")));
    assert_eq!(ready["status"], "degraded");
    let server = check_all_there(server, start);
    assert_eq!(get(&server, "/v1/users/u1")["times"], 10);
    let asides = std::fs::read_dir(folder.path()).unwrap().filter_map(Result::ok);
    assert!(asides.map(|entry| entry.file_name().into_string().unwrap()).any(|name| name.contains("damaged-")));
}
