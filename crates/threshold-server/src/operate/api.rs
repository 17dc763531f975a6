//! A client of the server's API, over HTTP, HTTPS or a Unix socket.

mod tls;
mod unix_socket;

use std::error::Error;
use std::fmt;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{Request, Response, StatusCode};
use serde_json::Value;
use threshold_core::text::printable;
use ureq::config::Config;
use ureq::tls::TlsConfig;
use ureq::unversioned::resolver::DefaultResolver;
use ureq::{Agent, Body};

use crate::cli::ServerArgs;
pub(crate) use tls::system_tls;
use unix_socket::UnixConnector;

/// How long to wait for an answer: twice the five seconds that a change waits for the disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a stream may last: longer than any machine runs.
const ENDLESS: Duration = Duration::from_secs(10 * 365 * 86_400);
/// The longest answer that is read: three times a page of 10,000 bans with the longest reasons.
const MAX_ANSWER: u64 = 64 << 20;
/// The URL of a server on a Unix socket. HTTP requires a host, and this one needs no name resolution.
const UNIX_SOCKET_URL: &str = "http://127.0.0.1";

/// A server, and the token to send to it.
pub(crate) struct Api {
    agent: Agent,
    /// The server as the operator wrote it, for messages.
    server: String,
    /// The beginning of every URL.
    base: String,
    token: Option<String>,
}

/// The error of a server that cannot be connected to.
#[derive(Debug)]
pub(super) struct Unreachable {
    server: String,
    source: ureq::Error,
}

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no server answers at {}", self.server)
    }
}

impl Error for Unreachable {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

/// The error of a call that the server has answered with another status than success.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) status: StatusCode,
    message: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.status)
    }
}

impl Error for Refused {}

impl Api {
    /// Prepares calls to a server. Nothing is sent yet.
    pub(super) fn new(args: &ServerArgs) -> anyhow::Result<Self> {
        // Both are read, so that a blank variable is reported even if the other one has a token.
        let (operator, reader) = (token("THRESHOLD_ADMIN_TOKEN")?, token("THRESHOLD_READ_TOKEN")?);
        Self::with(args, operator.or(reader), ANSWER_TIMEOUT)
    }

    /// Prepares calls that may take this long.
    pub(super) fn with_timeout(args: &ServerArgs, timeout: Duration) -> anyhow::Result<Self> {
        Self::with(args, token("THRESHOLD_ADMIN_TOKEN")?, timeout)
    }

    /// Prepares a call whose answer has no end.
    pub(super) fn endless(args: &ServerArgs) -> anyhow::Result<Self> {
        let (operator, reader) = (token("THRESHOLD_ADMIN_TOKEN")?, token("THRESHOLD_READ_TOKEN")?);
        Self::with(args, operator.or(reader), ENDLESS)
    }

    /// Prepares the calls of a service that asks about requests: an operator may make them too, but not with a read-only token.
    pub(crate) fn for_caller(args: &ServerArgs) -> anyhow::Result<Self> {
        let (operator, caller) = (token("THRESHOLD_ADMIN_TOKEN")?, token("THRESHOLD_TOKEN")?);
        Self::with(args, operator.or(caller), ANSWER_TIMEOUT)
    }

    /// Returns whether the command line or the environment names a server.
    pub(crate) fn is_named(args: &ServerArgs) -> bool {
        args.server.is_some() || variable(SERVER).is_some()
    }

    /// Returns the server as the operator wrote it.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    fn with(args: &ServerArgs, token: Option<String>, timeout: Duration) -> anyhow::Result<Self> {
        let server = args.server.clone().or_else(|| variable(SERVER));
        let server = server.unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
        let server = server.trim_end_matches('/').to_owned();
        let (agent, base) = connect(&server, args.ca.as_deref(), timeout)?;
        Ok(Self { agent, server, base, token })
    }

    /// Calls the server and returns its answer. A status other than success is an error with the server's message.
    pub(crate) fn call(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        // Also without a body: the server requires it of every operator's call, as a protection against CSRF.
        let request = request.header(CONTENT_TYPE, "application/json");
        let invalid = || format!("\"{}\" is not the URL of a server", self.server);
        let answered = match body {
            Some(body) => self.agent.run(request.body(body.to_string()).with_context(invalid)?),
            None => self.agent.run(request.body(()).with_context(invalid)?),
        };
        self.read(method, answered.map_err(|error| self.explain(error))?)
    }

    /// Opens a stream of server-sent events, of those after a number if there is one.
    pub(super) fn stream(&self, path: &str, after: Option<u64>) -> anyhow::Result<impl BufRead + use<>> {
        let mut request = Request::builder().uri(format!("{}{path}", self.base)).header(ACCEPT, "text/event-stream");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(after) = after {
            request = request.header("last-event-id", after);
        }
        let request = request.body(()).with_context(|| format!("\"{}\" is not the URL of a server", self.server))?;
        let response = self.agent.run(request).map_err(|error| self.explain(error))?;
        if !response.status().is_success() {
            // Its body is the error, which this returns.
            self.read("GET", response)?;
            bail!("{} does not stream events", self.server);
        }
        Ok(BufReader::new(response.into_body().into_reader()))
    }

    fn read(&self, method: &str, mut response: Response<Body>) -> anyhow::Result<Value> {
        let status = response.status();
        let body = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec();
        let body = body.map_err(|error| self.explain(error))?;
        let answer: Value = serde_json::from_slice(&body)
            .with_context(|| format!("the answer of {} is not JSON ({status})", self.server))?;
        if status.is_success() {
            return Ok(answer);
        }
        let message = match answer.get("message").and_then(Value::as_str) {
            // Before the server's own message, which names the header. An operator sets a variable.
            _ if status == StatusCode::UNAUTHORIZED => {
                let problem = if self.token.is_some() { "does not accept this token" } else { "requires a token" };
                let remedy = match method {
                    "GET" => "set THRESHOLD_ADMIN_TOKEN, or THRESHOLD_READ_TOKEN to read",
                    _ => "set THRESHOLD_ADMIN_TOKEN; THRESHOLD_READ_TOKEN may only read",
                };
                format!("{} {problem}: {remedy}", self.server)
            }
            // Another program may listen at this address, and its text goes to a terminal.
            Some(message) => printable(message).into_owned(),
            // `/readyz` has no message.
            None => match answer.get("status").and_then(Value::as_str) {
                Some(word) => format!("the server is {}", printable(word)),
                None => "the server refused the request".to_owned(),
            },
        };
        Err(Refused { status, message }.into())
    }

    /// Adds to an error what an operator can do about it.
    fn explain(&self, error: ureq::Error) -> anyhow::Error {
        let server = self.server.clone();
        if is_unreachable(&error) {
            return Unreachable { server, source: error }.into();
        }
        let message = match &error {
            ureq::Error::Timeout(_) => format!("{server} does not answer"),
            error if tls::is_refused_certificate(error) => {
                format!("the certificate of {server} is not accepted (--ca FILE names the one that signed it)")
            }
            _ => format!("the request to {server} failed"),
        };
        anyhow::Error::new(error).context(message)
    }
}

/// The variable that names the server.
const SERVER: &str = "THRESHOLD_SERVER";

/// Returns a variable of the environment that is not blank.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.trim().is_empty())
}

/// Returns the first token of a variable. A blank one is an error, as it is for the server: a secret that could not be filled in
/// must not look like none.
fn token(name: &str) -> anyhow::Result<Option<String>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    let first = text.split(|c: char| c == ',' || c.is_whitespace()).find(|token| !token.is_empty());
    let first = first.with_context(|| format!("{name} is set but has no token: unset it, or give one"))?;
    Ok(Some(first.to_owned()))
}

/// Returns a client for a server, and the beginning of the URL of every call.
fn connect(server: &str, ca: Option<&Path>, timeout: Duration) -> anyhow::Result<(Agent, String)> {
    let is_https = server.starts_with("https://");
    if ca.is_some() && !is_https {
        bail!("--ca is for https://, and {server} is not encrypted");
    }
    if let Some(path) = server.strip_prefix("unix:") {
        let connector = UnixConnector::new(path);
        let agent = Agent::with_parts(config(TlsConfig::default(), timeout), connector, DefaultResolver::default());
        return Ok((agent, UNIX_SOCKET_URL.to_owned()));
    }
    let tls = if is_https {
        let given = variable("THRESHOLD_CA");
        tls::config(ca.or(given.as_deref().map(Path::new)))?
    } else if server.starts_with("http://") {
        TlsConfig::default()
    } else {
        bail!("\"{server}\" is not a server: expected http://HOST:PORT, https://HOST:PORT or unix:PATH");
    };
    Ok((config(tls, timeout).new_agent(), server.to_owned()))
}

/// Returns a client for URLs. Only one for `https://` needs certificates.
#[cfg(feature = "otlp")]
pub(crate) fn agent(is_https: bool, ca: Option<&Path>, timeout: Duration) -> anyhow::Result<Agent> {
    let tls = if is_https { tls::config(ca)? } else { TlsConfig::default() };
    Ok(config(tls, timeout).new_agent())
}

fn config(tls: TlsConfig, timeout: Duration) -> Config {
    Agent::config_builder()
        // The body of an error has the server's message, which would be lost.
        .http_status_as_error(false)
        // A redirect could send the token to another server.
        .max_redirects(0)
        .max_redirects_will_error(false)
        // The proxy of the environment is for the web, not for a server on this machine or in this network.
        .proxy(None)
        .timeout_global(Some(timeout))
        .tls_config(tls)
        .build()
}

/// Returns whether no connection was made: nothing listens, or the host is unknown.
fn is_unreachable(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed => true,
        ureq::Error::Io(error) => matches!(
            error.kind(),
            ErrorKind::AddrNotAvailable
                | ErrorKind::ConnectionRefused
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
                // Of a Unix socket.
                | ErrorKind::NotFound
                | ErrorKind::PermissionDenied
        ),
        _ => false,
    }
}
