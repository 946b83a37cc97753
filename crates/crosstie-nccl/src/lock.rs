//! A lock for objects that nearly always one thread uses.
//!
//! Taking it is one atomic instruction, releasing it is a store. The release of [`std::sync::Mutex`] is an atomic instruction, too,
//! which waits for all earlier stores of the thread, among them those into cache lines that the peer has: that took longer than the
//! rest of a call. A thread that finds the lock held yields and then sleeps; nobody wakes it.

use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};
use std::time::Duration;

#[cfg(not(all(test, loom)))]
use {core::cell::UnsafeCell, core::sync::atomic::AtomicBool, std::thread};
#[cfg(all(test, loom))]
use {loom::cell::UnsafeCell, loom::sync::atomic::AtomicBool, loom::thread};

/// How often a thread that waits looks again before it begins to sleep.
const YIELDS: u32 = 100;
const SLEEP: Duration = Duration::from_micros(50);

/// The memory orderings. Tests replace one of them.
pub(crate) trait Orders {
    /// Of the exchange that takes a lock that was free. Partner: the Release store in `LockGuard::drop`.
    const LOCK: Ordering = Acquire;
    /// Of the exchange that takes the lock after a wait. Partner: as above.
    const LOCK_AFTER_WAIT: Ordering = Acquire;
    /// Of the store that releases the lock. Partners: the Acquire exchanges in `Lock`.
    const UNLOCK: Ordering = Release;
}

/// The orderings that ship.
#[derive(Debug)]
pub(crate) struct Real;

impl Orders for Real {}

/// Protects a `T`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Lock<T, O = Real> {
    is_held: AtomicBool,
    /// A thread panicked while it held the lock. Ordered by `is_held`, so Relaxed is enough.
    is_poisoned: AtomicBool,
    value: UnsafeCell<T>,
    orders: PhantomData<O>,
}

// SAFETY: a guard exists only while `is_held` is set by it, so one thread at a time accesses the value.
unsafe impl<T: Send, O> Sync for Lock<T, O> {}

impl<T, O: Orders> Lock<T, O> {
    pub(crate) fn new(value: T) -> Lock<T, O> {
        Lock {
            is_held: AtomicBool::new(false),
            is_poisoned: AtomicBool::new(false),
            value: UnsafeCell::new(value),
            orders: PhantomData,
        }
    }

    /// Takes the lock. Waits while another thread has it.
    #[inline]
    pub(crate) fn lock(&self) -> LockGuard<'_, T, O> {
        if !self.try_take(O::LOCK) {
            self.wait();
        }
        LockGuard { lock: self, value: PhantomData }
    }

    /// Not a swap: loom lets the store that releases the lock change places with a swap that finds it held.
    #[inline(always)]
    fn try_take(&self, order: Ordering) -> bool {
        self.is_held.compare_exchange(false, true, order, Relaxed).is_ok()
    }

    #[cold]
    fn wait(&self) {
        for tries in 0u32.. {
            // Loom has no sleep, and no time that passes.
            if tries < YIELDS || cfg!(all(test, loom)) {
                thread::yield_now();
            } else {
                std::thread::sleep(SLEEP);
            }
            if !self.is_held.load(Relaxed) && self.try_take(O::LOCK_AFTER_WAIT) {
                return;
            }
        }
    }

    /// The address of the value. The caller holds the lock; loom checks that nobody else accesses the value.
    #[inline]
    fn value(&self) -> *mut T {
        #[cfg(not(all(test, loom)))]
        return self.value.get();
        #[cfg(all(test, loom))]
        self.value.with_mut(|value| value)
    }
}

/// The lock, held.
pub(crate) struct LockGuard<'a, T, O: Orders = Real> {
    lock: &'a Lock<T, O>,
    /// Threads may share the guard only if they may share the value.
    value: PhantomData<&'a mut T>,
}

impl<T, O: Orders> LockGuard<'_, T, O> {
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

impl<T, O: Orders> Drop for LockGuard<'_, T, O> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.lock.is_poisoned.store(true, Relaxed);
        }
        self.lock.is_held.store(false, O::UNLOCK);
    }
}

impl<T, O: Orders> Deref for LockGuard<'_, T, O> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard has set `is_held`, so there is no other guard, and nobody else accesses the value.
        unsafe { &*self.lock.value() }
    }
}

impl<T, O: Orders> DerefMut for LockGuard<'_, T, O> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `self` is borrowed exclusively.
        unsafe { &mut *self.lock.value() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn threads_exclude_each_other() {
        let count = Lock::<u64>::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..20_000).for_each(|_| *count.lock() += 1));
            }
        });
        assert_eq!(*count.lock(), 80_000);
    }

    #[test]
    fn lock_is_free_and_poisoned_after_a_panic() {
        let lock = Lock::<u32>::new(1);
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

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    struct WeakLock;
    impl Orders for WeakLock {
        const LOCK: Ordering = Relaxed;
    }
    struct WeakLockAfterWait;
    impl Orders for WeakLockAfterWait {
        const LOCK_AFTER_WAIT: Ordering = Relaxed;
    }
    struct WeakUnlock;
    impl Orders for WeakUnlock {
        const UNLOCK: Ordering = Relaxed;
    }

    /// Two threads add to a counter, `rounds` times each. Loom fails when both access it at once, when one does not see what the other
    /// one wrote before it released the lock, and when one waits for ever. `lock` takes the lock, `unlock` releases it.
    ///
    /// With three threads loom does not end: it lets two wait for the third one, in turns, and never runs that.
    fn check<O: Orders + 'static>(
        rounds: usize,
        lock: fn(&Lock<usize, O>) -> LockGuard<'_, usize, O>,
        unlock: fn(LockGuard<'_, usize, O>),
    ) {
        loom::model(move || {
            let count = Arc::new(Lock::<usize, O>::new(0));
            let run = || {
                let count = count.clone();
                move || {
                    for _ in 0..rounds {
                        let mut guard = lock(&count);
                        *guard += 1;
                        unlock(guard);
                    }
                }
            };
            let other = thread::spawn(run());
            run()();
            other.join().unwrap();
            assert_eq!(*count.lock(), 2 * rounds);
        });
    }

    #[test]
    fn loom_threads_exclude_and_see_each_other() {
        check::<Real>(3, Lock::lock, |guard| drop(guard));
    }

    /// As two threads that waited for a third one.
    #[test]
    fn loom_threads_that_waited_exclude_and_see_each_other() {
        fn lock_after_wait(lock: &Lock<usize>) -> LockGuard<'_, usize> {
            lock.wait();
            LockGuard { lock, value: PhantomData }
        }
        check::<Real>(2, lock_after_wait, |guard| drop(guard));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_twin_weak_lock_is_caught() {
        check::<WeakLock>(1, Lock::lock, |guard| drop(guard));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_twin_weak_lock_after_wait_is_caught() {
        check::<WeakLockAfterWait>(1, Lock::lock, |guard| drop(guard));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_twin_weak_unlock_is_caught() {
        check::<WeakUnlock>(1, Lock::lock, |guard| drop(guard));
    }

    #[test]
    #[should_panic(expected = "maximum number of branches")]
    fn loom_twin_without_unlock_is_caught() {
        check::<Real>(1, Lock::lock, |guard| core::mem::forget(guard));
    }
}
