//! The identity of a lock, for a node that remembers the locks it has seen.

use super::{Attempt, AttemptKeys, Factor};
use crate::key::Digest;

/// The account, factor and kind of device that a lock refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockKey {
    account: Digest,
    factor: Factor,
    /// The number in the token of a device; 0 for attempts without a token of this account.
    device: u64,
}

impl LockKey {
    /// Returns the digest of the account.
    #[must_use]
    pub fn account(&self) -> Digest {
        self.account
    }
}

impl AttemptKeys {
    /// Returns the key of the lock that can refuse this attempt; `None` without an account.
    ///
    /// An attempt with a token has a key of its own: only the account can tell whether its device is known, and the lock of
    /// unknown devices must not lock out a known one.
    #[must_use]
    pub fn lock_key(&self) -> Option<LockKey> {
        let account = self.account?;
        // A token of another account would otherwise be a way around every lock.
        let device = self.device.filter(|device| device.account == account).map_or(0, |device| device.nonce);
        Some(LockKey { account, factor: self.factor, device })
    }
}

impl Attempt {
    /// Returns the key of the lock that the result of this attempt can cause; `None` without an account, and for a known device,
    /// whose next token is not known here.
    #[must_use]
    pub fn lock_key(&self) -> Option<LockKey> {
        let account = self.account.filter(|_| self.device == 0)?;
        Some(LockKey { account, factor: self.factor, device: 0 })
    }
}
