//! Starts a server as a process on a free port, which ends with its test.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::client::Client;

/// A timeout that is far longer than any answer takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A policy for most tests.
pub(crate) const POLICY: &str = r#"
[[rule]]
name = "address"
layer = "edge"
per = ["ip"]
limit = "1000/h"
algorithm = "fixed-window"
anchor = "first"

[[rule]]
name = "posts"
layer = "user"
per = ["user"]
limit = "3/h"
algorithm = "sliding-log"
on_missing = "skip"

[[rule]]
name = "tokens"
layer = "user"
per = ["user"]
limit = "1000/h"
cost = "tokens"
on_missing = "skip"
"#;

/// A server and its output.
pub(crate) struct Server {
    child: Child,
    /// The address in its banner: `http://127.0.0.1:40123`.
    pub(crate) place: String,
    /// The address of its RESP listener, if it has one: `redis://127.0.0.1:40124`.
    pub(crate) resp: Option<String>,
    /// Threads that read its output, so that it never blocks on a full pipe.
    _out: BufReader<ChildStdout>,
    /// Log lines that were read to find out the address.
    start_lines: Vec<String>,
    log: Option<Receiver<String>>,
    reader: Option<JoinHandle<()>>,
}

/// How a server is started.
#[derive(Default)]
pub(crate) struct Start<'a> {
    pub(crate) args: &'a [&'a str],
    pub(crate) variables: &'a [(&'a str, &'a str)],
    /// The policy file; the starter policy by default.
    pub(crate) policy: Option<&'a Path>,
    /// A command that execs the program, such as `unshare`.
    pub(crate) before: &'a [&'a str],
}

impl Start<'_> {
    pub(crate) fn command(&self) -> Command {
        let mut words = self.before.iter().copied().chain([env!("CARGO_BIN_EXE_threshold")]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).arg("serve").args(self.policy);
        if !self.args.contains(&"--http") {
            command.args(["--http", "127.0.0.1:0"]);
        }
        // The default addresses are the same for all servers of a machine.
        if !self.args.contains(&"--grpc") {
            command.arg("--no-grpc");
        }
        if !self.args.contains(&"--resp") {
            command.arg("--no-resp");
        }
        if !self.args.contains(&"--db") {
            command.arg("--no-db");
        }
        // A busy machine must not miss a deadline of 20 ms. Tests of a deadline name their own.
        let names_deadline = self.args.contains(&"--store-deadline")
            || self.variables.iter().any(|(name, _)| *name == "THRESHOLD_STORE_DEADLINE");
        if self.args.contains(&"--store") && !names_deadline {
            command.args(["--store-deadline", "10000"]);
        }
        command.args(self.args).env_clear().envs(self.variables.iter().copied());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub(crate) fn server(&self) -> Server {
        let (mut server, stderr) = self.unread();
        let (send, log) = channel();
        for line in std::mem::take(&mut server.start_lines) {
            let _ = send.send(line);
        }
        let errors = BufReader::new(stderr);
        let reader = std::thread::spawn(move || {
            for line in errors.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        (server.log, server.reader) = (Some(log), Some(reader));
        server
    }

    /// Starts a server whose log is not read. Its standard error is returned.
    pub(crate) fn unread(&self) -> (Server, ChildStderr) {
        let mut child = self.command().spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        if self.args.windows(2).any(|pair| pair == ["--log", "json"]) {
            let mut stderr = child.stderr.take().unwrap();
            let (place, start_lines) = logged_place(&mut stderr);
            return (Server { child, place, resp: None, _out: out, start_lines, log: None, reader: None }, stderr);
        }
        let mut said = String::new();
        let mut place = None;
        let (place, resp) = loop {
            let mut line = String::new();
            if out.read_line(&mut line).unwrap() == 0 {
                let mut error = String::new();
                child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
                let status = child.wait().unwrap();
                panic!("the server did not start: {status}\n{said}{error}");
            }
            said.push_str(&line);
            place = line.trim().strip_prefix("http ").map(|place| place.trim().to_owned()).or(place);
            let resp = line.trim().strip_prefix("resp ").map(|place| place.trim().to_owned());
            if let Some(place) = place.clone().filter(|_| resp.is_some() || !self.args.contains(&"--resp")) {
                break (place, resp);
            }
        };
        let stderr = child.stderr.take().unwrap();
        (Server { child, place, resp, _out: out, start_lines: Vec::new(), log: None, reader: None }, stderr)
    }
}

/// Reads the log, which has no banner beside it, until the server listens. Returns its address, and the lines so far.
///
/// It reads byte by byte, so that the rest of the log is left for its reader.
fn logged_place(stderr: &mut ChildStderr) -> (String, Vec<String>) {
    let (mut lines, mut line) = (Vec::new(), Vec::new());
    loop {
        let mut byte = [0];
        if stderr.read(&mut byte).unwrap() == 0 {
            panic!("the server did not start\n{}", lines.join("\n"));
        }
        if byte != *b"\n" {
            line.extend(byte);
            continue;
        }
        let text = String::from_utf8(std::mem::take(&mut line)).unwrap();
        let fields: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        lines.push(text);
        if let (Some("listening"), Some(place)) = (fields["message"].as_str(), fields["http"].as_str()) {
            return (place.to_owned(), lines);
        }
    }
}

/// Compiles a library of these tests that stands between a program and a call of the system, as `LD_PRELOAD`.
pub(crate) fn compiled(source: &str, folder: &Path) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve").join(source);
    let library = folder.join(source.with_extension("so").file_name().unwrap());
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).status();
    assert!(compiled.unwrap().success(), "the C compiler that Rust links with is missing");
    library.into_os_string().into_string().unwrap()
}

impl Server {
    /// Starts a server with this policy.
    pub(crate) fn with(policy: &str) -> (Self, Scratch) {
        let file = Scratch::file("policy.toml", policy);
        let server = Start { policy: Some(file.path()), ..Start::default() }.server();
        (server, file)
    }

    pub(crate) fn connect(&self) -> Client<TcpStream> {
        Client::new(self.stream())
    }

    pub(crate) fn stream(&self) -> TcpStream {
        let (_, address) = self.place.split_once("://").unwrap();
        let stream = TcpStream::connect(address).unwrap();
        // If the server never answers, the test fails instead of hanging.
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by name.
    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.pid().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Waits for a log line that contains this text.
    pub(crate) fn wait_for_log(&self, text: &str) -> String {
        let log = self.log.as_ref().unwrap();
        loop {
            match log.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(text) => return line,
                Ok(_) => {}
                Err(error) => panic!("no line with \"{text}\": {error}"),
            }
        }
    }

    /// Waits until this node has a share of the limits, by which it decides while the store is away. On an empty store that takes ten
    /// seconds.
    pub(crate) fn wait_for_share(&self) {
        let begun = Instant::now();
        while self.connect().send("GET", "/metrics", &[], "").unwrap().body.contains("\nthreshold_store_share_nodes 0")
        {
            assert!(begun.elapsed() < PATIENCE, "the node has no share");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the exit status, if the process has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits for the process to end. Returns its exit status and the rest of the log.
    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        let rest: Vec<String> = self.log.take().iter().flat_map(Receiver::iter).collect();
        (status, rest.join("\n"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// A folder or file that is removed after the test.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn folder() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("threshold-serve-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn file(name: &str, text: &str) -> Self {
        let Self(folder) = &*std::mem::ManuallyDrop::new(Self::folder());
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Replaces the file atomically, as some editors do.
    pub(crate) fn replace(&self, text: &str) {
        let next = self.0.with_extension("next");
        std::fs::write(&next, text).unwrap();
        std::fs::rename(&next, &self.0).unwrap();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let folder = if self.0.is_dir() { Some(self.0.as_path()) } else { self.0.parent() };
        let _ = folder.map(std::fs::remove_dir_all);
    }
}
