//! A lock that costs its one regular visitor almost nothing.
//!
//! A completion queue is polled by one thread for ever and touched by others only when a queue pair on it is made, reset
//! or destroyed. Drivers clean the queue while they destroy, so the two must exclude each other; with the driver's own lock
//! switched off (single-threaded queues) that is our task. The poller pays two plain stores and one load per visit. The
//! others pay a `membarrier` system call, which stands in for the fence that the poller leaves out.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    compiler_fence, fence,
};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Guards a `T` between one owner ([`Gate::enter`]) and rare others ([`Gate::lock`]).
#[derive(Debug)]
pub(super) struct Gate<T> {
    /// The owner is, or is about to be, inside.
    inside: AtomicBool,
    /// Somebody else is, or is about to be, inside.
    closed: AtomicBool,
    others: Mutex<()>,
    barrier: Barrier,
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
            barrier: Barrier::of_this_process(),
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
            // This store and the load below must not change places; the partner is `Barrier::meet` in `lock`.
            match self.barrier {
                Barrier::Asymmetric => compiler_fence(SeqCst),
                Barrier::Fence => fence(SeqCst),
            }
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
        self.barrier.meet();
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

/// How the rare side makes the owner's store visible before it looks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Barrier {
    /// `membarrier` makes every running thread of the process pass a full fence.
    Asymmetric,
    /// The kernel does not offer it: both sides use a fence.
    Fence,
}

const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes three integers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

impl Barrier {
    fn of_this_process() -> Barrier {
        static CHOICE: OnceLock<Barrier> = OnceLock::new();
        *CHOICE.get_or_init(|| {
            if membarrier(REGISTER_PRIVATE_EXPEDITED) && membarrier(PRIVATE_EXPEDITED) {
                Barrier::Asymmetric
            } else {
                Barrier::Fence
            }
        })
    }

    fn meet(self) {
        fence(SeqCst);
        if self == Barrier::Asymmetric {
            // It worked when the choice was made; only a sandbox that was put on since could refuse it now.
            assert!(membarrier(PRIVATE_EXPEDITED), "membarrier worked before and is refused now");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two plain counters that are equal whenever the gate is free: any overlap of the two sides tears them apart.
    #[test]
    fn owner_and_others_exclude_each_other() {
        for barrier in [Barrier::of_this_process(), Barrier::Fence] {
            let mut gate = Gate::new((0u64, 0u64));
            gate.barrier = barrier;
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
}
