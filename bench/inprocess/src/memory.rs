//! A global allocator that counts what the heap does, while asked to.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

/// The system's allocator, with counters.
pub struct Counting;

/// What happened on the heap during some work.
#[derive(Debug, Clone, Copy)]
pub struct Heap {
    /// Calls that asked for memory.
    pub allocations: u64,
    /// Bytes asked for and not given back.
    pub live: i64,
}

// Off while anything is timed: shared counters would charge two threads for each other's allocations.
static ON: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static LIVE: AtomicI64 = AtomicI64::new(0);

/// Does some work and says what it did to the heap. Not for two at once.
pub fn counted<T>(work: impl FnOnce() -> T) -> (T, Heap) {
    ALLOCATIONS.store(0, Ordering::SeqCst);
    LIVE.store(0, Ordering::SeqCst);
    ON.store(true, Ordering::SeqCst);
    let done = work();
    ON.store(false, Ordering::SeqCst);
    (done, Heap { allocations: ALLOCATIONS.load(Ordering::SeqCst), live: LIVE.load(Ordering::SeqCst) })
}

fn note(allocations: u64, bytes: usize, freed: usize) {
    if ON.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(allocations, Ordering::Relaxed);
        LIVE.fetch_add(bytes as i64 - freed as i64, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to `System` as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(1, layout.size(), 0);
        unsafe { System.alloc(layout) }
    }

    // Passed on as it is: zeroed pages that nobody touches must stay free.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(1, layout.size(), 0);
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(1, size, layout.size());
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note(0, 0, layout.size());
        unsafe { System.dealloc(pointer, layout) }
    }
}
