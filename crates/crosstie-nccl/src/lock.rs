//! A lock for objects that nearly always one thread uses.
//!
//! Taking it is one atomic instruction, releasing it is a store. The release of [`std::sync::Mutex`] is an atomic instruction, too,
//! which waits for all earlier stores of the thread, among them those into cache lines that the peer has: that took longer than the
//! rest of a call. A thread that finds the lock held yields and then sleeps; nobody wakes it.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

/// How often a thread that waits looks again before it begins to sleep.
const YIELDS: u32 = 100;
const SLEEP: Duration = Duration::from_micros(50);

/// Protects a `T`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Lock<T> {
    is_held: AtomicBool,
    /// A thread panicked while it held the lock.
    is_poisoned: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: a guard exists only while `is_held` is set by it, so one thread at a time accesses the value.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Lock<T> {
        Lock {
            is_held: AtomicBool::new(false),
            is_poisoned: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock. Waits while another thread has it.
    #[inline]
    pub(crate) fn lock(&self) -> LockGuard<'_, T> {
        // Acquire, partner: the Release store in `LockGuard::drop`.
        if self.is_held.swap(true, Acquire) {
            self.wait();
        }
        LockGuard { lock: self }
    }

    #[cold]
    fn wait(&self) {
        for tries in 0u32.. {
            if tries < YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(SLEEP);
            }
            // Acquire, partner: as above.
            if !self.is_held.load(Relaxed) && !self.is_held.swap(true, Acquire) {
                return;
            }
        }
    }
}

/// The lock, held.
pub(crate) struct LockGuard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> LockGuard<'_, T> {
    /// Whether a thread panicked while it held the lock, so that the value may be in any state.
    #[inline]
    pub(crate) fn is_poisoned(&self) -> bool {
        self.lock.is_poisoned.load(Relaxed)
    }

    /// The value is in a known state again.
    pub(crate) fn clear_poison(&self) {
        self.lock.is_poisoned.store(false, Relaxed);
    }
}

impl<T> Drop for LockGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.lock.is_poisoned.store(true, Relaxed);
        }
        // Release, partner: the Acquire swaps in `Lock`.
        self.lock.is_held.store(false, Release);
    }
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard has set `is_held`, so there is no other guard, and nobody else accesses the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `self` is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn threads_exclude_each_other() {
        static COUNT: Lock<u64> = Lock::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..20_000).for_each(|_| *COUNT.lock() += 1));
            }
        });
        assert_eq!(*COUNT.lock(), 80_000);
    }

    #[test]
    fn lock_is_free_and_poisoned_after_a_panic() {
        let lock = Lock::new(1);
        assert!(!lock.lock().is_poisoned());
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut value = lock.lock();
            *value = 2;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        let value = lock.lock();
        assert!(value.is_poisoned() && *value == 2);
        value.clear_poison();
        drop(value);
        assert!(!lock.lock().is_poisoned());
    }
}
