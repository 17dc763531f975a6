//! Locks and atomics: std's or, under `cfg(shuttle)`, those of a scheduler that tries many interleavings.

#[cfg(all(feature = "memory", not(shuttle)))]
pub(crate) use std::sync::atomic;
#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard};
#[cfg(all(feature = "memory", not(shuttle)))]
pub(crate) use std::thread::yield_now;

#[cfg(all(feature = "memory", shuttle))]
pub(crate) use shuttle::sync::atomic;
#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard};
#[cfg(all(feature = "memory", shuttle))]
pub(crate) use shuttle::thread::yield_now;
