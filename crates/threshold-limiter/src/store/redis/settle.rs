//! The usual decision, in one round trip: `settle.lua` fits and adds, and core computes the answer from what the script found.

use std::sync::LazyLock;

use threshold_core::{Balance, Outcome, OwnedBill, Standing, settle as settle_in_core};

use super::keys::{RecordKey, RecordKind};
use super::reply::{self, Verdict};
use super::server::ServerScript;
use super::servers::Servers;
use crate::store::StoreError;
use crate::store::partitioned::PartitionError;

static SETTLE: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("settle.lua")));

/// Settles a bill. `None` if nothing was written and the bill has to be settled on copies: a subject has strikes, a limit was
/// changed, or the denial is a strike.
pub(super) async fn settle(servers: &Servers, bill: &OwnedBill) -> Result<Option<Outcome>, PartitionError> {
    let bill = bill.as_bill();
    // Peeks and records, and limits whose shape or figures the script cannot compute exactly, are left to core.
    let Some(charges) = bill.to_script() else { return Ok(None) };
    let balances = bill.charges().iter().map(|charge| RecordKey::balance(charge.key()));
    let standings = bill.subjects().iter().map(|subject| RecordKey::of_digest(RecordKind::Standing, subject.key()));
    let names: Vec<String> = balances.chain(standings).map(|key| key.name()).collect();
    let reply = servers.run(&SETTLE, &names, &charges).await?;
    let (verdict, now, values) = reply::settled(reply)?;
    servers.heard(now);
    if verdict == Verdict::Unusual {
        return Ok(None);
    }
    // The values of the standings come after those of the balances.
    let found = values.iter().take(charges.len()).map(|value| match value {
        Some(bytes) => Balance::from_script(bytes).map_err(|_| StoreError::Unavailable),
        None => Ok(Balance::default()),
    });
    let mut balances = found.collect::<Result<Vec<_>, StoreError>>()?;
    // The script denies and charges only if no subject has a standing.
    let mut standings: Vec<Standing> = bill.subjects().iter().map(|_| Standing::default()).collect();
    let outcome = settle_in_core(&bill, &mut balances, &mut standings, now);
    // A denial that strikes or blocks has to be written.
    Ok(Some(outcome).filter(|outcome| verdict == Verdict::Charged || !outcome.changed()))
}
