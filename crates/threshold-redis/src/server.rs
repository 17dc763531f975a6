//! One Redis server: a connection that is shared by all callers and restored when it breaks, and scripts on it.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, ErrorKind, Pipeline, RedisError, Script, ServerErrorKind, Value};
use rand::RngExt as _;
use tokio::sync::watch;

use super::breaker::Breaker;
use super::clock::ServerClock;
use super::connect::{self, ConnectError, Connector};
use super::errors::{self, Errors};
use super::url::Address;
use threshold_limiter::store::partitioned::PartitionError;
use threshold_limiter::store::{StoreError, StoreErrorKind};

/// The pause before the second attempt to connect. It doubles with each attempt, and is randomized so that the nodes of a cluster
/// do not all come back at the same moment.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause between two attempts: exactness returns within 5 seconds of the server's return.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The number of connections that were made so far. They are numbered over all servers, so that a charge can be traced to its own.
static CONNECTIONS: AtomicU64 = AtomicU64::new(0);

/// Why a server did not do what it was asked for.
#[derive(Debug, Clone, Copy)]
pub(super) enum CallError {
    /// The server refused before anything was executed, or cannot be reached.
    NotExecuted,
    /// The slot of the keys is being moved to another server, and the call has several keys. It was not executed.
    Moving,
    /// The connection broke. The call may have been executed.
    Unknown,
}

impl From<CallError> for StoreError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::NotExecuted | CallError::Moving => Self::Unavailable,
            CallError::Unknown => Self::Timeout,
        }
    }
}

impl From<CallError> for PartitionError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Moving => Self::Moving,
            error => Self::Store(error.into()),
        }
    }
}

/// A call that a server executes in one step.
#[derive(Debug, Clone, Copy)]
pub(super) enum Call<'c> {
    Script(ScriptCall<'c>),
    Command(&'c Cmd),
}

/// A script with its arguments.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScriptCall<'c> {
    pub(super) script: &'c ServerScript,
    pub(super) keys: &'c [String],
    pub(super) args: &'c [Vec<u8>],
    pub(super) latest: Latest,
    /// The only connection over which it may be sent, if not every one will do.
    pub(super) over: Option<u64>,
}

/// Until when a script may be executed. It is told so by its last argument, in the time of its server, and changes nothing afterwards.
#[derive(Debug, Clone, Copy)]
pub(super) enum Latest {
    /// The script takes no such argument.
    Untold,
    /// It may be executed at any time.
    Never,
    At(Instant),
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
    /// The errors of a server that is the whole store. Those of a Cluster are its own.
    pub(super) errors: Errors,
    /// Whether the first attempt to connect has ended.
    tried: watch::Sender<bool>,
    breaker: Breaker,
    /// A reply that takes longer than this is a failure.
    slow: Duration,
}

#[derive(Default)]
struct Link {
    connection: Option<MultiplexedConnection>,
    /// The number of the connection, so that a broken one is not mistaken for its successor; 0 before the first.
    generation: u64,
    is_connecting: bool,
    /// Counts replies, errors included.
    replies: u64,
    problem: Option<String>,
    /// Why the last attempt to connect failed; `None` if it did not.
    refused: Option<StoreErrorKind>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("connected", &self.connection.is_some()).finish_non_exhaustive()
    }
}

impl Server {
    /// Connects for the first time.
    pub(super) async fn connect(connector: Connector, slow: Duration) -> Result<Arc<Self>, ConnectError> {
        let connection = connector.open().await?;
        let link = Link { connection: Some(connection), generation: next_connection(), ..Link::default() };
        Ok(Arc::new(Self::new(connector, link, slow)))
    }

    /// Connects in the background. Calls wait for the end of the first attempt.
    pub(super) fn open(connector: Connector, slow: Duration) -> Arc<Self> {
        let server = Arc::new(Self::new(connector, Link::default(), slow));
        server.reconnect(0);
        server
    }

    fn new(connector: Connector, link: Link, slow: Duration) -> Self {
        let tried = watch::Sender::new(link.connection.is_some());
        Self {
            connector,
            link: Mutex::new(link),
            clock: ServerClock::default(),
            errors: Errors::default(),
            tried,
            breaker: Breaker::default(),
            slow,
        }
    }

    /// Waits for the end of the first attempt to connect.
    pub(super) async fn connected(&self) {
        // The sender is in this struct, so it cannot be gone.
        let _ = self.tried.subscribe().wait_for(|tried| *tried).await;
    }

    /// Returns the address of the server, if it is always the same.
    pub(super) fn address(&self) -> Option<&Address> {
        self.connector.address()
    }

    /// Returns the host of the server.
    pub(super) fn host(&self) -> Option<String> {
        match self.address()? {
            Address::Tcp { host, .. } => Some(host.clone()),
            Address::Unix(_) => None,
        }
    }

    /// Makes a call. A script is sent again only if the server did not have it, so it is executed at most once. A call for a slot
    /// that is being moved to this server `is_asking`.
    /// Returns the number of the connection, too.
    pub(super) async fn call(self: &Arc<Self>, call: Call<'_>, is_asking: bool) -> Result<(Value, u64), RedisError> {
        let ScriptCall { script, keys, args, latest, over } = match call {
            Call::Command(command) => return self.send_to_moving(command, is_asking, None).await,
            Call::Script(call) => call,
        };
        let run = self.evaluation("EVALSHA", &script.hash, (keys, args), latest);
        match self.send_to_moving(&run, is_asking, over).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {}
            answered => return answered,
        }
        // The first call was not executed, so this one does not repeat it. It takes the script with it and leaves it on the server:
        // a script that is only loaded may be flushed again before it is called.
        let run = self.evaluation("EVAL", script.text, (keys, args), latest);
        self.send_to_moving(&run, is_asking, over).await
    }

    /// Returns the command that runs a script, in memory that has its size from the beginning.
    fn evaluation(&self, verb: &str, script: &str, (keys, args): (&[String], &[Vec<u8>]), latest: Latest) -> Cmd {
        let values = keys.iter().map(String::len).chain(args.iter().map(Vec::len)).fold(0, usize::saturating_add);
        // The verb, the number of keys and the last argument are short.
        let bytes = values.saturating_add(script.len()).saturating_add(32);
        let count = keys.len().saturating_add(args.len()).saturating_add(4);
        let mut run = Cmd::with_capacity(count, bytes);
        run.arg(verb).arg(script).arg(keys.len()).arg(keys).arg(args).arg(self.latest(latest));
        run
    }

    /// Returns the last argument of a script that is sent now. Without a known clock it has no end.
    fn latest(&self, latest: Latest) -> Option<Vec<u8>> {
        match latest {
            Latest::Untold => None,
            Latest::Never => Some(Vec::new()),
            Latest::At(end) => {
                Some(self.clock.at(end).map_or_else(Vec::new, |end| end.micros().to_be_bytes().to_vec()))
            }
        }
    }

    async fn send_to_moving(
        self: &Arc<Self>,
        command: &Cmd,
        is_asking: bool,
        over: Option<u64>,
    ) -> Result<(Value, u64), RedisError> {
        if !is_asking {
            return self.send_over(command, over).await;
        }
        // In one write, so that no other call comes between the two.
        let mut both = Pipeline::new();
        both.cmd("ASKING").add_command(command.clone());
        let send = |mut connection: MultiplexedConnection| async move {
            connection.send_packed_commands(&both, 0, both.len()).await
        };
        // Boxed, as other rare steps, so that the future of every call has no room for it.
        let (values, connection) = Box::pin(self.exchange(over, send)).await?;
        let value = values.into_iter().nth(1).unwrap_or_default().extract_error()?;
        Ok((value, connection))
    }

    /// Sends a command once.
    pub(super) async fn send(self: &Arc<Self>, command: &Cmd) -> Result<Value, RedisError> {
        Ok(self.send_over(command, None).await?.0)
    }

    async fn send_over(self: &Arc<Self>, command: &Cmd, over: Option<u64>) -> Result<(Value, u64), RedisError> {
        let sent = |mut connection: MultiplexedConnection| async move {
            connection.send_packed_command(command).await.and_then(Value::extract_error)
        };
        self.exchange(over, sent).await
    }

    /// Sends something and waits for the reply, however long it takes. A slow reply counts as a failure of the server before it
    /// comes.
    async fn exchange<T, F>(
        self: &Arc<Self>,
        over: Option<u64>,
        send: impl FnOnce(MultiplexedConnection) -> F,
    ) -> Result<(T, u64), RedisError>
    where
        F: Future<Output = Result<T, RedisError>>,
    {
        if !*self.tried.borrow() {
            self.connected().await;
        }
        let unavailable = |what| RedisError::from((ErrorKind::Client, what));
        let (connection, generation) = self.connection().ok_or_else(|| unavailable("not connected"))?;
        if over.is_some_and(|over| over != generation) {
            return Err((ErrorKind::InvalidClientConfig, "the connection has been replaced").into());
        }
        if !self.breaker.lets_through(Instant::now()) {
            return Err(unavailable("the server has failed several times, and is tried again in a moment"));
        }
        let replies = self.replies();
        let mut reply = pin!(send(connection));
        let Ok(answered) = tokio::time::timeout(self.slow, &mut reply).await else {
            // While others are answered, the server is alive: this process or this call is slow.
            if self.replies() == replies {
                self.breaker.ended(false, Instant::now());
                self.link().problem = Some(self.named("no answer in time"));
            }
            return self.heard(generation, reply.await).map(|answer| (answer, generation));
        };
        let failed = answered.as_ref().is_err_and(is_broken);
        self.breaker.ended(!failed, Instant::now());
        self.heard(generation, answered).map(|answer| (answer, generation))
    }

    /// Returns the number of the connection, or of the last one.
    pub(super) fn connection_number(&self) -> u64 {
        self.link().generation
    }

    fn connection(&self) -> Option<(MultiplexedConnection, u64)> {
        let link = self.link();
        Some((link.connection.clone()?, link.generation))
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
                let reason = self.named(&connect::explain(error));
                self.link().problem = Some(reason);
            }
            if is_broken(error) {
                self.reconnect(generation);
            }
        }
        answered
    }

    /// Returns a problem with the address of the server, as the errors of connecting have it. That of a primary that Sentinels name
    /// changes, and is left out.
    fn named(&self, problem: &str) -> String {
        self.address().map_or_else(|| problem.to_owned(), |address| format!("{address}: {problem}"))
    }

    /// Returns the number of replies so far. While it grows, the server is alive, however busy it or this process is.
    pub(super) fn replies(&self) -> u64 {
        self.link().replies
    }

    /// Returns the last error, for operators.
    pub(super) fn problem(&self) -> Option<String> {
        self.link().problem.clone()
    }

    /// Returns why there is no connection at this moment.
    pub(super) fn absence(&self) -> Option<String> {
        let link = self.link();
        link.connection.is_none().then(|| link.problem.clone().unwrap_or_else(|| self.named("not connected")))
    }

    /// Counts the error that a call to this server has ended with.
    pub(super) fn count(&self, errors: &Errors, error: &RedisError) {
        if error.kind() != ErrorKind::Client {
            return errors.count(errors::kind_of(error), self.named(&connect::explain(error)));
        }
        // An error of `exchange`: nothing was sent.
        let refused = self.link().refused.unwrap_or(StoreErrorKind::Connection);
        match self.absence() {
            Some(reason) => errors.count(refused, reason),
            None => {
                // A new connection has no problem of its own yet.
                let before = self
                    .problem()
                    .unwrap_or_else(|| self.named("the connection before did not answer in time, or broke"));
                errors.count(StoreErrorKind::BreakerOpen, format_args!("left alone after failures: {before}"));
            }
        }
    }

    /// Drops the connection and opens another one, which checks the secrets again.
    pub(super) fn check_again(self: &Arc<Self>) {
        let generation = self.link().generation;
        self.reconnect(generation);
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
                        link.generation = next_connection();
                        (link.connection, link.is_connecting) = (Some(connection), false);
                        // The reason of the last outage would be taken for that of the next one.
                        (link.problem, link.refused) = (None, None);
                        drop(link);
                        server.tried.send_replace(true);
                        return;
                    }
                    Err(error) => {
                        let refused = errors::kind_of_connect(&error);
                        let mut link = server.link();
                        (link.problem, link.refused) = (Some(error.to_string()), Some(refused));
                    }
                }
                server.tried.send_replace(true);
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

fn next_connection() -> u64 {
    CONNECTIONS.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
}

/// Returns a random time between half of this one and all of it.
pub(super) fn jittered(time: Duration) -> Duration {
    time.mul_f64(rand::rng().random_range(0.5..=1.0))
}

/// Returns whether the connection is of no use after this error. A server that became a replica keeps its connections open, and
/// only a new one can reach the new primary.
pub(super) fn is_broken(error: &RedisError) -> bool {
    error.is_unrecoverable_error() || error.is_timeout() || error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
}

pub(super) fn classify(error: &RedisError) -> CallError {
    match error.kind() {
        // The server has answered, and an error of a script means that it wrote nothing: scripts check before they write.
        ErrorKind::Server(_) | ErrorKind::Extension | ErrorKind::Client | ErrorKind::InvalidClientConfig => {
            CallError::NotExecuted
        }
        _ if error.is_connection_refusal() => CallError::NotExecuted,
        _ => CallError::Unknown,
    }
}
