//! Operations in flight: the state that a future and the engine of an endpoint share.
//!
//! Each entry has a [word](OperationWord), which says how far the operation is, and a value, which the two sides pass to each other.
//! Entries are reused, but only when neither side can see the operation any more, and with the next generation: to its owner
//! each entry looks like one that was made for it.
//!
//! ```text
//!   any thread                                          engine (one thread at a time)
//!   lease: value in, word = leased
//!   submit -------- list of submitted entries ------->  take_submitted
//!   cancel: end                                         with_value, end, ...
//!   poll: ended?                                        give_back: value belongs to the future
//!   take the value, or let go: entry is free            (or entry is free, if the future has let go)
//! ```
//!
//! The thread that runs the engine starts its operations without the list of submitted ones. Most of them are over when it has started them, and
//! need no entry; so it [reserves](OperationTable::reserve) one first, and [leases](OperationTable::lease_reserved) it if it must.
//!
//! **Promises.** No lock, no allocation and no system call, apart from a task that really waits: its waker is behind a mutex that
//! is never locked for long. Wakers are [deferred](crate::wait::wakers): the thread that ends operations calls them when it has no lock. An operation
//! ends once; `cancel` never changes one that has ended. The value is accessed by one side at a
//! time: by the engine until it gives it back, and by the future after that.
//!
//! The lists are linked by index. Free entries: a stack whose head has a tag, so that a pop that was overtaken fails. Submitted
//! entries: a stack that the engine takes as a whole, so it needs no tag.

use core::marker::PhantomData;
use core::sync::atomic::Ordering::{self, Acquire, Relaxed};
use core::task::Waker;

use crosstie_protocol::endpoint::operation::OperationWord;

use super::cell::UnsafeCell;
use crate::wait::wakers;
use sync::{AtomicU64, Mutex};

pub(crate) use sides::{EngineSide, FutureSide};

#[cfg(all(test, loom))]
mod loom_tests;
mod sides;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(all(test, loom)))]
mod sync {
    pub(super) use core::sync::atomic::AtomicU64;
    pub(super) use std::sync::Mutex;
}

#[cfg(all(test, loom))]
mod sync {
    pub(super) use loom::sync::Mutex;
    pub(super) use loom::sync::atomic::AtomicU64;
}

/// The memory orderings that pass the value from one side to the other. Tests replace one of them.
pub(crate) trait Orders {
    /// Of the push that submits an entry. Partner: the swap in `take_submitted`.
    const SUBMIT: Ordering = Ordering::Release;
    /// Of the change of the word that gives the value back. Partner: the load of the word in `is_back`. It also acquires: the future
    /// may have let go.
    const GIVE_BACK: Ordering = Ordering::AcqRel;
    /// Of the push of a free entry. Partner: the pop in `lease`.
    const FREE: Ordering = Ordering::Release;
}

/// The orderings that ship.
#[derive(Debug)]
pub(crate) struct Real;

impl Orders for Real {}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct OperationTable<T, O = Real> {
    /// Unique in this process, so that a key is not used with another table.
    id: u64,
    entries: Box<[Entry<T>]>,
    /// Free entries: index of the first plus one in the lower half, a tag in the upper half.
    free: AtomicU64,
    /// Submitted entries: index of the newest plus one.
    submitted: AtomicU64,
    orders: PhantomData<O>,
}

/// Two cache lines, because processors fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Entry<T> {
    word: AtomicU64,
    /// The next entry of the list that this one is in, plus one.
    next: AtomicU64,
    waker: Mutex<Option<Waker>>,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: `value` is the only part that is not `Sync`. By the protocol of the word one side accesses it at a time, and the sides
// hand it over with Release and Acquire; so it moves between threads, which needs `T: Send`.
unsafe impl<T: Send, O> Sync for OperationTable<T, O> {}

/// An operation in its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OperationKey {
    table: u64,
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// An entry that is in no list and has no operation.
#[derive(Debug)]
pub(crate) struct ReservedEntry(u32);

impl<T, O: Orders> OperationTable<T, O> {
    pub(crate) fn new(entries: u32) -> OperationTable<T, O> {
        static NEXT_ID: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(1);
        let entry = |index: u32| Entry {
            word: AtomicU64::new(OperationWord::free(1).bits()),
            // All entries are in the free list; the last one has no next.
            next: AtomicU64::new(if index + 1 == entries { 0 } else { u64::from(index) + 2 }),
            waker: Mutex::new(None),
            value: UnsafeCell::new(None),
        };
        OperationTable {
            id: NEXT_ID.fetch_add(1, Relaxed),
            entries: (0..entries).map(entry).collect(),
            free: AtomicU64::new(u64::from(entries.min(1))),
            submitted: AtomicU64::new(0),
            orders: PhantomData,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    #[inline]
    fn entry(&self, key: OperationKey) -> &Entry<T> {
        assert_eq!(key.table, self.id);
        &self.entries[key.index as usize]
    }

    /// Takes an entry out of the free list.
    #[inline]
    fn pop_free(&self) -> Option<u32> {
        // Acquire, partner: the push in `retire`. The value of the former operation is gone.
        let mut head = self.free.load(Acquire);
        loop {
            let first = head as u32;
            if first == 0 {
                return None;
            }
            // It may be in use already; then the tag has changed and the exchange fails.
            let next = self.entries[first as usize - 1].next.load(Relaxed);
            let new = ((head >> 32).wrapping_add(1) << 32) | next;
            match self.free.compare_exchange_weak(head, new, Acquire, Acquire) {
                Ok(_) => return Some(first - 1),
                Err(now) => head = now,
            }
        }
    }

    /// Puts an entry into the free list.
    #[inline]
    fn push_free(&self, index: u32) {
        self.push_free_entry(&self.entries[index as usize], index);
    }

    /// The same, for an entry that was looked up.
    #[inline]
    fn push_free_entry(&self, entry: &Entry<T>, index: u32) {
        let mut head = self.free.load(Relaxed);
        loop {
            entry.next.store(u64::from(head as u32), Relaxed);
            let new = ((head >> 32).wrapping_add(1) << 32) | (u64::from(index) + 1);
            // `Orders::FREE` names the partner.
            match self.free.compare_exchange_weak(head, new, O::FREE, Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Puts the value of a new operation into an entry that is in no list.
    #[inline]
    fn fill(&self, index: u32, value: T) -> OperationKey {
        let entry = &self.entries[index as usize];
        // SAFETY: the entry was in the free list, and only this thread has taken it. Nobody else accesses the value before it is submitted or
        // given back. There is no former value: `retire` and `take` have taken it.
        entry.value.with_mut(|at| unsafe { at.write(Some(value)) });
        let generation = OperationWord::from_bits(entry.word.load(Relaxed)).generation();
        // `cancel_all` may see it from here on. It does not touch the value.
        entry.word.store(OperationWord::leased(generation).bits(), Relaxed);
        OperationKey { table: self.id, index, generation }
    }

    /// Starts an operation. Hands the value back if all entries are in use.
    #[inline]
    pub(crate) fn lease(&self, value: T) -> Result<FutureSide, T> {
        match self.pop_free() {
            Some(index) => Ok(FutureSide(self.fill(index, value))),
            None => Err(value),
        }
    }

    /// Takes an entry for an operation that may need one. `None`: all are in use.
    #[inline]
    pub(crate) fn reserve(&self) -> Option<ReservedEntry> {
        self.pop_free().map(ReservedEntry)
    }

    /// Puts a reserved entry into the free list.
    pub(crate) fn free_reserved(&self, entry: ReservedEntry) {
        self.push_free(entry.0);
    }

    /// Starts an operation that the engine has at once: it is not submitted.
    #[inline]
    pub(crate) fn lease_reserved(&self, entry: ReservedEntry, value: T) -> (FutureSide, EngineSide) {
        let key = self.fill(entry.0, value);
        (FutureSide(key), EngineSide(key))
    }

    /// Hands a leased operation to the engine. To be called once.
    #[inline]
    pub(crate) fn submit(&self, side: &FutureSide) {
        let entry = self.entry(side.0);
        let mut head = self.submitted.load(Relaxed);
        loop {
            entry.next.store(head, Relaxed);
            let new = u64::from(side.0.index) + 1;
            // `Orders::SUBMIT` names the partner.
            match self.submitted.compare_exchange_weak(head, new, O::SUBMIT, Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Whether operations were submitted that the engine has not taken.
    #[inline]
    pub(crate) fn has_submitted(&self) -> bool {
        self.submitted.load(Relaxed) != 0
    }

    /// Takes the submitted operations, in the order of their submission. Only the engine calls it.
    #[inline]
    pub(crate) fn take_submitted(&self, mut each: impl FnMut(EngineSide)) {
        if !self.has_submitted() {
            return;
        }
        // Acquire, partner: the pushes in `submit`, all of them: each one continues the release sequence of the one before.
        let mut newest = self.submitted.swap(0, Acquire);
        let mut oldest = 0;
        while newest != 0 {
            let entry = &self.entries[newest as usize - 1];
            let next = entry.next.load(Relaxed);
            entry.next.store(oldest, Relaxed);
            (oldest, newest) = (newest, next);
        }
        while oldest != 0 {
            let index = oldest as u32 - 1;
            let entry = &self.entries[index as usize];
            oldest = entry.next.load(Relaxed);
            let generation = OperationWord::from_bits(entry.word.load(Relaxed)).generation();
            each(EngineSide(OperationKey { table: self.id, index, generation }));
        }
    }

    #[inline]
    fn word(&self, key: OperationKey) -> OperationWord {
        self.entry(key).word()
    }

    /// Changes the word. Returns the words before and after the change; `None` if `change` does.
    #[inline]
    fn update(
        &self,
        key: OperationKey,
        order: Ordering,
        change: impl Fn(OperationWord) -> Option<OperationWord>,
    ) -> Option<(OperationWord, OperationWord)> {
        self.entry(key).update(key, order, change)
    }

    /// Whether this operation has not ended.
    pub(crate) fn is_live(&self, key: OperationKey) -> bool {
        let word = self.word(key);
        word.generation() == key.generation && !word.is_ended()
    }

    /// Ends an operation, from any thread that has its future, or the engine. Returns whether it had not ended before.
    pub(crate) fn end(&self, key: OperationKey, cause: u16) -> bool {
        // AcqRel: what the thread did before it ended the operation is visible to who sees the end.
        match self.update(key, Ordering::AcqRel, |word| word.end(cause)) {
            Some((before, _)) => {
                self.wake_if(key, before);
                true
            }
            None => false,
        }
    }

    /// Ends all operations, from any thread. Returns how many had not ended before.
    pub(crate) fn end_all(&self, cause: u16) -> usize {
        let all = (0..self.entries.len() as u32).map(|index| {
            let generation =
                OperationWord::from_bits(self.entries[index as usize].word.load(Relaxed)).generation();
            OperationKey { table: self.id, index, generation }
        });
        all.filter(|key| self.end(*key, cause)).count()
    }

    #[inline]
    fn wake_if(&self, key: OperationKey, before: OperationWord) {
        if before.has_waker() {
            self.wake(key);
        }
    }

    #[inline(never)]
    fn wake(&self, key: OperationKey) {
        let waker = lock(&self.entry(key).waker).take();
        if let Some(waker) = waker {
            wakers::defer(waker);
        }
    }

    /// Frees an entry that nobody sees any more.
    #[inline]
    fn retire(&self, key: OperationKey) {
        let entry = self.entry(key);
        // SAFETY: the operation is back and its future has let go, and the thread that made it so calls this, once. So nobody else accesses the
        // value. The drop runs after the cell is empty.
        let value = entry.value.with_mut(|at| unsafe { (*at).take() });
        drop(value);
        let word = OperationWord::from_bits(entry.word.load(Relaxed));
        entry.word.store(word.retire().bits(), Relaxed);
        self.push_free(key.index);
    }
}

impl<T> Entry<T> {
    #[inline]
    fn word(&self) -> OperationWord {
        // Acquire, partner: `Orders::GIVE_BACK`.
        OperationWord::from_bits(self.word.load(Acquire))
    }

    /// See [`OperationTable::update`]. `key` is of an operation in this entry.
    #[inline]
    fn update(
        &self,
        key: OperationKey,
        order: Ordering,
        change: impl Fn(OperationWord) -> Option<OperationWord>,
    ) -> Option<(OperationWord, OperationWord)> {
        let mut old = OperationWord::from_bits(self.word.load(Relaxed));
        loop {
            if old.generation() != key.generation {
                return None;
            }
            let new = change(old)?;
            match self.word.compare_exchange_weak(old.bits(), new.bits(), order, Relaxed) {
                Ok(_) => return Some((old, new)),
                Err(now) => old = OperationWord::from_bits(now),
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> impl core::ops::DerefMut<Target = T> + '_ {
    // A poisoned mutex has a whole value: nothing that can panic runs under it, apart from a waker's clone.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
