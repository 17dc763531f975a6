//! Charges that are given back in one call: `give_back.lua` takes them off, whatever other nodes charge meanwhile.

use std::sync::LazyLock;

use threshold_core::receipt::Adjustment;

use super::keys::RecordKey;
use super::reply;
use super::server::ServerScript;
use super::servers::Servers;
use crate::store::partitioned::PartitionError;

static GIVE_BACK: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("give_back.lua")));

/// Gives charges back. Returns false if nothing was changed and core has to do it, on copies of the balances.
///
/// A compare-and-set would never end on the key of a busy tenant, and the charges of denied requests would stay there.
pub(super) async fn give_back(servers: &Servers, adjustment: &Adjustment) -> Result<bool, PartitionError> {
    let Some(charges) = adjustment.to_script() else { return Ok(false) };
    if charges.is_empty() {
        return Ok(true);
    }
    let (names, charges): (Vec<String>, Vec<Vec<u8>>) =
        charges.into_iter().map(|(key, charge)| (RecordKey::balance(key).name(), charge)).unzip();
    let (is_done, now) = reply::given_back(servers.run(&GIVE_BACK, &names, &[charges.concat()]).await?)?;
    servers.heard(now);
    Ok(is_done)
}
