//! A running example, and its answers.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use http::{Request, Response};

/// A running example, until this value is dropped.
pub(crate) struct Running {
    child: Child,
    pub(crate) address: String,
    log: Option<JoinHandle<String>>,
    client: ureq::Agent,
}

/// The largest number of idle connections: as many as there are threads, so that each keeps its connection.
pub(crate) const MAX_CONNECTIONS: usize = 64;

/// An answer with its whole body.
pub(crate) type Answer = Response<String>;

impl Running {
    /// Starts an example with these environment variables, and no others.
    #[track_caller]
    pub(crate) fn start(name: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = command(name, variables).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let log = std::thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).unwrap();
            text
        });
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").unwrap_or_default().to_owned();
        assert!(!address.is_empty(), "{name} does not listen: {}", log.join().unwrap());
        let client = ureq::Agent::config_builder().http_status_as_error(false).max_idle_connections(MAX_CONNECTIONS);
        let client = client.max_idle_connections_per_host(MAX_CONNECTIONS).build().new_agent();
        Self { child, address, log: Some(log), client }
    }

    /// Sends a request without a body.
    #[track_caller]
    pub(crate) fn ask(&self, method: &str, path: &str, fields: &[(&str, &str)]) -> Answer {
        read(self.client.run(self.request(method, path, fields).body(()).unwrap()))
    }

    /// Posts JSON.
    #[track_caller]
    pub(crate) fn post(&self, path: &str, fields: &[(&str, &str)], body: &str) -> Answer {
        let request = self.request("POST", path, fields).header("content-type", "application/json");
        read(self.client.run(request.body(body).unwrap()))
    }

    fn request(&self, method: &str, path: &str, fields: &[(&str, &str)]) -> http::request::Builder {
        let request = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        fields.iter().fold(request, |request, (name, value)| request.header(*name, *value))
    }

    /// Stops the example and returns its log.
    pub(crate) fn end(mut self) -> String {
        self.stop();
        self.log.take().unwrap().join().unwrap()
    }

    fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the command that starts an example.
#[track_caller]
pub(crate) fn command(name: &str, variables: &[(&str, &str)]) -> Command {
    // Cargo puts examples beside the tests. It builds them, unless only this test is built.
    let tests = std::env::current_exe().unwrap();
    let program = tests.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(program.exists(), "build it first: cargo build --example {name}");
    let mut command = Command::new(program);
    command.arg("127.0.0.1:0").env_clear().envs(variables.iter().copied());
    command
}

#[track_caller]
fn read(answer: Result<Response<ureq::Body>, ureq::Error>) -> Answer {
    let (parts, mut body) = answer.unwrap().into_parts();
    Response::from_parts(parts, body.read_to_string().unwrap())
}

/// Returns a header field of an answer; an empty text if there is none.
pub(crate) fn field<'a>(answer: &'a Answer, name: &str) -> &'a str {
    answer.headers().get(name).map_or("", |value| value.to_str().unwrap())
}
