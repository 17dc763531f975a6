//! Prefetches memory: asks the processor for a value before it is used.

/// Prefetches the cache line of a value, so that work until its first use overlaps with the memory latency. Does nothing on
/// processors whose prefetch instruction has no safe function.
#[inline(always)]
pub(crate) fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    safe_arch::prefetch_t0(place);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
