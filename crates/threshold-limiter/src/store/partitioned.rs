//! Commands on a store of partitions, each of which executes a command on its own records in one atomic step.
//!
//! No step spans two partitions. A command on several of them is carried out in an order that is safe to stop after any step, and each
//! partition remembers by an id what it has given back, or the end of what it holds: so every step may be repeated. If a node dies in
//! between, a charge stays until its window ends or refills, or until its reservation expires.

use std::future::Future;

use futures_util::future::join_all;
use threshold_core::command::ReservationEnd;
use threshold_core::key::Partition;
use threshold_core::lockout::{Attempt, AttemptKeys, AttemptOutcome, Login};
use threshold_core::plan::SubjectKeys;
use threshold_core::receipt::HoldTerms;
use threshold_core::split::Step;
use threshold_core::{Answer, Command, Digest, Limit, Outcome, OwnedBill, Receipt, Split, TraceId};

use super::StoreError;

#[cfg(test)]
#[cfg(feature = "memory")]
mod tests;

/// Why a partition did not execute a command.
#[derive(Debug, Clone, Copy)]
pub enum PartitionError {
    /// The partition moves to another server, which executes only commands with one key until it has arrived.
    Moving,
    /// The store failed.
    Store(StoreError),
}

impl From<StoreError> for PartitionError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<PartitionError> for StoreError {
    fn from(error: PartitionError) -> Self {
        match error {
            PartitionError::Moving => Self::Unavailable,
            PartitionError::Store(error) => error,
        }
    }
}

/// A store of partitions.
pub trait Partitions: Send + Sync {
    /// Executes a command whose records are all in one partition.
    fn execute(
        &self,
        partition: Partition,
        command: Command,
    ) -> impl Future<Output = Result<Answer, PartitionError>> + Send;

    /// Returns the partition of the record under a key.
    fn partition(&self, key: Digest) -> Partition {
        key.partition()
    }

    /// Returns the partition of the record that says where a reservation is held, which is found by its id alone.
    fn home(&self, id: TraceId) -> Partition;

    /// Executes commands after the answer, and again while their partition does not answer: they give back what another partition has
    /// denied, or complete an end. All of them may be executed twice.
    fn execute_later(&self, commands: Vec<(Partition, Command)>);
}

/// Executes a command on all partitions of its records. A command that no store of partitions executes in this way, such as a
/// change of bans, fails.
pub async fn execute<P: Partitions>(store: &P, command: Command) -> Result<Answer, StoreError> {
    let partition = match &command {
        Command::SaveReservation { receipt, .. } => Some(store.home(receipt.id())),
        Command::EndReservation { id, .. } => Some(store.home(*id)),
        Command::ChangeAccount { account, .. }
        | Command::ReadAccount { account }
        | Command::ReadDevice { account, .. } => Some(store.partition(*account)),
        Command::ReadStanding { key } | Command::Limit { key, .. } | Command::Credit { key, .. } => {
            Some(store.partition(*key))
        }
        Command::BeginRequest { key, .. } | Command::EndRequest { key, .. } => Some(store.partition(key.id)),
        _ => None,
    };
    if let Some(partition) = partition {
        return Ok(store.execute(partition, command).await?);
    }
    match command {
        Command::Settle(bill) => Ok(Answer::Settled(settle(store, bill).await?)),
        Command::Reserve { bill, terms } => Ok(Answer::Settled(reserve(store, bill, &terms).await?)),
        Command::Refund(receipt) => refund(store, &receipt).await,
        Command::GiveBack { receipt, credit } => give_back(store, &receipt, credit).await,
        Command::Renew(receipt) => renew(store, *receipt).await,
        Command::Commit { id, cost } => end_reservation(store, id, ReservationEnd::Commit(cost)).await,
        Command::Release { id } => end_reservation(store, id, ReservationEnd::Release).await,
        Command::Expire { id } => end_reservation(store, id, ReservationEnd::Expire).await,
        Command::Pause { keys, length } => {
            on_subject(store, keys, |keys| Command::Pause { keys, length }).await?;
            Ok(Answer::Done)
        }
        Command::Forgive { keys } => {
            on_subject(store, keys, |keys| Command::Forgive { keys }).await?;
            Ok(Answer::Done)
        }
        Command::ReadBlock { keys } => {
            let answers = on_subject(store, keys, |keys| Command::ReadBlock { keys }).await?;
            let blocked = answers.into_iter().map(|answer| match answer {
                Answer::Blocked(until) => Ok(until),
                other => Err(StoreError::unexpected(other)),
            });
            Ok(Answer::Blocked(blocked.collect::<Result<Vec<_>, _>>()?.into_iter().max().flatten()))
        }
        Command::BeginLogin { login, keys } => begin_login(store, login, keys).await,
        Command::EndLogin { login, attempt, success, nonce } => end_login(store, login, attempt, success, nonce).await,
        Command::WithdrawLogin { login, attempt } => withdraw_login(store, login, attempt).await,
        _ => Err(StoreError::Unavailable),
    }
}

/// Settles a bill: every partition charges its part, or none does.
pub async fn settle<P: Partitions>(store: &P, bill: Box<OwnedBill>) -> Result<Box<Outcome>, StoreError> {
    // A bill without charges still needs the time of the store.
    if bill.is_empty() {
        let answer = Box::pin(store.execute(store.home(bill.trace()), Command::Settle(bill))).await?;
        return answer.settled().ok_or(StoreError::Unavailable);
    }
    settle_parts(store, Split::new(*bill, |key| store.partition(key))).await
}

/// Settles a bill and holds what it charges: every partition charges and holds its part, or none does. Where the parts are is saved after
/// that. If a node dies before, the parts end when they expire.
pub async fn reserve<P: Partitions>(
    store: &P,
    bill: Box<OwnedBill>,
    terms: &HoldTerms,
) -> Result<Box<Outcome>, StoreError> {
    let outcome = if bill.is_empty() {
        settle(store, bill.clone()).await?
    } else {
        let split = Split::new((*bill).clone(), |key| store.partition(key)).holding(terms.clone());
        settle_parts(store, split).await?
    };
    let bill = bill.as_bill();
    if bill.is_denied(&outcome) {
        return Ok(outcome);
    }
    let save = terms.saving(Receipt::holding(&bill, terms, &outcome));
    if store.execute(store.home(bill.trace()), save).await.is_ok() {
        return Ok(outcome);
    }
    // Nobody could end it. What is held is given back, and so the request was not charged in the end.
    if let Some(receipt) = Receipt::of_bill(&bill, &outcome) {
        store.execute_later(giving_back(store, &receipt, Some(bill.trace())));
    }
    Err(StoreError::Unavailable)
}

async fn settle_parts<P: Partitions>(store: &P, mut split: Split) -> Result<Box<Outcome>, StoreError> {
    loop {
        let steps = split.round();
        if steps.is_empty() {
            break;
        }
        // Boxed: `join_all` moves every future when it begins and again when it has ended.
        let sent = steps.into_iter().map(|Step { part, partition, command }| {
            Box::pin(async move { (part, store.execute(partition, command).await) })
        });
        let mut failed = None;
        // All answers are waited for, also after a failure: only a charge whose success was heard is given back.
        for (part, answered) in join_all(sent).await {
            match answered {
                Ok(Answer::Settled(outcome)) => split.answered(part, outcome),
                Ok(other) => failed = Some(least_certain(failed, StoreError::unexpected(other))),
                Err(PartitionError::Moving) if split.divide(part) => {}
                Err(error) => failed = Some(least_certain(failed, error.into())),
            }
        }
        if let Some(error) = failed {
            store.execute_later(split.abandon());
            return Err(error);
        }
    }
    let (outcome, returns) = split.join();
    if !returns.is_empty() {
        store.execute_later(returns);
    }
    Ok(outcome)
}

/// Returns the error of a bill of which two partitions have failed. A timeout says that one of them may have charged, and so it is the
/// error of the bill: after any other one the request counts as not charged, and is recorded again.
fn least_certain(earlier: Option<StoreError>, later: StoreError) -> StoreError {
    earlier.filter(|earlier| later != StoreError::Timeout || *earlier == later).unwrap_or(later)
}

/// Executes commands after an answer, each in its own partition, and returns those that may not have been carried out. Each of them has
/// an id, so that all may be sent again.
pub async fn complete<P: Partitions>(store: &P, commands: Vec<(Partition, Command)>) -> Vec<(Partition, Command)> {
    execute_all(store, commands).await.failed
}

/// The answers of several partitions.
struct Parts {
    answers: Vec<Answer>,
    /// The commands that may not have been carried out.
    failed: Vec<(Partition, Command)>,
    /// Why; see [`least_certain`].
    error: Option<StoreError>,
}

async fn execute_all<P: Partitions>(store: &P, commands: Vec<(Partition, Command)>) -> Parts {
    let sent = commands.into_iter().map(|(partition, command)| async move {
        let answered = store.execute(partition, command.clone()).await;
        answered.map_err(|error| ((partition, command), StoreError::from(error)))
    });
    let mut parts = Parts { answers: Vec::new(), failed: Vec::new(), error: None };
    for answered in join_all(sent).await {
        match answered {
            Ok(answer) => parts.answers.push(answer),
            Err((command, error)) => {
                parts.failed.push(command);
                parts.error = Some(least_certain(parts.error, error));
            }
        }
    }
    parts
}

/// Returns the commands that give charges back, one for each partition.
pub fn giving_back<P: Partitions>(store: &P, receipt: &Receipt, credit: Option<TraceId>) -> Vec<(Partition, Command)> {
    let parts = receipt.split(|key| store.partition(key)).into_iter();
    parts.map(|(partition, part)| (partition, Command::GiveBack { receipt: Box::new(part), credit })).collect()
}

/// Gives charges back. What a partition did not carry out is sent again after the answer; if none did, the caller may send it again.
async fn give_back<P: Partitions>(store: &P, receipt: &Receipt, credit: Option<TraceId>) -> Result<Answer, StoreError> {
    let parts = execute_all(store, giving_back(store, receipt, credit)).await;
    match parts.error {
        Some(StoreError::Unavailable) if parts.answers.is_empty() => Err(StoreError::Unavailable),
        Some(error) if credit.is_none() => Err(error),
        _ => {
            store.execute_later(parts.failed);
            Ok(Answer::Done)
        }
    }
}

/// Refunds a receipt, once in each partition. After an error it may be repeated.
async fn refund<P: Partitions>(store: &P, receipt: &Receipt) -> Result<Answer, StoreError> {
    let mut parts = receipt.split(|key| store.partition(key));
    // Another one may count no longer, and is never refunded for the first time.
    parts.sort_by_key(|(_, part)| std::cmp::Reverse(part.void_from()));
    let commands = parts.into_iter().map(|(partition, part)| (partition, Command::Refund(Box::new(part)))).collect();
    let parts = execute_all(store, commands).await;
    store.execute_later(parts.failed);
    if let Some(error) = parts.error {
        return Err(error);
    }
    // Of several refunds at the same time each may be the first in another partition. One of them is told so.
    let first = matches!(parts.answers.first(), Some(Answer::Refunded { first: true }));
    Ok(Answer::Refunded { first })
}

/// Ends a reservation: the record that says where it is held first, so that it ends in one way, then each of its parts. After an error
/// it may be repeated.
async fn end_reservation<P: Partitions>(store: &P, id: TraceId, end: ReservationEnd) -> Result<Answer, StoreError> {
    let ended = store.execute(store.home(id), Command::EndReservation { id, end: end.clone() }).await?;
    let keys = match ended {
        Answer::Ended(Ok(keys)) => keys,
        Answer::Ended(Err(error)) => return Ok(Answer::Ended(Err(error))),
        other => return Err(StoreError::unexpected(other)),
    };
    let mut commands: Vec<(Partition, Command)> = Vec::new();
    for key in &keys {
        let partition = store.partition(*key);
        if commands.iter().all(|(own, _)| *own != partition) {
            let command = match &end {
                ReservationEnd::Commit(cost) => Command::Commit { id, cost: cost.clone() },
                ReservationEnd::Release => Command::Release { id },
                ReservationEnd::Expire => Command::Expire { id },
            };
            commands.push((partition, command));
        }
    }
    let parts = execute_all(store, commands).await;
    store.execute_later(parts.failed);
    if let Some(error) = parts.error {
        return Err(error);
    }
    // A part may have expired in the meantime, and has then ended in its own way.
    let refused = parts.answers.into_iter().find(|answer| matches!(answer, Answer::Ended(Err(_))));
    Ok(refused.unwrap_or(Answer::Ended(Ok(keys))))
}

/// Gives the charges of a receipt back and makes them again.
async fn renew<P: Partitions>(store: &P, mut receipt: Receipt) -> Result<Answer, StoreError> {
    let renew = |partition, part: Receipt| async move {
        match store.execute(partition, Command::Renew(Box::new(part))).await? {
            Answer::Renewed(part) => Ok(part),
            other => Err(StoreError::unexpected(other).into()),
        }
    };
    let parts = receipt.split(|key| store.partition(key)).into_iter().map(|(partition, part)| async move {
        match renew(partition, part.clone()).await {
            Err(PartitionError::Moving) => {
                let mut whole = part;
                for (key, part) in whole.split(|key| key) {
                    whole.join(&*renew(store.partition(key), part).await?);
                }
                Ok(Box::new(whole))
            }
            answered => answered,
        }
    });
    for part in join_all(parts).await {
        receipt.join(&*part.map_err(StoreError::from)?);
    }
    Ok(Answer::Renewed(Box::new(receipt)))
}

/// Executes a command on the keys of a subject in each of their partitions. The order makes no difference.
async fn on_subject<P: Partitions>(
    store: &P,
    keys: SubjectKeys,
    command: impl Fn(SubjectKeys) -> Command + Copy + Send + Sync,
) -> Result<Vec<Answer>, StoreError> {
    let parts = split_subject(&keys, |key| store.partition(key)).into_iter().map(|(partition, part)| async move {
        match store.execute(partition, command(part.clone())).await {
            Err(PartitionError::Moving) => {
                let mut answers = Vec::new();
                for (key, part) in split_subject(&part, |key| key) {
                    answers.push(store.execute(store.partition(key), command(part)).await?);
                }
                Ok(answers)
            }
            answered => answered.map(|answer| vec![answer]),
        }
    });
    let mut answers = Vec::new();
    for answered in join_all(parts).await {
        answers.extend(answered.map_err(StoreError::from)?);
    }
    Ok(answers)
}

fn split_subject<P: Copy + PartialEq>(keys: &SubjectKeys, place: impl Fn(Digest) -> P) -> Vec<(P, SubjectKeys)> {
    let mut parts: Vec<(P, SubjectKeys)> = Vec::new();
    for key in keys.all() {
        let place = place(key);
        let at = parts.iter().position(|(own, _)| *own == place).unwrap_or_else(|| {
            parts.push((place, SubjectKeys::default()));
            parts.len().saturating_sub(1)
        });
        let Some((_, part)) = parts.get_mut(at) else { continue };
        part.balances.extend(keys.balances.get(&key).map(|limit| (key, *limit)));
        part.standings.extend(keys.standings.get(&key));
    }
    parts
}

/// Counts a login attempt: on its address, then on its account.
async fn begin_login<P: Partitions>(store: &P, login: Login, keys: AttemptKeys) -> Result<Answer, StoreError> {
    let Some(account) = keys.account else { return begin_without_account(store, login, keys).await };
    let Some(address) = keys.address else {
        return Ok(store.execute(store.partition(account), Command::BeginLogin { login, keys }).await?);
    };
    let own = AttemptKeys { address: None, ..keys };
    if is_known_device(store, &login, &keys, account).await? {
        return Ok(store.execute(store.partition(account), Command::BeginLogin { login, keys: own }).await?);
    }
    // The address before the account: an attempt that its address has no budget for must not count on the account, or one
    // address could lock accounts without end.
    let (limit, id) = (Limit::from(login.ip), keys.id);
    let charge = Command::Limit { key: address, limit, cost: 1, id };
    let (charged, at) = match store.execute(store.partition(address), charge).await? {
        Answer::Limited { checked, at } => (checked, at),
        other => return Err(StoreError::unexpected(other)),
    };
    if !charged.look.allowed {
        return Ok(Answer::Attempted { outcome: AttemptOutcome::TooMany { until: charged.look.ready_at }, at });
    }
    match store.execute(store.partition(account), Command::BeginLogin { login, keys: own }).await {
        Ok(Answer::Attempted { outcome: AttemptOutcome::Allowed(attempt), at }) => {
            let outcome = AttemptOutcome::Allowed(attempt.with_address(address, &charged));
            Ok(Answer::Attempted { outcome, at })
        }
        // The address stays charged, as in one step: an address that keeps trying locked accounts is guessing.
        Ok(other) => Ok(other),
        // No secret is checked without an answer. What the account has counted is not known, but its address is no guesser.
        Err(error) => {
            let receipt = charged.mark.map(|mark| Receipt::of_charge(id, address, &limit, (mark, charged.history), at));
            store.execute_later(receipt.map_or_else(Vec::new, |receipt| giving_back(store, &receipt, Some(id))));
            Err(error.into())
        }
    }
}

async fn begin_without_account<P: Partitions>(
    store: &P,
    login: Login,
    keys: AttemptKeys,
) -> Result<Answer, StoreError> {
    // An attempt without an account and an address changes no record, and every partition has the time.
    let partition = keys.address.map_or_else(|| store.home(keys.id), |address| store.partition(address));
    Ok(store.execute(partition, Command::BeginLogin { login, keys }).await?)
}

/// Returns whether an attempt is counted by its known device, and so not by its address.
async fn is_known_device<P: Partitions>(
    store: &P,
    login: &Login,
    keys: &AttemptKeys,
    account: Digest,
) -> Result<bool, StoreError> {
    let Some(device) = keys.device else { return Ok(false) };
    let command = Command::ReadDevice { login: login.clone(), account, device };
    match store.execute(store.partition(account), command).await? {
        Answer::Recognised(known) => Ok(known),
        other => Err(StoreError::unexpected(other)),
    }
}

/// Ends a login attempt: on its account, then gives its charge back to its address after a success.
async fn end_login<P: Partitions>(
    store: &P,
    login: Login,
    mut attempt: Attempt,
    success: bool,
    nonce: TraceId,
) -> Result<Answer, StoreError> {
    let (partition, charge) = attempted(store, &login, &mut attempt);
    let answer = store.execute(partition, Command::EndLogin { login, attempt, success, nonce }).await?;
    if let (Answer::LoginEnded { ended: Ok(outcome), .. }, Some(charge)) = (&answer, charge)
        && outcome.success
    {
        // The login counts whether or not this succeeds.
        return_charge(store, &charge).await;
    }
    Ok(answer)
}

/// Gives the charge of an attempt back to its address, after the answer if that fails at first.
async fn return_charge<P: Partitions>(store: &P, charge: &Receipt) {
    let parts = execute_all(store, giving_back(store, charge, Some(charge.id()))).await;
    store.execute_later(parts.failed);
}

/// Returns the partition that ends an attempt, and the charge of its address, which is given back by itself and once.
fn attempted<P: Partitions>(store: &P, login: &Login, attempt: &mut Attempt) -> (Partition, Option<Receipt>) {
    let (counted, address) = (attempt.folded.or(attempt.account), attempt.address);
    let partition = counted.or(address).map_or_else(|| store.home(attempt.id), |key| store.partition(key));
    (partition, attempt.take_address(login))
}

/// Withdraws a login attempt: from its account, then from its address.
async fn withdraw_login<P: Partitions>(store: &P, login: Login, mut attempt: Attempt) -> Result<Answer, StoreError> {
    let (partition, charge) = attempted(store, &login, &mut attempt);
    let answer = store.execute(partition, Command::WithdrawLogin { login, attempt }).await?;
    if let (Answer::Refunded { first: true }, Some(charge)) = (&answer, charge) {
        return_charge(store, &charge).await;
    }
    Ok(answer)
}
