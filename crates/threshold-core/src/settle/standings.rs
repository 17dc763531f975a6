//! Access to the standings of a bill's subjects while it is settled.

use arrayvec::ArrayVec;

use crate::ladder::Standing;
use crate::plan::MAX_SUBJECTS;

/// The standings of a bill's subjects, in the bill's order.
pub trait Standings {
    /// Returns all of them.
    fn all(&mut self) -> &mut [Standing];

    /// Returns whether the store has room to save `standing` for the `index`th subject.
    ///
    /// Called before a strike takes effect, because a strike that is lost would let the request through every time. After
    /// `true`, saving it in the same step must succeed. A peek saves nothing, so for a peek nothing may be evicted to
    /// make room.
    fn has_room(&mut self, index: usize, standing: &Standing) -> bool;
}

/// A slice always has room.
impl Standings for [Standing] {
    fn all(&mut self) -> &mut [Standing] {
        self
    }

    fn has_room(&mut self, _: usize, _: &Standing) -> bool {
        true
    }
}

/// Copies of standings for a peek. The originals still answer whether there would be room.
pub(super) struct StandingCopies<'s, S: ?Sized> {
    standings: ArrayVec<Standing, MAX_SUBJECTS>,
    originals: &'s mut S,
}

impl<'s, S: Standings + ?Sized> StandingCopies<'s, S> {
    pub(super) fn of(originals: &'s mut S) -> Self {
        // `take`, because collecting more than an `ArrayVec` holds panics, and the slice comes from a store.
        Self { standings: originals.all().iter().take(MAX_SUBJECTS).cloned().collect(), originals }
    }
}

impl<S: Standings + ?Sized> Standings for StandingCopies<'_, S> {
    fn all(&mut self) -> &mut [Standing] {
        &mut self.standings
    }

    fn has_room(&mut self, index: usize, standing: &Standing) -> bool {
        self.originals.has_room(index, standing)
    }
}
