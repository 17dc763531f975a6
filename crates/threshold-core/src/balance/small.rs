//! A balance of constant size in two numbers, and what can be done with it where it lies in a table.

use super::Balance;
use crate::limit::{Limit, Look, Mark};
use crate::time::Timestamp;

/// A balance of constant size in two numbers, without the figures of its limit: the contents of a table's slot.
///
/// Each algorithm chooses the numbers ([`Limit`] packs them); `figure` should be the smaller one, since a slot has fewer bits
/// for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Small {
    /// When a bucket is full again or a window begins, or both counts of an estimate.
    pub large: u64,
    /// A bucket's fraction, a window's count, or the number of an estimate's window.
    pub figure: u64,
}

impl Small {
    /// [`look`](Self::look) and [`charge`](Self::charge) in one, for buckets that have no fraction and owe nothing, which
    /// most are; `None` for the rest. The charge counts only if it fits.
    #[must_use]
    #[inline(always)]
    pub fn glance(self, limit: &Limit, cost: u64, now: Timestamp) -> Option<(Look, Self, Mark)> {
        limit.glance(self, cost, now)
    }

    /// As [`Balance::look`] on a balance that lies in a table under this very limit. `None` where looking would change
    /// it, or it is not packed.
    #[must_use]
    #[inline(never)]
    pub fn look(self, limit: &Limit, cost: u64, now: Timestamp) -> Option<Look> {
        limit.look_packed(self, cost, now)
    }

    /// As [`Balance::charge`], after [`look`](Self::look) at the same moment. `None` where the result cannot be packed.
    #[must_use]
    #[inline(never)]
    pub fn charge(self, limit: &Limit, cost: u64, now: Timestamp) -> Option<(Self, Mark)> {
        limit.charge_packed(self, cost, now)
    }
}

impl Balance {
    /// This balance without the figures of its limit. `None` if it is not of constant size, is in other figures, or is
    /// blocked: such a balance is stored unpacked.
    #[must_use]
    #[inline]
    pub fn to_small(&self, limit: &Limit) -> Option<Small> {
        // Also a block that is over: the slot has no bit for it, and there is no time here to compare it with.
        if self.blocked_until > Timestamp::EPOCH {
            return None;
        }
        limit.pack(&self.state)
    }

    /// The balance that [`to_small`](Self::to_small) packed, under the same limit.
    #[must_use]
    #[inline]
    pub fn from_small(small: Small, limit: &Limit) -> Self {
        Self { state: limit.unpack(small), blocked_until: Timestamp::EPOCH }
    }
}
