//! A barrier that costs one side nothing: the frequent side issues a [`light`] one, the rare side a [`heavy`] one.
//!
//! Store-then-load on both sides, with a light barrier between on one and a heavy one on the other, works as with two full
//! fences: at least one of the two sees the other's store. The heavy one is the system call `membarrier`, which makes
//! every running thread of every process that [registered](register) pass a full fence.

#[cfg(not(all(test, loom)))]
use rustix::thread::{MembarrierCommand, membarrier};

/// Makes this process one that [`heavy`] barriers reach. Needed once, before the first [`light`] one.
#[cfg(not(all(test, loom)))]
pub(crate) fn register() -> std::io::Result<()> {
    Ok(membarrier(MembarrierCommand::RegisterGlobalExpedited)?)
}

/// The frequent side's barrier: keeps the compiler from moving the load before the store.
#[cfg(not(all(test, loom)))]
#[inline]
pub(crate) fn light() {
    core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst);
}

/// The rare side's barrier.
#[cfg(not(all(test, loom)))]
pub(crate) fn heavy() {
    // It worked when this process registered; only a sandbox that was put on since could refuse both forms, and to go on
    // without the barrier would be to corrupt memory now and then.
    let passed =
        membarrier(MembarrierCommand::GlobalExpedited).or_else(|_| membarrier(MembarrierCommand::Global));
    assert!(passed.is_ok(), "membarrier worked before and is refused now");
}

// Loom knows no such pair: it gets full fences on both sides.

#[cfg(all(test, loom))]
pub(crate) fn register() -> std::io::Result<()> {
    Ok(())
}

#[cfg(all(test, loom))]
pub(crate) fn light() {
    loom::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
}

#[cfg(all(test, loom))]
pub(crate) fn heavy() {
    loom::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
}
