//! Refunds of receipts.

use arrayvec::ArrayVec;

use super::{Answer, Records, expire};
use crate::key::{Digest, TraceId};
use crate::limit::Limit;
use crate::plan::MAX_CHARGES;
use crate::receipt::Receipt;
use crate::time::Timestamp;

/// Refunds the charges of a receipt, once.
pub(super) fn refund<R: Records>(receipt: &Receipt, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    expire(records, now)?;
    // Remembered before the refund: if there is no room to remember it, nothing is given back.
    let first = begin(receipt.id(), receipt.void_from(), records, now)?;
    if first {
        records.balances(&charges(receipt), now, |balances| receipt.refund(balances, now))?;
    }
    Ok(Answer::Refunded { first })
}

/// Remembers a refund. Returns whether it is the first one of its receipt.
pub(super) fn begin<R: Records>(
    id: TraceId,
    void_from: Timestamp,
    records: &mut R,
    now: Timestamp,
) -> Result<bool, R::Error> {
    // The charges of a reservation end with it. Its receipt must not refund them a second time.
    Ok(records.reservation(id)?.is_none() && records.remember_refund(id, void_from, now)?)
}

/// Refunds the charges of a receipt. Nothing is remembered, so this must never be reached by a receipt that a client can present
/// twice.
pub(super) fn give_back<R: Records>(receipt: &Receipt, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    expire(records, now)?;
    records.balances(&charges(receipt), now, |balances| receipt.refund(balances, now))?;
    Ok(Answer::Done)
}

/// Refunds the charges of a receipt and makes them again.
pub(super) fn renew<R: Records>(receipt: &Receipt, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    // On a copy: a store may execute the command again from the start, with the receipt as it was sent.
    let mut receipt = receipt.clone();
    records.balances(&charges(&receipt), now, |balances| receipt.renew(balances, now))?;
    Ok(Answer::Renewed(Box::new(receipt)))
}

fn charges(receipt: &Receipt) -> ArrayVec<(Digest, Limit), MAX_CHARGES> {
    receipt.charges().collect()
}
