//! The usual decision, in one round trip, or two for a subject with strikes: `settle.lua` fits and adds, and core computes the answer
//! from what the script found.

use std::sync::LazyLock;

use threshold_core::{Balance, Bill, BytesError, Outcome, OwnedBill, Standing, Timestamp, settle as settle_in_core};

use super::keys::{RecordKey, RecordKind};
use super::reply::{self, Verdict};
use super::samples::Samples;
use super::server::ServerScript;
use super::servers::Servers;
use crate::store::StoreError;
use crate::store::partitioned::PartitionError;

static SETTLE: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("settle.lua")));

/// How often the script is called: once without strikes, and again with the standings that it has found.
const MAX_CALLS: usize = 2;

/// Settles a bill. `None` if nothing was written and the bill has to be settled on copies: a standing changes, a limit was changed,
/// or the denial is a strike.
pub(super) async fn settle(
    servers: &Servers,
    samples: &Samples,
    bill: &OwnedBill,
) -> Result<Option<Outcome>, PartitionError> {
    let bill = bill.as_bill();
    // Peeks and records, and limits whose shape or figures the script cannot compute exactly, are left to core.
    let Some(charges) = bill.to_script() else { return Ok(None) };
    let balances = bill.charges().iter().map(|charge| RecordKey::balance(charge.key()));
    let standings = bill.subjects().iter().map(|subject| RecordKey::of_digest(RecordKind::Standing, subject.key()));
    let names: Vec<String> = balances.chain(standings).map(|key| key.name()).collect();
    // Most subjects have no standing.
    let mut standings: Vec<Option<Vec<u8>>> = vec![None; bill.subjects().len()];
    let is_sample = samples.takes_next();
    for _ in 0..MAX_CALLS {
        let mut args = vec![charges.concat(), if is_sample { b"1".to_vec() } else { Vec::new() }];
        args.extend(standings.iter().map(|bytes| bytes.clone().unwrap_or_default()));
        let (verdict, now, mut found) = reply::settled(servers.run(&SETTLE, &names, &args).await?)?;
        servers.heard(now);
        // Values must not be paired with the keys of other records.
        let expected = match verdict {
            Verdict::Charged if is_sample => charges.len().saturating_mul(2),
            Verdict::Charged => charges.len(),
            Verdict::Denied | Verdict::Unusual => names.len(),
        };
        if found.len() != expected {
            return Err(StoreError::Unavailable.into());
        }
        let after = found.split_off(charges.len());
        if verdict == Verdict::Charged {
            // The standings are as expected. What follows the balances of a sample was written in their place.
            let (outcome, balances) = settle_found(&bill, &found, &standings, now)?;
            samples.compare(&names, &balances, &outcome, &after);
            return Ok(Some(outcome));
        }
        let known = std::mem::replace(&mut standings, after);
        let (outcome, _) = settle_found(&bill, &found, &standings, now)?;
        match verdict {
            // A penalty, or a limit that is full: there is nothing to write.
            _ if !outcome.changed() => return Ok(Some(outcome)),
            // The charges are additions also for a subject with strikes, if they change nothing about those. On copies they
            // would have to wait until no other node charges the same tenant.
            Verdict::Unusual if standings != known && !changes_standing(&bill, &outcome) => {}
            // A denial that strikes or blocks has to be written.
            _ => return Ok(None),
        }
    }
    Ok(None)
}

/// Lets core settle a bill on what the script found. Returns the balances as core leaves them, too.
fn settle_found(
    bill: &Bill<'_>,
    balances: &[Option<Vec<u8>>],
    standings: &[Option<Vec<u8>>],
    now: Timestamp,
) -> Result<(Outcome, Vec<Balance>), StoreError> {
    let mut balances = parse(balances, Balance::from_script)?;
    let mut standings = parse(standings, Standing::from_bytes)?;
    let outcome = settle_in_core(bill, &mut balances, &mut standings, now);
    Ok((outcome, balances))
}

fn parse<T: Default>(
    values: &[Option<Vec<u8>>],
    parse: fn(&[u8]) -> Result<T, BytesError>,
) -> Result<Vec<T>, StoreError> {
    let parsed = values.iter().map(|value| match value {
        // A record that cannot be read is never taken for an empty one.
        Some(bytes) => parse(bytes).map_err(|_| StoreError::Unavailable),
        None => Ok(T::default()),
    });
    parsed.collect()
}

fn changes_standing(bill: &Bill<'_>, outcome: &Outcome) -> bool {
    (0..bill.subjects().len()).any(|subject| outcome.standing_changed(subject))
}
