//! Asking for memory before it is needed.

/// Asks for the memory of something and waits for nothing: what is done meanwhile costs no time. A hint, and no more than
/// that: where the processor's instruction for it has no safe name, it does nothing.
#[inline(always)]
pub(crate) fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    safe_arch::prefetch_t0(place);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
