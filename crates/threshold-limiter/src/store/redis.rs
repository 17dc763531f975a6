//! A store in Redis or Valkey, which several nodes share.
//!
//! A record is bytes under a key that expires when the record falls silent. `settle.lua` decides the usual request on the
//! server, with increments that core has computed, and core computes the answer from what it found. Everything else core decides
//! on copies of the records, and `swap.lua` writes the result if none of them has changed in the meantime. The time is the
//! server's.

mod batch;
mod breaker;
mod clock;
mod connect;
mod control;
mod copies;
mod deadline;
mod inspect;
mod keys;
mod listed;
mod reply;
mod secret;
mod sentinel;
mod server;
mod settle;
mod url;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::redis::{Cmd, Pipeline, Value};
use threshold_core::command::{Answer, Command};
use threshold_core::control::MAX_CHANGES_READ;
use threshold_core::{Digest, KeyId, Outcome, Plan, Timestamp, TraceId};

use super::{Kind, Listed, Store, StoreError};
use batch::{Batches, Task};
use breaker::Breaker;
use connect::{Certificates, ConnectOptions, Connector};
use secret::SecretIds;
use server::Server;
pub use url::{RedisUrl, RedisUrlError};

/// How long a decision waits for the store, unless [`RedisOptions::deadline`] says otherwise.
const DEADLINE: Duration = Duration::from_millis(20);
/// How long a login, or another command on an account, waits for the store at least. Guesses at one account wait for each other, and
/// a login without an answer is refused.
const LOGIN_DEADLINE: Duration = Duration::from_secs(1);
/// The pause between two searches for reservations that have expired.
const SWEEP: Duration = Duration::from_millis(500);
/// The largest number of expired reservations that one search ends in one partition.
const MAX_SWEPT: usize = 64;

/// Why a store in Redis was not opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisOpenError {
    /// The URL names something that is not supported.
    #[error("{0}")]
    Unsupported(&'static str),
    /// A certificate or a key cannot be used, or the system has no certificates of authorities.
    #[error("cannot use TLS: {0}")]
    Tls(String),
    /// The server cannot be reached, or refused the connection.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The server is too old.
    #[error("Redis {0} is too old: 7 or newer is needed")]
    Version(String),
    /// The server is a replica, which cannot be written to.
    #[error("the server is a replica: give the address of the primary")]
    Replica,
    /// The server's records were written with another secret. Their digests mean nothing under this one.
    #[error(
        "the store was written with the secret {stored}, and this node has {own}: set the same THRESHOLD_SECRET on every node, \
         or the stored one as THRESHOLD_SECRET_OLD to replace it"
    )]
    OtherSecret {
        /// The key ids of the secrets that the store was written with.
        stored: String,
        /// The key id of this node's secret.
        own: KeyId,
    },
}

/// How a store in Redis is opened.
#[derive(Debug, Clone)]
pub struct RedisOptions {
    url: RedisUrl,
    key: KeyId,
    old_key: Option<KeyId>,
    deadline: Duration,
    certificates: Certificates,
}

impl RedisOptions {
    /// Sets the URL, such as `redis://127.0.0.1:6379/0`, and the key id of the secret that digests are made with; see
    /// [`Limiter::key_id`](crate::Limiter::key_id).
    #[must_use]
    pub fn new(url: RedisUrl, key: KeyId) -> Self {
        Self { url, key, old_key: None, deadline: DEADLINE, certificates: Certificates::default() }
    }

    /// Sets the key id of the secret before, while the secret is rotated.
    #[must_use]
    pub fn old_key(mut self, old: Option<KeyId>) -> Self {
        self.old_key = old;
        self
    }

    /// Sets how long a decision waits for the store. The default is 20 milliseconds. A command on an account, such as a login attempt,
    /// waits for a second if this is shorter.
    ///
    /// Time in which this process is too busy to run the call does not count, up to half a second.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Trusts only the authorities of these certificates, in PEM, on TLS connections. Without them those of the system are trusted.
    #[must_use]
    pub fn authorities(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.authorities = Some(pem.into());
        self
    }

    /// Sets the certificate chain and its key, in PEM, with which TLS connections identify this node.
    #[must_use]
    pub fn certificate(mut self, chain: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.certificates.own = Some((chain.into(), key.into()));
        self
    }

    /// Checks the certificates without connecting.
    ///
    /// # Errors
    /// Fails if a certificate or a key cannot be used, or if there are certificates and the URL is without TLS.
    pub fn check(&self) -> Result<(), RedisOpenError> {
        ConnectOptions::new(&self.url, &self.certificates).map(drop).map_err(RedisOpenError::Tls)
    }
}

/// Records in Redis or Valkey, which several nodes share.
#[derive(Debug)]
pub struct RedisStore {
    server: Arc<Server>,
    batches: Arc<Batches>,
    breaker: Breaker,
    deadline: Duration,
    warnings: Vec<String>,
}

impl RedisStore {
    /// Connects, and checks that the stored records were written with the same secret.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, or if it holds the records of another secret.
    pub async fn open(options: RedisOptions) -> Result<Self, RedisOpenError> {
        let connect = ConnectOptions::new(&options.url, &options.certificates).map_err(RedisOpenError::Tls)?;
        let secrets = SecretIds { present: options.key, old: options.old_key };
        let server = Server::connect(Connector::new(connect, &options.url, secrets)?).await?;
        let warnings = inspect::inspect(&server).await?;
        time(&server).await.map_err(|error| RedisOpenError::Connect(error.to_string()))?;
        let batches = Arc::new(Batches::start(Arc::clone(&server)));
        sweep(Arc::clone(&server), Arc::downgrade(&batches));
        Ok(Self { server, batches, breaker: Breaker::default(), deadline: options.deadline, warnings })
    }

    /// Returns what an operator should change about the server, such as an eviction policy that drops keys which still count.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Ends the reservations that have expired and give back their charges. Returns how many there were. A node does this by
    /// itself twice a second.
    ///
    /// # Errors
    /// Fails if the server cannot be reached.
    pub async fn release_expired(&self) -> Result<usize, StoreError> {
        release_expired(&self.server, &self.batches).await
    }

    /// Returns whether there is a connection to the server at this moment.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.server.is_connected()
    }

    /// Waits for an operation until the deadline. The operation goes on after that, because it may have begun on the server.
    async fn within_deadline<T: Send + 'static>(
        &self,
        deadline: Duration,
        operation: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        if !self.breaker.lets_through(Instant::now()) {
            return Err(StoreError::Unavailable);
        }
        let replies = self.server.replies();
        let answered = deadline::wait(deadline, operation).await;
        // A call that failed while others were answered says nothing of the server: one record is unreadable, or many calls
        // wait for their turn.
        let failed = matches!(answered, Err(StoreError::Unavailable | StoreError::Timeout));
        if !failed || self.server.replies() == replies {
            self.breaker.ended(!failed, Instant::now());
        }
        answered
    }
}

impl Store for RedisStore {
    fn now(&self) -> Option<Timestamp> {
        self.server.clock.now()
    }

    async fn settle(&self, plan: &Plan<'_>, _: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        let (server, batches) = (Arc::clone(&self.server), Arc::clone(&self.batches));
        // The clocks of nodes differ, so only the server's time counts.
        let bill = plan.bill().to_owned();
        let settled = self.within_deadline(self.deadline, async move {
            if let Some(outcome) = settle::settle(&server, &bill).await? {
                return Ok(outcome);
            }
            let command = Command::Settle(Box::new(bill));
            let answer = batches.run(Task::Execute(Box::new(command))).await?;
            Ok(*answer.settled().ok_or(StoreError::Unavailable)?)
        });
        *outcome = settled.await?;
        Ok(())
    }

    async fn execute(&self, command: Command, _: Timestamp) -> Result<Answer, StoreError> {
        let server = Arc::clone(&self.server);
        match command {
            Command::Control(change) => {
                let change = std::slice::from_ref(&*change).to_vec();
                self.within_deadline(self.deadline, async move { control::add(&server, &change).await }).await
            }
            // No deadline: a hundred thousand bans take longer, and an operator waits for them.
            Command::ControlAll(changes) => control::add(&server, &changes).await,
            Command::ReadControl { after, most } => {
                let most = usize::try_from(most).map_or(MAX_CHANGES_READ, |most| most.min(MAX_CHANGES_READ));
                self.within_deadline(self.deadline, async move { control::read(&server, after, most).await }).await
            }
            command => {
                let batches = Arc::clone(&self.batches);
                let deadline = match command {
                    Command::BeginLogin { .. }
                    | Command::EndLogin { .. }
                    | Command::ChangeAccount { .. }
                    | Command::ReadAccount { .. } => self.deadline.max(LOGIN_DEADLINE),
                    _ => self.deadline,
                };
                self.within_deadline(deadline, async move { batches.run(Task::Execute(Box::new(command))).await }).await
            }
        }
    }

    async fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> Result<Vec<Listed>, StoreError> {
        // No deadline: an operator would rather wait.
        listed::list(&self.server, kind, after, limit, now).await
    }

    fn last_error(&self) -> Option<String> {
        self.server.problem()
    }
}

/// Ends reservations that have expired and give back their charges, until the store is dropped.
fn sweep(server: Arc<Server>, batches: std::sync::Weak<Batches>) {
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(server::jittered(SWEEP)).await;
            let Some(batches) = batches.upgrade() else { return };
            // While the server is away there is nothing to end. It is tried again after the next pause.
            let _ = release_expired(&server, &batches).await;
        }
    });
}

async fn release_expired(server: &Arc<Server>, batches: &Batches) -> Result<usize, StoreError> {
    let mut ended: usize = 0;
    for id in expired(server).await? {
        batches.run(Task::Expire(id)).await?;
        ended = ended.saturating_add(1);
    }
    Ok(ended)
}

/// Asks for the server's time.
async fn time(server: &Arc<Server>) -> Result<Timestamp, StoreError> {
    let mut time = Cmd::new();
    time.arg("TIME");
    let reply = server.send(&time).await.map_err(|_| StoreError::Unavailable)?;
    let now = reply::time(&mut reply::array(reply)?.into_iter())?;
    server.clock.heard(now);
    Ok(now)
}

/// Returns reservations that have expired by the server's clock.
async fn expired(server: &Arc<Server>) -> Result<Vec<TraceId>, StoreError> {
    let unavailable = |_| StoreError::Unavailable;
    let now = time(server).await?;
    let mut search = Pipeline::new();
    for home in keys::homes() {
        // Rounded down, and scores are rounded up: no reservation is ended before its time.
        search.cmd("ZRANGE").arg(keys::expiring(home)).arg("-inf").arg(now.micros().checked_div(1_000).unwrap_or(0));
        search.arg("BYSCORE").arg("LIMIT").arg(0).arg(MAX_SWEPT).arg("WITHSCORES");
    }
    let mut due = Vec::new();
    for members in server.send_all(&search).await.map_err(unavailable)? {
        let mut parts = reply::array(members)?.into_iter();
        while let (Some(Value::BulkString(member)), Some(score)) = (parts.next(), parts.next()) {
            due.extend(keys::id_of_member(&member).zip(reply::number(Some(score)).ok()));
        }
    }
    // In the order in which they were due, as core does it: the first to give back may make the others void.
    due.sort_unstable_by_key(|(id, score)| (*score, *id));
    Ok(due.into_iter().map(|(id, _)| id).collect())
}
