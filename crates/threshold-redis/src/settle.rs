//! The usual decision, in one round trip, or two for a subject with strikes. `settle.lua` fits and adds, and core computes the answer
//! from what the script found.

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use threshold_core::key::Partition;
use threshold_core::receipt::HoldTerms;
use threshold_core::{
    Balance, Bill, BytesError, Outcome, OwnedBill, Reservation, Standing, Timestamp, settle_into as settle_in_core,
};

use super::batch::{self, Batches, random_history};
use super::errors::Errors;
use super::keys::{self, RecordKey, RecordKind};
use super::reply::{self, Settled, Verdict};
use super::samples::Samples;
use super::server::{CallError, Latest, ServerScript};
use super::sweep;
use threshold_limiter::store::StoreError;
use threshold_limiter::store::partitioned::PartitionError;

static SETTLE: LazyLock<ServerScript> =
    LazyLock::new(|| ServerScript::new(concat!("#!lua\n", include_str!("charge.lua"), include_str!("settle.lua"))));

/// How often the script is called: once without strikes, again with the standings that it has found, and once more after what has
/// expired was given back or the clock of the server was learned.
const MAX_CALLS: usize = 3;

/// Settles a bill, and holds what it charges. `None` if nothing was written and the bill has to be settled on copies: a standing
/// changes, a limit was changed, or the denial is a strike. The outcome is on the heap, because it passes several futures and tasks.
pub(super) async fn settle(
    batches: &Arc<Batches>,
    samples: &Samples,
    place: Partition,
    (bill, hold): (&OwnedBill, Option<&HoldTerms>),
    latest: Latest,
) -> Result<Option<Box<Outcome>>, PartitionError> {
    // Peeks, and limits whose shape or figures the script cannot compute exactly, are left to core.
    let Some(mut call) = Call::new(&bill.as_bill(), place, hold, samples) else { return Ok(None) };
    let mut outcome = Box::<Outcome>::default();
    let mut has_swept = false;
    for _ in 0..MAX_CALLS {
        let Settled { verdict, is_due, now, history, mut found } = call.send(batches, latest).await?;
        if verdict == Verdict::TooLate {
            // The clock of the server may have been set. Its reply has corrected the estimate.
            match latest {
                Latest::At(end) if end <= Instant::now() => return Err(StoreError::Unavailable.into()),
                _ => continue,
            }
        }
        if is_due {
            if verdict == Verdict::Charged {
                sweep::later(batches, place);
            } else if !std::mem::replace(&mut has_swept, true) {
                // What has expired may make room for this.
                Box::pin(sweep::end(batches, place)).await;
                continue;
            }
        }
        // Values must not be paired with the keys of other records.
        if found.len() != call.expected(verdict) {
            return Err(StoreError::Unavailable.into());
        }
        let after = found.split_off(call.charges);
        // Borrowed again for each reply: it is large, and would be a part of the future while the server is asked.
        let bill = bill.as_bill();
        let unread = |unread: Unread| unread.count(batches.servers.errors(), &bill);
        if verdict == Verdict::Charged {
            // The standings are as expected. What follows the balances of a sample was written in their place.
            let balances = settle_found(&bill, &found, &call.standings, now, &mut outcome).map_err(unread)?;
            samples.compare(&call.names, &balances, &outcome, &after);
            outcome.set_history(history);
            sweep::expects(batches, place, hold);
            return Ok(Some(outcome));
        }
        let known = std::mem::replace(&mut call.standings, after);
        settle_found(&bill, &found, &call.standings, now, &mut outcome).map_err(unread)?;
        match verdict {
            // A penalty, or a limit that is full: there is nothing to write.
            _ if !outcome.changed() && (hold.is_none() || bill.is_denied(&outcome)) => return Ok(Some(outcome)),
            // The charges are additions also for a subject with strikes, if they change nothing about those. On copies they
            // would have to wait until no other node charges the same tenant.
            Verdict::Unusual if call.standings != known && !changes_standing(&bill, &outcome) => {}
            // A denial that strikes or blocks has to be written.
            _ => return Ok(None),
        }
    }
    Ok(None)
}

/// The arguments of `settle.lua`.
struct Call {
    names: Vec<String>,
    /// How many of the names are those of balances, and of balances and standings.
    charges: usize,
    records: usize,
    figures: Vec<u8>,
    is_sample: bool,
    /// Whether the script reads the head of the partition, which says in which history the charges are.
    has_head: bool,
    hold: Vec<u8>,
    /// What each subject must have. Most have nothing.
    standings: Vec<Option<Vec<u8>>>,
}

impl Call {
    /// `None` if the script cannot settle this bill.
    fn new(bill: &Bill<'_>, place: Partition, hold: Option<&HoldTerms>, samples: &Samples) -> Option<Self> {
        let charges = bill.to_script()?;
        let mut names: Vec<String> = records_of(bill).map(|key| key.name()).collect();
        let records = names.len();
        names.push(keys::head(place));
        if hold.is_some() {
            names.push(RecordKey::of_id(RecordKind::Reservation, place, bill.trace()).name());
            names.push(keys::expiring(place));
        }
        Some(Self {
            names,
            charges: charges.len(),
            records,
            figures: charges.concat(),
            is_sample: samples.takes_next(),
            has_head: true,
            hold: hold.map_or_else(Vec::new, |terms| Reservation::hold_to_script(bill, terms)),
            standings: vec![None; bill.subjects().len()],
        })
    }

    /// Returns how many values the reply with this verdict has.
    fn expected(&self, verdict: Verdict) -> usize {
        match verdict {
            Verdict::Charged if self.is_sample => self.charges.saturating_mul(2),
            Verdict::Charged => self.charges,
            Verdict::Denied | Verdict::Unusual => self.records,
            Verdict::TooLate => 0,
        }
    }

    async fn send(&mut self, batches: &Batches, latest: Latest) -> Result<Settled, PartitionError> {
        match self.send_once(batches, latest).await {
            // While a slot is moved, only calls with one key are executed. So the head is read before. If the partition begins another
            // history in between, nothing is given back for this charge.
            Err(CallError::Moving) if self.has_head && self.records == 1 && self.hold.is_empty() => {
                let head = batch::load_head(&batches.servers, &self.names.split_off(1)).await?;
                self.has_head = false;
                let (settled, connection) = self.send_once(batches, latest).await?;
                Ok(Settled { history: head.history.heard_over(connection), ..settled })
            }
            answered => {
                let (settled, connection) = answered?;
                Ok(Settled { history: settled.history.heard_over(connection), ..settled })
            }
        }
    }

    /// Returns the number of the connection, too.
    async fn send_once(&self, batches: &Batches, latest: Latest) -> Result<(Settled, u64), CallError> {
        let sample = if self.is_sample { b"1".to_vec() } else { Vec::new() };
        let history = if self.has_head { random_history() } else { Vec::new() };
        let mut args = vec![self.figures.clone(), sample, history, self.hold.clone()];
        args.extend(self.standings.iter().map(|bytes| bytes.clone().unwrap_or_default()));
        let replied = batches.servers.run_until(&SETTLE, &self.names, &args, latest).await?;
        // A reply that cannot be read says nothing about what was written.
        let parsed = batches.servers.errors().parsed("settle.lua", reply::settled(&replied.value));
        let settled = parsed.map_err(|_| CallError::Unknown)?;
        batches.servers.heard(&replied.server, settled.now);
        Ok((settled, replied.connection))
    }
}

/// Returns the balances and the standings of a bill.
fn records_of(bill: &Bill<'_>) -> impl Iterator<Item = RecordKey> {
    let balances = bill.charges().iter().map(|charge| RecordKey::balance(charge.key()));
    balances.chain(bill.subjects().iter().map(|subject| RecordKey::of_digest(RecordKind::Standing, subject.key())))
}

/// A record that core cannot read, by its place among the keys of the bill.
#[derive(Debug)]
struct Unread {
    place: usize,
    error: BytesError,
}

impl Unread {
    fn count(self, errors: &Errors, bill: &Bill<'_>) -> StoreError {
        let record = records_of(bill).nth(self.place);
        record.map_or(StoreError::Unavailable, |record| errors.unreadable(record, self.error))
    }
}

/// Lets core settle a bill on what the script found. Returns the balances as core leaves them, too.
fn settle_found(
    bill: &Bill<'_>,
    balances: &[Option<Vec<u8>>],
    standings: &[Option<Vec<u8>>],
    now: Timestamp,
    outcome: &mut Outcome,
) -> Result<Vec<Balance>, Unread> {
    let charges = balances.len();
    let mut balances = parse(balances, Balance::from_script)?;
    let mut standings = parse(standings, Standing::from_bytes)
        .map_err(|unread| Unread { place: unread.place.saturating_add(charges), ..unread })?;
    settle_in_core(bill, balances.as_mut_slice(), standings.as_mut_slice(), now, outcome);
    Ok(balances)
}

fn parse<T: Default>(values: &[Option<Vec<u8>>], parse: fn(&[u8]) -> Result<T, BytesError>) -> Result<Vec<T>, Unread> {
    let parsed = values.iter().enumerate().map(|(place, value)| match value {
        // A record that cannot be read is never taken for an empty one.
        Some(bytes) => parse(bytes).map_err(|error| Unread { place, error }),
        None => Ok(T::default()),
    });
    parsed.collect()
}

fn changes_standing(bill: &Bill<'_>, outcome: &Outcome) -> bool {
    (0..bill.subjects().len()).any(|subject| outcome.standing_changed(subject))
}
