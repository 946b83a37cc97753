//! Asking for a cache line before it is needed.

/// Brings the line of `target` here for writing. A hint: it changes nothing but time.
#[inline(always)]
pub(crate) fn for_write<T>(target: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads and writes nothing that the program can see, and faults on no address.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) target, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _: *const T = target;
}

/// Brings the line of `target` here for reading. A hint, as above.
#[inline(always)]
pub(crate) fn for_read<T>(target: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        core::arch::asm!("prefetcht0 [{}]", in(reg) target, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _: *const T = target;
}

/// Pushes the line of `target` towards the caches that other cores share. A hint, as above.
#[inline(always)]
pub(crate) fn demote<T>(target: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above; processors that do not know it take it for no operation.
    unsafe {
        core::arch::asm!("cldemote [{}]", in(reg) target, options(nostack, preserves_flags));
    }
}
