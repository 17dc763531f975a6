//! Keys that stand in for a charge's own key in a store that has no room for it.

use super::Plan;
use crate::address::AddressGroup;
use crate::key::{Digest, KeyBuilder, KeyPrefix, Part};

impl Plan<'_> {
    /// Returns the key that the `index`th charge shares with all callers of its rule behind the same /24 or /48, or with all
    /// callers of its rule where there is no address.
    #[must_use]
    pub fn folded_key(&self, index: usize) -> Option<Digest> {
        let Some(block) = self.ip.map(AddressGroup::block) else { return self.shared_key(index) };
        let mut key = self.stand_in(index)?;
        key.address(Part::Folded, block);
        // In the partition of the block, so that a flood from one network stays in one partition.
        Some(key.finish().in_partition(self.policy.anchors.address(block)))
    }

    /// Returns the key that the `index`th charge shares with all callers of its rule.
    #[must_use]
    pub fn shared_key(&self, index: usize) -> Option<Digest> {
        let mut key = self.stand_in(index)?;
        // An empty text cannot be an address, so this key never equals that of a block.
        key.text(Part::Folded, "");
        Some(key.finish().in_partition(self.rule_of(index)?.partition))
    }

    /// Begins the key: it is the rule's, so that the rule's own limit applies to everyone who shares it.
    fn stand_in(&self, index: usize) -> Option<KeyBuilder> {
        let charge = self.bill.charges.get(index)?;
        self.rule_of(index)?.prefix(charge.limit).map(KeyPrefix::go_on)
    }
}
