//! Locks and atomics: std's or, under `cfg(shuttle)`, those of a scheduler that tries many interleavings.

#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(shuttle))]
pub(crate) use std::thread::yield_now;

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};
#[cfg(shuttle)]
pub(crate) use shuttle::thread::yield_now;
