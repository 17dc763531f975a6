//! A store in Redis or Valkey, which several nodes share.
//!
//! A record is bytes under a key that expires when the record falls silent. `settle.lua` decides the usual request on the
//! server, with increments that core has computed, and core computes the answer from what it found. Everything else core decides
//! on copies of the records, and `swap.lua` writes the result if none of them has changed in the meantime. The time is the
//! server's.

mod batch;
mod breaker;
mod clock;
mod cluster;
mod connect;
mod control;
mod copies;
mod deadline;
mod errors;
mod executor;
mod inspect;
mod keys;
mod late;
mod listed;
mod nodes;
mod rekey;
mod reply;
mod samples;
mod secret;
mod sentinel;
mod server;
mod servers;
mod settle;
mod sweep;
mod url;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use threshold_core::command::{Answer, Command};
use threshold_core::control::MAX_CHANGES_READ;
use threshold_core::{Digest, KeyId, Outcome, OwnedBill, Plan, Secret, Secrets, Timestamp};
use tokio::sync::oneshot;

use cluster::Cluster;
use connect::{Certificates, ConnectOptions, Connector};
pub use deadline::within;
use executor::Executor;
use late::{Handover, LateAnswers};
use nodes::Nodes;
use samples::Samples;
use secret::{Checked, SecretIds};
use server::{Latest, Server};
use servers::Servers;
use threshold_limiter::store::{
    HoldTerms, Kind, LateAnswer, Listed, Share, Store, StoreError, StoreErrorCount, StoreErrorKind, StoreNumbers,
};
pub use url::{RedisUrl, RedisUrlError};

/// How long a decision waits for the store, unless [`RedisOptions::deadline`] says otherwise.
const DEADLINE: Duration = Duration::from_millis(20);
/// A server that answers later than this, and than the deadline, has failed. One that is only too slow for decisions still serves
/// logins and bans.
const SLOW: Duration = Duration::from_millis(100);
/// How long a command on an account, and a look at the bans of other nodes, waits for the store at least. Guesses at one account wait
/// for each other, and a login without an answer is refused.
const PATIENT_DEADLINE: Duration = Duration::from_secs(1);

/// Why a store in Redis was not opened.
///
/// `Debug` writes what `Display` does, because that is what `main` prints of an error that it returns.
#[derive(thiserror::Error)]
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
    #[error("{server} has Redis {version}, which is too old: 7 or newer is needed")]
    Version {
        /// The address of the server.
        server: String,
        /// Its version.
        version: String,
    },
    /// The server is a replica, which cannot be written to.
    #[error("{server} is a replica: give the address of the primary")]
    Replica {
        /// The address of the server.
        server: String,
    },
    /// The server is a node of a Cluster, and the URL names one server.
    #[error("{server} is a node of a Cluster: write redis+cluster://{server}")]
    ClusterNode {
        /// The address of the server.
        server: String,
    },
    /// The server's records were written with another secret. Their digests mean nothing under this one.
    #[error(
        "the store was written with the secret {stored}, and this node has {own}: if {stored} is right, set it as THRESHOLD_SECRET, \
         or as THRESHOLD_SECRET_OLD to replace it. If the node with {stored} is the wrong one, stop it and delete the key \
         th:{{control}}secrets"
    )]
    OtherSecret {
        /// The key ids of the secrets that the store was written with.
        stored: String,
        /// The key id of this node's secret.
        own: KeyId,
    },
    /// The secret was retired at the end of a rotation.
    #[error(
        "the secret {own} was retired on {at} by a node with {by}: set THRESHOLD_SECRET to the present one. To go back to {own}, set \
         the present one as THRESHOLD_SECRET_OLD"
    )]
    RetiredSecret {
        /// The key id of this node's secret.
        own: KeyId,
        /// When it was retired.
        at: String,
        /// The key id of the secret that has replaced it.
        by: String,
    },
    /// The node has the new secret alone, and another living node still has only the old one. Retiring that would cut the other node off.
    #[error(
        "node {node} had only the old secret {old} in the last 10 seconds: restart it first, with the new one ({own}) as \
         THRESHOLD_SECRET and the old one as THRESHOLD_SECRET_OLD, and this node in the same way until no node has the old one alone. \
         If you have stopped it for good, wait 10 seconds and start this node again"
    )]
    MixedSecrets {
        /// The name of the other node.
        node: String,
        /// The key id of its secret.
        old: String,
        /// The key id of this node's secret.
        own: KeyId,
    },
}

impl fmt::Debug for RedisOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How a store in Redis is opened.
#[derive(Debug, Clone)]
pub struct RedisOptions {
    url: RedisUrl,
    secrets: Secrets,
    node: Option<String>,
    deadline: Duration,
    certificates: Certificates,
    compared: u32,
}

impl RedisOptions {
    /// Sets the URL, such as `redis://127.0.0.1:6379/0`, and the secret that every node has: one [`Secret`], or [`Secrets`] with the
    /// one before while it is rotated. A limiter on the store signs and digests with it. Nothing of it is sent but its key id.
    #[must_use]
    pub fn new(url: RedisUrl, secrets: impl Into<Secrets>) -> Self {
        Self {
            url,
            secrets: secrets.into(),
            node: None,
            deadline: DEADLINE,
            certificates: Certificates::default(),
            compared: samples::COMPARED,
        }
    }

    fn secret_ids(&self) -> SecretIds {
        SecretIds { present: self.secrets.present().key_id(), old: self.secrets.old().map(Secret::key_id) }
    }

    /// Sets the name of this node, which no other node that runs may have. A node that is restarted under its name has its share of the
    /// limits again within some seconds. Without a name it is another node after each restart.
    #[must_use]
    pub fn node(mut self, name: impl Into<String>) -> Self {
        self.node = Some(name.into());
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

    /// Compares one in so many writes with what core would have written. The default is 1,000.
    #[doc(hidden)]
    #[must_use]
    pub fn compare_one_in(mut self, writes: u32) -> Self {
        self.compared = writes;
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
    executor: Executor,
    secrets: Secrets,
    nodes: Arc<Nodes>,
    late: Arc<LateAnswers>,
    deadline: Duration,
    warnings: Vec<String>,
    /// The number of reservations that this node has ended because they expired.
    expired: Arc<AtomicU64>,
}

impl RedisStore {
    /// Connects, and checks that the stored records were written with the same secret.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, or if it holds the records of another secret.
    pub async fn open(options: RedisOptions) -> Result<Self, RedisOpenError> {
        let servers = connect_servers(&options).await?;
        let mut warnings = Vec::new();
        // A primary of a Cluster that is away at the moment comes back or is replaced.
        for server in servers.all().into_iter().filter(|server| server.is_connected()) {
            for warning in inspect::inspect(&server, servers.is_single()).await? {
                if !warnings.contains(&warning) {
                    warnings.push(warning);
                }
            }
        }
        servers.time().await.map_err(|error| RedisOpenError::Connect(error.to_string()))?;
        let ids = options.secret_ids();
        let checked = match secret::start(&servers, ids).await {
            Ok(Checked::Refused(refusal)) => return Err(refusal.of(ids.present)),
            Ok(checked) => checked,
            // The primary of the control partition is away. It checks the secrets when it is back.
            Err(_) => Checked::Known { retired_old: None },
        };
        let executor = Executor::new(servers, Samples::new(options.compared));
        let expired = executor.sweep();
        let nodes = Nodes::start(executor.servers.clone(), ids, options.node, checked).await;
        let (secrets, deadline) = (options.secrets, options.deadline);
        Ok(Self { executor, secrets, nodes, late: Arc::default(), deadline, warnings, expired })
    }

    /// Returns what an operator should change about the server, such as an eviction policy that drops keys which still count.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Asks the servers how they are, and returns what an operator should change: eviction, memory, clocks that differ from `now`, keys
    /// that are unevenly spread, and servers that do not answer.
    pub async fn examine(&self, now: Timestamp) -> Vec<String> {
        let servers = &self.executor.servers;
        inspect::examine(&servers.all(), servers.is_single(), now).await
    }

    /// Returns what an operator should change about the nodes of this store at this moment: two that have one name, or
    /// secrets that differ.
    #[must_use]
    pub fn node_problems(&self) -> Vec<String> {
        self.nodes.problems()
    }

    /// Returns that the old secret of this node was retired, and is not needed any more.
    #[must_use]
    pub fn retired_secret(&self) -> Option<String> {
        self.nodes.retired_secret()
    }

    /// Ends the reservations that have expired and give back their charges, as far as this node has made them or one server has all.
    /// Returns how many there were. A node does this by itself twice a second.
    ///
    /// # Errors
    /// Fails if the server cannot be reached.
    pub async fn release_expired(&self) -> Result<usize, StoreError> {
        self.executor.release_expired().await
    }

    /// Waits until every charge that is given back after its answer has been given back, for a program that ends or a test that
    /// counts.
    #[doc(hidden)]
    pub async fn returned(&self) {
        self.executor.returned().await;
    }

    /// Returns whether there is a connection to every server at this moment.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.executor.servers.is_connected()
    }

    /// Waits for an operation. Its failure is counted, and so is a deadline that it misses.
    async fn wait<T: Send + 'static>(
        &self,
        deadline: Duration,
        operation: BoxFuture<'static, Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let errors = self.executor.servers.errors();
        let begun = errors.seen();
        let Ok(answered) = deadline::wait(deadline, operation).await else {
            errors.count(StoreErrorKind::Timeout, format_args!("no answer within {} ms", deadline.as_millis()));
            return Err(StoreError::Timeout);
        };
        answered.inspect_err(|_| errors.count_failure(begun))
    }

    /// Settles a plan, and holds what it charges. An answer that comes after the deadline is kept for the limiter.
    async fn settle_by_deadline(
        &self,
        bill: Box<OwnedBill>,
        hold: Option<HoldTerms>,
    ) -> Result<Box<Outcome>, StoreError> {
        let executor = self.executor.clone();
        let late = Arc::clone(&self.late);
        let deadline = deadline::of_call(self.deadline);
        let (sender, mut receiver) = oneshot::channel();
        let operation = async move {
            let answer = executor.settle(&bill, hold.as_ref(), deadline::latest(deadline)).await;
            let ended = answer.as_ref().map(drop).map_err(|error| *error);
            if let Err(answer) = sender.send(answer) {
                late.add(LateAnswer::Settled { bill, answer });
            }
            ended
        };
        let waited = self.wait(deadline, Box::pin(operation)).await;
        // Closed first: an answer that comes from now on is late, and one that has just come is not.
        receiver.close();
        match receiver.try_recv() {
            Ok(answer) => answer,
            Err(_) => Err(waited.err().unwrap_or(StoreError::Unavailable)),
        }
    }

    /// Executes a command whose late answer the limiter has to hear, so that it can withdraw what was charged or counted.
    async fn execute_withdrawn(&self, command: Command, deadline: Duration) -> Result<Answer, StoreError> {
        let (executor, late) = (self.executor.clone(), Arc::clone(&self.late));
        let handover = Arc::new(Handover::default());
        let (place, sent) = (Arc::clone(&handover), Box::new(command.clone()));
        let operation = async move {
            let answer = executor.execute(command, deadline::latest(deadline)).await;
            let ended = answer.as_ref().map(drop).map_err(|error| *error);
            if let Some(Ok(answer)) = place.answer(answer) {
                late.add(LateAnswer::Executed { command: sent, answer: Box::new(answer) });
            }
            ended
        };
        let waited = self.wait(deadline, Box::pin(operation)).await;
        handover.take().unwrap_or_else(|| Err(waited.err().unwrap_or(StoreError::Unavailable)))
    }
}

impl Store for RedisStore {
    fn now(&self) -> Option<Timestamp> {
        self.executor.servers.clock().now()
    }

    fn secrets(&self) -> Option<&Secrets> {
        Some(&self.secrets)
    }

    async fn settle(&self, plan: &Plan<'_>, _: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        // The clocks of nodes differ, so only the server's time counts.
        *outcome = *self.settle_by_deadline(Box::new(plan.bill().to_owned()), None).await?;
        Ok(())
    }

    async fn reserve(
        &self,
        plan: &Plan<'_>,
        terms: &HoldTerms,
        _: Timestamp,
        outcome: &mut Outcome,
    ) -> Result<(), StoreError> {
        *outcome = *self.settle_by_deadline(Box::new(plan.bill().to_owned()), Some(terms.clone())).await?;
        Ok(())
    }

    async fn execute(&self, command: Command, _: Timestamp) -> Result<Answer, StoreError> {
        let executor = self.executor.clone();
        match command {
            Command::Control(change) => {
                let change = std::slice::from_ref(&*change).to_vec();
                self.wait(self.deadline, Box::pin(async move { control::add(&executor.servers, &change).await })).await
            }
            // No deadline: a hundred thousand bans take longer, and an operator waits for them.
            Command::ControlAll { changes, after } => control::add_all(&executor.servers, &changes, after).await,
            Command::ReadControl { after, most } => {
                let most = usize::try_from(most).map_or(MAX_CHANGES_READ, |most| most.min(MAX_CHANGES_READ));
                let read = async move { control::read(&executor.servers, after, most).await };
                // Bans must be learned from a store that is too slow for decisions.
                self.wait(self.deadline.max(PATIENT_DEADLINE), Box::pin(read)).await
            }
            // What it charges too late has to be withdrawn, too.
            Command::Reserve { bill, terms } => {
                let outcome = self.settle_by_deadline(bill, Some(*terms)).await?;
                Ok(Answer::Settled(outcome))
            }
            command => {
                let deadline = match command {
                    Command::BeginLogin { .. }
                    | Command::EndLogin { .. }
                    | Command::ChangeAccount { .. }
                    | Command::ReadAccount { .. } => self.deadline.max(PATIENT_DEADLINE),
                    _ => self.deadline,
                };
                if late::is_withdrawn(&command) {
                    return self.execute_withdrawn(command, deadline).await;
                }
                // It counts once whenever it is executed, so it may be executed late.
                self.wait(deadline, Box::pin(async move { executor.execute(command, Latest::Never).await })).await
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
        listed::list(&self.executor.servers, kind, after, limit, now).await
    }

    fn share(&self) -> Option<Share> {
        self.nodes.share()
    }

    fn take_late(&self) -> Vec<LateAnswer> {
        self.late.take()
    }

    fn settles_partitions_together(&self) -> bool {
        // One server runs one script for all keys of a bill. In a Cluster each partition is settled by itself.
        self.executor.servers.is_single()
    }

    fn last_error(&self) -> Option<String> {
        // A wrong count is worse than none, and stays wrong after the servers have answered again.
        self.executor.samples.last().or_else(|| self.executor.servers.problem())
    }

    fn present_problem(&self) -> Option<String> {
        self.executor.servers.present_problem()
    }

    fn is_reachable(&self) -> bool {
        self.is_connected()
    }

    fn errors(&self) -> Vec<StoreErrorCount> {
        self.executor.servers.errors().all()
    }

    fn differences(&self) -> u64 {
        self.executor.samples.differences()
    }

    fn numbers(&self) -> StoreNumbers {
        StoreNumbers { keys: None, expired_reservations: self.expired.load(Ordering::Relaxed) }
    }
}

/// Connects to the servers that a URL names.
async fn connect_servers(options: &RedisOptions) -> Result<Servers, RedisOpenError> {
    let connect = ConnectOptions::new(&options.url, &options.certificates).map_err(RedisOpenError::Tls)?;
    let (secrets, slow) = (options.secret_ids(), options.deadline.max(SLOW));
    if options.url.kind == url::Kind::Cluster {
        let connector = move |address: &url::Address| Connector::to(connect.clone(), address.clone(), secrets);
        let cluster = Cluster::connect(Box::new(connector), options.url.seeds.clone(), slow).await?;
        return Ok(Servers::Cluster(cluster));
    }
    let connector = Connector::new(connect, &options.url, secrets)?;
    Ok(Servers::Single(Server::connect(connector, slow).await?))
}
