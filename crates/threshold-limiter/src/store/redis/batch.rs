//! Load, execute, compare-and-set: every command that core decides on copies of records.
//!
//! Commands that arrive while a batch is under way wait for the next one. All commands of a batch run in their order on one set of
//! copies and are saved by one call, so that many requests on one account or one subject do not overtake each other again and
//! again: a call fails only when another node has changed the same records in between.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use threshold_core::command::{Answer, Command, execute};
use threshold_core::key::Partition;
use threshold_core::{Reservation, Timestamp, TraceId};
use tokio::sync::oneshot;

use super::copies::{Change, Copies, CopyError, Expiry, waits_for_expiry};
use super::keys::{self, RecordKey, RecordKind};
use super::listed;
use super::reply::{self, Swapped};
use super::server::{CallError, ServerScript};
use super::servers::Servers;
use crate::store::StoreError;
use crate::store::partitioned::PartitionError;

static LOAD: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("load.lua")));
static SWAP: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("swap.lua")));

/// The largest number of commands in a batch. A batch is one call, and blocks the server while it runs.
const MAX_BATCH: usize = 128;
/// The largest number of commands that wait. Beyond it the store fails at once instead of answering too late.
const MAX_WAITING: usize = 4096;
/// The number of times that a batch is executed before it is given up. Each time another node was faster.
const MAX_TRIES: usize = 64;

#[derive(Debug)]
struct Job {
    command: Command,
    answer: oneshot::Sender<Result<Answer, PartitionError>>,
}

/// Collects commands into batches, one batch at a time in each queue: one queue for a server, or one for each partition of a
/// Cluster.
#[derive(Debug)]
pub(super) struct Batches {
    servers: Servers,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// The commands of each queue with a batch under way.
    queues: HashMap<Option<Partition>, Vec<Job>>,
    /// The number of commands in all queues.
    count: usize,
}

impl Batches {
    pub(super) fn new(servers: Servers) -> Arc<Self> {
        Arc::new(Self { servers, waiting: Mutex::default() })
    }

    /// Executes a command whose records are all in one partition, or any command on a single server. It is carried out also if the
    /// returned future is dropped.
    pub(super) async fn run(
        self: &Arc<Self>,
        partition: Option<Partition>,
        command: Command,
    ) -> Result<Answer, PartitionError> {
        let (answer, answered) = oneshot::channel();
        self.add(partition, Job { command, answer })?;
        answered.await.map_err(|_| StoreError::Unavailable)?
    }

    /// Adds a command to a queue, and starts to work on the queue if nothing does.
    fn add(self: &Arc<Self>, queue: Option<Partition>, job: Job) -> Result<(), StoreError> {
        let mut waiting = self.waiting();
        if waiting.count >= MAX_WAITING {
            return Err(StoreError::Unavailable);
        }
        waiting.count = waiting.count.saturating_add(1);
        match waiting.queues.entry(queue) {
            Entry::Occupied(mut jobs) => jobs.get_mut().push(job),
            Entry::Vacant(jobs) => {
                jobs.insert(vec![job]);
                tokio::spawn(Arc::clone(self).work(queue));
            }
        }
        Ok(())
    }

    /// Executes the commands of a queue until it is empty.
    async fn work(self: Arc<Self>, queue: Option<Partition>) {
        while let Some(jobs) = self.take(queue) {
            let (commands, callers): (Vec<Command>, Vec<_>) =
                jobs.into_iter().map(|job| (job.command, job.answer)).unzip();
            let answers = run(&self.servers, &commands).await;
            for (answer, caller) in answers.into_iter().zip(callers) {
                // A caller that did not wait gets no answer. Its command was carried out.
                let _ = caller.send(answer);
            }
        }
    }

    /// Takes the commands of the next batch. A queue without commands is removed, so that the next command starts to work on it.
    fn take(&self, queue: Option<Partition>) -> Option<Vec<Job>> {
        let mut waiting = self.waiting();
        let Entry::Occupied(mut jobs) = waiting.queues.entry(queue) else { return None };
        let count = jobs.get().len().min(MAX_BATCH);
        if count == 0 {
            jobs.remove();
            return None;
        }
        let batch: Vec<Job> = jobs.get_mut().drain(..count).collect();
        waiting.count = waiting.count.saturating_sub(count);
        Some(batch)
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // A poisoned lock is safe to use: nothing in it can panic halfway.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Carries out all commands in one step.
async fn run(servers: &Servers, commands: &[Command]) -> Vec<Result<Answer, PartitionError>> {
    match run_batch(servers, commands).await {
        Ok(answers) => answers.into_iter().map(|answer| answer.map_err(PartitionError::from)).collect(),
        // While a slot is moved, only calls with one key are carried out. Most commands change one record.
        Err(PartitionError::Moving) if commands.len() > 1 => {
            let mut answers = Vec::with_capacity(commands.len());
            for command in commands {
                let alone = run_batch(servers, std::slice::from_ref(command)).await;
                let answer = alone.and_then(|mut answers| Ok(answers.pop().ok_or(StoreError::Unavailable)??));
                answers.push(answer);
            }
            answers
        }
        Err(error) => commands.iter().map(|_| Err(error)).collect(),
    }
}

async fn run_batch(servers: &Servers, commands: &[Command]) -> Result<Vec<Result<Answer, StoreError>>, PartitionError> {
    let mut copies = Copies::default();
    let mut missing: BTreeSet<RecordKey> = commands.iter().flat_map(named).collect();
    let mut now = Timestamp::EPOCH;
    for _ in 0..MAX_TRIES {
        // Commands that name no record need the server's time all the same.
        if !missing.is_empty() || now == Timestamp::EPOCH {
            now = load(servers, &mut copies, &missing).await?;
            missing.clear();
        }
        // All of them again, from the loaded records: a command may decide otherwise on those that have changed.
        let answers = execute_all(commands, &mut copies, now);
        missing.extend(copies.take_missing());
        if !missing.is_empty() {
            continue;
        }
        match swap(servers, &mut copies).await? {
            // Only now: an answer must not promise what was not written.
            None => return Ok(answers),
            Some(later) => now = later,
        }
    }
    Err(StoreError::Timeout.into())
}

/// Returns the records that a command names. Others are found while it is executed.
fn named(command: &Command) -> Vec<RecordKey> {
    let balance = RecordKey::balance;
    let standing = |key| RecordKey::of_digest(RecordKind::Standing, key);
    let account = |key| RecordKey::of_digest(RecordKind::Account, key);
    let reservation = |id| RecordKey::of_id(RecordKind::Reservation, id);
    match command {
        Command::Settle(bill) => {
            let bill = bill.as_bill();
            let balances = bill.charges().iter().map(|charge| balance(charge.key()));
            balances.chain(bill.subjects().iter().map(|subject| standing(subject.key()))).collect()
        }
        Command::Refund(receipt) => {
            let ids = [reservation(receipt.id()), RecordKey::of_id(RecordKind::Refund, receipt.id())];
            receipt.keys().map(balance).chain(ids).collect()
        }
        Command::GiveBack(receipt) | Command::Renew(receipt) => receipt.keys().map(balance).collect(),
        Command::Commit { id, .. } | Command::Release { id } => vec![reservation(*id)],
        Command::Expire { id } | Command::EndReservation { id, .. } => vec![reservation(*id)],
        Command::BeginRefund { id, .. } => vec![reservation(*id), RecordKey::of_id(RecordKind::Refund, *id)],
        Command::Adjust(adjustment) => adjustment.charges().map(|(key, _)| balance(key)).collect(),
        Command::ReadDevice { account: key, .. } => vec![account(*key)],
        Command::BeginLogin { keys, .. } => {
            keys.account.map(account).into_iter().chain(keys.address.map(balance)).collect()
        }
        Command::EndLogin { attempt, .. } | Command::WithdrawLogin { attempt, .. } => {
            attempt.account.map(account).into_iter().chain(attempt.address.map(balance)).collect()
        }
        Command::Reserve { receipt, .. } => vec![reservation(receipt.id())],
        Command::BeginRequest { key, .. } | Command::EndRequest { key, .. } => {
            vec![RecordKey::of_digest(RecordKind::Request, key.id)]
        }
        Command::Pause { keys, .. } | Command::Forgive { keys } | Command::ReadBlock { keys } => {
            keys.balances.keys().copied().map(balance).chain(keys.standings.iter().copied().map(standing)).collect()
        }
        Command::Limit { key, .. } | Command::Credit { key, .. } => vec![balance(*key)],
        Command::ReadStanding { key } => vec![standing(*key)],
        Command::ReadAccount { account: key } | Command::ChangeAccount { account: key, .. } => vec![account(*key)],
        // Their records are found while they are executed, at the price of one more round trip.
        _ => Vec::new(),
    }
}

/// Executes every command on the copies. A command that needs a record which is not loaded has no answer.
fn execute_all(commands: &[Command], copies: &mut Copies, now: Timestamp) -> Vec<Result<Answer, StoreError>> {
    copies.restart();
    let mut answers = Vec::with_capacity(commands.len());
    for command in commands {
        match copies.execute(|copies| execute(command, copies, now)) {
            Ok(answer) => answers.push(Ok(answer)),
            Err(CopyError::Store(error)) => answers.push(Err(error)),
            // The others are executed too, so that what they miss is loaded in the same call.
            Err(CopyError::Missing) => {}
        }
    }
    answers
}

/// Loads records, and returns the server's time.
async fn load(servers: &Servers, copies: &mut Copies, keys: &BTreeSet<RecordKey>) -> Result<Timestamp, PartitionError> {
    let keys: Vec<RecordKey> = copies.not_loaded(keys.iter().copied()).into_iter().collect();
    match load_call(servers, copies, &keys).await {
        // One after another. A record that changes in between is found when the result is written.
        Err(PartitionError::Moving) if keys.len() > 1 => {
            let mut now = Timestamp::EPOCH;
            for key in keys {
                now = load_call(servers, copies, &[key]).await?.max(now);
            }
            Ok(now)
        }
        loaded => loaded,
    }
}

async fn load_call(servers: &Servers, copies: &mut Copies, keys: &[RecordKey]) -> Result<Timestamp, PartitionError> {
    // `MGET` wants at least one key. A command without records, such as a bill without charges, still needs the time.
    let names: Vec<String> = match keys.first() {
        Some(_) => keys.iter().map(RecordKey::name).collect(),
        None => vec![keys::control("meta")],
    };
    let (now, values) = reply::loaded(servers.run(&LOAD, &names, &[]).await?)?;
    servers.heard(now);
    // Values must not be paired with the keys of other records.
    if !keys.is_empty() && values.len() != keys.len() {
        return Err(StoreError::Unavailable.into());
    }
    copies.load(keys.iter().copied().zip(values));
    Ok(now)
}

/// Writes the changes, unless another node has changed one of the records. Then loads those, and returns the server's time.
async fn swap(servers: &Servers, copies: &mut Copies) -> Result<Option<Timestamp>, PartitionError> {
    let changes = copies.changes();
    if changes.is_empty() {
        return Ok(None);
    }
    let listed = changes.iter().filter(|(_, _, change)| change.is_listed).map(|(key, _, _)| *key).collect();
    let mut write = Swap::new(&changes);
    write.compare(&copies.reservations_read());
    let swapped = match write.send(servers).await {
        Err(CallError::Moving) => {
            let written = swap_by_key(servers, copies).await?;
            if written.is_none() {
                listed::add(servers, listed);
            }
            return Ok(written);
        }
        answered => answered?,
    };
    match swapped {
        Swapped::Done => {
            listed::add(servers, listed);
            Ok(None)
        }
        Swapped::Changed { now, values } => {
            servers.heard(now);
            // The script has returned what it found, so nothing has to be loaded again.
            copies.load(write.records.into_iter().zip(values));
            Ok(Some(now))
        }
    }
}

/// Writes the changes as [`swap`] does, one key at a time: while a slot is moved, no other call is executed.
///
/// Fails unless every step is safe without those after it. That holds for one record: a reservation enters its index before it is written,
/// and leaves it afterwards, because one that is in no index would never expire. It also holds for the end of a reservation beside the
/// mark of its receipt, which comes first.
async fn swap_by_key(servers: &Servers, copies: &mut Copies) -> Result<Option<Timestamp>, PartitionError> {
    let mut changes = copies.changes();
    let is_mark = |key: &RecordKey| key.kind == RecordKind::Refund;
    if changes.iter().filter(|(key, _, _)| !is_mark(key)).count() > 1 {
        return Err(PartitionError::Moving);
    }
    changes.sort_by_key(|(key, _, _)| !is_mark(key));
    let mut steps = Vec::new();
    for change in &changes {
        let mut step = Swap::new(std::slice::from_ref(change));
        let indexes = std::mem::take(&mut step.indexes).into_iter();
        let (entered, left): (Vec<_>, Vec<_>) = indexes.partition(|(_, [verb, ..])| verb == b"add");
        let alone = |index| Swap { indexes: vec![index], ..Swap::default() };
        steps.extend(entered.into_iter().map(alone));
        steps.push(step);
        steps.extend(left.into_iter().map(alone));
    }
    let read = copies.reservations_read().into_iter().map(|(key, bytes)| (key, bytes.map(<[u8]>::to_vec)));
    let read: Vec<(RecordKey, Option<Vec<u8>>)> = read.collect();
    for step in steps {
        if let Swapped::Changed { now, values } = step.send(servers).await? {
            servers.heard(now);
            copies.load(step.records.into_iter().zip(values));
            return Ok(Some(now));
        }
    }
    // A reservation that was saved before the mark of its receipt must not be refunded as well. The mark stays and does no harm.
    for (key, before) in read {
        let now = load_call(servers, copies, &[key]).await?;
        if copies.loaded(key) != before.as_deref() {
            return Ok(Some(now));
        }
    }
    Ok(None)
}

/// The arguments of `swap.lua`.
#[derive(Debug, Default)]
struct Swap {
    records: Vec<RecordKey>,
    /// Three for each record.
    args: Vec<Vec<u8>>,
    /// The key of each index, and its three arguments. An index changes in the same step as its reservation, so that no expiry is
    /// missed.
    indexes: Vec<(String, [Vec<u8>; 3])>,
}

impl Swap {
    fn new(changes: &[(RecordKey, Option<&[u8]>, &Change)]) -> Self {
        let mut swap = Self { records: changes.iter().map(|(key, _, _)| *key).collect(), ..Self::default() };
        for (key, before, change) in changes {
            swap.args.push(before.unwrap_or_default().to_vec());
            swap.args.push(change.bytes.clone().unwrap_or_default());
            swap.args.push(expiry_argument(change.expiry, &swap.records));
            if let Some((verb, id, score)) = index_change(*key, *before, change) {
                let args = [verb.as_bytes().to_vec(), keys::member(id).into_bytes(), score.to_string().into_bytes()];
                swap.indexes.push((keys::expiring(key.partition), args));
            }
        }
        swap
    }

    /// Adds records that must not have changed either. They are written as they were.
    fn compare(&mut self, records: &[(RecordKey, Option<&[u8]>)]) {
        for (key, bytes) in records {
            self.records.push(*key);
            let bytes = bytes.unwrap_or_default().to_vec();
            self.args.extend([bytes.clone(), bytes, expiry_argument(Expiry::Unchanged, &[])]);
        }
    }

    async fn send(&self, servers: &Servers) -> Result<Swapped, CallError> {
        let mut names: Vec<String> = self.records.iter().map(RecordKey::name).collect();
        let mut args = vec![self.records.len().to_string().into_bytes()];
        args.extend(self.args.iter().cloned());
        for (name, index) in &self.indexes {
            names.push(name.clone());
            args.extend(index.iter().cloned());
        }
        let reply = servers.run(&SWAP, &names, &args).await?;
        // A reply that cannot be read says nothing about what was written.
        reply::swapped(reply).map_err(|_| CallError::Unknown)
    }
}

/// Returns the time of a record as `swap.lua` takes it.
fn expiry_argument(expiry: Expiry, records: &[RecordKey]) -> Vec<u8> {
    match expiry {
        Expiry::At(time) if time == Timestamp::MAX => Vec::new(),
        Expiry::At(time) => millis(time).to_string().into_bytes(),
        Expiry::Unchanged => b"keep".to_vec(),
        Expiry::As(other) => match records.iter().position(|record| *record == other) {
            Some(place) => format!("as {}", place.saturating_add(1)).into_bytes(),
            None => b"keep".to_vec(),
        },
    }
}

/// Returns Unix milliseconds, rounded up: a record must not be dropped while it still counts. Redis refuses a time of 0.
fn millis(time: Timestamp) -> u64 {
    time.micros().div_ceil(1_000).max(1)
}

/// Returns the change of the index of expiring reservations that belongs to the change of a record.
fn index_change(key: RecordKey, before: Option<&[u8]>, change: &Change) -> Option<(&'static str, TraceId, u64)> {
    if key.kind != RecordKind::Reservation {
        return None;
    }
    let waits = |bytes: &[u8]| Reservation::from_bytes(bytes).ok().filter(waits_for_expiry);
    match (before.and_then(waits), change.bytes.as_deref().and_then(waits)) {
        (_, Some(new)) => Some(("add", new.id(), millis(new.expires()))),
        (Some(old), None) => Some(("remove", old.id(), 0)),
        (None, None) => None,
    }
}
