//! Executes commands: on one server each in one step, on a Cluster partition by partition.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use threshold_core::command::CREDIT_REMEMBERED;
use threshold_core::key::Partition;
use threshold_core::receipt::HoldTerms;
use threshold_core::{Answer, Command, Digest, Outcome, OwnedBill, TraceId};
use tokio::sync::watch;

use super::batch::Batches;
use super::keys::{self, WHOLE};
use super::samples::Samples;
use super::server::{Latest, jittered};
use super::servers::Servers;
use super::{rekey, settle, sweep};
use threshold_limiter::store::StoreError;
use threshold_limiter::store::partitioned::{self, PartitionError, Partitions};

/// The pause between two attempts to give something back, and their number: half a minute in all, in which a replica is promoted.
const RETRY: Duration = Duration::from_millis(500);
const MAX_RETRIES: usize = 60;
/// For how long after its first attempt something is given back at the latest. A partition remembers what it has given back for longer
/// than that, and its clock may be another one after a failover.
const LAST_RETRY: Duration = Duration::from_micros(CREDIT_REMEMBERED.micros() / 4 * 3);
/// The largest number of requests whose charges are given back again and again.
const MAX_RETURNING: usize = 10_000;

/// The servers, and the commands that wait for them. A clone shares both.
#[derive(Debug, Clone)]
pub(super) struct Executor {
    pub(super) servers: Servers,
    batches: Arc<Batches>,
    pub(super) samples: Arc<Samples>,
    /// The number of tasks that give back what another partition has denied.
    returning: Arc<watch::Sender<usize>>,
}

/// Commands that a server may execute until a time, and not later.
#[derive(Debug)]
struct Until<'e> {
    executor: &'e Executor,
    latest: Latest,
}

impl Executor {
    pub(super) fn new(servers: Servers, samples: Samples) -> Self {
        let batches = Batches::new(servers.clone());
        Self { servers, batches, samples: Arc::new(samples), returning: Arc::default() }
    }

    /// Ends reservations that have expired until the executor is dropped, and counts them.
    pub(super) fn sweep(&self) -> Arc<AtomicU64> {
        sweep::start(&self.batches);
        self.batches.sweeps.ended()
    }

    /// Ends the reservations that have expired, as far as this node knows of them. Returns how many there were.
    pub(super) async fn release_expired(&self) -> Result<usize, StoreError> {
        sweep::release_expired(&self.batches).await
    }

    /// Waits until nothing is given back any more.
    pub(super) async fn returned(&self) {
        // It fails only without a sender, and this is one.
        let _ = self.returning.subscribe().wait_for(|tasks| *tasks == 0).await;
    }

    /// Settles a bill, and holds what it charges.
    pub(super) async fn settle(
        &self,
        bill: &OwnedBill,
        hold: Option<&HoldTerms>,
        latest: Latest,
    ) -> Result<Box<Outcome>, StoreError> {
        let until = Until { executor: self, latest };
        if self.servers.is_single() {
            return Ok(until.settle_part(WHOLE, bill, hold).await?);
        }
        let bill = Box::new(bill.clone());
        match hold {
            Some(terms) => Box::pin(partitioned::reserve(&until, bill, terms)).await,
            None => Box::pin(partitioned::settle(&until, bill)).await,
        }
    }

    /// Executes any other command on records.
    pub(super) async fn execute(&self, command: Command, latest: Latest) -> Result<Answer, StoreError> {
        let until = Until { executor: self, latest };
        match command {
            Command::Rekey(moves) if !self.servers.is_single() => rekey::rekey(&self.servers, &moves).await,
            // The budget of an address is charged by itself, because many accounts share it and only the account is compared.
            Command::BeginLogin { .. } | Command::EndLogin { .. } | Command::WithdrawLogin { .. } => {
                Box::pin(partitioned::execute(&until, command)).await
            }
            // What is given back is sent again, until its id is forgotten.
            Command::GiveBack { credit: Some(_), .. } => {
                let until = Until { latest: self.last_retry(), ..until };
                Box::pin(partitioned::execute(&until, command)).await
            }
            command if self.servers.is_single() => Ok(until.run(WHOLE, command).await?),
            command => Box::pin(partitioned::execute(&until, command)).await,
        }
    }

    fn last_retry(&self) -> Latest {
        Instant::now().checked_add(LAST_RETRY).map_or(Latest::Never, Latest::At)
    }

    /// Executes commands until each of them was carried out. All of them may be repeated. If a partition refuses for too long, or too many
    /// tasks wait, the charges stay until their windows end or refill.
    async fn complete(&self, mut commands: Vec<(Partition, Command)>) {
        let latest = self.last_retry();
        let until = Until { executor: self, latest };
        for _ in 0..MAX_RETRIES {
            commands = Box::pin(partitioned::complete(&until, commands)).await;
            let is_over = matches!(latest, Latest::At(end) if end <= Instant::now());
            if commands.is_empty() || is_over || *self.returning.borrow() > MAX_RETURNING {
                return;
            }
            tokio::time::sleep(jittered(RETRY)).await;
        }
    }
}

impl Until<'_> {
    /// Executes a command whose records are all in one partition, or any command on a single server.
    async fn run(&self, place: Partition, command: Command) -> Result<Answer, PartitionError> {
        match command {
            Command::Settle(bill) => self.settle_part(place, &bill, None).await.map(Answer::Settled),
            Command::Reserve { bill, terms } => self.settle_part(place, &bill, Some(&terms)).await.map(Answer::Settled),
            Command::Limit { key, limit, cost, id } => {
                let bill = OwnedBill::check(id, key, limit, cost);
                let outcome = self.settle_part(place, &bill, None).await?;
                let checked = outcome.checked().ok_or(StoreError::Unavailable)?;
                Ok(Answer::Limited { checked, at: outcome.at() })
            }
            // Boxed, so that the future of the usual decision has no room for it.
            command => Box::pin(self.executor.batches.run(place, command, self.latest)).await,
        }
    }

    /// Settles a bill whose records are all in one partition, or any bill on a single server, and holds what it charges.
    async fn settle_part(
        &self,
        place: Partition,
        bill: &OwnedBill,
        hold: Option<&HoldTerms>,
    ) -> Result<Box<Outcome>, PartitionError> {
        let Executor { batches, samples, .. } = self.executor;
        match settle::settle(batches, samples, place, (bill, hold), self.latest).await {
            Ok(Some(outcome)) => return Ok(outcome),
            // What is held has a record beside its charges, and waits until the partition has moved.
            Err(PartitionError::Moving) if hold.is_some() => {}
            Ok(None) => {}
            Err(error) => return Err(error),
        }
        // Only here: the usual decision needs no copy.
        let bill = Box::new(bill.clone());
        let command = match hold {
            Some(terms) => Command::Reserve { bill, terms: Box::new(terms.clone()) },
            None => Command::Settle(bill),
        };
        let answer = Box::pin(batches.run(place, command, self.latest)).await?;
        Ok(answer.settled().ok_or(StoreError::Unavailable)?)
    }
}

impl Partitions for Until<'_> {
    async fn execute(&self, partition: Partition, command: Command) -> Result<Answer, PartitionError> {
        self.run(partition, command).await
    }

    fn partition(&self, key: Digest) -> Partition {
        if self.executor.servers.is_single() { WHOLE } else { key.partition() }
    }

    fn home(&self, id: TraceId) -> Partition {
        if self.executor.servers.is_single() { WHOLE } else { keys::home(id) }
    }

    fn execute_later(&self, commands: Vec<(Partition, Command)>) {
        if commands.is_empty() {
            return;
        }
        let executor = self.executor.clone();
        executor.returning.send_modify(|tasks| *tasks = tasks.saturating_add(1));
        tokio::spawn(async move {
            executor.complete(commands).await;
            executor.returning.send_modify(|tasks| *tasks = tasks.saturating_sub(1));
        });
    }
}
