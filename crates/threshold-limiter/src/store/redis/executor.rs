//! Executes commands: on one server each in one step, on a Cluster partition by partition.

use std::sync::Arc;
use std::time::Duration;

use threshold_core::key::Partition;
use threshold_core::receipt::Adjustment;
use threshold_core::{Answer, Command, Outcome, OwnedBill, TraceId};
use tokio::sync::watch;

use super::batch::Batches;
use super::samples::Samples;
use super::server::jittered;
use super::servers::Servers;
use super::{give_back, keys, rekey, settle};
use crate::store::StoreError;
use crate::store::partitioned::{self, PartitionError, Partitions};

/// The pause between two attempts to give something back, and their number: half a minute in all, in which a replica is promoted.
const RETRY: Duration = Duration::from_millis(500);
const MAX_RETRIES: usize = 60;
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

impl Executor {
    pub(super) fn new(servers: Servers, samples: Samples) -> Self {
        let batches = Batches::new(servers.clone());
        Self { servers, batches, samples: Arc::new(samples), returning: Arc::default() }
    }

    /// Waits until nothing is given back any more.
    pub(super) async fn returned(&self) {
        // It fails only without a sender, and this is one.
        let _ = self.returning.subscribe().wait_for(|tasks| *tasks == 0).await;
    }

    /// Settles a bill. Bills and the state of several partitions are large, so both are on the heap.
    pub(super) async fn settle(&self, bill: &OwnedBill) -> Result<Outcome, StoreError> {
        if self.servers.is_single() {
            Ok(self.settle_part(None, bill).await?)
        } else {
            Box::pin(partitioned::settle(self, Box::new(bill.clone()))).await
        }
    }

    /// Executes any other command on records.
    pub(super) async fn execute(&self, command: Command) -> Result<Answer, StoreError> {
        match command {
            Command::GiveBack(receipt) if self.servers.is_single() => {
                Ok(self.adjust(None, Box::new(Adjustment::giving_back(&receipt))).await?)
            }
            command if self.servers.is_single() => Ok(self.batches.run(None, command).await?),
            Command::Rekey(moves) => rekey::rekey(&self.servers, &moves).await,
            command => Box::pin(partitioned::execute(self, command)).await,
        }
    }

    /// Gives charges back until every part was carried out or may have been. If a partition refuses for too long, or too many tasks
    /// wait, the charges stay until their windows end or refill.
    async fn give_back(&self, mut commands: Vec<(Partition, Command)>) {
        for _ in 0..MAX_RETRIES {
            commands = Box::pin(partitioned::give_back(self, commands)).await;
            if commands.is_empty() || *self.returning.borrow() > MAX_RETURNING {
                return;
            }
            tokio::time::sleep(jittered(RETRY)).await;
        }
    }

    /// Adjusts balances that are all in one partition, or any on a single server.
    async fn adjust(
        &self,
        partition: Option<Partition>,
        adjustment: Box<Adjustment>,
    ) -> Result<Answer, PartitionError> {
        if give_back::give_back(&self.servers, &adjustment).await? {
            return Ok(Answer::Done);
        }
        self.batches.run(partition, Command::Adjust(adjustment)).await
    }

    /// Settles a bill whose records are all in one partition, or any bill on a single server.
    async fn settle_part(&self, partition: Option<Partition>, bill: &OwnedBill) -> Result<Outcome, PartitionError> {
        if let Some(outcome) = settle::settle(&self.servers, &self.samples, bill).await? {
            return Ok(outcome);
        }
        // Only here: the usual decision needs no copy.
        let answer = self.batches.run(partition, Command::Settle(Box::new(bill.clone()))).await?;
        Ok(*answer.settled().ok_or(StoreError::Unavailable)?)
    }
}

impl Partitions for Executor {
    async fn execute(&self, partition: Partition, command: Command) -> Result<Answer, PartitionError> {
        match command {
            Command::Settle(bill) => {
                let outcome = self.settle_part(Some(partition), &bill).await?;
                Ok(Answer::Settled(Box::new(outcome)))
            }
            Command::Adjust(adjustment) => self.adjust(Some(partition), adjustment).await,
            command => self.batches.run(Some(partition), command).await,
        }
    }

    fn home(&self, id: TraceId) -> Partition {
        keys::home(id)
    }

    fn execute_later(&self, commands: Vec<(Partition, Command)>) {
        let executor = self.clone();
        self.returning.send_modify(|tasks| *tasks = tasks.saturating_add(1));
        tokio::spawn(async move {
            executor.give_back(commands).await;
            executor.returning.send_modify(|tasks| *tasks = tasks.saturating_sub(1));
        });
    }
}
