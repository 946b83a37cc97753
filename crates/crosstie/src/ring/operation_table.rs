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
//! The thread that runs the engine starts its operations without the lists:
//!
//! ```text
//!   lease_private: value in, word = private             with_value, give_back: a store, nobody else looks at the word
//!   resolve: the value, if it is back; else the word is published, and there is a future as above
//! ```
//!
//! **Promises.** No lock, no allocation and no system call, apart from a task that really waits: its waker is behind a mutex that
//! nobody holds for long. An operation ends once; `cancel` never changes one that has ended. The value is accessed by one side at a
//! time: by the engine until it gives it back, and by the future after that.
//!
//! The lists are linked by index. Free entries: a stack whose head has a tag, so that a pop that was overtaken fails. Submitted
//! entries: a stack that the engine takes as a whole, so it needs no tag.

use core::marker::PhantomData;
use core::sync::atomic::Ordering::{self, Acquire, Relaxed};
use core::task::Waker;

use crosstie_protocol::endpoint::operation::OperationWord;

use sync::{AtomicU64, Mutex, UnsafeCell};

#[cfg(not(all(test, loom)))]
mod sync {
    pub(super) use core::sync::atomic::AtomicU64;
    pub(super) use std::sync::Mutex;

    /// The real cell, with the interface of loom's.
    #[derive(Debug)]
    pub(super) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(super) fn new(value: T) -> Self {
            UnsafeCell(core::cell::UnsafeCell::new(value))
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

/// The future's side of an operation. There is one.
#[derive(Debug)]
pub(crate) struct FutureSide(OperationKey);

/// The engine's side of an operation. There is one.
#[derive(Debug)]
pub(crate) struct EngineSide(OperationKey);

/// An operation that is being started by the thread that runs the engine. There is one for an operation, and it becomes the value or
/// the future's side.
#[derive(Debug)]
pub(crate) struct PrivateSide(OperationKey);

/// An entry that is in no list: the engine keeps it for the next operation that it starts. Only the engine has it, so a function that
/// takes it is called by the thread that runs the engine.
#[derive(Debug, Default)]
pub(crate) struct SpareEntry(Option<u32>);

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
        let entry = &self.entries[index as usize];
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
    fn fill(&self, index: u32, value: T, word: impl Fn(u32) -> OperationWord) -> OperationKey {
        let entry = &self.entries[index as usize];
        // SAFETY: the entry was in the free list, or is the engine's spare entry, and only this thread has taken it. Nobody else
        // accesses the value before it is submitted or given back. There is no former value: `retire` and `resolve` have taken it.
        entry.value.with_mut(|at| unsafe { at.write(Some(value)) });
        let generation = OperationWord::from_bits(entry.word.load(Relaxed)).generation();
        // `cancel_all` may see it from here on. It does not touch the value.
        entry.word.store(word(generation).bits(), Relaxed);
        OperationKey { table: self.id, index, generation }
    }

    /// Starts an operation. Hands the value back if all entries are in use.
    #[inline]
    pub(crate) fn lease(&self, value: T) -> Result<FutureSide, T> {
        match self.pop_free() {
            Some(index) => Ok(FutureSide(self.fill(index, value, OperationWord::leased))),
            None => Err(value),
        }
    }

    /// Starts an operation that the engine has at once: it is not submitted. Hands the value back if all entries are in use.
    #[inline]
    pub(crate) fn lease_private(
        &self,
        value: T,
        spare: &mut SpareEntry,
    ) -> Result<(PrivateSide, EngineSide), T> {
        match spare.0.take().or_else(|| self.pop_free()) {
            Some(index) => {
                let key = self.fill(index, value, OperationWord::private);
                Ok((PrivateSide(key), EngineSide(key)))
            }
            None => Err(value),
        }
    }

    /// Makes sure that there is a spare entry, so that the next `lease_private` finds one. Returns false if all entries are in use.
    #[inline]
    pub(crate) fn reserve_spare(&self, spare: &mut SpareEntry) -> bool {
        if spare.0.is_none() {
            spare.0 = self.pop_free();
        }
        spare.0.is_some()
    }

    /// Puts the spare entry into the free list.
    pub(crate) fn free_spare(&self, spare: &mut SpareEntry) {
        if let Some(index) = spare.0.take() {
            self.push_free(index);
        }
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
        // Acquire, partner: `Orders::GIVE_BACK`.
        OperationWord::from_bits(self.entry(key).word.load(Acquire))
    }

    /// Changes the word. Returns the words before and after the change; `None` if `change` does.
    #[inline]
    fn update(
        &self,
        key: OperationKey,
        order: Ordering,
        change: impl Fn(OperationWord) -> Option<OperationWord>,
    ) -> Option<(OperationWord, OperationWord)> {
        let word = &self.entry(key).word;
        let mut old = OperationWord::from_bits(word.load(Relaxed));
        loop {
            if old.generation() != key.generation {
                return None;
            }
            let new = change(old)?;
            match word.compare_exchange_weak(old.bits(), new.bits(), order, Relaxed) {
                Ok(_) => return Some((old, new)),
                Err(now) => old = OperationWord::from_bits(now),
            }
        }
    }

    /// Whether this operation has not ended.
    pub(crate) fn is_live(&self, key: OperationKey) -> bool {
        let word = self.word(key);
        word.generation() == key.generation && !word.is_ended()
    }

    /// Ends an operation, from any thread that has its future, or the engine. Returns whether it had not ended before.
    pub(crate) fn end(&self, key: OperationKey, cause: u16) -> bool {
        self.end_if(key, cause, |_| true)
    }

    fn end_if(&self, key: OperationKey, cause: u16, condition: impl Fn(OperationWord) -> bool) -> bool {
        let change = |word: OperationWord| if condition(word) { word.end(cause) } else { None };
        // AcqRel: what the thread did before it ended the operation is visible to who sees the end.
        match self.update(key, Ordering::AcqRel, change) {
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
        // One that is private counts as started after this.
        all.filter(|key| self.end_if(*key, cause, |word| !word.is_private())).count()
    }

    #[inline]
    fn wake_if(&self, key: OperationKey, before: OperationWord) {
        if before.has_waker() {
            self.wake(key);
        }
    }

    #[cold]
    fn wake(&self, key: OperationKey) {
        let waker = lock(&self.entry(key).waker).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Frees an entry that nobody sees any more.
    #[inline]
    fn retire(&self, key: OperationKey) {
        let entry = self.entry(key);
        // SAFETY: the operation is back and not held, and the thread that made it so calls this, once. So nobody else accesses the
        // value. The drop runs after the cell is empty.
        let value = entry.value.with_mut(|at| unsafe { (*at).take() });
        drop(value);
        let word = OperationWord::from_bits(entry.word.load(Relaxed));
        entry.word.store(word.retire().bits(), Relaxed);
        self.push_free(key.index);
    }
}

impl EngineSide {
    #[inline]
    pub(crate) fn key(&self) -> OperationKey {
        self.0
    }

    /// Whether the operation has ended already: it was cancelled, its future was dropped, or its deadline has passed.
    #[inline]
    pub(crate) fn is_ended<T, O: Orders>(&self, table: &OperationTable<T, O>) -> bool {
        table.word(self.0).is_ended()
    }

    /// The cause of the end, as a number; zero before the operation has ended.
    #[inline]
    pub(crate) fn cause<T, O: Orders>(&self, table: &OperationTable<T, O>) -> u16 {
        table.word(self.0).cause()
    }

    /// Accesses the value, which belongs to the engine until it is given back.
    #[inline]
    pub(crate) fn with_value<T, O: Orders, R>(
        &mut self,
        table: &OperationTable<T, O>,
        f: impl FnOnce(&mut T) -> R,
    ) -> R {
        table.entry(self.0).value.with_mut(|at| {
            // SAFETY: the operation is not back: `give_back` consumes this side. So the engine alone accesses the value, and this
            // side is borrowed exclusively. The future's stores happened before `take_submitted`.
            let value = unsafe { (*at).as_mut() };
            // There is a value: `lease` put it there, and only `retire` and `FutureSide::take` remove it, after the value is back.
            f(value.expect("an operation that is not back has its value"))
        })
    }

    /// Gives the value to the future, and ends the operation with this cause if it has not ended before. Returns whether this
    /// ended it.
    #[inline]
    pub(crate) fn give_back<T, O: Orders>(self, table: &OperationTable<T, O>, cause: u16) -> bool {
        let change = |word: OperationWord| word.give_back(cause);
        let word = &table.entry(self.0).word;
        let private = OperationWord::from_bits(word.load(Relaxed));
        if private.is_private() {
            // Nobody else changes the word. Release, partner: the Acquire load in `resolve`.
            let Some(after) = change(private) else { return false };
            word.store(after.bits(), Ordering::Release);
            return !private.is_ended();
        }
        // Only this side gives the value back, and only once.
        let Some((before, after)) = table.update(self.0, O::GIVE_BACK, change) else { return false };
        if after.is_unused() {
            table.retire(self.0);
        } else {
            table.wake_if(self.0, before);
        }
        !before.is_ended()
    }
}

impl PrivateSide {
    /// Takes the value if it is back and the operation has ended with this cause. Else publishes the operation: it has a future then.
    /// `accept` may refuse the value, so that it stays in the entry.
    #[inline]
    pub(crate) fn resolve<T, O: Orders>(
        self,
        table: &OperationTable<T, O>,
        spare: &mut SpareEntry,
        cause: u16,
        accept: impl FnOnce(&T) -> bool,
    ) -> Result<T, FutureSide> {
        let word = table.word(self.0);
        let entry = table.entry(self.0);
        let value = if word.is_back() && word.cause() == cause {
            // SAFETY: the value is back, so the engine does not access it any more, and there is no future: only this side accesses
            // it. The engine's accesses happened before the change of the word that was loaded above.
            entry.value.with_mut(|at| unsafe { (*at).take_if(|value| accept(value)) })
        } else {
            None
        };
        let Some(value) = value else {
            // While it was private nobody else changed the word: only the engine could.
            entry.word.store(word.publish().bits(), Relaxed);
            return Err(FutureSide(self.0));
        };
        entry.word.store(word.retire().bits(), Relaxed);
        // There is at most one: `lease_private` has taken it before.
        table.free_spare(spare);
        spare.0 = Some(self.0.index);
        Ok(value)
    }
}

impl FutureSide {
    pub(crate) fn key(&self) -> OperationKey {
        self.0
    }

    /// The word: whether the operation has ended, and its cause.
    #[inline]
    pub(crate) fn word<T, O: Orders>(&self, table: &OperationTable<T, O>) -> OperationWord {
        table.word(self.0)
    }

    /// Lets the next change wake a task. Returns false if what it waits for has happened: the end of the operation or, with
    /// `for_back`, the return of its value.
    pub(crate) fn set_waker<T, O: Orders>(
        &self,
        table: &OperationTable<T, O>,
        waker: &Waker,
        for_back: bool,
    ) -> bool {
        let former = {
            let mut stored = lock(&table.entry(self.0).waker);
            match &*stored {
                Some(known) if known.will_wake(waker) => None,
                _ => stored.replace(waker.clone()),
            }
        };
        drop(former);
        // AcqRel: orders the store of the waker before the change of the word, and what ended the operation before our return.
        table.update(self.0, Ordering::AcqRel, |word| word.set_waker(for_back)).is_some()
    }

    /// Takes the value, if it is back, and frees the entry.
    #[inline]
    pub(crate) fn take<T, O: Orders>(self, table: &OperationTable<T, O>) -> Result<T, FutureSide> {
        let word = table.word(self.0);
        if !word.is_back() {
            return Err(self);
        }
        let entry = table.entry(self.0);
        // SAFETY: the value is back, so it belongs to the future, of which this is the only side. The engine's accesses happened
        // before the change of the word that was loaded above.
        let value = entry.value.with_mut(|at| unsafe { (*at).take() });
        // Nobody else changes a word that is back: it has ended, so it cannot be ended again. So no exchange is needed.
        entry.word.store(word.retire().bits(), Relaxed);
        table.push_free(self.0.index);
        Ok(value.expect("an operation that is back has its value until its future takes it"))
    }

    /// Stops looking at the operation. Its value is dropped when it is back.
    #[inline]
    pub(crate) fn let_go<T, O: Orders>(self, table: &OperationTable<T, O>) {
        let change = |word: OperationWord| Some(word.let_go());
        // AcqRel: if the value is back, this thread drops it; else the engine does, after this.
        if let Some((_, after)) = table.update(self.0, Ordering::AcqRel, change)
            && after.is_unused()
        {
            table.retire(self.0);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> impl core::ops::DerefMut<Target = T> + '_ {
    // A poisoned mutex has a whole value: nothing that can panic runs under it, apart from a waker's clone.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(all(test, loom))]
mod loom_tests {
    use std::sync::Arc as StdArc;

    use crosstie_protocol::endpoint::imm_matching::{ImmEvent, ImmMatching};
    use loom::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use loom::sync::{Arc, Notify};
    use loom::thread;

    use super::*;

    /// Orderings with one of them weakened.
    struct WeakSubmit;
    impl Orders for WeakSubmit {
        const SUBMIT: Ordering = Relaxed;
    }
    struct WeakGiveBack;
    impl Orders for WeakGiveBack {
        const GIVE_BACK: Ordering = Relaxed;
    }
    struct WeakFree;
    impl Orders for WeakFree {
        const FREE: Ordering = Relaxed;
    }

    /// A value that counts its drops.
    struct Value(u64, Arc<AtomicUsize>);
    impl Drop for Value {
        fn drop(&mut self) {
            self.1.fetch_add(1, SeqCst);
        }
    }

    /// Two threads submit; the engine gets both values, and gives them back.
    fn check_hand_over<O: Orders + 'static>() {
        let mut model = loom::model::Builder::new();
        // The engine's loop has too many interleavings to explore all.
        model.preemption_bound = Some(3);
        model.check(|| {
            let table = Arc::new(OperationTable::<u64, O>::new(2));
            let submitters: Vec<_> = [10, 20]
                .into_iter()
                .map(|value| {
                    let table = table.clone();
                    thread::spawn(move || {
                        let side = table.lease(value).unwrap();
                        table.submit(&side);
                        side
                    })
                })
                .collect();
            let mut seen = 0;
            let mut taken = 0;
            while taken < 2 {
                table.take_submitted(|mut op| {
                    seen += op.with_value(&*table, |value| {
                        *value += 1;
                        *value
                    });
                    taken += 1;
                    assert!(op.give_back(&*table, 0));
                });
                if taken < 2 {
                    thread::yield_now();
                }
            }
            assert_eq!(seen, 32);
            let results: Vec<_> = submitters.into_iter().map(|thread| thread.join().unwrap()).collect();
            let values: u64 = results.into_iter().map(|side| side.take(&*table).unwrap()).sum();
            assert_eq!(values, 32);
        });
    }

    #[test]
    fn loom_values_reach_the_engine() {
        check_hand_over::<Real>();
    }

    #[test]
    #[should_panic]
    fn loom_twin_weak_submit_is_caught() {
        check_hand_over::<WeakSubmit>();
    }

    /// The future takes the value as soon as it is back.
    fn check_return<O: Orders + 'static>() {
        loom::model(|| {
            let table = Arc::new(OperationTable::<u64, O>::new(1));
            let side = table.lease(1).unwrap();
            table.submit(&side);
            let engine = thread::spawn({
                let table = table.clone();
                move || {
                    table.take_submitted(|mut op| {
                        op.with_value(&*table, |value| *value = 7);
                        op.give_back(&*table, 3);
                    });
                }
            });
            let mut side = Some(side);
            while let Some(waiting) = side.take() {
                match waiting.take(&*table) {
                    Ok(value) => assert_eq!(value, 7),
                    Err(again) => {
                        side = Some(again);
                        thread::yield_now();
                    }
                }
            }
            engine.join().unwrap();
            assert!(table.lease(2).is_ok(), "the entry is free");
        });
    }

    #[test]
    fn loom_values_come_back() {
        check_return::<Real>();
    }

    #[test]
    #[should_panic]
    fn loom_twin_weak_give_back_is_caught() {
        check_return::<WeakGiveBack>();
    }

    /// I1 and I2: the future lets go while the engine gives back, and a third thread waits for the entry. The entry is leased again
    /// only after both are done with it, with another generation, and the value is dropped once.
    fn check_reuse<O: Orders + 'static>() {
        loom::model(|| {
            let drops = Arc::new(AtomicUsize::new(0));
            let table = Arc::new(OperationTable::<Value, O>::new(1));
            let side = table.lease(Value(1, drops.clone())).ok().unwrap();
            let first = side.key();
            table.submit(&side);
            let engine = thread::spawn({
                let table = table.clone();
                move || {
                    table.take_submitted(|mut op| {
                        op.with_value(&*table, |value| value.0 += 1);
                        op.give_back(&*table, 0);
                    });
                }
            });
            let future = thread::spawn({
                let table = table.clone();
                move || {
                    table.end(side.key(), 1);
                    side.let_go(&*table);
                }
            });
            let mut value = Some(Value(5, drops.clone()));
            while let Some(next) = value.take() {
                match table.lease(next) {
                    Ok(side) => {
                        assert_ne!(side.key(), first, "another generation");
                        assert_eq!(drops.load(SeqCst), 1, "the former value is gone");
                        assert!(!side.word(&*table).is_ended());
                        side.let_go(&*table);
                    }
                    Err(again) => {
                        value = Some(again);
                        thread::yield_now();
                    }
                }
            }
            engine.join().unwrap();
            future.join().unwrap();
            assert!(!table.end(first, 2), "a key of a former operation ends nothing");
        });
    }

    #[test]
    fn loom_entry_is_reused_only_when_nobody_sees_it() {
        check_reuse::<Real>();
    }

    #[test]
    #[should_panic]
    fn loom_twin_weak_free_is_caught() {
        check_reuse::<WeakFree>();
    }

    /// Cancel against completion: one of them decides, both sides agree on which, and the value comes back in any case.
    #[test]
    fn loom_cancel_and_completion_agree() {
        loom::model(|| {
            let table = Arc::new(OperationTable::<u64>::new(1));
            let side = table.lease(1).unwrap();
            let key = side.key();
            table.submit(&side);
            let cancel = thread::spawn({
                let table = table.clone();
                move || table.end(key, 9)
            });
            let cancel_all = thread::spawn({
                let table = table.clone();
                move || table.end_all(8)
            });
            let mut completed = false;
            table.take_submitted(|op| completed = op.give_back(&*table, 0));
            let word = side.word(&*table);
            assert!(word.is_ended() && word.is_back());
            let (cancelled, all) = (cancel.join().unwrap(), cancel_all.join().unwrap());
            assert_eq!(usize::from(completed) + usize::from(cancelled) + all, 1, "one of them ended it");
            let expected = if completed {
                0
            } else if cancelled {
                9
            } else {
                8
            };
            assert_eq!(side.word(&*table).cause(), expected);
            assert_eq!(word.cause(), expected, "never flipped");
            assert_eq!(side.take(&*table).unwrap(), 1);
        });
    }

    /// The engine starts an operation and gives it back, before or after it is published, while another thread cancels everything: one
    /// of them ends it, and one that came back while it was private was not cancelled.
    #[test]
    fn loom_private_operation_is_not_cancelled() {
        for back_first in [true, false] {
            loom::model(move || {
                let table = Arc::new(OperationTable::<u64>::new(1));
                let cancel = thread::spawn({
                    let table = table.clone();
                    move || table.end_all(9)
                });
                let mut spare = SpareEntry::default();
                let (side, mut op) = table.lease_private(1, &mut spare).unwrap();
                op.with_value(&*table, |value| *value = 7);
                let mut op = Some(op);
                if back_first {
                    assert!(op.take().unwrap().give_back(&*table, 0), "nobody else ends it");
                }
                match side.resolve(&*table, &mut spare, 0, |_| true) {
                    Ok(value) => {
                        assert!(back_first && value == 7);
                        assert_eq!(cancel.join().unwrap(), 0);
                        assert!(table.lease(2).is_err(), "the entry is spare");
                        table.free_spare(&mut spare);
                        assert!(table.lease(2).is_ok());
                    }
                    Err(side) => {
                        let completed = op.take().unwrap().give_back(&*table, 0);
                        let cancelled = cancel.join().unwrap();
                        assert_eq!(usize::from(completed) + cancelled, 1, "one of them ended it");
                        assert_eq!(side.word(&*table).cause(), if completed { 0 } else { 9 });
                        assert_eq!(side.take(&*table).unwrap(), 7);
                    }
                }
            });
        }
    }

    struct NotifyWaker(Notify);
    impl std::task::Wake for NotifyWaker {
        fn wake(self: StdArc<Self>) {
            self.0.notify();
        }
    }

    /// A task that waits for the end, then for the value, is woken for both. `broken`: it does not look again after it has left its
    /// waker.
    fn check_signal(broken: bool) {
        loom::model(move || {
            let table = Arc::new(OperationTable::<u64>::new(1));
            let side = table.lease(1).unwrap();
            let key = side.key();
            table.submit(&side);
            let engine = thread::spawn({
                let table = table.clone();
                move || {
                    table.end(key, 9);
                    table.take_submitted(|op| _ = op.give_back(&*table, 0));
                }
            });
            for for_back in [false, true] {
                let done = || {
                    let word = side.word(&*table);
                    if for_back { word.is_back() } else { word.is_ended() }
                };
                while !done() {
                    let notify = StdArc::new(NotifyWaker(Notify::new()));
                    let waker = Waker::from(notify.clone());
                    if broken {
                        *lock(&table.entry(key).waker) = Some(waker);
                        notify.0.wait();
                    } else if side.set_waker(&*table, &waker, for_back) {
                        notify.0.wait();
                    }
                }
            }
            engine.join().unwrap();
            assert!(side.take(&*table).is_ok());
        });
    }

    #[test]
    fn loom_no_wake_up_is_lost() {
        check_signal(false);
    }

    #[test]
    #[should_panic]
    fn loom_twin_unchecked_waker_is_caught() {
        check_signal(true);
    }

    /// `imm_recv`: an immediate arrives, a call comes, and the call is cancelled, in every order. The immediate is given to the call, or
    /// it waits for the next one: never lost, never given to a call that has ended.
    fn check_matching(forgets: bool) {
        loom::model(move || {
            let table = Arc::new(OperationTable::<u64>::new(2));
            let engine = Arc::new(loom::sync::Mutex::new(ImmMatching::<EngineSide>::new(2, 2)));
            let give = move |table: &OperationTable<u64>, mut op: EngineSide, event: ImmEvent| {
                op.with_value(table, |value| *value = event.imm.into());
                op.give_back(table, 0) || forgets
            };
            let arrival = thread::spawn({
                let (table, engine) = (table.clone(), engine.clone());
                move || {
                    let event = ImmEvent { imm: 77, bytes: 0 };
                    engine.lock().unwrap().arrive(event, |op, event| give(&table, op, event));
                }
            });
            let side = table.lease(0).unwrap();
            let key = side.key();
            let cancel = thread::spawn({
                let table = table.clone();
                move || table.end(key, 9)
            });
            table.submit(&side);
            {
                let mut engine = engine.lock().unwrap();
                table.take_submitted(|op| _ = engine.call(op, |op, event| give(&table, op, event)));
            }
            arrival.join().unwrap();
            let cancelled = cancel.join().unwrap();
            // The next call gets the immediate if the first one was cancelled.
            let next = table.lease(0).unwrap();
            table.submit(&next);
            {
                let mut engine = engine.lock().unwrap();
                table.take_submitted(|op| _ = engine.call(op, |op, event| give(&table, op, event)));
            }
            let next_got = next.word(&*table).is_back();
            assert_eq!(next_got, cancelled, "the immediate was lost, or given twice");
            let winner = if cancelled { next } else { side };
            assert_eq!(winner.take(&*table).unwrap(), 77);
        });
    }

    #[test]
    fn loom_immediate_reaches_exactly_one_call() {
        check_matching(false);
    }

    #[test]
    #[should_panic(expected = "lost")]
    fn loom_twin_immediate_of_a_cancelled_call_is_caught() {
        check_matching(true);
    }
}
