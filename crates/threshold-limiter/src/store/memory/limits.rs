//! The limits that small balances are under, by number: a slot has no room for the figures themselves.

use std::sync::OnceLock;

use threshold_core::Limit;

use super::lock;
use crate::sync::Mutex;

/// The bits of a limit's number. A thousand limits are more than policies have; whoever makes up a new one for each key
/// finds its balances in the slab, and the search for a number stays short.
pub(super) const NUMBER_BITS: u32 = 10;

/// Limits by number, for all shards of a table. A number is given once and for good, so reading waits for nobody.
#[derive(Debug)]
pub(super) struct Limits {
    known: Box<[OnceLock<Limit>]>,
    /// Whoever holds this gives the next number.
    numbering: Mutex<()>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { known: (0..1u32 << NUMBER_BITS).map(|_| OnceLock::new()).collect(), numbering: Mutex::new(()) }
    }
}

impl Limits {
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.known)
    }

    #[inline]
    pub(super) fn get(&self, number: u64) -> Option<&Limit> {
        self.known.get(usize::try_from(number).ok()?)?.get()
    }

    /// The number of a limit, given to it now if it has none; `None` once there are too many.
    pub(super) fn number(&self, limit: &Limit) -> Option<u64> {
        self.find(limit).or_else(|| {
            let _numbering = lock(&self.numbering);
            // Somebody else may have come first.
            self.find(limit).or_else(|| {
                let free = self.known.iter().position(|known| known.get().is_none())?;
                self.known.get(free)?.set(*limit).ok()?;
                u64::try_from(free).ok()
            })
        })
    }

    fn find(&self, limit: &Limit) -> Option<u64> {
        let known = self.known.iter().map_while(OnceLock::get);
        known.zip(0u64..).find(|(known, _)| *known == limit).map(|(_, number)| number)
    }
}
