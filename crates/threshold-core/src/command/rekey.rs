//! Moving records from digests of an old secret to those of the current one, after a rotation.

use super::{Records, expire};
use crate::balance::Balance;
use crate::key::Digest;
use crate::limit::Limit;
use crate::time::Timestamp;

/// The records to move: pairs of a digest under the old secret and the digest of the same thing under the current one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyMoves {
    /// Balances: the old digest, the current one, and the limit.
    pub balances: Vec<(Digest, Digest, Limit)>,
    /// Standings: the old digest and the current one.
    pub standings: Vec<(Digest, Digest)>,
    /// Accounts: the old digest and the current one.
    pub accounts: Vec<(Digest, Digest)>,
}

/// The kind of a record that [`Records::rename`] moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MovedRecord {
    /// The standing of a subject.
    Standing,
    /// The login state of an account.
    Account,
}

impl KeyMoves {
    /// Returns whether there is nothing to move.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.balances.is_empty() && self.standings.is_empty() && self.accounts.is_empty()
    }
}

/// Moves each record to its new key, unless there is a record under the new key already: that one is more recent.
pub(super) fn rekey<R: Records>(rekeyed: &KeyMoves, records: &mut R, now: Timestamp) -> Result<(), R::Error> {
    // A reservation that has expired gives back to the old keys, so it has to end before they move.
    expire(records, now)?;
    // Accounts, balances, standings: the order in which the store in memory takes its locks.
    for (old, new) in &rekeyed.accounts {
        records.rename(MovedRecord::Account, *old, *new, now)?;
    }
    for (old, new, limit) in &rekeyed.balances {
        records.balances(&[(*old, *limit), (*new, *limit)], now, |balances| {
            if let [old, new] = balances
                && *new == Balance::default()
            {
                // Swapped and not copied: the old key keeps nothing, so no use is counted under both.
                std::mem::swap(old, new);
            }
        })?;
    }
    for (old, new) in &rekeyed.standings {
        records.rename(MovedRecord::Standing, *old, *new, now)?;
    }
    Ok(())
}
