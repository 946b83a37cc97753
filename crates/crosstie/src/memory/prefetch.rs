//! Asking for a cache line before it is needed.

/// Brings the line of `target` here for writing. A hint: it changes nothing but time.
#[inline(always)]
pub(crate) fn for_write<T>(target: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads and writes nothing that the program can see, and faults on no address.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) target, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    core::hint::black_box(target);
}
