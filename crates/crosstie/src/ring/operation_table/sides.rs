//! Who has an operation: its future, and the engine.

use core::sync::atomic::Ordering::{self, Relaxed};
use core::task::Waker;

use crosstie_protocol::endpoint::operation::OperationWord;

use super::{OperationKey, OperationTable, Orders, lock};

/// The future's side of an operation. There is one.
#[derive(Debug)]
pub(crate) struct FutureSide(pub(super) OperationKey);

/// The engine's side of an operation. There is one.
#[derive(Debug)]
pub(crate) struct EngineSide(pub(super) OperationKey);

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
        self.give_back_as(table, |word| word.give_back(cause)) == Some(true)
    }

    /// Gives the value to the future and ends the operation with this cause, unless it has ended before: then the engine keeps the value.
    #[inline]
    pub(crate) fn give_back_if_live<T, O: Orders>(
        self,
        table: &OperationTable<T, O>,
        cause: u16,
    ) -> Result<(), EngineSide> {
        let key = self.0;
        let change = |word: OperationWord| if word.is_ended() { None } else { word.give_back(cause) };
        match self.give_back_as(table, change) {
            Some(_) => Ok(()),
            None => Err(EngineSide(key)),
        }
    }

    /// `None`: `change` refuses, and nothing has happened. Else whether this ended the operation.
    #[inline]
    fn give_back_as<T, O: Orders>(
        self,
        table: &OperationTable<T, O>,
        change: impl Fn(OperationWord) -> Option<OperationWord>,
    ) -> Option<bool> {
        let entry = table.entry(self.0);
        // Only this side gives the value back, and only once.
        let (before, after) = entry.update(self.0, O::GIVE_BACK, change)?;
        if after.is_unused() {
            table.retire(self.0);
        } else {
            table.wake_if(self.0, before);
        }
        Some(!before.is_ended())
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
        let entry = table.entry(self.0);
        let word = entry.word();
        if !word.is_back() {
            return Err(self);
        }
        // SAFETY: the value is back, so it belongs to the future, of which this is the only side. The engine's accesses happened
        // before the change of the word that was loaded above.
        let value = entry.value.with_mut(|at| unsafe { (*at).take() });
        // Nobody else changes a word that is back: it has ended, so it cannot be ended again. So no exchange is needed.
        entry.word.store(word.retire().bits(), Relaxed);
        table.push_free_entry(entry, self.0.index);
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
