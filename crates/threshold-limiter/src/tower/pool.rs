//! A counting semaphore: bounds how many requests are delayed at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A bounded number of permits.
#[derive(Debug)]
pub(crate) struct Pool {
    max: usize,
    used: AtomicUsize,
}

/// A permit of a pool, returned when it is dropped.
#[derive(Debug)]
pub(super) struct Permit(Arc<Pool>);

impl Pool {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, used: AtomicUsize::new(0) })
    }

    /// Returns how many permits are taken.
    #[cfg(feature = "metrics")]
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes a permit, if one is left.
    pub(super) fn acquire(self: &Arc<Self>) -> Option<Permit> {
        let one_more = |used: usize| used.checked_add(1).filter(|used| *used <= self.max);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
        Some(Permit(Arc::clone(self)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::AcqRel);
    }
}
