//! After a rotation of the secret: what is stored under digests of the old secret moves to those of the present one.

use super::{Records, expire};
use crate::balance::Balance;
use crate::key::Digest;
use crate::limit::Limit;
use crate::plan::Plan;
use crate::time::Timestamp;

/// Digests under an old secret, each with the digest of the same thing under the present one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rekeyed {
    /// Of balances: the old digest, the present one, and the limit.
    pub balances: Vec<(Digest, Digest, Limit)>,
    /// Of standings.
    pub standings: Vec<(Digest, Digest)>,
    /// Of accounts.
    pub accounts: Vec<(Digest, Digest)>,
}

/// A kind of record that is renamed as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renamed {
    /// How it stands with a subject.
    Standing,
    /// What is known of an account.
    Account,
}

impl Rekeyed {
    /// Adds everything that a request is planned by. `old` and `new` are plans of the same request under the same policy,
    /// digested with the old key and with the new one.
    pub fn add(&mut self, old: &Plan<'_>, new: &Plan<'_>) {
        for (old, new) in old.met.iter().zip(&new.met).filter(|(old, new)| old.index == new.index) {
            self.balances.push((old.key, new.key, *new.limit));
        }
        for (old, new) in old.subjects.iter().zip(&new.subjects) {
            self.standings.push((old.key, new.key));
        }
    }

    /// Whether there is nothing to move.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.balances.is_empty() && self.standings.is_empty() && self.accounts.is_empty()
    }
}

/// Moves each record whose new key has none; what a new key already has stays.
pub(super) fn rekey<R: Records>(rekeyed: &Rekeyed, records: &mut R, now: Timestamp) -> Result<(), R::Error> {
    expire(records, now)?;
    // In the order in which a store in memory locks.
    for (old, new) in &rekeyed.accounts {
        records.rename(Renamed::Account, *old, *new, now)?;
    }
    for (old, new, limit) in &rekeyed.balances {
        records.balances(&[(*old, *limit), (*new, *limit)], now, |balances| {
            if let [old, new] = balances
                && *new == Balance::default()
            {
                std::mem::swap(old, new);
            }
        })?;
    }
    for (old, new) in &rekeyed.standings {
        records.rename(Renamed::Standing, *old, *new, now)?;
    }
    Ok(())
}
