//! One Redis server: a connection that is shared by all callers and restored when it breaks, and scripts on it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, ErrorKind, Pipeline, RedisError, Script, ServerErrorKind, Value};
use rand::RngExt as _;

use super::clock::ServerClock;
use super::connect::{self, ConnectError, Connector};
use crate::store::StoreError;

/// The pause before the second attempt to connect. It doubles with each attempt, and is randomized so that the nodes of a cluster
/// do not all come back at the same moment.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause between two attempts: exactness returns within 5 seconds of the server's return.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Why a server did not do what it was asked for.
#[derive(Debug, Clone, Copy)]
pub(super) enum CallError {
    /// The server refused before anything was executed, or cannot be reached.
    NotExecuted,
    /// The connection broke. The call may have been executed.
    Unknown,
}

impl From<CallError> for StoreError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::NotExecuted => Self::Unavailable,
            CallError::Unknown => Self::Timeout,
        }
    }
}

/// A script, and its name on the server.
#[derive(Debug)]
pub(super) struct ServerScript {
    text: &'static str,
    hash: String,
}

impl ServerScript {
    pub(super) fn new(text: &'static str) -> Self {
        Self { text, hash: Script::new(text).get_hash().to_owned() }
    }
}

/// A connection to one server.
#[derive(Debug)]
pub(super) struct Server {
    connector: Connector,
    link: Mutex<Link>,
    /// The server's clock. Every reply that has a time is passed to it.
    pub(super) clock: ServerClock,
}

#[derive(Default)]
struct Link {
    connection: Option<MultiplexedConnection>,
    /// Counts connections, so that a broken one is not mistaken for its successor.
    generation: u64,
    is_connecting: bool,
    /// Counts replies, errors included.
    replies: u64,
    problem: Option<String>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("connected", &self.connection.is_some()).finish_non_exhaustive()
    }
}

impl Server {
    /// Connects for the first time.
    pub(super) async fn connect(connector: Connector) -> Result<Arc<Self>, ConnectError> {
        let connection = connector.open().await?;
        let link = Link { connection: Some(connection), ..Link::default() };
        Ok(Arc::new(Self { connector, link: Mutex::new(link), clock: ServerClock::default() }))
    }

    /// Runs a script. It is sent again only if the server did not have it, so it is executed at most once.
    pub(super) async fn run(
        self: &Arc<Self>,
        script: &ServerScript,
        keys: &[String],
        args: &[Vec<u8>],
    ) -> Result<Value, CallError> {
        let mut call = Cmd::new();
        call.arg("EVALSHA").arg(&script.hash).arg(keys.len()).arg(keys).arg(args);
        match self.send(&call).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {}
            answered => return answered.map_err(|error| classify(&error)),
        }
        // The first call was not executed, so this one does not repeat it. It takes the script with it and leaves it on the server:
        // a script that is only loaded may be flushed again before it is called.
        let mut call = Cmd::new();
        call.arg("EVAL").arg(script.text).arg(keys.len()).arg(keys).arg(args);
        self.send(&call).await.map_err(|error| classify(&error))
    }

    /// Sends a command once.
    pub(super) async fn send(self: &Arc<Self>, call: &Cmd) -> Result<Value, RedisError> {
        let (mut connection, generation) = self.connection()?;
        let answered = connection.send_packed_command(call).await.and_then(Value::extract_error);
        self.heard(generation, answered)
    }

    /// Sends several commands at once, and returns an answer for each.
    pub(super) async fn send_all(self: &Arc<Self>, calls: &Pipeline) -> Result<Vec<Value>, RedisError> {
        let (mut connection, generation) = self.connection()?;
        let answered = connection.send_packed_commands(calls, 0, calls.len()).await;
        self.heard(generation, answered.and_then(|values| values.into_iter().map(Value::extract_error).collect()))
    }

    fn connection(&self) -> Result<(MultiplexedConnection, u64), RedisError> {
        let link = self.link();
        let unconnected = || RedisError::from((ErrorKind::Client, "not connected"));
        Ok((link.connection.clone().ok_or_else(unconnected)?, link.generation))
    }

    /// Replaces the connection after an error that makes it useless.
    fn heard<T>(self: &Arc<Self>, generation: u64, answered: Result<T, RedisError>) -> Result<T, RedisError> {
        // Neither a broken connection nor an error of the client is a reply.
        if !answered.as_ref().is_err_and(|error| is_broken(error) || error.kind() == ErrorKind::Client) {
            let mut link = self.link();
            link.replies = link.replies.wrapping_add(1);
        }
        if let Err(error) = &answered {
            // A script that the server does not have yet is no problem: it is loaded.
            if error.kind() != ErrorKind::Server(ServerErrorKind::NoScript) {
                self.link().problem = Some(connect::explain(error));
            }
            if is_broken(error) {
                self.reconnect(generation);
            }
        }
        answered
    }

    /// Returns the number of replies so far. While it grows, the server is alive, however busy it or this process is.
    pub(super) fn replies(&self) -> u64 {
        self.link().replies
    }

    /// Returns the last error, for operators.
    pub(super) fn problem(&self) -> Option<String> {
        self.link().problem.clone()
    }

    /// Returns whether there is a connection.
    pub(super) fn is_connected(&self) -> bool {
        self.link().connection.is_some()
    }

    /// Replaces a broken connection in the background. Until then calls fail at once.
    fn reconnect(self: &Arc<Self>, broken: u64) {
        let mut link = self.link();
        // Another call has noticed before that this connection is broken.
        if link.generation != broken || link.is_connecting {
            return;
        }
        (link.connection, link.is_connecting) = (None, true);
        let server = Arc::downgrade(self);
        drop(link);
        tokio::spawn(async move {
            let mut pause = FIRST_PAUSE;
            // Ends when the store is dropped.
            while let Some(server) = server.upgrade() {
                match server.connector.open().await {
                    Ok(connection) => {
                        let mut link = server.link();
                        link.generation = link.generation.wrapping_add(1);
                        (link.connection, link.is_connecting) = (Some(connection), false);
                        return;
                    }
                    Err(error) => server.link().problem = Some(error.to_string()),
                }
                // Not held during the pause, so that the store can be dropped meanwhile.
                drop(server);
                tokio::time::sleep(jittered(pause)).await;
                pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
            }
        });
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        // A poisoned lock is safe to use: every field is set in one step.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a random time between half of this one and all of it.
pub(super) fn jittered(time: Duration) -> Duration {
    time.mul_f64(rand::rng().random_range(0.5..=1.0))
}

/// Returns whether the connection is of no use after this error. A server that became a replica keeps its connections open, and
/// only a new one can reach the new primary.
fn is_broken(error: &RedisError) -> bool {
    error.is_unrecoverable_error() || error.is_timeout() || error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
}

fn classify(error: &RedisError) -> CallError {
    match error.kind() {
        // The server has answered, and an error of a script means that it wrote nothing: scripts check before they write.
        ErrorKind::Server(_) | ErrorKind::Extension | ErrorKind::Client => CallError::NotExecuted,
        _ if error.is_connection_refusal() => CallError::NotExecuted,
        _ => CallError::Unknown,
    }
}
