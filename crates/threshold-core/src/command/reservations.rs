//! The end of reservations: by a commit, a release, or their expiry.
//!
//! A reservation is held beside the balances that it has charged, and both change in one step. A store of partitions has one in each
//! of them, and a record elsewhere that says which partitions these are; that one ends first, so that all end in the same way.

use super::{Answer, Records, ReservationEnd};
use crate::bill::Bill;
use crate::key::{Digest, TraceId};
use crate::receipt::{Adjustment, CommitError, HoldTerms, OnExpire, Receipt, Reservation};
use crate::time::Timestamp;

/// Ends the reservations that have expired, in the order of their expiry. Every command that reads or changes a balance does
/// this first, so that no decision counts a reservation that should have been released.
///
/// # Errors
/// Fails where a record could not be read or saved.
pub fn expire<R: Records>(records: &mut R, now: Timestamp) -> Result<(), R::Error> {
    // One at a time, in the order of expiry: each is ended as of its own expiry, so its balances must not contain later
    // changes.
    while let Some(mut reservation) = records.take_expired(now)? {
        remember(&reservation, records, now)?;
        if let Some(adjustment) = reservation.expire(now) {
            records.adjust(&adjustment, now)?;
        }
    }
    Ok(())
}

/// Saves a new reservation of charges that were made before.
pub(super) fn save<R: Records>(reservation: Reservation, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    expire(records, now)?;
    records.save_reservation(reservation, now)?;
    Ok(Answer::Done)
}

/// Settles a bill, and holds what it charges.
pub(super) fn reserve<R: Records>(
    bill: &Bill<'_>,
    terms: &HoldTerms,
    records: &mut R,
    now: Timestamp,
) -> Result<Answer, R::Error> {
    expire(records, now)?;
    // Saved before anything is charged: in a store without room for it nothing may be charged either.
    let empty = Receipt::of_nothing(bill.trace(), now);
    records.save_reservation(Reservation::new(empty, terms.ttl, OnExpire::Charge), now)?;
    let answer = super::bill::settle(bill, records, now)?;
    let Answer::Settled(outcome) = &answer else { return Ok(answer) };
    if bill.is_denied(outcome) {
        records.forget_reservation(bill.trace, now)?;
    } else {
        let held = Receipt::holding(bill, terms, outcome);
        records.save_reservation(Reservation::new(held, terms.ttl, terms.on_expire), now)?;
    }
    Ok(answer)
}

/// Releases a reservation, if it is open.
pub(super) fn release<R: Records>(
    mut reservation: Reservation,
    records: &mut R,
    now: Timestamp,
) -> Result<(), R::Error> {
    if !reservation.is_open() {
        return Ok(());
    }
    if let Ok(adjustment) = reservation.release(now) {
        records.save_reservation(reservation, now)?;
        records.adjust(&adjustment, now)?;
    }
    Ok(())
}

/// Ends a reservation and changes its balances in one step.
pub(super) fn end<R: Records>(
    id: TraceId,
    how: &ReservationEnd,
    records: &mut R,
    now: Timestamp,
) -> Result<Answer, R::Error> {
    expire(records, now)?;
    let (keys, adjustment) = match end_reservation(id, how, records, now)? {
        Ok(ended) => ended,
        Err(error) => return Ok(Answer::Ended(Err(error))),
    };
    records.adjust(&adjustment, now)?;
    Ok(Answer::Ended(Ok(keys)))
}

/// Ends the record of a reservation whose charges are held elsewhere. Its balances stay as they are.
pub(super) fn end_record<R: Records>(
    id: TraceId,
    how: &ReservationEnd,
    records: &mut R,
    now: Timestamp,
) -> Result<Answer, R::Error> {
    let ended = end_reservation(id, how, records, now)?;
    Ok(Answer::Ended(ended.map(|(keys, _)| keys)))
}

/// The keys of an ended reservation and the changes of its balances, or why it was not ended.
type Ended = Result<(Vec<Digest>, Adjustment), CommitError>;

/// Ends the record of a reservation.
fn end_reservation<R: Records>(
    id: TraceId,
    how: &ReservationEnd,
    records: &mut R,
    now: Timestamp,
) -> Result<Ended, R::Error> {
    let Some(mut reservation) = records.reservation(id)? else { return Ok(Err(CommitError::Unknown)) };
    let was_ended = !reservation.is_open();
    // A reservation refuses before it changes, so a refused end leaves everything as it was.
    let ended = match how {
        ReservationEnd::Commit(cost) => reservation.commit(cost, now),
        ReservationEnd::Release => reservation.release(now).map_err(CommitError::from),
        ReservationEnd::Expire => {
            if reservation.expires() <= now {
                remember(&reservation, records, now)?;
            }
            reservation.expire(now).ok_or(CommitError::Unknown)
        }
    };
    let adjustment = match ended {
        Ok(adjustment) => adjustment,
        Err(error) => return Ok(Err(error)),
    };
    let keys = reservation.keys().collect();
    // An ended reservation is kept until it expires, so that a repeated commit or release gets the same answer.
    if !was_ended {
        records.save_reservation(reservation, now)?;
    }
    Ok(Ok((keys, adjustment)))
}

/// Remembers that the receipt of an expired reservation must not be refunded. Before anything is given back: if that fails, the
/// receipt could otherwise be refunded as well.
fn remember<R: Records>(reservation: &Reservation, records: &mut R, now: Timestamp) -> Result<(), R::Error> {
    if reservation.gives_back() {
        records.remember_end(reservation.id(), reservation.void_from(), now)?;
    }
    Ok(())
}
