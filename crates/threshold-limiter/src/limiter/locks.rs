//! Locks of accounts that this node has seen. They hold while the store is away, whatever `on_store_error` says.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use threshold_core::lockout::{Attempt, AttemptKeys, AttemptOutcome, LockKey, ResultOutcome};
use threshold_core::{Digest, Timestamp};

use crate::sync::{Mutex, MutexGuard};

/// The largest number of locks. An entry takes less than 100 bytes.
const MAX_SEEN: usize = 1 << 16;

/// The locks that the store has answered with, and their ends by the store's clock.
#[derive(Debug, Default)]
pub(super) struct SeenLocks {
    /// [`Timestamp::MAX`] at the ceiling, which only a reset ends.
    seen: Mutex<HashMap<LockKey, Timestamp>>,
    /// Whether there ever was one, so that no lock is taken where no account was locked.
    is_used: AtomicBool,
}

impl SeenLocks {
    /// Takes over the store's answer to an attempt.
    pub(super) fn see_attempt(&self, tried: &AttemptKeys, outcome: &AttemptOutcome, now: Timestamp) {
        match outcome {
            AttemptOutcome::Locked { until } => self.set(tried.lock_key(), until.unwrap_or(Timestamp::MAX), now),
            // The lock is over, or was lifted on another node.
            AttemptOutcome::Allowed(_) => self.set(tried.lock_key(), Timestamp::EPOCH, now),
            // Refused by its address, before its account was asked.
            AttemptOutcome::TooMany { .. } => {}
        }
    }

    /// Takes over the store's answer to a result.
    pub(super) fn see_result(&self, attempt: &Attempt, outcome: &ResultOutcome, now: Timestamp) {
        self.set(attempt.lock_key(), outcome.locked_until.unwrap_or(Timestamp::EPOCH), now);
    }

    fn set(&self, key: Option<LockKey>, until: Timestamp, now: Timestamp) {
        let Some(key) = key else { return };
        let is_locked = until > now;
        if !is_locked && !self.is_used.load(Ordering::Relaxed) {
            return;
        }
        self.is_used.store(true, Ordering::Relaxed);
        let mut seen = self.seen();
        seen.remove(&key);
        if is_locked && seen.len() >= MAX_SEEN {
            seen.retain(|_, until| *until > now);
        }
        // Without room the account is decided by `on_store_error` like any other.
        if is_locked && seen.len() < MAX_SEEN {
            seen.insert(key, until);
        }
    }

    /// Returns the refusal of an attempt by a lock that was seen; `None` if none is in force.
    pub(super) fn refuse(&self, tried: &AttemptKeys, now: Timestamp) -> Option<AttemptOutcome> {
        if !self.is_used.load(Ordering::Relaxed) {
            return None;
        }
        let until = self.seen().get(&tried.lock_key()?).copied().filter(|until| *until > now)?;
        Some(AttemptOutcome::Locked { until: until.unless_never() })
    }

    /// Drops the locks of an account that was reset or pardoned.
    pub(super) fn forget(&self, account: Digest) {
        if self.is_used.load(Ordering::Relaxed) {
            self.seen().retain(|key, _| key.account() != account);
        }
    }

    fn seen(&self) -> MutexGuard<'_, HashMap<LockKey, Timestamp>> {
        // A poisoned lock is safe to use: an entry is inserted in one step.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use threshold_core::lockout::{Factor, Login, LoginRequest};
    use threshold_core::{Balance, Policy, Secret, Secrets, Span, TraceId};

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn keys(account: u128) -> AttemptKeys {
        let secrets = Secrets::new(Secret::new(&[9; 32]).unwrap());
        let policy = Policy::parse("[login]", &|_| None).unwrap();
        let tried = LoginRequest { account: Some("any"), ..LoginRequest::default() };
        let tried = tried.attempt_keys(&policy, &secrets, TraceId::from_u128(account));
        AttemptKeys { account: Some(Digest::from_u128(account)), ..tried }
    }

    fn locked(seconds: u64) -> AttemptOutcome {
        AttemptOutcome::Locked { until: Some(NOW.plus(Span::from_secs(seconds))) }
    }

    #[test]
    fn a_lock_holds_until_its_end_or_until_the_store_allows_an_attempt() {
        let seen = SeenLocks::default();
        let ada = keys(1);
        assert_eq!(seen.refuse(&ada, NOW), None);
        seen.see_attempt(&ada, &locked(60), NOW);
        assert_eq!(seen.refuse(&ada, NOW.plus(Span::from_secs(59))), Some(locked(60)));
        assert_eq!(seen.refuse(&ada, NOW.plus(Span::MINUTE)), None);
        let other_factor = AttemptKeys { factor: Factor::named(Some("totp")), ..ada };
        assert_eq!((seen.refuse(&keys(2), NOW), seen.refuse(&other_factor, NOW)), (None, None));
        let allowed = Login::default().attempt(&ada, None, &mut Balance::default(), NOW);
        assert!(matches!(allowed, AttemptOutcome::Allowed(_)));
        seen.see_attempt(&ada, &allowed, NOW);
        assert_eq!(seen.refuse(&ada, NOW), None);
        // At the ceiling a lock has no end.
        seen.see_attempt(&ada, &AttemptOutcome::Locked { until: None }, NOW);
        assert_eq!(seen.refuse(&ada, NOW.plus(Span::DAY)), Some(AttemptOutcome::Locked { until: None }));
        seen.forget(Digest::from_u128(1));
        assert_eq!(seen.refuse(&ada, NOW), None);
    }

    #[test]
    fn a_full_table_keeps_what_it_has_until_it_is_over() {
        let seen = SeenLocks::default();
        let (first, late) = (keys(1), keys(u128::MAX));
        let template = keys(2);
        seen.see_attempt(&first, &locked(60), NOW);
        for number in 2..=MAX_SEEN as u128 {
            let other = AttemptKeys { account: Some(Digest::from_u128(number)), ..template };
            seen.see_attempt(&other, &locked(60), NOW);
        }
        seen.see_attempt(&late, &locked(60), NOW);
        assert_eq!((seen.refuse(&first, NOW), seen.refuse(&late, NOW)), (Some(locked(60)), None));
        assert_eq!(seen.seen().len(), MAX_SEEN);
        let later = NOW.plus(Span::MINUTE);
        seen.see_attempt(&late, &locked(120), later);
        assert_eq!(seen.refuse(&late, later), Some(locked(120)), "the others are over");
    }
}
