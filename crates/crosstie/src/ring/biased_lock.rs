//! A biased lock: almost free for its one regular user, expensive for everyone else.
//!
//! One thread polls a completion queue, or uses a connection, all the time; other threads touch it only when a queue pair is
//! created, reset or destroyed, or when a rail has failed. The regular user (the *owner*) pays two plain stores and one load per
//! use. The others pay for the heavy half of [`fence`], which replaces the fence that the owner leaves out. A device registers
//! for it when it is opened.
//!
//! ```text
//!  owner                                  others (one at a time, under a mutex)
//!  owner_inside = true                    other_inside = true
//!  light fence                            heavy fence
//!  other_inside? -> step back, wait       owner_inside? -> wait until it is false
//!  use the value                          use the value
//!  owner_inside = false                   other_inside = false
//! ```
//!
//! A [combining lock](super::combining_lock) cannot replace it, because there a thread that finds the lock taken leaves: one that must have the
//! value, for example to reset a queue pair, would have to try until it meets a gap between two uses of an owner that polls without a pause.

use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};
use std::sync::{Arc, PoisonError};

use super::cell::UnsafeCell;
use super::fence;

#[cfg(not(all(test, loom)))]
use {core::sync::atomic::AtomicBool, std::sync::Mutex, std::sync::MutexGuard, std::thread};
#[cfg(all(test, loom))]
use {loom::sync::Mutex, loom::sync::MutexGuard, loom::sync::atomic::AtomicBool, loom::thread};

/// The memory orderings and fences. Tests replace one of them.
pub(crate) trait Orders {
    /// Of the store when the owner leaves. Partner: the Acquire load in `BiasedLock::lock`.
    const OWNER_LEAVES: Ordering = Release;
    /// Of the store when another thread leaves. Partner: the Acquire load in `BiasedLock::lock_as_owner`.
    const OTHER_LEAVES: Ordering = Release;

    /// Between the owner's store and its load.
    #[inline]
    fn light_fence() {
        fence::light();
    }

    /// Between another thread's store and its load.
    fn heavy_fence() {
        fence::heavy();
    }
}

/// The orderings that ship.
#[derive(Debug)]
pub(crate) struct Real;

impl Orders for Real {}

/// Protects a `T` between one owner ([`BiasedLock::lock_as_owner`]) and rare others ([`BiasedLock::lock`]).
///
/// The flags are in front of the value, on one cache line with its first fields.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct BiasedLock<T, O = Real> {
    /// The owner has the lock, or is about to take it.
    owner_inside: AtomicBool,
    /// Another thread has the lock, or is about to take it.
    other_inside: AtomicBool,
    others: Mutex<()>,
    value: UnsafeCell<T>,
    orders: PhantomData<O>,
}

// SAFETY: `lock_as_owner` and `lock` exclude each other (see there), so one thread at a time accesses the value.
unsafe impl<T: Send, O> Sync for BiasedLock<T, O> {}

impl<T, O: Orders> BiasedLock<T, O> {
    pub(crate) fn new(value: T) -> BiasedLock<T, O> {
        BiasedLock {
            owner_inside: AtomicBool::new(false),
            other_inside: AtomicBool::new(false),
            others: Mutex::new(()),
            value: UnsafeCell::new(value),
            orders: PhantomData,
        }
    }

    /// Takes the lock as the owner.
    ///
    /// # Safety
    ///
    /// No two `OwnerGuard`s of one lock may exist at a time: there is one owner.
    #[inline]
    pub(crate) unsafe fn lock_as_owner(&self) -> OwnerGuard<'_, T, O> {
        loop {
            self.owner_inside.store(true, Relaxed);
            // This store and the load below must not change places; the partner is the heavy fence in `lock`.
            O::light_fence();
            // Acquire, partner: the Release store in `OtherGuard::drop`.
            if !self.other_inside.load(Acquire) {
                return OwnerGuard { lock: self, value: PhantomData };
            }
            self.wait_for_others();
        }
    }

    #[cold]
    fn wait_for_others(&self) {
        // Release, partner: the Acquire load in `lock`, which may see this store instead of the one of the owner's last use. Loom
        // cannot show that it is needed: its light fence is a full one.
        self.owner_inside.store(false, Release);
        drop(self.others.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes the lock as another thread. Waits for the owner, which has it for a short time only.
    pub(crate) fn lock(&self) -> OtherGuard<'_, T, O> {
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        self.other_inside.store(true, Relaxed);
        O::heavy_fence();
        // Acquire, partners: the Release stores in `OwnerGuard::drop` and `wait_for_others`.
        while self.owner_inside.load(Acquire) {
            thread::yield_now();
        }
        OtherGuard { lock: self, _others: others, value: PhantomData }
    }

    /// The address of the value. The caller has the lock; loom checks that nobody else accesses the value.
    #[inline]
    fn value(&self) -> *mut T {
        self.value.with_mut(|value| value)
    }
}

/// The owner's handle: there is one, and using it needs exclusive access, so it needs no `unsafe`.
#[derive(Debug)]
pub(crate) struct BiasedOwner<T> {
    lock: Arc<BiasedLock<T>>,
}

impl<T> BiasedOwner<T> {
    /// Makes a lock; returns the owner's handle, and the lock for the others, who must not call
    /// [`BiasedLock::lock_as_owner`].
    pub(crate) fn new(value: T) -> (BiasedOwner<T>, Arc<BiasedLock<T>>) {
        let lock = Arc::new(BiasedLock::new(value));
        (BiasedOwner { lock: lock.clone() }, lock)
    }

    /// Takes the lock.
    #[inline]
    pub(crate) fn lock(&mut self) -> OwnerGuard<'_, T> {
        // SAFETY: the guard borrows this handle exclusively, and there is one handle per lock.
        unsafe { self.lock.lock_as_owner() }
    }
}

/// The lock, taken by the owner.
pub(crate) struct OwnerGuard<'a, T, O: Orders = Real> {
    lock: &'a BiasedLock<T, O>,
    /// Threads may share the guard only if they may share the value.
    value: PhantomData<&'a mut T>,
}

impl<T, O: Orders> Drop for OwnerGuard<'_, T, O> {
    #[inline]
    fn drop(&mut self) {
        self.lock.owner_inside.store(false, O::OWNER_LEAVES);
    }
}

impl<T, O: Orders> Deref for OwnerGuard<'_, T, O> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `owner_inside` is set, and `other_inside` was seen clear after that, so `lock` does not return; the
        // caller of `lock_as_owner` promised to be the only owner.
        unsafe { &*self.lock.value() }
    }
}

impl<T, O: Orders> DerefMut for OwnerGuard<'_, T, O> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.lock.value() }
    }
}

/// The lock, taken by another thread than the owner.
pub(crate) struct OtherGuard<'a, T, O: Orders = Real> {
    lock: &'a BiasedLock<T, O>,
    _others: MutexGuard<'a, ()>,
    /// As in [`OwnerGuard`].
    value: PhantomData<&'a mut T>,
}

impl<T, O: Orders> Drop for OtherGuard<'_, T, O> {
    fn drop(&mut self) {
        // The mutex is unlocked after this, so an owner that waited for it finds the flag clear.
        self.lock.other_inside.store(false, O::OTHER_LEAVES);
    }
}

impl<T, O: Orders> Deref for OtherGuard<'_, T, O> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the mutex excludes other `OtherGuard`s; `other_inside` was set and `owner_inside` then seen clear, so
        // the owner is outside and waits when it tries to take the lock.
        unsafe { &*self.lock.value() }
    }
}

impl<T, O: Orders> DerefMut for OtherGuard<'_, T, O> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.lock.value() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Two plain counters are equal whenever the lock is free. If two threads are inside at once, they differ.
    #[test]
    fn owner_and_others_exclude_each_other() {
        fence::register().unwrap();
        let lock = BiasedLock::<_>::new((0u64, 0u64));
        let step = |pair: &mut (u64, u64)| {
            assert_eq!(pair.0, pair.1);
            pair.0 += 1;
            core::hint::black_box(&mut *pair);
            pair.1 += 1;
        };
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| (0..200).for_each(|_| step(&mut lock.lock())));
            }
            for _ in 0..100_000 {
                // SAFETY: only this thread is the owner, and it drops each guard before it takes the next.
                let mut guard = unsafe { lock.lock_as_owner() };
                step(&mut guard);
            }
        });
        assert_eq!(*lock.lock(), (100_400, 100_400));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    struct WeakOwnerLeaves;
    impl Orders for WeakOwnerLeaves {
        const OWNER_LEAVES: Ordering = Relaxed;
    }
    struct WeakOtherLeaves;
    impl Orders for WeakOtherLeaves {
        const OTHER_LEAVES: Ordering = Relaxed;
    }
    struct NoLightFence;
    impl Orders for NoLightFence {
        fn light_fence() {}
    }
    struct NoHeavyFence;
    impl Orders for NoHeavyFence {
        fn heavy_fence() {}
    }

    /// The owner and another thread add to a counter, so many times each. Loom fails when both access it at once, when one does not
    /// see what the other one wrote, and when one waits for ever.
    fn check<O: Orders + 'static>(owner: usize, other: usize) {
        loom::model(move || {
            let lock = Arc::new(BiasedLock::<usize, O>::new(0));
            let thread = thread::spawn({
                let lock = lock.clone();
                move || (0..other).for_each(|_| *lock.lock() += 1)
            });
            for _ in 0..owner {
                // SAFETY: only this thread is the owner, and it drops each guard before it takes the next.
                *unsafe { lock.lock_as_owner() } += 1;
            }
            thread.join().unwrap();
            assert_eq!(*lock.lock(), owner + other);
        });
    }

    #[test]
    fn loom_owner_and_another_thread_exclude_and_see_each_other() {
        check::<Real>(2, 1);
        check::<Real>(1, 2);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_twin_weak_leave_of_the_owner_is_caught() {
        check::<WeakOwnerLeaves>(1, 1);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_twin_weak_leave_of_another_thread_is_caught() {
        check::<WeakOtherLeaves>(1, 1);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_twin_without_light_fence_is_caught() {
        check::<NoLightFence>(1, 1);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_twin_without_heavy_fence_is_caught() {
        check::<NoHeavyFence>(1, 1);
    }
}
