//! Load, execute, compare-and-set: every command that core decides on copies of records.
//!
//! Commands that arrive while a batch is under way wait for the next one. All commands of a batch run in their order on one set of
//! copies and are saved by one call, so that many requests on one account or one subject do not overtake each other again and
//! again: a call fails only when another node has changed the same records in between.

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use threshold_core::command::{Answer, Command, execute, expire};
use threshold_core::{Reservation, Timestamp, TraceId};
use tokio::sync::{mpsc, oneshot};

use super::copies::{Change, Copies, CopyError, Expiry, waits_for_expiry};
use super::keys::{self, RecordKey, RecordKind};
use super::listed;
use super::reply::{self, Swapped};
use super::server::{Server, ServerScript};
use crate::store::StoreError;

static LOAD: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("load.lua")));
static SWAP: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("swap.lua")));

/// The largest number of commands in a batch. A batch is one call, and blocks the server while it runs.
const MAX_BATCH: usize = 128;
/// The largest number of commands that wait. Beyond it the store fails at once instead of answering too late.
const MAX_WAITING: usize = 4096;
/// The number of times that a batch is executed before it is given up. Each time another node was faster.
const MAX_TRIES: usize = 64;

/// One operation on copies of records.
#[derive(Debug)]
pub(super) enum Task {
    Execute(Box<Command>),
    /// Ends a reservation that has expired.
    Expire(TraceId),
}

#[derive(Debug)]
struct Job {
    task: Task,
    answer: oneshot::Sender<Result<Answer, StoreError>>,
}

/// Collects commands into batches, one batch at a time.
#[derive(Debug)]
pub(super) struct Batches(mpsc::Sender<Job>);

impl Batches {
    /// Starts to work on a server. It ends when this is dropped.
    pub(super) fn start(server: Arc<Server>) -> Self {
        let (sender, mut receiver) = mpsc::channel(MAX_WAITING);
        tokio::spawn(async move {
            let mut jobs: Vec<Job> = Vec::with_capacity(MAX_BATCH);
            while receiver.recv_many(&mut jobs, MAX_BATCH).await > 0 {
                let (tasks, waiting): (Vec<Task>, Vec<_>) = jobs.drain(..).map(|job| (job.task, job.answer)).unzip();
                let answers = run(&server, &tasks).await;
                for (answer, caller) in answers.into_iter().zip(waiting) {
                    // A caller that did not wait gets no answer. Its command was carried out.
                    let _ = caller.send(answer);
                }
            }
        });
        Self(sender)
    }

    /// Carries out a task. It is carried out also if the returned future is dropped.
    pub(super) async fn run(&self, task: Task) -> Result<Answer, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.0.try_send(Job { task, answer }).map_err(|_| StoreError::Unavailable)?;
        answered.await.map_err(|_| StoreError::Unavailable)?
    }
}

/// Carries out all tasks in one step.
async fn run(server: &Arc<Server>, tasks: &[Task]) -> Vec<Result<Answer, StoreError>> {
    match run_batch(server, tasks).await {
        Ok(answers) => answers,
        Err(error) => tasks.iter().map(|_| Err(error)).collect(),
    }
}

async fn run_batch(server: &Arc<Server>, tasks: &[Task]) -> Result<Vec<Result<Answer, StoreError>>, StoreError> {
    let mut copies = Copies::default();
    let mut missing: BTreeSet<RecordKey> = tasks.iter().flat_map(named).collect();
    let mut now = Timestamp::EPOCH;
    for _ in 0..MAX_TRIES {
        // Commands that name no record need the server's time all the same.
        if !missing.is_empty() || now == Timestamp::EPOCH {
            now = load(server, &mut copies, &missing).await?;
            missing.clear();
        }
        // All of them again, from the loaded records: a command may decide otherwise on those that have changed.
        let answers = execute_all(tasks, &mut copies, now);
        missing.extend(copies.take_missing());
        if !missing.is_empty() {
            continue;
        }
        match swap(server, &mut copies).await? {
            // Only now: an answer must not promise what was not written.
            None => return Ok(answers),
            Some(later) => now = later,
        }
    }
    Err(StoreError::Timeout)
}

/// Returns the records that a task names. Others are found while it is executed.
fn named(task: &Task) -> Vec<RecordKey> {
    let balance = RecordKey::balance;
    let standing = |key| RecordKey::of_digest(RecordKind::Standing, key);
    let account = |key| RecordKey::of_digest(RecordKind::Account, key);
    let reservation = |id| RecordKey::of_id(RecordKind::Reservation, id);
    let command = match task {
        Task::Execute(command) => &**command,
        Task::Expire(id) => return vec![reservation(*id)],
    };
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
        Command::Pause { keys, .. } | Command::Forgive { keys } | Command::ReadBlock { keys } => {
            keys.balances.keys().copied().map(balance).chain(keys.standings.iter().copied().map(standing)).collect()
        }
        Command::Limit { key, .. } => vec![balance(*key)],
        Command::ReadStanding { key } => vec![standing(*key)],
        Command::ReadAccount { account: key } | Command::ChangeAccount { account: key, .. } => vec![account(*key)],
        // Their records are found while they are executed, at the price of one more round trip.
        _ => Vec::new(),
    }
}

/// Executes every task on the copies. A task that needs a record which is not loaded has no answer.
fn execute_all(tasks: &[Task], copies: &mut Copies, now: Timestamp) -> Vec<Result<Answer, StoreError>> {
    copies.restart();
    let mut answers = Vec::with_capacity(tasks.len());
    for task in tasks {
        let executed = copies.execute(|copies| match task {
            Task::Execute(command) => execute(command, copies, now),
            Task::Expire(id) => {
                copies.expire_next(*id);
                expire(copies, now).map(|()| Answer::Done)
            }
        });
        match executed {
            Ok(answer) => answers.push(Ok(answer)),
            Err(CopyError::Store(error)) => answers.push(Err(error)),
            // The other tasks are executed too, so that what they miss is loaded in the same call.
            Err(CopyError::Missing) => {}
        }
    }
    answers
}

/// Loads records, and returns the server's time.
async fn load(server: &Arc<Server>, copies: &mut Copies, keys: &BTreeSet<RecordKey>) -> Result<Timestamp, StoreError> {
    let keys = copies.not_loaded(keys.iter().copied());
    // `MGET` wants at least one key. A command without records, such as a bill without charges, still needs the time.
    let names: Vec<String> = match keys.first() {
        Some(_) => keys.iter().map(RecordKey::name).collect(),
        None => vec![keys::control("meta")],
    };
    let (now, values) = server.run(&LOAD, &names, &[]).await.map_err(StoreError::from).and_then(reply::loaded)?;
    server.clock.heard(now);
    // Values must not be paired with the keys of other records.
    if !keys.is_empty() && values.len() != keys.len() {
        return Err(StoreError::Unavailable);
    }
    copies.load(keys.into_iter().zip(values));
    Ok(now)
}

/// Writes the changes, unless another node has changed one of the records. Then loads those, and returns the server's time.
async fn swap(server: &Arc<Server>, copies: &mut Copies) -> Result<Option<Timestamp>, StoreError> {
    let changes = copies.changes();
    if changes.is_empty() {
        return Ok(None);
    }
    let records: Vec<RecordKey> = changes.iter().map(|(key, _, _)| *key).collect();
    let mut names: Vec<String> = records.iter().map(RecordKey::name).collect();
    let mut args = vec![records.len().to_string().into_bytes()];
    for (_, before, change) in &changes {
        args.push(before.unwrap_or_default().to_vec());
        args.push(change.bytes.clone().unwrap_or_default());
        args.push(expiry_argument(change.expiry, &records));
    }
    let listed = changes.iter().filter(|(_, _, change)| change.is_listed).map(|(key, _, _)| *key).collect();
    // An index changes in the same step as its reservation, so that no expiry is missed.
    for (key, before, change) in &changes {
        if let Some((verb, id, score)) = index_change(*key, *before, change) {
            names.push(keys::expiring(key.partition));
            args.extend([verb.as_bytes().to_vec(), keys::member(id).into_bytes(), score.to_string().into_bytes()]);
        }
    }
    match server.run(&SWAP, &names, &args).await.map_err(StoreError::from).and_then(reply::swapped)? {
        Swapped::Done => {
            listed::add(server, listed);
            Ok(None)
        }
        Swapped::Changed { now, values } => {
            server.clock.heard(now);
            // The script has returned what it found, so nothing has to be loaded again.
            copies.load(records.into_iter().zip(values));
            Ok(Some(now))
        }
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
