//! Settling a bill on stored records.

use arrayvec::ArrayVec;

use super::{Answer, Records, expire};
use crate::balance::Balance;
use crate::bill::Bill;
use crate::key::Digest;
use crate::ladder::Standing;
use crate::limit::Limit;
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS};
use crate::settle::{Outcome, Standings, settle_into};
use crate::time::Timestamp;

/// Loads the balances and standings of a bill, settles it, and saves what has changed.
pub(super) fn settle<R: Records>(bill: &Bill<'_>, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    // First, because an expiry gives back to balances that this bill may charge.
    expire(records, now)?;
    let charges: ArrayVec<(Digest, Limit), MAX_CHARGES> =
        bill.charges().iter().map(|charge| (charge.key, *charge.limit)).collect();
    // Copied out, because the standings borrow the records for the whole step, to ask for room.
    let copy = |balances: &mut [Balance]| balances.iter().cloned().collect();
    let mut balances: ArrayVec<Balance, MAX_CHARGES> = records.balances(&charges, now, copy)?;
    let mut standings = LoadedStandings::new(bill, records, now)?;
    let mut outcome = Outcome::default();
    settle_into(bill, balances.as_mut_slice(), &mut standings, now, &mut outcome);
    // Standings first: a strike that cannot be saved after all must fail the command before anything is charged.
    standings.save(&outcome)?;
    let (changed, balances): (ArrayVec<_, MAX_CHARGES>, ArrayVec<_, MAX_CHARGES>) = charges
        .into_iter()
        .zip(balances)
        .enumerate()
        .filter(|(index, _)| outcome.balance_changed(*index))
        .map(|(_, charge)| charge)
        .unzip();
    if !changed.is_empty() {
        records.balances(&changed, now, |stored| {
            stored.iter_mut().zip(balances).for_each(|(stored, balance)| *stored = balance);
        })?;
    }
    Ok(Answer::Settled(Box::new(outcome)))
}

/// The standings of a bill's subjects, loaded from records.
struct LoadedStandings<'r, 'l, R: Records> {
    bill: &'r Bill<'l>,
    records: &'r mut R,
    now: Timestamp,
    standings: ArrayVec<Standing, MAX_SUBJECTS>,
    /// An error from `has_room`, which cannot return one itself.
    failed: Option<R::Error>,
}

impl<'r, 'l, R: Records> LoadedStandings<'r, 'l, R> {
    fn new(bill: &'r Bill<'l>, records: &'r mut R, now: Timestamp) -> Result<Self, R::Error> {
        let mut standings = ArrayVec::new();
        for subject in bill.subjects() {
            standings.push(records.standing(subject.key)?.unwrap_or_default());
        }
        Ok(Self { bill, records, now, standings, failed: None })
    }

    /// Saves the standings that have changed. Room for a strike was found before it took effect. A remembered denial may find
    /// none, and is then forgotten.
    fn save(self, outcome: &Outcome) -> Result<(), R::Error> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let subjects = self.bill.subjects().iter().zip(self.standings).enumerate();
        for (_, (subject, standing)) in subjects.filter(|(index, _)| outcome.standing_changed(*index)) {
            self.records.save_standing(subject.key, standing, self.now)?;
        }
        Ok(())
    }
}

impl<R: Records> Standings for LoadedStandings<'_, '_, R> {
    fn all(&mut self) -> &mut [Standing] {
        &mut self.standings
    }

    fn has_room(&mut self, index: usize, standing: &Standing) -> bool {
        let Some(subject) = self.bill.subjects().get(index) else { return false };
        match self.records.has_room_for(subject.key, standing, self.now) {
            Ok(room) => room,
            Err(error) => {
                // Answered as "no room" so that settling can go on. `save` returns the error, and nothing of this
                // outcome is kept.
                self.failed = Some(error);
                false
            }
        }
    }
}
