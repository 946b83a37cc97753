//! A lock that costs its one regular visitor almost nothing.
//!
//! A completion queue is polled by one thread for ever and touched by others only when a queue pair on it is made, reset
//! or destroyed. Drivers clean the queue while they destroy, so the two must exclude each other; with the driver's own lock
//! switched off (single-threaded queues) that is our task. The poller pays two plain stores and one load per visit. The
//! others pay for the heavy half of [`fence`], which stands in for what the poller leaves out. The device registers for it
//! when it is opened.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ring::fence;

/// Guards a `T` between one owner ([`Gate::enter`]) and rare others ([`Gate::lock`]).
#[derive(Debug)]
pub(super) struct Gate<T> {
    /// The owner is, or is about to be, inside.
    inside: AtomicBool,
    /// Somebody else is, or is about to be, inside.
    closed: AtomicBool,
    others: Mutex<()>,
    value: UnsafeCell<T>,
}

// SAFETY: `enter` and `lock` exclude each other (see there), so the value is reached by one thread at a time.
unsafe impl<T: Send> Sync for Gate<T> {}

impl<T> Gate<T> {
    pub(super) fn new(value: T) -> Gate<T> {
        Gate {
            inside: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            others: Mutex::new(()),
            value: UnsafeCell::new(value),
        }
    }

    /// Lets the owner in.
    ///
    /// # Safety
    ///
    /// No two `Entered` of one gate may exist at a time: there is one owner.
    #[inline]
    pub(super) unsafe fn enter(&self) -> Entered<'_, T> {
        loop {
            self.inside.store(true, Relaxed);
            // This store and the load below must not change places; the partner is the heavy barrier in `lock`.
            fence::light();
            // Acquire: partner is the Release in `Locked::drop`.
            if !self.closed.load(Acquire) {
                return Entered { gate: self };
            }
            self.step_aside();
        }
    }

    #[cold]
    fn step_aside(&self) {
        // Release: partner is the Acquire in `lock`.
        self.inside.store(false, Release);
        drop(self.others.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Lets anybody in. Waits for the owner to leave, which takes as long as reading a few completions.
    pub(super) fn lock(&self) -> Locked<'_, T> {
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Relaxed);
        fence::heavy();
        // Acquire: partners are the Releases in `Entered::drop` and `step_aside`.
        while self.inside.load(Acquire) {
            std::thread::yield_now();
        }
        Locked { gate: self, _others: others }
    }
}

/// The owner's visit.
pub(super) struct Entered<'a, T> {
    gate: &'a Gate<T>,
}

impl<T> Drop for Entered<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Release: partner is the Acquire in `Gate::lock`.
        self.gate.inside.store(false, Release);
    }
}

impl<T> Deref for Entered<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: while `inside` is set and `closed` was seen clear after it, `lock` does not return; `enter`'s caller
        // promised to be the only owner.
        unsafe { &*self.gate.value.get() }
    }
}

impl<T> DerefMut for Entered<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.gate.value.get() }
    }
}

/// Another's visit.
pub(super) struct Locked<'a, T> {
    gate: &'a Gate<T>,
    _others: MutexGuard<'a, ()>,
}

impl<T> Drop for Locked<'_, T> {
    fn drop(&mut self) {
        // Release: partner is the Acquire in `Gate::enter`. The mutex opens after this, so a waiting owner finds it clear.
        self.gate.closed.store(false, Release);
    }
}

impl<T> Deref for Locked<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the mutex keeps other `Locked` out; `closed` was set and `inside` then seen clear, so the owner is out
        // and steps aside when it comes.
        unsafe { &*self.gate.value.get() }
    }
}

impl<T> DerefMut for Locked<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.gate.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two plain counters that are equal whenever the gate is free: any overlap of the two sides tears them apart.
    #[test]
    fn owner_and_others_exclude_each_other() {
        fence::register().unwrap();
        let gate = Gate::new((0u64, 0u64));
        let step = |pair: &mut (u64, u64)| {
            assert_eq!(pair.0, pair.1);
            pair.0 += 1;
            core::hint::black_box(&mut *pair);
            pair.1 += 1;
        };
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| (0..200).for_each(|_| step(&mut gate.lock())));
            }
            for _ in 0..100_000 {
                // SAFETY: this thread alone enters, one visit after the other.
                let mut visit = unsafe { gate.enter() };
                step(&mut visit);
            }
        });
        assert_eq!(gate.value.into_inner(), (100_400, 100_400));
    }
}
