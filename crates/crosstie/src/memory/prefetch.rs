//! Cache hints: requesting a cache line before it is needed.
//!
//! The instructions are declared as reads of memory: so the compiler keeps them behind the stores before them, and need not load again what
//! it has in registers.

/// Size of a cache line.
pub(crate) const CACHE_LINE: usize = 64;

/// Prefetches the cache line of `target` for writing. A hint: it only affects speed.
#[inline]
pub(crate) fn for_write<T>(target: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect that the program can see, and does not fault on any address.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) target, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _: *const T = target;
}

/// Prefetches the cache line of `target` for reading. A hint, as above.
#[inline]
pub(crate) fn for_read<T>(target: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        core::arch::asm!("prefetcht0 [{}]", in(reg) target, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _: *const T = target;
}

/// Whether the processor has the instruction of [`demote`].
pub(crate) fn can_demote() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::__cpuid_count;
        const FEATURES: u32 = 7;
        const CLDEMOTE: u32 = 1 << 25;
        __cpuid_count(0, 0).eax >= FEATURES && __cpuid_count(FEATURES, 0).ecx & CLDEMOTE != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Moves the cache line of `target` towards the caches that all cores share. A hint, as above.
#[inline]
pub(crate) fn demote<T>(target: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above; processors without this instruction execute it as a no-op.
    unsafe {
        core::arch::asm!("cldemote [{}]", in(reg) target, options(readonly, nostack, preserves_flags));
    }
}
