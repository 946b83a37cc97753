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

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::ring::fence;

/// Protects a `T` between one owner ([`BiasedLock::lock_as_owner`]) and rare others ([`BiasedLock::lock`]).
///
/// The flags are in front of the value, on one cache line with its first fields.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct BiasedLock<T> {
    /// The owner has the lock, or is about to take it.
    owner_inside: AtomicBool,
    /// Another thread has the lock, or is about to take it.
    other_inside: AtomicBool,
    others: Mutex<()>,
    value: UnsafeCell<T>,
}

// SAFETY: `lock_as_owner` and `lock` exclude each other (see there), so one thread at a time accesses the value.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

impl<T> BiasedLock<T> {
    pub(crate) fn new(value: T) -> BiasedLock<T> {
        BiasedLock {
            owner_inside: AtomicBool::new(false),
            other_inside: AtomicBool::new(false),
            others: Mutex::new(()),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock as the owner.
    ///
    /// # Safety
    ///
    /// No two `OwnerGuard`s of one lock may exist at a time: there is one owner.
    #[inline]
    pub(crate) unsafe fn lock_as_owner(&self) -> OwnerGuard<'_, T> {
        loop {
            self.owner_inside.store(true, Relaxed);
            // This store and the load below must not change places; the partner is the heavy fence in `lock`.
            fence::light();
            // Acquire, partner: the Release store in `OtherGuard::drop`.
            if !self.other_inside.load(Acquire) {
                return OwnerGuard { lock: self };
            }
            self.wait_for_others();
        }
    }

    #[cold]
    fn wait_for_others(&self) {
        // Release, partner: the Acquire load in `lock`.
        self.owner_inside.store(false, Release);
        drop(self.others.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes the lock as another thread. Waits for the owner, which holds it only while it reads a few completions.
    pub(crate) fn lock(&self) -> OtherGuard<'_, T> {
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        self.other_inside.store(true, Relaxed);
        fence::heavy();
        // Acquire, partners: the Release stores in `OwnerGuard::drop` and `wait_for_others`.
        while self.owner_inside.load(Acquire) {
            std::thread::yield_now();
        }
        OtherGuard { lock: self, _others: others }
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

/// The lock, held by the owner.
pub(crate) struct OwnerGuard<'a, T> {
    lock: &'a BiasedLock<T>,
}

impl<T> Drop for OwnerGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Release, partner: the Acquire load in `BiasedLock::lock`.
        self.lock.owner_inside.store(false, Release);
    }
}

impl<T> Deref for OwnerGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `owner_inside` is set, and `other_inside` was seen clear after that, so `lock` does not return; the
        // caller of `lock_as_owner` promised to be the only owner.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for OwnerGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.lock.value.get() }
    }
}

/// The lock, held by another thread than the owner.
pub(crate) struct OtherGuard<'a, T> {
    lock: &'a BiasedLock<T>,
    _others: MutexGuard<'a, ()>,
}

impl<T> Drop for OtherGuard<'_, T> {
    fn drop(&mut self) {
        // Release, partner: the Acquire load in `BiasedLock::lock_as_owner`. The mutex is unlocked after this, so an owner
        // that waited for it finds the flag clear.
        self.lock.other_inside.store(false, Release);
    }
}

impl<T> Deref for OtherGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the mutex excludes other `OtherGuard`s; `other_inside` was set and `owner_inside` then seen clear, so
        // the owner is outside and waits when it tries to take the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for OtherGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.lock.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two plain counters are equal whenever the lock is free. If two threads are inside at once, they differ.
    #[test]
    fn owner_and_others_exclude_each_other() {
        fence::register().unwrap();
        let lock = BiasedLock::new((0u64, 0u64));
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
        assert_eq!(lock.value.into_inner(), (100_400, 100_400));
    }
}
