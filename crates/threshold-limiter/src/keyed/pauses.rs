//! The keys that are denied until a time, whatever fits.

use std::collections::HashMap;
use std::sync::PoisonError;

use threshold_core::{Digest, Timestamp};

use crate::store::StoreError;
use crate::sync::Mutex;
use crate::sync::atomic::AtomicU64;
use crate::sync::atomic::Ordering::{Acquire, Release};

/// How many keys may be paused at once: callers pause the few providers that they call.
const MAX: usize = 10_000;

/// Keys, each with the end of its pause.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    /// When the last of them ends, in microseconds. So a check of a limiter without pauses takes no lock.
    last: AtomicU64,
    ends: Mutex<HashMap<Digest, Timestamp>>,
}

impl Pauses {
    /// Returns whether any key may be paused now.
    #[inline(always)]
    pub(super) fn may_hold(&self, now: Timestamp) -> bool {
        now.micros() < self.last.load(Acquire)
    }

    /// Returns until when this key is paused; `None` if it is not.
    #[cold]
    #[inline(never)]
    pub(super) fn until(&self, key: Digest, now: Timestamp) -> Option<Timestamp> {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.get(&key).copied().filter(|until| *until > now)
    }

    /// Pauses a key. Never shortens an earlier pause.
    pub(super) fn add(&self, key: Digest, until: Timestamp, now: Timestamp) -> Result<(), StoreError> {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        if ends.len() >= MAX && !ends.contains_key(&key) {
            ends.retain(|_, until| *until > now);
            if ends.len() >= MAX {
                return Err(StoreError::Full);
            }
        }
        let end = ends.entry(key).or_insert(until);
        *end = (*end).max(until);
        self.last.store(self.last.load(Acquire).max(end.micros()), Release);
        Ok(())
    }
}
