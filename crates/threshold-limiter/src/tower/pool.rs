//! How many requests may wait at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Room for so many.
#[derive(Debug)]
pub(super) struct Pool {
    most: usize,
    waiting: AtomicUsize,
}

/// A place in a pool, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Place(Arc<Pool>);

impl Pool {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, waiting: AtomicUsize::new(0) })
    }

    /// A place, if there is one left.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Place> {
        let room = |waiting: usize| waiting.checked_add(1).filter(|waiting| *waiting <= self.most);
        self.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).ok()?;
        Some(Place(Arc::clone(self)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}
