//! Access to the balances of a bill while it is settled, in whatever form a store keeps them.

use arrayvec::ArrayVec;

use super::outcome::bit;
use crate::balance::Balance;
use crate::bill::{Bill, Charge};
use crate::key::TraceId;
use crate::limit::{Look, Mark};
use crate::plan::MAX_CHARGES;
use crate::time::Timestamp;

/// The balances of a bill's charges, by the charge's index on the bill.
pub trait Balances {
    /// Looks at a balance if that is cheap and changes nothing; returns `None` where [`look`](Self::look) has to be called.
    // A method of its own and not a fast path inside `look`: where two paths to one return value meet, the compiler copies
    // the whole `Look`.
    fn glance(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> Option<Look> {
        let _ = (index, charge, now);
        None
    }

    /// Looks at a balance as [`Charge::look`] does. Returns whether that changed it.
    fn look(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> (Look, bool);

    /// Charges a balance as [`Balance::charge`] does, after a look at the same `now`. Does not check again whether the cost fits.
    fn charge(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp, id: TraceId) -> Mark;

    /// Returns whether a pause or `block_for` denies the key at `now`, whatever fits.
    fn is_blocked(&self, index: usize, now: Timestamp) -> bool;

    /// Denies the key until `until`.
    fn block(&mut self, index: usize, charge: &Charge<'_>, until: Timestamp);

    /// Returns a copy of a balance.
    fn copied(&self, index: usize) -> Balance;

    /// Returns whether the balance stands in for many keys, because the store had no room for the charge's own key. A full
    /// stand-in denies, but it neither strikes nor blocks: other callers may have used it up.
    fn stands_in(&self, index: usize, charge: &Charge<'_>) -> bool {
        let _ = (index, charge);
        false
    }
}

// A store that loads fewer balances than the bill has charges is wrong. A missing one counts as empty, because settling
// has no way to fail and must not panic inside a store's lock.
impl Balances for [Balance] {
    #[inline]
    fn look(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> (Look, bool) {
        match self.get_mut(index) {
            Some(balance) => charge.look(balance, now),
            None => charge.look(&mut Balance::default(), now),
        }
    }

    #[inline]
    fn charge(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp, id: TraceId) -> Mark {
        match self.get_mut(index) {
            Some(balance) => balance.charge(charge.limit, charge.cost, now, id),
            None => Mark::new(now, 0),
        }
    }

    #[inline]
    fn is_blocked(&self, index: usize, now: Timestamp) -> bool {
        self.get(index).is_some_and(|balance| balance.is_blocked(now))
    }

    #[inline]
    fn block(&mut self, index: usize, _: &Charge<'_>, until: Timestamp) {
        if let Some(balance) = self.get_mut(index) {
            balance.block(until);
        }
    }

    fn copied(&self, index: usize) -> Balance {
        self.get(index).cloned().unwrap_or_default()
    }
}

/// Copies of balances for a peek, which is a check whose changes are dropped.
pub(super) struct BalanceCopies {
    balances: ArrayVec<Balance, MAX_CHARGES>,
    /// One bit for each charge whose original stands in for other keys; a copied balance cannot tell.
    stand_ins: u16,
}

impl BalanceCopies {
    pub(super) fn of<B: Balances + ?Sized>(bill: &Bill<'_>, originals: &B) -> Self {
        // Asked of the originals before the copies replace them. Otherwise a peek would predict a strike for a budget
        // that other callers have used up.
        let charges = bill.charges.iter().enumerate();
        let stand_ins = charges.filter(|(index, charge)| originals.stands_in(*index, charge));
        let stand_ins = stand_ins.fold(0, |bits, (index, _)| bits | bit(index));
        Self { balances: (0..bill.charges.len()).map(|index| originals.copied(index)).collect(), stand_ins }
    }
}

impl Balances for BalanceCopies {
    fn look(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> (Look, bool) {
        self.balances[..].look(index, charge, now)
    }

    fn charge(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp, id: TraceId) -> Mark {
        self.balances[..].charge(index, charge, now, id)
    }

    fn is_blocked(&self, index: usize, now: Timestamp) -> bool {
        self.balances[..].is_blocked(index, now)
    }

    fn block(&mut self, index: usize, charge: &Charge<'_>, until: Timestamp) {
        self.balances[..].block(index, charge, until);
    }

    fn copied(&self, index: usize) -> Balance {
        self.balances[..].copied(index)
    }

    fn stands_in(&self, index: usize, _: &Charge<'_>) -> bool {
        self.stand_ins & bit(index) != 0
    }
}
