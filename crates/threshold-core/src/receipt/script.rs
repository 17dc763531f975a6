//! Charges in the form in which a store's script gives them back; see `balance/script.rs` for the forms of balances.

use super::{Charged, Receipt};
use crate::balance::Shaped;
use crate::key::Digest;

/// The first byte of a charge that is given back. Its bits mean something only in a charge that is made.
const NO_TERMS: u8 = 0;

impl Receipt {
    /// Returns each charge that was made as a script gives it back, with its key; `None` if the script does not know one of them.
    pub(super) fn to_script(&self) -> Option<Vec<(Digest, Vec<u8>)>> {
        let made = self.charged.iter().filter(|charged| charged.mark.amount > 0);
        made.map(|charged| Some((charged.key, charged.script_charge()?))).collect()
    }
}

impl Charged {
    fn script_charge(&self) -> Option<Vec<u8>> {
        let Shaped { shape, numbers } = self.limit.charge_shape(self.mark.amount)?;
        let (at, part, amount) = (self.at.micros(), self.mark.part.micros(), self.mark.amount);
        let numbers = match (self.limit.refills_smoothly(), &numbers[..]) {
            // The increment of a charge is what giving it back takes off.
            (true, [quota, period, parts, less, less_fraction, ..]) => {
                let (until, fraction) = (self.counts_until.micros(), self.mark.fraction());
                vec![*quota, *period, *parts, at, until, part, fraction, *less, *less_fraction]
            }
            (false, [_, period, ..]) => vec![*period, at, part, amount],
            _ => return None,
        };
        Shaped { shape, numbers }.write(NO_TERMS)
    }
}
