//! A flag with which other threads of the process end a wait.

use core::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use super::{Parker, any::sealed};
use crate::ring::fence;

/// A flag that wakes the thread that waits for it with [`park_any`](crate::park_any) or [`wait_any`](crate::wait_any). One thread
/// waits; any thread of the process sets it.
#[derive(Debug)]
pub struct WakeFlag {
    parker: Parker,
    is_set: AtomicBool,
}

impl WakeFlag {
    /// Creates a flag that is not set. Fails where the kernel has no `membarrier`.
    pub fn new() -> std::io::Result<WakeFlag> {
        fence::register()?;
        Ok(WakeFlag { parker: Parker::default(), is_set: AtomicBool::new(false) })
    }

    /// Sets the flag, and wakes the waiting thread. What the caller did before is visible to the thread that
    /// [takes](WakeFlag::take) the flag.
    pub fn set(&self) {
        // Release, partner: the Acquire swap in `take`.
        self.is_set.store(true, Release);
        self.parker.notify();
    }

    /// Clears the flag. Returns whether it was set.
    #[inline]
    pub fn take(&self) -> bool {
        // The load alone is enough nearly always, and does not take the cache line away from those who set the flag.
        // Acquire, partner: the Release store in `set`.
        self.is_set.load(Relaxed) && self.is_set.swap(false, Acquire)
    }
}

impl sealed::Waitable for WakeFlag {
    fn parker(&self) -> Option<&Parker> {
        Some(&self.parker)
    }

    fn is_expecting(&self) -> bool {
        true
    }

    fn is_ready(&self, _: bool) -> bool {
        self.is_set.load(Relaxed)
    }
}
