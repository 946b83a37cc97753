//! Tables of the objects that NCCL holds keys of.
//!
//! Slots are never freed, so a lookup needs no lock of the table and an old key finds at worst another object, which its
//! generation tells apart. A slot is used again after its object is removed.

use core::ops::DerefMut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{self, Acquire, Release};
use std::sync::{Mutex, PoisonError};

use crate::abi::Fault;
use crate::key::{Key, Kind};
use crate::lock::{Lock, LockGuard};

/// The shared parts of a table, and their memory orderings. Tests replace the parts with loom's, and one of the orderings.
pub(crate) trait Parts: 'static {
    /// Of the store of a new slot. Partner: `FIND`.
    const PUBLISH: Ordering = Release;
    /// Of the load in a lookup. Partner: `PUBLISH`.
    const FIND: Ordering = Acquire;
    /// An atomic pointer to a slot.
    type Pointer<S: 'static>;
    /// A mutex.
    type FreeLock;

    fn load<S: 'static>(pointer: &Self::Pointer<S>) -> *mut S;
    fn store<S: 'static>(pointer: &Self::Pointer<S>, slot: *mut S);
    fn lock(free: &Self::FreeLock) -> impl DerefMut<Target = Free>;
}

/// The parts that ship.
pub(crate) struct Real;

impl Parts for Real {
    type Pointer<S: 'static> = AtomicPtr<S>;
    type FreeLock = Mutex<Free>;

    #[inline(always)]
    fn load<S: 'static>(pointer: &AtomicPtr<S>) -> *mut S {
        pointer.load(Self::FIND)
    }

    fn store<S: 'static>(pointer: &AtomicPtr<S>, slot: *mut S) {
        pointer.store(slot, Self::PUBLISH);
    }

    fn lock(free: &Mutex<Free>) -> impl DerefMut<Target = Free> {
        free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Objects of one kind, as many as it has slots. It is constant itself, so that a lookup does not load it.
pub(crate) struct Table<T: 'static, P: Parts = Real> {
    kind: Kind,
    slots: &'static [P::Pointer<Slot<T>>],
    free: &'static P::FreeLock,
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

impl<T> DerefMut for Guard<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.entry.value.as_mut().expect("an entry that is held has a value")
    }
}

impl<T, P: Parts> Table<T, P> {
    pub(crate) const fn new(
        kind: Kind,
        slots: &'static [P::Pointer<Slot<T>>],
        free: &'static P::FreeLock,
    ) -> Table<T, P> {
        Table { kind, slots, free }
    }

    /// Adds an object.
    pub(crate) fn insert(&self, value: T) -> Result<Key, Fault> {
        self.insert_with(|_| value)
    }

    /// Adds an object that knows its key.
    pub(crate) fn insert_with(&self, make: impl FnOnce(Key) -> T) -> Result<Key, Fault> {
        let mut free = P::lock(self.free);
        let index = match free.removed.pop() {
            Some(index) => index,
            None if (free.used as usize) < self.slots.len() => {
                let slot = Box::new(Slot { entry: Lock::new(Entry { generation: 0, value: None }) });
                // `Parts::PUBLISH` names the partner.
                P::store(&self.slots[free.used as usize], Box::into_raw(slot));
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
        let used = P::lock(self.free).used;
        for index in 0..used {
            if let Ok(mut guard) = self.lock_index(index) {
                each(&mut guard);
            }
        }
    }

    /// Removes all objects to which the condition applies.
    pub(crate) fn remove_if(&self, condition: impl Fn(&T) -> bool) {
        let used = P::lock(self.free).used;
        for index in 0..used {
            let key = self.slot(index).and_then(|slot| {
                let entry = slot.entry.lock();
                let applies = entry.value.as_ref().is_some_and(&condition);
                applies.then(|| Key::new(self.kind, entry.generation, index))
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
        P::lock(self.free).removed.push(key.index());
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
        // `Parts::FIND` names the partner.
        let slot = P::load(self.slots.get(index as usize)?);
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

#[cfg(all(test, loom))]
mod loom_tests {
    use core::sync::atomic::Ordering::Relaxed;

    use loom::thread;

    use super::*;

    /// Loom's parts, with the orderings that ship, or with one of them replaced.
    macro_rules! loom_parts {
        ($name:ident $(, $ordering:ident)?) => {
            struct $name;
            impl Parts for $name {
                $(const $ordering: Ordering = Relaxed;)?
                type Pointer<S: 'static> = loom::sync::atomic::AtomicPtr<S>;
                type FreeLock = loom::sync::Mutex<Free>;

                fn load<S: 'static>(pointer: &Self::Pointer<S>) -> *mut S {
                    pointer.load(Self::FIND)
                }

                fn store<S: 'static>(pointer: &Self::Pointer<S>, slot: *mut S) {
                    pointer.store(slot, Self::PUBLISH);
                }

                fn lock(free: &Self::FreeLock) -> impl DerefMut<Target = Free> {
                    free.lock().unwrap()
                }
            }
        };
    }
    loom_parts!(Loom);
    loom_parts!(WeakPublish, PUBLISH);
    loom_parts!(WeakFind, FIND);

    /// A table that is never freed, as the real ones are.
    macro_rules! new_table {
        ($parts:ty, $limit:expr) => {{
            let pointer = |_| loom::sync::atomic::AtomicPtr::new(core::ptr::null_mut());
            let slots: &'static [_] = Box::leak((0..$limit).map(pointer).collect());
            let free = Box::leak(Box::new(loom::sync::Mutex::new(Free::new())));
            let table: &'static Table<u32, $parts> = Box::leak(Box::new(Table::new(Kind::Send, slots, free)));
            table
        }};
    }

    /// A thread uses a key that it was not given, while another one adds the first object: it finds a whole object, or nothing.
    macro_rules! check_first_lookup {
        ($parts:ty) => {
            loom::model(|| {
                let table = new_table!($parts, 1);
                let adder = thread::spawn(move || table.insert(7).unwrap());
                let key = Key::new(Kind::Send, 1, 0);
                if let Ok(value) = table.lock(key) {
                    assert_eq!(*value, 7);
                }
                assert_eq!(adder.join().unwrap(), key);
                assert_eq!(*table.lock(key).unwrap(), 7);
            })
        };
    }

    #[test]
    fn loom_lookup_finds_a_whole_object_or_nothing() {
        check_first_lookup!(Loom);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_twin_weak_publish_is_caught() {
        check_first_lookup!(WeakPublish);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_twin_weak_find_is_caught() {
        check_first_lookup!(WeakFind);
    }

    /// A thread uses the key of an object while another thread removes the object and adds one, which gets the same slot. `read` returns
    /// the object that the key finds.
    fn check_old_key(read: fn(&Table<u32, Loom>, Key) -> Option<u32>) {
        loom::model(move || {
            let table = new_table!(Loom, 1);
            let old = table.insert(1).unwrap();
            let other = thread::spawn(move || {
                assert_eq!(table.remove(old).unwrap(), 1);
                table.insert(2).unwrap()
            });
            assert!(matches!(read(table, old), None | Some(1)), "an old key finds another object");
            let new = other.join().unwrap();
            assert_eq!(new.index(), old.index());
            assert_eq!((read(table, old), read(table, new)), (None, Some(2)));
        });
    }

    #[test]
    fn loom_old_key_never_finds_another_object() {
        check_old_key(|table, key| table.lock(key).ok().map(|value| *value));
    }

    /// A twin that must fail: it checks the generation, and then takes the lock again.
    #[test]
    #[should_panic(expected = "an old key finds another object")]
    fn loom_twin_lookup_that_checks_before_it_locks_is_caught() {
        check_old_key(|table, key| {
            drop(table.lock(key).ok()?);
            table.lock_index(key.index()).ok().map(|value| *value)
        });
    }

    /// Two threads remove the same object, and add one each. One of them gets the object, and the new ones get slots of their own.
    fn check_two_removes(remove: fn(&Table<u32, Loom>, Key) -> Result<u32, Fault>) {
        loom::model(move || {
            let table = new_table!(Loom, 2);
            let key = table.insert(1).unwrap();
            let run = move |value| (remove(table, key).ok(), table.insert(value).unwrap());
            let other = thread::spawn(move || run(20));
            let results = [run(10), other.join().unwrap()];
            let [(here, ten), (there, twenty)] = results;
            assert!(here.xor(there) == Some(1), "the object was lost, or removed twice");
            assert_ne!(ten.index(), twenty.index(), "two objects in one slot");
            assert_eq!((*table.lock(ten).unwrap(), *table.lock(twenty).unwrap()), (10, 20));
            assert!(matches!(table.insert(30), Err(Fault::TooMany { limit: 2, .. })));
        });
    }

    #[test]
    fn loom_object_is_removed_once_and_its_slot_is_used_again_once() {
        check_two_removes(Table::remove);
    }

    /// A twin that must fail: the slot is free before the object is taken out of it.
    #[test]
    #[should_panic(expected = "two objects in one slot")]
    fn loom_twin_slot_that_is_freed_too_early_is_caught() {
        check_two_removes(|table, key| {
            drop(table.lock(key)?);
            Loom::lock(table.free).removed.push(key.index());
            let mut entry = table.find(key)?.entry.lock();
            if entry.generation != key.generation() {
                return Err(Fault::InvalidKey(table.kind));
            }
            entry.value.take().ok_or(Fault::InvalidKey(table.kind))
        });
    }

    /// A thread removes all objects while another thread removes one of them and adds one. `clear` removes them.
    fn check_clear(clear: fn(&Table<u32, Loom>)) {
        loom::model(move || {
            let table = new_table!(Loom, 2);
            let old = table.insert(1).unwrap();
            let other = thread::spawn(move || {
                table.remove(old).ok();
                table.insert(2).unwrap()
            });
            clear(table);
            let new = other.join().unwrap();
            let left = usize::from(table.lock(new).is_ok());
            let added = (0..3).filter_map(|value| table.insert(value).ok()).collect::<Vec<_>>();
            assert_eq!(left + added.len(), 2, "a slot was lost, or is used twice");
            assert!(added.iter().zip(0..).all(|(key, value)| *table.lock(*key).unwrap() == value));
        });
    }

    #[test]
    fn loom_clear_and_remove_free_each_slot_once() {
        check_clear(|table| table.remove_if(|_| true));
    }

    /// A twin that must fail: it frees the slots of objects that another thread has removed meanwhile.
    #[test]
    #[should_panic(expected = "a slot was lost, or is used twice")]
    fn loom_twin_clear_that_does_not_check_again_is_caught() {
        check_clear(|table| {
            let used = Loom::lock(table.free).used;
            for index in 0..used {
                if table.lock_index(index).is_ok() {
                    table.slot(index).unwrap().entry.lock().value = None;
                    Loom::lock(table.free).removed.push(index);
                }
            }
        });
    }
}
