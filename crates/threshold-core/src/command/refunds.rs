//! Refunds of receipts, and charges that are given back.

use arrayvec::ArrayVec;

use super::reservations::release;
use super::{Answer, Records, expire};
use crate::key::{Digest, TraceId};
use crate::limit::Limit;
use crate::plan::MAX_CHARGES;
use crate::receipt::{Adjustment, Receipt};
use crate::time::{Span, Timestamp};

/// How long a store remembers what was given back by [`GiveBack`](super::Command::GiveBack). The receipt never left its node, which sends
/// it again for a shorter time than this.
pub const CREDIT_REMEMBERED: Span = Span::from_secs(60);

/// Refunds the charges of a receipt, once.
pub(super) fn refund<R: Records>(receipt: &Receipt, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    expire(records, now)?;
    // The charges of a reservation end with it. Its receipt must not refund them a second time.
    // Remembered before the refund: if there is no room to remember it, nothing is given back.
    // The id of a receipt of which nothing counts any more may be forgotten already.
    let first = receipt.void_from() > now
        && records.reservation(receipt.id())?.is_none()
        && records.remember_refund(receipt.id(), receipt.void_from(), now)?;
    if first {
        records.adjust(&Adjustment::giving_back(receipt), now)?;
    }
    Ok(Answer::Refunded { first })
}

/// Gives the charges of a receipt back that no client has. `credit` is the id by which that is remembered; without one this must never
/// be reached twice.
pub(super) fn give_back<R: Records>(
    receipt: &Receipt,
    credit: Option<TraceId>,
    records: &mut R,
    now: Timestamp,
) -> Result<Answer, R::Error> {
    expire(records, now)?;
    if let Some(id) = credit {
        // What was reserved is given back by the end of the reservation.
        if let Some(reservation) = records.reservation(id)? {
            release(reservation, records, now)?;
            return Ok(Answer::Done);
        }
        if !records.remember_refund(id, now.plus(CREDIT_REMEMBERED), now)? {
            return Ok(Answer::Done);
        }
    }
    records.adjust(&Adjustment::giving_back(receipt), now)?;
    Ok(Answer::Done)
}

/// Refunds the charges of a receipt and makes them again.
pub(super) fn renew<R: Records>(receipt: &Receipt, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    // On a copy: a store may execute the command again from the start, with the receipt as it was sent.
    let mut receipt = receipt.clone();
    let charges: ArrayVec<(Digest, Limit), MAX_CHARGES> = receipt.charges().collect();
    records.balances(&charges, now, |balances| receipt.renew(balances, now))?;
    Ok(Answer::Renewed(Box::new(receipt)))
}
