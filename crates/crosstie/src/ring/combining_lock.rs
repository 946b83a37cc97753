//! A combining lock: a thread that finds it taken leaves, and the thread that has it does the work of both.
//!
//! ```text
//!   thread with work                        holder
//!   publish the work                        do the work that is published
//!   locked?  yes: set CALLED, leave         unlock: CALLED?  yes: clear it, keep the lock, do the work again
//!            no:  take the lock                              no:  the lock is free
//! ```
//!
//! **Promises.** One thread at a time accesses the value. Work that was published before [`lock_or_call`](CombiningLock::lock_or_call) is
//! seen by its caller, who has the lock then, or by a holder that does not unlock without having looked again. To take the lock and to
//! unlock it is one compare-and-swap each: both flags are in one word, so no fence is needed between the unlock and the look.

use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::Ordering::{self, Acquire, Relaxed};

use sync::{AtomicU32, UnsafeCell};

#[cfg(not(all(test, loom)))]
mod sync {
    pub(super) use core::sync::atomic::AtomicU32;

    /// The real cell, with the interface of loom's.
    #[derive(Debug)]
    pub(super) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(super) fn new(value: T) -> Self {
            UnsafeCell(core::cell::UnsafeCell::new(value))
        }

        #[inline(always)]
        pub(super) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        #[inline(always)]
        pub(super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(all(test, loom))]
mod sync {
    pub(super) use loom::cell::UnsafeCell;
    pub(super) use loom::sync::atomic::AtomicU32;
}

/// A thread has the lock.
const LOCKED: u32 = 1;
/// A thread has published work while another one had the lock. Set only together with LOCKED.
const CALLED: u32 = 2;

/// The memory orderings. Tests replace one of them.
pub(crate) trait Orders {
    /// Of the exchange that unlocks. Partner: the Acquire exchanges that lock.
    const UNLOCK: Ordering = Ordering::Release;
    /// Of the exchange that sets CALLED: publishes the work. Partner: the Acquire swap in `unlock`.
    const CALL: Ordering = Ordering::Release;
}

/// The orderings that ship.
#[derive(Debug)]
pub(crate) struct Real;

impl Orders for Real {}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct CombiningLock<T, O = Real> {
    state: AtomicU32,
    value: UnsafeCell<T>,
    orders: PhantomData<O>,
}

// SAFETY: a guard exists only while LOCKED is set by its thread, so one thread at a time accesses the value; it moves between threads,
// which needs `T: Send`.
unsafe impl<T: Send, O> Sync for CombiningLock<T, O> {}

impl<T, O: Orders> CombiningLock<T, O> {
    pub(crate) fn new(value: T) -> CombiningLock<T, O> {
        CombiningLock { state: AtomicU32::new(0), value: UnsafeCell::new(value), orders: PhantomData }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T, O>> {
        // Acquire, partner: `Orders::UNLOCK`.
        self.state.compare_exchange(0, LOCKED, Acquire, Relaxed).ok()?;
        Some(Guard { lock: self })
    }

    /// Takes the lock if it is free; else lets its holder look for work once more. To be called after publishing work.
    #[inline]
    pub(crate) fn lock_or_call(&self) -> Option<Guard<'_, T, O>> {
        let mut state = self.state.load(Relaxed);
        loop {
            let (new, order) =
                if state & LOCKED == 0 { (LOCKED, Acquire) } else { (state | CALLED, O::CALL) };
            // Also when CALLED is set already: the exchange publishes the work of this thread.
            match self.state.compare_exchange_weak(state, new, order, Relaxed) {
                Ok(_) if state & LOCKED == 0 => return Some(Guard { lock: self }),
                Ok(_) => return None,
                Err(now) => state = now,
            }
        }
    }
}

/// The lock, taken.
#[derive(Debug)]
pub(crate) struct Guard<'a, T, O: Orders = Real> {
    lock: &'a CombiningLock<T, O>,
}

impl<T, O: Orders> Guard<'_, T, O> {
    /// Unlocks. If work was published meanwhile, hands the guard back instead: the caller looks for the work, and unlocks again.
    #[inline]
    #[must_use = "work was published: look for it, and unlock again"]
    pub(crate) fn unlock(self) -> Option<Self> {
        match self.lock.state.compare_exchange(LOCKED, 0, O::UNLOCK, Relaxed) {
            Ok(_) => {
                core::mem::forget(self);
                None
            }
            Err(_) => {
                // Acquire, partner: `Orders::CALL`, of all calls so far: each one continues the release sequence of the one before.
                self.lock.state.swap(LOCKED, Acquire);
                Some(self)
            }
        }
    }
}

impl<T, O: Orders> Drop for Guard<'_, T, O> {
    /// Unlocks without a look for published work: a panic has interrupted the holder. The next holder finds it.
    #[cold]
    fn drop(&mut self) {
        self.lock.state.swap(0, O::UNLOCK);
    }
}

impl<T, O: Orders> Deref for Guard<'_, T, O> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard has the lock, so no other thread accesses the value; its user borrows the guard.
        self.lock.value.with(|at| unsafe { &*at })
    }
}

impl<T, O: Orders> DerefMut for Guard<'_, T, O> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the guard is borrowed exclusively.
        self.lock.value.with_mut(|at| unsafe { &mut *at })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_call_keeps_the_holder_until_it_has_looked() {
        let lock = CombiningLock::<_>::new(0);
        let mut guard = lock.try_lock().unwrap();
        assert!(lock.try_lock().is_none() && lock.lock_or_call().is_none() && lock.lock_or_call().is_none());
        *guard += 1;
        let guard = guard.unlock().expect("called");
        assert!(guard.unlock().is_none());
        let guard = lock.lock_or_call().expect("free");
        assert_eq!(*guard, 1);
        drop(guard);
        assert!(lock.try_lock().is_some(), "a dropped guard unlocks");
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    use super::*;

    struct WeakUnlock;
    impl Orders for WeakUnlock {
        const UNLOCK: Ordering = Relaxed;
    }
    struct WeakCall;
    impl Orders for WeakCall {
        const CALL: Ordering = Relaxed;
    }

    /// Two threads publish one item each and leave as soon as they may. When both have left, all items were taken. `broken`: a thread
    /// that finds the lock taken does not call.
    fn check<O: Orders + 'static>(broken: bool) {
        loom::model(move || {
            let work = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
            let lock = Arc::new(CombiningLock::<usize, O>::new(0));
            let run = |index: usize| {
                let (work, lock) = (work.clone(), lock.clone());
                move || {
                    // Not a store: loom lets a store change places with a swap that does not read it.
                    work[index].swap(1, Relaxed);
                    let mut guard = if broken { lock.try_lock() } else { lock.lock_or_call() };
                    while let Some(mut held) = guard {
                        *held += work.iter().map(|item| item.swap(0, Relaxed)).sum::<usize>();
                        guard = held.unlock();
                    }
                }
            };
            let other = thread::spawn(run(0));
            run(1)();
            other.join().unwrap();
            assert_eq!(*lock.try_lock().unwrap(), 2, "work was lost");
        });
    }

    #[test]
    fn loom_published_work_is_done() {
        check::<Real>(false);
    }

    #[test]
    #[should_panic(expected = "lost")]
    fn loom_twin_without_call_is_caught() {
        check::<Real>(true);
    }

    #[test]
    #[should_panic]
    fn loom_twin_weak_unlock_is_caught() {
        check::<WeakUnlock>(false);
    }

    /// The item is a plain load, so that only the call's ordering makes it visible.
    fn check_call<O: Orders + 'static>() {
        loom::model(|| {
            let item = Arc::new(AtomicUsize::new(0));
            let lock = Arc::new(CombiningLock::<(), O>::new(()));
            let guard = lock.try_lock().unwrap();
            let other = thread::spawn({
                let (item, lock) = (item.clone(), lock.clone());
                move || {
                    item.store(1, Relaxed);
                    lock.lock_or_call().is_some_and(|guard| guard.unlock().is_none())
                }
            });
            let called = match guard.unlock() {
                Some(guard) => {
                    assert_eq!(item.load(Relaxed), 1, "the holder does not see what was published");
                    assert!(guard.unlock().is_none());
                    true
                }
                None => false,
            };
            assert_ne!(other.join().unwrap(), called, "the lock, or the call");
        });
    }

    #[test]
    fn loom_holder_sees_what_was_published_before_the_call() {
        check_call::<Real>();
    }

    #[test]
    #[should_panic(expected = "does not see")]
    fn loom_twin_weak_call_is_caught() {
        check_call::<WeakCall>();
    }
}
