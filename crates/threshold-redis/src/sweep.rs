//! The end of reservations that have expired and give back their charges.
//!
//! The head of a partition says when the first of its reservations expires, so that every decision of the partition sees what is due
//! and ends it before it denies. Besides, a node ends by itself what it has reserved, in time and without asking for anything before.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ::redis::{Cmd, Value};
use futures_util::future::join_all;
use threshold_core::key::Partition;
use threshold_core::receipt::{CommitError, HoldTerms};
use threshold_core::{Answer, Command, TraceId};
use tokio::sync::watch;

use super::batch::Batches;
use super::server::{Latest, ServerScript, jittered};
use super::{keys, reply};
use threshold_limiter::store::StoreError;

static EXPIRED: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("expired.lua")));

/// The pause between two looks at what this node has reserved.
const PAUSE: Duration = Duration::from_millis(500);
/// The largest number of reservations that one search ends in one partition.
const MAX_SWEPT: usize = 64;
/// The number of searches in one partition, one after another. What is left is found by the next decision.
const MAX_SEARCHES: usize = 8;
/// The largest number of partitions in which this node ends what it has reserved. In the others the next decision does.
const MAX_PLACES: usize = 4096;

/// What this node knows of reservations that will expire.
#[derive(Debug, Default)]
pub(super) struct Sweeps {
    /// When something expires in which partition, by this node's clock.
    expected: Mutex<BTreeSet<(Instant, Partition)>>,
    /// The searches that are under way. Others wait for their end: many decisions find the same reservations at the same moment.
    under_way: Mutex<HashMap<Partition, watch::Receiver<()>>>,
    ended: Arc<AtomicU64>,
}

impl Sweeps {
    /// Returns the number of reservations that this node has ended.
    pub(super) fn ended(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.ended)
    }

    /// Takes out the partitions in which something expires before `end`.
    fn take(&self, end: Option<Instant>) -> BTreeSet<Partition> {
        let mut expected = lock(&self.expected);
        let (due, rest) = expected.iter().partition(|(at, _)| end.is_none_or(|end| *at <= end));
        *expected = rest;
        let due: BTreeSet<(Instant, Partition)> = due;
        due.into_iter().map(|(_, place)| place).collect()
    }

    fn expect(&self, place: Partition, at: Instant) {
        let mut expected = lock(&self.expected);
        if expected.len() < MAX_PLACES {
            expected.insert((at, place));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock is safe to use: each change of the sets is one step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends what this node has reserved when it expires, until `batches` is dropped.
pub(super) fn start(batches: &Arc<Batches>) {
    let batches: Weak<Batches> = Arc::downgrade(batches);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(jittered(PAUSE)).await;
            let Some(batches) = batches.upgrade() else { return };
            for place in batches.sweeps.take(Some(Instant::now())) {
                // While its server is away there is nothing to end.
                if end_in(&batches, place).await.is_err()
                    && let Some(again) = Instant::now().checked_add(PAUSE)
                {
                    batches.sweeps.expect(place, again);
                }
            }
        }
    });
}

/// Notes that a reservation was made in a partition.
pub(super) fn expects(batches: &Batches, place: Partition, terms: Option<&HoldTerms>) {
    let length = terms.and_then(HoldTerms::released_after).map(Duration::from);
    // Times on the server are whole milliseconds, rounded up.
    let at = length.and_then(|length| Instant::now().checked_add(length.saturating_add(Duration::from_millis(2))));
    if let Some(at) = at {
        batches.sweeps.expect(place, at);
    }
}

/// Ends all reservations that have expired in partitions that this node knows of, and returns their number.
pub(super) async fn release_expired(batches: &Arc<Batches>) -> Result<usize, StoreError> {
    let mut places = batches.sweeps.take(None);
    if batches.servers.is_single() {
        places.insert(keys::WHOLE);
    }
    let (mut ended, mut failed) = (0_usize, None);
    for place in places {
        // They may expire later than now.
        if let Some(again) = Instant::now().checked_add(PAUSE) {
            batches.sweeps.expect(place, again);
        }
        match end_in(batches, place).await {
            Ok(count) => ended = ended.saturating_add(count),
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(ended), Err)
}

/// A search that is under way, until this is dropped.
struct UnderWay<'s> {
    sweeps: &'s Sweeps,
    place: Partition,
    /// Tells those that wait, when it is dropped.
    _ended: watch::Sender<()>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        lock(&self.sweeps.under_way).remove(&self.place);
    }
}

/// Ends what has expired in a partition, as far as it can be reached.
pub(super) async fn end(batches: &Arc<Batches>, place: Partition) {
    let sweeps = &batches.sweeps;
    let (ended, receiver) = watch::channel(());
    let other = match lock(&sweeps.under_way).entry(place) {
        Entry::Occupied(other) => Some(other.get().clone()),
        Entry::Vacant(own) => {
            own.insert(receiver);
            None
        }
    };
    if let Some(mut other) = other {
        // It fails when the sender is dropped, which is the end.
        let _ = other.changed().await;
        return;
    }
    let _under_way = UnderWay { sweeps, place, _ended: ended };
    let _ = end_in(batches, place).await;
}

/// Does the same in the background.
pub(super) fn later(batches: &Arc<Batches>, place: Partition) {
    if lock(&batches.sweeps.under_way).contains_key(&place) {
        return;
    }
    let batches = Arc::clone(batches);
    tokio::spawn(async move { end(&batches, place).await });
}

async fn end_in(batches: &Arc<Batches>, place: Partition) -> Result<usize, StoreError> {
    let (mut ended, mut failed) = (0_usize, None);
    for _ in 0..MAX_SEARCHES {
        let due = expired(batches, place).await?;
        let is_last = due.len() < MAX_SWEPT;
        // All at once: they wait in one queue, in which they are carried out in their order and in few calls.
        for answer in join_all(due.into_iter().map(|id| end_one(batches, place, id))).await {
            // One record that cannot be read must not keep the others from their end.
            match answer {
                Ok(()) => ended = ended.saturating_add(1),
                Err(error) => failed = Some(error),
            }
        }
        if is_last || failed.is_some() {
            break;
        }
    }
    batches.sweeps.ended.fetch_add(u64::try_from(ended).unwrap_or(0), Ordering::Relaxed);
    failed.map_or(Ok(ended), Err)
}

async fn end_one(batches: &Arc<Batches>, place: Partition, id: TraceId) -> Result<(), StoreError> {
    let answer = batches.run(place, Command::Expire { id }, Latest::Never).await?;
    if let Answer::Ended(Err(CommitError::Unknown)) = answer {
        // Its record is gone or was ended before, and only the index is left of it.
        let (index, mut remove) = (keys::expiring(place), Cmd::new());
        remove.arg("ZREM").arg(&index).arg(keys::member(id));
        batches.servers.send(&index, &remove).await?;
    }
    Ok(())
}

/// Returns the reservations of a partition that have expired by the clock of its server, in the order in which they were due, as core
/// does it: the first to give back may make the others void.
async fn expired(batches: &Batches, place: Partition) -> Result<Vec<TraceId>, StoreError> {
    let most = [MAX_SWEPT.to_string().into_bytes()];
    let found = batches.servers.run(&EXPIRED, &[keys::expiring(place), keys::head(place)], &most).await?;
    let (mut parts, mut due, mut foreign) = (reply::array(found)?.into_iter(), Vec::new(), Cmd::new());
    let (index, mut has_foreign) = (keys::expiring(place), false);
    foreign.arg("ZREM").arg(&index);
    while let (Some(Value::BulkString(member)), Some(_)) = (parts.next(), parts.next()) {
        match keys::id_of_member(&member) {
            Some(id) => due.push(id),
            None => {
                foreign.arg(&member);
                has_foreign = true;
            }
        }
    }
    // What no node has written would be found again and again, in place of others.
    if has_foreign {
        batches.servers.send(&index, &foreign).await?;
    }
    Ok(due)
}
