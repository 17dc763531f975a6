//! What concurrent requests compete for, so that a denied request can wait for the right thing.

use super::Plan;
use crate::key::Digest;
use crate::settle::{Exception, Outcome};
use crate::time::Timestamp;

impl Plan<'_> {
    /// Returns the keys at which this request can stand in another one's way: the budgets that it takes from, and the
    /// standings that it is held to.
    pub fn contested(&self) -> impl Iterator<Item = Digest> {
        // A cost of 0 and an observed limit take nothing away that another request could wait for.
        let takes = self.bill.charges.iter().filter(|charge| charge.enforced() && charge.cost > 0);
        takes.map(|charge| charge.key).chain(self.subjects.iter().map(|subject| subject.key))
    }

    /// Returns the [contested](Self::contested) keys that denied a request, each with the time at which it would deny no longer:
    /// the standing with a penalty in force, or else the budgets without room.
    pub fn denied_by(&self, outcome: &Outcome) -> impl Iterator<Item = (Digest, Timestamp)> {
        let penalised = outcome.penalty.and_then(|(subject, _)| self.subjects.get(subject));
        let full = self.bill.charges.iter().zip(&outcome.settled).filter(move |(charge, settled)| {
            let short =
                charge.enforced() && charge.cost > 0 && !settled.look.allowed && settled.exception != Exception::Lifted;
            // Under a penalty room in a budget does not help. A request that is woken by it would only be denied again.
            penalised.is_none() && short
        });
        let standing = penalised.map(|subject| (subject.key, outcome.denied_until));
        standing.into_iter().chain(full.map(|(charge, settled)| (charge.key, settled.look.ready_at)))
    }
}
