//! The records of one request that move when the secret is rotated.

use super::Plan;
use crate::command::KeyMoves;

impl Plan<'_> {
    /// Adds the balances and standings of this plan to those that move from an old secret's digests to the current one's.
    /// `old` is a plan of the same request under the same policy, with digests of the old secret.
    pub fn add_moves_from(&self, old: &Plan<'_>, moves: &mut KeyMoves) {
        // Both plans meet the same rules in the same order. Where they do not, the two keys are not the same budget.
        for (old, new) in old.met.iter().zip(&self.met).filter(|(old, new)| old.index == new.index) {
            moves.balances.push((old.key, new.key, *new.limit));
        }
        // Subjects depend on the policy and the caller's names, which are the same in both plans, so they pair up by
        // position.
        for (old, new) in old.subjects.iter().zip(&self.subjects) {
            moves.standings.push((old.key, new.key));
        }
    }
}
