//! Load, execute, compare-and-set: every command that core decides on copies of records.
//!
//! Commands on one record, such as an account, that arrive while a batch is under way wait for the next one. All commands of a batch run
//! in their order on one set of copies and are saved by one call, so that they do not overtake each other again and again: a call fails
//! only when another node has changed the same record in between. Balances are not compared where a sum does: the same call adds to
//! them whatever they are by then.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rand::RngExt as _;
use threshold_core::command::{Answer, Command, execute};
use threshold_core::key::Partition;
use threshold_core::limit::Algorithm;
use threshold_core::lockout::AttemptOutcome;
use threshold_core::receipt::{History, charge_to_script};
use threshold_core::{Digest, Outcome, OwnedBill, Reservation, Timestamp, TraceId};
use tokio::sync::oneshot;

use super::copies::{Addition, Change, Copies, CopyError, Expiry, waits_for_expiry};
use super::keys::{self, RecordKey, RecordKind};
use super::listed;
use super::reply::{self, Done, Head, Swapped};
use super::server::{CallError, Latest, ScriptCall, ServerScript};
use super::servers::{Replied, Servers};
use super::sweep::{self, Sweeps};
use threshold_limiter::store::partitioned::PartitionError;
use threshold_limiter::store::{StoreError, StoreErrorKind};

static LOAD: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("load.lua")));
static SWAP: LazyLock<ServerScript> = LazyLock::new(|| {
    ServerScript::new(concat!(
        "#!lua\n",
        include_str!("charge.lua"),
        include_str!("adjust.lua"),
        include_str!("swap.lua")
    ))
});

/// The largest number of commands in a batch. A batch is one call, and blocks the server while it runs.
const MAX_BATCH: usize = 128;
/// The largest number of commands that wait for one server. Beyond it the store fails at once instead of answering too late. Commands
/// for other servers go on.
const MAX_WAITING: usize = 4096;
/// The number of times that a batch is executed before it is given up. Each time another node was faster.
const MAX_TRIES: usize = 64;
/// The pause before a command is tried again whose slot is moved to another server, and how often. A slot takes seconds to move.
const MOVING: Duration = Duration::from_millis(20);
const MAX_MOVING: usize = 250;

#[derive(Debug)]
struct Job {
    command: Command,
    /// The server that it was for when it came.
    server: usize,
    latest: Latest,
    answer: oneshot::Sender<Result<Answer, PartitionError>>,
}

/// What a command decides on: commands on the same record wait for each other, and no others do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Queue {
    place: Partition,
    subject: u128,
}

/// Collects commands into batches, one batch at a time in each queue.
#[derive(Debug)]
pub(super) struct Batches {
    pub(super) servers: Servers,
    pub(super) sweeps: Sweeps,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// The commands of each queue with a batch under way.
    queues: HashMap<Queue, Vec<Job>>,
    /// The number of commands in all queues and under way, by server.
    counts: HashMap<usize, usize>,
}

impl Waiting {
    /// Counts commands for these servers as ended.
    fn ended(&mut self, servers: &[usize]) {
        for server in servers {
            if let Entry::Occupied(mut count) = self.counts.entry(*server) {
                *count.get_mut() = count.get().saturating_sub(1);
                // A server that has left the Cluster leaves nothing behind.
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }
}

impl Batches {
    pub(super) fn new(servers: Servers) -> Arc<Self> {
        Arc::new(Self { servers, sweeps: Sweeps::default(), waiting: Mutex::default() })
    }

    /// Executes a command whose records are all in one partition, or any command on a single server. It is carried out also if the
    /// returned future is dropped, unless its time is over by then.
    pub(super) async fn run(
        self: &Arc<Self>,
        place: Partition,
        command: Command,
        latest: Latest,
    ) -> Result<Answer, PartitionError> {
        let (answer, answered) = oneshot::channel();
        let queue = Queue { place, subject: subject(&command) };
        let server = self.servers.number_at(&keys::head(place));
        self.add(queue, Job { command, server, latest, answer })?;
        answered.await.map_err(|_| StoreError::Unavailable)?
    }

    /// Adds a command to a queue, and starts to work on the queue if nothing does.
    fn add(self: &Arc<Self>, queue: Queue, job: Job) -> Result<(), StoreError> {
        let mut waiting = self.waiting();
        let count = waiting.counts.entry(job.server).or_default();
        if *count >= MAX_WAITING {
            self.servers.errors().count(StoreErrorKind::Overloaded, format_args!("{MAX_WAITING} commands wait"));
            return Err(StoreError::Unavailable);
        }
        *count = count.saturating_add(1);
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
    async fn work(self: Arc<Self>, queue: Queue) {
        while let Some(jobs) = self.take(queue) {
            let taken: Vec<usize> = jobs.iter().map(|job| job.server).collect();
            let jobs: Vec<Job> = jobs.into_iter().filter_map(still_wanted).collect();
            let (commands, callers): (Vec<(Command, Latest)>, Vec<_>) =
                jobs.into_iter().map(|job| ((job.command, job.latest), job.answer)).unzip();
            let answers = self.run_all(queue.place, &commands).await;
            for (answer, caller) in answers.into_iter().zip(callers) {
                // A caller that did not wait gets no answer. Its command was carried out.
                let _ = caller.send(answer);
            }
            self.waiting().ended(&taken);
        }
    }

    /// Takes the commands of the next batch. A queue without commands is removed, so that the next command starts to work on it.
    fn take(&self, queue: Queue) -> Option<Vec<Job>> {
        let mut waiting = self.waiting();
        let Entry::Occupied(mut jobs) = waiting.queues.entry(queue) else { return None };
        let count = jobs.get().len().min(MAX_BATCH);
        if count == 0 {
            jobs.remove();
            return None;
        }
        let batch: Vec<Job> = jobs.get_mut().drain(..count).collect();
        Some(batch)
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // A poisoned lock is safe to use: nothing in it can panic halfway.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out all commands, in one step where they do not depend on each other in a way that only the server can tell.
    async fn run_all(
        self: &Arc<Self>,
        place: Partition,
        commands: &[(Command, Latest)],
    ) -> Vec<Result<Answer, PartitionError>> {
        let mut answers: Vec<Option<Result<Answer, PartitionError>>> =
            commands.iter().map(|(command, _)| self.stays(place, command).then_some(Ok(Answer::Done))).collect();
        loop {
            let left: Vec<usize> =
                (0..commands.len()).filter(|at| answers.get(*at).is_some_and(Option::is_none)).collect();
            if left.is_empty() {
                return answers.into_iter().flatten().collect();
            }
            let some: Vec<&(Command, Latest)> = left.iter().filter_map(|at| commands.get(*at)).collect();
            // None of them may be executed after its time, and beyond the first one's the others are executed alone.
            let latest = some.iter().map(|(_, latest)| *latest).reduce(earlier).unwrap_or(Latest::Never);
            let together: Vec<&Command> = some.iter().map(|(command, _)| command).collect();
            let answered = match self.run_batch(place, &together, latest).await {
                Ok(answered) => answered,
                // It was not executed. One command that cannot be must not fail its neighbours.
                Err(PartitionError::Moving | PartitionError::Store(StoreError::Unavailable)) if some.len() > 1 => {
                    let mut each = Vec::with_capacity(some.len());
                    for (command, latest) in some {
                        each.push(Some(self.run_alone(place, command, *latest).await));
                    }
                    each
                }
                Err(PartitionError::Moving) => match some.first() {
                    Some((command, latest)) => vec![Some(self.run_alone(place, command, *latest).await)],
                    None => Vec::new(),
                },
                Err(error) => some.iter().map(|_| Some(Err(error))).collect(),
            };
            for (at, answer) in left.into_iter().zip(answered) {
                if let Some(place) = answers.get_mut(at) {
                    *place = answer;
                }
            }
        }
    }

    /// Returns whether charges stay that are to be given back, because nobody knows whether the server still has them.
    fn stays(&self, place: Partition, command: &Command) -> bool {
        let stays = is_cut_off(command, self.servers.connection_at(&keys::head(place)));
        if stays {
            let what =
                "the connection broke before a charge was given back, which stays until its window ends or refills";
            self.servers.errors().count(StoreErrorKind::Connection, what);
        }
        stays
    }

    /// Carries out one command, and waits while its slot is moved.
    async fn run_alone(
        self: &Arc<Self>,
        place: Partition,
        command: &Command,
        latest: Latest,
    ) -> Result<Answer, PartitionError> {
        for _ in 0..MAX_MOVING {
            if matches!(latest, Latest::At(end) if end <= Instant::now()) {
                return Err(StoreError::Unavailable.into());
            }
            if self.stays(place, command) {
                return Ok(Answer::Done);
            }
            match self.run_batch(place, &[command], latest).await {
                // A bill is settled key by key instead.
                Err(PartitionError::Moving) if !matches!(command, Command::Settle(_) | Command::Limit { .. }) => {
                    tokio::time::sleep(MOVING).await;
                }
                Ok(mut answers) => return answers.pop().flatten().ok_or(StoreError::Unavailable)?,
                Err(error) => return Err(error),
            }
        }
        Err(PartitionError::Moving)
    }

    /// Carries out commands in one step. One without an answer has to be carried out after the others.
    async fn run_batch(
        self: &Arc<Self>,
        place: Partition,
        commands: &[&Command],
        latest: Latest,
    ) -> Result<Vec<Option<Result<Answer, PartitionError>>>, PartitionError> {
        let servers = &self.servers;
        let mut copies = Copies::new(place, servers.errors().clone());
        // Over the connection that has told of what they give back, or not at all.
        let over = commands.iter().find_map(|command| heard_over(command));
        let all_named =
            || commands.iter().flat_map(|command| named(command, place, servers)).collect::<BTreeSet<RecordKey>>();
        let (mut missing, mut now) = (all_named(), None);
        if commands.iter().all(|command| is_mostly_first(command)) {
            // Nearly always there is nothing, and otherwise the script returns what there is.
            now = servers.now_at(&keys::head(place));
            if now.is_some() {
                copies.load(std::mem::take(&mut missing).into_iter().map(|key| (key, None)));
            }
        }
        let mut sees_expiries = commands.iter().any(|command| sees_expiries(command));
        for _ in 0..MAX_TRIES {
            let present = match now {
                Some(now) if missing.is_empty() => now,
                // Commands that name no record need the server's time all the same.
                _ => load(servers, &mut copies, &missing).await?,
            };
            missing.clear();
            if sees_expiries && copies.head().is_due(present) {
                // Once: what cannot be ended must not keep the commands from being executed.
                sees_expiries = false;
                sweep::end(self, place).await;
                // What was read before that still has what has expired.
                copies.forget_all();
                (missing, now) = (all_named(), None);
                continue;
            }
            // All of them again, from the loaded records: a command may decide otherwise on those that have changed.
            let mut answers = execute_all(commands, servers, &mut copies, present);
            missing.extend(copies.take_missing());
            now = Some(present);
            if !missing.is_empty() {
                continue;
            }
            match swap(servers, &mut copies, latest, over).await? {
                // Only now: an answer must not promise what was not written.
                Written::All(history, at) => {
                    for (command, answer) in commands.iter().zip(&mut answers) {
                        set_history(command, answer, history, at);
                    }
                    let answers = answers.into_iter().map(|answer| answer.map(|answer| answer.map_err(Into::into)));
                    return Ok(answers.collect());
                }
                Written::Nothing(later) => now = later,
            }
        }
        servers.errors().count(StoreErrorKind::Conflict, "other nodes changed the same records first, each time");
        Err(StoreError::Timeout.into())
    }
}

/// Tells an answer in which history of the partition its command was executed, and when.
fn set_history(command: &Command, answer: &mut Option<Result<Answer, StoreError>>, history: History, at: Timestamp) {
    match (command, answer) {
        (_, Some(Ok(Answer::Settled(outcome)))) => outcome.set_history(history),
        (_, Some(Ok(Answer::Limited { checked, .. }))) => checked.history = history,
        (_, Some(Ok(Answer::Attempted { outcome: AttemptOutcome::Allowed(attempt), .. }))) => {
            attempt.set_history(history);
        }
        // The script has given nothing back. Core has seen an estimate of the time.
        (Command::Refund(receipt), Some(Ok(Answer::Refunded { first }))) => {
            *first &= !receipt.is_lost_in(history) && receipt.void_from() > at;
        }
        _ => {}
    }
}

/// Returns the connection over which this node has heard of charges that are given back.
fn heard_over(command: &Command) -> Option<u64> {
    if let Command::GiveBack { receipt, .. } = command { receipt.heard_over().next() } else { None }
}

/// Returns whether charges that are given back were heard of over a connection that is gone. The server may have lost them since.
fn is_cut_off(command: &Command, connection: Option<u64>) -> bool {
    matches!(command, Command::GiveBack { receipt, .. } if receipt.heard_over().any(|own| Some(own) != connection))
}

/// Returns the earlier of two moments.
fn earlier(one: Latest, other: Latest) -> Latest {
    match (one, other) {
        (Latest::At(one), Latest::At(other)) => Latest::At(one.min(other)),
        (at @ Latest::At(_), _) | (_, at) => at,
    }
}

/// Returns a command that somebody still waits for, and tells the others that theirs was not executed.
fn still_wanted(job: Job) -> Option<Job> {
    match job.latest {
        Latest::At(end) if end <= Instant::now() => {
            let _ = job.answer.send(Err(StoreError::Unavailable.into()));
            None
        }
        _ => Some(job),
    }
}

/// Returns whether a command mostly finds nothing under the ids that it names, so that they need not be read first.
fn is_mostly_first(command: &Command) -> bool {
    matches!(command, Command::Refund(_) | Command::GiveBack { credit: Some(_), .. } | Command::SaveReservation { .. })
}

/// Returns whether a command decides by what is left of limits, to which expired reservations give back.
fn sees_expiries(command: &Command) -> bool {
    matches!(command, Command::Settle(_) | Command::Reserve { .. } | Command::Limit { .. })
}

/// Returns whether a command is about a reservation as a whole, and not about the part that is held in a partition.
fn is_whole(command: &Command, servers: &Servers) -> bool {
    // A single server holds it in one part.
    !servers.is_single() && matches!(command, Command::SaveReservation { .. } | Command::EndReservation { .. })
}

/// Returns what a command decides on.
fn subject(command: &Command) -> u128 {
    let first = |bill: &OwnedBill| {
        let bill = bill.as_bill();
        let subject = bill.subjects().first().map(|subject| subject.key().to_u128());
        subject.or_else(|| bill.charges().first().map(|charge| charge.key().to_u128())).unwrap_or(0)
    };
    match command {
        Command::Settle(bill) | Command::Reserve { bill, .. } => first(bill),
        Command::Refund(receipt)
        | Command::GiveBack { receipt, .. }
        | Command::Renew(receipt)
        | Command::SaveReservation { receipt, .. } => receipt.id().to_u128(),
        Command::Commit { id, .. } | Command::Release { id } | Command::EndReservation { id, .. } => id.to_u128(),
        Command::BeginLogin { keys, .. } => {
            keys.account.or(keys.address).map_or_else(|| keys.id.to_u128(), Digest::to_u128)
        }
        Command::EndLogin { attempt, .. } | Command::WithdrawLogin { attempt, .. } => {
            let key = attempt.folded.or(attempt.account).or(attempt.address);
            key.map_or_else(|| attempt.id.to_u128(), Digest::to_u128)
        }
        Command::ReadAccount { account }
        | Command::ChangeAccount { account, .. }
        | Command::ReadDevice { account, .. } => account.to_u128(),
        Command::Limit { key, .. } | Command::Credit { key, .. } | Command::ReadStanding { key } => key.to_u128(),
        Command::Pause { keys, .. } | Command::Forgive { keys } | Command::ReadBlock { keys } => {
            keys.all().next().map_or(0, Digest::to_u128)
        }
        Command::BeginRequest { key, .. } | Command::EndRequest { key, .. } => key.id.to_u128(),
        Command::Rekey(moves) => {
            let pairs = moves.balances.iter().map(|(_, new, _)| new);
            let pairs = pairs.chain(moves.standings.iter().chain(&moves.accounts).map(|(_, new)| new));
            pairs.copied().map(Digest::to_u128).next().unwrap_or(0)
        }
        // What has expired is ended in its order. Changes of bans and settings have a log of their own.
        Command::Expire { .. } | Command::Control(_) | Command::ControlAll { .. } | Command::ReadControl { .. } => 0,
    }
}

/// Returns the records that a command names. Others are found while it is executed.
fn named(command: &Command, place: Partition, servers: &Servers) -> Vec<RecordKey> {
    let balance = RecordKey::balance;
    let standing = |key| RecordKey::of_digest(RecordKind::Standing, key);
    let account = |key| RecordKey::of_digest(RecordKind::Account, key);
    let of_id = |kind, id| RecordKey::of_id(kind, place, id);
    let reservation = if is_whole(command, servers) { RecordKind::Whole } else { RecordKind::Reservation };
    let both = |id| vec![of_id(RecordKind::Reservation, id), of_id(RecordKind::Refund, id)];
    match command {
        Command::Settle(bill) | Command::Reserve { bill, .. } => {
            let hold = matches!(command, Command::Reserve { .. }).then(|| bill.as_bill().trace());
            let bill = bill.as_bill();
            let balances = bill.charges().iter().map(|charge| balance(charge.key()));
            let standings = bill.subjects().iter().map(|subject| standing(subject.key()));
            balances.chain(standings).chain(hold.map(|id| of_id(RecordKind::Reservation, id))).collect()
        }
        Command::Refund(receipt) => both(receipt.id()),
        Command::GiveBack { credit, .. } => credit.map_or_else(Vec::new, both),
        Command::Renew(receipt) => receipt.keys().map(balance).collect(),
        Command::Commit { id, .. } | Command::Release { id } | Command::Expire { id } => both(*id),
        Command::EndReservation { id, .. } => vec![of_id(reservation, *id)],
        Command::SaveReservation { receipt, .. } => vec![of_id(reservation, receipt.id())],
        Command::ReadDevice { account: key, .. } => vec![account(*key)],
        Command::BeginLogin { keys, .. } => {
            keys.account.map(account).into_iter().chain(keys.address.map(balance)).collect()
        }
        Command::EndLogin { attempt, .. } | Command::WithdrawLogin { attempt, .. } => {
            attempt.account.map(account).into_iter().chain(attempt.address.map(balance)).collect()
        }
        Command::BeginRequest { key, .. } | Command::EndRequest { key, .. } => {
            vec![RecordKey::of_digest(RecordKind::Request, key.id)]
        }
        Command::ReadBlock { keys } => {
            keys.balances.keys().copied().map(balance).chain(keys.standings.iter().copied().map(standing)).collect()
        }
        Command::Limit { key, .. } => vec![balance(*key)],
        Command::ReadStanding { key } => vec![standing(*key)],
        Command::ReadAccount { account: key } | Command::ChangeAccount { account: key, .. } => vec![account(*key)],
        // They change records whatever these are, or find them while they are executed, at the price of one more round trip.
        _ => Vec::new(),
    }
}

/// Executes every command on the copies. A command that needs a record which is not loaded, or that has to wait for an earlier one, has
/// no answer.
fn execute_all(
    commands: &[&Command],
    servers: &Servers,
    copies: &mut Copies,
    now: Timestamp,
) -> Vec<Option<Result<Answer, StoreError>>> {
    copies.restart();
    let mut answers = Vec::with_capacity(commands.len());
    for command in commands {
        let charged = additions(command, copies);
        let executed = copies.execute(is_whole(command, servers), |copies| execute(command, copies, now));
        if let Ok(Answer::Settled(outcome)) = &executed {
            for (index, key, changes) in charged {
                if is_plain(outcome, index) {
                    copies.add_in_place_of(key, changes);
                }
            }
        }
        answers.push(match executed {
            Ok(answer) => Some(Ok(answer)),
            Err(CopyError::Store(error)) => Some(Err(error)),
            // The others are executed too, so that what they miss is loaded in the same call.
            Err(CopyError::Missing | CopyError::Later) => None,
        });
    }
    answers
}

/// Returns the charges of a bill that the server can add by itself, with their places on the bill: a strike must not have to wait until
/// nobody else charges its tenant.
fn additions(command: &Command, copies: &Copies) -> Vec<(usize, RecordKey, Vec<u8>)> {
    let Command::Settle(bill) = command else { return Vec::new() };
    let bill = bill.as_bill();
    let Some(charges) = bill.to_script().filter(|_| copies.adds()) else { return Vec::new() };
    let charges = bill.charges().iter().zip(charges).enumerate();
    let added = charges.filter(|(_, (charge, _))| {
        // The entry of a log is found again by its time, which is that of the copy.
        let is_log = matches!(charge.limit().algorithm(), Some(Algorithm::SlidingLog | Algorithm::Concurrency) | None);
        !is_log && !copies.is_changed(RecordKey::balance(charge.key()))
    });
    added.map(|(index, (charge, bytes))| (index, RecordKey::balance(charge.key()), charge_to_script(&bytes))).collect()
}

fn is_plain(outcome: &Outcome, index: usize) -> bool {
    outcome.balance_changed(index) && outcome.fits(index)
}

/// Loads records, and returns the server's time.
async fn load(servers: &Servers, copies: &mut Copies, keys: &BTreeSet<RecordKey>) -> Result<Timestamp, PartitionError> {
    let keys: Vec<RecordKey> = copies.not_loaded(keys.iter().copied()).into_iter().collect();
    match load_call(servers, copies, &keys, true).await {
        // One after another. A record that changes in between is found when the result is written.
        Err(PartitionError::Moving) => {
            let mut now = Timestamp::EPOCH;
            for key in keys {
                now = load_call(servers, copies, &[key], false).await?.max(now);
            }
            copies.load_head(load_head(servers, &[keys::head(copies.place())]).await?);
            Ok(now)
        }
        loaded => loaded,
    }
}

/// Loads the head of a partition alone.
pub(super) async fn load_head(servers: &Servers, name: &[String]) -> Result<Head, CallError> {
    let replied = servers.run_until(&LOAD, name, &[], Latest::Untold).await?;
    let loaded = servers.errors().parsed("load.lua", reply::loaded(replied.value, true));
    Ok(loaded.map_err(|_| CallError::Unknown)?.head)
}

async fn load_call(
    servers: &Servers,
    copies: &mut Copies,
    keys: &[RecordKey],
    with_head: bool,
) -> Result<Timestamp, PartitionError> {
    let head = with_head.then(|| keys::head(copies.place()));
    let names: Vec<String> = keys.iter().map(RecordKey::name).chain(head).collect();
    let replied = servers.run_until(&LOAD, &names, &[], Latest::Untold).await?;
    let loaded = servers.errors().parsed("load.lua", reply::loaded(replied.value, with_head))?;
    servers.heard(&replied.server, loaded.now);
    // Values must not be paired with the keys of other records.
    if loaded.values.len() != keys.len() {
        return Err(StoreError::Unavailable.into());
    }
    copies.load(keys.iter().copied().zip(loaded.values));
    copies.load_head(loaded.head);
    Ok(loaded.now)
}

/// Whether the changes were written.
enum Written {
    /// All of them, in this history of the partition, at this time of the server.
    All(History, Timestamp),
    /// None. They are computed again, from what the server had at this time, or from what is loaded then.
    Nothing(Option<Timestamp>),
}

/// Writes the changes, unless another node has changed one of the records that they depend on.
async fn swap(
    servers: &Servers,
    copies: &mut Copies,
    latest: Latest,
    over: Option<u64>,
) -> Result<Written, PartitionError> {
    let changes = copies.changes();
    if changes.is_empty() && copies.added().is_empty() {
        return Ok(Written::All(copies.head().history, Timestamp::EPOCH));
    }
    let listed = changes.iter().filter(|(_, _, change)| change.is_listed).map(|(key, _, _)| *key).collect();
    let mut write = Swap::new(copies.place(), &changes);
    write.compare(&copies.reservations_read());
    write.add(copies.added());
    let (mut swapped, replied) = match write.send(servers, latest, over).await {
        // While a slot is moved, only calls with one key are executed.
        Err(CallError::Moving) if write.has_one_key() => {
            write.has_head = false;
            write.send(servers, latest, over).await?
        }
        answered => answered?,
    };
    servers.heard(&replied.server, swapped.now);
    if !write.has_head {
        swapped.history = copies.head().history;
    }
    match swapped.done {
        Done::All => {
            listed::add(servers, listed);
            Ok(Written::All(swapped.history.heard_over(replied.connection), swapped.now))
        }
        Done::Changed => {
            // The script has returned what it found, so nothing has to be loaded again.
            copies.load(write.records.into_iter().zip(swapped.values));
            Ok(Written::Nothing(Some(swapped.now)))
        }
        Done::Unusual => {
            copies.add_nothing();
            Ok(Written::Nothing(None))
        }
        Done::Full => {
            copies.forget_all();
            Ok(Written::Nothing(None))
        }
        // The clock of the server may have been set. Its reply has corrected the estimate.
        Done::TooLate if matches!(latest, Latest::At(end) if end <= Instant::now()) => {
            Err(StoreError::Unavailable.into())
        }
        Done::TooLate => Ok(Written::Nothing(Some(swapped.now))),
    }
}

/// The arguments of `swap.lua`.
#[derive(Debug)]
struct Swap {
    place: Partition,
    records: Vec<RecordKey>,
    /// Three for each record.
    args: Vec<Vec<u8>>,
    /// The balances that are added to, and their changes.
    added: Vec<(RecordKey, Vec<u8>)>,
    deleted: Vec<RecordKey>,
    /// The three arguments of each change of the index. It changes in the same step as its reservation, so that no expiry is missed.
    indexes: Vec<[Vec<u8>; 3]>,
    has_head: bool,
}

impl Swap {
    fn new(place: Partition, changes: &[(RecordKey, Option<&[u8]>, &Change)]) -> Self {
        let records = changes.iter().map(|(key, _, _)| *key).collect();
        let (args, added, deleted, indexes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut swap = Self { place, records, args, added, deleted, indexes, has_head: true };
        for (key, before, change) in changes {
            swap.args.push(before.unwrap_or_default().to_vec());
            swap.args.push(change.bytes.clone().unwrap_or_default());
            swap.args.push(expiry_argument(change.expiry, &swap.records));
            swap.indexes.extend(index_change(*key, *before, change));
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

    /// Adds changes that do not depend on what is there.
    fn add(&mut self, added: &BTreeMap<RecordKey, Addition>) {
        for (key, addition) in added {
            match addition {
                Addition::Changes(changes) => self.added.push((*key, changes.clone())),
                Addition::Delete => self.deleted.push(*key),
            }
        }
    }

    fn has_one_key(&self) -> bool {
        let keys = self.records.len().saturating_add(self.added.len()).saturating_add(self.deleted.len());
        keys == 1 && self.indexes.is_empty()
    }

    async fn send(
        &self,
        servers: &Servers,
        latest: Latest,
        over: Option<u64>,
    ) -> Result<(Swapped, Replied), CallError> {
        let added = self.added.iter().map(|(key, _)| key);
        let mut names: Vec<String> =
            self.records.iter().chain(added).chain(&self.deleted).map(RecordKey::name).collect();
        let is_balance = |key: &RecordKey| key.kind == RecordKind::Balance;
        let charges = !self.added.is_empty() || self.records.iter().any(is_balance);
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes();
        let counts = [count(self.records.len()), count(self.added.len()), count(self.deleted.len())].concat();
        let mut args = vec![[counts.as_slice(), &[u8::from(charges)]].concat()];
        args.push(if self.has_head { random_history() } else { Vec::new() });
        args.extend(self.args.iter().cloned());
        args.extend(self.added.iter().map(|(_, changes)| changes.clone()));
        if self.has_head {
            names.push(keys::head(self.place));
        }
        for index in &self.indexes {
            names.push(keys::expiring(self.place));
            args.extend(index.iter().cloned());
        }
        let call = ScriptCall { script: &SWAP, keys: &names, args: &args, latest, over };
        let mut replied = servers.run_script(call).await?;
        // A reply that cannot be read says nothing about what was written.
        let parsed = servers.errors().parsed("swap.lua", reply::swapped(std::mem::take(&mut replied.value)));
        Ok((parsed.map_err(|_| CallError::Unknown)?, replied))
    }
}

/// Returns the bytes of a new history.
pub(super) fn random_history() -> Vec<u8> {
    History::from_random(rand::rng().random()).to_bytes().to_vec()
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
fn index_change(key: RecordKey, before: Option<&[u8]>, change: &Change) -> Option<[Vec<u8>; 3]> {
    if key.kind != RecordKind::Reservation {
        return None;
    }
    let waits = |bytes: &[u8]| Reservation::from_script(bytes).ok().filter(waits_for_expiry);
    let args = |verb: String, id: TraceId, score: u64| {
        [verb.into_bytes(), keys::member(id).into_bytes(), score.to_string().into_bytes()]
    };
    match (before.and_then(waits), change.bytes.as_deref().and_then(waits)) {
        (_, Some(new)) => {
            // The index is kept for as long as the record.
            let kept = millis(new.expires().max(new.void_from())).saturating_sub(millis(new.expires()));
            Some(args(format!("add {}", kept.saturating_add(1)), new.id(), millis(new.expires())))
        }
        // Also of one whose end was written: it must not be ended again.
        (Some(old), None) => Some(args("remove".to_owned(), old.id(), 0)),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A result of a login may be counted at any time. The attempts that shared its batch were counted too late with it.
    #[test]
    fn a_batch_ends_with_the_first_of_its_commands() {
        let (first, second) = (Instant::now(), Instant::now() + Duration::from_secs(1));
        let at = |latest| if let Latest::At(at) = latest { Some(at) } else { None };
        assert_eq!(at(earlier(Latest::At(second), Latest::At(first))), Some(first));
        assert_eq!(at(earlier(Latest::Never, Latest::At(second))), Some(second));
        assert_eq!(at(earlier(Latest::At(second), Latest::Never)), Some(second));
        assert_eq!(at(earlier(Latest::Never, Latest::Never)), None);
    }
}
