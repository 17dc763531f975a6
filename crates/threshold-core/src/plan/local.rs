//! The bill of a request that one node decides alone, because the store of all nodes is away.

use super::Plan;
use crate::bill::OwnedBill;
use crate::policy::OnStoreError;

impl Plan<'_> {
    /// Returns the bill with this node's [share](crate::Limit::share) of every limit. It punishes nobody: what a node counts
    /// alone is no proof of an offence. Rules with `on_store_error = "open"` cost nothing, so that they deny nothing.
    #[must_use]
    pub fn local_bill(&self, place: u64, nodes: u64) -> OwnedBill {
        let mut bill = self.bill.to_owned();
        bill.punishes = false;
        for (index, charge) in bill.charges.iter_mut().enumerate() {
            let is_open = self.rule_of(index).is_some_and(|rule| rule.on_store_error == OnStoreError::Open);
            // `deny = true` needs no store, so it denies in every mode.
            if is_open && !charge.limit.is_never() {
                charge.cost = 0;
            }
            charge.limit = charge.limit.share(place, nodes);
        }
        bill
    }
}
