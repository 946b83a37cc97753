//! An asymmetric memory barrier: the frequent side pays nothing and uses [`light`], the rare side pays a system call and uses
//! [`heavy`].
//!
//! ```text
//!  frequent side        rare side
//!  store A              store B
//!  light()              heavy()
//!  load B               load A
//! ```
//!
//! This works as with two full fences: at least one side sees the store of the other. The heavy barrier is the system call
//! `membarrier`, which makes every running thread of every [registered](register) process execute a full fence.

#[cfg(not(all(test, loom)))]
use rustix::thread::{MembarrierCommand, membarrier};

/// Registers this process, so that [`heavy`] barriers of all processes reach it. Needed once, before the first [`light`]
/// barrier.
#[cfg(not(all(test, loom)))]
pub(crate) fn register() -> std::io::Result<()> {
    Ok(membarrier(MembarrierCommand::RegisterGlobalExpedited)?)
}

/// The barrier of the frequent side: keeps the compiler from moving the load before the store.
#[cfg(not(all(test, loom)))]
#[inline]
pub(crate) fn light() {
    core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst);
}

/// The barrier of the rare side.
#[cfg(not(all(test, loom)))]
pub(crate) fn heavy() {
    // `membarrier` worked when this process registered. Only a sandbox that was set up since can refuse both forms. To
    // continue without the barrier would corrupt memory now and then, so this panics.
    let passed =
        membarrier(MembarrierCommand::GlobalExpedited).or_else(|_| membarrier(MembarrierCommand::Global));
    assert!(
        passed.is_ok(),
        "membarrier was allowed when this process registered, and is refused now: allow the system call"
    );
}

// Loom has no asymmetric barrier: it gets full fences on both sides.

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
