//! Tables of the objects that NCCL holds keys of.
//!
//! Slots are never freed, so a lookup needs no lock of the table and an old key finds at worst another object, which its
//! generation tells apart. A slot is used again after its object is removed.

use core::sync::atomic::{AtomicPtr, Ordering::Acquire, Ordering::Release};
use std::sync::{Mutex, PoisonError};

use crate::abi::Fault;
use crate::key::{Key, Kind};
use crate::lock::{Lock, LockGuard};

/// Objects of one kind, as many as it has slots. It is constant itself, so that a lookup does not load it.
pub(crate) struct Table<T: 'static> {
    kind: Kind,
    slots: &'static [AtomicPtr<Slot<T>>],
    free: &'static Mutex<Free>,
}

pub(crate) struct Free {
    removed: Vec<u32>,
    used: u32,
}

impl Free {
    pub(crate) const fn new() -> Free {
        Free { removed: Vec::new(), used: 0 }
    }
}

/// A place for an object: the lock, and what a call looks at first, are on one cache line.
#[repr(align(64))]
pub(crate) struct Slot<T> {
    entry: Lock<Entry<T>>,
}

#[repr(C)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

/// A table of `$limit` objects. Its slots are in a static of their own, which is zero and so takes no space in the library.
macro_rules! table {
    ($kind_of:ty, $limit:expr, $kind:expr) => {{
        static SLOTS: [core::sync::atomic::AtomicPtr<$crate::table::Slot<$kind_of>>; $limit] =
            [const { core::sync::atomic::AtomicPtr::new(core::ptr::null_mut()) }; $limit];
        static FREE: std::sync::Mutex<$crate::table::Free> =
            std::sync::Mutex::new($crate::table::Free::new());
        $crate::table::Table::new($kind, &SLOTS, &FREE)
    }};
}
pub(crate) use table;

/// Exclusive access to an object.
pub(crate) struct Guard<T: 'static> {
    entry: LockGuard<'static, Entry<T>>,
}

impl<T> core::ops::Deref for Guard<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // A guard is made for an entry with a value only, and nobody else can take it out meanwhile.
        self.entry.value.as_ref().expect("an entry that is held has a value")
    }
}

impl<T> core::ops::DerefMut for Guard<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.entry.value.as_mut().expect("an entry that is held has a value")
    }
}

impl<T> Table<T> {
    pub(crate) const fn new(
        kind: Kind,
        slots: &'static [AtomicPtr<Slot<T>>],
        free: &'static Mutex<Free>,
    ) -> Table<T> {
        Table { kind, slots, free }
    }

    /// Adds an object.
    pub(crate) fn insert(&self, value: T) -> Result<Key, Fault> {
        self.insert_with(|_| value)
    }

    /// Adds an object that knows its key.
    pub(crate) fn insert_with(&self, make: impl FnOnce(Key) -> T) -> Result<Key, Fault> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let index = match free.removed.pop() {
            Some(index) => index,
            None if (free.used as usize) < self.slots.len() => {
                let slot = Box::new(Slot { entry: Lock::new(Entry { generation: 0, value: None }) });
                // Release, partner: the Acquire load in `slot`.
                self.slots[free.used as usize].store(Box::into_raw(slot), Release);
                free.used += 1;
                free.used - 1
            }
            None => return Err(Fault::TooMany { what: self.kind, limit: self.slots.len() }),
        };
        drop(free);
        let slot = self.slot(index).ok_or(Fault::InvalidKey(self.kind))?;
        let mut entry = slot.entry.lock();
        entry.generation = (entry.generation + 1) % Key::GENERATIONS;
        let key = Key::new(self.kind, entry.generation, index);
        entry.value = Some(make(key));
        Ok(key)
    }

    /// Exclusive access to the object with this key. Waits while another thread has it.
    #[inline(always)]
    pub(crate) fn lock(&self, key: Key) -> Result<Guard<T>, Fault> {
        let guard = self.guard(self.find(key)?)?;
        if guard.entry.generation != key.generation() {
            return Err(Fault::InvalidKey(self.kind));
        }
        Ok(guard)
    }

    /// As [`lock`](Table::lock), for the object that is in a slot now, whatever its generation.
    #[inline(always)]
    pub(crate) fn lock_index(&self, index: u32) -> Result<Guard<T>, Fault> {
        let Some(slot) = self.slot(index) else { return Err(Fault::InvalidKey(self.kind)) };
        self.guard(slot)
    }

    #[inline(always)]
    fn guard(&self, slot: &'static Slot<T>) -> Result<Guard<T>, Fault> {
        let entry = slot.entry.lock();
        if entry.is_poisoned() {
            return Err(Fault::Poisoned(self.kind));
        }
        if entry.value.is_none() {
            return Err(Fault::InvalidKey(self.kind));
        }
        Ok(Guard { entry })
    }

    /// Calls `each` with every object, one at a time. Those that a panic left in an unknown state are left out.
    pub(crate) fn for_each(&self, mut each: impl FnMut(&mut T)) {
        let used = self.free.lock().unwrap_or_else(PoisonError::into_inner).used;
        for index in 0..used {
            if let Ok(mut guard) = self.lock_index(index) {
                each(&mut guard);
            }
        }
    }

    /// Removes all objects.
    pub(crate) fn clear(&self) {
        let used = self.free.lock().unwrap_or_else(PoisonError::into_inner).used;
        for index in 0..used {
            let key = self.slot(index).and_then(|slot| {
                let entry = slot.entry.lock();
                entry.value.is_some().then(|| Key::new(self.kind, entry.generation, index))
            });
            // Somebody else may have removed it since.
            key.into_iter().for_each(|key| drop(self.remove(key)));
        }
    }

    /// Takes the object out; its key is invalid from then on.
    pub(crate) fn remove(&self, key: Key) -> Result<T, Fault> {
        let slot = self.find(key)?;
        let value = {
            let mut entry = slot.entry.lock();
            if entry.generation != key.generation() {
                return Err(Fault::InvalidKey(self.kind));
            }
            let value = entry.value.take().ok_or(Fault::InvalidKey(self.kind))?;
            // An object that a panic left in an unknown state can be removed all the same.
            entry.clear_poison();
            value
        };
        self.free.lock().unwrap_or_else(PoisonError::into_inner).removed.push(key.index());
        Ok(value)
    }

    #[inline(always)]
    fn find(&self, key: Key) -> Result<&'static Slot<T>, Fault> {
        if !key.is(self.kind) {
            return Err(Fault::InvalidKey(self.kind));
        }
        // `ok_or` would make the error, and drop it, in every call.
        let Some(slot) = self.slot(key.index()) else { return Err(Fault::InvalidKey(self.kind)) };
        Ok(slot)
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> Option<&'static Slot<T>> {
        // Acquire, partner: the Release store in `insert_with`.
        let slot = self.slots.get(index as usize)?.load(Acquire);
        // SAFETY: the pointer is NULL or comes from `Box::into_raw` in `insert_with`; slots are never freed.
        unsafe { slot.as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static TABLE: Table<String> = table!(String, 3, Kind::Send);

    #[test]
    fn old_and_forged_keys_are_refused_and_slots_are_used_again() {
        let first = TABLE.insert("first".into()).unwrap();
        let second = TABLE.insert_with(|key| format!("{}", key.index())).unwrap();
        assert_eq!(*TABLE.lock(second).unwrap(), second.index().to_string());
        TABLE.lock(first).unwrap().push('!');
        assert_eq!(TABLE.remove(first).unwrap(), "first!");
        assert!(TABLE.lock(first).is_err() && TABLE.remove(first).is_err());

        let third = TABLE.insert("third".into()).unwrap();
        assert_eq!(third.index(), first.index());
        assert!(TABLE.lock(first).is_err() && TABLE.remove(first).is_err());
        assert_eq!(*TABLE.lock(third).unwrap(), "third");
        for forged in [0, 1, u64::MAX, third.bits() + 1, third.bits() ^ 1 << 60, third.bits() + 1000] {
            assert!(TABLE.lock(Key::from_bits(forged)).is_err(), "{forged:#x}");
        }
        TABLE.insert("fourth".into()).unwrap();
        assert!(matches!(TABLE.insert("fifth".into()), Err(Fault::TooMany { limit: 3, .. })));
    }

    #[test]
    fn object_stays_unusable_after_a_panic_until_its_own_key_removes_it() {
        static TABLE: Table<u32> = table!(u32, 1, Kind::Send);
        let old = TABLE.insert(1).unwrap();
        TABLE.remove(old).unwrap();
        let key = TABLE.insert(2).unwrap();
        let panicked = std::panic::catch_unwind(|| {
            let _value = TABLE.lock(key).unwrap();
            panic!("on purpose");
        });
        assert!(panicked.is_err() && matches!(TABLE.lock(key), Err(Fault::Poisoned(Kind::Send))));
        assert!(TABLE.remove(old).is_err());
        assert!(matches!(TABLE.lock(key), Err(Fault::Poisoned(Kind::Send))), "an old key changes nothing");
        assert_eq!(TABLE.remove(key).unwrap(), 2);
        let next = TABLE.insert(3).unwrap();
        assert_eq!(*TABLE.lock(next).unwrap(), 3);
    }
}
