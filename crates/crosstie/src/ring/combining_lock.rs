//! A combining lock: a thread that finds it taken leaves, and the thread that has it does the work of both.
//!
//! ```text
//!   thread with work                        holder
//!   publish the work                        do the work that is published
//!   locked?  yes: set CALLED, leave         unlock: CALLED?  yes: clear it, keep the lock, do the work again
//!            no:  take the lock                              no:  the lock is free
//! ```
//!
//! **Promises.** One thread at a time accesses the value; a thread that has the lock and tries to take it again finds it taken. Work that
//! was published before [`lock_or_call`](CombiningLock::lock_or_call) is seen by its caller, who has the lock then, or by a holder that
//! does not unlock without having looked again. No thread waits for another.
//!
//! # The owner
//!
//! Any thread takes the lock with a compare-and-swap of `state`, and unlocks it with another one. A thread that does so many times in a
//! row becomes the *owner*. It locks with plain loads and stores, which cost a tenth, until another thread comes. That one pays: it
//! revokes the ownership, with the heavy half of an asymmetric [`fence`].
//!
//! ```text
//!   owner: lock                             another thread: lock
//!     owner == me?  no: as any thread         state |= LOCKED
//!     inside = true                           owner set?  yes: owner = none, heavy fence
//!     light fence                             anybody's inside?  yes: step back (*)
//!     owner == me and state == 0?             use the value
//!       no: inside = false, light fence,
//!           as any thread                   (*) state = CALLED, heavy fence
//!     use the value                             anybody's inside?  yes: leave, the owner sees CALLED
//!   owner: unlock                                                  no:  try again
//!     inside = false
//!     light fence
//!     state == CALLED?  yes: take the lock as any thread, do the work
//! ```
//!
//! Why the two exclude each other: of the owner's store to `inside` and the other thread's store to `owner`, at least one is seen by the
//! other side, because both put a fence between their store and their load. Only the thread that revokes the ownership needs the heavy
//! fence: threads that take the lock later synchronise with it through `state`.
//!
//! Why no call is lost: a thread that leaves sets CALLED first, and then looks whether the lock is still taken. A thread that unlocks does
//! so first, and then looks at CALLED. So at least one of the two sees the other.
//!
//! [`biased_lock`](super::biased_lock) has one owner that is known from the start, and other threads wait for it. Here any thread can
//! become the owner, and no thread waits.
//!
//! A thread that was revoked a moment ago may still write its `inside`, and take it back. So each owner has a flag of its own, and there
//! can be [`MAX_OWNERS`] different ones in the life of a lock. Each revocation doubles the number of times that make an owner, so
//! that threads that alternate seldom pay for one.

use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use super::cell::UnsafeCell;
use super::fence;
use sync::{AtomicBool, AtomicU32, AtomicU64};

#[cfg(not(all(test, loom)))]
use core::sync::atomic as sync;
#[cfg(all(test, loom))]
use loom::sync::atomic as sync;

/// A thread has the lock, or tries to take it while there may be an owner inside.
const LOCKED: u32 = 1;
/// A thread has published work while another one had the lock.
const CALLED: u32 = 2;
/// Threads that can become the owner of one lock.
const MAX_OWNERS: usize = 1 << OWNER_BITS;
const OWNER_BITS: u32 = 2;
/// The number of no thread.
const NOBODY: u64 = 0;

/// The memory orderings and fences. Tests replace one of them.
pub(crate) trait Orders {
    /// Of the exchange that unlocks. Partner: the Acquire exchanges that lock.
    const UNLOCK: Ordering = Release;
    /// Of the exchange that sets CALLED: publishes the work. Partners: the Acquire swap in `unlock`, and the Acquire exchange in
    /// `take_called`.
    const CALL: Ordering = Release;
    /// Of the owner's store when it leaves. Partner: the Acquire loads in `is_any_inside`.
    const LEAVE: Ordering = Release;
    /// Whether each owner has a flag of its own.
    const OWN_FLAGS: bool = true;
    /// How often a thread must take the lock in a row to become its owner, at first and at most.
    const IN_A_ROW: (u32, u32) = (1 << 10, 1 << 16);

    /// Between a store of another thread than the owner and its load of `inside`.
    fn heavy_fence() {
        fence::heavy();
    }
}

/// The orderings that ship.
#[derive(Debug)]
pub(crate) struct Real;

impl Orders for Real {}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct CombiningLock<T, O = Real> {
    state: AtomicU32,
    /// The owner's number and, in the lower bits, which of `owners` it is. Zero: there is none. Changes only while LOCKED is set, by the
    /// thread that has set it.
    owner: AtomicU64,
    owners: [Owner; MAX_OWNERS],
    // These are used by the thread that has set LOCKED.
    /// The thread that took the lock last.
    last: AtomicU64,
    /// How often it did so in a row, and how often makes it the owner.
    in_a_row: AtomicU32,
    needed: AtomicU32,
    value: UnsafeCell<T>,
    orders: PhantomData<O>,
}

/// A thread that is, or was, the owner.
#[derive(Debug)]
struct Owner {
    /// Its number, for ever. Used by the thread that has set LOCKED.
    thread: AtomicU64,
    /// It has the lock as the owner, or is about to take it. Only it writes this.
    inside: AtomicBool,
}

// SAFETY: a guard exists only while its thread has set LOCKED and has seen that no owner is inside, or is the owner and has set its
// `inside` (see the module for why these exclude each other). So one thread at a time accesses the value; it moves between threads, which
// needs `T: Send`.
unsafe impl<T: Send, O> Sync for CombiningLock<T, O> {}

impl<T, O: Orders> CombiningLock<T, O> {
    /// The process must have [registered](fence::register) for the fence.
    pub(crate) fn new(value: T) -> CombiningLock<T, O> {
        let owner = |_| Owner { thread: AtomicU64::new(NOBODY), inside: AtomicBool::new(false) };
        CombiningLock {
            state: AtomicU32::new(0),
            owner: AtomicU64::new(0),
            owners: core::array::from_fn(owner),
            last: AtomicU64::new(NOBODY),
            in_a_row: AtomicU32::new(0),
            needed: AtomicU32::new(O::IN_A_ROW.0),
            value: UnsafeCell::new(value),
            orders: PhantomData,
        }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T, O>> {
        self.lock(false)
    }

    /// Takes the lock if it is free; else lets its holder look for work once more. To be called after publishing work.
    #[inline]
    pub(crate) fn lock_or_call(&self) -> Option<Guard<'_, T, O>> {
        self.lock(true)
    }

    #[inline]
    fn lock(&self, calls: bool) -> Option<Guard<'_, T, O>> {
        let me = thread_number();
        let owner = self.owner.load(Relaxed);
        if owner >> OWNER_BITS == me {
            let inside = self.inside(owner);
            if inside.load(Relaxed) {
                // This thread has the lock already.
                if calls {
                    self.state.fetch_or(CALLED, O::CALL);
                }
                return None;
            }
            inside.store(true, Relaxed);
            // The store above and the loads below must not change places; the partner is the heavy fence in `is_any_inside`.
            fence::light();
            if self.owner.load(Relaxed) == owner && self.state.load(Relaxed) == 0 {
                return Some(Guard { lock: self, owner, not_send: PhantomData });
            }
            inside.store(false, O::LEAVE);
            // As above; the partner is the heavy fence in `lock_as_any`.
            fence::light();
        }
        self.lock_as_any(me, calls)
    }

    /// The flag of an owner.
    #[inline]
    fn inside(&self, owner: u64) -> &AtomicBool {
        let index = if O::OWN_FLAGS { owner as usize % MAX_OWNERS } else { 0 };
        &self.owners[index].inside
    }

    /// Takes the lock as a thread that is not the owner, or cannot enter as such. `calls`: lets the holder look, if there is one.
    #[inline(never)]
    fn lock_as_any(&self, me: u64, calls: bool) -> Option<Guard<'_, T, O>> {
        let mut state = self.state.load(Relaxed);
        loop {
            let is_locked = state & LOCKED != 0;
            let (new, order) = match (is_locked, calls) {
                (false, _) => (state | LOCKED, Acquire),
                (true, true) => (state | CALLED, O::CALL),
                (true, false) => return None,
            };
            // Also when CALLED is set already: the exchange publishes the work of this thread.
            // Acquire, partner: `Orders::UNLOCK`.
            if let Err(now) = self.state.compare_exchange_weak(state, new, order, Relaxed) {
                state = now;
                continue;
            }
            if is_locked {
                return None;
            }
            if !self.is_any_inside() {
                self.note_holder(me);
                return Some(Guard { lock: self, owner: 0, not_send: PhantomData });
            }
            // Threads that came meanwhile have called this one. Their calls, and its own, are left to the owner.
            let before = match calls {
                true => self.state.swap(CALLED, O::CALL) | CALLED,
                false => self.state.fetch_and(!LOCKED, O::CALL),
            };
            if before & CALLED == 0 {
                return None;
            }
            O::heavy_fence();
            // The owner looks at CALLED when it leaves. If it has left, it may have looked too early.
            if self.owners.iter().any(|owner| owner.inside.load(Relaxed)) {
                return None;
            }
            state = self.state.load(Relaxed);
        }
    }

    /// Whether an owner has the lock. There is no owner after this. The caller has set LOCKED.
    fn is_any_inside(&self) -> bool {
        if self.owner.load(Relaxed) != 0 {
            self.owner.store(0, Relaxed);
            let needed = self.needed.load(Relaxed);
            self.needed.store((2 * needed).min(O::IN_A_ROW.1), Relaxed);
            O::heavy_fence();
        }
        // Acquire, partner: `Orders::LEAVE`.
        self.owners.iter().any(|owner| owner.inside.load(Acquire))
    }

    /// Makes the thread that has the lock its owner, if it takes it again and again.
    fn note_holder(&self, me: u64) {
        if self.last.load(Relaxed) != me {
            self.last.store(me, Relaxed);
            self.in_a_row.store(0, Relaxed);
            return;
        }
        let in_a_row = self.in_a_row.load(Relaxed) + 1;
        if in_a_row < self.needed.load(Relaxed) {
            self.in_a_row.store(in_a_row, Relaxed);
            return;
        }
        self.in_a_row.store(0, Relaxed);
        let is_mine = |owner: &Owner| [me, NOBODY].contains(&owner.thread.load(Relaxed));
        if let Some(index) = self.owners.iter().position(is_mine) {
            self.owners[index].thread.store(me, Relaxed);
            self.owner.store(me << OWNER_BITS | index as u64, Relaxed);
        }
    }

    /// Takes the lock for the threads that have called, unless another thread has taken it, which sees the calls.
    #[cold]
    fn take_called(&self) -> Option<Guard<'_, T, O>> {
        // Acquire, partner: `Orders::CALL`, of all calls so far: each one continues the release sequence of the one before.
        self.state.compare_exchange(CALLED, LOCKED, Acquire, Relaxed).ok()?;
        Some(Guard { lock: self, owner: 0, not_send: PhantomData })
    }
}

/// The lock, taken.
#[derive(Debug)]
pub(crate) struct Guard<'a, T, O: Orders = Real> {
    lock: &'a CombiningLock<T, O>,
    /// As which owner it was taken; zero: as any thread.
    owner: u64,
    /// Neither sent to nor shared with another thread: only the owner writes its `inside`, and the value need not be `Sync`.
    not_send: PhantomData<*const T>,
}

impl<T, O: Orders> Guard<'_, T, O> {
    /// Unlocks. If work was published meanwhile, hands a guard back instead: the caller looks for the work, and unlocks again.
    #[inline]
    #[must_use = "work was published: look for it, and unlock again"]
    pub(crate) fn unlock(self) -> Option<Self> {
        let lock = self.lock;
        if self.owner != 0 {
            lock.inside(self.owner).store(false, O::LEAVE);
            core::mem::forget(self);
            // The store above and the load below must not change places; the partner is the heavy fence in `lock_as_any`.
            fence::light();
            return if lock.state.load(Relaxed) == 0 { None } else { lock.take_called() };
        }
        match lock.state.compare_exchange(LOCKED, 0, O::UNLOCK, Relaxed) {
            Ok(_) => {
                core::mem::forget(self);
                None
            }
            Err(_) => {
                // Acquire, partner: `Orders::CALL`, of all calls so far: each one continues the release sequence of the one before.
                lock.state.swap(LOCKED, Acquire);
                Some(self)
            }
        }
    }
}

impl<T, O: Orders> Drop for Guard<'_, T, O> {
    /// Unlocks without a look for published work: a panic has interrupted the holder. The next holder finds it.
    #[cold]
    fn drop(&mut self) {
        if self.owner != 0 {
            self.lock.inside(self.owner).store(false, O::LEAVE);
        } else {
            self.lock.state.swap(0, O::UNLOCK);
        }
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

/// A number that no other thread of this process has, or will have.
#[cfg(not(all(test, loom)))]
#[inline]
fn thread_number() -> u64 {
    use core::cell::Cell;

    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(NOBODY) };
    }
    static NEXT: AtomicU64 = AtomicU64::new(NOBODY + 1);

    #[cold]
    fn choose(number: &Cell<u64>) -> u64 {
        number.set(NEXT.fetch_add(1, Relaxed));
        number.get()
    }
    NUMBER.with(|number| if number.get() == NOBODY { choose(number) } else { number.get() })
}

#[cfg(all(test, loom))]
fn thread_number() -> u64 {
    use core::hash::{Hash, Hasher};

    let mut hasher = std::hash::DefaultHasher::new();
    loom::thread::current().id().hash(&mut hasher);
    // Room for the index of an owner.
    hasher.finish() >> OWNER_BITS | 1
}

#[cfg(test)]
#[path = "combining_lock_tests.rs"]
mod tests;
